"""Stand-ins: throw-away tensors in the place of real ones while a model is traced."""

import contextlib
import math
import mmap
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeshard.model.shapes import TensorSpec

# Memory that is never touched is not to be counted: a stand-in may be larger than the machine has.
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)  # 0x4000: MAP_NORESERVE


class _StandIn(torch.autograd.Function):
    """Zeros that require grad and are no leaf, so that they may be written to in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, spec: TensorSpec, device: torch.device) -> Tensor:
        return _zeros(spec, device)


def _zeros(spec: TensorSpec, device: torch.device) -> Tensor:
    """Zeros whose memory the system gives only where glue touches it: those of a large model are mostly passed on."""
    if device.type != "cpu" or 0 in spec.shape:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    size = math.prod(spec.shape) * spec.dtype.itemsize
    untouched = torch.from_numpy(np.frombuffer(mmap.mmap(-1, size, flags=_FLAGS), dtype=np.uint8))
    return torch.empty(0, dtype=spec.dtype).set_(untouched.untyped_storage()).resize_(spec.shape)


def stand_in(spec: TensorSpec, device: torch.device) -> Tensor:
    """Zeros of this kind."""
    if spec.requires_grad:
        return _StandIn.apply(torch.zeros((), requires_grad=True), spec, device)
    return _zeros(spec, device)


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """The same kind of tensor there, with its values: masks and positions that no unit made have their true ones."""
    copied = stand_in(TensorSpec.of(tensor), device)
    copied.data.copy_(tensor)
    return copied


def blank_state(module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """A unit's own tensors where it runs, tied ones tied: what has values there keeps them, the rest are zeros."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    blanks: dict[Tensor, Tensor] = {}
    for _, t in named:
        if t not in blanks:
            values, dtype = getattr(t, "pipeshard_values", t), getattr(t, "pipeshard_dtype", t.dtype)
            real = values.device == device and not hasattr(t, "pipeshard_trainable") and not isinstance(t, DTensor)
            there = values.detach().to(dtype) if real else torch.zeros(t.shape, dtype=dtype, device=device)
            blanks[t] = nn.Parameter(there, is_trainable(t)) if isinstance(t, nn.Parameter) else there.clone()
    return {name: blanks[t] for name, t in named}


@contextlib.contextmanager
def as_trained(model: nn.Module) -> Iterator[None]:
    """Inside, released parameters require gradients as they do on the stages that hold them."""
    ghosts = [p for p in model.parameters() if is_trainable(p) and not p.requires_grad]
    for ghost in ghosts:
        ghost.requires_grad_(True)
    try:
        yield
    finally:
        for ghost in ghosts:
            ghost.requires_grad_(False)


def is_trainable(tensor: Tensor) -> bool:
    """Whether a parameter is trained, on this stage or, where this one released it, on another."""
    return getattr(tensor, "pipeshard_trainable", tensor.requires_grad)
