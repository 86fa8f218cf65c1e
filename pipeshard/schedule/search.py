"""Search: finds a fast order of F, B and W for stages with arbitrary costs, within the memory of each rank.

The schedules in `schedules.py` are designed for stages with equal costs. For stages with arbitrary costs, a list
scheduler uses the clock of `simulate`: a free rank runs the best action that can start. A `Rule` selects this action.
`climb` changes the rule and the cuts of the model, and keeps the changes that do not make the step slower. Everything
is deterministic.
"""

import heapq
import itertools
import math
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

from pipeshard.schedule.program import Action, Kind, Program

T = TypeVar("T")
V = TypeVar("V", float, tuple[float, float])
F, B, W = Kind.F, Kind.B, Kind.W


class StageCosts(NamedTuple):
    """The stages of a pipeline. All fields except `room` have one entry per stage: the stage's rank, the costs of its
    F, B and W, the memory that a microbatch takes from its F to its last action, and the durations of two messages (the
    stage's input, and the gradients that the stage sends back). `room` is each rank's memory for microbatches.
    `scheduled` requires room for at least one microbatch on each rank. A stage whose weight cost is 0 has no W."""

    placement: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    sizes: tuple[float, ...]
    room: tuple[float, ...]
    latency: tuple[float, ...]
    returned: tuple[float, ...]


def estimate(work: StageCosts, m: int, tightness: float = 1.0, most: float = math.inf) -> tuple[float, float]:
    """Estimate the time of a step of m microbatches. Returns the time of the slowest rank, and the sum of the squared
    times of all ranks. If a rank takes longer than `most`, both numbers are infinite.

    A rank is idle until its first input arrives, and from its last B to the end of the step. A rank is also idle if it
    runs out of other work before the first input of a later stage or the first gradient arrives. Memory limits how much
    other work a rank has, and how many microbatches are in flight. `tightness` is the memory that microbatches take,
    relative to the memory that they take in a step in which no action waits. If ranks have too little memory for one
    microbatch, the time is infinite, and the second number is the memory that these ranks lack in total.
    """
    _, forward, backward, weight, sizes, rooms, latency, returned = work
    starts = list(itertools.accumulate(map(operator.add, latency, (0.0, *forward))))  # when a microbatch's F can start
    ends = list(itertools.accumulate(map(operator.add, returned, (0.0, *backward))))  # from a B's end to the step's end
    there_and_back = starts[-1] + forward[-1] + ends[-1] + backward[-1]
    times, short = [], 0.0
    for stages, room in zip(of_ranks(work.placement, len(rooms)), rooms, strict=True):
        whole = m * sum([forward[s] + backward[s] + weight[s] for s in stages])
        life = sum([sizes[s] * (there_and_back - starts[s] - ends[s] + weight[s]) for s in stages])
        weights, held = sum([weight[s] for s in stages]), sum([sizes[s] for s in stages])
        few = min(m, room / held) if held else m
        short += max(0.0, held - room)
        first, forwards, backwards, both, comes_back = starts[stages[0]], 0.0, 0.0, 0.0, 0.0
        time = first + (m * tightness * life / max(room, held) if held else 0.0)
        for s in stages:
            filled, drained = starts[s] + whole - few * forwards, first + whole - few * (backwards + weights) + ends[s]
            forwards, backwards, both = forwards + forward[s], backwards + backward[s], both + backward[s] + weight[s]
            comes_back = there_and_back - ends[s] - backward[s]
            time = max(time, filled, drained, comes_back + m * both)
        times.append(max(time, comes_back + whole - few * forwards))
        if times[-1] > most:
            return math.inf, math.inf
    return (math.inf, short) if short else (max(times), sum(time * time for time in times))


class Rule(NamedTuple):
    """The rule by which a free rank selects its next action. A rank prefers a B to an F. If it `alternates` and has
    just run a B or a W, it prefers an F to a B. It runs a W if neither a B nor an F can run. Of several F's, the rank
    runs the F of the latest stage (with `deep_forward`) or of the earliest microbatch. `deep_backward` has the same
    effect for B's.

    A rank does not start a W if an F or a B can start within `patience` times the W's duration, unless an F waits for
    memory. `alive` contains, for each stage, the largest number of microbatches that may be between F and B. An F never
    takes memory that other F's of the `reserved` earliest unfinished microbatches still need. If `reserved` >= 1, the
    program always completes all microbatches.
    """

    deep_forward: bool
    deep_backward: bool
    alternates: bool
    patience: float
    alive: tuple[int, ...]
    reserved: int


