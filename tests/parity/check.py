"""Check: one entry, trained for one step with the plugin, and compared with the same model unsplit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.read import read_batch
from pipeshard.engine.mixed_precision import Precision
from pipeshard.errors import ConfigurationError, PipeshardError, VerificationError
from pipeshard.graph.indices import checking_indices
from pipeshard.private import BatchNorm
from pipeshard.verify.reference import copies_of_kept
from tests.parity.build import batch, build
from tests.parity.chains import chain_of
from tests.parity.entries import Entry
from tests.unsplit import Split, gradient_error, largest_error

CLOSE = 1e-6  # of the loss, and of each gradient relative to its own norm
CLOSE_FP64 = 1e-10  # where the same in fp32 is further off: rounding shrinks with the precision, a mistake does not
SINGLE = 1e-2  # of the largest gradient: what that of a single number is measured by in 16 bits
ROUNDINGS = 8  # the most errors in 16 bits, in units of their precision: CLOSE is as many of fp32
SCALE = 2.0**8  # of the loss in fp16
MIXES = "its samples depend on each other in training: boost compares the whole batch"
PRECISIONS: dict[str, dict[str, Any]] = {  # what the plugin is given
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "initial_scale": SCALE},
    "autocast": {"precision": "bf16", "autocast": True},
}


@dataclass(frozen=True)
class Verdict:
    """What came of it: "bitwise", "close", "refused", "untrainable" or "wrong", with the largest error or the reason.

    "close" in fp64 only is said in `reason`. `cuts` are the units at which the stages begin.
    """

    kind: str
    error: float = 0.0
    reason: str = ""
    cuts: tuple[str, ...] = ()


def check(entry: Entry, precision: str = "fp32", device: str = "cpu") -> Verdict:
    """One training step of p microbatches on this rank's stage of p; every rank of the world calls it. Without TF32."""
    torch.backends.cudnn.allow_tf32 = False
    where = torch.device(device)
    try:
        verdict = _compare(entry, where, torch.float32, precision)
    except Untrainable as error:
        return Verdict("untrainable", reason=str(error))
    except Refused as error:
        return Verdict("refused", reason=str(error))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (verdict.kind, verdict.error))
    if not any(kind == "wrong" for kind, _ in found) or any(error == float("inf") for _, error in found):
        return verdict  # what is infinite is no matter of rounding
    if precision != "fp32":
        return _beside_rounding(entry, where, precision, verdict)
    try:
        again = _compare(entry, where, torch.float64)
    except Exception as error:
        reason = f"{verdict.reason} (fp64: {type(error).__name__}: {error})"
        return Verdict("wrong", verdict.error, reason, verdict.cuts)
    if again.kind != "wrong":
        return Verdict("close", again.error, f"in fp64; {verdict.error:.0e} in fp32", verdict.cuts)
    if verdict.error <= (own := min(_rounding(entry, where), 1e-4)):  # parts of the model are fp32 whatever its dtype
        note = f"the unsplit model differs by {own:.0e} from itself in fp64"
        return Verdict("close", verdict.error, note, verdict.cuts)
    return Verdict("wrong", verdict.error, f"{verdict.reason} (fp64: {again.reason})", verdict.cuts)


def _beside_rounding(entry: Entry, device: torch.device, name: str, verdict: Verdict) -> Verdict:
    """In 16 bits sums differ more if they are made in another order, as what two stages have of one weight is added up
    in fp32, and kernels round by how their inputs lie in memory. No more, though, than 16 bits do in the same model."""
    precision = _precision(name, device)
    assert precision.dtype is not None
    most = ROUNDINGS * torch.finfo(precision.dtype).eps
    if verdict.kind == "wrong" and verdict.error <= (own := min(_rounding_16(entry, precision), most)):
        return replace(verdict, kind="close", reason=f"the unsplit model differs by {own:.0e} from itself in fp32")
    return verdict


def _rounding_16(entry: Entry, precision: Precision) -> float:
    """The largest relative difference between gradients of the unsplit model and those in fp32, of the same values,
    whose microbatches count alike."""
    model, data = _made(entry, precision.device, torch.float32)
    low, _, m = _reference(model, data, dist.get_world_size(), precision, averaged=True)
    for tensor in precision.lowered(model):
        tensor.data = tensor.data.to(precision.dtype).float()
    full, *_ = _reference(model, data, m, _precision("fp32", precision.device), averaged=True)
    return _distance(_gradients(low, _scale(precision)), _gradients(full))


def _rounding(entry: Entry, device: torch.device) -> float:
    """The largest relative difference between gradients of the unsplit model in fp32 and in fp64."""
    gradients = []
    for dtype in (torch.float32, torch.float64):
        model, data = _made(entry, device, dtype)
        _loss(model(**data)).backward()
        gradients.append(_gradients(model))
    return _distance(*gradients)


