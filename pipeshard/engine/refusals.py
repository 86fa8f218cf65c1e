"""Refusals: models, criteria and batches that could not be trained exactly in parts."""

import logging
import sys
from collections.abc import Iterable, Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.jit import ScriptModule
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, takes_outputs_alone
from pipeshard.config import PipelineConfig
from pipeshard.distributed.agreement import texts_of
from pipeshard.errors import BatchError, ConfigurationError, UsageError
from pipeshard.ghost import Ghost
from pipeshard.graph.units import containers
from pipeshard.hf import is_of_peft, recomputes
from pipeshard.split.adapters import BEGINNING, base_names
from pipeshard.split.packed import is_quantized

logger = logging.getLogger("pipeshard")
# What each does belongs around the pipeline: under it, it would talk to ranks that have other stages.
REFUSED: dict[type, str] = {
    DistributedDataParallel: "the plugin creates the replicas (dp_size, by default as many as the ranks allow)",
    DataParallel: "the plugin creates the replicas (dp_size, by default as many as the ranks allow)",
    FullyShardedDataParallel: "PipelinePlugin(fsdp=True) shards parameters across replicas",
    FSDPModule: "PipelinePlugin(fsdp=True) shards parameters across replicas",
    ScriptModule: "since no stage can release parameters of TorchScript; compile=True compiles each layer",
}


