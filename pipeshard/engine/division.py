"""Division: traces a model on a sample batch, and plans the split of the model across the ranks."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion
from pipeshard.config import PipelineConfig
from pipeshard.distributed.agreement import compare_ranks
from pipeshard.distributed.mesh import Grid
from pipeshard.errors import TraceError
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.kinds import device_of_glue
from pipeshard.graph.lone import Lone
from pipeshard.graph.snapshot import Snapshot
from pipeshard.graph.trace import trace
from pipeshard.split.materialize import is_released
from pipeshard.split.partition import Cuts
from pipeshard.split.policy import Policy, find_policy
from pipeshard.split.ties import used_parameters


def traced(
    config: PipelineConfig,
    model: nn.Module,
    sample: Batch,
    criterion: Criterion | None,
    cuts: Sequence[str],
    device: torch.device,
) -> tuple[Batch, Dataflow]:
    """Trace the full model on `sample` or, if that fails, on its first microbatch. If both fail, try again with the
    criterion's tensors on glue's device (`beside_glue`). Returns the traced batch and the Dataflow."""
    of_trace = partial(trace, model, criterion=criterion, cuts=cuts, device=device)
    with Lone.of(config.pp_size):
        try:
            return _traced(config, model, sample, of_trace)
        except TraceError:
            with beside_glue(criterion, model, device, device_of_glue(model, sample)) as moved:
                if not moved:
                    raise
                return _traced(config, model, sample, of_trace)


def _traced(
    config: PipelineConfig, model: nn.Module, sample: Batch, of_trace: Callable[..., Dataflow]
) -> tuple[Batch, Dataflow]:
    try:
        return sample, _of_all_samples(model, sample, of_trace)
    except TraceError as error:  # the model may accept only as many samples as a microbatch has
        sample = sample.split(*config.cut)[0]
        with suppress(TraceError):
            return sample, _of_all_samples(model, sample, of_trace)
        raise error from None


def _of_all_samples(model: nn.Module, sample: Batch, of_trace: Callable[..., Dataflow]) -> Dataflow:
    """The Dataflow of a sample batch, traced on a few shortened samples. If the full batch uses more parameters (such
    as adapters chosen by each sample's language, or layers that only long samples use), returns the Dataflow of the
    full batch."""
    flow = of_trace(sample)
    used = used_parameters(model, flow)
    if used < {*model.parameters()} and (flow.watched or flow.deltas(sample) is None):
        with suppress(TraceError):
            whole = of_trace(sample, exact=True)
            return whole if used < used_parameters(model, whole) else flow
    return flow


@contextmanager
def beside_glue(
    criterion: Criterion | None, model: nn.Module, device: torch.device, of_glue: torch.device
) -> Iterator[bool]:
    """Context manager that temporarily moves the criterion's tensors (such as class weights) from this rank's `device`
    to the device `of_glue`. Yields whether it has moved any tensor.

    A step calls the criterion on `device`, but boost traces the model before it moves the model to this device. Use
    this context only after a trace has failed: a criterion that moves the model's output to the device of its own
    tensors does not need this context, and a criterion's tensors may include a large teacher model.
    """
    held = Snapshot({"the criterion": criterion}, without=(model,)).tensors if device != of_glue else ()
    moved = {tensor: tensor.data for *_, tensor, _ in held if tensor.device == device and not is_released(tensor)}
    for tensor, data in moved.items():
        tensor.data = data.to(of_glue)
    try:
        yield bool(moved)
    finally:
        for tensor, data in moved.items():
            tensor.data = data


def divided(
    config: PipelineConfig,
    grid: Grid,
    model: nn.Module,
    flow: Dataflow,
    sample: Batch,
    by: Cuts,
    costs: Sequence[float] | None,
) -> Policy:
    """Plan the split of the model, and return this rank's Policy. Raises ConfigurationError if the partition differs
    between ranks. Call it on all ranks."""
    size = config.microbatch_size or max(1, sample.rows // (config.num_microbatches or 1))
    policy = (config.policy or find_policy(model))(
        model,
        flow,
        grid.stage,
        grid.pp_size,
        partition=by,
        scale=_scale(flow, sample, size),
        device=grid.device,
        placement=config.placement,
        costs=costs,
    )
    cuts = [f"{call.unit} in stage {stage}" for call, stage in zip(flow.calls, policy.stages, strict=True)]
    compare_ranks({"the partition of the model (which depends on dry_run_input)": cuts}, grid.world, grid.named)
    return policy


def _scale(flow: Dataflow, sample: Batch, size: int) -> float:
    """The number of elements in a microbatch with `size` samples, divided by the number of elements in the traced
    batch."""
    if not flow.axes.tensors:  # the batch has only lists with one entry per sample
        traced_rows, *_ = *flow.axes.sizes, sample.rows
        return size / traced_rows
    first = next(iter(sample.tensors.values()))
    return first.numel() / sample.rows * size / math.prod(flow.axes.tensors[0][1])
