"""Plan: a dataclass that describes how a model would run as a pipeline."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeshard.errors import PartitionError, counted
from pipeshard.graph.dataflow import Dataflow
from pipeshard.planner.devices import Devices
from pipeshard.planner.memory import REMEDIES, Memory, Training, format_bytes, tensor_bytes
from pipeshard.schedule.draw import draw_timeline
from pipeshard.schedule.search import Searched
from pipeshard.schedule.simulate import Simulation, simulate_parts
from pipeshard.schedule.slices import refuse_unsliced
from pipeshard.split.boundary import Boundary
from pipeshard.split.partition import Cuts


@dataclass(frozen=True)
class Crossing:
    """A value computed by `unit` that enters a stage with each microbatch. If `gradient` is true, the value's gradient
    is sent back."""

    unit: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    gradient: bool


def crossings(flow: Dataflow, boundary: Boundary) -> tuple[Crossing, ...]:
    """The values that enter a stage at this boundary."""
    crossings = []
    for value in boundary.values:
        spec, unit = flow.spec(value), flow.calls[value.call].unit
        dtype = str(spec.dtype).removeprefix("torch.")
        crossings.append(Crossing(unit, spec.shape, dtype, tensor_bytes(spec), value in boundary.gradients))
    return tuple(crossings)


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage. If a rank has several chunks, each chunk is a stage.

    `calls` is the number of the stage's unit calls, and `units` abbreviates their names. `parameters` is the number of
    elements of the stage's parameters. `forward`, `backward` and `weight` are the times of F, B and W of one
    microbatch. In a schedule without W, a B takes `backward` + `weight`. `memory` is the stage's part of its rank's
    peak memory. At this peak, `alive` microbatches keep `kept` bytes each. A parameter that an earlier stage of the
    rank also holds counts only in the earlier stage. `enters` are the values that the stage receives from the previous
    stage, in a message of `received` bytes. The stage sends back `returned` bytes of gradients. `received` and
    `returned` are 0 if the previous stage is on the same rank.
    """

    stage: int
    rank: int
    units: str
    calls: int
    parameters: int
    forward: float
    backward: float
    weight: float
    memory: Memory
    alive: int
    kept: int
    enters: tuple[Crossing, ...]
    received: int
    returned: int


def in_short(names: Sequence[str]) -> str:
    """Abbreviate names to the first and the last name, as in "model.layers.4 to 8". The last name omits the path that
    both names share."""
    ends = list(dict.fromkeys([*names[:1], *names[-1:]]))
    shared = os.path.commonprefix(ends).rpartition(".")[0]  # noqa: RUF071 - names, cut at a dot
    return " to ".join([*ends[:1], *(name.removeprefix(f"{shared}.") for name in ends[1:])])


UNUSABLE = "cannot be cut this way"  # shown for an estimate with a problem


