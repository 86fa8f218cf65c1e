"""Loss values: the values at which a loss rule was tried, and the values by which data mark missing entries.

A loss may omit entries by their value: targets that are NaN, -1 or -100, a depth of 0. A rule that was tried
on values without such marks proves nothing about a batch that has them. So each rule keeps the ranges of the values
that its loss reads, and is tried again for a batch outside of them. Floating-point numbers have wide ranges: only a new
sign, a zero, a NaN, or a number four times as large is outside.
"""

import math
from collections.abc import Collection
from typing import NamedTuple, Self

import torch
from torch import Tensor

from pipeshard.batch.batch import Batch

SPAN = 64  # values of a leaf of integers, up to which each is met
TINY = math.ulp(0.0)  # stands for all positive numbers below 1
MISSING = -1.0, -100.0  # what stands for no value where numbers may be negative
MOST_VALUES = 4096  # of a leaf of floating-point numbers that others are drawn from
SHARE = 0.4  # of entries that get a mark in a draw


class Range(NamedTuple):
    """The lowest and highest value in a leaf, and whether it had a NaN."""

    low: float
    high: float
    has_nan: bool = False

    @classmethod
    def of_integers(cls, leaf: Tensor) -> Self:
        """The range of integers, up to infinity if there are many."""
        low, high = (int(extreme) for extreme in leaf.long().aminmax())
        return cls(min(low, 1), float("inf")) if high >= SPAN else cls(min(low, 0), max(high, 1))

    @classmethod
    def of_floats(cls, leaf: Tensor) -> Self:
        low, high = _extremes(leaf)
        has_nan = low != low
        if has_nan:
            low, high = _extremes(leaf[leaf.isnan().logical_not()])
        return cls.of_numbers(low, high)._replace(has_nan=has_nan)

    @classmethod
    def of_numbers(cls, low: float, high: float) -> Self:
        """The range of numbers from `low` to `high`, or of a NaN."""
        return cls(0.0, 0.0, True) if low != low else cls(-_outward(-low), _outward(high))

    def covers(self, other: "Range") -> bool:
        return self.low <= other.low and other.high <= self.high and self.has_nan >= other.has_nan

    def joined(self, other: "Range") -> "Range":
        return Range(min(self.low, other.low), max(self.high, other.high), self.has_nan or other.has_nan)


def ranges_of(batch: Batch, paths: Collection[str], floats: bool) -> dict[str, Range]:
    """The range of each of these leaves that has numbers; of floating-point leaves if requested."""
    ranges: dict[str, Range] = {}
    for path in sorted(paths):
        leaf = batch.tensors.get(path)
        if leaf is None or not leaf.numel() or leaf.is_complex():
            continue
        if not leaf.is_floating_point():
            ranges[path] = Range.of_integers(leaf)
        elif floats:
            ranges[path] = Range.of_floats(leaf.detach())
    return ranges


class Values:
    """The numbers of one leaf of floating-point numbers, and `marks`: values by which a loss may omit entries."""

    def __init__(self, leaf: Tensor) -> None:
        numbers = leaf.detach().flatten()
        numbers = numbers[:: -(-len(numbers) // MOST_VALUES)]
        low, high = _extremes(leaf[leaf.isnan().logical_not()])
        self.high = high
        self.has_nan = bool(leaf.isnan().any())
        self.marks = [math.nan] if self.has_nan else []
        if low < 0:
            self.marks += dict.fromkeys([*([low] if low.is_integer() else []), *MISSING])
        if high >= 2 and high.is_integer():
            self.marks.append(high)
        marks = torch.tensor(self.marks).to(leaf)
        valid = numbers[~(numbers.isnan() | torch.isin(numbers, marks))]
        self.valid = valid if len(valid) else torch.ones(1).to(leaf)
        self.drawn = torch.cat([marks, torch.zeros(1).to(leaf)]) if low < 0 else marks

    def filled(self, leaf: Tensor, generator: torch.Generator) -> Tensor:
        """The leaf with numbers in place of NaNs."""
        return torch.where(leaf.isnan(), self._chosen(self.valid, leaf, generator), leaf) if self.has_nan else leaf

    def moved(self, leaf: Tensor, scale: Tensor, up: bool) -> Tensor:
        """The leaf times a scale from 0 to 1, or moved as much towards the highest number: a loss may have a
        threshold."""
        return self.high - (self.high - leaf) * scale if up else leaf * scale

    def draw(self, leaf: Tensor, number: int, generator: torch.Generator) -> Tensor:
        """Draw `number`: the entries of such a leaf in another order, some of them replaced by marks. In each sample at
        least one entry is not a mark; with one entry per sample, one sample is a mark. All marks occur in turn."""
        values = self._chosen(self.valid, leaf, generator)
        if not len(self.drawn):
            return values
        turn = number // 2
        mark = self.drawn[turn % len(self.drawn)]
        if leaf.numel() == len(leaf):
            values[turn % len(leaf)] = mark
            return values
        is_marked, is_turn = torch.rand((2, *leaf.shape), generator=generator).lt(SHARE).to(leaf.device)
        is_marked[..., 0] = False
        marks = torch.where(is_turn, mark, self._chosen(self.drawn, leaf, generator))
        return torch.where(is_marked, marks, values)

    @staticmethod
    def _chosen(values: Tensor, leaf: Tensor, generator: torch.Generator) -> Tensor:
        return values[torch.randint(len(values), leaf.shape, generator=generator).to(values.device)]


def _extremes(leaf: Tensor) -> tuple[float, float]:
    """The lowest and the highest number; NaN twice if one is NaN."""
    if not leaf.numel():
        return 0.0, 0.0
    low, high = leaf.aminmax()
    return float(low), float(high)


def _outward(high: float) -> float:
    """A bound that numbers up to `high` will not exceed for a while: a power of four, or a sign."""
    if high <= 0:
        return 0.0 if high == 0 else -TINY
    return high if math.isinf(high) else max(1.0, 4.0 ** math.ceil(math.log(high, 4)))
