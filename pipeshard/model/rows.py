"""Rows: how many samples a batch has, and which dimension of each of its leaves counts them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pipeshard.errors import BatchError, ConfigurationError
from pipeshard.model.nested import is_entries

BatchDims = Mapping[str, int | None]  # by path: the dimension that counts the samples; None: none does


def count_rows(
    paths: Sequence[str], leaves: Sequence[Any], main_input: str | None = None, declared: BatchDims | None = None
) -> tuple[int, tuple[int | None, ...]]:
    """The number of samples, and for each leaf the dimension that counts them (None: every microbatch gets it whole).

    The main input's first dimension counts the samples, or the one that is declared for it. Of other tensors the first
    dimension does if it has their number; of lists without tensors, and tuples with strings, the entries do likewise.
    Raises BatchError where there is no tensor, no sample, or a declared dimension that has another size.
    """
    declared = declared or {}
    named = dict(zip(paths, leaves, strict=True))
    tensors = {path: leaf for path, leaf in named.items() if isinstance(leaf, Tensor) and leaf.ndim > 0}
    if not tensors:
        kinds = {path: type(leaf).__name__ for path, leaf in named.items()}
        raise BatchError(
            f"the batch holds no tensor with a batch dimension, only {kinds or 'nothing'}: "
            "a batch is a mapping, a tuple or a list of tensors whose first dimension counts the samples"
        )
    counting = (path for path in tensors if declared.get(path, 0) is not None)
    main = main_input if main_input in tensors else next(counting, None)
    if main is None or declared.get(main, 0) is None:
        raise BatchError(f"batch_dims says of {main or 'every tensor'} that it does not count the samples: it has to")
    dim = _checked(main, tensors[main], declared.get(main, 0))
    rows = tensors[main].shape[dim]
    if rows == 0:
        raise BatchError(f"the batch is empty: {main} has shape {tuple(tensors[main].shape)}")
    for path in declared.keys() & named.keys():
        _refuse_other_rows(path, named[path], declared[path], rows, f"dimension {dim} of {main}")
    return rows, tuple(
        _counted(leaf, declared[path]) if path in declared else _row_dim(path, leaf, rows)
        for path, leaf in named.items()
    )


def check_declared(declared: Any) -> None:
    """Raises ConfigurationError for what is no mapping of paths to dimensions or None."""
    good = declared is None or (
        isinstance(declared, Mapping)
        and all(isinstance(path, str) for path in declared)
        and all(dim is None or type(dim) is int for dim in declared.values())
    )
    if not good:
        raise ConfigurationError(
            f"batch_dims={declared!r} is no mapping of a leaf's path to a dimension or None: batch_dims={{'frames': 1}}"
        )


def refuse_unknown(paths: Sequence[str], declared: BatchDims) -> None:
    """Raises ConfigurationError for a declared path that the batch does not have."""
    unknown = sorted(declared.keys() - set(paths))
    if unknown:
        raise ConfigurationError(f"batch_dims has {unknown}, which the batch does not: it has {list(paths)}")


def _row_dim(path: str, leaf: Any, rows: int) -> int | None:
    if isinstance(leaf, Tensor):
        if path == "position_ids" and leaf.ndim == 3 and leaf.shape[1] == rows:  # (3, b, s): one plane per rotary axis
            return 1
        return 0 if leaf.ndim > 0 and leaf.shape[0] == rows else None
    if not is_entries(leaf) or len(leaf) != rows:
        return None
    return 0 if type(leaf) is list or any(isinstance(entry, str) for entry in leaf) else None


def _counted(leaf: Any, dim: int | None) -> int | None:
    return dim if dim is None or not isinstance(leaf, Tensor) else dim % leaf.ndim


def _checked(path: str, leaf: Any, dim: int | None) -> int:
    ndim = leaf.ndim if isinstance(leaf, Tensor) else int(is_entries(leaf))
    if dim is None or not -ndim <= dim < ndim:
        what = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
        raise BatchError(f"batch_dims says that dimension {dim} of {path} counts the samples, but it is {what}")
    return dim % ndim


def _refuse_other_rows(path: str, leaf: Any, dim: int | None, rows: int, where: str) -> None:
    if dim is None:
        return
    dim = _checked(path, leaf, dim)
    size = leaf.shape[dim] if isinstance(leaf, Tensor) else len(leaf)
    if size != rows:
        raise BatchError(
            f"batch_dims says that dimension {dim} of {path} counts the samples: it has {size}, but there are {rows} "
            f"({where}). Declare the dimension that counts them for both, or None for what every microbatch gets whole"
        )
