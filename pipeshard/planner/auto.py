"""Auto: the search for a model's fastest schedule and cuts, within the memory of each rank."""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from operator import itemgetter, truediv

from pipeshard.errors import PartitionError, PipeshardError
from pipeshard.planner.candidate import Candidate, Subject
from pipeshard.planner.inside import Inside, opened_layers, places_inside, sent
from pipeshard.planner.memory import StagePart
from pipeshard.schedule.search import (
    Rule,
    Searched,
    StageCosts,
    anneal,
    climb,
    estimate,
    of_ranks,
    rules,
    scheduled,
    varied,
)
from pipeshard.split.balance import balance
from pipeshard.split.boundary import forbidden_cuts

CHUNKS_TRIED = 2, 3, 4  # stages per rank, assigned to the ranks in a loop; two may also form a V
TIGHTNESS = 0.0, 1.25, 1.5, 2.0  # values of `tightness` for `estimate`
ESTIMATES = 1500  # changes of cuts tried per tightness
RETRIES = 10  # attempts to find a legal change of cuts
PROMISING = 1.1  # a placement is searched if its starting program takes at most this multiple of the fastest time
PLACEMENTS = 5, 2  # number of placements searched in the first and the second round
REFINED, SEEDS = 3, (0, 1)  # the number of solutions that are refined inside layers, and the random seeds for each
SLACK = 0.005  # fraction by which a step may become slower while a solution is refined
ACTIONS, TRIES = 800_000, 3000  # limits: actions scheduled per round, and changes tried per placement
IDLE = StagePart(0, has_gradients=True, is_running=False)
Edges = tuple[int, ...]  # the first call of each stage, then the total number of calls
Choice = tuple[Edges, Rule]
Found = tuple[float, Choice, "Cutter"]  # time, choice, and the cutter of the choice


