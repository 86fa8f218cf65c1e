"""Wrappers: what others have put around a model or its layers, taken off or refused before it is boosted."""

import logging
from collections.abc import Iterable, Mapping

from colossalai.interface import ModelWrapper
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.graph.units import containers, recomputes

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


def refuse_recomputed(model: nn.Module, around: Iterable[nn.Module]) -> None:
    """Raise UsageError for a module around units that recomputes its forward, as it may since the model was cut."""
    whole = next(filter(recomputes, around), None)
    if whole is not None:
        name = next(name for name, module in model.named_modules() if module is whole)
        raise UsageError(
            f"{name} ({type(whole).__name__}) recomputes its forward, which was cut into units when the model was "
            "boosted: call model.gradient_checkpointing_enable() before booster.boost"
        )
