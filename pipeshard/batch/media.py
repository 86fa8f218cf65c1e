"""Media: assigns images, videos and audio to the samples of a batch.

Processors concatenate the media of all samples in one leaf. The first dimension of this leaf counts items (images,
clips or frames), or the patches of all items. The shape of the leaf does not show which entries belong to which sample.
For each kind of media:

1. The placeholder tokens of each sample determine its numbers of items (`_items`) and of patches in these cases:
   - The tokens are proportional to the sizes of the items or, in each item, to the patches that a mask keeps (`_kept`).
   - Each run of adjacent tokens is one item.
   - All items have the same number of tokens.
   - Each sample has one item.
2. A leaf with one entry per item or per patch is split accordingly (`_entries`). The entries of a leaf may also be the
   sizes of groups of consecutive items or patches: the numbers of frames of the videos, or the numbers of images of the
   samples that have images (`_groups`). In a mask, each entry may stand for a fixed number of patches.
3. The batch may contain one count per sample, for this kind of media or for no particular kind (`num_local_patches`).
   A leaf whose number of entries is the sum of these counts is split by the counts, not by the tokens.

Otherwise, the assignment is unknown, and the batch cannot be split.
"""

import contextlib
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.tree import has_tensors, is_entries
from pipeshard.hf import IDS, MEDIA, MEDIA_KINDS, SIZES, TOKEN_KINDS, counts_items, media_kind, placeholder_token

INTEGERS = torch.int32, torch.int64
Counts = tuple[int, ...]  # the number of entries of each sample
Owners = dict[str, Counts]  # by path; () if unknown


def media_owners(model: nn.Module, batch: Batch) -> Owners:
    """For each leaf with media, the number of entries of each sample. Leaves with one entry per sample are omitted."""
    owners: Owners = {}
    tensors = batch.tensors | _of_numbers(batch)
    for kind in MEDIA:
        leaves = {path: leaf for path, leaf in tensors.items() if media_kind(path) == kind and leaf.ndim > 0}
        is_token = _is_token(model, batch, kind) if leaves else None
        unknown: Owners = {
            p: () for p, t in leaves.items() if t.is_floating_point() and len(t) != batch.rows and p in batch.tensors
        }
        by_tokens = _by_tokens(leaves, is_token)
        counts = {p: t for p, t in tensors.items() if counts_items(p) and media_kind(p) in (None, kind)}
        per_sample = {path: leaf for path, leaf in counts.items() if path not in by_tokens}
        owners |= unknown | by_tokens | _by_counts(leaves, per_sample, batch.rows)
    return owners


def _of_numbers(batch: Batch) -> dict[str, Tensor]:
    """The lists and arrays of numbers that may belong to media, as tensors, by path."""
    found = {}
    for path, leaf in zip(batch.paths, batch.leaves, strict=True):
        is_list = isinstance(leaf, list | np.ndarray) and is_entries(leaf) and not has_tensors(leaf)
        if is_list and (media_kind(path) or counts_items(path)):
            with contextlib.suppress(TypeError, ValueError, RuntimeError):  # strings, or lists of different lengths
                found[path] = torch.as_tensor(leaf)
    return found


def _is_token(model: nn.Module, batch: Batch, kind: str) -> Tensor | None:
    """For each position of each sample, whether it contains a placeholder token of this kind of media. None if this is
    unknown."""
    ids = batch.by_sample(IDS) if IDS in batch.tensors else None
    if ids is None or ids.ndim != 2:
        return None
    token = placeholder_token(model, kind)
    is_id = ids.eq(token) if token is not None else None
    kinds = batch.by_sample(TOKEN_KINDS) if TOKEN_KINDS in batch.tensors else None
    if kinds is None or kinds.shape != ids.shape or not bool((is_kind := kinds.eq(MEDIA_KINDS[kind])).any()):
        return is_id
    # Processors may also mark the tokens around an image, or use the image token for the frames of videos (GLM-4.5V).
    is_both = is_kind.logical_and(is_id) if is_id is not None else is_kind
    return is_both if bool(is_both.any()) else is_kind


def _by_counts(leaves: Mapping[str, Tensor], per_sample: Mapping[str, Tensor], rows: int) -> Owners:
    """For each leaf whose number of entries is the sum of one of the leaves `per_sample`, the number of entries of each
    sample."""
    by_total: dict[int, Counts] = {}
    for leaf in per_sample.values():
        if leaf.shape == (rows,) and not leaf.is_floating_point():
            counts = tuple(leaf.tolist())
            by_total.setdefault(sum(counts), counts)
    sizes = {path: len(leaf) for path, leaf in leaves.items() if len(leaf) != rows}
    return {path: by_total[size] for path, size in sizes.items() if size in by_total}