def plain(model: nn.Module, warns: bool = True) -> nn.Module:
    """`model` before it was compiled as a whole by `torch.compile(model)` or `model.compile()`; `warns` logs this.
    Raises ConfigurationError for a model that is wrapped, or has wrapped modules, in any other way."""
    compiled = False
    while "_orig_mod" in model._modules and isinstance(inner := model._orig_mod, nn.Module):
        model, compiled = inner, True
    if model._compiled_call_impl is not None:
        model._compiled_call_impl, compiled = None, True
    if compiled and warns:
        logger.warning(
            "this %s was compiled as a whole, but pipeshard runs it in parts, uncompiled. Pass the uncompiled model, "
            "and pass compile=True to PipelinePlugin, which compiles each layer",
            type(model).__name__,
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigurationError(
                f"{name} has no shape before the first forward (a torch Lazy module): run the model on a batch "
                "once, model(**batch) under torch.no_grad(), before you create its optimizer and call boost"
            )
        if type(parameter).__module__.startswith("colossalai.lazy"):
            raise ConfigurationError(
                f"{name} was created under colossalai's LazyInitContext, which cannot be split into "
                "stages: build the model under torch.device('meta') instead, which takes no memory either, and let "
                "PipelinePlugin(init_weights=True) initialize its weights on the stages (or call "
                "LazyInitContext.materialize(model), which allocates the whole model in every process)"
            )
    refused = dict(REFUSED)
    if (wrapper := getattr(sys.modules.get("colossalai.interface"), "ModelWrapper", None)) is not None:
        refused[wrapper] = "only the Booster of the PipelinePlugin may boost it"
    for name, module in model.named_modules():
        if type(module).__module__.startswith("bitsandbytes."):
            raise ConfigurationError(
                f"{name} is a bitsandbytes {type(module).__name__}, which replaces its weight while it runs. Create "
                "the model with PipelinePlugin.from_pretrained(cls, folder, "
                "quantization_config=BitsAndBytesConfig(load_in_4bit=True)): each stage then packs its own weights"
            )
        for kind, instead in refused.items():
            if isinstance(module, kind):
                raise ConfigurationError(
                    f"{name or 'the model'} is wrapped in {kind.__name__} ({type(module).__name__}): pass the "
                    f"model without this wrapper (and not prepared by accelerate either); {instead}"
                )
    return model


def refuse_other_config(config: PipelineConfig, other: PipelineConfig) -> None:
    """Raise ConfigurationError if a boosted model is boosted again by a plugin with other arguments, which would have
    no effect."""
    texts, others = texts_of(config.of_all_ranks), texts_of(other.of_all_ranks)
    name = next((name for name in texts if texts[name] != others[name]), None)
    if name is not None:
        raise ConfigurationError(
            f"this model was boosted with {name}={getattr(config, name)!r}, but the plugin of this call has "
            f"{name}={getattr(other, name)!r}: use the plugin that boosted the model, or boost "
            "pipeshard.to_sequential(model), the full model"
        )


def refuse_released(model: nn.Module) -> None:
    """Raise UsageError for the model inside a boosted model: this rank has released its other stages."""
    name = next((name for name, parameter in model.named_parameters() if isinstance(parameter, Ghost)), None)
    if name is not None:
        raise UsageError(
            f"this model was already boosted, and this rank has released {name}, which another stage holds: pass the "
            "model that boost returned or the result of pipeshard.to_sequential(model), or create the model again"
        )


def refuse_blank_adapters(model: nn.Module) -> None:
    """Refuse adapters on meta: peft has initialized them, and the values are lost."""
    if not is_of_peft(model, "PeftModel"):
        return
    known = base_names(model)
    blank = [name for name, p in model.named_parameters() if p.is_meta and name not in known]
    if blank:
        raise ConfigurationError(
            f"{len(blank)} adapter parameters are on meta (the first is {blank[0]}), so the values that peft assigned "
            "to them are lost. Add adapters to a meta model with booster.enable_lora(model, lora_config=...), which "
            "keeps them on the CPU, or load the model with its weights, without low_cpu_mem_usage"
        )


def refuse_sharded_packing(model: nn.Module, fsdp: bool, slices: int) -> None:
    """Refuse to shard packed weights."""
    if (fsdp or slices > 1) and is_quantized(model):
        raise ConfigurationError(
            "fsdp=True, tp_size and ep_size shard weights, but the weights of this model are quantized and cannot be "
            "sharded. Use more stages (pp_size) or replicas without these arguments"
        )


def refuse_lowered_begin(model: nn.Module, config: PipelineConfig) -> None:
    """Refuse adapters that are computed from loaded weights if these weights are sharded or cast before they are
    loaded."""
    if getattr(model, BEGINNING, None) and (config.lowers or config.fsdp or config.slices_of_stage > 1):
        raise ConfigurationError(
            "DoRA, PiSSA and OLoRA are initialized from the loaded weights, but with precision, fsdp, tp_size or "
            "ep_size the weights are cast or sharded before they are loaded. Load the model with its weights "
            "before booster.enable_lora, or omit these arguments"
        )


def refuse_criterion(criterion: Criterion | None, model: nn.Module) -> None:
    """Raise ConfigurationError for a criterion that cannot be called, or that has trainable parameters that are not
    the model's."""
    if criterion is not None and not callable(criterion):
        raise ConfigurationError(f"the criterion is a {type(criterion).__name__}: pass criterion(outputs, inputs)")
    if criterion is not None and not hasattr(criterion, "of_batch"):
        takes_outputs_alone(criterion)
    if not isinstance(criterion, nn.Module):
        return
    known = set(model.parameters())
    foreign = [name for name, p in criterion.named_parameters() if p.requires_grad and p not in known]
    if foreign:
        raise ConfigurationError(
            f"the criterion ({type(criterion).__name__}) has parameters of its own (the first is {foreign[0]}), "
            "which no stage would train: make it a submodule of the model, which then computes the loss in its "
            "forward, or freeze them"
        )


def refuse_compiled(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Raise ConfigurationError for a compiled module whose call is cut into parts, or replayed.

    A unit that `torch.compile(layer)` has put in a layer's place is run whole, as is everything inside a unit.
    """
    around = set(containers(model, units))
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward", type(module).forward) if module in around else None
        compiled = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
        compiled |= module in around and "_orig_mod" in module._modules
        compiled |= module._compiled_call_impl is not None and (module in around or name in units)
        if compiled:
            raise ConfigurationError(
                f"{name or 'the model'} ({type(module).__name__}) was compiled separately: remove that, and pass "
                'compile=True, or options as compile={"backend": ...}, to PipelinePlugin, which compiles each layer'
            )


def refuse_recomputed(model: nn.Module, around: Iterable[nn.Module]) -> None:
    """Raise UsageError for a module around units that recomputes its forward, which may be enabled after the cut."""
    whole = next(filter(recomputes, around), None)
    if whole is not None:
        name = next(name for name, module in model.named_modules() if module is whole)
        raise UsageError(
            f"{name} ({type(whole).__name__}) recomputes its forward, which boost has split into units: "
            "call model.gradient_checkpointing_enable() before booster.boost"
        )


def refuse_differentiable(batches: Iterable[Batch], num_stages: int, num_microbatches: int) -> None:
    """Raise BatchError for an input that requires a gradient, which a stage, or a microbatch, would not pass on."""
    for path, leaf in ((path, leaf) for batch in batches for path, leaf in batch.tensors.items()):
        if leaf.requires_grad and (num_stages > 1 or (num_microbatches > 1 and not leaf.is_leaf)):
            raise BatchError(
                f"{path} of the batch requires a gradient, but a pipeline computes gradients of its model's parameters "
                f"only: pass {path}.detach(). If a module computes it, make that a part of the model. For the gradient "
                "of an input, use pp_size=1 and pass a tensor without a graph"
            )
