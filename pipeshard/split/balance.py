"""Balance: the assignment of unit calls to stages that minimizes the time of the slowest stage (in a V: rank)."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeshard.errors import PartitionError, counted
from pipeshard.schedule.given import is_v

Costs = NDArray[Any]  # (blocks + 1, blocks + 1): the cost of the blocks from row (included) to column (excluded)


def balance(
    costs: Sequence[float],
    num_stages: int,
    forbidden: Mapping[int, str] | None = None,
    fits: Callable[[int, int, int], bool] | None = None,
    ranks: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
) -> list[int]:
    """Return the number of consecutive calls of each stage. These numbers minimize the largest stage cost and, among
    equal solutions, the sum of squared stage costs. The keys of `forbidden` are the calls before which no cut is
    allowed, and the values are the reasons. `fits(stage, start, end)` returns whether a stage can hold the calls from
    start to end (exclusive). If a range does not fit, `fits` must also return False for all ranges that contain it.
    `ranks` contains the rank of each stage. If the ranks form a V, blocks of inseparable calls are then moved between
    stages, as long as a move reduces (in order of priority) the largest cost of a rank, the sum of squared rank costs,
    or the sum of squared stage costs. `speeds` contains the relative speed of each stage's rank. A stage's cost is
    divided by this speed.

    Raises PartitionError if the calls cannot be split into `num_stages` parts, or if no partition fits.
    """
    if num_stages == 1 and fits is None:
        return [len(costs)]  # without a cut, the model may have no unit calls
    forbidden = forbidden or {}
    starts = [k for k in range(len(costs)) if k == 0 or k not in forbidden]
    if len(starts) < num_stages:
        why = f"; not every cut is possible: {next(iter(forbidden.values()))}" if forbidden else ""
        most = max(1, len(starts))
        asked, remedy = f"pp_size={num_stages}", f"pp_size={most}" if most == 1 else f"pp_size <= {most}"
        chunks = num_stages // len(set(ranks or range(num_stages)))
        if chunks > 1:
            asked = f"{num_stages} (pp_size={num_stages // chunks} with {chunks} stages per rank)"
            remedy += " with schedule='1f1b', which has one stage per rank"
        raise PartitionError(
            f"the model makes {counted(len(costs), 'unit call')}, which can be split into at most "
            f"{counted(most, 'stage')}, fewer than {asked}{why}. Use {remedy}, or cut inside a unit, such as a layer: "
            "pass partition=[...] with the names of the modules to cut after"
        )
    edges = [*starts, len(costs)]
    sums = [0.0, *itertools.accumulate(costs)]
    at = np.array([sums[edge] for edge in edges])
    ranges = np.where(np.tri(len(edges), k=-1).T, at - at[:, None], np.inf)  # the cost of the blocks from row to column

    def of_stage(stage: int) -> Costs:
        here = ranges / (speeds[stage] if speeds else 1.0)
        if fits is not None:
            lowest = _lowest(edges, partial(fits, stage))
            here[np.arange(len(edges))[:, None] < lowest] = np.inf
        return here

    stages = [of_stage(stage) for stage in range(num_stages)]
    highest, cuts = _divide(stages, np.maximum)
    if cuts is not None:
        _, cuts = _divide(stages, lambda total, c: total + c * c, most=highest)
    if cuts is None:
        raise PartitionError(f"no partition into {num_stages} stages fits")
    if ranks is not None and is_v(tuple(ranks), num_stages // 2):
        cuts = _level(cuts, ranks, stages)
    return [edges[b] - edges[a] for a, b in itertools.pairwise(cuts)]


def _lowest(edges: Sequence[int], fits: Callable[[int, int], bool]) -> list[int]:
    """For each end of a range of blocks, return the smallest start with which the range fits. The starts never
    decrease, since a range does not fit if a part of it does not fit."""
    lowest, start = [0], 0
    for end in range(1, len(edges)):
        while start < end and not fits(edges[start], edges[end]):
            start += 1
        lowest.append(start)
    return lowest


def _level(cuts: list[int], ranks: Sequence[int], stages: Sequence[Costs]) -> list[int]:
    """Return `cuts` after moving single blocks between stages, best move first, as long as a move reduces the cost.

    In a V, the first and the last stage share a rank, so an expensive head requires a small first stage.
    """

    def value(cuts: Sequence[int]) -> tuple[float, float, float]:
        costs = [float(of_stage[run]) for of_stage, run in zip(stages, itertools.pairwise(cuts), strict=True)]
        sums = [0.0] * (max(ranks) + 1)
        for rank, each in zip(ranks, costs, strict=True):
            sums[rank] += each
        return max(sums), sum(each * each for each in sums), sum(each * each for each in costs)

    def moves() -> Iterator[list[int]]:
        for start, end in itertools.combinations(range(1, len(cuts)), 2):
            for step in (1, -1):  # shift all cuts between two stages by one block
                moved = [*cuts[:start], *(cut + step for cut in cuts[start:end]), *cuts[end:]]
                if all(a < b for a, b in itertools.pairwise(moved)):
                    yield moved

    while value(best := min(moves(), key=value, default=cuts)) < value(cuts):
        cuts = best
    return cuts


def _divide(
    stages: Sequence[Costs], combine: Callable[[Costs, Costs], Costs], most: float = math.inf
) -> tuple[float, list[int] | None]:
    """Accumulate the stages' costs with `combine`. Return the smallest possible total, and the cuts
    (0, ..., number of blocks) that achieve this total. Return (inf, None) if no division is allowed.

    Dynamic programming over (stages, blocks). A range of blocks is not allowed if its cost is infinite or exceeds
    `most`. If several starts of a stage are equally good, the last one is chosen.
    """
    blocks = len(stages[0]) - 1
    best = np.array([0.0] + [math.inf] * blocks)
    choices = []
    for costs in stages:
        values = combine(best[:, None], np.where(costs > most, math.inf, costs))
        choice = blocks - values[::-1].argmin(axis=0)
        best = values[choice, np.arange(blocks + 1)]
        choices.append(choice)
    if best[blocks] == math.inf:
        return math.inf, None
    cuts = [blocks]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return float(best[blocks]), cuts[::-1]
