"""Boost: a model and its optimizer become one rank's part of a pipeline."""

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from pipeshard.boosted import PipelineModel
from pipeshard.checkpoint.lora import refuse_blank_adapters
from pipeshard.errors import UsageError
from pipeshard.model.criterion import Criterion
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


def boost_model(
    plugin: "PipelinePlugin",
    model: nn.Module,
    optimizer: Optimizer | None,
    criterion: Criterion | None,
    dataloader: Any,
) -> tuple[PipelineModel, Criterion | None]:
    """This rank's stages of a whole model, and what gives its loss. A model that is boosted already stays as it is."""
    if isinstance(model, PipelineModel):
        return model, criterion
    model = plain(model, warns=plugin.grid.first)
    refuse_blank_adapters(model)
    became = share_weights(model, plugin.shared_weights, warns=plugin.grid.first)
    if optimizer is not None:
        replace_parameters(optimizer, became)
    texts = model_texts(model) | ({} if optimizer is None else optimizer_texts(optimizer))
    compare_ranks(texts, plugin.grid.world, plugin.grid.named)
    size = plugin.num_microbatches or plugin.microbatch_size or 1
    sample = find_sample(model, plugin.dry_run_input, dataloader, plugin.batch_dims, size, plugin.device)
    if optimizer is not None and not isinstance(optimizer, PipelineOptimizer):
        check_separable(optimizer, model, plugin)  # before the proof, which would find no more than that it differs
    prove_at_boost(plugin, model, optimizer, criterion, sample)
    boosted = PipelineModel(model, Pipeline(plugin, model, sample, criterion))
    return boosted, boosted.pipeline.criterion


def boost_optimizer(plugin: "PipelinePlugin", pipeline: Pipeline, optimizer: Any) -> PipelineOptimizer | None:
    """An optimizer of what this rank holds."""
    if optimizer is None:
        return None
    if isinstance(optimizer, PipelineOptimizer):
        check_optimizer(optimizer, pipeline)
        return optimizer
    check_separable(optimizer, pipeline.model, plugin)
    finite = pipeline.finite(plugin.grid.stage, pipeline.holdings.held)
    return PipelineOptimizer(optimizer, pipeline.gradients, plugin.zero_stage == 1, finite)


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
