"""Recording: when each rank did what in one real step, on one clock, beside the simulation of the same program."""

import json
import math
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from pipeshard.distributed.collectives import device_of, gather
from pipeshard.errors import ConfigurationError
from pipeshard.schedule import Action, Kind, Program, Simulation, Span, draw_timeline, simulate

ROUNDS = 21
BOOT = Path("/proc/sys/kernel/random/boot_id")


def offsets(group: dist.ProcessGroup) -> list[float]:
    """What to take from each rank's `time.perf_counter()` to get the first rank's, in seconds; all ranks call it.

    Processes of one running system share that clock. Otherwise each rank sends the first one its time in answer to a
    message and the answer belongs to the middle of the round trip; of `ROUNDS` trips the quickest counts (Cristian
    1989, "Probabilistic clock synchronization").
    """
    system = int(BOOT.read_text().replace("-", "")[:15], 16) if BOOT.exists() else 0
    if system and len(set(gather(torch.tensor(system), group).tolist())) == 1:
        return [0.0] * group.size()
    ranks = dist.get_process_group_ranks(group)
    mine = torch.zeros(group.size(), dtype=torch.float64)
    for rank in range(1, group.size()):
        if group.rank() == 0:
            mine[rank] = _asked(ranks[rank], group)
        elif group.rank() == rank:
            _answer(ranks[0], group)
    return [float(offset) for offset in gather(mine, group)[0]]


