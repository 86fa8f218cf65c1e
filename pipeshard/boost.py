"""Boost: turns a model and its optimizer into one rank's part of a pipeline."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, takes_outputs_alone
from pipeshard.config import AUTO, PipelineConfig
from pipeshard.data.first_samples import find_sample
from pipeshard.distributed.agreement import compare_ranks, optimizer_texts, take_first_weights
from pipeshard.distributed.collectives import gather_objects
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.coupling import end_of_deleted
from pipeshard.engine.data_guard import DATA_GUARD
from pipeshard.engine.engine import Pipeline
from pipeshard.engine.groups import replace_parameters
from pipeshard.engine.model import PipelineModel
from pipeshard.engine.norm_guard import NORM_GUARD
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.engine.optimizer_trial import check_separable
from pipeshard.engine.refusals import (
    refuse_blank_adapters,
    refuse_criterion,
    refuse_lowered_begin,
    refuse_released,
    refuse_sharded_packing,
    uncompiled,
)
from pipeshard.engine.step_guard import STEP_GUARD
from pipeshard.errors import UsageError
from pipeshard.generate.generate import Generation
from pipeshard.graph.dataflow import Dataflow
from pipeshard.planner.devices import Devices
from pipeshard.planner.memory import Training
from pipeshard.planner.planner import automatic, study
from pipeshard.planner.profile import measured_costs
from pipeshard.slices.refusals import refuse_cacheless, refuse_unsliceable
from pipeshard.split.blank import refuse_changed_blank, refuse_unloaded_blank
from pipeshard.split.partition import Cost
from pipeshard.split.policy import Policy
from pipeshard.split.ties import share_weights, tie_on_meta
from pipeshard.verify.decide import prove_at_boost

logger = logging.getLogger("pipeshard")
LARGE, UNEVEN = 2**26, 0.8  # thresholds of _warn_of_uneven: the model's bytes, and the largest stage's share


def boost_model(
    config: PipelineConfig,
    grid: Grid,
    model: nn.Module,
    optimizer: Optimizer | None,
    criterion: Criterion | None,
    dataloader: Any,
    kind: type[PipelineModel] = PipelineModel,
    num_batches: int = 1,
) -> tuple[PipelineModel, Criterion | None]:
    """Split a model into stages. Returns this rank's PipelineModel and the criterion. An already boosted model is
    returned unchanged. With schedule="auto", the search assumes that each step runs `num_batches` batches."""
    fresh = None if isinstance(optimizer, PipelineOptimizer) else optimizer
    if isinstance(model, PipelineModel):
        if fresh is not None:
            _follow_ties(fresh, model.pipeline)
            check_separable(fresh, model.pipeline.model, config, grid, model.pipeline.gradients.updates.clip)
        return model, criterion
    end_of_deleted()
    config.refuse_uncut()
    model = uncompiled(model, warns=grid.first)
    refuse_released(model)
    refuse_criterion(criterion, model)
    # Boost does not call a criterion that takes only outputs: the script calls it, as with ColossalAI, or passes it to
    # execute_pipeline.
    called = None if criterion is not None and takes_outputs_alone(criterion) else criterion
    refuse_blank_adapters(model)
    if config.init_weights is True:
        refuse_unloaded_blank(model)
    refuse_changed_blank(model)
    refuse_lowered_begin(model, config)
    refuse_sharded_packing(model, config.fsdp, config.slices_of_stage)
    tied: dict[nn.Parameter, str] = {}  # for each replaced parameter, the name of its replacement
    for became in (tie_on_meta(model), share_weights(model, config.shared_weights, warns=grid.first)):
        if optimizer is not None:
            replace_parameters(optimizer, became)
        names = {parameter: name for name, parameter in model.named_parameters()}
        tied |= {old: names[new] for old, new in became.items()}
    texts = _texts(model) | ({} if optimizer is None else optimizer_texts(optimizer))
    compare_ranks(texts, grid.world, grid.named)
    take_first_weights(model, grid.world, grid.named)
    size = config.num_microbatches or config.microbatch_size or 1
    given, searches = (config.dry_run_input, dataloader, config.batch_dims or {}), config.schedule == AUTO
    sample = find_sample(model, *given, size, grid.device, for_search=searches and config.pp_size > 1)
    if fresh is not None:
        check_separable(fresh, model, config, grid)  # before the proof, which would only report a difference
    if config.has_slices:
        refuse_unsliceable(model)
        refuse_cacheless(model, trains=optimizer is not None)
    asked = config
    if searches:
        config = _searched(config, grid, model, called, sample, num_batches)
    padding = prove_at_boost(config, grid, model, optimizer, called, sample)
    if optimizer is not None and grid.first and not config.lowers:
        _warn_of_16_bits(model)

    def costs(partition: str, flow: Dataflow, batch: Batch) -> Sequence[float]:
        return measured_costs(partition, model, flow, batch, config.cut, grid.device, grid.world, called)

    boosted = kind(model, Pipeline(config, grid, model, sample, called, costs, asked))
    boosted.pipeline.padding = padding
    boosted.pipeline.tied.update(tied)
    boosted.generation = Generation(boosted.pipeline)
    if grid.first and grid.pp_size > 1:
        _warn_of_uneven(boosted.pipeline.policy)
    if grid.first and boosted.pipeline.policy.flow.counts_results:
        logger.warning(
            "the criterion returns two values, and the second depends on the model's output: pipeshard treats the "
            "second as a count and divides the first by this count. If the second is a metric (such as an accuracy), "
            "return only the loss, and compute the metric with execute_pipeline(..., return_outputs=fn)"
        )
    STEP_GUARD.watch(boosted.pipeline.gradients)
    NORM_GUARD.watch(boosted.pipeline.gradients)
    DATA_GUARD.watch(boosted.pipeline.gradients)
    grid.mesh.warm_up(grid.device)
    if called is None and criterion is not None:
        boosted.pipeline.criterion = criterion
    return boosted, boosted.pipeline.criterion


def _follow_ties(optimizer: Optimizer, pipeline: Pipeline) -> None:
    """In an optimizer that was created before boost, replace each parameter that boost has tied to another parameter
    with that other parameter."""
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = pipeline.gradients.names
    kept = {names[parameter]: parameter for parameter in given if parameter in names}
    became = {old: kept[pipeline.tied[old]] for old in given if old in pipeline.tied and pipeline.tied[old] in kept}
    replace_parameters(optimizer, became)


def _searched(
    config: PipelineConfig, grid: Grid, model: nn.Module, criterion: Criterion | None, sample: Batch, num_batches: int
) -> PipelineConfig:
    """Search for a schedule and cuts for this model, and return the config with the result, which is the same on every
    rank."""
    p, of_batch = config.pp_size, config.num_microbatches or max(1, sample.rows // (config.microbatch_size or 1))
    devices = Devices.parse(p, config.memory_limit, limit="memory_limit")
    precision = config.precision if config.lowers else "fp32"
    training = Training(
        "adamw", precision, grid.dp_size, config.zero_stage, config.fsdp, config.tp_size, config.ep_size, config.offload
    )
    partition, recompute, criterion = config.settled(model, criterion)
    microbatch = sample.split(*config.cut)[0]
    plans = None, config.tp_plan, config.ep_plan
    subject = study(model, microbatch, criterion, config.policy, partition, training, *plans)
    known = [tuple(cost) for cost in subject.costs], subject.before_policy
    costs, before = gather_objects(known, grid.world)[0]  # rank 0's: measured costs differ between ranks
    again = None if any(recompute.ratios) or recompute.interval else subject.again
    subject = replace(subject, costs=[Cost(*cost) for cost in costs], before_policy=before, again=again)
    candidate, schedule, _ = automatic(subject.on(devices), p, of_batch * num_batches)
    return replace(
        config,
        schedule=schedule,
        num_model_chunks=candidate.num_model_chunks,
        partition=candidate.cuts,
        memory_limit=None,
    )


def _texts(model: nn.Module) -> dict[str, list[str]]:
    """The lines that ranks compare, by title: the class of the model, and the shape, dtype and requires_grad of each
    parameter."""
    named = list(model.named_parameters())
    return {
        "the model's class": [type(model).__qualname__],
        "the model": [f"{name} of shape {tuple(p.shape)} and {p.dtype}" for name, p in named],
        "the set of trained parameters": [f"{name}.requires_grad={p.requires_grad}" for name, p in named],
    }


def _warn_of_16_bits(model: nn.Module) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    short = [p for p in trained if p.dtype in (torch.float16, torch.bfloat16)]
    if short:
        dtypes = {p.dtype for p in short}
        logger.warning(
            "trained parameters of dtype %s (%d of %d) have no fp32 master weights: an update smaller than about 1/%d "
            "of a parameter's value rounds to zero. To keep fp32 master weights, pass "
            "PipelinePlugin(precision='bf16') without autocast=True. Alternatively, load the model in fp32 "
            "(from_pretrained(..., dtype=torch.float32))",
            " or ".join(sorted(map(str, dtypes))),
            len(short),
            len(trained),
            round(2 / max(torch.finfo(dtype).eps for dtype in dtypes)),
        )


def _warn_of_uneven(policy: Policy) -> None:
    """Warn if one stage holds so much of the model that the split saves little memory."""
    sizes = {name: p.numel() * p.element_size() for name, p in policy.model.named_parameters()}
    total = sum(sizes.values())
    held = [sum(sizes[name] for name in names) for names in policy.ownership.held]
    if total < LARGE or max(held) <= UNEVEN * total:
        return
    several = policy.ownership.shared()
    if sum(sizes[name] for name in several) > total / 2:
        remedy = (
            f"Several stages use, and therefore hold, the same {len(several)} parameters (the first is "
            f"{next(iter(several))}). Use fewer stages and more data-parallel replicas (dp_size): this takes less "
            "time, and hardly more memory"
        )
    elif policy.flow.cut_points:
        remedy = "The model can be split only at its CutPoints: add some inside its largest part, or use fewer stages"
    else:
        remedy = (
            "Use fewer stages, or mark cuts inside the largest unit with pipeshard.CutPoint (in a PipelineModule, "
            "divide the largest layer into several)"
        )
        if policy.partition_by != "parameters":
            remedy += ", or pass PipelinePlugin(partition='parameters')"
    logger.warning(
        "stage %d holds %.0f %% of the parameters of %s, so a split into %d stages saves hardly any memory. %s",
        held.index(max(held)),
        100 * max(held) / total,
        type(policy.model).__name__,
        policy.num_stages,
        remedy,
    )


def boost_optimizer(
    model: PipelineModel, optimizer: Any, kind: type[PipelineOptimizer] = PipelineOptimizer
) -> PipelineOptimizer | None:
    """Restrict an optimizer to the parameters that this rank holds. If the optimizer is already boosted, only check
    that booster.boost returned it for this model."""
    pipeline = model.pipeline
    if optimizer is None:
        return None
    if isinstance(optimizer, PipelineOptimizer):
        check_optimizer(optimizer, pipeline)
        return optimizer
    boosted = kind(
        optimizer,
        pipeline.gradients,
        zero=pipeline.config.zero_stage == 1,
        finite=pipeline.stages.finite(pipeline.rank, pipeline.holdings.held),
        backward=None if model.whole is None else model.whole.backward,
    )
    if pipeline.grid.size > 1:
        boosted.gather_groups()
    return boosted


def check_optimizer(optimizer: Any, pipeline: Pipeline) -> None:
    """Raise UsageError unless booster.boost returned this optimizer for this model."""
    if not isinstance(optimizer, PipelineOptimizer):
        raise UsageError(
            f"this {type(optimizer).__name__} is not an optimizer that booster.boost returned, so it cannot clip, "
            "unscale or synchronize gradients across stages: pass the optimizer that booster.boost returned. For an "
            "optimizer created after boost, call boost again with the boosted model and this optimizer"
        )
    if optimizer.gradients is not pipeline.gradients:
        raise UsageError(
            f"this {type(optimizer.optim).__name__} was boosted with another model and trains that model's parameters: "
            "give each model its own optimizer"
        )
