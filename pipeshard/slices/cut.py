"""Cut: splits a microbatch along its sequence, and combines the results of its slices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import FOR_CRITERION, Batch
from pipeshard.errors import BatchError
from pipeshard.hf import (
    BOUNDARIES,
    IDS,
    IGNORED,
    MASK,
    POSITIONS,
    USES_CACHE,
    cache_argument,
    has_parameter,
    is_mask,
    is_of_encoder,
    is_target,
    media_kind,
    targets,
)
from pipeshard.slices.states import Slice

LEAST = 2  # a slice has at least this many positions: for one position, layers with states use a different algorithm


def lengths(total: int, n: int, slope: float) -> list[int]:
    """Return the lengths of n slices that together have `total` positions and take approximately equal times. The time
    of position k is 1 + slope * k, since the position attends to k earlier positions. A short sequence is split into
    fewer than n slices."""
    n = max(1, min(n, total // LEAST))

    def work(end: float) -> float:
        return end + slope * end * end / 2

    def end_of(share: float) -> float:
        wanted = share * work(total)
        return wanted if not slope else (math.sqrt(1 + 2 * slope * wanted) - 1) / slope

    ends = [0]
    for k in range(1, n):
        least, most = ends[-1] + LEAST, total - LEAST * (n - k)
        ends.append(min(max(round(end_of(k / n)), least), most))
    return [end - start for start, end in pairwise([*ends, total])]


def sequence_of(batch: Batch) -> int:
    """The sequence length of a batch. Raises BatchError if neither `input_ids` nor `inputs_embeds` has a sequence
    dimension."""
    for name in (IDS, "inputs_embeds"):
        leaf = batch.tensors.get(name)
        if leaf is not None and leaf.ndim > 1:
            return leaf.shape[1 if leaf.is_floating_point() else -1]
    raise BatchError(
        f"num_slices: the batch has neither {IDS} nor inputs_embeds with a sequence dimension, only "
        f"{list(batch.paths)}, so pipeshard cannot determine the sequence length. Pass the batch as a dict of the "
        "forward's arguments, or use num_slices=1"
    )


def num_positions(batch: Batch) -> int:
    """The largest position in a batch, counted from 1."""
    given = batch.tensors.get(POSITIONS)
    return sequence_of(batch) if given is None or given.is_meta else int(given.max()) + 1


def cut(batch: Batch, sizes: Sequence[int], is_flash: bool) -> list[Batch]:
    """Split a batch along its sequence into slices of these sizes. `is_flash` is True if the model uses flash
    attention. Raises BatchError for media, for samples that contain several documents, and for a batch without a
    sequence dimension."""
    total, ends = sequence_of(batch), list(accumulate(sizes))
    for path in batch.paths:
        if media_kind(path) is not None and not is_mask(path):
            raise BatchError(f"num_slices: {path} contains media, which slices do not support. Use num_slices=1")
    _refuse_packed(batch, is_flash)
    batch = batch.without(BOUNDARIES)  # a kernel would access memory up to the last boundary, beyond the end of a slice

    def slice_of(start: int, end: int) -> Batch:
        return batch.map(lambda path, leaf, dim: _narrowed(path, leaf, dim, total, start, end))

    return [slice_of(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _narrowed(path: str, leaf: Tensor, row_dim: int | None, total: int, start: int, end: int) -> Tensor:
    if is_of_encoder(path):
        return leaf
    dims = [dim for dim, size in enumerate(leaf.shape) if size == total and dim != row_dim]
    if is_mask(path) and leaf.ndim == 4 and len(dims) == 2:
        return leaf[:, :, start:end, start:end]
    if leaf.ndim > 1 and len(dims) > 1 and 1 in dims:
        dims = [1]
    return leaf.narrow(dims[0], start, end - start) if len(dims) == 1 and leaf.ndim > 1 else leaf


def _refuse_packed(batch: Batch, is_flash: bool) -> None:
    """Raise BatchError for a sample with several documents: with a cache, position ids do not separate documents, and
    slices receive no boundaries. With a mask, position ids that restart are accepted: transformers then does not use
    them to separate documents, even without a cache. The exception is flash attention: in a batch of one row, it
    separates documents up to the first padding."""
    positions, mask = batch.tensors.get(POSITIONS), batch.tensors.get(MASK)
    whole = [row * sequence_of(batch) for row in range(batch.rows + 1)]
    for path, leaf in batch.tensors.items():
        if path in BOUNDARIES and leaf.ndim == 1 and not leaf.is_meta and leaf.tolist() != whole:
            raise BatchError(
                f"num_slices: {path} has a boundary within a sample, so the sample contains several documents, which "
                "slices do not separate. Pass a four-dimensional attention_mask and no boundaries (not with flash "
                "attention), or use num_slices=1"
            )
    if positions is None or positions.is_meta:
        return
    restarts = positions.diff(dim=-1) != 1
    if mask is not None:
        if not is_flash or mask.ndim != 2 or batch.rows != 1:
            return
        restarts = restarts & mask.bool().long().cumprod(-1)[:, 1:].bool()
    if bool(restarts.any()):
        raise BatchError(
            f"num_slices: {POSITIONS} restart within a sample, so the sample contains several documents. Slices use a "
            f"cache. With a cache, transformers does not separate documents by their {POSITIONS}. Pass a "
            "four-dimensional attention_mask (not with flash attention), or use num_slices=1"
        )


def shortened(batch: Batch, most: int, is_flash: bool = False) -> Batch:
    """Divide a batch into consecutive parts of `most` positions, and return the part with the most labels. A batch with
    at most `most` positions is returned unchanged. `is_flash` is passed to `cut`."""
    total = sequence_of(batch)
    if total <= most:
        return batch
    starts = range(0, total - most + 1, most)
    start = max(starts, key=lambda start: _num_labels(batch, start, start + most))
    sizes = [size for size in (start, most, total - start - most) if size]
    return cut(batch, sizes, is_flash)[1 if start else 0]


def _num_labels(batch: Batch, start: int, end: int) -> int:
    """The number of labels at the positions [start, end), not counting ignored labels."""
    leaves = (batch.tensors[path] for path in targets(batch.paths) if path in batch.tensors)
    total = sequence_of(batch)
    return sum(int(leaf[:, start:end].ne(IGNORED).sum()) for leaf in leaves if leaf.shape[1:2] == (total,))


def with_padding(batch: Batch, token: int | None) -> Batch:
    """A copy of the batch with padding in every other sample. The padding replaces a quarter of the sample's positions,
    on the left of one padded sample and on the right of the next, and the labels there are ignored. The first padded
    sample has its padding on the right if no label would remain otherwise, since the mean loss over no labels is
    NaN."""
    total = sequence_of(batch)
    count = max(1, total // 4)
    left, right = slice(0, count), slice(total - count, total)
    padded = _filled(batch, token, left, right)
    lost_all = _num_labels(batch, 0, total) and not _num_labels(padded, 0, total)
    return _filled(batch, token, right, left) if lost_all else padded


def _filled(batch: Batch, token: int | None, first: slice, third: slice) -> Batch:
    """A copy of the batch with padding at the positions `first` of samples 0, 4, 8, ..., and `third` of samples 2, 6,
    10, ..."""
    total = sequence_of(batch)
    fillings = {IDS: token, MASK: 0, **dict.fromkeys(targets(batch.paths), IGNORED)}

    def fill(path: str, leaf: Tensor, dim: int | None) -> Tensor:
        filling = fillings.get(path)
        if filling is None or leaf.ndim != 2 or leaf.shape[1] != total or dim != 0 or leaf.is_floating_point():
            return leaf
        filled = leaf.clone()
        filled[0::4, first] = filling
        filled[2::4, third] = filling
        return filled

    return batch.map(fill)


@dataclass(frozen=True)
class SliceCall:
    """The model's inputs for one slice on one stage: the slice's part of the microbatch's arguments, masks up to the
    end of the slice, and a cache."""

    batch: Batch
    now: Slice

    def call(self, model: nn.Module) -> Any:
        from pipeshard.slices.cache import cache_of, has_keys  # this import fails with transformers 4

        name = cache_argument(model)
        assert name is not None
        total, row_dims = self.now.total, dict(zip(self.batch.paths, self.batch.row_dims, strict=True))
        data = self.batch.without(BOUNDARIES).data  # as in `cut`
        arguments = {path: leaf for path, leaf in data.items() if not _is_of_loss(path)}
        has_whole_mask = any(_is_whole_mask(path, leaf) for path, leaf in arguments.items())
        cache = cache_of(model, self.now, any(map(is_of_encoder, arguments)), has_whole_mask)
        for path, leaf in arguments.items():
            arguments[path] = self._part(path, leaf, row_dims.get(path, 0), total, has_keys(cache))
        if has_parameter(model, USES_CACHE):
            arguments[USES_CACHE] = True
        arguments[name] = cache
        return model(**arguments)

    def _part(self, path: str, leaf: Any, row_dim: int | None, total: int, has_keys: bool) -> Any:
        start, end = self.now.start, self.now.end
        if isinstance(leaf, Mapping):
            return {key: self._part(path, item, row_dim, total, has_keys) for key, item in leaf.items()}
        if not isinstance(leaf, Tensor) or is_of_encoder(path):
            return leaf
        if _is_whole_mask(path, leaf):
            return leaf[:, :, start:end, :end] if leaf.shape[-2] == total else leaf[..., :end]
        if path == MASK and leaf.ndim == 2 and has_keys:
            return leaf[:, :end]
        return _narrowed(path, leaf, row_dim, total, start, end)


def _is_whole_mask(path: str, leaf: Any) -> bool:
    """Whether a leaf is a mask of four dimensions, or contains one. transformers passes such a mask to the attention of
    every layer unchanged."""
    if isinstance(leaf, Mapping):
        return any(_is_whole_mask(path, item) for item in leaf.values())
    return isinstance(leaf, Tensor) and leaf.ndim == 4 and is_mask(path) and not is_of_encoder(path)


def _is_of_loss(path: str) -> bool:
    return is_target(path) or path.startswith(FOR_CRITERION)


class Joint(NamedTuple):
    """Concatenates the results of slices along `dim` into the microbatch's result, and splits the result's gradient. If
    `rows` is not None, dimension `dim` contains the positions of all `rows` samples, sample by sample."""

    dim: int
    rows: int | None

    @classmethod
    def of(
        cls, whole: Sequence[int], parts: Sequence[Sequence[int]], rows: int, sizes: Sequence[int]
    ) -> "Joint | None":
        """Find the Joint from the shapes of the whole result and of its parts. Returns None if the shapes are ambiguous
        or do not match."""
        if any(len(part) != len(whole) for part in parts):
            return None
        dims = [dim for dim, size in enumerate(whole) if any(part[dim] != size for part in parts)]
        if len(dims) != 1:
            return None
        found = [part[dims[0]] for part in parts]
        if found == list(sizes) and whole[dims[0]] == sum(sizes):
            return cls(dims[0], None)
        if found == [rows * size for size in sizes] and whole[dims[0]] == rows * sum(sizes):
            return cls(dims[0], rows)
        return None

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        if self.rows is None:
            return torch.cat(list(parts), self.dim)
        by_sample = [part.unflatten(self.dim, (self.rows, -1)) for part in parts]
        return torch.cat(by_sample, self.dim + 1).flatten(self.dim, self.dim + 1)

    def split(self, whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        if self.rows is None:
            return list(whole.split(list(sizes), self.dim))
        by_sample = whole.unflatten(self.dim, (self.rows, -1)).split(list(sizes), self.dim + 1)
        return [part.flatten(self.dim, self.dim + 1) for part in by_sample]
