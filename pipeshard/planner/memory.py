"""Memory: what a run of unit calls takes on a device, and what a rank's program keeps alive of it."""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from torch import nn

from pipeshard.errors import ConfigurationError
from pipeshard.model.dataflow import Dataflow
from pipeshard.model.meter import Meter
from pipeshard.model.shapes import TensorSpec
from pipeshard.model.standin import is_trainable
from pipeshard.model.taint import Value
from pipeshard.planner.sizes import format_bytes
from pipeshard.schedule.action import Action, Kind

OPTIMIZERS = {"adamw": 2, "sgd": 1, "none": 0}  # states of a parameter, each of its size and dtype


@dataclass(frozen=True)
class Memory:
    """Bytes on a device, by what they hold; `recomputed` is what is recomputed at a time, for a backward."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    recomputed: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.recomputed

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], optimizer: str, activations: int = 0, recomputed: int = 0) -> Self:
        """That of training these parameters, each with a gradient and the optimizer's states if it is trained."""
        if optimizer not in OPTIMIZERS:
            raise ConfigurationError(f"optimizer={optimizer!r} is unknown: use one of {list(OPTIMIZERS)}")
        trained = sum(p.nbytes for p in parameters if is_trainable(p))
        return cls(sum(p.nbytes for p in parameters), trained, OPTIMIZERS[optimizer] * trained, activations, recomputed)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in asdict(self).items() if size)
        return f"{format_bytes(self.total)} ({parts})"


class Footprint:
    """What each run of unit calls takes: its parameters with all that training adds, and what a microbatch keeps.

    What several calls share (tied parameters, masks, a result that two units keep) counts once in a run of calls.
    `plain` is a meter of the same calls without recomputation, if there is any with it.
    """

    def __init__(
        self, model: nn.Module, flow: Dataflow, meter: Meter, optimizer: str, plain: Meter | None = None
    ) -> None:
        named = dict(model.named_parameters())
        first = {parameter: name for name, parameter in named.items()}
        sizes = {name: Memory.of([parameter], optimizer).total for name, parameter in named.items()}
        units = {call.unit: {first[p] for p in model.get_submodule(call.unit).parameters()} for call in flow.calls}
        held = [units[call.unit] | call.reads.parameters for call in flow.calls]
        held.append(set(flow.needed(outputs=True).parameters))
        self.last = len(flow.calls)  # the glue after the last call counts as one more, of the last stage
        self._static = _Union([{name: sizes[name] for name in names} for names in held])
        kept = [dict(work.kept) for work in meter.works] + [dict(meter.tail)]
        self._kept = _Union(kept)
        self._where: defaultdict[Hashable, list[int]] = defaultdict(list)
        for call, keys in enumerate(kept):
            for key in keys:
                self._where[key].append(call)
        self._entering = [
            {meter.same.get(value, value): size for value, size in entering.items()} for entering in _entering(flow)
        ]
        totals = [[sum(work.kept.values()) for work in each.works] for each in (plain or meter, meter)]
        self._recomputed = [whole - left for whole, left in zip(*totals, strict=True)]

    def static(self, start: int, end: int) -> int:
        """Bytes of parameters, gradients and optimizer states of the calls from `start` to `end` (exclusive)."""
        return self._static.total(start, self._end(end))

    def activations(self, start: int, end: int) -> int:
        """Bytes that one microbatch keeps between its forward and its backward there, with what entered it."""
        end = self._end(end)
        entered = 0
        for value, size in self._entering[start].items():
            calls = self._where.get(value, [])
            k = bisect.bisect_left(calls, start)
            entered += size if k == len(calls) or calls[k] >= end else 0
        return self._kept.total(start, end) + entered

    def recomputed(self, start: int, end: int) -> int:
        """Bytes that the recomputation of a unit makes, at most: one after the other is recomputed and freed."""
        return max(self._recomputed[start:end], default=0)

    def _end(self, end: int) -> int:
        return end + 1 if end == self.last else end


def _entering(flow: Dataflow) -> list[dict[Value, int]]:
    """For a cut before each call, the values that cross it and get a gradient back, and their bytes."""
    needed = [call.reads.values for call in flow.calls] + [flow.needed().values]
    entering: list[dict[Value, int]] = [{} for _ in needed]
    for reader, values in enumerate(needed):
        for value in values & flow.receiving:
            for cut in range(value.call + 1, reader + 1):
                entering[cut][value] = tensor_bytes(flow.spec(value))
    return entering


def tensor_bytes(spec: TensorSpec) -> int:
    """The bytes of a tensor of this shape and dtype."""
    size: int = spec.dtype.itemsize
    for length in spec.shape:
        size *= length
    return size


class _Union:
    """Sums over runs of calls, in which a key that several calls have counts once."""

    def __init__(self, per_call: Sequence[Mapping[Hashable, int]]) -> None:
        previous: dict[Hashable, int] = {}
        self.entries: list[list[tuple[int, int]]] = []  # for each call: where a key was before, and its size
        for call, sizes in enumerate(per_call):
            self.entries.append([(previous.get(key, -1), size) for key, size in sizes.items()])
            previous.update(dict.fromkeys(sizes, call))
        self.rows: dict[int, list[int]] = {}

    def total(self, start: int, end: int) -> int:
        if start not in self.rows:
            added = (sum(size for before, size in call if before < start) for call in self.entries[start:])
            self.rows[start] = [0, *itertools.accumulate(added)]
        return self.rows[start][end - start]


def alive_at_peak(actions: Sequence[Action], sizes: Sequence[int]) -> dict[int, int]:
    """How many microbatches of each stage a rank keeps alive when that takes most, a microbatch of stage s `sizes[s]`.

    A microbatch is alive on a stage from its F to its last compute action there.
    """
    compute = [action for action in actions if action.kind.is_compute]
    last = {action[1:]: k for k, action in enumerate(compute)}
    alive: dict[int, int] = dict.fromkeys((action.stage for action in compute), 0)
    peak, most, now = dict(alive), 0, 0
    for k, action in enumerate(compute):
        if action.kind is Kind.F:
            alive[action.stage] += 1
            now += sizes[action.stage]
            if now > most:
                peak, most = dict(alive), now
        if last[action[1:]] == k:
            alive[action.stage] -= 1
            now -= sizes[action.stage]
    return peak
