"""Refusals: errors for models, criteria and batches that a pipeline cannot train exactly."""

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.jit import ScriptModule
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, takes_outputs_alone
from pipeshard.config import PipelineConfig
from pipeshard.distributed.agreement import texts_of
from pipeshard.errors import BatchError, ConfigurationError, UsageError, listed
from pipeshard.ghost import Ghost
from pipeshard.graph.units import containers
from pipeshard.hf import IMPLEMENTATIONS, adds_noise, has_adapters, recomputes, rope_limit
from pipeshard.private import ActivationWrapper
from pipeshard.slices.cut import num_positions
from pipeshard.split.adapters import BEGINNING
from pipeshard.split.base_names import base_names
from pipeshard.split.packed import is_quantized

logger = logging.getLogger("pipeshard")
# Modules that cannot run in a pipeline (most would communicate with other stages' ranks), and the plugin's replacement.
REFUSED_WRAPPERS: dict[type, str] = {
    DistributedDataParallel: "the plugin creates the replicas (dp_size, by default as many as the ranks allow)",
    DataParallel: "the plugin creates the replicas (dp_size, by default as many as the ranks allow)",
    FullyShardedDataParallel: "PipelinePlugin(fsdp=True) shards parameters across replicas",
    FSDPModule: "PipelinePlugin(fsdp=True) shards parameters across replicas",
    ScriptModule: "no stage can release TorchScript parameters; compile=True compiles each layer",
    ActivationWrapper: "pass recompute=True to PipelinePlugin (checkpoints have no names for modules in this wrapper)",
}


