"""Tail: the time of what comes after a model's last unit: its loss, as the model's own code or a criterion makes it."""

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, loss_of
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.shapes import TensorSpec
from pipeshard.graph.taint import Taint
from pipeshard.graph.unit_outputs import answer
from pipeshard.graph.units import handled
from pipeshard.split.partition import Cost

NOTHING = Cost(0.0, 0.0, 0.0)


def tail_time(
    model: nn.Module, flow: Dataflow, microbatch: Batch, criterion: Criterion | None, device: torch.device, repeats: int
) -> Cost:
    """Median seconds of forward and backward after the last unit call of `flow`, which is of this microbatch. Units
    are answered by random numbers. Nothing where the model does not run on these."""
    runs = []
    with contextlib.suppress(Exception):  # whatever a model raises on such values, or one on meta without any
        for _ in range(1 + repeats):
            runs.append(_run(model, flow, microbatch.to(device), criterion, device))
    medians = [statistics.median(part) for part in zip(*runs[1:], strict=True)]
    return Cost(medians[0], medians[1], 0.0) if medians else NOTHING


def _run(
    model: nn.Module, flow: Dataflow, batch: Batch, criterion: Criterion | None, device: torch.device
) -> tuple[float, float]:
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

    with handled(units, reply), torch.enable_grad(), Taint(device):  # which runs glue that reads weights on meta
        loss = loss_of(batch.call(model), criterion, batch)
    middle = _now(device)
    if loss is not None and loss.requires_grad:
        torch.autograd.grad(loss, made, allow_unused=True)
    return middle - start, _now(device) - middle


def _made_up(spec: TensorSpec, device: torch.device, made: list[Tensor]) -> Tensor:
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    tensor = torch.randn(spec.shape, dtype=spec.dtype, device=device).requires_grad_(spec.requires_grad)
    made += [tensor] if spec.requires_grad else []
    return tensor.view_as(tensor)  # which may be written to


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
