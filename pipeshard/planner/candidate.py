"""Candidate: a model cut for one schedule, with its memory and step time, estimated from metered unit calls."""

import copy
import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion
from pipeshard.engine.weight_grad import deferring_function, defers
from pipeshard.errors import PartitionError
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.meter import Meter, Visit, Work
from pipeshard.graph.preserve import preserving
from pipeshard.graph.shapes import Axes, is_trainable
from pipeshard.graph.taint import Value
from pipeshard.graph.tracer import Tracer
from pipeshard.graph.units import paths_of, unrecomputed
from pipeshard.hf import recomputes
from pipeshard.planner.devices import Devices
from pipeshard.planner.memory import Footprint, Forms, Memory, Moment, StagePart, Training
from pipeshard.planner.plan import Crossing, Estimate, StagePlan, crossings, in_short
from pipeshard.private import TreeSpec
from pipeshard.schedule.program import Program
from pipeshard.schedule.simulate import simulate_parts
from pipeshard.split.balance import balance
from pipeshard.split.boundary import Boundary, boundaries, forbidden_cuts
from pipeshard.split.partition import Cost, Cuts, by_cost, cost_of, named_modules_of
from pipeshard.split.policy import Policy
from pipeshard.split.ties import held_parameters


def metered(
    model: nn.Module,
    microbatch: Batch,
    criterion: Criterion | None = None,
    meter: Meter | None = None,
    cuts: Sequence[str] = (),
    recomputed: bool = True,
) -> tuple[Dataflow, Meter]:
    """Trace `model` for exactly the sizes of `microbatch`, and meter its unit calls. Only shapes are computed. Returns
    the Dataflow and the meter.

    The model is traced in training mode, even if it is in evaluation mode. Modules named in `cuts` are units.
    Without `recomputed`, no layer recomputes its activations.
    """
    meter = meter or Meter()
    with preserving(model, criterion):
        if not model.training:
            model.train()
        tracer = Tracer(model, criterion, microbatch, meter, paths_of(model, cuts))
        with torch.enable_grad(), nullcontext() if recomputed else unrecomputed(model):
            flow = tracer.run(microbatch)  # its specs record whether a result requires grad
    axes = Axes.of(microbatch)
    return replace(flow, axes=axes.pin(set(range(len(axes.sizes))))), meter


@dataclass
class Capture:
    """The arguments of a unit call. `made_up` contains the indices of the tensors that depend on results of other
    units. The trace has no values for these tensors."""

    leaves: list[Any]
    made_up: frozenset[int]
    tree: TreeSpec


