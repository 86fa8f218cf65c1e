"""Recording: the measured times of each rank's actions in one step, and of its waits for other ranks.

A simulation of the schedule shows where bubbles should be, and torch.profiler shows only one rank at a time. A
Recording contains the compute actions of all ranks on one time axis, and simulates the same program with the measured
costs. The times of different hosts are aligned by their wall clocks, so these clocks must be synchronized (NTP).
"""

import json
import os
import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from pipeshard.distributed.collectives import gather
from pipeshard.engine.timeline import Timeline
from pipeshard.errors import ConfigurationError, summary
from pipeshard.schedule import Action, Kind, Program, Simulation, Span, draw_timeline, simulate
from pipeshard.schedule.simulate import Timetable

STRAGGLES = 1.25  # a straggler is busy for more than this multiple of the median rank's time


@dataclass(frozen=True)
class Recording(Timetable):
    """One measured step. Times are in seconds since the first action of any rank started.

    Attributes:
        program: the program that ran, including messages.
        spans: the compute actions of each rank.
        waited: `waited[r][q]` is the time that rank r waited for messages from rank q.
        step: the number of the step, from 0.
        memory: the peak memory of each rank so far, in bytes: allocated on its GPU or, on a CPU, used by its process.
        samples: the number of samples in the step, summed over the replicas.
        tokens: the number of elements of `input_ids` in these samples, or 0 without `input_ids`.
    """

    program: Program
    spans: tuple[tuple[Span, ...], ...]
    waited: tuple[tuple[float, ...], ...]
    step: int
    memory: tuple[int, ...] = ()
    samples: int = 0
    tokens: int = 0

    def cost(self, kind: Kind) -> tuple[float, ...]:
        """The median time of an action of this kind on each stage, in seconds, or 0 for a stage without such actions.

        If only some backward passes of a stage are split into B and W, the cost of B is the median time of the unsplit
        passes minus the cost of W.
        """
        return tuple(self._cost(kind, stage) for stage in range(len(self.program.placement)))

    def _cost(self, kind: Kind, stage: int) -> float:
        spans = [span for span in self.spans[self.program.placement[stage]] if span.action.stage == stage]
        times = {span.action: span.end - span.start for span in spans}
        splits = self.program.splits(stage)
        whole = [time for (k, i, _), time in times.items() if k is Kind.B is kind and i not in splits]
        samples = whole or [time for action, time in times.items() if action.kind is kind]
        cost = statistics.median(samples) if samples else 0.0
        return max(0.0, cost - self._cost(Kind.W, stage)) if whole and splits else cost

    def simulation(self) -> Simulation:
        """Simulate the same program. An action takes the `cost` of its kind on its stage. Messages take no time."""
        return simulate(self.program, self.cost(Kind.F), self.cost(Kind.B), self.cost(Kind.W))

    def summary(self) -> str:
        """Return one line: `step 12: 5.61 s, bubble 20.4% (simulated 20.1%), slowest is rank 1 (4.47 s busy), ...`."""
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
        """If the rank is a straggler (or its stage is too large), return text that compares its busy time with the
        median rank's. Otherwise, return ""."""
        median = statistics.median_low(self.busy)
        times = self.busy[rank] / median if median else 1.0
        return f", {times:.1f} times the median rank" if times > STRAGGLES else ""

    def metrics(self, prefix: str = "pipeline/") -> dict[str, float]:
        """Return metrics of the step for an experiment tracker: `wandb.log(recording.metrics())`. Call it on only one
        rank of each replica, since all ranks of a replica have the same metrics.

        The metrics are the duration of the step in seconds, the measured and simulated bubbles (0 to 1), samples and
        tokens per second, and each rank's busy time in seconds and peak memory in GB (1e9 bytes).
        """
        rates = {"samples": self.samples, "tokens": self.tokens}
        found = {"seconds": self.makespan, "bubble": self.bubble, "bubble_simulated": self.simulation().bubble}
        found |= {
            f"{name}_per_second": count / self.makespan for name, count in rates.items() if count and self.makespan
        }
        found |= {f"busy_seconds/rank{rank}": busy for rank, busy in enumerate(self.busy)}
        found |= {f"memory_gb/rank{rank}": taken / 1e9 for rank, taken in enumerate(self.memory)}
        return {prefix + name: value for name, value in found.items()}

    def draw(self, path: str | os.PathLike[str], title: str = "") -> None:
        """Plot the measured step above the simulated step, in the format that the file's suffix names. Requires
        matplotlib."""
        draw_timeline([("measured", self.spans), ("simulated", self.simulation().spans)], path, title=title)

    def save(self, path: str | os.PathLike[str], format: str = "json") -> None:
        """Write the recording as JSON for `load`, or with format="perfetto" as a trace for ui.perfetto.dev and
        chrome://tracing.

        Raises ConfigurationError for any other format.
        """
        if format not in ("json", "perfetto"):
            raise ConfigurationError(f'format must be "json" or "perfetto", got {format!r}')
        Path(path).write_text(json.dumps(self._trace() if format == "perfetto" else self._content()))

    def _trace(self) -> dict[str, Any]:
        """The recording in Chrome's Trace Event Format, with one process for the measured step and one for the
        simulated step."""
        events: list[dict[str, Any]] = []
        sides = {"measured": self.spans, "simulated": self.simulation().spans}
        for process, (name, rows) in enumerate(sides.items()):
            events.append(
                {"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"{name}, step {self.step}"}}
            )
            for rank, row in enumerate(rows):
                where = {"pid": process, "tid": rank}
                events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": f"rank {rank}"}})
                for action, start, end in row:
                    times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}  # in microseconds
                    labels = {"cat": action.kind.name, "args": {"microbatch": action.microbatch, "stage": action.stage}}
                    events.append({"ph": "X", "name": str(action), **where, **times, **labels})
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def _content(self) -> dict[str, Any]:
        return {
            "schedule": self.program.name,
            "num_microbatches": self.program.num_microbatches,
            "placement": self.program.placement,
            "program": self.program.ranks,
            "times": [[(span.start, span.end) for span in row] for row in self.spans],
            "waited": self.waited,
            "step": self.step,
            "memory": self.memory,
            "samples": self.samples,
            "tokens": self.tokens,
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a JSON file that `save` wrote. Raises ConfigurationError for any other file."""
        try:
            content = json.loads(Path(path).read_text())
            ranks = [tuple(Action(Kind(kind), i, stage) for kind, i, stage in row) for row in content["program"]]
            placement = tuple(content["placement"])
            program = Program(content["schedule"], content["num_microbatches"], placement, tuple(ranks))
            found = cls.of(program, content["times"], content["waited"], content["step"])
            memory, samples, tokens = content.get("memory", ()), content.get("samples", 0), content.get("tokens", 0)
            return replace(found, memory=tuple(memory), samples=samples, tokens=tokens)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = summary(error)
            raise ConfigurationError(
                f"{path} cannot be read as a step recording ({reason}): pass a file that recording.save(path) wrote"
            ) from error

    @classmethod
    def collect(
        cls,
        program: Program,
        timeline: Timeline,
        step: int,
        group: dist.ProcessGroup,
        device: torch.device,
        read: Sequence[int],
    ) -> Self:
        """Create a Recording from the timelines of all ranks of `group`, which have run `program`. `read` contains the
        numbers of samples and tokens in the step. Call it on all ranks of `group`."""
        counts = [sum(action.kind.is_compute for action in actions) for actions in program.ranks]
        most = 2 * max(counts)  # columns of times, followed by waits and memory
        row = torch.zeros(most + len(counts) + 1, dtype=torch.float64)
        for k, span in enumerate(timeline.spans):
            row[2 * k], row[2 * k + 1] = span.start, span.end
        for rank, seconds in timeline.waited.items():
            row[most + rank] = seconds
        row[-1] = _taken(device)
        rows = gather(row, group)
        times = [of_rank[: 2 * count].view(count, 2).tolist() for of_rank, count in zip(rows, counts, strict=True)]
        found = cls.of(program, times, rows[:, most:-1].tolist(), step)
        samples, tokens = read
        return replace(found, memory=tuple(map(int, rows[:, -1].tolist())), samples=samples, tokens=tokens)

    @classmethod
    def of(cls, program: Program, times: Sequence[Any], waited: Sequence[Any], step: int) -> Self:
        """Create a Recording from the (start, end) times of each rank's compute actions."""
        start = min((row[0][0] for row in times if len(row)), default=0.0)
        computed = ([action for action in actions if action.kind.is_compute] for actions in program.ranks)
        spans = tuple(
            tuple(Span(action, a - start, b - start) for action, (a, b) in zip(row, of_rank, strict=True))
            for row, of_rank in zip(computed, times, strict=True)
        )
        return cls(program, spans, tuple(map(tuple, waited)), step)


def _taken(device: torch.device) -> int:
    """The peak memory so far in bytes, of the GPU or, on a CPU, of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _seconds(time: float) -> str:
    return f"{time:.3g} s" if time >= 1 else f"{1e3 * time:.3g} ms"