def _gradients(model: nn.Module, scale: float = 1.0) -> dict[str, Tensor]:
    return {name: p.grad.double() / scale for name, p in model.named_parameters() if p.grad is not None}


def _distance(low: dict[str, Tensor], full: dict[str, Tensor]) -> float:
    floor = 1e-3 * max(float(g.norm()) for g in full.values())
    return largest_error((low[name] - g).norm() / max(float(g.norm()), floor) for name, g in full.items())


class Untrainable(Exception):
    """The model does not train unsplit."""


class Refused(Exception):
    """The plugin refuses the model."""


def _compare(
    entry: Entry, device: torch.device, dtype: torch.dtype, name: str = "fp32", averaged: bool = False
) -> Verdict:
    """One step, whose loss is the whole batch's or, where that is not a sum over these, is `averaged` over the
    microbatches."""
    p = dist.get_world_size()
    precision = _precision(name, device)
    try:
        model, data = _made(entry, device, dtype)
        unsplit, reference, m = _reference(model, data, p, precision, averaged)
    except Exception as error:
        raise Untrainable(f"{type(error).__name__}: {error}") from error
    options = {"loss_reduction": "microbatch"} if averaged else {}
    try:
        split = Split(model, p, data, num_microbatches=m, **options, **PRECISIONS[name])
    except PipeshardError as error:  # on every rank alike; in a step it may be on one, and must end the others
        if not averaged and isinstance(error, VerificationError) and "loss_reduction" in str(error):
            return _compare(entry, device, dtype, name, averaged=True)
        raise Refused(f"{type(error).__name__}: {error}") from error
    try:
        loss = split.backward(data)["loss"]
    except ConfigurationError as error:  # on every rank alike, before the step
        if averaged or "loss_reduction" not in str(error):
            raise
        return _compare(entry, device, dtype, name, averaged=True)
    policy = split.model.pipeline.policy
    chain = chain_of(model)
    if chain is not None and (surprise := chain.mismatch(policy.flow)):
        return Verdict("wrong", float("inf"), f"tests/parity/chains expects that {chain}, but {surprise}")
    cuts = tuple(policy.flow.calls[policy.stages.index(stage)].unit for stage in range(1, p))
    expected = reference.loss.to(loss.device)
    close = CLOSE if dtype == torch.float32 else CLOSE_FP64
    loss_error = abs(float(loss - expected)) / max(abs(float(expected)), 1e-3)
    off = gradient_error(split, unsplit, 1e-3 if name == "fp32" else SINGLE)
    error = largest_error([loss_error, off])
    norm, whole = split.optimizer.get_grad_norm(), _norm(unsplit) / _scale(precision)
    norm_error = abs(norm - whole) / max(10 * whole, 1e-30)  # a tenth: it sums up all gradients
    if (worst := largest_error([error, norm_error])) > close:
        reason = f"loss {float(loss):.9g}, unsplit {float(expected):.9g}"
        reason += f"; gradients {off:.1e}; norm {norm:.9g}, unsplit {whole:.9g}"
        return Verdict("wrong", worst, reason, cuts)
    gradients = {name: parameter.grad for name, parameter in unsplit.named_parameters()}
    same = all(_equal(held.grad, gradients[name]) for name, held in split.held.items())
    note = "" if m == p else "in one microbatch: its inputs cannot be cut"
    note = "with loss_reduction='microbatch': its loss is not a sum over samples or labels" if averaged else note
    note = MIXES if mixes(unsplit, data, m) else note
    return Verdict("bitwise" if same and torch.equal(loss, expected) else "close", error, note, cuts)


