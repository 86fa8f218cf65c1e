"""Boost: a model and its optimizer become one rank's part of a pipeline."""

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from pipeshard.boosted import PipelineModel
from pipeshard.checkpoint.lora import refuse_blank_adapters
from pipeshard.errors import UsageError
from pipeshard.model.criterion import Criterion, refuse_criterion, takes_outputs_alone
from pipeshard.model.ties import share_weights
from pipeshard.pipeline import Pipeline
from pipeshard.runtime.compare import compare_ranks, model_texts, optimizer_texts
from pipeshard.runtime.optimizer import PipelineOptimizer, replace_parameters
from pipeshard.runtime.separable import check_separable
from pipeshard.sample import find_sample
from pipeshard.verify.decide import prove_at_boost
from pipeshard.wrappers import plain

if TYPE_CHECKING:
    from pipeshard.plugin import PipelinePlugin

logger = logging.getLogger("pipeshard")


def boost_model(
    plugin: "PipelinePlugin",
    model: nn.Module,
    optimizer: Optimizer | None,
    criterion: Criterion | None,
    dataloader: Any,
) -> tuple[PipelineModel, Criterion | None]:
    """This rank's stages of a whole model, and what gives its loss. A model that is boosted already stays as it is."""
    fresh = None if isinstance(optimizer, PipelineOptimizer) else optimizer
    if isinstance(model, PipelineModel):
        if fresh is not None:
            check_separable(fresh, model.pipeline.model, plugin)
        return model, criterion
    model = plain(model, warns=plugin.grid.first)
    refuse_criterion(criterion, model)
    # One of the outputs alone is for the script to call, as ColossalAI's scripts do, or for execute_pipeline.
    called = None if criterion is not None and takes_outputs_alone(criterion) else criterion
    refuse_blank_adapters(model)
    became = share_weights(model, plugin.shared_weights, warns=plugin.grid.first)
    if optimizer is not None:
        replace_parameters(optimizer, became)
    texts = model_texts(model) | ({} if optimizer is None else optimizer_texts(optimizer))
    compare_ranks(texts, plugin.grid.world, plugin.grid.named)
    size = plugin.num_microbatches or plugin.microbatch_size or 1
    sample = find_sample(model, plugin.dry_run_input, dataloader, plugin.batch_dims, size, plugin.device)
    if fresh is not None:
        check_separable(fresh, model, plugin)  # before the proof, which would find no more than that it differs
    prove_at_boost(plugin, model, optimizer, called, sample)
    if optimizer is not None and plugin.grid.first:
        _warn_of_16_bits(plugin, model)
    boosted = PipelineModel(model, Pipeline(plugin, model, sample, called))
    if called is None and criterion is not None:
        boosted.pipeline.criterion = criterion
    return boosted, boosted.pipeline.criterion


def _warn_of_16_bits(plugin: "PipelinePlugin", model: nn.Module) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    short = [p for p in trained if p.dtype in (torch.float16, torch.bfloat16)]
    if short and not plugin.arithmetic.lowers:
        logger.warning(
            "%d of the %d trained parameters are %s, without fp32 values beside them: updates smaller than 1/%d of a "
            "value round to nothing. Pass PipelinePlugin(precision='bf16'), which keeps fp32 values, or load the model "
            "in fp32 (from_pretrained(..., dtype=torch.float32))",
            len(short),
            len(trained),
            short[0].dtype,
            round(2 / torch.finfo(short[0].dtype).eps),
        )


def boost_optimizer(plugin: "PipelinePlugin", model: PipelineModel, optimizer: Any) -> PipelineOptimizer | None:
    """An optimizer of what this rank holds."""
    pipeline = model.pipeline
    if optimizer is None:
        return None
    if isinstance(optimizer, PipelineOptimizer):
        check_optimizer(optimizer, pipeline)
        return optimizer
    finite = pipeline.finite(plugin.grid.stage, pipeline.holdings.held)
    backward = None if model.whole is None else model.whole.backward
    return PipelineOptimizer(optimizer, pipeline.gradients, plugin.zero_stage == 1, finite, backward)


def check_optimizer(optimizer: Any, pipeline: Pipeline) -> None:
    """Raise UsageError for an optimizer that is not one of this boosted model."""
    if not isinstance(optimizer, PipelineOptimizer):
        raise UsageError(
            f"this {type(optimizer).__name__} was not boosted, so it knows nothing of what other stages hold, of "
            "max_norm or of the precision: pass the optimizer that booster.boost(model, optimizer) returned (an "
            "optimizer may be made after the model was boosted, and be boosted with it then)"
        )
    if optimizer.gradients is not pipeline.gradients:
        raise UsageError(
            f"this {type(optimizer.optim).__name__} was boosted with another model, whose parameters it trains: give "
            "every model an optimizer of its own"
        )
