"""Profile: the time of each unit call, measured on a device. All ranks use the same times."""

import contextlib
import copy
import json
import statistics
import time
import warnings
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, loss_of
from pipeshard.batch.read import read_batch
from pipeshard.distributed.collectives import gather
from pipeshard.engine.weight_grad import Deferral
from pipeshard.errors import ConfigurationError, UsageError, summary
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.preserve import preserving
from pipeshard.graph.rng import Randomness
from pipeshard.graph.shapes import TensorSpec, blank_state
from pipeshard.graph.taint import Taint
from pipeshard.graph.unit_outputs import answer
from pipeshard.graph.units import handled
from pipeshard.planner.candidate import Capture, Captures, copied_argument, metered, unit_cost
from pipeshard.private import reparametrized, tree_map_only, tree_tensors, tree_unflatten
from pipeshard.split.partition import Cost

SPREAD = 0.02  # the standard deviation of random parameters
# Warm-up runs are not counted. The first run allocates the gradients that later runs accumulate into. The next few runs
# may still allocate memory from the system, and the run of an embedding then takes five times as long.
WARM_UPS = 3
COLD = 64 * 2**20  # bytes written before F and B to clear the caches, as other units do in a step


class Stopwatch:
    """Times `unit` on `device` with the arguments of `capture`."""

    def __init__(self, unit: nn.Module, capture: Capture, device: torch.device) -> None:
        self.unit, self.capture, self.device = unit, capture, device

    def median(self, repeats: int) -> Cost:
        """The median times of `repeats` runs, in seconds: of the forward, of the backward without the weight gradients
        that can be deferred, and of these weight gradients."""
        state = blank_state(self.unit, self.device)
        own = (*self.unit.named_parameters(remove_duplicate=False), *self.unit.named_buffers(remove_duplicate=False))
        for name, tensor in own:
            if tensor.device != self.device and state[name].is_floating_point():
                state[name].data.normal_(0, SPREAD)
            if hasattr(tensor, "pipeshard_values") and tensor.requires_grad:  # 16-bit, with an fp32 gradient
                state[name].grad_dtype = torch.float32
        arguments = [self._placed(leaf, k in self.capture.made_up) for k, leaf in enumerate(self.capture.leaves)]
        self.cold = torch.empty(COLD, dtype=torch.uint8, device=self.device)
        deferral = Deferral([self.unit])
        with reparametrized(self.unit, state), deferral.installed(), torch.enable_grad():
            runs = [self._run(arguments, deferral) for _ in range(WARM_UPS + repeats)]
        return _median(runs[WARM_UPS:])

    def _run(self, arguments: list[Any], deferral: Deferral) -> Cost:
        leaves = tree_map_only(Tensor, lambda t: t.clone(), [copied_argument(leaf) for leaf in arguments])
        args, kwargs = tree_unflatten(leaves, self.capture.tree)
        self.cold.zero_()
        start = _now(self.device)
        result = self.unit(*args, **kwargs)
        forward = _now(self.device) - start
        made = [tensor for tensor in tree_tensors(result) if tensor.requires_grad]
        gradients = [torch.randn_like(t) for t in made]
        pending = deferral.begin()
        self.cold.zero_()
        start = _now(self.device)
        if made:
            torch.autograd.backward(made, gradients)
        middle = _now(self.device)
        deferral.finish(pending)
        return Cost(forward, middle - start, _now(self.device) - middle)

    def _placed(self, leaf: Any, made_up: bool) -> Any:
        """Copy an argument to the device. A floating-point tensor that depends on results of other units gets random
        values."""
        if isinstance(leaf, MutableMapping):
            placed = copy.copy(leaf)
            placed.update(tree_map_only(Tensor, lambda t: self._placed(t, True), dict(leaf)))
            return placed
        if not isinstance(leaf, Tensor):
            return leaf
        if made_up and leaf.is_floating_point():
            there = torch.randn(leaf.shape, dtype=leaf.dtype, device=self.device)
        else:
            there = leaf.detach().to(self.device)
        return there.requires_grad_(leaf.requires_grad)


def _tail_time(
    model: nn.Module, flow: Dataflow, microbatch: Batch, criterion: Criterion | None, device: torch.device, repeats: int
) -> Cost:
    """The median times, in seconds, of the part of the forward and backward after the last unit call, in which the
    model's own code or the criterion computes the loss. `flow` must be the trace of this microbatch. Units return
    random values. If the model fails on these values, the times are 0."""
    runs: list[Cost] = []
    with contextlib.suppress(Exception):  # a model may raise any error on random values
        for _ in range(1 + repeats):
            private = microbatch.to(device).copied(microbatch.paths)  # since glue may write to it
            runs.append(_run_tail(model, flow, private, criterion, device))
    return _median(runs[1:] or [Cost(0.0, 0.0, 0.0)])


