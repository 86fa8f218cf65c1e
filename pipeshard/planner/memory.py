"""Memory: the memory that consecutive unit calls take on a device, at each moment of a rank's program."""

import bisect
import copy
import itertools
import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from pipeshard.config import PipelineConfig
from pipeshard.engine.grad_sync import BUCKET
from pipeshard.engine.weight_grad import defers
from pipeshard.errors import ConfigurationError, hint
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.meter import Meter, Work
from pipeshard.graph.shapes import TensorSpec, is_trainable
from pipeshard.options import check_offload, check_precision, check_replicas, is_offloaded, is_positive
from pipeshard.schedule.given import Schedule
from pipeshard.schedule.program import Action, Kind
from pipeshard.schedule.residence import alive, most_on_host, resident
from pipeshard.split.boundary import live_values
from pipeshard.split.packed import Packed
from pipeshard.split.ties import held_parameters

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
UNITS |= {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "tib": 2**40}  # as in Slurm and nvidia-smi


def parse_bytes(size: str | int, name: str = "device_memory") -> int:
    """The number of bytes in "80GB", "79.2 GiB" or a plain number. Raises ConfigurationError for an invalid size."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(size), re.IGNORECASE)
    unit = found[2].lower() if found else ""
    if found is None or (unit or "b") not in UNITS or float(found[1]) <= 0:
        raise ConfigurationError(
            f"{name}={size!r} is not a positive size: write 80GB, 80G, 40GiB, or a number of bytes"
        )
    return int(float(found[1]) * UNITS[unit or "b"])


def format_bytes(size: float) -> str:
    """Format a size with three significant digits and a decimal unit, such as 1.23 GB."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        del units[0]
    digits = 0 if units[0] == "B" or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {units[0]}"


def check_positive(**sizes: Any) -> None:
    """Raise ConfigurationError unless each value is a positive integer."""
    for name, size in sizes.items():
        if not is_positive(size):
            raise ConfigurationError(f"{name} must be a positive integer, got {size!r}")


# States per parameter, each as large as the parameter's gradient.
OPTIMIZERS = {"adamw": 2, "adam": 2, "adamw_fused": 2, "sgd": 1, "none": 0}
WITH_ROOTS = ("adamw", "adam")  # optimizers that compute the square roots of all second moments together, on a GPU
OF_TRAINER = "trainer_"  # prefix of optimizers for which a Trainer keeps the states of embeddings in fp32
# States per parameter in 8 bits, with one fp32 scale per BLOCK elements (bitsandbytes). If a parameter has fewer than
# SMALL elements, its states are in fp32.
IN_8_BITS = {"adamw_8bit": 2, "lion_8bit": 1, "trainer_adamw_8bit": 2, "trainer_lion_8bit": 1}
BLOCK, SMALL = 256, 4096
FULL = 4  # bytes of an fp32 element
# The advice for a model that needs too much memory.
REMEDIES = (
    "shorter or fewer samples in a microbatch, activation recompute (--recompute, or "
    "model.gradient_checkpointing_enable()), adapters (--lora), more stages on more ranks, or more memory"
)