def _by_tokens(leaves: Mapping[str, Tensor], is_token: Tensor | None) -> Owners:
    """For each leaf without one entry per sample: the number of entries of each sample, from the sample's placeholder
    tokens, or () if these tokens do not determine the number."""
    sizes = next((leaf for path, leaf in leaves.items() if path.endswith(SIZES) and leaf.ndim == 2), None)
    values = next((leaf for leaf in leaves.values() if leaf.is_floating_point()), None)
    if is_token is None or not len(is_token) or values is None:
        return {}
    areas = [1] * len(values) if sizes is None else [int(area) for area in sizes.long().prod(1).tolist()]
    kept = _kept(areas, leaves, int(is_token.sum()))
    items = _items(kept or areas, is_token, values.shape[1] if sizes is None and values.ndim > 4 else None)
    if items is None:
        return {path: () for path, leaf in leaves.items() if len(leaf) in (len(areas), sum(areas))}
    edges = [0, *itertools.accumulate(items)]
    patches = tuple(sum(areas[a:b]) for a, b in itertools.pairwise(edges))
    owners = {path: _entries(leaf, items, patches) for path, leaf in leaves.items()}
    return {path: counts for path, counts in owners.items() if counts and set(counts) != {1}}


def _kept(areas: Sequence[int], leaves: Mapping[str, Tensor], tokens: int) -> list[int] | None:
    """The number of True entries of each item, from a mask in which each entry stands for the same number of patches.
    None if no mask has as many True entries as there are placeholder tokens."""
    for leaf in leaves.values():
        if leaf.dtype != torch.bool or leaf.ndim != 1 or len(leaf) <= len(areas) or int(leaf.sum()) != tokens:
            continue
        group, remainder = divmod(sum(areas), len(leaf))
        if not remainder and not any(area % group for area in areas):
            return [int(entries.sum()) for entries in leaf.split([area // group for area in areas])]
    return None


def _items(areas: Sequence[int], is_token: Tensor, stack: int | None) -> Counts | None:
    """The number of items of each sample, from the number of its placeholder tokens, or of its runs of adjacent
    placeholder tokens. None if neither determines it.

    If `stack` is the largest number of images or tiles in a sample, the processor has stacked and padded the images or
    tiles of each sample. Each sample then has one item.
    """
    begins = nn.functional.pad(is_token.long(), (1, 0)).diff().eq(1)
    tokens, runs = is_token.sum(1).tolist(), begins.sum(1).tolist()
    items = _assign(areas, tokens) if set(areas) != {1} else None  # 1: unknown
    if items is None:  # with several runs per item (frames, rows of patches), there are more runs than items
        items = tuple(runs) if sum(runs) == len(areas) else _assign([1] * len(areas), tokens)
    if len(areas) != len(tokens):
        return items
    if items is None:
        has_one_each = all(tokens) or not any(tokens) or stack is not None
    else:
        has_one_each = stack in (max(runs), max(items))
    return (1,) * len(tokens) if has_one_each else items


def _entries(leaf: Tensor, items: Counts, patches: Counts) -> Counts | None:
    """The number of a leaf's entries that belong to each sample, from each sample's numbers of items and of patches.
    None if these numbers do not determine it."""
    if groups := _groups(leaf, items) or _groups(leaf, patches):
        return groups
    count, total = sum(items), sum(patches)
    is_merged = count < len(leaf) < total and len(leaf) != len(items)  # such as one entry per 2 x 2 patches
    if leaf.dtype == torch.bool and leaf.ndim == 1 and is_merged:
        return _assign([1] * len(leaf), patches)
    if len(leaf) in (count, total):
        return items if len(leaf) == count else patches
    if len(leaf) == 1 and leaf.ndim == 4 and total > 0:  # (1, 3, p, patches x p): side by side
        side, remainder = divmod(leaf.shape[-1], total)
        return tuple(side * number for number in patches) if not remainder else None
    return None


def _groups(leaf: Tensor, counts: Counts) -> Counts | None:
    """The number of a leaf's entries that belong to each sample, if each entry is the size of a group of consecutive
    items or patches (such as the number of frames of a video). Otherwise None. `counts` contains each sample's number
    of items or patches."""
    if leaf.ndim != 1 or leaf.dtype not in INTEGERS or int(leaf.sum()) != sum(counts):
        return None
    sizes = tuple(leaf.tolist())
    if sizes == counts:  # a sample may have none
        return (1,) * len(counts)
    return _assign(sizes, counts) if all(size > 0 for size in sizes) else None


def _assign(areas: Sequence[int], tokens: Sequence[int]) -> Counts | None:
    """The number of consecutive items that belong to each sample, if the samples' numbers of tokens are proportional to
    the areas of their items. Otherwise None."""
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
