"""Media: which images, patches and sounds of a batch belong to which sample."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipeshard.model.batch import Batch

# How the inputs of one kind are named, and what the config calls their placeholder token.
NAMES = {"image": ("image", "pixel"), "video": ("video",), "audio": ("audio", "input_features", "feature_", "speech")}
TOKENS = "{}_token_id", "{}_token_index"


def read_batch(model: nn.Module, data: Any) -> Batch:
    """A batch for `model` as a dataloader gives it, with the media of each sample found by its placeholder tokens.

    Processors pile the images of all samples up: a first dimension that counts images, or patches of all of them.
    """
    batch = Batch.of(data, getattr(model, "main_input_name", None))
    ids = batch.tensors.get("input_ids")
    if ids is None or ids.ndim != 2:
        return batch
    owners: dict[str, tuple[int, ...]] = {}
    for kind in NAMES:
        token = _token(getattr(model, "config", None), kind)
        leaves = {path: leaf for path, leaf in batch.tensors.items() if _kind(path) == kind and leaf.ndim > 0}
        if token is not None and leaves:
            owners |= _owners(leaves, ids.eq(token).sum(1).tolist())
    return batch.owned(owners)


def _kind(path: str) -> str | None:
    return next((k for k in ("video", "audio", "image") if any(word in path.lower() for word in NAMES[k])), None)


def _token(config: Any, kind: str) -> int | None:
    parts = [config, *(getattr(config, name, None) for name in ("text_config", "thinker_config"))]
    found = (getattr(part, name.format(kind), None) for part in parts for name in TOKENS)
    return next((token for token in found if isinstance(token, int)), None)


def _owners(leaves: Mapping[str, Tensor], tokens: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """For each leaf that is not one entry a sample: how many entries each sample has; () where that is unknown."""
    rows = len(tokens)
    sizes = next((leaf for path, leaf in leaves.items() if "_thw" in path or path.endswith("_sizes")), None)
    values = next((leaf for leaf in leaves.values() if leaf.is_floating_point()), None)
    if sizes is not None and sizes.ndim == 2:
        areas = [int(area) for area in sizes.long().prod(1).tolist()]
    elif values is not None:
        areas = [1] * values.shape[0]
    else:
        return {}
    items = _assign(areas, tokens) or _assign([1] * len(areas), tokens)
    if items is None and len(areas) == rows:
        items = (1,) * rows
    edges = [sum((items or ())[:row]) for row in range(rows + 1)]
    counts = {len(areas): items or (), sum(areas): tuple(sum(areas[a:b]) for a, b in itertools.pairwise(edges))}
    if items is None:
        counts = dict.fromkeys(counts, ())
    one_each = (1,) * rows
    found = {path: counts[leaf.shape[0]] for path, leaf in leaves.items() if leaf.shape[0] in counts}
    return {path: owners for path, owners in found.items() if owners != one_each and (owners or rows > 1)}


def _assign(areas: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...] | None:
    """How many items in a row belong to each sample, if each item has as many tokens as its area says."""
    area, total, counts, at = sum(areas), sum(tokens), [], 0
    for own in tokens:
        first, covered = at, 0
        while at < len(areas) and covered * total < own * area:
            covered += areas[at]
            at += 1
        if covered * total != own * area:
            return None
        counts.append(at - first)
    return tuple(counts) if at == len(areas) and total else None
