"""Check: one model of the catalog, trained for two steps with the plugin and unsplit, and the comparison of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeshard
from pipeshard.split.materialize import is_released
from tests.packages.model import Model, called

CLOSE = 1e-6  # of the loss, and of each gradient relative to its own norm
CLOSE_FP64 = 1e-10  # where fp32 is further off: rounding shrinks with the precision, a mistake does not
SHRINKS = 1e-8  # where training itself multiplies roundings: those of fp64 are 2**29 times smaller
SMALL = 1e-3  # of the largest gradient: what smaller ones are measured by
COUPLED = 1e-3  # the distance of the microbatches' gradients from the batch's, beyond which they are not its parts
EPSILON = 2.0**-24  # half a rounding of fp32
MOST = 1e-4  # of what rounding excuses where fp64 cannot tell
STEPS = 2
PATIENCE = 60.0  # seconds of the proof at boost, so that a busy machine finds what a quiet one does
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """What a rank found: "bitwise", "close", "untrainable" or "wrong", with the largest error and the reason.

    `seconds` are CPU seconds of the unsplit step, of boost and of the first step.
    """

    kind: str
    error: float = 0.0
    reason: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)


class Untrainable(Exception):
    """The model does not train unsplit."""


@dataclass
class Trained:
    """What training has left: each step's loss, the first step's gradients, and the state at the end."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: Tensors = field(default_factory=dict)
    state: Tensors = field(default_factory=dict)


def check(model: Model, options: Mapping[str, Any]) -> Verdict:
    """Two steps on this rank's stage, in two microbatches or what `options` of the plugin say; every rank calls it."""
    options = {"num_microbatches": 2, **model.options, **options}
    verdict = compare(model, options, torch.float32)
    worst: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(worst, verdict.kind)
    if "wrong" not in worst:
        return verdict
    infinite: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(infinite, verdict.error == float("inf"))
    if any(infinite):  # a tensor that is missing, of another shape, or that should not be there: not due to rounding
        return verdict
    try:
        again = compare(model, options, torch.float64)
    except Exception as error:
        return Verdict("wrong", verdict.error, f"{verdict.reason} (fp64: {type(error).__name__}: {error})")
    if again.kind in ("bitwise", "close") or shrinks(verdict.error, again.error):
        return Verdict("close", again.error, f"in fp64; {verdict.error:.0e} in fp32", verdict.seconds)
    own = min(rounding(model, options), MOST)  # some models compute in fp32 whatever their dtype
    if verdict.error <= own:
        note = f"the unsplit model differs by {own:.0e} from itself when its weights are rounded otherwise"
        return Verdict("close", verdict.error, note, verdict.seconds)
    return Verdict("wrong", verdict.error, f"{verdict.reason} (fp64: {again.reason})", verdict.seconds)


def shrinks(single: float, double: float) -> bool:
    """Whether the errors in fp32 and fp64 are roundings: these shrink with the precision, a mistake does not."""
    return double <= SHRINKS * single


def rounding(model: Model, options: Mapping[str, Any]) -> float:
    """How far the unsplit model's losses and gradients move when each weight does so by half a rounding."""
    expected = unsplit(model, options, torch.float32, {})
    generator = torch.Generator().manual_seed(0)

    def moved(whole: nn.Module) -> None:
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.mul_(1 + EPSILON * torch.randn(parameter.shape, generator=generator))

    found = unsplit(model, options, torch.float32, {}, moved)
    return judged(found, expected, float("inf"), {}).error


def compare(model: Model, options: Mapping[str, Any], dtype: torch.dtype) -> Verdict:
    """One precision's verdict. It is torch's default, too: many models make tensors of it in their forward."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return _compare(model, options, dtype)
    finally:
        torch.set_default_dtype(before)


def _compare(model: Model, options: Mapping[str, Any], dtype: torch.dtype) -> Verdict:
    seconds: dict[str, float] = {}
    reason = ""
    try:
        expected = unsplit(model, options, dtype, seconds)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)  # whatever it is, no rank goes on alone
    if any(reasons):
        return Verdict("untrainable", reason=next(filter(None, reasons)))
    found = split(model, options, dtype, seconds)
    return judged(found, expected, CLOSE if dtype == torch.float32 else CLOSE_FP64, seconds)


def judged(found: Trained, expected: Trained, close: float, seconds: Mapping[str, float]) -> Verdict:
    """Whether a rank's losses, gradients and (where it has it) state are those of the unsplit model."""
    problems = []
    losses = max(_relative(a, b, b.abs().clamp(min=1e-3)) for a, b in zip(found.losses, expected.losses, strict=True))
    if not losses <= close:
        problems.append(f"loss {[float(a) for a in found.losses]}, unsplit {[float(b) for b in expected.losses]}")
    largest = max((float(g.norm()) for g in expected.gradients.values()), default=0.0)
    gradients = _furthest(found.gradients, expected.gradients, SMALL * largest)
    if not gradients[0] <= close:
        problems.append(f"gradient of {gradients[1]} {gradients[0]:.1e}")
    missing = sorted(expected.state.keys() - found.state.keys()) if found.state else []
    if missing:
        problems.append(f"no {', '.join(missing[:3])} after training")
    state = _furthest(found.state, expected.state, SMALL)
    if not state[0] <= 10 * close:
        problems.append(f"after {STEPS} steps {state[1]} {state[0]:.1e}")
    error = float("inf") if missing else max(losses, gradients[0], state[0] / 10)
    if problems:
        return Verdict("wrong", error, "; ".join(problems), seconds)
    return Verdict("close" if error else "bitwise", error, seconds=seconds)


