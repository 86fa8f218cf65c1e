"""Costs: how long each unit call takes, estimated from what a Meter counted."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion
from pipeshard.engine.weight_grad import kind_of
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.meter import Meter, Work
from pipeshard.graph.preserve import untouched
from pipeshard.graph.shapes import Axes, is_trainable
from pipeshard.graph.tracer import Tracer
from pipeshard.graph.units import paths_of
from pipeshard.hf import recomputes
from pipeshard.split.partition import Cost, cost_of


def metered(
    model: nn.Module,
    microbatch: Batch,
    criterion: Criterion | None = None,
    meter: Meter | None = None,
    recompute: bool = True,
    cuts: Sequence[str] = (),
) -> tuple[Dataflow, Meter]:
    """A trace at the sizes of `microbatch`, for these alone, and what it costs; nothing is computed, only shapes.

    Of a model in evaluation mode it is that of training all the same. Without `recompute`, units that are recomputed
    are taken as if they were not. Modules named in `cuts` are units.
    """
    meter = meter or Meter()
    with untouched(model, criterion):
        if not model.training:
            model.train()
        for module in model.modules() if not recompute else ():
            if recomputes(module):
                module.gradient_checkpointing = False  # type: ignore[assignment]
        flow = Tracer(model, criterion, microbatch, meter, paths_of(model, cuts)).run(microbatch)
    axes = Axes.of(microbatch)
    return replace(flow, axes=axes.pin(set(range(len(axes.sizes))))), meter


def estimated(model: nn.Module, microbatch: Batch, criterion: Criterion | None = None) -> list[Cost]:
    """The relative time of each unit call of one microbatch."""
    flow, meter = metered(model, microbatch, criterion)
    return [unit_cost(model.get_submodule(call.unit), work) for call, work in zip(flow.calls, meter.works, strict=True)]


def unit_cost(unit: nn.Module, work: Work) -> Cost:
    """The relative time of a call of `unit` that is this much work."""
    layers = {path: layer for path, layer in unit.named_modules() if kind_of(layer) is not None}
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
        recomputed=recomputes(unit),
    )


def of_stages(costs: Sequence[Cost], counts: Sequence[int]) -> list[Cost]:
    """The sum of the calls' costs on each stage."""
    calls, nothing = iter(costs), Cost(0.0, 0.0, 0.0)
    return [Cost(*map(sum, zip(nothing, *(next(calls) for _ in range(count))))) for count in counts]
