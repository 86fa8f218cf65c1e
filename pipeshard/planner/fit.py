"""Fit: the partition whose ranks all stay within a memory limit, and whose dearest stage is as cheap as possible."""

import heapq
import itertools
from collections.abc import Mapping, Sequence

from pipeshard.errors import PartitionError
from pipeshard.model.partition import balance
from pipeshard.planner.memory import Footprint, alive_at_peak
from pipeshard.schedule.program import Program

TRIES = 64
Caps = tuple[tuple[tuple[int, float], ...], ...]  # for each stage: (microbatches alive, less than how many bytes)


def fit(
    program: Program, weights: Sequence[float], forbidden: Mapping[int, str], footprint: Footprint, limit: int
) -> list[int] | None:
    """How many calls each stage of `program` gets, or None where no partition is found to fit in `limit` bytes a rank.

    With one stage a rank, what it takes depends on its calls alone, and dynamic programming finds the best one. With
    several, the search is best-first: of a partition with a rank that takes too much, one of that rank's stages must
    become smaller, whichever; each choice is looked at in the order of what it costs. It ends after `TRIES` partitions.
    """
    order = itertools.count()
    num_stages = len(program.placement)
    alive = [alive_at_peak(actions, [1] * num_stages) for actions in program.ranks]
    least = [dict.fromkeys(of_rank, 1) if len(of_rank) > 1 else of_rank for of_rank in alive]
    caps: Caps = tuple(((least[r][s], limit + 0.5),) for s, r in enumerate(program.placement))
    queue: list[tuple[tuple[float, float], int, list[int], Caps]] = []

    def look(caps: Caps) -> None:
        def fits(stage: int, start: int, end: int) -> bool:
            always = footprint.static(start, end) + footprint.recomputed(start, end)
            kept = footprint.activations(start, end)
            return all(always + count * kept < cap for count, cap in caps[stage])

        try:
            counts = balance(weights, num_stages, forbidden, fits)
        except PartitionError:
            return
        ends = list(itertools.accumulate(counts))
        sums = [sum(weights[end - count : end]) for count, end in zip(counts, ends)]
        heapq.heappush(queue, ((max(sums), sum(s * s for s in sums)), next(order), counts, caps))

    look(caps)
    for _ in range(TRIES):
        if not queue:
            return None
        _, _, counts, caps = heapq.heappop(queue)
        worst = _heaviest(program, counts, footprint)
        if sum(size for _, size in worst.values()) <= limit:
            return counts
        for stage, (count, size) in worst.items():
            look((*caps[:stage], (*caps[stage], (count, size)), *caps[stage + 1 :]))
    return None


def _heaviest(program: Program, counts: Sequence[int], footprint: Footprint) -> dict[int, tuple[int, int]]:
    """Of the rank that takes most: for each of its stages, the microbatches alive at its peak, and the bytes."""
    edges = [0, *itertools.accumulate(counts)]
    runs = list(itertools.pairwise(edges))
    kept = [footprint.activations(*run) for run in runs]
    always = [footprint.static(*run) + footprint.recomputed(*run) for run in runs]
    ranks = [
        {s: (count, always[s] + count * kept[s]) for s, count in alive_at_peak(actions, kept).items()}
        for actions in program.ranks
    ]
    return max(ranks, key=lambda stages: sum(size for _, size in stages.values()))
