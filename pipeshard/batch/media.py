"""Media: which images, patches and sounds of a batch belong to which sample.

Processors put the media of all samples one behind the other, so that a leaf's first dimension counts images, or patches
of all of them, and nothing in its shape says where a sample's end. A leaf of counts does (`num_local_patches`), or each
sample's number of placeholder tokens, with the sizes of the images. Where neither does, the batch cannot be cut.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.batch_dims import BatchDims
from pipeshard.hf import IDS, LABELS, MEDIA, SIZES, counts_items, main_input, media_kind, placeholder_token

Owners = dict[str, tuple[int, ...]]  # by path: how many entries each sample has, () where that is not known


def read_batch(
    model: nn.Module, data: Any, declared: BatchDims | None = None, lists: dict[str, bool] | None = None
) -> Batch:
    """A batch for `model` as a dataloader gives it, with the media of each sample.

    `declared` has, by path, the dimension that counts the samples (None: every microbatch gets the leaf whole), and
    `lists` which lists of tensors have one entry a sample, as far as known from earlier batches.
    """
    declared = declared or {}
    batch = Batch.of(data, main_input(model), declared, lists)
    owners = {path: counts for path, counts in _owners(model, batch).items() if path not in declared}
    owners |= {path: several for path, dim in declared.items() if dim == 0 and (several := _several(batch, path))}
    return batch.owned(owners)


def _owners(model: nn.Module, batch: Batch) -> Owners:
    ids = batch.by_sample(IDS) if IDS in batch.tensors else None
    owners: Owners = {}
    for kind in MEDIA:
        leaves = {path: leaf for path, leaf in batch.tensors.items() if media_kind(path) == kind and leaf.ndim > 0}
        token = placeholder_token(model, kind)
        tokens = ids.eq(token).sum(1).tolist() if ids is not None and ids.ndim == 2 and token is not None else []
        unknown: Owners = {p: () for p, t in leaves.items() if t.is_floating_point() and len(t) != batch.rows}
        owners |= unknown | _by_tokens(leaves, tokens) | _by_counts(leaves, batch)
    if LABELS in batch.tensors and batch.tensors[LABELS].ndim == 2 and (codebooks := _several(batch, LABELS)):
        owners[LABELS] = codebooks  # one row for each codebook of a sample
    return owners


def _several(batch: Batch, path: str) -> tuple[int, ...]:
    """As many entries for each sample, where a leaf has several times as many as there are samples; else ()."""
    leaf = batch.tensors.get(path)
    count, remainder = divmod(len(leaf) if leaf is not None and leaf.ndim else 0, batch.rows)
    return (count,) * batch.rows if count > 1 and not remainder else ()


def _by_counts(leaves: Mapping[str, Tensor], batch: Batch) -> Owners:
    counts = [
        tuple(leaf.tolist())
        for path, leaf in batch.tensors.items()
        if counts_items(path) and leaf.shape == (batch.rows,) and not leaf.is_floating_point()
    ]
    return {
        path: next(count for count in counts if sum(count) == len(leaf))
        for path, leaf in leaves.items()
        if len(leaf) != batch.rows and any(sum(count) == len(leaf) for count in counts)
    }


def _by_tokens(leaves: Mapping[str, Tensor], tokens: Sequence[int]) -> Owners:
    """For each leaf that is not one entry a sample: how many entries each sample has, as its tokens say."""
    sizes = next((leaf for path, leaf in leaves.items() if path.endswith(SIZES) and leaf.ndim == 2), None)
    values = next((leaf for leaf in leaves.values() if leaf.is_floating_point()), None)
    if not tokens or values is None:
        return {}
    areas = [1] * len(values) if sizes is None else [int(area) for area in sizes.long().prod(1).tolist()]
    items = _assign(areas, tokens) or _assign([1] * len(areas), tokens)
    if items is None and len(areas) == len(tokens):
        items = (1,) * len(tokens)
    if items is None:
        return {path: () for path, leaf in leaves.items() if len(leaf) in (len(areas), sum(areas))}
    edges = [0, *itertools.accumulate(items)]
    patches = tuple(sum(areas[a:b]) for a, b in itertools.pairwise(edges))
    owners: Owners = {}
    for path, leaf in leaves.items():
        side, remainder = divmod(leaf.shape[-1], sum(areas))  # (1, 3, p, patches x p): side by side
        if len(leaf) == len(areas):
            owners[path] = items
        elif len(leaf) == sum(areas):
            owners[path] = patches
        elif len(leaf) == 1 and leaf.ndim == 4 and not remainder:
            owners[path] = tuple(side * count for count in patches)
    return {path: counts for path, counts in owners.items() if set(counts) != {1}}


def _assign(areas: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...] | None:
    """How many items in a row belong to each sample, if each item has as many tokens as its area says."""
    area, total, counts, at = sum(areas), sum(tokens), [], 0
    for of_sample in tokens:
        first, covered = at, 0
        while at < len(areas) and covered * total < of_sample * area:
            covered += areas[at]
            at += 1
        if covered * total != of_sample * area:
            return None
        counts.append(at - first)
    return tuple(counts) if at == len(areas) and total else None
