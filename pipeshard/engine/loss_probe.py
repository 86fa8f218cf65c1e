"""Probe: a few samples of a batch in which all that its loss reads differs from sample to sample."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.hf import MASK, is_target, special_tokens

ROWS, LENGTH = 4, 8  # a probe's samples and positions
SPAN = 64  # values of a leaf of integers, up to which each is met
EVERYTHING, READ, LABELS, NOTHING = range(4)  # how much of the batch is drawn


class Probe:
    """Draws batches like `sample`, which are some samples of `batch`.

    `read` are the paths of what the loss reads, `consulted` of what Python does. Integers are drawn from those that
    the batch has, and those between if there are few; what is 0 or 1 is one of them; floating-point numbers are scaled.
    """

    def __init__(
        self, model: nn.Module, batch: Batch, sample: Batch, read: Collection[str], consulted: Collection[str]
    ) -> None:
        self.sample = sample
        counted = {p for p, dim in zip(batch.paths, batch.row_dims) if dim is not None or batch.owners.get(p)}
        there = [path for path in batch.tensors if path in counted and sample.tensors[path].numel()]
        self.integers = [path for path in there if not batch.tensors[path].is_floating_point()]
        self.floats = [path for path in there if path not in self.integers]
        self.drawn = {
            EVERYTHING: {path for path in there if path in read or path in consulted},
            READ: {path for path in there if path in read},
            LABELS: {path for path in there if path in read and is_target(path)},
            NOTHING: set[str](),
        }
        special = special_tokens(model)
        self.pools = {path: _pool(batch.tensors[path], special) for path in self.integers}

    @property
    def draws(self) -> int:
        """How many are needed so that each value of a leaf of few is met."""
        most = [
            -(-len(pool) // self.sample.tensors[path].numel())
            for path, pool in self.pools.items()
            if path in self.drawn[READ] and len(pool) <= SPAN
        ]
        return min(max([ROWS, *most]), SPAN // ROWS)

    def draw(self, level: int, number: int, valid: bool = False) -> Batch:
        """One of these batches: `level` says what of it is drawn, `number` which it is. Where it is `valid`, no number
        that the batch has below zero is drawn."""
        generator = torch.Generator().manual_seed(number)

        def redraw(path: str, leaf: Tensor, dim: int | None) -> Tensor:
            if path not in self.drawn[level]:
                return leaf
            if leaf.is_floating_point():
                scale = torch.rand(leaf.shape, generator=generator).mul_(0.8).add_(0.2).to(leaf)
                is_mask = number % 2 and bool(((leaf == 0) | (leaf == 1)).all())
                return _flags(leaf, generator).to(leaf) if is_mask else leaf * scale
            if leaf.ndim > 1 and (leaf.dtype == torch.bool or self.pools[path].tolist() == [0, 1]):
                return _flags(leaf, generator).to(leaf)
            pool = self.pools[path][self.pools[path] >= 0] if valid else self.pools[path]
            return _chosen(pool, leaf.numel(), number, generator).view(leaf.shape).to(leaf)

        return self.sample.map(redraw)

    def with_invalid(self, batch: Batch, path: str, ignore: int, number: int) -> Batch:
        """The same with as many valid labels in each sample as chance will have it, two columns or more where there
        are three; of labels with one column all samples but one."""
        mask = batch.by_sample(MASK) if MASK in batch.tensors else None
        generator = torch.Generator().manual_seed(number)

        def relabel(name: str, leaf: Tensor, dim: int | None) -> Tensor:
            if name != path:
                return leaf
            leaf = leaf.movedim(dim or 0, 0).clone()
            leaf = torch.where(leaf < 0, 1, leaf) if ignore < 0 else torch.where(leaf == ignore, ignore + 1, leaf)
            if mask is not None and mask.shape == leaf.shape:
                leaf = leaf.masked_fill(mask == 0, ignore)  # some losses leave padding out by the mask
            if leaf.ndim == 1 or leaf.shape[1] == 1:
                leaf[-1 if number % 2 else len(leaf) // 2] = ignore
            else:
                fewest = min(2, leaf.shape[1] - 1)
                keep = torch.randint(fewest, leaf.shape[1] + 1, (batch.rows,), generator=generator).tolist()
                for k, row in enumerate(leaf):  # several in a sample (codebooks) have as many
                    row[keep[k * batch.rows // len(leaf)] :] = ignore
            return leaf.movedim(0, dim or 0)

        return batch.map(relabel)


def spread_out(rows: int) -> Tensor:
    """The indices of a probe's samples among so many: from all over the batch."""
    return torch.arange(ROWS) * rows // ROWS if rows >= ROWS else torch.arange(ROWS) % rows


def ranges(batch: Batch, paths: Collection[str]) -> dict[str, tuple[float, float]]:
    """For each of these leaves of integers, the values that a probe draws: from one to another, without an end where
    they are many."""
    found: dict[str, tuple[float, float]] = {}
    for path in sorted(paths):
        leaf = batch.tensors.get(path)
        if leaf is not None and not leaf.is_floating_point() and leaf.numel():
            low, high = (int(extreme) for extreme in leaf.long().aminmax())
            found[path] = (min(low, 1), float("inf")) if high >= SPAN else (min(low, 0), max(high, 1))
    return found


def _pool(leaf: Tensor, special: Sequence[int]) -> Tensor:
    """The values to draw a leaf of integers from: what it has, special tokens more often; if these are few, what is
    between too, from 0 to 1 at least."""
    pool = leaf.detach().long().cpu().unique()
    own = pool[torch.isin(pool, torch.tensor(special, dtype=torch.long))]
    last = int(pool[-1])
    if last >= SPAN:
        return torch.cat([pool, own.repeat(len(pool) // SPAN)])
    fill = torch.arange(max(last, 1) + 1)
    if leaf.ndim > 1:  # tokens
        fill = fill[~torch.isin(fill, torch.tensor(special, dtype=torch.long)) | torch.isin(fill, own)]
    return torch.cat([pool[pool < 0], fill])


def _chosen(pool: Tensor, count: int, number: int, generator: torch.Generator) -> Tensor:
    """So many of the pool: of one that is larger, but not large, the draws with the next numbers have the rest."""
    if count < len(pool) <= SPAN:
        order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))
        return pool[order[(torch.arange(count) + number * count) % len(pool)]]
    return pool[torch.randint(len(pool), (count,), generator=generator)]


def _flags(leaf: Tensor, generator: torch.Generator) -> Tensor:
    """Zeros and ones by chance, of several in a sample at least one of them a one."""
    flags = torch.rand(leaf.shape, generator=generator).gt(0.4)
    if leaf.ndim > 1:
        flags[..., 0] |= ~flags.any(-1)
    return flags
