"""AutoConfig: chooses stages, replicas, microbatches and a schedule for the available ranks, by simulation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import nn

from pipeshard.batch.criterion import Criterion
from pipeshard.errors import ConfigurationError, PartitionError, counted
from pipeshard.planner.candidate import Candidate, Subject
from pipeshard.planner.devices import Devices
from pipeshard.planner.memory import REMEDIES, Training, check_positive, format_bytes
from pipeshard.planner.plan import UNUSABLE, Estimate
from pipeshard.planner.planner import NEAR, SIMPLEST, attempt, first_microbatch, schedules, study, timed
from pipeshard.planner.profile import Profile
from pipeshard.schedule.schedules import SCHEDULES
from pipeshard.split.policy import Policy


@dataclass(frozen=True)
class Layout:
    """`dp_size` replicas of a pipeline with `pp_size` stages of `tp_size` ranks each. Together, the replicas read
    `global_batch` samples per step.

    Layouts with the same `global_batch` and `microbatch_size` have the same microbatches in a step, since no microbatch
    is split between replicas. Therefore, the losses and gradients of these layouts are sums of the same terms, possibly
    in a different order, and dropout uses the same masks.
    """

    pp_size: int
    dp_size: int
    global_batch: int
    microbatch_size: int
    tp_size: int = field(default=1, kw_only=True)

    @property
    def ranks(self) -> int:
        return self.pp_size * self.dp_size * self.tp_size

    def stages(self, devices: Devices) -> Devices:
        """The devices of a pipeline's stages. `devices` are the devices of all ranks."""
        return devices.of_stages(self.pp_size, self.dp_size, self.tp_size)

    @property
    def batch_size(self) -> int:
        """The number of samples in a replica's batch, for its dataloader."""
        return self.global_batch // self.dp_size

    @property
    def num_microbatches(self) -> int:
        """m, the number of microbatches in a replica's batch."""
        return self.batch_size // self.microbatch_size

    @property
    def arguments(self) -> dict[str, Any]:
        """The plugin's arguments for this layout: `PipelinePlugin(**layout.arguments, ...)`."""
        sliced = {"tp_size": self.tp_size} if self.tp_size > 1 else {}
        sizes = {"pp_size": self.pp_size, "dp_size": self.dp_size, "microbatch_size": self.microbatch_size}
        return sizes | sliced


@dataclass(frozen=True)
class ToldLayout(Layout):
    """A layout that another rank chose and sent. On that rank, the layout may be an instance of a subclass of Layout.
    `told` is the received value of the layout's `arguments`."""

    told: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        return self.told