@dataclass(frozen=True)
class Memory:
    """Bytes on a device, by purpose.

    `values` are the fp32 master weights of 16-bit parameters, or the shards that a replica keeps with fsdp. At the peak
    of the backward passes, microbatches keep `activations`, the running backward has allocated or recomputed
    `temporary` bytes more than it has freed, and `absent` bytes of gradients do not exist yet. `update` is the
    temporary memory at the end of a step. No activations exist at that time, so `total` counts only the larger of
    `backward` and `update`. `host` is host memory, which `total` does not include.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporary: int = 0
    absent: int = 0
    values: int = 0
    update: int = 0
    host: int = 0

    @property
    def always(self) -> int:
        """The memory once gradients exist, without activations and temporary memory."""
        return self.parameters + self.gradients + self.values + self.optimizer

    @property
    def backward(self) -> int:
        """The memory in addition to `always` at the peak of the backward passes."""
        return self.activations + self.temporary - self.absent

    @property
    def total(self) -> int:
        return self.always + max(self.backward, self.update)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in asdict(self).items() if size)
        return f"{format_bytes(self.total)} ({parts})"


@dataclass(frozen=True)
class Forms:
    """The forms in which a rank holds parameters. `lowered` contains the parameters that are cast to 16 bits. `sliced`
    maps each sharded parameter to the number of elements in a rank's shard. `packed` maps each quantized parameter to
    its layer. `embeddings` contains the weights of `nn.Embedding`s."""

    lowered: Container[Tensor] = ()
    sliced: Mapping[nn.Parameter, int] = field(default_factory=dict)
    packed: Mapping[nn.Parameter, Packed] = field(default_factory=dict)
    embeddings: Container[Tensor] = ()

    def count(self, parameters: Iterable[nn.Parameter]) -> int:
        """The number of elements in these parameters before quantization and sharding."""
        return sum(math.prod(self.packed[p].whole_shape) if p in self.packed else p.numel() for p in parameters)


@dataclass(frozen=True)
class Training:
    """The training settings that affect memory: the plugin's arguments of the same names, and the optimizer. "adamw",
    "adam" and "adamw_fused" (`fused=True`) have two states per parameter, "sgd" (with momentum) has one, and "none" has
    none. "adamw_8bit" and "lion_8bit" are bitsandbytes optimizers. "trainer_adamw_8bit" and "trainer_lion_8bit" are the
    same optimizers in a Trainer, which keeps the states of embeddings in fp32.

    With `precision` "bf16" or "fp16", parameters are 16-bit. Gradients, master weights and states (except 8-bit states)
    are fp32. `zero_stage=1` shards the states and the master weights across `dp_size` replicas. `fsdp` shards the
    states and the master weights (with "fp32", the parameters instead of master weights). Within a step, a rank also
    holds the unsharded parameters and gradients. Parameters in a tensor-parallel plan are sharded across `tp_size`
    ranks, and parameters of experts across `ep_size` ranks. If `offload` is "activations" or "both", a rank keeps the
    activations of at most two microbatches on its device. If it is "optimizer" or "both", the states, the fp32 master
    weights, and copies of the gradients are on the host.

    Raises ConfigurationError for an unknown optimizer, and for any argument that the plugin would refuse.
    """

    optimizer: str = "adamw"
    precision: str = "fp32"
    dp_size: int = 1
    zero_stage: int = 0
    fsdp: bool = False
    tp_size: int = 1
    ep_size: int = 1
    offload: str | None = None

    def __post_init__(self) -> None:
        known = [*OPTIMIZERS, *IN_8_BITS]
        if self.optimizer not in known:
            raise ConfigurationError(f"optimizer={self.optimizer!r} is unknown: {hint(self.optimizer, known)}")
        check_precision(self.precision, autocast=False)
        check_replicas(self.zero_stage, self.fsdp)
        check_offload(self.offload, self.fsdp, self.tp_size, self.ep_size)
        check_positive(dp_size=self.dp_size, tp_size=self.tp_size, ep_size=self.ep_size)

    def __str__(self) -> str:
        low = "" if self.precision == "fp32" else f", precision {self.precision}"
        divided = "zero_stage=1" if self.zero_stage else "fsdp" if self.fsdp else "unsharded"
        replicas = f", {self.dp_size} replicas, {divided}" if self.dp_size > 1 else ""
        return (
            f"optimizer {self.optimizer}{low}{replicas}"
            + (f", tp_size {self.tp_size}" if self.tp_size > 1 else "")
            + (f", ep_size {self.ep_size}" if self.ep_size > 1 else "")
            + (f", {self._on_host} on the host" if self.offload else "")
        )

    def config(
        self, schedule: Schedule, pp_size: int, num_microbatches: int, num_model_chunks: int = 1
    ) -> PipelineConfig:
        """The plugin's configuration for this training and a schedule. Raises ConfigurationError if the plugin refuses
        these arguments."""
        return PipelineConfig(
            pp_size=pp_size,
            num_microbatches=num_microbatches,
            schedule=schedule,
            num_model_chunks=num_model_chunks,
            **{name: value for name, value in vars(self).items() if name != "optimizer"},
        )

    def moments(self, actions: Sequence[Action]) -> list["Moment"]:
        """The distinct moments of a rank. A moment consists of the parts of all the rank's stages during a B or W of
        the rank. A stage has gradients once its first microbatch is complete."""
        compute = [action for action in actions if action.kind.is_compute]
        last = {action[1:]: action for action in compute}
        stages, trained, found = sorted({action.stage for action in compute}), set[int](), dict[Moment, None]()
        begun = set[tuple[int, int]]()
        on_device = resident if self.offloads("activations") else alive
        for action, here in zip(compute, on_device(compute), strict=True):
            counts, pending = (Counter(stage for _, stage in each) for each in (here, begun & here))
            running = action.stage if action.kind is Kind.B else None
            if action.kind is not Kind.F:
                splits = running is not None and last[action[1:]] is not action
                parts = (StagePart(counts[s], s in trained, s == running, pending[s], splits) for s in stages)
                found[tuple(zip(stages, parts, strict=True))] = None
                begun.add((action.microbatch, action.stage))
            if last[action[1:]] is action:
                trained.add(action.stage)
        return list(found)

    def on_host(self, actions: Sequence[Action], sizes: Sequence[int]) -> int:
        """The maximum number of bytes that a rank's activations take on the host. `sizes` contains the activation bytes
        of a microbatch on each stage. 0 unless `offload` includes activations."""
        return most_on_host(actions, sizes) if self.offloads("activations") else 0

    def offloads(self, what: str) -> bool:
        """Whether `offload` includes `what` ("activations" or "optimizer")."""
        return is_offloaded(self.offload, what)

    @property
    def _on_host(self) -> str:
        return "activations and optimizer" if self.offload == "both" else str(self.offload)

    @property
    def slices(self) -> int:
        """The number of ranks across which the weights of a stage are sharded."""
        return self.tp_size * self.ep_size

    @property
    def parts(self) -> int:
        """The number of replicas across which the states are sharded, or 1 if they are not sharded."""
        return self.dp_size if self.fsdp or self.zero_stage else 1

    def takes(self, parameters: Collection[nn.Parameter], forms: Forms) -> Memory:
        """The memory that these parameters take, including their gradients, states and master weights."""
        sizes = gradients = states = values = host = 0
        for parameter in parameters:
            is_low, count = parameter in forms.lowered, forms.sliced.get(parameter, parameter.numel())
            scales = forms.packed[parameter].scales if parameter in forms.packed else 0
            size = count * (2 if is_low else parameter.itemsize) + scales
            trained = (FULL * count if is_low else size) if is_trainable(parameter) else 0
            sizes, gradients = sizes + size, gradients + trained
            own = -(-self.states(count, trained, parameter in forms.embeddings) // self.parts)
            if self.offloads("optimizer"):
                host += own + 2 * -(-pinned(trained) // self.parts)  # plus the optimizer's values and gradients
            else:
                states += own
            if self.fsdp and self.dp_size > 1:
                # a frozen shard keeps its dtype
                values += -(-(trained or count * parameter.itemsize + scales) // self.dp_size)
            elif is_low and not self.offloads("optimizer"):
                values += -(-trained // self.parts)
        return Memory(sizes, gradients, states, values=values, update=self.update(gradients), host=host)

    def states(self, count: int, trained: int, is_embedding: bool = False) -> int:
        """The bytes of the optimizer states of `count` elements. The gradients of these elements take `trained` bytes
        (0 if the elements are frozen)."""
        if self.optimizer in OPTIMIZERS:
            return OPTIMIZERS[self.optimizer] * trained
        is_full = count < SMALL or (is_embedding and self.optimizer.startswith(OF_TRAINER))
        each = FULL * count if is_full else count + FULL * -(-count // BLOCK)
        return IN_8_BITS[self.optimizer] * each if trained else 0

    def update(self, gradients: int) -> int:
        """The temporary bytes at the end of a step. `gradients` is the size of the gradients in bytes. The result is
        the larger of two sizes: the size of the messages that sum gradients over ranks with the same weights (at most
        two messages are in flight), and the size of the square roots of the second moments. torch's AdamW computes
        these roots together on a GPU (`foreach`), unless the optimizer is fused or the states are on the host."""
        messages = min(2 * BUCKET, gradients) if self.dp_size * self.ep_size > 1 else 0
        has_roots = self.optimizer in WITH_ROOTS and not self.offloads("optimizer")
        return max(messages, gradients // self.parts if has_roots else 0)


def pinned(size: int) -> int:
    """The bytes that torch allocates for a pinned tensor of this size: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


