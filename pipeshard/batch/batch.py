"""Batch: the inputs of a model, the batch dimension of each leaf, and their split into microbatches."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeshard.batch.tree import Bare, Tree, flatten, has_tensors, is_entries, map_tensors, tensors_in, text
from pipeshard.errors import BatchError, ConfigurationError, counted
from pipeshard.hf import POSITIONS

BatchDims = Mapping[str, int | None]  # by path: the leaf's batch dimension, or None if the leaf has none
FOR_CRITERION = "criterion."  # prefix of inputs that only the criterion receives


class LeafSpan(NamedTuple):
    """The token positions of a leaf in a microbatch: the first `length` of the `total` positions in the batch."""

    length: int
    total: int


class Selection(NamedTuple):
    """The part of a batch that a microbatch contains: the indices of its samples and, by path, each leaf's LeafSpan."""

    rows: tuple[int, ...]
    spans: Mapping[str, LeafSpan]


@dataclass(frozen=True)
class Batch:
    """One batch as a flat list of leaves.

    `data` is the model's input. A mapping is passed as keyword arguments, a tuple or list as positional arguments, and
    any other object as the only argument. `rows` is the number of samples. `row_dims[k]` is the dimension of leaf k
    that counts the samples (for a list or array with one entry per sample: 0), or None. If `row_dims[k]` is None,
    dimension 0 or the last dimension (of a list or array: its length) may count entries, such as images. `owners` maps
    the path of such a leaf to each sample's number of entries, or to () if these numbers are unknown. Every microbatch
    receives all other leaves without a row dimension in full (a scalar, a (1, 1, s, s) mask, a string, ...). The model
    is called with the first `taken` positional entries (None: all). A criterion receives all entries. Leaves whose
    paths are in `exact` keep their precision if the model is cast to 16 bits. `entry` names the module that is called
    with the batch, or "" for the model itself. `selection` is the part of the full batch that this microbatch contains,
    or None for consecutive samples with all their positions.
    """

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    tree: Tree
    rows: int
    row_dims: tuple[int | None, ...]
    owners: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    taken: int | None = None
    exact: frozenset[str] = frozenset()
    entry: str = ""
    selection: Selection | None = None

    @classmethod
    def of(
        cls,
        data: Any,
        main_input: str | None = None,
        declared: BatchDims | None = None,
        lists: dict[str, bool] | None = None,
    ) -> Self:
        """Create a Batch from the data that a dataloader yielded. `main_input` names the leaf whose dimension 0 (or
        declared dimension) counts the samples. `declared` maps paths to the batch dimensions that the user declared.
        `lists` maps the paths of known lists of tensors to whether they have one entry per sample. This call updates
        `lists`.

        Raises BatchError if the batch has no tensor with a batch dimension or no sample, if it has a nested tensor, an
        ambiguous list or a mapping that cannot be built from a dict, if the length of a list with one entry per sample
        is not the number of samples, or if `declared` does not fit the batch.
        """
        declared = declared or {}
        paths, leaves, tree, main = _read_leaves(data, main_input, declared, {} if lists is None else lists)
        for path in (path for path, leaf in zip(paths, leaves) if any(tensor.is_nested for tensor in tensors_in(leaf))):
            raise BatchError(
                f"{path}: nested tensors are not supported. Pass a padded tensor, tensor.to_padded_tensor(0.0), and a "
                "mask"
            )
        batch = cls(leaves, paths, tree, *_count_rows(paths, leaves, main, declared))
        # Inference tensors lack the version counter that detects in-place writes.
        return batch.converted(lambda _, tensor: tensor.clone() if tensor.is_inference() else tensor)

    @property
    def data(self) -> Any:
        return self.tree.unflatten(self.leaves)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {path: leaf for path, leaf in zip(self.paths, self.leaves, strict=True) if isinstance(leaf, Tensor)}

    @property
    def all_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, including tensors inside lists, with the path of its leaf."""
        return ((path, tensor) for path, leaf in zip(self.paths, self.leaves) for tensor in tensors_in(leaf))

    @property
    def device(self) -> torch.device:
        """The device of the first tensor, including tensors inside lists."""
        return next(tensor.device for _, tensor in self.all_tensors)

    def by_sample(self, path: str) -> Tensor:
        """The tensor at this path, with its batch dimension moved to the front."""
        dim = self.row_dims[self.paths.index(path)]
        return self.tensors[path].movedim(dim or 0, 0)

    @property
    def entries(self) -> dict[str, list[Any] | tuple[Any, ...] | NDArray[Any]]:
        """The lists, tuples and numpy arrays that are divided by sample, by path: those with one entry per sample, and
        those with owners."""
        return {path: leaf for path, leaf in zip(self.paths, self.leaves, strict=True) if self._is_divided(path, leaf)}

    @property
    def parted(self) -> frozenset[str]:
        """The paths of the leaves that are split into one part per microbatch."""
        pairs = zip(self.paths, self.row_dims, strict=True)
        return frozenset(path for path, dim in pairs if dim is not None) | self.owners.keys()

    @property
    def others(self) -> tuple[tuple[str, str], ...]:
        """The leaves that are not tensors, as (path, text). The text shows whether a list or array is divided by
        sample."""
        return tuple(
            (path, "entries of samples" if self._is_divided(path, leaf) else text(leaf))
            for path, leaf in zip(self.paths, self.leaves, strict=True)
            if not isinstance(leaf, Tensor)
        )

    def call(self, model: nn.Module | Callable[..., Any]) -> Any:
        """Call `model`, or its module `entry`, with this batch. Entries that only the criterion receives are
        omitted."""
        data = self.data
        if self.entry:
            assert isinstance(model, nn.Module)
            model = model.get_submodule(self.entry)
        if not isinstance(data, dict):
            return model(*data[: self.taken])
        return model(**{name: value for name, value in data.items() if not str(name).startswith(FOR_CRITERION)})

    def for_criterion(self) -> Any:
        """The batch as the dataloader yielded it, except that a mapping becomes a dict."""
        return self.data[0] if self.tree.kind is Bare else self.data

    def map(self, fn: Callable[[str, Tensor, int | None], Tensor | None]) -> Self:
        """This batch with each tensor leaf replaced by fn(path, tensor, row dimension)."""
        leaves = tuple(
            fn(path, leaf, dim) if isinstance(leaf, Tensor) else leaf
            for path, leaf, dim in zip(self.paths, self.leaves, self.row_dims, strict=True)
        )
        counting = zip(leaves, self.row_dims, strict=True)
        rows = (leaf.shape[dim] for leaf, dim in counting if dim is not None and isinstance(leaf, Tensor))
        return replace(self, leaves=leaves, rows=next(rows, self.rows))

    def without(self, paths: Collection[str]) -> Self:
        """This batch with the leaves at these paths replaced by None."""
        leaves = tuple(None if path in paths else leaf for path, leaf in zip(self.paths, self.leaves, strict=True))
        return replace(self, leaves=leaves)

    def counted(self, dims: BatchDims) -> Self:
        """This batch with some row dimensions replaced. `dims` maps paths to the new dimensions (None: no row
        dimension). Leaves at these paths have no owners."""
        pairs = zip(self.paths, self.row_dims, strict=True)
        owners = {path: counts for path, counts in self.owners.items() if path not in dims}
        return replace(self, row_dims=tuple(dims.get(path, dim) for path, dim in pairs), owners=owners)

    def owned(self, owners: Mapping[str, tuple[int, ...]]) -> Self:
        """This batch with these `owners`. Leaves with owners have no row dimension."""
        return replace(self.counted(dict.fromkeys(owners)), owners=owners)

    def to(self, device: torch.device) -> Self:
        """This batch with all tensors on `device`."""
        return self.converted(lambda _, tensor: tensor.to(device, non_blocking=device.type != "cpu"))

    def converted(self, fn: Callable[[str, Tensor], Tensor]) -> Self:
        """This batch with each tensor, including tensors inside lists, replaced by the tensor of the same shape that
        fn(the leaf's path, tensor) returns."""

        def convert(path: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) and not has_tensors(leaf):
                return leaf
            return map_tensors(partial(fn, path), leaf)

        return replace(self, leaves=tuple(map(convert, self.paths, self.leaves)))

    def copied(self, paths: Collection[str]) -> Self:
        """This batch with copies of the tensors at these paths, including tensors inside lists. Copies each tensor only
        once."""
        copies: dict[Any, Tensor] = {}

        def copy(path: str, tensor: Tensor) -> Tensor:
            if path not in paths:
                return tensor
            key = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
            return copies[key] if key in copies else copies.setdefault(key, tensor.clone())

        return self.converted(copy)

    @property
    def num_tokens(self) -> int:
        """The number of elements of `input_ids`, including padding, or 0 if there are no `input_ids`."""
        tokens = self.tensors.get("input_ids")
        return 0 if tokens is None else tokens.numel()

    def take(self, rows: Tensor) -> Self:
        """A batch with copies of the samples at these indices (an int64 tensor)."""
        lists = self.entries
        taken = self._pick(
            rows.tolist(), lambda leaf, dim, at: leaf.index_select(dim, torch.tensor(at).to(leaf.device))
        )
        return taken.converted(lambda path, tensor: tensor.clone() if path in lists else tensor)

    def split(self, num_microbatches: int | None = None, microbatch_size: int | None = None) -> list[Self]:
        """Split the batch into microbatches of consecutive samples. The tensors of the microbatches are views.

        With `num_microbatches`, sizes differ by at most one. There are never more microbatches than samples. With
        `microbatch_size`, all microbatches have this size, except that the last one may be smaller.
        """
        sizes = split_sizes(self.rows, num_microbatches, microbatch_size)
        return [self._narrow(end - size, size) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]

    def _narrow(self, start: int, length: int) -> Self:
        if length == self.rows:
            return self
        rows = range(start, start + length)

        def view(leaf: Tensor, dim: int, at: Sequence[int]) -> Tensor:
            part = leaf.narrow(dim, at[0] if at else 0, len(at))
            return part if leaf.requires_grad else part.data  # .data counts its in-place writes separately

        return self._pick(rows, view)

    def _pick(self, rows: Sequence[int], select: Callable[[Tensor, int, Sequence[int]], Tensor]) -> Self:
        """A batch of the samples with the indices `rows`. `select(leaf, dimension, indices)` returns a tensor's entries
        at `indices`."""

        def pick(path: str, leaf: Any, dim: int | None) -> Any:
            owners = self.owners.get(path)
            if owners is not None:
                entries = [entry for row in rows for entry in self._entries(path, owners, row)]
                if not entries:
                    return None  # as for a batch without images
                if not isinstance(leaf, Tensor):
                    return _entries_at(leaf, entries)
                return select(leaf, 0 if len(leaf) == sum(owners) else leaf.ndim - 1, entries)
            if is_entries(leaf, dim):
                return _entries_at(leaf, rows)
            return leaf if dim is None or not isinstance(leaf, Tensor) else select(leaf, dim, rows)

        leaves = tuple(map(pick, self.paths, self.leaves, self.row_dims))
        owners = {path: tuple(counts[row] for row in rows) for path, counts in self.owners.items() if counts}
        return replace(self, leaves=leaves, rows=len(rows), owners=owners)

    def _is_divided(self, path: str, leaf: Any) -> bool:
        return is_entries(leaf, 0 if path in self.owners else self.row_dims[self.paths.index(path)])

    def _entries(self, path: str, owners: tuple[int, ...], row: int) -> range:
        if not owners:
            count = len(self.leaves[self.paths.index(path)])
            raise BatchError(
                f"{path} has {counted(count, 'entry')} for {counted(self.rows, 'sample')}, but "
                "neither placeholder tokens in input_ids nor counts in the batch show which entries belong to which "
                "sample. If every sample has the same number of entries, pass "
                f"PipelinePlugin(batch_dims={{{path!r}: 0}}). If every microbatch needs all entries, pass "
                f"batch_dims={{{path!r}: None}}. Otherwise, pass num_microbatches=1"
            )
        first = sum(owners[:row])
        return range(first, first + owners[row])


def _entries_at(entries: Any, indices: Sequence[int]) -> Any:
    """The entries of a list, tuple or numpy array at these indices."""
    if isinstance(entries, np.ndarray):
        return entries[list(indices)]
    return type(entries)(entries[k] for k in indices)


def split_sizes(rows: int, num_microbatches: int | None, microbatch_size: int | None) -> list[int]:
    """The number of samples in each microbatch of a batch with `rows` samples; see `Batch.split`."""
    if microbatch_size is not None:
        return [min(microbatch_size, rows - start) for start in range(0, rows, microbatch_size)]
    m = min(num_microbatches or 1, rows)
    return [rows // m + (k < rows % m) for k in range(m)]


def _read_leaves(
    data: Any, main_input: str | None, declared: BatchDims, known: dict[str, bool]
) -> tuple[tuple[str, ...], tuple[Any, ...], Tree, str | None]:
    """The paths, leaves and tree of a batch, and the path of the leaf that counts the samples, if known. A list with
    one tensor (or one mapping of tensors) per sample is a single leaf.

    `known` maps the paths of lists in earlier batches to whether they have one entry per sample. This call updates
    `known`. Raises BatchError if it is ambiguous whether a list has one entry per sample, or if the length of a list
    with one entry per sample is not the number of samples.
    """
    lists: dict[str, Sequence[Any]] = {}
    paths, leaves, tree = flatten(data, lambda path, entries: bool(lists.update({path: entries})))
    if not lists:
        return paths, leaves, tree, main_input
    outside = [k for k, path in enumerate(paths) if not _is_inside(path, lists)]
    chosen = [k for k in outside if isinstance(leaves[k], Tensor) and leaves[k].ndim > 0]
    main = main_input
    if not chosen and (counting := _counting_lists(lists, declared, known)):
        main = main_input if main_input in counting else counting[0]
        known |= dict.fromkeys(counting, True)
        rows = len(lists[main])
    else:
        chosen = outside if chosen else list(range(len(paths)))
        rows, _ = _count_rows([paths[k] for k in chosen], [leaves[k] for k in chosen], main_input, declared)
    return *flatten(data, lambda path, entries: _is_by_sample(path, entries, rows, declared, known)), main


def _counting_lists(lists: Mapping[str, Sequence[Any]], declared: BatchDims, known: Mapping[str, bool]) -> list[str]:
    """The lists with one entry per sample, in a batch whose tensors are all in lists. If no list certainly has one
    entry per sample, returns an empty list, or raises BatchError (see `_refuse_unclear`).

    A list certainly has one entry per sample in any of these cases:

    - The list is declared or known.
    - Its entries are mappings, and the tensors of the batch have different numbers of rows.
    - Its entries differ only in their number of rows, like boxes.

    The result then also includes all other lists of this length.
    """
    outermost = {path: entries for path, entries in lists.items() if not _is_inside(path, lists)}
    free = {path: entries for path, entries in outermost.items() if declared.get(path, 0) == 0}
    differ = len({len(leaf) for entries in free.values() for leaf in tensors_in(entries) if leaf.ndim}) > 1

    def is_sure(path: str) -> bool:
        has_mappings = all(isinstance(entry, Mapping) for entry in free[path])
        return path in declared or known.get(path, False) or (differ and has_mappings) or _is_ragged(free[path])

    first = next(filter(is_sure, free), None)
    if first is not None:
        return [path for path, entries in free.items() if len(entries) == len(free[first])]
    _refuse_unclear(free, differ)
    return []


def _refuse_unclear(lists: Mapping[str, Sequence[Any]], differ: bool) -> None:
    """Raise BatchError if it is ambiguous whether several lists of equal length have one entry per sample. This is the
    case if some entries are mappings, or if the lists have several entries and the first dimensions of the tensors
    differ in size (`differ`), as for images and labels."""
    lengths = {len(entries) for entries in lists.values()}
    have_mappings = any(isinstance(entry, Mapping) for entries in lists.values() for entry in entries)
    if len(lists) > 1 and len(lengths) == 1 and (have_mappings or (differ and lengths != {1})):
        raise BatchError(
            f"the batch has tensors only in lists of {counted(lengths.pop(), 'entry')} "
            f"({' and '.join(lists)}), and it is ambiguous whether these lists have one entry per sample: pass "
            f"batch_dims={dict.fromkeys(lists, 0)} if they do, or batch_dims={dict.fromkeys(lists)} if they do not"
        )


def _is_ragged(entries: Sequence[Any]) -> bool:
    """Whether the entries of a list are tensors that differ only in their number of rows."""
    if not all(isinstance(entry, Tensor) and entry.ndim > 0 for entry in entries):
        return False
    alike = {(entry.shape[1:], entry.dtype) for entry in entries}
    return len(alike) == 1 and len({len(entry) for entry in entries}) > 1


def _is_inside(path: str, lists: Iterable[str]) -> bool:
    """Whether a path leads into one of the lists at the paths `lists`."""
    return any(path.startswith(f"{_inner(name)}[") for name in lists)


def _inner(path: str) -> str:
    """The prefix of the paths of a list's entries."""
    return path if path.startswith(("[", ".")) else f"['{path}']"


def _is_by_sample(path: str, entries: Sequence[Any], rows: int, declared: BatchDims, known: dict[str, bool]) -> bool:
    """Whether a list or tuple with tensors has one entry per sample, rather than entries that contain several
    samples."""
    inner = f"{_inner(path)}["
    if path in declared or any(name.startswith(inner) for name in declared):
        return declared.get(path) is not None
    if path in known and (len(entries) == rows or not known[path]):
        return known[path]
    if path in known:
        raise BatchError(
            f"{path} must have one entry per sample, as in earlier batches, but has {len(entries)} for "
            f"{counted(rows, 'sample')}: correct the list, or pass batch_dims={{{path!r}: None}} if its entries do not "
            "belong to samples"
        )
    if rows == 1 or len(entries) != rows:
        known |= {path: False} if rows > 1 else {}
        return False
    tensors = [tensors_in(entry) for entry in entries]
    has_gaps = not all(tensors)  # samples without boxes, for example
    if len({type(entry) for entry in entries if entry is not None}) > 1 or (has_gaps and type(entries) is tuple):
        return False  # several inputs, not one entry per sample
    shapes = [tuple(leaf.shape for leaf in leaves) for leaves in tensors if leaves]
    with_samples = all(shape[:1] == (rows,) for entry in shapes for shape in entry)
    if with_samples and (type(entries) is tuple or len({tuple(shape[1:] for shape in entry) for entry in shapes}) > 1):
        return False
    if with_samples or (type(entries) is tuple and len(set(shapes)) == 1):
        raise BatchError(
            f"the batch has {rows} samples and {path} is a {type(entries).__name__} of the same length, so it is "
            f"ambiguous whether {path} has one entry per sample: pass batch_dims={{{path!r}: 0}} if it does, or "
            f"batch_dims={{{path!r}: None}} if it does not"
        )
    known[path] = True
    return True


def _count_rows(
    paths: Sequence[str], leaves: Sequence[Any], main_input: str | None, declared: BatchDims
) -> tuple[int, tuple[int | None, ...]]:
    """The number of samples, and for each leaf the dimension that counts samples (None: every microbatch receives the
    full leaf).

    In the main input, the declared dimension counts the samples, by default the first. In any other tensor, the
    declared dimension counts the samples. Without a declaration, the first dimension (in (3, b, s) `position_ids`, the
    second) counts the samples if its size is the number of samples. Lists, arrays, and tuples with strings or tensors
    have one entry per sample if their length is the number of samples. Raises BatchError if the batch has no tensor
    with a batch dimension, if it has no samples, or if `declared` does not fit the batch.
    """
    named = dict(zip(paths, leaves, strict=True))
    tensors = {path: leaf for path, leaf in named.items() if isinstance(leaf, Tensor) and leaf.ndim > 0}
    if main_input in named and has_tensors(named[main_input]):  # a list with one entry per sample
        tensors = {main_input: named[main_input]}
    if not tensors:
        kinds = {path: type(leaf).__name__ for path, leaf in named.items()}
        raise BatchError(
            f"the batch contains no tensor with a batch dimension: it contains {kinds or 'nothing'}. Pass a mapping, a "
            "tuple or a list of tensors whose first dimension is the batch dimension"
        )
    counting = (path for path in tensors if declared.get(path, 0) is not None)
    main = main_input if main_input in tensors else next(counting, None)
    if main is None or declared.get(main, 0) is None:
        raise BatchError(
            f"batch_dims marks {main or 'every tensor'} as unbatched, but "
            f"{'the main input' if main else 'at least one tensor'} must have a batch dimension: declare this "
            "dimension, or remove the tensor from batch_dims"
        )
    dim = _checked_dim(main, tensors[main], declared.get(main, 0))
    rows = len(tensors[main]) if has_tensors(tensors[main]) else tensors[main].shape[dim]
    if rows == 0:
        raise BatchError(
            f"the batch is empty: {main} has shape {tuple(tensors[main].shape)}. Skip batches without samples"
        )
    where = f"dimension {dim} of {main}"
    return rows, tuple(
        _agreed(path, leaf, declared[path], rows, where) if path in declared else _row_dim(path, leaf, rows)
        for path, leaf in named.items()
    )


def check_declared(declared: Any) -> None:
    """Raise ConfigurationError unless `declared` is None, or maps each path to a dimension or None."""
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
    """Raise ConfigurationError if `declared` contains a path that the batch does not have."""
    unknown = sorted(declared.keys() - set(paths))
    if unknown:
        raise ConfigurationError(
            f"batch_dims names {unknown}, but the paths of the batch are {list(paths)}: use one of these paths"
        )


def _row_dim(path: str, leaf: Any, rows: int) -> int | None:
    if isinstance(leaf, Tensor):
        if path == POSITIONS and leaf.ndim == 3 and leaf.shape[1] == rows:  # (3, b, s): one plane per rotary axis
            return 1
        return 0 if leaf.ndim > 0 and leaf.shape[0] == rows else None
    if not is_entries(leaf) or len(leaf) != rows:
        return None
    if isinstance(leaf, list | np.ndarray) or has_tensors(leaf):
        return 0
    return 0 if any(isinstance(entry, str) for entry in leaf) else None


def _checked_dim(path: str, leaf: Any, dim: int | None) -> int:
    ndim = leaf.ndim if isinstance(leaf, Tensor) else int(is_entries(leaf))
    if dim is None or not -ndim <= dim < ndim:
        what = f"has shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"has type {type(leaf).__name__}"
        fitting = f"{'0' if ndim == 1 else f'0 to {ndim - 1}'}, or None for no batch dimension" if ndim else "None"
        raise BatchError(
            f"batch_dims declares dimension {dim} of {path} as the batch dimension, but {path} {what}: declare "
            f"{fitting}"
        )
    return dim % ndim


def _agreed(path: str, leaf: Any, dim: int | None, rows: int, where: str) -> int | None:
    """The declared dimension of a leaf, as a non-negative number, or None. Raises BatchError if the size of this
    dimension is not the number of samples (or, for dimension 0 of a tensor, a multiple of this number)."""
    if dim is None:
        return None
    dim = _checked_dim(path, leaf, dim)
    size = leaf.shape[dim] if isinstance(leaf, Tensor) else len(leaf)
    if size != rows and not (isinstance(leaf, Tensor) and dim == 0 and size > rows and size % rows == 0):
        raise BatchError(
            f"batch_dims declares dimension {dim} of {path} as the batch dimension, but this dimension has size "
            f"{size}, and the batch has {counted(rows, 'sample')} ({where}). Declare the correct batch dimension of "
            "both leaves, or None for a leaf that every microbatch needs in full"
        )
    return dim
