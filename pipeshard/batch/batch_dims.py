"""Batch dims: how many samples a batch has, and which dimension of each of its leaves counts them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pipeshard.batch.tree import Tree, flatten, has_tensors, is_entries, tensors_in
from pipeshard.errors import BatchError, ConfigurationError
from pipeshard.hf import POSITIONS

BatchDims = Mapping[str, int | None]  # by path: the dimension that counts the samples; None: none does


def read_leaves(
    data: Any, main_input: str | None, declared: BatchDims, known: dict[str, bool]
) -> tuple[tuple[str, ...], tuple[Any, ...], Tree]:
    """Paths, leaves and tree of a batch, in which a list of one tensor (or mapping of tensors) a sample is a leaf.

    `known` has which lists are such ones, by path, as far as known from earlier batches, and learns from this one.
    Raises BatchError where that is not clear, or where a list has another number of entries than there are samples.
    """
    lists: dict[str, Sequence[Any]] = {}
    paths, leaves, tree = flatten(data, lambda path, entries: bool(lists.update({path: entries})))
    if not lists:
        return paths, leaves, tree
    outside = [k for k, path in enumerate(paths) if not any(path.startswith(f"{_inner(name)}[") for name in lists)]
    chosen = outside if any(isinstance(leaves[k], Tensor) for k in outside) else range(len(paths))
    rows, _ = count_rows([paths[k] for k in chosen], [leaves[k] for k in chosen], main_input, declared)
    return flatten(data, lambda path, entries: _is_by_sample(path, entries, rows, declared, known))


def _inner(path: str) -> str:
    """How the paths of what is in a list begin."""
    return path if path.startswith(("[", ".")) else f"['{path}']"


def _is_by_sample(path: str, entries: Sequence[Any], rows: int, declared: BatchDims, known: dict[str, bool]) -> bool:
    """Whether a list or tuple that holds tensors has one entry a sample, rather than entries that have samples."""
    inner = f"{_inner(path)}["
    if path in declared or any(name.startswith(inner) for name in declared):
        return declared.get(path) is not None
    if path in known and (len(entries) == rows or not known[path]):
        return known[path]
    if path in known:
        raise BatchError(f"{path} had one entry a sample in earlier batches, and now has {len(entries)} for {rows}")
    if rows == 1 or len(entries) != rows:
        known |= {path: False} if rows > 1 else {}
        return False
    tensors = [tensors_in(entry) for entry in entries]
    if not all(tensors) or len({type(entry) for entry in entries}) > 1:
        return False  # a structure of several things
    shapes = [tuple(leaf.shape for leaf in leaves) for leaves in tensors]
    with_samples = all(shape[:1] == (rows,) for entry in shapes for shape in entry)
    if with_samples and (type(entries) is tuple or len({tuple(shape[1:] for shape in entry) for entry in shapes}) > 1):
        return False
    if with_samples or (type(entries) is tuple and len(set(shapes)) == 1):
        raise BatchError(
            f"there are {rows} samples, and {path} is a {type(entries).__name__} of as many entries, which may be one "
            f"for each sample, or not: say batch_dims={{{path!r}: 0}} if they are, or {{{path!r}: None}} if not"
        )
    known[path] = True
    return True


def count_rows(
    paths: Sequence[str], leaves: Sequence[Any], main_input: str | None = None, declared: BatchDims | None = None
) -> tuple[int, tuple[int | None, ...]]:
    """The number of samples, and for each leaf the dimension that counts them (None: every microbatch gets it whole).

    The main input's first dimension counts the samples, or the one that is declared for it. Of other tensors the first
    dimension does if it has their number; of lists without tensors, and tuples with strings, the entries do likewise.
    Raises BatchError without a tensor or a sample, and for a declared dimension that has another size.
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
    """Raises ConfigurationError for anything but a mapping of paths to dimensions or None."""
    good = declared is None or (
        isinstance(declared, Mapping)
        and all(isinstance(path, str) for path in declared)
        and all(dim is None or type(dim) is int for dim in declared.values())
    )
    if not good:
        raise ConfigurationError(
            f"batch_dims must map the paths of leaves to a dimension or None, such as {{'frames': 1}}, got {declared!r}"
        )


def refuse_unknown(paths: Sequence[str], declared: BatchDims) -> None:
    """Raises ConfigurationError for a declared path that the batch does not have."""
    unknown = sorted(declared.keys() - set(paths))
    if unknown:
        raise ConfigurationError(f"batch_dims has {unknown}, which the batch does not: it has {list(paths)}")


def _row_dim(path: str, leaf: Any, rows: int) -> int | None:
    if isinstance(leaf, Tensor):
        if path == POSITIONS and leaf.ndim == 3 and leaf.shape[1] == rows:  # (3, b, s): one plane per rotary axis
            return 1
        return 0 if leaf.ndim > 0 and leaf.shape[0] == rows else None
    if not is_entries(leaf) or len(leaf) != rows:
        return None
    if has_tensors(leaf):
        return 0
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
    if size != rows and not (isinstance(leaf, Tensor) and dim == 0 and size > rows and size % rows == 0):
        raise BatchError(
            f"batch_dims says that dimension {dim} of {path} counts the samples: it has {size}, but there are {rows} "
            f"({where}). Declare the dimension that counts them for both, or None for what every microbatch gets whole"
        )