def layouts(
    ranks: int, global_batch: int, microbatch_size: int = 1, pp_size: int | None = None, tp_size: int = 1
) -> list[Layout]:
    """All layouts of `ranks` ranks with at most `pp_size` stages of `tp_size` ranks each, in which the number of
    replicas divides the number of microbatches. Layouts with more stages come first.

    Raises ConfigurationError if a size is invalid, or if the sizes do not fit together: for example, if no possible
    number of replicas divides the number of microbatches.
    """
    most = ranks if pp_size is None else pp_size
    sizes = {"ranks": ranks, "global_batch": global_batch, "microbatch_size": microbatch_size, "pp_size": most}
    check_positive(**sizes, tp_size=tp_size)
    ranks, alone = divmod(ranks, tp_size)
    if alone:
        raise ConfigurationError(
            f"tp_size={tp_size} does not divide ranks={sizes['ranks']}: use a divisor of the number of ranks"
        )
    microbatches, rest = divmod(global_batch, microbatch_size)
    if rest:
        raise ConfigurationError(
            f"global_batch={global_batch} must be a multiple of microbatch_size={microbatch_size}: replicas receive "
            "only whole microbatches"
        )
    stages = [p for p in range(min(ranks, most), 0, -1) if ranks % p == 0]
    legal = [p for p in stages if microbatches % (ranks // p) == 0]
    if not legal:
        tried = ", ".join(f"{ranks // p} with pp_size={p}" for p in stages)
        raise ConfigurationError(
            f"{sizes['ranks']} ranks cannot train with pp_size={most} or less: a step has "
            f"{counted(microbatches, 'microbatch')} (global_batch={global_batch}, microbatch_size={microbatch_size}), "
            f"and no possible number of replicas ({tried}) divides this number. Choose a global_batch whose number of "
            "microbatches is divisible by one of these numbers of replicas, or a different number of ranks"
        )
    return [Layout(p, ranks // p, global_batch, microbatch_size, tp_size=tp_size) for p in legal]


@dataclass(frozen=True)
class Considered:
    """A layout and the planner's estimate for one schedule under this layout."""

    layout: Layout
    estimate: Estimate

    def __str__(self) -> str:
        layout, estimate = self.layout, self.estimate
        sizes = f"p={layout.pp_size} dp={layout.dp_size} m={layout.num_microbatches}×{layout.microbatch_size}"
        if estimate.problem:
            return f"{sizes} {estimate.name}: {UNUSABLE}"
        beyond = ", over the limit" if estimate.fits is False else ""
        figures = f"{estimate.time:.4g}, idle {estimate.bubble:.1%}, takes {format_bytes(estimate.peak)}{beyond}"
        return f"{sizes} {estimate.name}: {figures}"


@dataclass(frozen=True)
class AutoConfig(Layout):
    """A layout and a schedule that fit in memory, and whose step time is the shortest or nearly the shortest. Returned
    by `AutoConfig.choose`.

    `partition` is the number of unit calls of each stage. `time` is the time of a step in `unit`. `unit` is "seconds"
    if the model's units were timed or `tflops` was given. Otherwise, `unit` is "relative": 1 is the time of a step in
    which no rank is ever idle. `considered` lists all compared combinations of a layout and a schedule, in order of
    increasing time. Combinations for which the model cannot be cut are last.
    """

    schedule: str
    num_model_chunks: int
    partition: tuple[int, ...]
    time: float
    unit: str
    considered: tuple[Considered, ...]

    @property
    def arguments(self) -> dict[str, Any]:
        chosen = {"schedule": self.schedule, "num_model_chunks": self.num_model_chunks}
        return {**super().arguments, **chosen, "partition": list(self.partition)}

    @classmethod
    def choose(
        cls,
        model: nn.Module,
        batch: Any,
        ranks: int,
        global_batch: int,
        microbatch_size: int = 1,
        schedules: Sequence[str] = tuple(SCHEDULES),
        profile: Profile | str | Path | None = None,
        device_memory: str | int | Sequence[str | int] | None = None,
        partition: str = "auto",
        pp_size: int | None = None,
        optimizer: str = "adamw",
        policy: type[Policy] | None = None,
        criterion: Criterion | None = None,
        seq_len: int | None = None,
        precision: str = "fp32",
        zero_stage: int = 0,
        fsdp: bool = False,
        tp_size: int = 1,
        tp_plan: Mapping[str, str] | None = None,
        tflops: float | None = None,
        link: str | Sequence[str] | None = None,
        device_speed: str | Sequence[float] | None = None,
    ) -> Self:
        """Choose the layout and the schedule for `ranks` ranks by simulating steps of `global_batch` samples.

        Arguments not listed here are the same as in `pipeshard.plan`. `batch` must have at least `microbatch_size`
        samples, or be None. Of the combinations that fit in `device_memory` and are at most 3 % slower than the fastest
        that fits, `choose` returns one with the fewest stages and, among these, with the simplest schedule. Without
        `link`, messages take no time. The simulation does not count the time to reduce gradients across replicas.
        Without `device_memory`, replicas of the unsplit model are therefore the fastest.

        Args:
            microbatch_size: the number of samples in a microbatch. To compare several sizes, call `choose` once per
                size, and compare the results' `time`. Only measured times (`partition="profile"`) show the benefit of
                larger microbatches.
            schedules: the schedules to choose from.
            pp_size: the maximum number of stages. The default is `ranks / tp_size`.
            device_memory: one value for all ranks, or one value per rank, as for `device_speed`. A stage is assumed to
                have the smallest memory, the lowest speed and the slowest link of its ranks in all replicas.
            tp_size: the number of ranks across which each stage is sharded. In a layout, the number of stages times the
                number of replicas is `ranks / tp_size`.
            link: one link between any two ranks, or a list of links, one from each rank to the next.

        Raises ConfigurationError if the sizes do not fit together: for example, if no possible number of replicas
        divides the number of microbatches. Raises PartitionError if no layout fits in `device_memory`, or if the model
        cannot be cut for any layout. Also raises the other errors of `pipeshard.plan`.
        """
        training = Training(optimizer, precision, 1, zero_stage, fsdp, tp_size)
        legal = layouts(ranks, global_batch, microbatch_size, pp_size, tp_size)
        devices = Devices.parse(ranks, device_memory, device_speed, link)
        microbatch, _ = first_microbatch(model, batch, 1 if batch is None else None, microbatch_size, seq_len)
        if microbatch.rows != microbatch_size:
            raise ConfigurationError(
                f"microbatch_size={microbatch_size}, but the batch has only "
                f"{counted(microbatch.rows, 'sample')}: pass a larger batch"
            )
        subject = study(model, microbatch, criterion, policy, partition, training, profile, tp_plan)
        subject = timed(subject, tflops, link)
        work = sum(map(sum, subject.costs)) * global_batch / microbatch_size
        unit = 1.0 if subject.in_seconds else work / sum(devices.speeds) or 1.0
        considered = [each for layout in legal for each in _simulated(subject, layout, schedules, unit, devices)]
        considered.sort(key=lambda each: (bool(each.estimate.problem), each.estimate.time))
        best = _best(considered, devices)
        layout, estimate = best.layout, best.estimate
        return cls(
            layout.pp_size,
            layout.dp_size,
            layout.global_batch,
            layout.microbatch_size,
            schedule=estimate.schedule,
            num_model_chunks=estimate.num_model_chunks,
            partition=estimate.counts,
            time=estimate.time,
            unit="seconds" if subject.in_seconds else "relative",
            considered=tuple(considered),
            tp_size=tp_size,
        )


def _simulated(
    subject: Subject, layout: Layout, names: Sequence[str], unit: float, devices: Devices
) -> Iterator[Considered]:
    unknown = [name for name in names if name not in SCHEDULES]
    if unknown or not names:
        raise ConfigurationError(f"schedules must list one or more of {', '.join(SCHEDULES)}, got {list(names)!r}")
    subject = subject.replicated(layout.dp_size).on(layout.stages(devices))
    for name, v in schedules():
        if name in names:
            tried = attempt(subject, name, layout.pp_size, layout.num_microbatches, v)
            yield Considered(layout, tried.estimate(unit) if isinstance(tried, Candidate) else tried)


def _best(considered: Sequence[Considered], devices: Devices) -> Considered:
    possible = [each for each in considered if not each.estimate.problem]
    if not possible:
        layout, estimate = considered[0].layout, considered[0].estimate
        raise PartitionError(
            f"the model cannot be cut for any layout: with pp_size={layout.pp_size} and schedule {estimate.name}, "
            f"{estimate.problem}"
        )
    fitting = [each for each in possible if each.estimate.fits is not False]
    if not fitting:
        nearest = min(possible, key=lambda each: max(each.layout.stages(devices).excess(each.estimate.memory)))
        layout, estimate = nearest.layout, nearest.estimate
        excess = layout.stages(devices).excess(estimate.memory)
        rank = excess.index(max(excess))
        raise PartitionError(
            f"no layout of {counted(layout.ranks, 'rank')} fits in device_memory={devices.limits}: the "
            f"closest layout (pp_size={layout.pp_size}, microbatch_size={layout.microbatch_size}, {estimate.name}) "
            f"needs {format_bytes(estimate.memory[rank].total)} on rank {rank} of a pipeline. Possible remedies: "
            f"{REMEDIES}"
        )
    fastest = min(each.estimate.time for each in fitting)
    near = [each for each in fitting if each.estimate.time <= fastest * (1 + NEAR)]
    return min(near, key=lambda each: (each.layout.pp_size, SIMPLEST.index(each.estimate.schedule)))
