"""Simulation: the timeline of a program for given costs, or the proof that the program deadlocks."""

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeshard.errors import ConfigurationError, DeadlockError, counted
from pipeshard.garbage import collector_paused
from pipeshard.schedule.passes import add_communication
from pipeshard.schedule.program import PARTNER, Action, Kind, Program, StageStep
from pipeshard.schedule.residence import alive

ActionCost = float | Sequence[float]
Posts = deque[tuple[Action, float]]
Times = list[float]  # by microbatch


class Span(NamedTuple):
    """The time from `start` to `end` during which a rank ran `action`."""

    action: Action
    start: float
    end: float


class Timetable:
    """The compute actions of each rank in a step, with their times: `spans` has one tuple per rank, in rank order."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """The time from the start of the first action to the end of the last action."""
        return max((row[-1].end for row in self.spans if row), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """The total time of each rank's compute actions."""
        return tuple(math.fsum(span.end - span.start for span in row) for row in self.spans)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks' time, from 0 to 1."""
        makespan = self.makespan
        return max(0.0, 1 - math.fsum(self.busy) / (len(self.spans) * makespan)) if makespan else 0.0


@dataclass(frozen=True)
class Simulation(Timetable):
    """The result of a simulation. Times are in the unit of the costs."""

    program: Program
    spans: tuple[tuple[Span, ...], ...]

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank, the largest number of activations that are alive at the same time. A microbatch counts once
        per stage."""
        return tuple(map(int, self.peak_memory(1)))

    def peak_memory(self, size: ActionCost) -> tuple[float, ...]:
        """For each rank, the largest total size of activations that are alive at the same time, in the unit of `size`.

        `size` is the memory of one microbatch's activations on a stage: one number, or one per stage. The activations
        are alive from the microbatch's F to its last compute action on the stage (W, otherwise B, otherwise F). Raises
        ConfigurationError for sizes that are negative or infinite, and for a sequence that does not have one size per
        stage.
        """
        sizes = _per_stage("size", size, len(self.program.placement))
        return tuple(
            max((sum(sizes[stage] for _, stage in living) for living in alive(actions)), default=0.0)
            for actions in self.program.ranks
        )


def simulate(
    program: Program,
    forward: ActionCost = 1.0,
    backward: ActionCost = 2.0,
    weight: ActionCost = 0.0,
    latency: ActionCost = 0.0,
    returned: ActionCost | None = None,
) -> Simulation:
    """Simulate `program`. Communication is added first if the program has none.

    `forward`, `backward` and `weight` are the costs of F, B and W: one number, or one per stage. In a program with W, a
    B without its own W costs `backward` and `weight` together. A rank runs its compute actions one at a time, in order,
    and waits for the input of each action. Posting a message never blocks a rank. A transfer begins when both its send
    and its receive are posted, and all earlier transfers in the same direction between the two ranks are complete.
    `latency` is the transfer time of a stage's input, and `returned` (by default `latency`) is the transfer time of the
    gradients that a stage sends back: one number, or one per stage.

    Raises DeadlockError if the program cannot finish; the error then lists the waiting ranks and their messages. Also
    raises DeadlockError if a rank receives another rank's messages in an order other than the order in which they are
    sent. Raises ConfigurationError for costs that are negative or infinite, and for a sequence that does not have one
    cost per stage.
    """
    named = (Kind.F, "forward", forward), (Kind.B, "backward", backward), (Kind.W, "weight", weight)
    costs = {kind: _per_stage(name, cost, len(program.placement)) for kind, name, cost in named}
    returned = latency if returned is None else returned
    messages = (Kind.SEND_F, "latency", latency), (Kind.SEND_B, "returned", returned)
    transfers = {kind: _per_stage(name, time, len(program.placement)) for kind, name, time in messages}
    with collector_paused():
        spans = None
        if not any(map(any, transfers.values())) and not program.has_communication:
            # Messages that take no time arrive when they are sent, so they are simulated only if the program cannot
            # finish, to show what each rank waits for.
            spans = _Run(program, costs | transfers).finish()
        if spans is None:
            program = program if program.has_communication else add_communication(program)
            run = _Run(program, costs | transfers)
            spans = run.finish()
            if spans is None:
                raise DeadlockError("\n  ".join([f"program {program.name!r} cannot finish:", *run.stuck()]))
    return Simulation(program, spans)


def simulate_parts(
    program: Program,
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    *,
    latency: ActionCost = 0.0,
    returned: ActionCost | None = None,
) -> Simulation:
    """Run `simulate` with separate costs of B and W. In a program without W, a B costs the sum of both."""
    if not program.has_weight:
        backward, weight = [b + w for b, w in zip(backward, weight, strict=True)], [0.0] * len(weight)
    return simulate(program, forward, backward, weight, latency, returned)


def _per_stage(name: str, cost: ActionCost, num_stages: int) -> tuple[float, ...]:
    values = tuple(map(float, cost)) if isinstance(cost, Sequence) else (float(cost),) * num_stages
    if len(values) != num_stages:
        raise ConfigurationError(
            f"{name} has {counted(len(values), 'value')} for {counted(num_stages, 'stage')}: "
            f"pass one number, or one per stage"
        )
    if not all(0 <= value < math.inf for value in values):
        raise ConfigurationError(f"{name} must be finite and non-negative, got {cost}")
    return values


@dataclass(slots=True)
class _Edge:
    """A directed edge between two ranks: the messages that only one end has posted so far, with their times."""

    source: int
    target: int
    sends: Posts = field(default_factory=deque)
    receives: Posts = field(default_factory=deque)
    transfers: int = 0
    free: float = 0.0  # the end of the last transfer


class _Run:
    """The state of a simulation. Each rank is a generator that yields whenever a step that it needs is incomplete.

    The order in which ranks run does not matter, so no clock orders the events: an action's time follows from the times
    of the steps that it needs. On each edge, the k-th send matches the k-th receive.
    """

    def __init__(self, program: Program, costs: dict[Kind, tuple[float, ...]]) -> None:
        self.program, self.costs = program, costs
        self.has_communication = program.has_communication
        self.spans: list[list[Span]] = [[] for _ in program.ranks]
        self.edges = {ends: _Edge(*ends) for ends in itertools.permutations(range(len(program.ranks)), 2)}
        # Nested by kind and stage: a lookup takes half as long as with a tuple key. `times` is also nested by
        # microbatch, and contains the time at which a compute action ends or a message arrives (infinity until then).
        stages, m = range(len(program.placement)), program.num_microbatches
        self.times = {kind: [[math.inf] * m for _ in stages] for kind in Kind}
        self.split = {action[1:] for actions in program.ranks for action in actions if action.kind is Kind.W}
        self.steps = {kind: [self._step(kind, stage) for stage in stages] for kind in Kind}
        self.routes = {kind: [self._route(kind, stage) for stage in stages] for kind in PARTNER}

    def _step(self, kind: Kind, stage: int) -> tuple[list[tuple[StageStep, Times]], Times, list[float] | None]:
        """Return the steps that this step needs (each with its times), the times of this step, and its costs (None for
        a message)."""
        needed = self.program.needs(kind, stage)
        if not self.has_communication:  # an input is available once it is computed
            needed = [(kind, at + PARTNER[k][1]) if k.is_receive else (k, at) for k, at in needed]
        needs = [((k, at), self.times[k][at]) for k, at in needed]
        return needs, self.times[kind][stage], self._costs(kind, stage) if kind.is_compute else None

    def _costs(self, kind: Kind, stage: int) -> list[float]:
        """The cost of a step for each microbatch."""
        m, cost = self.program.num_microbatches, self.costs[kind][stage]
        if kind is not Kind.B or not self.split:
            return [cost] * m
        whole = cost + self.costs[Kind.W][stage]
        return [cost if (i, stage) in self.split else whole for i in range(m)]

    def _route(self, kind: Kind, stage: int) -> tuple[_Edge, Posts, Posts, StageStep, Times, float] | None:
        """For one end of a message, return its edge, the posts of this end and of the other end, the step of the other
        end, the times of arrival, and the duration of a transfer. Returns None if the other end is not on another
        rank."""
        if not self.program.crosses(kind, stage):
            return None
        other, at = PARTNER[kind][0], stage + PARTNER[kind][1]
        here, there = self.program.placement[stage], self.program.placement[at]
        took = self.costs[other if kind.is_receive else kind][max(stage, at)]
        if kind.is_receive:
            edge = self.edges[there, here]
            return edge, edge.receives, edge.sends, (other, at), self.times[kind][stage], took
        edge = self.edges[here, there]
        return edge, edge.sends, edge.receives, (other, at), self.times[other][at], took

    def finish(self) -> tuple[tuple[Span, ...], ...] | None:
        """Run the simulation. Returns the spans of each rank, or None if the program cannot finish."""
        ranks = [self._rank(rank) for rank in range(len(self.program.ranks))]
        self.waits = waits = [next(actions, None) for actions in ranks]
        while runnable := [rank for rank, wait in enumerate(waits) if wait and self._has(wait[1])]:
            for rank in runnable:
                waits[rank] = next(ranks[rank], None)
        left = any(edge.sends or edge.receives for edge in self.edges.values())
        return None if left or any(waits) else tuple(map(tuple, self.spans))

    def stuck(self) -> list[str]:
        """After `finish`, return a line for each rank that waits, and for each message that only one end has posted."""
        stuck = [self._stuck(rank, *wait) for rank, wait in enumerate(self.waits) if wait]
        for edge in self.edges.values():
            for send, _ in edge.sends:
                stuck.append(f"rank {edge.source} posts {send}, which rank {edge.target} does not receive")
            for receive, _ in edge.receives:
                stuck.append(f"rank {edge.target} posts {receive}, which rank {edge.source} does not send")
        return stuck

    def _has(self, action: Action) -> bool:
        return self.times[action.kind][action.stage][action.microbatch] < math.inf

    def _rank(self, rank: int) -> Iterator[tuple[Action, Action]]:
        """Run one rank. Whenever the rank must wait, yield its next action and the missing action."""
        clock, never, spans, steps, post = 0.0, math.inf, self.spans[rank], self.steps, self._post
        for action in self.program.ranks[rank]:
            kind, i, stage = action
            needs, done, costs = steps[kind][stage]
            for (needed, at), times in needs:
                if times[i] == never:
                    yield action, Action(needed, i, at)
                if times[i] > clock:
                    clock = times[i]
            if costs is None:
                post(rank, action, clock)
            else:
                start, clock = clock, clock + costs[i]
                done[i] = clock
                spans.append(Span(action, start, clock))

    def _post(self, rank: int, message: Action, time: float) -> None:
        kind, i, stage = message
        route = self.routes[kind][stage]
        if route is None:
            raise DeadlockError(f"rank {rank} posts {message}, but no other rank posts the matching message")
        edge, mine, theirs, (other, at), arrivals, took = route
        if not theirs:
            mine.append((message, time))
            return
        post, posted = theirs.popleft()
        if post != (other, i, at):
            send, receive = (post, message) if kind.is_receive else (message, post)
            raise DeadlockError(
                f"message {edge.transfers} from rank {edge.source} to rank {edge.target}: rank {edge.source} posts "
                f"{send}, but rank {edge.target} posts {receive}; both must post their messages in the same order"
            )
        edge.transfers += 1
        edge.free = arrivals[i] = max(time, posted, edge.free) + took

    def _stuck(self, rank: int, action: Action, lacking: Action) -> str:
        actions = self.program.ranks[rank]
        line = f"rank {rank} waits in {action} for {lacking}"
        if lacking not in actions[: actions.index(action)]:
            return f"{line}, which it {'runs only later' if lacking in actions else 'never runs'}"
        source = self.program.placement[lacking.partner.stage]
        state = "has not reached" if lacking.partner in self.program.ranks[source] else "never runs"
        return f"{line}: rank {source} {state} {lacking.partner}"