class Cutter:
    """For one placement of stages, searches for the cuts of a model and for the rule that schedules m microbatches."""

    def __init__(
        self, subject: Subject, m: int, placement: tuple[int, ...], places: Inside | None = None, seed: int = 0
    ) -> None:
        self.subject, self.m, self.placement = subject, m, placement
        possible = sorted(places.names) if places else range(1, len(subject.costs))
        forbidden, self.places = forbidden_cuts(subject.flow), places
        self.starts = [0, *(k for k in possible if k not in forbidden), len(subject.costs)]
        self.places_of = {start: place for place, start in enumerate(self.starts)}
        self.part, self.work = cache(self._part), lru_cache(self._work)
        self.draws = random.Random(seed)

    def initial(self) -> Edges:
        """Return the cuts that balance the costs of the stages, computed as for the known schedules."""
        weights, forbidden = [sum(cost) for cost in self.subject.costs], forbidden_cuts(self.subject.flow)
        counts = balance(weights, len(self.placement), forbidden, ranks=self.placement)
        return (0, *itertools.accumulate(counts))

    def moved(self, edges: Edges) -> Edges:
        """Return a copy of `edges` in which one cut, or several consecutive cuts, are moved by one legal position. If
        no legal move is found, return `edges` unchanged."""
        if len(edges) < 3:
            return edges
        places = [self.places_of[edge] for edge in edges]
        for _ in range(RETRIES):
            first = self.draws.randrange(1, len(places) - 1)
            last = first + 1 if self.draws.random() < 0.5 else self.draws.randrange(first, len(places) - 1) + 1
            step = self.draws.choice((-1, 1))
            moved = [*places[:first], *(place + step for place in places[first:last]), *places[last:]]
            if moved[first - 1] < moved[first] and moved[last - 1] < moved[last]:
                return tuple(self.starts[place] for place in moved)
        return edges

    def _part(self, start: int, end: int) -> tuple[float, ...]:
        """A stage's costs of F, B and W, then four sizes in bytes: the stage's memory without activations, the
        additional memory at the end of a step, the activations of a microbatch (0 if they are offloaded), and the
        temporary memory of a backward."""
        footprint = self.subject.footprint
        temporary, kept = footprint.temporary(start, end), footprint.activations(start, end)
        always = footprint.total(start, end, IDLE)
        update = footprint.total(start, end, None) - always
        costs = (sums[end] - sums[start] for sums in self.subject.sums)
        return *costs, always, update, 0 if self.subject.training.offloads("activations") else kept, temporary

    def _work(self, edges: Edges) -> StageCosts:
        """The costs, memory and messages of the stages with these cuts."""
        devices, placement = self.subject.devices, self.placement
        forward, backward, weight, always, updates, sizes, temporary = zip(*map(self.part, edges, edges[1:]))
        if len({*devices.speeds}) > 1:
            speeds = [devices.speeds[rank] for rank in placement]
            forward, backward, weight = (tuple(map(truediv, costs, speeds)) for costs in (forward, backward, weight))
        room, update, most = list(devices.memory), [0] * len(devices.memory), [0] * len(devices.memory)
        for rank, size, added, more in zip(placement, always, updates, temporary):
            room[rank] -= size
            update[rank] += added
            most[rank] = max(most[rank], more)
        footprint = self.subject.footprint
        runs = [*itertools.pairwise(edges)]
        for rank, stages in enumerate(of_ranks(placement, len(room)) if footprint.has_tied else ()):
            again, gradients = footprint.repeated([runs[s] for s in stages])
            room[rank] += again
            update[rank] -= self.subject.training.update(gradients)
        room = [left - more if added <= left else -1 for left, more, added in zip(room, most, update)]
        ends = zip(edges, placement, (-1, *placement))
        sent = [self.sent[start] if start and rank != before else (0, 0) for start, rank, before in ends]
        messages = devices.transfers(placement, sent)
        latency, returned = (tuple(messages.get(name, [0.0] * len(sent))) for name in ("latency", "returned"))
        return StageCosts(placement, forward, backward, weight, sizes, tuple(room), latency, returned)

    @cached_property
    def sent(self) -> Sequence[tuple[int, int]]:
        """For each call, the bytes that cross a cut before the call, and the bytes of the gradients that are sent back.
        Without links, both numbers are 0."""
        if not self.subject.devices.links:
            return [(0, 0)] * len(self.subject.costs)
        return self.places.sent if self.places else sent(self.subject)

    def names(self, edges: Edges) -> list[str]:
        """The name of the module before each cut. Requires `places`."""
        assert self.places is not None
        return [self.places.names[edge] for edge in edges[1:-1]]

    def cuts(self) -> set[Edges]:
        """The cuts to start from: the initial cuts and, for each tightness, the cuts with the lowest estimate found.
        Omits cuts with which a rank lacks the memory for one microbatch."""
        initial = self.initial()
        values = [partial(self.estimate, tightness) for tightness in TIGHTNESS]
        leasts = [climb(initial, value(initial), value, self.moved, ESTIMATES)[1] for value in values]
        return {edges for edges in (initial, *leasts) if self.estimate(1.0, edges)[0] < math.inf}

    def start(self, most: float = math.inf) -> list[Found]:
        """Find the fastest combination of starting cuts and a starting rule. Return it as a list with one entry. The
        list is empty if every combination exceeds the memory or takes at least `most`."""
        best, found = most, list[Found]()
        for edges in sorted(self.cuts()):
            for rule in rules(self.work(edges), self.m):
                if (time := self.time((edges, rule), best)) < best:
                    best, found = time, [(time, (edges, rule), self)]
        return found

    def search(self, start: Choice, time: float, actions: int, slack: float = 0.0) -> Found:
        """Search from `start`, whose step takes `time`, and return the fastest choice found. The search schedules at
        most `actions` actions. The search may also move to choices that are slower than the fastest choice, by at most
        a fraction that falls from `slack` to 0."""
        tries = min(TRIES, actions // (3 * self.m * len(self.placement)))
        return *anneal(start, time, self.time, self.change, tries, slack), self

    def estimate(
        self, tightness: float, edges: Edges, best: tuple[float, float] = (math.inf, math.inf)
    ) -> tuple[float, float]:
        return estimate(self.work(edges), self.m, tightness, best[0])

    def time(self, choice: Choice, most: float = math.inf) -> float:
        return scheduled(self.work(choice[0]), self.m, choice[1], most)[0]

    def change(self, choice: Choice) -> Choice:
        edges, rule = choice
        if self.draws.random() < 0.5:
            return edges, varied(rule, self.m, self.draws)
        return self.moved(edges), rule


def placements(p: int) -> Iterator[tuple[int, ...]]:
    """Yield the rank of each stage for each placement: one stage per rank, two per rank in a V, and several per rank in
    a loop."""
    yield tuple(range(p))
    yield (*range(p), *reversed(range(p)))
    for chunks in CHUNKS_TRIED:
        yield tuple(range(p)) * chunks


def search(subject: Subject, p: int, m: int) -> tuple[Candidate, Searched] | None:
    """Search for the fastest program of m microbatches that fits in the memory of each rank. Returns the program's
    Candidate (the cut model) and schedule, or None if the search finds no such program. The search simulates the
    program, so the program has no deadlocks."""
    found, most = list[Found](), math.inf
    for placement in placements(p):
        with suppress(PartitionError):  # the model has too few units
            found += Cutter(subject, m, placement).start(most)
            most = PROMISING * min((time for time, _, _ in found), default=math.inf)
    found = [each for each in found if each[0] <= most]
    for count in PLACEMENTS:
        found.sort(key=itemgetter(0))
        found[:count] = [cutter.search(choice, time, ACTIONS // count) for time, choice, cutter in found[:count]]
    found.sort(key=itemgetter(0))
    cut = (
        (replace(subject, partition=[end - start for start, end in itertools.pairwise(edges)]), rule, cutter.placement)
        for _, (edges, rule), cutter in found
    )
    whole = next((made for each in cut if (made := _made(*each, m))), None)
    within = _made_inside(subject, refined(subject, found[:REFINED]), m)
    return min((each for each in (whole, within) if each), key=lambda each: each[0].estimate(1.0).time, default=None)


def refined(subject: Subject, found: Sequence[Found]) -> Iterator[Found]:
    """For each solution whose cuts are between layers, search for cuts inside layers. Yields the solutions that become
    faster with such cuts."""
    places = places_inside(subject) if found else None
    for (time, (edges, rule), cutter), seed in itertools.product(found if places else (), SEEDS):
        assert places is not None
        start = tuple(places.edges[edge] for edge in edges)
        if not {*start[1:-1]} <= places.names.keys():  # the unit before a cut is called again after the cut
            continue
        fine = Cutter(places.subject, cutter.m, cutter.placement, places, seed)
        faster = fine.search((start, rule), time, ACTIONS // len(found), SLACK)
        if faster[0] < time and places.inner & {*faster[1][0]}:
            yield faster


def _made_inside(subject: Subject, found: Iterable[Found], m: int) -> tuple[Candidate, Searched] | None:
    """The candidate and the schedule of the fastest solution in `found` that fits in memory, or None. The solutions
    have cuts inside layers. Only layers that contain a cut are divided."""
    for _, (edges, rule), cutter in sorted(found, key=itemgetter(0)):
        with suppress(PipeshardError):  # with fewer divided layers, the model cannot be cut here
            if made := _made(opened_layers(subject, cutter.names(edges)), rule, cutter.placement, m):
                return made
    return None


def _made(subject: Subject, rule: Rule, placement: tuple[int, ...], m: int) -> tuple[Candidate, Searched] | None:
    """The candidate and the schedule for the partition of `subject` and this rule, or None if a rank exceeds its
    memory."""
    p, stages = max(placement) + 1, subject.cut(subject.partition, placement).stages
    work = Cutter(subject, m, placement).work((*map(stages.index, range(len(placement))), len(stages)))
    if math.isinf(scheduled(work, m, rule)[0]):
        return None
    schedule = Searched(work, rule, m)
    candidate = Candidate(subject, schedule(p, m), len(placement) // p)
    return (candidate, schedule) if candidate.fits else None
