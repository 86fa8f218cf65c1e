"""Simulation: the time line of a program under given costs, or the proof that it deadlocks."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeshard.errors import ConfigurationError, DeadlockError
from pipeshard.schedule.communicate import add_communication
from pipeshard.schedule.program import Action, Kind, Program

Cost = float | Sequence[float]
Posts = list[tuple[Action, float]]  # messages that one end of an edge has posted, and when


@dataclass(frozen=True, slots=True)
class Span:
    """The time from `start` to `end` during which a rank ran `action`."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """How a program ran. Times are in the unit of the costs; tuples have one entry for each rank.

    `spans` are the compute actions in order, `busy` the time spent in them, `bubble` the idle share of all rank-time
    (0 to 1), `peak_activations` the largest number of microbatches, counted once a stage, alive at a time: each from
    its F to its last compute action (W, else B, else F itself).
    """

    program: Program
    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    bubble: float
    peak_activations: tuple[int, ...]


def simulate(
    program: Program, forward: Cost = 1.0, backward: Cost = 2.0, weight: Cost = 0.0, latency: float = 0.0
) -> Simulation:
    """Run `program` on paper, with communication added if it has none.

    `forward`, `backward` and `weight` are the costs of F, B and W: one number, or one for each stage. A rank computes
    one action at a time, in order, once its input is there. Messages never hold up the rank that posts them, but they
    are rendezvous: a transfer begins when both ends are posted and the earlier ones of its directed edge are done,
    and takes `latency`.

    Raises DeadlockError, which says who waits for what from whom, if the program cannot finish or if the two ends of
    an edge disagree on the order of messages; ConfigurationError for costs that are negative or not one a stage.
    """
    program = program if program.has_communication else add_communication(program)
    named = (Kind.F, "forward", forward), (Kind.B, "backward", backward), (Kind.W, "weight", weight)
    costs = {kind: _per_stage(name, cost, len(program.placement)) for kind, name, cost in named}
    spans = _Run(program, costs, *_per_stage("latency", latency, 1)).finish()
    makespan = max((row[-1].end for row in spans if row), default=0.0)
    busy = tuple(math.fsum(span.end - span.start for span in row) for row in spans)
    bubble = max(0.0, 1 - math.fsum(busy) / (len(spans) * makespan)) if makespan else 0.0
    return Simulation(program, spans, makespan, busy, bubble, tuple(map(_peak_activations, spans)))


def _per_stage(name: str, cost: Cost, num_stages: int) -> tuple[float, ...]:
    values = tuple(map(float, cost)) if isinstance(cost, Sequence) else (float(cost),) * num_stages
    if len(values) != num_stages:
        raise ConfigurationError(f"{name} has {len(values)} costs for {num_stages} stages: give one, or one a stage")
    if not all(0 <= value < math.inf for value in values):
        raise ConfigurationError(f"{name} must be finite and not negative, got {cost}")
    return values


def _peak_activations(row: Sequence[Span]) -> int:
    last = {span.action[1:]: span for span in row}
    alive = peak = 0
    for span in row:
        alive += span.action.kind is Kind.F
        peak = max(peak, alive)
        alive -= last[span.action[1:]] is span
    return peak


class _Run:
    """The state of a simulation: each rank is a coroutine that runs on until it lacks something.

    Nothing depends on the order in which ranks are looked at, so no clock orders the events: every time follows from
    the times of what an action needed. On each edge, a (source, target), the k-th send meets the k-th receive.
    """

    def __init__(self, program: Program, costs: dict[Kind, tuple[float, ...]], latency: float) -> None:
        self.program, self.costs, self.latency = program, costs, latency
        self.spans: list[list[Span]] = [[] for _ in program.ranks]
        self.ready: dict[Action, float] = {}  # when each compute was done and each receive had arrived
        self.edges: defaultdict[tuple[int, int], tuple[Posts, Posts]] = defaultdict(lambda: ([], []))

    def finish(self) -> tuple[tuple[Span, ...], ...]:
        ranks = [self._rank(rank) for rank in range(len(self.program.ranks))]
        waits = [next(actions, None) for actions in ranks]
        while runnable := [rank for rank, wait in enumerate(waits) if wait and wait[1] in self.ready]:
            for rank in runnable:
                waits[rank] = next(ranks[rank], None)
        stuck = [self._stuck(rank, *wait) for rank, wait in enumerate(waits) if wait]
        for (source, target), (sends, receives) in self.edges.items():
            for send, _ in sends[len(receives) :]:
                stuck.append(f"rank {source} posts {send}, which rank {target} does not receive")
            for receive, _ in receives[len(sends) :]:
                stuck.append(f"rank {target} posts {receive}, for which rank {source} does not send")
        if stuck:
            raise DeadlockError("\n  ".join([f"program {self.program.name!r} cannot finish:", *stuck]))
        return tuple(map(tuple, self.spans))

    def _rank(self, rank: int) -> Iterator[tuple[Action, Action]]:
        """Run one rank; yield an action and what it lacks, each time that one must wait."""
        clock = 0.0
        for action in self.program.ranks[rank]:
            start = clock
            for needed in self.program.needs(action):
                if needed not in self.ready:
                    yield action, needed
                start = max(start, self.ready[needed])
            if action.kind.is_compute:
                clock = self.ready[action] = start + self.costs[action.kind][action.stage]
                self.spans[rank].append(Span(action, start, clock))
            else:
                self._post(rank, action, clock)

    def _post(self, rank: int, message: Action, time: float) -> None:
        if not self.program.crosses(message):
            raise DeadlockError(f"rank {rank} posts {message}, but no other rank has the other end of it")
        here, there = self.program.placement[message.stage], self.program.placement[message.partner.stage]
        source, target = (there, here) if message.kind.is_receive else (here, there)
        sends, receives = self.edges[source, target]
        posts = receives if message.kind.is_receive else sends
        posts.append((message, time))
        k = len(posts) - 1
        for (send, sent), (receive, posted) in zip(sends[k:], receives[k:]):  # one pair, or none before both are posted
            if send.partner != receive:
                raise DeadlockError(
                    f"message {k} from rank {source} to rank {target}: rank {source} posts {send}, but rank {target} "
                    f"posts {receive}; both must post the messages of an edge in the same order"
                )
            free = self.ready[receives[k - 1][0]] if k else 0.0
            self.ready[receive] = max(sent, posted, free) + self.latency

    def _stuck(self, rank: int, action: Action, lacking: Action) -> str:
        actions = self.program.ranks[rank]
        line = f"rank {rank} waits in {action} for {lacking}"
        if lacking not in actions[: actions.index(action)]:
            return f"{line}, which it has {'only later' if lacking in actions else 'not at all'}"
        source = self.program.placement[lacking.partner.stage]
        state = "has not reached it" if lacking.partner in self.program.ranks[source] else "does not have it"
        return f"{line}: {lacking.partner} from rank {source}, which {state}"
