"""Balance: the assignment of unit calls to stages that makes the slowest stage (in a V, the slowest rank) fastest."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from pipeshard.errors import PartitionError
from pipeshard.schedule.given import is_v


def balance(
    costs: Sequence[float],
    num_stages: int,
    forbidden: Mapping[int, str] | None = None,
    fits: Callable[[int, int, int], bool] | None = None,
    ranks: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
) -> list[int]:
    """Return the number of consecutive calls per stage that minimizes the largest stage cost, then the sum of squared
    stage costs. `forbidden` maps the calls before which no cut is allowed to the reasons. `fits(stage, start, end)`
    says whether a stage can hold the calls from start to end (exclusive); if a range does not fit, no larger range may
    fit. `ranks` is the rank of each stage; if the ranks form a V, blocks of inseparable calls then move between stages
    while this reduces the largest cost of a rank, then the sum of squares over ranks, then the sum of squares over
    stages. `speeds` is the relative speed of each stage's rank; a stage's cost is divided by it.

    Raises PartitionError if the calls can be split into fewer parts than stages, or no partition fits.
    """
    if num_stages == 1 and fits is None:
        return [len(costs)]  # no cut, so no unit call is needed either
    forbidden = forbidden or {}
    starts = [k for k in range(len(costs)) if k == 0 or k not in forbidden]
    if len(starts) < num_stages:
        why = f"; not every cut is possible: {next(iter(forbidden.values()))}" if forbidden else ""
        asked, remedy = f"pp_size={num_stages}", f"pp_size <= {len(starts)}"
        chunks = num_stages // len(set(ranks or range(num_stages)))
        if chunks > 1:
            asked = f"pp_size={num_stages // chunks} times {chunks} stages per rank"
            remedy += " with schedule='1f1b', which has one stage per rank"
        raise PartitionError(
            f"the model makes {len(costs)} unit calls, which can be split into at most {len(starts)} stages, fewer "
            f"than {asked}{why}. Use {remedy}, or list modules inside units to cut after, partition=[...]"
        )
    edges = [*starts, len(costs)]
    sums = [0.0, *itertools.accumulate(costs)]
    lowest = [_lowest(edges, partial(fits, stage)) for stage in range(num_stages)] if fits is not None else None

    def cost(stage: int, start: int, end: int) -> float:
        if lowest is not None and start < lowest[stage][end]:
            return math.inf
        return (sums[edges[end]] - sums[edges[start]]) / (speeds[stage] if speeds else 1.0)

    highest, cuts = _divide(len(starts), num_stages, cost, max)
    if cuts is not None:
        _, cuts = _divide(len(starts), num_stages, cost, lambda total, c: total + c * c, most=highest)
    if cuts is None:
        raise PartitionError(f"no partition into {num_stages} stages fits")
    if ranks is not None and is_v(tuple(ranks), num_stages // 2):
        cuts = _level(cuts, ranks, cost)
    return [edges[b] - edges[a] for a, b in itertools.pairwise(cuts)]


def _lowest(edges: Sequence[int], fits: Callable[[int, int], bool]) -> list[int]:
    """Return, for each end, the smallest start of a range of blocks that fits. The start never decreases, since a range
    does not fit if a smaller range inside it does not fit."""
    lowest, start = [0], 0
    for end in range(1, len(edges)):
        while start < end and not fits(edges[start], edges[end]):
            start += 1
        lowest.append(start)
    return lowest


def _level(cuts: list[int], ranks: Sequence[int], cost: Callable[[int, int, int], float]) -> list[int]:
    """Return `cuts` after moving single blocks between stages, best move first, as long as a move reduces the cost.

    In a V, the first and the last stage share a rank, so an expensive head requires a small first stage.
    """

    def value(cuts: Sequence[int]) -> tuple[float, float, float]:
        costs = [cost(stage, *run) for stage, run in enumerate(itertools.pairwise(cuts))]
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
    blocks: int,
    num_stages: int,
    cost: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
    most: float = math.inf,
) -> tuple[float, list[int] | None]:
    """Return the minimum of the stages' costs, accumulated with `combine`, and the cuts that achieve it (0, ...,
    `blocks`); (inf, None) if no division is allowed.

    Dynamic programming over (stages, blocks). `cost(stage, start, end)` must grow with the range of blocks; a range is
    not allowed if its cost is infinite or exceeds `most`.
    """
    best: list[float] = [0.0] + [math.inf] * blocks
    choices: list[list[int]] = []
    for stage in range(num_stages):
        row, choice = [math.inf] * (blocks + 1), [0] * (blocks + 1)
        for end in range(stage + 1, blocks + 1):
            for start in range(end - 1, stage - 1, -1):
                here = cost(stage, start, end)
                if here > most or here == math.inf or (combine is max and here >= row[end]):
                    break
                value = combine(best[start], here)
                if value < row[end]:
                    row[end], choice[end] = value, start
        best = row
        choices.append(choice)
    if best[blocks] == math.inf:
        return math.inf, None
    cuts = [blocks]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return best[blocks], cuts[::-1]