def _run_tail(
    model: nn.Module, flow: Dataflow, batch: Batch, criterion: Criterion | None, device: torch.device
) -> Cost:
    units, start, made = {call.unit: model.get_submodule(call.unit) for call in flow.calls}, 0.0, list[Tensor]()
    calls = iter(flow.calls)
    last = flow.calls[-1]

    def reply(unit: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        nonlocal start
        call = next(calls)
        leaves = [_made_up(leaf, device, made) if isinstance(leaf, TensorSpec) else leaf for leaf in call.leaves]
        result = answer(units[unit], call.parts, leaves, (args, kwargs))
        if call is last:
            start = _now(device)
        return result

    with handled(units, reply), torch.enable_grad(), Taint(device):  # Taint supports glue that reads weights on meta
        loss = loss_of(batch.call(model), criterion, batch)
    middle = _now(device)
    if loss is not None and loss.requires_grad:
        torch.autograd.grad(loss, made, allow_unused=True)
    return Cost(middle - start, _now(device) - middle, 0.0)


def _made_up(spec: TensorSpec, device: torch.device, made: list[Tensor]) -> Tensor:
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    tensor = torch.randn(spec.shape, dtype=spec.dtype, device=device).requires_grad_(spec.requires_grad)
    made += [tensor] if spec.requires_grad else []
    return tensor.view_as(tensor)  # a view: unlike a leaf, it may be modified in place


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _median(runs: Sequence[Cost]) -> Cost:
    return Cost(*(statistics.median(part) for part in zip(*runs, strict=True)))


@dataclass(frozen=True)
class Profile:
    """The times, in seconds, of F, B and W of each unit call of one microbatch, with the names of the measured model's
    class and of the device.

    `estimated` contains the units that could not be timed. Their times are estimates, scaled to match the measured
    times.
    """

    model: str
    units: tuple[str, ...]
    microbatch: dict[str, tuple[int, ...]]
    torch: str
    device: str
    times: tuple[Cost, ...]
    estimated: tuple[str, ...] = ()

    def costs(self, flow: Dataflow) -> list[float]:
        """The time of each unit call of `flow` in seconds (F, B and W together). Raises ConfigurationError if the
        profile has other unit calls than `flow`."""
        self._refuse("unit calls", self.units, tuple(call.unit for call in flow.calls))
        return [sum(cost) for cost in self.times]

    def check(self, model: nn.Module, flow: Dataflow, microbatch: Batch) -> None:
        """Raise ConfigurationError if the profile was measured for another model class, for other unit calls than in
        `flow`, or for microbatches of other sizes."""
        self._refuse("model classes", (self.model,), (type(model).__name__,))
        self.costs(flow)
        self._refuse("microbatches", self.microbatch, shapes_of(microbatch))

    def save(self, path: str | Path) -> None:
        """Write the profile to the file `path` as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a profile that `save` wrote. Raises ConfigurationError for any other file."""
        try:
            data = json.loads(Path(path).read_text())
            return cls(
                str(data["model"]),
                tuple(data["units"]),
                {name: tuple(shape) for name, shape in data["microbatch"].items()},
                str(data["torch"]),
                str(data["device"]),
                tuple(Cost(*map(float, cost)) for cost in data["times"]),
                tuple(data["estimated"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{path} is not a profile ({summary(error)}): create one with "
                "pipeshard.planner.profile_units(...).save(path)"
            ) from error

    def _refuse(self, what: str, measured: Any, now: Any) -> None:
        if measured != now:
            raise ConfigurationError(
                f"the profile does not match this run: the {what} differ ({_first_difference(measured, now)}). The "
                f"profile was measured on {self.device} with torch {self.torch}. Profile this model again, with the "
                "microbatch size of this run"
            )


def profile_units(
    model: nn.Module,
    flow: Dataflow,
    batch: Any,
    device: torch.device | str,
    repeats: int = 5,
    criterion: Criterion | None = None,
) -> Profile:
    """Time the unit calls of `flow` on `device`, for a microbatch like `batch`.

    Each kind of unit runs alone in training mode, forward and backward, three times to warm up and `repeats` times for
    the median. Floating-point inputs that depend on results of other units are replaced with random values of
    the same shapes. Masks and positions have the values that the model computes. Parameters that are not on `device`
    also have random values. If a unit fails on these values, `profile_units` warns, and estimates the unit's time from
    the times of the other units. Only one unit is on the device at a time. The time of the last call includes the loss,
    which the model or `criterion` computes.

    Raises ConfigurationError if the model makes other unit calls for this batch than in `flow`, and UsageError if no
    unit can be timed.
    """
    microbatch = batch if isinstance(batch, Batch) else read_batch(model, batch)
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    captures = Captures()
    now, _ = metered(model, microbatch, criterion, meter=captures)
    units = [model.get_submodule(call.unit) for call in now.calls]
    with preserving(model, timed=True), Randomness(device).step(0, 0):
        if not model.training:
            model.train()
        times: dict[int, Cost | None] = {}
        for unit, capture in zip(units, captures.calls, strict=True):
            if id(capture) not in times:
                times[id(capture)] = _timed(Stopwatch(unit, capture, device), repeats, model)
        tail = _tail_time(model, now, microbatch, criterion, device, repeats)
    measured = [times[id(capture)] for capture in captures.calls]
    estimates = [unit_cost(unit, work) for unit, work in zip(units, captures.works, strict=True)]
    completed = _completed(measured, estimates)
    completed[-1] = Cost(*(a + b for a, b in zip(completed[-1], tail, strict=True)))
    profile = Profile(
        model=type(model).__name__,
        units=tuple(call.unit for call in now.calls),
        microbatch=shapes_of(microbatch),
        torch=torch.__version__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        times=tuple(completed),
        estimated=tuple(call.unit for call, cost in zip(now.calls, measured, strict=True) if cost is None),
    )
    profile.costs(flow)
    return profile


def find_profile(
    file: str, model: nn.Module, flow: Dataflow, microbatch: Batch, device: torch.device, criterion: Criterion | None
) -> Profile:
    """Load the profile in `file` or, if the file does not exist, measure a profile. Raises ConfigurationError if the
    file is not a profile, or if the profile does not match the model or the microbatch. Raises UsageError if no unit
    can be timed."""
    known = bool(file) and Path(file).exists()
    profile = Profile.load(file) if known else profile_units(model, flow, microbatch, device, criterion=criterion)
    profile.check(model, flow, microbatch)
    return profile


def _timed(stopwatch: Stopwatch, repeats: int, model: nn.Module) -> Cost | None:
    try:
        return stopwatch.median(repeats)
    except Exception as error:  # a unit may raise any error on random values
        name = next(name for name, module in model.named_modules() if module is stopwatch.unit)
        warnings.warn(
            f"unit {name} ({type(stopwatch.unit).__name__}) failed on synthetic inputs ({summary(error)}), so its time "
            "is estimated from the times of the other units",
            stacklevel=3,
        )
        return None


def _completed(measured: Sequence[Cost | None], estimates: Sequence[Cost]) -> list[Cost]:
    """The measured times. For units without a measurement, the estimates, scaled to seconds."""
    known = [(cost, estimate) for cost, estimate in zip(measured, estimates, strict=True) if cost is not None]
    total = sum(sum(estimate) for _, estimate in known)
    if not total:
        raise UsageError("none of the model's units could be timed: use partition='auto'")
    seconds = sum(sum(cost) for cost, _ in known) / total
    return [
        Cost(*(part * seconds for part in estimate)) if cost is None else cost
        for cost, estimate in zip(measured, estimates, strict=True)
    ]


def shapes_of(microbatch: Batch) -> dict[str, tuple[int, ...]]:
    """The shapes of the microbatch's tensors, by name."""
    return {path: tuple(tensor.shape) for path, tensor in microbatch.tensors.items()}


def _first_difference(measured: Any, now: Any) -> str:
    """Describe the first difference between this run and the profile."""
    if isinstance(now, dict):
        name = next(name for name in [*measured, *now] if measured.get(name) != now.get(name))
        return f"{name} is {now.get(name)} in this run, {measured.get(name)} in the profile"
    if len(measured) != len(now):
        return f"{len(now)} in this run, {len(measured)} in the profile"
    was, is_now = next((a, b) for a, b in zip(measured, now) if a != b)
    return f"{is_now} in this run, {was} in the profile"


def measured_costs(
    partition: str,
    model: nn.Module,
    flow: Dataflow,
    batch: Batch,
    cut: tuple[int | None, int | None],
    device: torch.device,
    group: dist.ProcessGroup,
    criterion: Criterion | None = None,
) -> list[float]:
    """The time of each unit call in seconds: the median of the measurements of all ranks of `group`. Call it on all
    ranks of `group`.

    `partition` is "profile" or "profile:PATH". If PATH exists, all ranks read this file. Otherwise, all ranks measure
    the times, and the first rank writes its own times to PATH (if PATH is given). `cut` is a pair: the number of
    microbatches in `batch`, and the number of samples in each microbatch. One of the two is None. Raises the errors of
    `find_profile`.
    """
    file = partition.partition(":")[2]
    profile = find_profile(file, model, flow, batch.split(*cut)[0], device, criterion)
    of_ranks = gather(torch.tensor(profile.costs(flow), dtype=torch.float64), group)
    if file and group.rank() == 0 and not Path(file).exists():
        profile.save(file)
    return of_ranks.median(dim=0).values.tolist()
