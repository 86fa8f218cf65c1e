"""Meta kernels: those of torch, which ColossalAI replaces when it is imported."""

import sys

_PATCH = "colossalai._analyzer._subclasses._meta_registration"


def restore_meta_kernels() -> None:
    """Take back what ColossalAI registers for tensors on meta, which was made for torch 1.12: with it a number read on
    meta is 0 instead of an error, and convolutions and norms have shapes and dtypes by formulas of then."""
    library = getattr(sys.modules.get(_PATCH), "meta_lib", None)
    if library is not None and library._op_impls:
        library._destroy()
        library._op_impls.clear()
