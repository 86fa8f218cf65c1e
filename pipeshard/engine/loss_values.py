"""Loss values: tracks the values for which a loss rule was tried, and finds values that may mark missing entries.

A loss may omit entries because of their value, for example targets that are NaN, -1 or -100, or depths of 0. A rule
that was tried without such marks is not proven for a batch that contains them. So each rule is stored with the ranges
of the values that the loss reads. The rule is tried again for a batch with values outside these ranges. Ranges of
floating-point values are wide: only a value with a new sign, a value beyond the next power of four, and the first zero
or NaN are outside.
"""

import math
from collections.abc import Collection
from typing import NamedTuple, Self

import torch
from torch import Tensor

from pipeshard.batch.batch import Batch
from pipeshard.hf import MASK

SPAN = 64  # an integer leaf whose highest value is below SPAN is tried with all values up to the highest
TINY = math.ulp(0.0)  # the smallest positive number, as a bound of ranges that exclude zero
MISSING_MARKS = -1.0, -100.0  # marks of a missing value in a leaf with negative values
MOST_VALUES = 4096  # at most this many values of a floating-point leaf are used in draws
SHARE = 0.4  # share of the entries that a draw replaces with marks


class Range(NamedTuple):
    """Bounds of the values in a leaf, and whether the leaf contains a NaN. `fillers` are values that may mark missing
    entries in a leaf with many classes."""

    low: float
    high: float
    has_nan: bool = False
    fillers: frozenset[int] = frozenset()

    @classmethod
    def of_integers(cls, leaf: Tensor, is_known: bool = False) -> Self:
        """The range of integers. If the highest integer is below SPAN, the range also contains 0 and 1. Otherwise, if
        the loss `is_known` and the leaf has two dimensions (tokens), the range contains all integers from 1 on."""
        low, high = (int(extreme) for extreme in leaf.long().aminmax())
        if high < SPAN:
            return cls(min(low, 0), max(high, 1))
        if is_known and leaf.ndim == 2:
            return cls(min(low, 1), math.inf)
        return cls(low, high, fillers=frozenset(fillers_of(leaf)))

    @classmethod
    def of_floats(cls, leaf: Tensor) -> Self:
        """The range of floating-point values, rounded outward."""
        low, high = _extremes(leaf)
        has_nan = low != low
        if has_nan:
            low, high = _extremes(leaf[leaf.isnan().logical_not()])
        return cls(-_outward(-low), _outward(high), has_nan)

    def covers(self, other: "Range") -> bool:
        is_within = self.low <= other.low and other.high <= self.high
        return is_within and self.has_nan >= other.has_nan and self.fillers >= other.fillers

    def contains(self, value: float) -> bool:
        return self.has_nan if math.isnan(value) else self.low <= value <= self.high

    def joined(self, other: "Range") -> "Range":
        bounds = min(self.low, other.low), max(self.high, other.high)
        return Range(*bounds, self.has_nan or other.has_nan, self.fillers | other.fillers)


def fillers_of(leaf: Tensor) -> list[int]:
    """The values that fill the first two or the last two entries of a row, as padding does. The most frequent value is
    first."""
    if leaf.ndim < 2 or leaf.shape[-1] < 2:
        return []
    ends = torch.stack([leaf[..., :2], leaf[..., -2:]]).flatten(0, -2)
    values, counts = ends[ends[:, 0] == ends[:, 1], 0].unique(return_counts=True)
    return [int(value) for value in values[counts.argsort(descending=True)]]


def ranges_of(batch: Batch, paths: Collection[str], is_known: bool) -> dict[str, Range]:
    """The range of the leaf at each path. Empty and complex leaves are omitted. If the loss `is_known` (one of
    transformers' own), ranges of floating-point leaves are omitted."""
    ranges: dict[str, Range] = {}
    for path in sorted(paths):
        leaf = batch.tensors.get(path)
        if leaf is None or not leaf.numel() or leaf.is_complex():
            continue
        if not leaf.is_floating_point():
            ranges[path] = Range.of_integers(leaf, is_known)
        elif not is_known:
            ranges[path] = Range.of_floats(leaf.detach())
    return ranges


def valid_entries(batch: Batch, path: str, ignore: float, masked: bool) -> Tensor:
    """A mask of the entries at `path` that differ from `ignore`, which may be NaN. With `masked`, entries whose
    attention mask is 0 are not valid either."""
    leaf = batch.by_sample(path)
    is_valid = leaf.isnan().logical_not() if math.isnan(ignore) else leaf.ne(ignore)
    return is_valid & batch.by_sample(MASK).ne(0) if masked else is_valid


class Values:
    """The values of one floating-point leaf, and `marks`: values that may mark missing entries."""

    def __init__(self, leaf: Tensor) -> None:
        numbers = leaf.detach().flatten()
        numbers = numbers[:: -(-len(numbers) // MOST_VALUES)]
        low, high = _extremes(leaf[leaf.isnan().logical_not()])
        self.high = high
        self.has_nan = bool(leaf.isnan().any())
        self.marks = [math.nan] if self.has_nan else []
        if low < 0:
            self.marks += dict.fromkeys([*([low] if low.is_integer() else []), *MISSING_MARKS])
        if high >= 2 and high.is_integer():
            self.marks.append(high)
        marks = torch.tensor(self.marks).to(leaf)
        valid = numbers[~(numbers.isnan() | torch.isin(numbers, marks))]
        self.valid = valid if len(valid) else torch.ones(1).to(leaf)
        self.drawn = torch.cat([marks, torch.zeros(1).to(leaf)]) if low < 0 else marks

    def filled(self, leaf: Tensor, generator: torch.Generator) -> Tensor:
        """The leaf with each NaN replaced by a random valid value."""
        return torch.where(leaf.isnan(), self._chosen(self.valid, leaf, generator), leaf) if self.has_nan else leaf

    def moved(self, leaf: Tensor, scale: Tensor, up: bool) -> Tensor:
        """The leaf with its values moved towards 0 or, with `up`, towards the highest value, since a loss may have a
        threshold. The distance of each value from 0 or from the highest value is multiplied by `scale` (0 to 1)."""
        return self.high - (self.high - leaf) * scale if up else leaf * scale

    def draw(self, leaf: Tensor, number: int, generator: torch.Generator) -> Tensor:
        """The values of draw `number` for a leaf like `leaf`: random valid values, some replaced by marks. In a sample
        with several entries, at least one entry is not a mark. If each sample has one entry, exactly one sample has a
        mark. Successive draws use all marks in turn."""
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
    """The lowest and the highest value of the leaf. Both are NaN if any value is NaN, and 0 if the leaf is empty."""
    if not leaf.numel():
        return 0.0, 0.0
    low, high = leaf.aminmax()
    return float(low), float(high)


def _outward(high: float) -> float:
    """An upper bound that later values seldom exceed: -TINY for a negative `high`, 0 for 0, otherwise the next power of
    four, at least 1."""
    if high <= 0:
        return 0.0 if high == 0 else -TINY
    return high if math.isinf(high) else max(1.0, 4.0 ** math.ceil(math.log(high, 4)))