class Captures(Meter):
    """A Meter that also captures the arguments of each kind of unit call.

    Attributes:
        calls: one Capture per unit call. Calls of the same kind share a Capture.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Capture] = []
        self.kinds: dict[int, tuple[Visit, Capture]] = {}  # by the id of the visit

    def add(self, visit: Visit, arguments: Sequence[Any], tree: TreeSpec, result: Sequence[Any]) -> None:
        if not self.works:  # the first call of a run
            self.calls, self.kinds = [], {}
        super().add(visit, arguments, tree, result)
        if id(visit) not in self.kinds:
            made_up = frozenset(k for k, leaf in enumerate(arguments) if self._is_made_up(leaf))
            self.kinds[id(visit)] = visit, Capture([copied_argument(leaf) for leaf in arguments], made_up, tree)
        self.calls.append(self.kinds[id(visit)][1])

    def _is_made_up(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and any(isinstance(tag, Value) for tag in self.taint.of([leaf]))


def copied_argument(leaf: Any) -> Any:
    """A copy of the argument if a unit may modify the argument (such as a cache), and otherwise the argument itself."""
    return copy.copy(leaf) if isinstance(leaf, MutableMapping) else leaf


def unit_cost(unit: nn.Module, work: Work) -> Cost:
    """The relative times of F, B and W of one call of `unit` with this Work."""
    layers = {path: layer for path, layer in unit.named_modules() if deferring_function(layer) is not None}
    layers = layers if defers(unit) else {}
    waiting = {
        f"{path}.{name}".lstrip("."): parameter
        for path, layer in layers.items()
        for name, parameter in layer.named_parameters(recurse=False)
        if is_trainable(parameter)
    }
    return cost_of(
        work.flops,
        work.elements,
        parameters=sum(p.numel() for p in unit.parameters() if is_trainable(p)),
        waiting_flops=sum(work.by_parameter.get(name, 0) for name in waiting),
        waiting_parameters=sum(p.numel() for p in set(waiting.values())),
        frozen_flops=sum(work.by_parameter.get(name, 0) for name, p in unit.named_parameters() if not is_trainable(p)),
        recomputed=recomputes(unit),
    )


def runs_of(counts: Sequence[int]) -> list[tuple[int, int]]:
    """The range [first, end) of the calls of each stage."""
    return list(itertools.pairwise([0, *itertools.accumulate(counts)]))


TRIES = 64
# The limits of one stage: an upper bound on its bytes during each part (None: the end of a step).
StageCaps = tuple[tuple[StagePart | None, float], ...]
Caps = tuple[StageCaps, ...]
FIRST = StagePart(1, has_gradients=False, is_running=True)


def fit(
    program: Program,
    weights: Sequence[float],
    forbidden: Mapping[int, str],
    footprint: Footprint,
    limits: Sequence[int],
    speeds: Sequence[float] | None = None,
) -> list[int] | None:
    """Find a partition of the model for `program` that fits in the `limits` of the ranks (in bytes). Returns the number
    of calls of each stage, or None if the search finds no such partition. `speeds` is the same argument as in
    `balance`.

    With one stage per rank, a rank's memory depends only on its own calls, so dynamic programming finds the best
    partition. With several stages per rank, the search is best-first. If a rank exceeds its limit, one of the rank's
    stages must become smaller. For each stage of this rank, the search adds the best partition in which the stage is
    smaller. The search visits at most `TRIES` partitions, in the order of their cost.
    """
    order = itertools.count()
    num_stages = len(program.placement)
    moments = [footprint.training.moments(actions) for actions in program.ranks]
    caps: Caps = tuple(
        tuple((part, limits[r] + 0.5) for part in (*_alone(moments[r]), None)) for r in program.placement
    )
    queue: list[tuple[tuple[float, float], int, list[int], Caps]] = []

    @cache
    def within(caps: StageCaps) -> Callable[[int, int], bool]:
        """Return a function (start, end) that returns whether a stage with these limits can hold the calls from start
        to end."""
        return cache(lambda start, end: all(footprint.total(start, end, part) < cap for part, cap in caps))

    def look(caps: Caps) -> None:
        fitting = [within(each) for each in caps]

        def fits(stage: int, start: int, end: int) -> bool:
            return fitting[stage](start, end)

        try:
            counts = balance(weights, num_stages, forbidden, fits, speeds=speeds)
        except PartitionError:
            return
        sums = [sum(weights[slice(*run)]) / speed for run, speed in zip(runs_of(counts), speeds or [1.0] * num_stages)]
        heapq.heappush(queue, ((max(sums), sum(s * s for s in sums)), next(order), counts, caps))

    look(caps)
    for _ in range(TRIES):
        if not queue:
            return None
        _, _, counts, caps = heapq.heappop(queue)
        worst, excess = _heaviest(moments, runs_of(counts), footprint, limits)
        if excess <= 0:
            return counts
        for stage, (part, size) in worst.items():
            look((*caps[:stage], (*caps[stage], (part, size)), *caps[stage + 1 :]))
    return None


def _alone(moments: Sequence[Moment]) -> list[StagePart]:
    """The parts during which a stage must fit in memory by itself: all parts if the stage's rank has no other stage,
    and otherwise only FIRST."""
    return [part for ((_, part),) in moments] if len(moments[0]) == 1 else [FIRST]


def _heaviest(
    moments: Sequence[Sequence[Moment]], runs: Sequence[tuple[int, int]], footprint: Footprint, limits: Sequence[int]
) -> tuple[dict[int, tuple[StagePart | None, int]], int]:
    """Find the moment at which a rank exceeds its limit the most. Returns a dict and the rank's excess in bytes (at
    most 0 if all ranks fit). The dict maps each stage of this rank to the stage's part (None for the end of a step) and
    the stage's bytes."""
    found = list[tuple[Sequence[tuple[int, StagePart | None]], int]]()
    for of_rank, limit in zip(moments, limits, strict=True):
        stages = [s for s, _ in of_rank[0]]
        gradients = {s: footprint.gradients(*runs[s]) for s in stages}
        repeated, again = footprint.repeated([runs[s] for s in stages])
        present, end_of_step = sum(gradients.values()) - again, tuple((s, None) for s in stages)
        for moment in (*of_rank, end_of_step):
            taken = sum([footprint.total(*runs[s], part) for s, part in moment])
            absent = sum([gradients[s] for s, part in moment if part and not part.has_gradients])
            too_absent = max(0, absent - present)  # as in `Candidate._memory`
            roots = footprint.training.update(again) if moment is end_of_step else 0
            found.append((moment, taken - repeated + too_absent - roots - limit))
    worst, excess = max(found, key=itemgetter(1))
    return {s: (part, footprint.total(*runs[s], part)) for s, part in worst}, excess


