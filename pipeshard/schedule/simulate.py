"""Simulation: the time line of a program under given costs, or the proof that it deadlocks."""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeshard.errors import ConfigurationError, DeadlockError
from pipeshard.schedule.communicate import add_communication
from pipeshard.schedule.program import Action, Kind, Program, partner

__all__ = ["Simulation", "Span", "simulate"]

Cost = float | Sequence[float]
Key = tuple[Kind, int]  # what an action does, at which stage; what it needs is the same for every microbatch


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
    if not program.has_communication:
        program = add_communication(program)
    named = (Kind.F, "forward", forward), (Kind.B, "backward", backward), (Kind.W, "weight", weight)
    costs = {
        (kind, stage): cost
        for kind, name, given in named
        for stage, cost in enumerate(_per_stage(name, given, program.num_stages))
    }
    run = _Run(program, costs, *_per_stage("latency", latency, 1))
    run.finish()
    spans = tuple(map(tuple, run.spans))
    makespan = max(run.clock, default=0.0)
    busy = tuple(math.fsum(span.end - span.start for span in row) for row in spans)
    bubble = max(0.0, 1 - math.fsum(busy) / (program.num_ranks * makespan)) if makespan else 0.0
    return Simulation(program, spans, makespan, busy, bubble, tuple(map(_peak_activations, spans)))


def _per_stage(name: str, cost: Cost, num_stages: int) -> tuple[float, ...]:
    values = tuple(map(float, cost)) if isinstance(cost, Sequence) else (float(cost),) * num_stages
    if len(values) != num_stages:
        raise ConfigurationError(f"{name} has {len(values)} costs for {num_stages} stages: give one, or one a stage")
    if not all(0 <= value < math.inf for value in values):
        raise ConfigurationError(f"{name} must be finite and not negative, got {cost}")
    return values


def _peak_activations(row: Sequence[Span]) -> int:
    last = {(span.action.microbatch, span.action.stage): k for k, span in enumerate(row)}
    alive = peak = 0
    for k, span in enumerate(row):
        alive += span.action.kind is Kind.F
        peak = max(peak, alive)
        alive -= last[span.action.microbatch, span.action.stage] == k
    return peak


@dataclass(slots=True)
class _Edge:
    """The messages from one rank to another: how many were transferred, and when the last of them was done.

    Those posted at one end only wait here in order, each as (the receive's key, microbatch, when it was posted).
    """

    source: int
    target: int
    sends: deque[tuple[Key, int, float]] = field(default_factory=deque)
    receives: deque[tuple[Key, int, float]] = field(default_factory=deque)
    transferred: int = 0
    free: float = 0.0


