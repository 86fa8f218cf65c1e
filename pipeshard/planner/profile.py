"""Profile: the time of each unit call, measured on a device."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.model.batch import Batch
from pipeshard.model.dataflow import Dataflow
from pipeshard.model.media import read_batch
from pipeshard.model.partition import Cost
from pipeshard.model.randomness import Randomness
from pipeshard.model.untouched import untouched
from pipeshard.planner.costs import metered, unit_cost
from pipeshard.planner.stopwatch import Captures, Stopwatch


@dataclass(frozen=True)
class Profile:
    """Seconds of F, B and W of each unit call of one microbatch, and what they were measured for and on.

    `estimated` are units that could not be timed; their times are estimates, scaled to the others' measured ones.
    """

    model: str
    units: tuple[str, ...]
    microbatch: dict[str, tuple[int, ...]]
    torch: str
    device: str
    times: tuple[Cost, ...]
    estimated: tuple[str, ...] = ()

    def costs(self, flow: Dataflow) -> list[float]:
        """Seconds of each unit call of `flow`, forward and backward; ConfigurationError if it has other calls."""
        self._refuse("unit calls", self.units, tuple(call.unit for call in flow.calls))
        return [sum(cost) for cost in self.times]

    def check(self, model: nn.Module, flow: Dataflow, microbatch: Batch) -> None:
        """Raises ConfigurationError if the profile is of another model, or of microbatches of other sizes."""
        self._refuse("model classes", self.model, type(model).__name__)
        self.costs(flow)
        self._refuse("microbatches", self.microbatch, _shapes(microbatch))

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote; ConfigurationError for anything else."""
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
                f"{path} is no profile ({type(error).__name__}: {error}): make one with "
                "pipeshard.planner.profile_units(...).save(path)"
            ) from error

    def _refuse(self, what: str, measured: Any, now: Any) -> None:
        if measured != now:
            raise ConfigurationError(
                f"the profile is for something else: its {what} differ ({_difference(measured, now)}). It was measured "
                f"on {self.device} with torch {self.torch}; profile this model with microbatches of this size"
            )


def profile_units(
    model: nn.Module, flow: Dataflow, batch: Any, device: torch.device | str, repeats: int = 5
) -> Profile:
    """Time the unit calls of `flow` on `device`, for a microbatch like `batch`.

    Each kind of unit is run alone, forward and backward, three times to warm up and `repeats` times for the median, in
    training mode. Its inputs are random numbers in the shapes that the trace finds, and masks and positions as the
    model makes them; parameters that are not on `device` are random too. A kind that does not run on such values gets
    its estimated share of the others' time, with a warning. Only one unit is on the device at a time.

    Raises ConfigurationError if the batch makes other unit calls than `flow`, UsageError if no unit could be timed.
    """
    microbatch = batch if isinstance(batch, Batch) else read_batch(model, batch)
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    captures = Captures()
    now, _ = metered(model, microbatch, meter=captures)
    units = [model.get_submodule(call.unit) for call in now.calls]
    with untouched(model, timed=True), Randomness(device).step(0, 0):
        if not model.training:
            model.train()
        times: dict[int, Cost | None] = {}
        for unit, capture in zip(units, captures.calls, strict=True):
            if id(capture) not in times:
                times[id(capture)] = _timed(Stopwatch(unit, capture, device), repeats, model)
    measured = [times[id(capture)] for capture in captures.calls]
    estimates = [unit_cost(unit, work) for unit, work in zip(units, captures.works, strict=True)]
    profile = Profile(
        model=type(model).__name__,
        units=tuple(call.unit for call in now.calls),
        microbatch=_shapes(microbatch),
        torch=torch.__version__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        times=tuple(_completed(measured, estimates)),
        estimated=tuple(call.unit for call, cost in zip(now.calls, measured, strict=True) if cost is None),
    )
    profile.costs(flow)
    return profile


def find_profile(file: str, model: nn.Module, flow: Dataflow, microbatch: Batch, device: torch.device) -> Profile:
    """The one in `file`, if there is such a file, or else one that is made now; raises if it is of something else."""
    known = bool(file) and Path(file).exists()
    profile = Profile.load(file) if known else profile_units(model, flow, microbatch, device)
    profile.check(model, flow, microbatch)
    return profile


def _timed(stopwatch: Stopwatch, repeats: int, model: nn.Module) -> Cost | None:
    try:
        return stopwatch.median(repeats)
    except Exception as error:
        name = next(name for name, module in model.named_modules() if module is stopwatch.unit)
        warnings.warn(
            f"unit {name} ({type(stopwatch.unit).__name__}) does not run on made-up values, so its time is estimated "
            f"from that of the other units ({type(error).__name__}: {error})",
            stacklevel=3,
        )
        return None


def _completed(measured: Sequence[Cost | None], estimates: Sequence[Cost]) -> list[Cost]:
    """The measured times, and where there are none the estimates, in seconds as the measured ones are."""
    known = [(cost, estimate) for cost, estimate in zip(measured, estimates, strict=True) if cost is not None]
    total = sum(sum(estimate) for _, estimate in known)
    if not total:
        raise UsageError("none of the model's units could be timed: use partition='auto'")
    seconds = sum(sum(cost) for cost, _ in known) / total
    return [
        Cost(*(part * seconds for part in estimate)) if cost is None else cost
        for cost, estimate in zip(measured, estimates, strict=True)
    ]


def _shapes(microbatch: Batch) -> dict[str, tuple[int, ...]]:
    return {path: tuple(tensor.shape) for path, tensor in microbatch.tensors.items()}


def _difference(measured: Any, now: Any) -> str:
    """Where the two differ first."""
    if isinstance(now, dict):
        name = next(name for name in [*measured, *now] if measured.get(name) != now.get(name))
        return f"{name} is {now.get(name)}, not {measured.get(name)}"
    if isinstance(now, tuple) and len(measured) != len(now):
        return f"{len(now)}, not {len(measured)}"
    pairs = zip(measured, now) if isinstance(now, tuple) else [(measured, now)]
    was, is_now = next((a, b) for a, b in pairs if a != b)
    return f"{is_now}, not {was}"