class StagePart(NamedTuple):
    """A stage's part of a moment. The fields are, in order: the number of microbatches that the stage keeps `alive`,
    whether the stage's gradients exist, whether a B of the stage is running, the number of its microbatches that wait
    for W, and whether a W follows the running B."""

    alive: int
    has_gradients: bool
    is_running: bool
    pending: int = 0
    splits: bool = False


Moment = tuple[tuple[int, StagePart], ...]  # a rank's stages, each with its part


class Footprint:
    """The memory of each run of consecutive unit calls. This memory consists of the run's parameters in their `forms`,
    of their gradients, states and master weights under `training`, and of the activations of a microbatch.

    Memory that several calls share (tied parameters, masks, a result that two units keep) counts once per run. A
    parameter that no call reads belongs to the call that `held_parameters` selects.
    """

    def __init__(
        self,
        model: nn.Module,
        flow: Dataflow,
        meter: Meter,
        unrecomputed: Sequence[Work],
        training: Training,
        forms: Forms,
    ) -> None:
        """`unrecomputed` contains the Work of each unit call, metered without recomputation."""
        self.last = len(flow.calls)  # the glue after the last call counts as one more call
        units = {call.unit: model.get_submodule(call.unit) for call in flow.calls}
        self._held = held_parameters(model, flow, range(self.last), units, self.last + 1)
        self._parameters, self._forms = dict(model.named_parameters()), forms
        calls = defaultdict[str, list[int]](list)
        for call, names in enumerate(self._held):
            for name in names:
                calls[name].append(call)
        self._tied = {name: each for name, each in calls.items() if len(each) > 1}
        self.has_tied = bool(self._tied)
        self._count(training)
        kept = [dict(work.kept) for work in (*meter.works, meter.tail)]
        self._kept = _Union(kept)
        self._where: defaultdict[Hashable, list[int]] = defaultdict(list)
        for call, keys in enumerate(kept):
            for key in keys:
                self._where[key].append(call)
        # for a cut before each call, the values that cross it and receive gradients
        self._entering: list[Mapping[Hashable, int]] = [
            {meter.same.get(value, value): tensor_bytes(flow.spec(value)) for value in values & flow.receiving}
            for values in live_values(flow, range(self.last), self.last + 1, flow.needed())
        ]
        works = [[*each, meter.tail] for each in (unrecomputed, meter.works)]
        whole, left = ([sum(work.kept.values()) for work in each] for each in works)
        deferring = [defers(model.get_submodule(call.unit)) for call in flow.calls]
        recomputes = [a > b for a, b in zip(whole, left, strict=True)]
        of_w = [
            has_w * (work.waiting if again else a)
            for work, again, has_w, a in zip(works[0], recomputes, [*deferring, deferring[-1]], whole, strict=True)
        ]
        self._waiting = [a - b for a, b in zip(of_w, left, strict=True)]
        needed = [*itertools.accumulate(map(operator.mul, of_w, recomputes), initial=0)]
        # by `splits`: for each call, the bytes of recomputed activations of earlier calls that W needs
        self._needed = {True: needed, False: [0] * len(needed)}
        self._temporary = [w.temporary + a - b for w, a, b in zip(works[0], whole, left, strict=True)]

    def entered(self, entering: Sequence[Mapping[Hashable, int]]) -> "Footprint":
        """A copy of the Footprint with other entering values. For each call, `entering` contains the values that cross
        a cut before the call and receive gradients, with their bytes."""
        other = copy.copy(self)
        other._entering = list(entering)
        return other

    def trained(self, training: Training) -> "Footprint":
        """A copy of the Footprint for these training settings."""
        other = copy.copy(self)
        other._count(training)
        return other

    def _count(self, training: Training) -> None:
        each = {name: training.takes([parameter], self._forms) for name, parameter in self._parameters.items()}
        self.training = training
        self._static = _Union([{name: each[name].always for name in names} for names in self._held])
        self._gradients = _Union([{name: each[name].gradients for name in names} for names in self._held])
        self._twice = defaultdict[tuple[int, ...], Counter[str]](Counter)
        for name, calls in self._tied.items():
            self._twice[*calls].update(always=each[name].always, gradients=each[name].gradients)
        self._peaks = dict[tuple[int, bool, bool], list[int]]()
        self._totals = dict[tuple[int, int, StagePart | None], int]()

    def total(self, start: int, end: int, part: StagePart | None) -> int:
        """The bytes that a stage with the calls from `start` to `end` (exclusive) takes during `part` or, if `part` is
        None, at the end of a step."""
        key = start, end, part
        if key not in self._totals:
            if part is None:
                of_part = self.training.update(self.gradients(start, end))
            else:
                of_part = self.working(start, end, part).backward
            self._totals[key] = self._static.total(start, self._end(end)) + of_part
        return self._totals[key]

    def repeated(self, runs: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """The excess, in bytes, of the sums over these runs of one rank: the excess of permanent memory, and the excess
        of gradients. The sums count a tied parameter in each run that holds it, but the rank holds the parameter only
        once."""
        always = gradients = 0
        for calls, sizes in self._twice.items() if len(runs) > 1 else ():
            holding = sum(any(start <= call < self._end(end) for call in calls) for start, end in runs)
            always += sizes["always"] * max(0, holding - 1)
            gradients += sizes["gradients"] * max(0, holding - 1)
        return always, gradients

    def working(self, start: int, end: int, part: StagePart) -> Memory:
        """The memory that a stage takes during `part`, in addition to its permanent memory."""
        return Memory(
            activations=part.alive * self.activations(start, end) + part.pending * self.waiting(start, end),
            temporary=self.temporary(start, end, not part.has_gradients, part.splits) if part.is_running else 0,
            absent=0 if part.has_gradients else self.gradients(start, end),
        )

    def gradients(self, start: int, end: int) -> int:
        """The bytes of a stage's gradients."""
        return self._gradients.total(start, self._end(end))

    def activations(self, start: int, end: int) -> int:
        """The bytes that one microbatch keeps between F and B of these calls, including the stage's inputs."""
        end = self._end(end)
        entered = 0
        for value, size in self._entering[start].items():
            calls = self._where.get(value, [])
            k = bisect.bisect_left(calls, start)
            entered += size if k == len(calls) or calls[k] >= end else 0
        return self._kept.total(start, end) + entered

    def waiting(self, start: int, end: int) -> int:
        """The bytes that a microbatch keeps between B and W, minus the bytes that it keeps before B. The sizes differ
        because B recomputes the inputs of trained weights, and frees the activations of units without W."""
        return sum(self._waiting[start : self._end(end)])

    def temporary(self, start: int, end: int, first: bool = False, splits: bool = False) -> int:
        """The temporary bytes of this stage at the peak of a backward: the bytes that the backward has allocated minus
        the bytes of the activations that it has freed. The `first` backward also allocates the gradients. If a W
        follows (`splits`), the backward keeps the recomputed activations that W needs."""
        end, kept, gradients = self._end(end), self._kept.total, self._gradients.total
        needed = self._needed[splits]
        if (start, first, splits) not in self._peaks:
            made = (
                extra + kept(start, call + 1) - (gradients(start, call + 1) if first else 0) - needed[call + 1]
                for call, extra in enumerate(self._temporary[start:], start)
            )
            self._peaks[start, first, splits] = list(itertools.accumulate(made, max))
        later = (gradients(start, end) if first else 0) + needed[end]
        return max(0, self._peaks[start, first, splits][end - start - 1] - kept(start, end) + later)

    def _end(self, end: int) -> int:
        return end + 1 if end == self.last else end


def tensor_bytes(spec: TensorSpec) -> int:
    """The bytes of a tensor of this shape and dtype."""
    return spec.dtype.itemsize * math.prod(spec.shape)


class _Union:
    """Sums of sizes over runs of consecutive calls. A key that occurs in several calls of a run counts once."""

    def __init__(self, per_call: Sequence[Mapping[Hashable, int]]) -> None:
        previous: dict[Hashable, int] = {}
        self.entries: list[list[tuple[int, int]]] = []  # per call: previous call with the key (or -1), size
        for call, sizes in enumerate(per_call):
            self.entries.append([(previous.get(key, -1), size) for key, size in sizes.items()])
            previous.update(dict.fromkeys(sizes, call))
        self.rows: dict[int, list[int]] = {}

    def total(self, start: int, end: int) -> int:
        if start not in self.rows:
            added = (sum(size for before, size in call if before < start) for call in self.entries[start:])
            self.rows[start] = [0, *itertools.accumulate(added)]
        return self.rows[start][end - start]