def _made(entry: Entry, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    model = build(entry).to(dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped matrix product has no fp64
    data = {name: value.to(device) for name, value in batch(entry, model).items()}
    data = {name: value.to(dtype) if value.is_floating_point() else value for name, value in data.items()}
    return model.to(device), data


def _reference(
    model: nn.Module, data: dict[str, Any], m: int, precision: Precision, averaged: bool
) -> tuple[nn.Module, Reference, int]:
    """The unsplit model with its gradients, its loss, and the number of microbatches, 1 where it takes no parts."""
    for count in (m, 1):
        unsplit = copy.deepcopy(model)
        try:
            with checking_indices(precision.device):  # which a part of the samples may have wrong
                return unsplit, Reference.of(unsplit, data, count, precision, averaged), count
        except Exception:
            if count == 1:
                raise
    raise AssertionError


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is None and b is None if a is None or b is None else torch.equal(a, b)


def _norm(model: nn.Module) -> float:
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


@dataclass(frozen=True)
class Reference:
    """The unsplit model's loss, its gradients left in the model: microbatch by microbatch, as a pipeline sums them."""

    loss: Tensor

    @classmethod
    def of(
        cls, model: nn.Module, data: dict[str, Any], m: int, precision: Precision | None = None, averaged: bool = False
    ) -> Reference:
        precision = precision or _precision("fp32", torch.device("cpu"))
        parts = read_batch(model, data).split(m)
        # In fp32, which tells weights apart.
        weights = [1 / len(parts)] * len(parts) if averaged else weights_of(model, data, parts)
        for parameter in precision.lower(precision.lowered(model)):
            parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
        total = summed(model, parts, weights, precision)
        if not torch.isfinite(total):
            raise ValueError(f"the loss is {float(total)}")
        if any(not p.grad.isfinite().all() for p in model.parameters() if p.grad is not None):
            raise ValueError("a gradient is not finite")
        return cls(total)


def summed(model: nn.Module, parts: Sequence[Batch], weights: Sequence[float], precision: Precision) -> Tensor:
    """The loss of all parts, whose gradients are left in the model."""
    total: Tensor | None = None
    for part, weight in zip(parts, weights, strict=True):
        with precision.running():
            loss = _loss(precision.of_batch(part).call(model))
        loss.backward(torch.full_like(loss, weight * _scale(precision)))
        total = loss.detach() * weight if total is None else total + loss.detach() * weight
    assert total is not None
    return total


def _precision(name: str, device: torch.device) -> Precision:
    given = PRECISIONS[name]
    return Precision(given.get("precision", "fp32"), given.get("autocast", False), device)


def _scale(precision: Precision) -> float:
    return SCALE if precision.scales else 1.0


def _loss(output: Any) -> Tensor:
    loss = output["loss"] if isinstance(output, dict) else output.loss
    if loss is None:
        raise ValueError("there is no loss")
    return loss


def weights_of(model: nn.Module, data: dict[str, Any], parts: Sequence[Batch]) -> list[float]:
    """By what the microbatches' losses make the whole one's best: valid labels, shifted or not, or samples.

    By samples too where none does: some losses are a sum over neither (labels laid end to end, then shifted). Tried in
    training mode, and in evaluation mode for batch norm, which mixes samples in training.
    """
    shares = shares_of(parts)
    misses: list[tuple[float, int]] = []
    for evaluate in (False, True):
        misses += missed(model, data, parts, shares, evaluate)
        if min(misses)[0] < CLOSE:
            break
    miss, best = min(misses)
    return shares[best if miss < 100 * CLOSE else -1]


def shares_of(parts: Sequence[Batch]) -> list[list[float]]:
    """The weights of microbatches by their valid labels, if there are any, shifted or not, and by their samples."""
    labels = [part.tensors.get("labels") for part in parts]
    counts = [[float(part.rows) for part in parts]]
    if all(label is not None and label.ndim > 1 and not label.is_floating_point() for label in labels):
        for shift in (0, 1):
            counts.insert(0, [float((label[..., shift:] != -100).sum()) for label in labels if label is not None])
    return [[count / sum(row) for count in row] for row in counts]


def missed(
    model: nn.Module, data: dict[str, Any], parts: Sequence[Batch], shares: Sequence[Sequence[float]], evaluate: bool
) -> list[tuple[float, int]]:
    """How far the microbatches' losses, weighted by each row of `shares`, are from the whole batch's, and its index."""
    trial = copy.deepcopy(model, copies_of_kept(model))  # some models keep what they saw
    if any(parameter.itemsize == 2 for parameter in trial.parameters()):  # the batch is in fp32
        trial.float()
    trial.train(not evaluate and model.training)
    with torch.no_grad():
        whole, losses = float(_loss(trial(**data))), [float(_loss(part.call(trial))) for part in parts]
    return [
        (abs(sum(w * loss for w, loss in zip(weights, losses)) - whole) / abs(whole), k)
        for k, weights in enumerate(shares)
    ]


def mixes(model: nn.Module, data: dict[str, Any], m: int) -> bool:
    """Whether samples depend on each other in training, other than by batch norm: no weights make the whole batch's
    loss of the microbatches' losses, as they do in evaluation mode."""
    if m == 1 or any(isinstance(module, BatchNorm) for module in model.modules()):
        return False
    parts = read_batch(model, data).split(m)
    shares = shares_of(parts)
    is_off = min(missed(model, data, parts, shares, evaluate=False))[0] > 100 * CLOSE
    return is_off and min(missed(model, data, parts, shares, evaluate=True))[0] < 100 * CLOSE
