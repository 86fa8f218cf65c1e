"""Grouping: chooses samples with similar lengths for each microbatch, within a limit of padded tokens.

Samples are sorted by length, and each group consists of consecutive samples. Dynamic programming finds the fastest such
grouping (DynaPipe, Jiang et al. 2023, arXiv:2311.10418).
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

LEVELS = 64  # maximum number of limits to try for the time of the longest microbatch


class TokenCost(NamedTuple):
    """The time of a microbatch in units of a token's time: `fixed`, plus 1 + `slope` * (earlier tokens) per token."""

    fixed: float = 0.0
    slope: float = 0.0

    def of(self, rows: Any, lengths: Iterable[Any]) -> Any:
        """The time of `rows` samples padded to `lengths` (one length, or one for the encoder and one for the decoder).
        If the arguments are arrays, returns the times of several microbatches."""
        return self.fixed + rows * sum(length + self.slope * length**2 / 2 for length in lengths)


def group(lengths: Sequence[Sequence[int]], limit: int, cost: TokenCost, idle: float) -> list[list[int]]:
    """Return the groups (microbatches), sorted by time. Each group lists its sample indices in ascending order.

    `lengths` contains the number of tokens of each sample: one number, or one for the encoder and one for the decoder.
    In each group, the number of samples times the padded length is at most `limit`. The padded length is the largest
    length in the group or, with two lengths per sample, the sum of the largest encoder length and the largest decoder
    length. Each sample alone must fit into `limit`. Of all groupings of the sorted samples into runs of consecutive
    samples, the result minimizes the sum of all groups' times plus `idle` times the longest time (for which other
    stages wait). Tries at most LEVELS limits for the longest time.
    """
    order = sorted(range(len(lengths)), key=lambda k: (*lengths[k], k))
    costs = _costs([lengths[k] for k in order], limit, cost)
    levels = _levels(costs)
    best = np.full((len(order) + 1, len(levels)), np.inf)
    first = np.zeros(best.shape, dtype=np.int64)
    best[0] = 0.0
    columns = np.arange(len(levels))
    for end, of_end in enumerate(costs, 1):
        start = end - len(of_end)  # of_end[k] is the time of the samples from start + k to end
        totals = np.where(of_end[:, None] <= levels, of_end[:, None] + best[start:end], np.inf)
        chosen = totals.argmin(0)
        best[end], first[end] = totals[chosen, columns], start + chosen
    level = int((best[-1] + idle * levels).argmin())
    timed, end = list[tuple[float, list[int]]](), len(order)
    while end:
        start = int(first[end, level])
        samples = sorted(order[start:end])  # the loss may depend on the order, as DPO's does
        timed.append((costs[end - 1][start - end], samples))
        end = start
    return [samples for _, samples in sorted(timed)]


def _costs(lengths: Sequence[Sequence[int]], limit: int, cost: TokenCost) -> list[np.ndarray]:
    """For each sample, the times of the runs of consecutive samples that end with this sample and fit the limit,
    longest run first."""
    table = np.array(lengths, dtype=np.int64)
    found = []
    for end in range(1, len(table) + 1):
        most = max(1, limit // int(table[end - 1].sum()))
        longest = np.maximum.accumulate(table[max(0, end - most) : end][::-1])
        rows = np.arange(1, len(longest) + 1)
        fitting = int((rows * longest.sum(1) <= limit).sum()) or 1
        found.append(cost.of(rows, longest.T)[:fitting][::-1])
    return found


def _levels(costs: Sequence[np.ndarray]) -> np.ndarray:
    """Limits to try for the longest microbatch's time, ascending: at most LEVELS, none below any sample's own time."""
    times = np.unique(np.concatenate(costs))
    times = times[times >= max(of_end[-1] for of_end in costs)]
    return times[np.linspace(0, len(times) - 1, min(LEVELS, len(times))).astype(np.int64)]