def rules(work: StageCosts, m: int) -> Iterator[Rule]:
    """Yield the rules from which a search starts. They differ mainly in the number of microbatches that a stage keeps
    alive: as many as fit in memory, or somewhat more than are in flight in a step without idle time. The best rules
    come first, so that the search abandons slower rules early."""
    stages = range(len(work.placement))
    busy = [0.0] * len(work.room)
    for s in stages:
        busy[work.placement[s]] += work.forward[s] + work.backward[s] + work.weight[s]
    lives = [sum(work.forward[s:]) + sum(work.backward[s:]) for s in stages]
    in_flight = [math.ceil(1.5 * life / (max(busy) or 1.0)) + 1 for life in lives]
    for most in [m] * len(stages), in_flight:
        alive = tuple(min(m, count) for count in most)
        for deep, alternates, (patience, reserved) in itertools.product(
            (False, True), (False, True), ((0.0, 1), (1.0, 8))
        ):
            yield Rule(deep, deep, alternates, patience, alive, reserved)


def varied(rule: Rule, m: int, draws: random.Random) -> Rule:
    """A copy of the rule with one random change."""
    match draws.randrange(9):
        case 0:
            return rule._replace(patience=draws.choice((0.0, 0.25, 0.5, 0.75, 1.0)))
        case 1:
            return rule._replace(reserved=draws.choice((1, 2, 3, 4, 8)))
        case 2:
            return rule._replace(alternates=not rule.alternates)
        case 3:
            return rule._replace(deep_forward=draws.random() < 0.5, deep_backward=draws.random() < 0.5)
    alive = list(rule.alive)
    s = draws.randrange(len(alive))
    alive[s] = max(1, min(m, alive[s] + draws.choice((-2, -1, 1, 2))))
    return rule._replace(alive=tuple(alive))


@lru_cache
def of_ranks(placement: tuple[int, ...], p: int) -> list[list[int]]:
    """The stages of each rank."""
    stages: list[list[int]] = [[] for _ in range(p)]
    for s, rank in enumerate(placement):
        stages[rank].append(s)
    return stages


def climb(start: T, best: V, value: Callable[[T, V], V], change: Callable[[T], T], tries: int) -> tuple[V, T]:
    """Minimize a value by hill climbing: try `tries` changes from `start`, whose value is `best`, and keep each change
    that does not increase the value. Returns the lowest value and its argument. The result of `value(found, best)` may
    be inexact if it exceeds `best`."""
    for _ in range(tries):
        found = change(start)
        if (now := value(found, best)) <= best:
            best, start = now, found
    return best, start


def anneal(
    start: T, best: float, value: Callable[[T, float], float], change: Callable[[T], T], tries: int, slack: float
) -> tuple[float, T]:
    """Minimize a value like `climb`, but also keep changes whose value exceeds the lowest value so far by at most a
    fraction that falls from `slack` to 0. Returns the lowest value and its argument."""
    now = start
    for k in range(tries):
        changed = change(now)
        most = best * (1 + slack * (1 - k / tries))
        if (found := value(changed, most)) <= most:
            now = changed
            if found <= best:
                best, start = found, changed
    return best, start