class _Run:
    """The state of a simulation: each rank runs on until it lacks something; the arrival of that wakes it again.

    Nothing depends on the order in which ranks are looked at, so no clock orders the events: every time follows from
    the times of what an action needed. Each action is looked at once, and once more for each time it was waited for.
    """

    def __init__(self, program: Program, costs: dict[Key, float], latency: float) -> None:
        self.program, self.costs, self.latency = program, costs, latency
        self.clock = [0.0] * program.num_ranks  # the end of each rank's latest compute action
        self.position = [0] * program.num_ranks
        self.lacks: list[tuple[Key, int] | None] = [None] * program.num_ranks
        self.spans: list[list[Span]] = [[] for _ in program.ranks]
        self.runnable = deque(range(program.num_ranks))
        # When each compute was done and each receive had arrived: (kind, stage) -> microbatch -> time.
        self.ready: defaultdict[Key, dict[int, float]] = defaultdict(dict)
        self.needs = {(kind, s): program.needs(kind, s) for kind in Kind for s in range(program.num_stages)}
        self.edges: dict[tuple[int, int], _Edge] = {}
        self.ends = {key: self._end(*key) for key in self.needs if not key[0].is_compute and program.crosses(*key)}

    def finish(self) -> None:
        while self.runnable:
            self._advance(self.runnable.popleft())
        stuck = [self._stuck(rank, _action(*lack)) for rank, lack in enumerate(self.lacks) if lack is not None]
        stuck += [line for edge in self.edges.values() for line in _unmatched(edge)]
        if stuck:
            raise DeadlockError("\n  ".join([f"program {self.program.name!r} cannot finish:", *stuck]))

    def _advance(self, rank: int) -> None:
        actions, spans, clock = self.program.ranks[rank], self.spans[rank], self.clock[rank]
        for position in range(self.position[rank], len(actions)):
            action = actions[position]
            i, key = action.microbatch, (action.kind, action.stage)
            start = clock
            for needed in self.needs[key]:
                time = self.ready[needed].get(i)
                if time is None:
                    self.lacks[rank], self.position[rank], self.clock[rank] = (needed, i), position, clock
                    return
                if time > start:
                    start = time
            if key in self.costs:
                clock = start + self.costs[key]
                spans.append(Span(action, start, clock))
                self.ready[key][i] = clock
            else:
                self._post(rank, key, i, clock)
        self.lacks[rank], self.position[rank], self.clock[rank] = None, len(actions), clock

    def _end(self, kind: Kind, stage: int) -> tuple[_Edge, deque[tuple[Key, int, float]], Key]:
        """Where messages of `kind` at `stage` are posted: the edge, its queue, and the key of the receive."""
        other = partner(Action(kind, 0, stage))
        here, there = self.program.placement[stage], self.program.placement[other.stage]
        source, target = (there, here) if kind.is_receive else (here, there)
        edge = self.edges.setdefault((source, target), _Edge(source, target))
        if kind.is_receive:
            return edge, edge.receives, (kind, stage)
        return edge, edge.sends, (other.kind, other.stage)

    def _post(self, rank: int, key: Key, i: int, time: float) -> None:
        if key not in self.ends:
            raise DeadlockError(f"rank {rank} posts {_action(key, i)}, but no other rank has the other end of it")
        edge, posts, receive = self.ends[key]
        posts.append((receive, i, time))
        if edge.sends and edge.receives:
            self._transfer(edge)

    def _transfer(self, edge: _Edge) -> None:
        (receive, i, sent), (expected, j, posted) = edge.sends.popleft(), edge.receives.popleft()
        if i != j or receive != expected:
            raise DeadlockError(
                f"message {edge.transferred} from rank {edge.source} to rank {edge.target}: rank {edge.source} posts "
                f"{partner(_action(receive, i))}, but rank {edge.target} posts {_action(expected, j)}; "
                "both must post the messages of an edge in the same order"
            )
        edge.transferred += 1
        edge.free = self.ready[receive][i] = max(sent, posted, edge.free) + self.latency
        if self.lacks[edge.target] == (receive, i):
            self.runnable.append(edge.target)

    def _stuck(self, rank: int, lacking: Action) -> str:
        actions, at = self.program.ranks[rank], self.position[rank]
        line = f"rank {rank} waits in {actions[at]} for {lacking}"
        if lacking not in actions[:at]:
            return f"{line}, which it has {'only later' if lacking in actions[at:] else 'not at all'}"
        send = partner(lacking)
        source = self.program.placement[send.stage]
        has = send in self.program.ranks[source]
        return f"{line}: {send} from rank {source}, which {'has not reached it' if has else 'does not have it'}"


def _unmatched(edge: _Edge) -> list[str]:
    sends = [partner(_action(key, i)) for key, i, _ in edge.sends]
    receives = [_action(key, i) for key, i, _ in edge.receives]
    return [
        *(f"rank {edge.source} posts {send}, which rank {edge.target} does not receive" for send in sends),
        *(f"rank {edge.target} posts {receive}, for which rank {edge.source} does not send" for receive in receives),
    ]


def _action(key: Key, i: int) -> Action:
    return Action(key[0], i, key[1])