@dataclass(eq=False)
class Subject:
    """The model of a plan, with the cost of each unit call and the memory of each run of calls.

    `forms` are the forms of the parameters under `training`. `in_seconds` is whether the costs are in seconds.
    `devices` are the devices of the pipeline's ranks. `again` takes module names, which may be inside layers, and
    returns the Subject of the same model with these names as the partition. `again` is None if cuts inside layers are
    not supported. If `known_sums` is not empty, it replaces the `sums` that are computed from `costs`, since the
    computed sums have rounding errors. If the policy's own `costs` has changed the costs, `before_policy` contains the
    total cost of each call before the change.
    """

    model: nn.Module
    flow: Dataflow
    costs: Sequence[Cost]
    footprint: Footprint
    policy: type[Policy]
    partition: Cuts
    training: Training
    devices: Devices
    forms: Forms
    in_seconds: bool = False
    again: Callable[[Cuts], "Subject"] | None = None
    known_sums: Sequence[Sequence[float]] = ()
    before_policy: Sequence[float] = ()
    policies: dict[tuple[str, tuple[int, ...]], Policy] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name. A tied parameter is listed once, by its first name."""
        return dict(self.model.named_parameters())

    @cached_property
    def sums(self) -> Sequence[Sequence[float]]:
        """For each of F, B and W, the sums of the costs of all calls before each call, and the sum of all costs."""
        return self.known_sums or [[0.0, *itertools.accumulate(kind)] for kind in zip(*self.costs, strict=True)]

    def takes(self, parameters: Sequence[nn.Parameter]) -> Memory:
        """The memory of these parameters, with their gradients, optimizer states and fp32 master weights."""
        return self.training.takes(parameters, self.forms)

    def replicated(self, dp_size: int) -> "Subject":
        """A copy of the subject for `dp_size` replicas. The copy shares the policies of the subject."""
        training = replace(self.training, dp_size=dp_size)
        return replace(self, training=training, footprint=self.footprint.trained(training))

    def on(self, devices: Devices) -> "Subject":
        """A copy of the subject for these devices. If the devices' speeds differ, a partition by cost takes these
        speeds into account."""
        is_unequal = by_cost(self.partition) and len({*devices.speeds}) > 1
        partition = devices.partition if is_unequal else self.partition
        return replace(self, devices=devices, partition=partition)

    def cut(self, partition: Cuts, placement: tuple[int, ...]) -> Policy:
        """The policy for this partition and placement. Schedules with the same placement share the policy."""
        key = str(partition), placement
        if key not in self.policies:
            ranks, costs = max(placement) + 1, self.before_policy or [sum(cost) for cost in self.costs]
            made = self.policy(self.model, self.flow, 0, ranks, partition, placement=placement, costs=costs)
            self.policies[key] = made
        return self.policies[key]


class Candidate:
    """The model, cut into the stages of `program`.

    If a rank would exceed its memory limit and the partition is a rule, such as "auto", the partition is replaced with
    one that fits, if one is found. `moved` is then True. Raises PartitionError if the model cannot be cut.
    """

    def __init__(self, subject: Subject, program: Program, num_model_chunks: int) -> None:
        self.subject, self.program, self.num_model_chunks = subject, program, num_model_chunks
        self.cut(subject.partition)
        self.moved = False
        limits, by_name = subject.devices.memory, isinstance(subject.partition, str)
        if limits and by_name and not self.fits:
            weights, speeds = self.policy.weights(len(program.placement)), self.policy.speeds
            counts = fit(program, weights, forbidden_cuts(subject.flow), subject.footprint, limits, speeds)
            if counts is not None and counts != self.counts:
                self.cut(counts)
                self.moved = True

    def cut(self, partition: Cuts) -> None:
        """Cut the model by `partition`, and compute the memory of each rank."""
        subject, placement = self.subject, self.program.placement
        self.policy = subject.cut(partition, placement)
        self.counts = [self.policy.stages.count(stage) for stage in range(len(placement))]
        self.runs = runs_of(self.counts)
        self.kept = [subject.footprint.activations(*run) for run in self.runs]
        peak = dict[int, StagePart]()  # the part of each stage at its rank's peak
        for actions in self.program.ranks:
            moments = subject.training.moments(actions)
            peak |= dict(max(moments, key=lambda moment: sum(self.working(*each).backward for each in moment)))
        self.alive = {stage: part.alive for stage, part in peak.items()}
        self.at_peak = {stage: self.working(stage, part) for stage, part in peak.items()}
        self.memory = [
            self._memory(rank, [s for s, at in enumerate(placement) if at == rank], held)
            for rank, held in enumerate(self.policy.ownership.held)
        ]

    def _memory(self, rank: int, stages: Collection[int], names: Iterable[str]) -> Memory:
        """The memory of `rank` at its peak, counting only these stages and the parameters with these names."""
        memory = self.subject.takes([self.subject.parameters[name] for name in names])
        parts = [self.at_peak[stage] for stage in stages]
        kept = [size * (stage in stages) for stage, size in enumerate(self.kept)]
        return replace(
            memory,
            activations=sum(part.activations for part in parts),
            temporary=sum(part.temporary for part in parts),
            absent=min(sum(part.absent for part in parts), memory.gradients),  # stages may share gradients
            host=memory.host + self.subject.training.on_host(self.program.ranks[rank], kept),
        )

    def working(self, stage: int, part: StagePart) -> Memory:
        """The memory of a stage during `part` in addition to its permanent memory."""
        return self.subject.footprint.working(*self.runs[stage], part)

    @property
    def cuts(self) -> Cuts:
        """The partition to pass to the plugin: the modules to cut after if the subject's partition names modules, and
        otherwise the number of calls of each stage."""
        return self.subject.partition if named_modules_of(self.subject.partition) else self.counts

    @property
    def fits(self) -> bool | None:
        devices = self.subject.devices
        return max(devices.excess(self.memory)) <= 0 if devices.memory else None

    def costs(self, unit: float) -> list[Cost]:
        """The costs of each stage, in units of `unit`. The costs of a stage are the sums of its calls' costs, divided
        by the speed of its rank."""
        nothing, speeds = Cost(0.0, 0.0, 0.0), self.subject.devices.speeds
        sums = [map(sum, zip(nothing, *self.subject.costs[start:end])) for start, end in self.runs]
        return [
            Cost(*(part / unit / speeds[rank] for part in parts))
            for parts, rank in zip(sums, self.program.placement, strict=True)
        ]

    def estimate(self, unit: float) -> Estimate:
        """The estimate for this schedule, with times in units of `unit`."""
        placement = self.program.placement
        messages = self.subject.devices.transfers(placement, map(self.sent, range(len(placement))))
        simulation = simulate_parts(self.program, *zip(*self.costs(unit), strict=True), **messages)
        return Estimate(
            self.program.name,
            self.num_model_chunks,
            simulation.makespan,
            simulation.bubble,
            tuple(self.counts),
            tuple(self.memory),
            self.fits,
            self.moved,
        )

    @cached_property
    def boundaries(self) -> list[Boundary]:
        return boundaries(self.subject.flow, self.policy.stages, len(self.program.placement))

    @cached_property
    def enters(self) -> list[tuple[Crossing, ...]]:
        """The values that enter each stage."""
        return [crossings(self.subject.flow, each) for each in self.boundaries]

    def sent(self, stage: int) -> tuple[int, int]:
        """The bytes of a microbatch's message to a stage, and the bytes of the gradients that the stage sends back.
        Both are 0 for the first stage, and if the previous stage is on the same rank."""
        placement = self.program.placement
        if stage == 0 or placement[stage - 1] == placement[stage]:
            return 0, 0
        enters = self.enters[stage]
        return sum(value.bytes for value in enters), sum(value.bytes for value in enters if value.gradient)

    def stages(self, unit: float) -> tuple[StagePlan, ...]:
        """The plan of each stage, with times in units of `unit`."""
        subject, policy, placement = self.subject, self.policy, self.program.placement
        held = held_parameters(subject.model, subject.flow, policy.stages, policy.units, len(placement))
        costs = self.costs(unit)
        stages = []
        for s, rank in enumerate(placement):
            earlier = set().union(*(held[other] for other in range(s) if placement[other] == rank))
            received, returned = self.sent(s)
            stages.append(
                StagePlan(
                    stage=s,
                    rank=rank,
                    units=in_short([call.unit for call in subject.flow.calls[slice(*self.runs[s])]]),
                    calls=self.counts[s],
                    parameters=subject.forms.count(subject.parameters[name] for name in held[s]),
                    forward=costs[s].forward,
                    backward=costs[s].backward,
                    weight=costs[s].weight,
                    memory=self._memory(rank, [s], held[s] - earlier),
                    alive=self.alive[s],
                    kept=self.kept[s],
                    enters=self.enters[s],
                    received=received,
                    returned=returned,
                )
            )
        return tuple(stages)