def _asked(other: int, group: dist.ProcessGroup) -> float:
    trips = []
    message = torch.zeros(1, dtype=torch.float64, device=device_of(group))
    for _ in range(ROUNDS):
        sent = time.perf_counter()
        dist.send(message, other, group=group)
        dist.recv(message, other, group=group)
        received = time.perf_counter()
        trips.append((received - sent, message.item() - (sent + received) / 2))
    quickest = sorted(trips)[: ROUNDS // 4]
    return statistics.median(offset for _, offset in quickest)


def _answer(first: int, group: dist.ProcessGroup) -> None:
    message = torch.zeros(1, dtype=torch.float64, device=device_of(group))
    for _ in range(ROUNDS):
        dist.recv(message, first, group=group)
        message.fill_(time.perf_counter())
        dist.send(message, first, group=group)


STRAGGLES = 1.25  # how many times as busy as the median rank a straggler is


@dataclass(frozen=True)
class Recording:
    """One step as it was measured. Times are in seconds from the first start on, on one clock for all ranks.

    Attributes:
        program: what ran, messages included.
        spans: the compute actions of each rank.
        waited: `waited[r][q]` is how long rank r waited for messages of rank q.
        step: the number of the step, from 0.
    """

    program: Program
    spans: tuple[tuple[Span, ...], ...]
    waited: tuple[tuple[float, ...], ...]
    step: int

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((row[-1].end for row in self.spans if row), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """The time each rank spent in compute actions."""
        return tuple(math.fsum(span.end - span.start for span in row) for row in self.spans)

    @property
    def bubble(self) -> float:
        """The idle share of all rank-time, 0 to 1."""
        return max(0.0, 1 - math.fsum(self.busy) / (len(self.spans) * self.makespan)) if self.makespan else 0.0

    def cost(self, kind: Kind) -> tuple[float, ...]:
        """What an action of this kind took each stage, as a median over its microbatches; 0 where there is none.

        Of a stage where some B are whole backward passes and others are split, B is what the former take beyond W.
        """
        return tuple(self._cost(kind, stage) for stage in range(len(self.program.placement)))

    def _cost(self, kind: Kind, stage: int) -> float:
        spans = [span for span in self.spans[self.program.placement[stage]] if span.action.stage == stage]
        times = {span.action: span.end - span.start for span in spans}
        splits = self.program.splits(stage)
        whole = [time for (k, i, _), time in times.items() if k is Kind.B is kind and i not in splits]
        found = whole or [time for action, time in times.items() if action.kind is kind]
        cost = statistics.median(found) if found else 0.0
        return max(0.0, cost - self._cost(Kind.W, stage)) if whole and splits else cost

    def simulation(self) -> Simulation:
        """The same program on paper, where each action takes its stage's median and messages take no time."""
        return simulate(self.program, self.cost(Kind.F), self.cost(Kind.B), self.cost(Kind.W))

    def summary(self) -> str:
        """One line: `step 12: 5.61 s, bubble 20.4 % (simulated 20.1 %), slowest is rank 1 (4.47 s), ...`."""
        busy = self.busy
        slowest = max(range(len(busy)), key=busy.__getitem__)
        line = (
            f"step {self.step}: {_seconds(self.makespan)}, bubble {self.bubble:.1%} "
            f"(simulated {self.simulation().bubble:.1%}), slowest is rank {slowest} ({_seconds(busy[slowest])} busy"
            f"{self._beside_others(slowest)})"
        )
        waits = [(wait, rank, other) for rank, row in enumerate(self.waited) for other, wait in enumerate(row)]
        longest, rank, other = max(waits)
        return f"{line}, longest wait: rank {rank} for rank {other} ({_seconds(longest)})" if longest > 0 else line

    def _beside_others(self, rank: int) -> str:
        """By how much a rank is slower than most, where that is much: a straggler, or an uneven partition."""
        median = statistics.median_low(self.busy)
        times = self.busy[rank] / median if median else 1.0
        return f", {times:.1f} times the median rank" if times > STRAGGLES else ""

    def draw(self, path: str | os.PathLike[str], title: str = "") -> None:
        """The step as measured above the simulated one, as a picture; its suffix names the format. Needs matplotlib."""
        draw_timeline([("measured", self.spans), ("simulated", self.simulation().spans)], path, title=title)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, for `load`."""
        program = self.program
        content: dict[str, Any] = {"schedule": program.name, "num_microbatches": program.num_microbatches}
        content |= {"placement": program.placement, "step": self.step, "waited": self.waited}
        content["program"] = [[str(action) for action in actions] for actions in program.ranks]
        content["times"] = [[[span.start, span.end] for span in row] for row in self.spans]
        Path(path).write_text(json.dumps(content))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote. Raises ConfigurationError for anything else."""
        try:
            content = json.loads(Path(path).read_text())
            ranks = tuple(tuple(map(_action, actions)) for actions in content["program"])
            sizes = content["schedule"], content["num_microbatches"], tuple(content["placement"])
            spans = _spans(Program(*sizes, ranks), content["times"])
            return cls(Program(*sizes, ranks), spans, tuple(map(tuple, content["waited"])), content["step"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{path} is no recording of a step: {type(error).__name__}: {error}") from error

    @classmethod
    def of(cls, program: Program, times: Sequence[Any], waited: Sequence[Any], step: int) -> Self:
        """From (start, end) of each compute action of each rank, on one clock."""
        start = min((row[0][0] for row in times if len(row)), default=0.0)
        shifted = [[(a - start, b - start) for a, b in row] for row in times]
        return cls(program, _spans(program, shifted), tuple(map(tuple, waited)), step)


def _spans(program: Program, times: Sequence[Sequence[tuple[float, float]]]) -> tuple[tuple[Span, ...], ...]:
    computed = ([action for action in actions if action.kind.is_compute] for actions in program.ranks)
    return tuple(
        tuple(Span(action, *time) for action, time in zip(row, of_rank, strict=True))
        for row, of_rank in zip(computed, times, strict=True)
    )


def _action(text: str) -> Action:
    kind, microbatch, stage = re.fullmatch(r"([A-Za-z]+)(\d+)@(\d+)", text).groups()  # type: ignore[union-attr]
    return Action(Kind(kind), int(microbatch), int(stage))


def _seconds(time: float) -> str:
    return f"{time:.3g} s" if time >= 1 else f"{1e3 * time:.3g} ms"


class Recorder:
    """Makes a Recording of each rank's own times; the ranks of `group`, which runs the program, do so together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self._clocks = group, list[float]()

    def recording(self, program: Program, spans: Sequence[Span], waited: Mapping[int, float], step: int) -> Recording:
        """Of step `step`: this rank's compute actions, and how long it waited for messages of each other rank."""
        rank, clocks = self.group.rank(), self._clocks or offsets(self.group)
        self._clocks = clocks
        lengths = [sum(action.kind.is_compute for action in actions) for actions in program.ranks]
        longest = max(lengths)
        times = torch.zeros(longest + len(lengths), 2, dtype=torch.float64)
        for k, span in enumerate(spans):
            times[k, 0], times[k, 1] = span.start - clocks[rank], span.end - clocks[rank]
        for other, seconds in waited.items():
            times[longest + other, 0] = seconds
        tables = gather(times, self.group).tolist()
        of_others = [[seconds for seconds, _ in table[longest:]] for table in tables]
        return Recording.of(program, [table[:n] for table, n in zip(tables, lengths)], of_others, step)
