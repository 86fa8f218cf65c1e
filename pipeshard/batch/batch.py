"""Batch: what a model is called with, and how it is cut into microbatches."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipeshard.batch.batch_dims import BatchDims, count_rows, read_leaves
from pipeshard.batch.tree import Tree, has_tensors, is_entries, map_tensors, text
from pipeshard.errors import BatchError

FOR_CRITERION = "criterion."  # begins the names of what the model is not called with


@dataclass(frozen=True)
class Batch:
    """One batch as a flat list of leaves.

    `data` is what the model takes: a mapping is passed as keyword arguments, a tuple or list as positional ones,
    anything else alone. `rows` is the number of samples; `row_dims[k]` is the dimension of leaf k that counts them (of
    a list of one entry a sample: 0), or None for a leaf every microbatch gets whole (a scalar, a (1, 1, s, s) mask,
    a string, ...). `owners` has, for leaves by path whose dimension 0 (or else the last) counts something else, how
    many of its entries each sample has, () if that is not known.
    """

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    tree: Tree
    rows: int
    row_dims: tuple[int | None, ...]
    owners: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        data: Any,
        main_input: str | None = None,
        declared: BatchDims | None = None,
        lists: dict[str, bool] | None = None,
    ) -> Self:
        """Read a batch as a dataloader gives it; `main_input` names the tensor whose dim 0 counts the samples, and
        `declared` has the dimension that does for the leaves of which it is another one. `lists` has which lists of
        tensors have one entry a sample, as far as known, and learns it.

        Raises BatchError without a tensor in it, or a declared dimension does not count the samples.
        """
        paths, leaves, tree = read_leaves(data, main_input, declared or {}, {} if lists is None else lists)
        # What was made in inference mode has no version counter, by which writes in place are seen.
        leaves = tuple(leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf for leaf in leaves)
        return cls(leaves, paths, tree, *count_rows(paths, leaves, main_input, declared))

    @property
    def data(self) -> Any:
        return self.tree.unflatten(self.leaves)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {path: leaf for path, leaf in zip(self.paths, self.leaves, strict=True) if isinstance(leaf, Tensor)}

    def by_sample(self, path: str) -> Tensor:
        """The tensor of this path, with the dimension that counts the samples first."""
        dim = self.row_dims[self.paths.index(path)]
        return self.tensors[path].movedim(dim or 0, 0)

    @property
    def entries(self) -> dict[str, list[Any] | tuple[Any, ...]]:
        """By path, the lists and tuples of one entry a sample."""
        leaves = zip(self.paths, self.leaves, self.row_dims, strict=True)
        return {path: leaf for path, leaf, dim in leaves if is_entries(leaf, dim)}

    @property
    def others(self) -> tuple[tuple[str, str], ...]:
        """What is not a tensor, by path, as text; of what has one entry a sample only that it does."""
        leaves = zip(self.paths, self.leaves, self.row_dims, strict=True)
        return tuple(
            (path, "one entry a sample" if is_entries(leaf, dim) else text(leaf))
            for path, leaf, dim in leaves
            if not isinstance(leaf, Tensor)
        )

    def call(self, model: nn.Module | Callable[..., Any]) -> Any:
        """`model` called with this batch, but for what is for the criterion alone."""
        data = self.data
        if not isinstance(data, dict):
            return model(*data)
        return model(**{name: value for name, value in data.items() if not str(name).startswith(FOR_CRITERION)})

    def for_criterion(self) -> Any:
        """The batch as a criterion gets it: a tensor that came alone is alone again."""
        data = self.data
        return data[0] if isinstance(data, tuple) and len(data) == 1 else data

    def map(self, fn: Callable[[str, Tensor, int | None], Tensor | None]) -> Self:
        """Each tensor replaced by fn(path, tensor, row dimension)."""
        leaves = tuple(
            fn(path, leaf, dim) if isinstance(leaf, Tensor) else leaf
            for path, leaf, dim in zip(self.paths, self.leaves, self.row_dims, strict=True)
        )
        counting = zip(leaves, self.row_dims, strict=True)
        rows = (leaf.shape[dim] for leaf, dim in counting if dim is not None and isinstance(leaf, Tensor))
        return replace(self, leaves=leaves, rows=next(rows))

    def counted(self, dims: BatchDims) -> Self:
        """The same, where these dimensions of the leaves with these paths count the samples, or none does."""
        pairs = zip(self.paths, self.row_dims, strict=True)
        owners = {path: counts for path, counts in self.owners.items() if path not in dims}
        return replace(self, row_dims=tuple(dims.get(path, dim) for path, dim in pairs), owners=owners)

    def owned(self, owners: Mapping[str, tuple[int, ...]]) -> Self:
        """The same, where dimension 0 of some leaves counts what `owners` says."""
        dims = tuple(None if path in owners else dim for path, dim in zip(self.paths, self.row_dims, strict=True))
        return replace(self, row_dims=dims, owners=owners)

    def to(self, device: torch.device) -> Self:
        """The same on a device."""

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) and not has_tensors(leaf):
                return leaf
            return map_tensors(lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"), leaf)

        return replace(self, leaves=tuple(map(place, self.leaves)))

    def copied(self, paths: Collection[str]) -> Self:
        """The same with copies of the tensors of these paths, one for those that are the same tensor."""
        copies: dict[Any, Tensor] = {}

        def copy(path: str, leaf: Tensor, dim: int | None) -> Tensor:
            if path not in paths:
                return leaf
            key = leaf.untyped_storage()._cdata, leaf.storage_offset(), leaf.shape, leaf.stride()
            return copies[key] if key in copies else copies.setdefault(key, leaf.clone())

        return self.map(copy)

    @property
    def num_tokens(self) -> int:
        """The elements of `input_ids`, padding included; 0 without."""
        tokens = self.tensors.get("input_ids")
        return 0 if tokens is None else tokens.numel()

    def take(self, rows: Tensor) -> Self:
        """The samples with these indices (int64)."""
        return self._pick(rows.tolist(), lambda leaf, dim, at: leaf.index_select(dim, torch.tensor(at).to(leaf.device)))

    def split(self, num_microbatches: int | None = None, microbatch_size: int | None = None) -> list[Self]:
        """Cut along the samples, in order, into views.

        `num_microbatches` gives sizes that differ by one at most (and fewer microbatches where there are fewer
        samples); `microbatch_size` gives equal ones and a smaller last one.
        """
        sizes = split_sizes(self.rows, num_microbatches, microbatch_size)
        return [self._narrow(end - size, size) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]

    def _narrow(self, start: int, length: int) -> Self:
        if length == self.rows:
            return self
        rows = range(start, start + length)

        def view(leaf: Tensor, dim: int, at: Sequence[int]) -> Tensor:
            part = leaf.narrow(dim, at[0] if at else 0, len(at))
            return part if leaf.requires_grad else part.data  # which may be written to without the others knowing

        return self._pick(rows, view)

    def _pick(self, rows: Sequence[int], select: Callable[[Tensor, int, Sequence[int]], Tensor]) -> Self:
        """These samples, `select(leaf, dimension, indices)` taking what belongs to them."""

        def pick(path: str, leaf: Any, dim: int | None) -> Any:
            if is_entries(leaf, dim):
                return type(leaf)(leaf[row] for row in rows)
            if not isinstance(leaf, Tensor):
                return leaf
            owners = self.owners.get(path)
            if owners is not None:
                entries = [entry for row in rows for entry in self._entries(path, owners, row)]
                dim = 0 if len(leaf) == sum(owners) else leaf.ndim - 1
                return select(leaf, dim, entries) if entries else None  # as if there were no images at all
            return leaf if dim is None else select(leaf, dim, rows)

        leaves = tuple(map(pick, self.paths, self.leaves, self.row_dims))
        owners = {path: tuple(counts[row] for row in rows) for path, counts in self.owners.items() if counts}
        return replace(self, leaves=leaves, rows=len(rows), owners=owners)

    def _entries(self, path: str, owners: tuple[int, ...], row: int) -> range:
        if not owners:
            raise BatchError(
                f"{path} has {self.tensors[path].shape[0]} entries for {self.rows} samples, and the placeholder tokens "
                "in input_ids do not tell which belong to which: use one microbatch, give every sample as many, or say "
                "which dimension counts the samples by PipelinePlugin(batch_dims=...)"
            )
        first = sum(owners[:row])
        return range(first, first + owners[row])


def split_sizes(rows: int, num_microbatches: int | None, microbatch_size: int | None) -> list[int]:
    """The samples in each microbatch of a batch of so many; see `Batch.split`."""
    if microbatch_size is not None:
        return [min(microbatch_size, rows - start) for start in range(0, rows, microbatch_size)]
    m = min(num_microbatches or 1, rows)
    return [rows // m + (k < rows % m) for k in range(m)]