def uncompiled(model: nn.Module, warns: bool = True) -> nn.Module:
    """Undo `torch.compile(model)` or `model.compile()`, and return the uncompiled model. Warn about this if `warns`.
    Raises ConfigurationError for lazy parameters, weights that torchao or bitsandbytes has quantized, flex_attention,
    synchronized batch norms, accelerate's hooks, and wrappers such as DistributedDataParallel."""
    compiled = False
    while "_orig_mod" in model._modules and isinstance(inner := model._orig_mod, nn.Module):
        model, compiled = inner, True
    if model._compiled_call_impl is not None:
        model._compiled_call_impl, compiled = None, True
    if compiled and warns:
        logger.warning(
            "this %s was compiled as a whole, but pipeshard runs it in parts and discards the compilation. Pass the "
            "uncompiled model, and pass compile=True to PipelinePlugin, which compiles each layer",
            type(model).__name__,
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigurationError(
                f"{name} belongs to a torch Lazy module, so it has no shape before the first forward: run the model "
                "once on a batch (model(**batch) under torch.no_grad()) before you create its optimizer and call boost"
            )
        if type(parameter).__module__.startswith("colossalai.lazy"):
            raise ConfigurationError(
                f"{name} was created under colossalai's LazyInitContext, which pipeshard does not support: build the "
                "model under torch.device('meta'), which allocates no memory either, and let "
                "PipelinePlugin(init_weights=True) initialize the weights on the stages. Alternatively, call "
                "LazyInitContext.materialize(model), which allocates the whole model in every process"
            )
        if type(parameter).__module__.startswith("torchao."):
            raise ConfigurationError(
                f"{name} is a torchao {type(parameter).__name__}, which stages cannot hold. Create the model with "
                "PipelinePlugin.from_pretrained(cls, folder, "
                "quantization_config=TorchAoConfig(Int8WeightOnlyConfig())): each stage then quantizes its own weights"
            )
    refused = dict(REFUSED_WRAPPERS)
    if (wrapper := getattr(sys.modules.get("colossalai.interface"), "ModelWrapper", None)) is not None:
        refused[wrapper] = "boost it only with the Booster of the PipelinePlugin"
    for name, module in model.named_modules():
        if type(module).__module__.startswith("bitsandbytes."):
            raise ConfigurationError(
                f"{name} is a bitsandbytes {type(module).__name__}, which stages cannot hold. For a quantized model, "
                "call PipelinePlugin.from_pretrained(cls, folder, "
                "quantization_config=BitsAndBytesConfig(load_in_4bit=True)): each stage then quantizes its own weights"
            )
        if getattr(getattr(module, "config", None), IMPLEMENTATIONS[0], None) == "flex_attention":
            raise ConfigurationError(
                f"{name or 'the model'} ({type(module).__name__}) uses attn_implementation='flex_attention', whose "
                "higher-order operator pipeshard cannot trace: call model.set_attn_implementation('sdpa') before boost"
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigurationError(
                f"{name or 'the model'} is an nn.SyncBatchNorm, which would wait in each microbatch for ranks that may "
                "run other layers: use nn.BatchNorm1d, 2d or 3d (omit convert_sync_batchnorm), optionally with "
                "deferred_batch_norm=True, which updates running statistics once per step, from the replica's whole "
                "batch"
            )
        for kind, instead in refused.items():
            if isinstance(module, kind):
                raise ConfigurationError(
                    f"{name or 'the model'} is wrapped in {kind.__name__} ({type(module).__name__}): pass the model "
                    f"without this wrapper (and without accelerator.prepare); {instead}"
                )
    for name, module in model.named_modules():  # after the check for quantized layers, whose models have these hooks
        if hook := vars(module).get("_hf_hook"):
            raise ConfigurationError(
                f"{name or 'the model'} has accelerate's hook {type(hook).__name__}. Such hooks, which "
                "from_pretrained(device_map=...) adds, may move tensors to a fixed device, but each stage is on the "
                "device of its rank: omit device_map (PipelinePlugin.from_pretrained loads only the weights of "
                "each stage), or call accelerate.hooks.remove_hook_from_module(model, recurse=True)"
            )
    return model


def refuse_default_device() -> None:
    """Raise ConfigurationError if torch's default device is not the CPU, since pipeshard's own CPU tensors would be
    created on this device."""
    if (device := torch.get_default_device()).type != "cpu":
        raise ConfigurationError(
            f"the default device of torch is {device}, but pipeshard also computes with tensors on the CPU. Do not "
            "call torch.set_default_device. If you need a default device, set it only while you build the model (with "
            f"torch.device({device.type!r}): model = ...). pipeshard moves each stage to its rank's device"
        )


def differing(config: PipelineConfig, other: PipelineConfig) -> str | None:
    """Return the name of the first argument that differs between two configs, or None."""
    texts, others = texts_of(config.of_all_ranks), texts_of(other.of_all_ranks)
    return next((name for name in texts if texts[name] != others[name]), None)


def refuse_other_config(config: PipelineConfig, other: PipelineConfig) -> None:
    """Raise ConfigurationError if a model that was boosted with `config` is boosted again with a different config
    (`other`), since the different arguments would have no effect."""
    if (name := differing(config, other)) is not None:
        raise ConfigurationError(
            f"this model was boosted with {name}={getattr(config, name)!r}, but the plugin of this call has "
            f"{name}={getattr(other, name)!r}: use the plugin that boosted the model, or boost the full model that "
            "pipeshard.to_sequential(model) returns"
        )


def refuse_released(model: nn.Module) -> None:
    """Raise UsageError if `model` is the inner model of a boosted model, since this rank has released the parameters of
    other stages."""
    name = next((name for name, parameter in model.named_parameters() if isinstance(parameter, Ghost)), None)
    if name is not None:
        raise UsageError(
            f"this model was already boosted, and this rank has released {name}, which another stage holds: pass the "
            "model that boost returned or the result of pipeshard.to_sequential(model), or create the model again"
        )


def refuse_blank_adapters(model: nn.Module) -> None:
    """Raise ConfigurationError for adapters on meta, since their initial values from peft are lost."""
    if not has_adapters(model):
        return
    known = base_names(model)
    blank = [name for name, p in model.named_parameters() if p.is_meta and name not in known]
    if blank:
        raise ConfigurationError(
            f"adapters have parameters on the meta device ({listed(blank, 3)}), so the values that peft assigned to "
            "these parameters are lost. To add one adapter to a meta model, call booster.enable_lora(model, "
            "lora_config=...), which keeps the adapter on the CPU. Alternatively, load the model with its weights, and "
            "add adapters without peft's low_cpu_mem_usage"
        )


def refuse_sharded_packing(model: nn.Module, fsdp: bool, slices: int) -> None:
    """Raise ConfigurationError if quantized weights would be sharded."""
    if (fsdp or slices > 1) and is_quantized(model):
        raise ConfigurationError(
            "the weights of this model are quantized, so fsdp=True, tp_size and ep_size cannot shard them: omit these "
            "arguments, and use more stages (pp_size) or replicas (dp_size)"
        )


def refuse_lowered_begin(model: nn.Module, config: PipelineConfig) -> None:
    """Raise ConfigurationError for adapters that are initialized from loaded weights, if the weights are cast or
    sharded before they are loaded."""
    if getattr(model, BEGINNING, None) and (config.lowers or config.fsdp or config.slices_of_stage > 1):
        raise ConfigurationError(
            "DoRA, PiSSA and OLoRA are initialized from the loaded weights, but with precision, fsdp, tp_size or "
            "ep_size the weights are cast or sharded before they are loaded. Load the model with its weights "
            "before booster.enable_lora, or omit these arguments"
        )


def refuse_criterion(criterion: Criterion | None, model: nn.Module) -> None:
    """Raise ConfigurationError for a criterion that cannot be called with (outputs, inputs) or with outputs alone, or
    that has trainable parameters outside the model."""
    if criterion is not None and not callable(criterion):
        raise ConfigurationError(
            "the criterion must be callable as criterion(outputs, inputs) or criterion(outputs), got an object of "
            f"class {type(criterion).__name__}"
        )
    if criterion is not None and not hasattr(criterion, "of_batch"):
        takes_outputs_alone(criterion)
    if not isinstance(criterion, nn.Module):
        return
    known = set(model.parameters())
    foreign = [name for name, p in criterion.named_parameters() if p.requires_grad and p not in known]
    if foreign:
        raise ConfigurationError(
            f"the criterion ({type(criterion).__name__}) has trainable parameters of its own (the first is "
            f"{foreign[0]}), but a pipeline trains only the parameters of the model: make the criterion a submodule of "
            "a model that computes the loss in its forward, or freeze the criterion's parameters"
        )


def refuse_compiled(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Raise ConfigurationError for a compiled module that contains units, or for a unit that was compiled in place.

    A unit that `torch.compile(layer)` returned, and compiled modules inside a unit, are allowed: stages run them as a
    whole.
    """
    around = set(containers(model, units))
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward", type(module).forward) if module in around else None
        compiled = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
        compiled |= module in around and "_orig_mod" in module._modules
        compiled |= module._compiled_call_impl is not None and (module in around or name in units)
        if compiled:
            raise ConfigurationError(
                f"{name or 'the model'} ({type(module).__name__}) was compiled separately, but pipeshard must replace "
                'its call: remove the compilation, and pass compile=True (or options: compile={"backend": ...}) to '
                "PipelinePlugin, which compiles each layer"
            )


def refuse_recomputed(model: nn.Module, around: Iterable[nn.Module], is_boosted: bool = True) -> None:
    """Raise an error if one of the modules `around`, which contain units, recomputes its forward. Raises UsageError if
    recomputation may have been enabled after boost (`is_boosted`), and ConfigurationError otherwise."""
    whole = next(filter(recomputes, around), None)
    if whole is None:
        return
    name = next(name for name, module in model.named_modules() if module is whole)
    what = f"{name} ({type(whole).__name__}) reruns its forward in the backward pass, but"
    if is_boosted:
        raise UsageError(
            f"{what} boost has split this forward into units: call model.gradient_checkpointing_enable() before "
            "booster.boost, or pass recompute=True to the plugin"
        )
    raise ConfigurationError(
        f"{what} a cut or a CutPoint inside {name} splits this forward into units: cut after {name}, or call "
        "model.gradient_checkpointing_disable() and pass recompute=True to the plugin, which reruns each unit"
    )


def refuse_shorter(model: nn.Module, cut: Iterable[tuple[Batch, Sequence[Batch]]], remedy: str) -> None:
    """Raise ConfigurationError if a module adds NEFTune noise, whose scale depends on the number of positions. Raise
    BatchError if a module computes RoPE frequencies from the number of positions of a batch in `cut`, and a part of
    this batch has fewer positions. `remedy` is the message's advice for keeping a batch's positions together."""
    modules = dict(model.named_modules())
    for name in (name for name, module in modules.items() if adds_noise(module)):
        raise ConfigurationError(
            f"the scale of the noise that NEFTune adds to the output of {name} depends on the sequence length, but "
            f"parts of a batch may have shorter sequences than the whole batch. {remedy}, or turn NEFTune off "
            "(neftune_noise_alpha=None)"
        )
    limits = {name: limit for name, module in modules.items() if (limit := rope_limit(module)) is not None}
    for whole, parts in cut if limits else ():
        longest, shortest = num_positions(whole), min(map(num_positions, parts))
        for name in (name for name, limit in limits.items() if shortest < longest and limit < longest):
            raise BatchError(
                f"this batch has {longest} positions, but a part of the batch has only {shortest}. With more than "
                f"{limits[name]} positions, {name} ({type(modules[name]).__name__}) computes its frequencies from the "
                f"number of positions, so this part would get different frequencies. {remedy}, or truncate samples to "
                f"{limits[name]} positions"
            )


def refuse_differentiable(batches: Iterable[Batch], num_stages: int, num_microbatches: int) -> None:
    """Raise BatchError for an input that requires a gradient if the gradient would be lost: with several stages, or
    with several microbatches if the input is not a leaf tensor."""
    for path, leaf in ((path, leaf) for batch in batches for path, leaf in batch.tensors.items()):
        if leaf.requires_grad and (num_stages > 1 or (num_microbatches > 1 and not leaf.is_leaf)):
            raise BatchError(
                f"{path} of the batch requires a gradient, but this gradient would be lost: pass {path}.detach(). If a "
                "module computes this input, make the module a part of the model. To get the gradient of an input, use "
                "pp_size=1 and pass a leaf tensor (x.detach().requires_grad_())"
            )
