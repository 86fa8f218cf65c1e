"""Grouping: samples of different lengths as microbatches, within a limit of padded tokens.

Among samples sorted by length, the fastest groups are runs of neighbours, which dynamic programming finds (DynaPipe,
Jiang et al. 2023, arXiv:2311.10418).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, permutations
from typing import Any, NamedTuple

import numpy as np

LEVELS = 64  # limits for the longest microbatch that are tried
CLUSTERS = 3  # of microbatches of similar times, whose orders are tried


class TokenCost(NamedTuple):
    """The time of a microbatch, in that of a token: `fixed`, and for each token 1 + `slope` for each one before it."""

    fixed: float = 0.0
    slope: float = 0.0

    def of(self, rows: Any, lengths: Iterable[Any]) -> Any:
        """The time of `rows` samples, padded to these lengths (of an encoder and a decoder, or one alone); of several
        microbatches, if all of these are arrays."""
        return self.fixed + rows * sum(length + self.slope * length**2 / 2 for length in lengths)


def group(lengths: Sequence[Sequence[int]], limit: int, cost: TokenCost, idle: float) -> list[list[int]]:
    """The samples of each microbatch, by their number, from short ones to long ones.

    `lengths` has the tokens of each sample: one number, or one for the encoder and one for the decoder. A group's rows
    times its largest lengths are at most `limit`; a single sample must fit. The sum of all groups' times and
    `idle` times the longest, which is what the other stages wait for, is the smallest of all runs of neighbours. If
    these have more than LEVELS different times, only as many limits for the longest are tried.
    """
    order = sorted(range(len(lengths)), key=lambda k: (*lengths[k], k))
    costs = _costs([lengths[k] for k in order], limit, cost)
    levels = _levels(costs)
    best = np.full((len(order) + 1, len(levels)), np.inf)
    first = np.zeros(best.shape, dtype=np.int64)
    best[0] = 0.0
    columns = np.arange(len(levels))
    for end, of_end in enumerate(costs, 1):
        start = end - len(of_end)  # of_end[k] is the time of the samples from start + k on
        totals = np.where(of_end[:, None] <= levels, of_end[:, None] + best[start:end], np.inf)
        chosen = totals.argmin(0)
        best[end], first[end] = totals[chosen, columns], start + chosen
    level = int((best[-1] + idle * levels).argmin())
    groups, end = list[list[int]](), len(order)
    while end:
        start = int(first[end, level])
        groups.append(order[start:end])
        end = start
    return groups[::-1]


def _costs(lengths: Sequence[Sequence[int]], limit: int, cost: TokenCost) -> list[np.ndarray]:
    """For each end of a run, the times of the runs within the limit that end there, from the longest run on."""
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
    """The times that the longest microbatch may have: at least that of the longest sample alone."""
    times = np.unique(np.concatenate(costs))
    times = times[times >= max(of_end[-1] for of_end in costs)]
    return times[np.linspace(0, len(times) - 1, min(LEVELS, len(times))).astype(np.int64)]


def orders(times: Sequence[float]) -> Iterator[list[int]]:
    """Orders of microbatches with these times that a schedule may hide best: arrangements of clusters, each from short
    to long, from long to short, and the longest in the middle or at the ends."""
    rising, m = sorted(range(len(times)), key=times.__getitem__), len(times)
    clusters = [rising[k * m // CLUSTERS : (k + 1) * m // CLUSTERS] for k in range(CLUSTERS)]
    yield from (list(chain(*clusters)) for clusters in permutations(clusters))
    yield rising[::-1]
    yield rising[::2] + rising[1::2][::-1]
    yield rising[::-2] + rising[m % 2 :: 2]