@dataclass(frozen=True)
class Estimate:
    """The estimate for one schedule: the time of a step, the idle share of all ranks' time, and the memory of each
    rank.

    `counts` is the number of unit calls of each stage. `fits` is whether every rank stays within its memory limit, or
    None without limits. `moved` is whether `counts` replaces a requested partition that does not fit. If the model
    cannot be cut for this schedule, `problem` is the reason, and the fields from `time` to `moved` are not set.
    """

    schedule: str
    num_model_chunks: int
    time: float = 0.0
    bubble: float = 0.0
    counts: tuple[int, ...] = ()
    memory: tuple[Memory, ...] = ()
    fits: bool | None = None
    moved: bool = False
    problem: str = ""

    @property
    def name(self) -> str:
        return f"{self.schedule}, v={self.num_model_chunks}" if self.schedule == "interleaved" else self.schedule

    @property
    def fullest(self) -> int:
        """The rank that needs the most memory."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @property
    def peak(self) -> int:
        """The memory, in bytes, of the rank that needs the most memory."""
        return self.memory[self.fullest].total


class InSlices(NamedTuple):
    """The estimate of a schedule whose microbatches are split into `n` slices of equal time. The fields are the time of
    a step, the idle share of all ranks' time, the peak memory of each rank in bytes, and the memory limit of each rank
    (empty without limits)."""

    n: int
    time: float
    bubble: float
    memory: tuple[int, ...]
    limits: tuple[int, ...] = ()

    @property
    def peak(self) -> int:
        """The memory, in bytes, of the rank that needs the most memory."""
        return max(self.memory)

    @property
    def excess(self) -> list[int]:
        """The bytes by which each rank exceeds its limit. Empty without limits."""
        return [size - limit for size, limit in zip(self.memory, self.limits, strict=bool(self.limits))]

    @property
    def fits(self) -> bool | None:
        return max(self.excess) <= 0 if self.limits else None


NUMBERS_OF_SLICES = 1, 2, 4, 8, 16


def refuse_large(found: Sequence[InSlices], n: int | None = None) -> None:
    """Raise PartitionError if a rank exceeds its limit with `n` slices. Without `n`, raise it only if a rank exceeds
    its limit with each number of slices in `found`."""
    choices = [one for one in found if n in (None, one.n)]
    if any(one.fits is not False for one in choices):
        return
    best = min(choices, key=lambda one: max(one.excess))
    rank, p = best.excess.index(max(best.excess)), len(best.memory)
    fitting = [f"num_slices={one.n} (fits)" for one in found if one.fits][:1]
    raise PartitionError(
        f"with {counted(best.n, 'slice')}, rank {rank} of {p} needs {format_bytes(best.memory[rank])}, but its "
        f"device_memory is {format_bytes(best.limits[rank])}. Possible remedies: {', '.join([*fitting, REMEDIES])}"
    )


@dataclass(frozen=True)
class Plan:
    """An estimate of how a model would run on `pp_size` ranks. Returned by `pipeshard.plan`.

    Sizes are in bytes. Times are in `unit`: "seconds" if the model's units were timed or `tflops` was given. Otherwise,
    times are "relative": 1 is the total time of one microbatch divided by p (or by the sum of the ranks' speeds), so a
    step without idle time takes `num_microbatches`. `stages` are the stages of `schedule`. `schedule` is the
    `recommended` schedule, unless another schedule was requested, and `reason` explains the recommendation. `cuts` can
    be passed to the plugin as `partition`: the number of unit calls of each stage, or the modules to cut after if the
    cuts were given as module names. `training` contains the other settings that determine the memory. `devices` are the
    ranks' devices and their links. `searched` is the schedule if a search found it, and otherwise None. `unused` maps
    the name of each module that the batch does not use to the module's number of parameters.
    """

    model: str
    parameters: int
    pp_size: int
    num_microbatches: int
    microbatch: dict[str, tuple[int, ...]]
    training: Training
    devices: Devices
    partition: str
    unit: str
    schedule: str
    num_model_chunks: int
    stages: tuple[StagePlan, ...]
    schedules: tuple[Estimate, ...]
    recommended: str
    reason: str
    cuts: Cuts
    searched: Searched | None = None
    unused: Mapping[str, int] = field(default_factory=dict)

    @property
    def estimate(self) -> Estimate:
        """The estimate of `schedule`."""
        chosen = self.schedule, self.num_model_chunks
        return next(e for e in self.schedules if (e.schedule, e.num_model_chunks) == chosen)

    @property
    def optimizer(self) -> str:
        return self.training.optimizer

    @property
    def counts(self) -> list[int]:
        """The number of unit calls of each stage."""
        return list(self.estimate.counts)

    @property
    def arguments(self) -> dict[str, Any]:
        """The plugin's arguments that run this plan: `PipelinePlugin(pp_size=p, num_microbatches=m,
        **plan.arguments)`."""
        schedule = self.searched or self.schedule
        return {"schedule": schedule, "num_model_chunks": self.num_model_chunks, "partition": self.cuts}

    @property
    def tokens(self) -> int:
        """The number of tokens in a step, summed over the replicas. 0 if the batch does not contain `input_ids`."""
        shape = self.microbatch.get("input_ids", (0,))
        return math.prod(shape) * self.num_microbatches * self.training.dp_size

    def transfers(self, n: int = 1) -> dict[str, list[float]]:
        """The durations of messages, as arguments of `simulate_parts`, if each microbatch is split into `n` slices."""
        sizes = ((stage.received / n, stage.returned / n) for stage in self.stages)
        return self.devices.transfers([stage.rank for stage in self.stages], sizes)

    def simulate(self) -> Simulation:
        """Simulate a step of `schedule`."""
        schedule = self.searched or self.schedule
        config = self.training.config(schedule, self.pp_size, self.num_microbatches, self.num_model_chunks)
        costs = [(stage.forward, stage.backward, stage.weight) for stage in self.stages]
        return simulate_parts(config.program(self.num_microbatches), *zip(*costs, strict=True), **self.transfers())

    def in_slices(
        self, numbers: Sequence[int] = NUMBERS_OF_SLICES, device_memory: str | int | Sequence[str | int] | None = None
    ) -> list[InSlices]:
        """Estimate `schedule` for each number of slices in `numbers`, and compare the memory with `device_memory` (same
        as in `plan`). Raises ConfigurationError if the schedule does not support slices."""
        refuse_unsliced(self.schedule)
        limits = Devices.parse(self.pp_size, device_memory).memory
        costs = list(zip(*((stage.forward, stage.backward, stage.weight) for stage in self.stages), strict=True))
        config = self.training.config(self.schedule, self.pp_size, self.num_microbatches, self.num_model_chunks)
        found = []
        for n in numbers:
            program = config.program(self.num_microbatches, n)
            shares = ([cost / n for cost in kind] for kind in costs)
            simulation = simulate_parts(program, *shares, **self.transfers(n))
            slices = [max(part.alive for ((_, part),) in self.training.moments(actions)) for actions in program.ranks]
            memory = tuple(
                s.memory.always + max(s.memory.update, math.ceil((slices[s.rank] * s.kept + s.memory.temporary) / n))
                for s in self.stages
            )
            found.append(InSlices(n, simulation.makespan, simulation.bubble, memory, limits))
        return found

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw the timeline, and save it as `path`. The suffix of `path` (png, svg, pdf) determines the format.
        Requires matplotlib."""
        label = f"{self.estimate.name}, p={self.pp_size}, m={self.num_microbatches}"
        relative = "1: the work of a microbatch on one rank" if self.unit == "relative" else ""
        draw_timeline([(label, self.simulate().spans)], path, f"{self.model}, simulated", relative)

    def to_json(self) -> str:
        """The plan as a JSON string."""
        content = vars(self) | {"counts": self.counts, "optimizer": self.optimizer}
        return json.dumps(content, default=_fields, indent=2)


def _fields(value: Any) -> dict[str, Any]:
    return vars(value) | ({"total": value.total} if isinstance(value, Memory) else {})
