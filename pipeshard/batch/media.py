"""Media: which images, patches and sounds of a batch belong to which sample."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.batch_dims import BatchDims

# How the inputs of one kind are named, and what the config calls their placeholder token.
NAMES = {
    "image": ("image", "pixel", "target_sizes", "spatial"),
    "video": ("video",),
    "audio": ("audio", "input_features", "feature_", "speech"),
}
TOKENS = "{}_token_id", "{}_token_index"
SIZES = "_thw", "_sizes", "_shapes", "_hws"  # ends of the names of inputs that have one row of sizes an image


def read_batch(
    model: nn.Module, data: Any, declared: BatchDims | None = None, lists: dict[str, bool] | None = None
) -> Batch:
    """A batch for `model` as a dataloader gives it, with the media of each sample.

    `declared` has, by path, the dimension that counts the samples (None: every microbatch gets the leaf whole), and
    `lists` which lists of tensors have one entry a sample, as earlier batches have told.

    Processors pile the images of all samples up: a dimension counts images, or patches of all of them. Whose they are
    is said by a leaf of counts (`num_local_patches`), or by each sample's number of placeholder tokens.
    """
    batch = Batch.of(data, getattr(model, "main_input_name", None), declared, lists)
    ids = batch.by_sample("input_ids") if "input_ids" in batch.tensors else None
    ids = ids if ids is not None and ids.ndim == 2 else None
    owners: dict[str, tuple[int, ...]] = {}
    for kind in NAMES:
        token = _token(getattr(model, "config", None), kind)
        tokens = ids.eq(token).sum(1).tolist() if ids is not None and token is not None else []
        leaves = {path: leaf for path, leaf in batch.tensors.items() if _kind(path) == kind and leaf.ndim > 0}
        piled = {path: () for path, leaf in leaves.items() if leaf.is_floating_point() and len(leaf) != batch.rows}
        owners |= piled | _by_tokens(leaves, tokens) | _by_counts(leaves, batch)
    labels = batch.tensors.get("labels")
    if labels is not None and labels.ndim == 2 and len(labels) > batch.rows and not len(labels) % batch.rows:
        owners["labels"] = (len(labels) // batch.rows,) * batch.rows  # one row for each codebook of a sample
    own = {path: counts for path, counts in owners.items() if path not in (declared or {})}
    for path, dim in (declared or {}).items():
        leaf = batch.tensors.get(path)
        if dim == 0 and leaf is not None and len(leaf) > batch.rows:  # several entries a sample
            own[path] = (len(leaf) // batch.rows,) * batch.rows
    return batch.owned(own)


def _kind(path: str) -> str | None:
    return next((k for k in ("video", "audio", "image") if any(word in path.lower() for word in NAMES[k])), None)


def _token(config: Any, kind: str) -> int | None:
    parts = [config, *(getattr(config, name, None) for name in ("text_config", "thinker_config"))]
    found = (getattr(part, name.format(kind), None) for part in parts for name in TOKENS)
    return next((token for token in found if isinstance(token, int)), None)


def _by_counts(leaves: Mapping[str, Tensor], batch: Batch) -> dict[str, tuple[int, ...]]:
    counts = [
        tuple(leaf.tolist())
        for path, leaf in batch.tensors.items()
        if path.startswith("num_") and leaf.shape == (batch.rows,) and not leaf.is_floating_point()
    ]
    return {
        path: next(count for count in counts if sum(count) == len(leaf))
        for path, leaf in leaves.items()
        if len(leaf) != batch.rows and any(sum(count) == len(leaf) for count in counts)
    }


def _by_tokens(leaves: Mapping[str, Tensor], tokens: Sequence[int]) -> dict[str, tuple[int, ...]]:
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
    owners: dict[str, tuple[int, ...]] = {}
    for path, leaf in leaves.items():
        side, rest = divmod(leaf.shape[-1], sum(areas))  # (1, 3, p, patches x p): side by side
        if len(leaf) == len(areas):
            owners[path] = items
        elif len(leaf) == sum(areas):
            owners[path] = patches
        elif len(leaf) == 1 and leaf.ndim == 4 and not rest:
            owners[path] = tuple(side * count for count in patches)
    return {path: counts for path, counts in owners.items() if set(counts) != {1}}


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