def scheduled(
    work: StageCosts, m: int, rule: Rule, most: float = math.inf
) -> tuple[float, list[list[tuple[Kind, int, int]]]]:
    """Schedule a step of m microbatches with this rule. Returns the step's time and the actions of each rank. If the
    step cannot finish, or certainly takes longer than `most`, the time is infinite and the actions are incomplete."""
    placement, forward, backward, weight, sizes, room, latency, returned = work
    stages = range(len(placement))
    of_rank = of_ranks(placement, len(room))
    done: dict[Kind, list[int]] = {kind: [0 for _ in stages] for kind in (F, B, W)}
    forwards, backwards, weights = done[F], done[B], done[W]  # the number of completed microbatches of each stage
    arrives = [[math.inf] * m for _ in stages]  # when the input of each F arrives
    comes_back = [[math.inf] * m for _ in stages]  # when the gradient for each B arrives
    arrives[0] = [0.0] * m
    left, free, earliest = list(room), [0.0] * len(room), 0
    latest = [most * (1 + 1e-9) - m * sum(forward[s] + backward[s] + weight[s] for s in mine) for mine in of_rank]
    costs = {F: forward, B: backward, W: weight}
    totals = [sum(sizes[s] for s in mine) for mine in of_rank]
    plenty = [max(sizes) + rule.reserved * total for total in totals]
    deep_forward, deep_backward, alternates, patience, alive, reserved = rule
    rows: list[list[tuple[Kind, int, int]]] = [[] for _ in room]

    def takes_kept(rank: int, s: int, i: int) -> bool:
        """Whether this F takes memory that is reserved for the first microbatch whose F's on this rank are not all
        done. This microbatch must fit in memory together with all later microbatches. Earlier microbatches do not
        count, since they free their memory first."""
        mine = of_rank[rank]
        first = min([forwards[other] for other in mine])
        if i == first:
            return False
        taken = sizes[s] + totals[rank]
        for other in mine:
            freed = weights[other] if weight[other] else backwards[other]
            if (behind := forwards[other] - max(first + 1, freed)) > 0:
                taken += sizes[other] * behind
        return taken > room[rank] + 1e-9

    events = [(0.0, rank) for rank in range(len(room))]
    while events:
        now, rank = heapq.heappop(events)
        if now < free[rank]:
            continue
        best: tuple[tuple[int, int], Kind, int, int] | None = None
        soon, short = math.inf, False
        for kind in (F, B) if alternates and rows[rank] and rows[rank][-1][0] is not F else (B, F):
            if best is not None:
                break
            for s in of_rank[rank] if kind is B else ():
                i = backwards[s]
                if i == m:
                    continue
                if (at := comes_back[s][i]) <= now:
                    key = (-s, i) if deep_backward else (i, -s)
                    if best is None or key < best[0]:
                        best = key, B, i, s
                elif at < soon:
                    soon = at
            for s in of_rank[rank] if kind is F else ():
                i = forwards[s]
                if i == m or (at := arrives[s][i]) == math.inf or i - backwards[s] >= alive[s]:
                    continue
                needed = sizes[s]
                if left[rank] < plenty[rank]:
                    for other in of_rank[rank]:
                        needed += sizes[other] * max(0, min(earliest + reserved, i) - max(earliest, forwards[other]))
                if needed > left[rank] + 1e-9 or (reserved and left[rank] < plenty[rank] and takes_kept(rank, s, i)):
                    short = True
                elif at > now:
                    soon = min(soon, at)
                else:
                    key = (-s, i) if deep_forward else (i, -s)
                    if best is None or key < best[0]:
                        best = key, F, i, s
        for s in of_rank[rank] if best is None else ():
            i = weights[s]
            can_run = i < backwards[s] and weight[s] and (short or soon - now >= patience * weight[s])
            if can_run and (best is None or (i, -s) < best[0]):
                best = (i, -s), W, i, s
        if best is None:
            if soon < math.inf:
                heapq.heappush(events, (soon, rank))
            continue
        if now > latest[rank]:
            return math.inf, rows
        _, kind, i, s = best
        rows[rank].append((kind, i, s))
        done[kind][s] += 1
        now += (took := costs[kind][s])
        latest[rank] += took
        free[rank] = now
        if kind is F:
            left[rank] -= sizes[s]
            if s < stages[-1]:
                arrives[s + 1][i] = now + latency[s + 1]
                heapq.heappush(events, (arrives[s + 1][i], placement[s + 1]))
            else:
                comes_back[s][i] = now
        elif kind is B:
            if s > 0:
                comes_back[s - 1][i] = now + returned[s]
                heapq.heappush(events, (comes_back[s - 1][i], placement[s - 1]))
            else:
                earliest = i + 1
                for other in range(len(room)):
                    heapq.heappush(events, (now, other))
        if kind is W or (kind is B and not weight[s]):
            left[rank] += sizes[s]
        heapq.heappush(events, (now, rank))
    return max(free) if min(backwards) == m else math.inf, rows


@dataclass(frozen=True)
class Searched:
    """A schedule that the search found for these stages, as a function of (p, m, v)."""

    work: StageCosts
    rule: Rule
    num_microbatches: int
    __name__ = "auto"

    def __call__(self, p: int, m: int, v: int = 1) -> Program:
        """The program for m microbatches. If the search was for a different number of microbatches, the program uses
        the best starting rule."""
        return _program(self.work, m, self.rule if m == self.num_microbatches else None)


@lru_cache
def _program(work: StageCosts, m: int, rule: Rule | None) -> Program:
    if rule is None:
        rule = min(rules(work, m), key=lambda rule: scheduled(work, m, rule)[0])
    _, rows = scheduled(work, m, rule)
    return Program("auto", m, work.placement, tuple(tuple(itertools.starmap(Action, row)) for row in rows))
