"""Boost: a model and its optimizer become one rank's part of a pipeline."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from colossalai.interface import ModelWrapper
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from pipeshard.batch.criterion import Criterion, refuse_criterion, takes_outputs_alone
from pipeshard.batch.samples import find_sample
from pipeshard.checkpoint.lora import refuse_blank_adapters
from pipeshard.distributed.consistency import compare_ranks, model_texts, optimizer_texts
from pipeshard.engine.engine import Pipeline
from pipeshard.engine.model import PipelineModel
from pipeshard.engine.optimizer import PipelineOptimizer, replace_parameters
from pipeshard.engine.separable import check_separable
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.graph.units import containers
from pipeshard.split.ties import share_weights
from pipeshard.verify.decide import prove_at_boost

if TYPE_CHECKING:
    from pipeshard.plugin import PipelinePlugin


logger = logging.getLogger("pipeshard")
# What each does belongs around the pipeline: under it, it would talk to ranks that have other stages.
REFUSED = {
    DistributedDataParallel: "the plugin makes the replicas (dp_size, by default as many as the world has room for)",
    DataParallel: "the plugin makes the replicas (dp_size, by default as many as the world has room for)",
    FullyShardedDataParallel: "PipelinePlugin(fsdp=True) divides parameters among replicas",
    FSDPModule: "PipelinePlugin(fsdp=True) divides parameters among replicas",
    ModelWrapper: "one Booster boosts it, that of the PipelinePlugin",
}


def plain(model: nn.Module, warns: bool = True) -> nn.Module:
    """`model` as it was before it was compiled as a whole by `torch.compile(model)` or `model.compile()`, which is said
    with `warns`. Raises ConfigurationError for a model that is wrapped, or has modules that are, by anything else."""
    compiled = False
    while (inner := model._modules.get("_orig_mod")) is not None:
        model, compiled = inner, True
    if model._compiled_call_impl is not None:
        model._compiled_call_impl, compiled = None, True
    if compiled and warns:
        logger.warning(
            "this %s was compiled as a whole, but runs in parts, which run as they are written. Pass the model as it "
            "is, and compile=True to PipelinePlugin, which compiles each layer",
            type(model).__name__,
        )
    for name, parameter in model.named_parameters():
        if type(parameter).__module__.startswith("colossalai.lazy"):
            raise ConfigurationError(
                f"{name} was made under colossalai's LazyInitContext, of which the stages could not take their parts: "
                "build the model under torch.device('meta') instead, which takes no memory either, and "
                "PipelinePlugin(init_weights=True) draws its weights on the stages (or call "
                "LazyInitContext.materialize(model), which makes all of it in every process)"
            )
    for name, module in model.named_modules():
        for kind, instead in REFUSED.items():
            if isinstance(module, kind):
                raise ConfigurationError(
                    f"{name or 'the model'} is wrapped in {kind.__name__} ({type(module).__name__}): pass the model as "
                    f"it was before that (not prepared by accelerate either), {instead}"
                )
    return model


def refuse_compiled(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Raise ConfigurationError for a compiled module where its call is cut into parts, or is answered for it.

    A unit that `torch.compile(layer)` has put in a layer's place is run whole, and so is what is inside of a unit.
    """
    around = set(containers(model, units))
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward", type(module).forward) if module in around else None
        compiled = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
        compiled |= module in around and "_orig_mod" in module._modules
        compiled |= module._compiled_call_impl is not None and (module in around or name in units)
        if compiled:
            raise ConfigurationError(
                f"{name or 'the model'} ({type(module).__name__}) was compiled by itself: leave that out, and pass "
                'compile=True, or options as compile={"backend": ...}, to PipelinePlugin, which compiles each layer'
            )


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
