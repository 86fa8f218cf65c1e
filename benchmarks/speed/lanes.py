"""Lanes: contenders that train on the same batches in turns, round by round, and their outcomes."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.progress import Progress

from benchmarks.speed.contender import Batches, Contender, ContenderError, Pair
from benchmarks.speed.work import Work
from tests.hosts import Hosts

TOLERANCE = 1e-4  # relative difference of losses


@dataclass(frozen=True)
class Lane:
    """A contender and the batches of its round k (0 is the warm-up). Lanes of the same stream have the same batches."""

    contender: Contender
    batches: Callable[[int], Batches]
    stream: str = ""

    @property
    def name(self) -> str:
        return f"{self.contender.name}, {self.stream}" if self.stream else self.contender.name


@dataclass
class Outcome:
    """The measurements of a lane, without the warm-up (except in `losses`).

    `seconds` is the time of a step in each round. `losses` has the loss of every step. `memory` is the peak memory of
    each rank above the start of each round, in bytes; `resident` is the total peak. `sent` is the bytes that each rank
    sent per step. `reports` are the trainers' own measurements. `asleep` is the share of a core that the ranks used
    between their rounds. `error` is the reason why the lane did not start, or failed.
    """

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    memory: list[list[int]] = field(default_factory=list)
    resident: list[list[int]] = field(default_factory=list)
    sent: list[list[float]] = field(default_factory=list)
    reports: list[list[dict[str, Any]]] = field(default_factory=list)
    asleep: float = 0.0
    error: str = ""


class Rounds:
    """Runs all lanes of one work: starts them one by one, then runs the warm-up and `rounds` rounds. In each of them,
    every lane runs once.

    The order rotates from round to round, so the position of a lane changes. With `hosts`, the ranks run on these
    hosts. `before` is called before each round with the round's number (0 for the warm-up).
    """

    def __init__(
        self,
        work: Work,
        lanes: Sequence[Lane],
        rounds: int,
        progress: Progress,
        hosts: Hosts | None = None,
        before: Callable[[int], None] = lambda k: None,
    ) -> None:
        self.work, self.lanes, self.rounds, self.progress = work, lanes, rounds, progress
        self.hosts, self.before = hosts, before
        self.outcomes = {lane.name: Outcome() for lane in lanes}
        self._pairs: dict[str, Pair] = {}
        self._slept = {lane.name: [0.0, 0.0] for lane in lanes}

    def run(self) -> dict[str, Outcome]:
        task = self.progress.add_task("", total=len(self.lanes) * (self.rounds + 2))
        try:
            for lane in self.lanes:
                self.progress.update(task, description=f"{self.work}: starting {lane.name}")
                self._start(lane)
                self.progress.advance(task)
            for k in range(self.rounds + 1):
                self.before(k)
                turn = k % len(self.lanes)
                for lane in (*self.lanes[turn:], *self.lanes[:turn]):
                    self.progress.update(task, description=f"{self.work}: round {k} of {self.rounds}, {lane.name}")
                    self._turn(lane, k)
                    self.progress.advance(task)
        finally:
            self.progress.remove_task(task)
            for pair in self._pairs.values():
                pair.close()
        return self.outcomes

    def _start(self, lane: Lane) -> None:
        try:
            self._pairs[lane.name] = Pair(lane.contender, self.work, lane.stream, self.hosts)
        except ContenderError as error:
            self.outcomes[lane.name].error = f"did not start: {error}"

    def _turn(self, lane: Lane, k: int) -> None:
        outcome = self.outcomes[lane.name]
        if lane.name not in self._pairs:
            return
        batches = lane.batches(k)
        try:
            answers = self._pairs[lane.name].round(batches)
        except ContenderError as error:
            outcome.error = f"failed in round {k}: {error}"
            del self._pairs[lane.name]
            return
        outcome.losses += next((answer["losses"] for answer in answers if None not in answer["losses"]), [])
        if k == 0:
            return
        elapsed = max(answer["end"] for answer in answers) - min(answer["start"] for answer in answers)
        outcome.seconds.append(elapsed / len(batches))
        outcome.memory.append([answer["memory"] for answer in answers])
        outcome.resident.append([answer["resident"] for answer in answers])
        outcome.sent.append([answer["sent"] / len(batches) for answer in answers])
        outcome.reports.append([answer["report"] for answer in answers])
        slept = self._slept[lane.name]
        for wall, cpu in (answer["asleep"] for answer in answers):
            slept[0], slept[1] = slept[0] + wall, slept[1] + cpu
        outcome.asleep = slept[1] / slept[0]


def loss_errors(lanes: Sequence[Lane], outcomes: dict[str, Outcome]) -> dict[str, float]:
    """Return, for each lane, the largest relative difference between its losses and the median of its stream."""
    errors = {}
    for lane in lanes:
        others = [outcomes[other.name].losses for other in lanes if other.stream == lane.stream]
        mine = outcomes[lane.name].losses
        if mine:
            middle = [statistics.median(step) for step in _columns(others)]
            errors[lane.name] = max(abs(loss - right) / abs(right) for loss, right in zip(mine, middle))
    return errors


def _columns(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    longest = max(map(len, rows), default=0)
    return [[row[k] for row in rows if k < len(row)] for k in range(longest)]


def failures(lanes: Sequence[Lane], outcomes: dict[str, Outcome]) -> list[str]:
    """Describe every lane that failed, or whose losses differ too much from the median of all lanes."""
    failed = [f"{name}: {outcome.error}" for name, outcome in outcomes.items() if outcome.error]
    wrong = loss_errors(lanes, outcomes)
    return failed + [f"{name}: its losses are off by {error:.1e}" for name, error in wrong.items() if error > TOLERANCE]