def _relative(found: Tensor, expected: Tensor, scale: Tensor) -> float:
    error = float((found.double() - expected.double()).norm() / scale.double())
    return error if error == error else float("inf")


def _furthest(found: Tensors, expected: Tensors, floor: float) -> tuple[float, str]:
    """The largest relative error of a tensor of `found`, and its name. What is zero may be missing in `expected`."""
    worst = (0.0, "")
    for name, value in found.items():
        if name not in expected:
            if value.any():
                return float("inf"), f"{name}, which has none unsplit,"
            continue
        if value.shape != expected[name].shape:
            return float("inf"), f"{name}, of shape {tuple(value.shape)},"
        if torch.equal(value, expected[name]):
            continue
        scale = expected[name].double().norm().clamp(min=max(floor, 1e-30))
        worst = max(worst, (_relative(value, expected[name], scale), name))
    return worst


def split(model: Model, options: Mapping[str, Any], dtype: torch.dtype, seconds: dict[str, float]) -> Trained:
    """The model trained by a pipeline of all ranks: this stage's gradients; on the first rank, the whole state."""
    whole, batches = model.made(dtype), model.batches(dtype)
    optimizer = model.optimizer(whole)
    plugin = pipeshard.PipelinePlugin(pp_size=dist.get_world_size(), dry_run_input=batches[0], **options)
    with _timed(seconds, "boost"), mock.patch("pipeshard.verify.decide.SECONDS", PATIENCE):
        engine = pipeshard.initialize(whole, optimizer, model.loss, plugin=plugin)
    trained, steps = Trained(), iter(batches)
    for step in range(STEPS):
        with _timed(seconds, "first step" if step == 0 else "step"):
            loss = engine.execute_pipeline(steps)["loss"]
        trained.losses.append(loss.detach().clone())
        if step == 0:
            held = {n: p for n, p in engine.model.unwrap().named_parameters() if not is_released(p)}
            trained.gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in held.items()}
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    final = pipeshard.to_sequential(engine.model, rank=0)
    trained.state = _state(final) if final is not None else {}
    return trained


def unsplit(
    model: Model,
    options: Mapping[str, Any],
    dtype: torch.dtype,
    seconds: dict[str, float],
    change: Callable[[nn.Module], None] = lambda whole: None,
) -> Trained:
    """The model trained in this process: by its microbatches where these make the batch's loss, or have batch norm."""
    count = options["num_microbatches"]
    whole = model.made(dtype)
    change(whole)
    optimizer = model.optimizer(whole)
    batches = model.batches(dtype)
    if count > 1 and not (_normalizes(whole) or options.get("loss_reduction") == "microbatch"):
        count = count if _sums(model, batches[0], count, dtype) else 1
    trained = Trained()
    for step, batch in enumerate(batches):
        with _timed(seconds, "unsplit"):
            loss = _backward(model, whole, model.parts(batch, count) if count > 1 else [batch])
        trained.losses.append(loss)
        if step == 0:
            trained.gradients = _gradients(dict(whole.named_parameters()))
            finite = [loss.isfinite().all(), *(g.isfinite().all() for g in trained.gradients.values())]
            if not all(finite) or len(finite) == 1:
                raise Untrainable(f"the loss is {float(loss)}, and {len(finite) - 1} parameters get gradients")
        optimizer.step()
        optimizer.zero_grad()
    trained.state = _state(whole)
    if not all(parameter.isfinite().all() for parameter in whole.parameters()):
        raise Untrainable(f"its parameters are not finite after {STEPS} steps")
    return trained


def _backward(model: Model, whole: nn.Module, parts: Any) -> Tensor:
    total: Tensor | None = None
    for part in parts:
        loss = model.loss(called(whole, part), part)
        loss.backward(torch.full_like(loss, 1 / len(parts)))
        share = loss.detach() / len(parts)
        total = share if total is None else total + share
    assert total is not None
    return total


def _sums(model: Model, batch: Any, count: int, dtype: torch.dtype) -> bool:
    """Whether the microbatches' gradients add up to those of the batch."""
    found = []
    for parts in (1, count):
        trial = model.made(dtype)
        try:
            _backward(model, trial, model.parts(batch, parts) if parts > 1 else [batch])
        except Exception:
            if parts == 1:
                raise
            return False
        found.append(_gradients(dict(trial.named_parameters())))
    largest = max((float(g.norm()) for g in found[0].values()), default=0.0)
    return found[0].keys() == found[1].keys() and _furthest(found[1], found[0], SMALL * largest)[0] < COUPLED


def _normalizes(model: nn.Module) -> bool:
    return any(getattr(module, "running_mean", None) is not None for module in model.modules())


def _gradients(parameters: Mapping[str, nn.Parameter]) -> Tensors:
    return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


def _state(model: nn.Module) -> Tensors:
    return {name: value.clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}


class _timed:
    """Notes CPU seconds under a name; the last ones count."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._note: Callable[[float], None] = partial(seconds.__setitem__, name)

    def __enter__(self) -> None:
        self._start = time.process_time()

    def __exit__(self, *_: object) -> None:
        self._note(round(time.process_time() - self._start, 3))
