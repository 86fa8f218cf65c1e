"""Refusals: the arguments of a Trainer that a pipeline does not support, each with the alternative."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import TrainingArguments

from pipeshard.config import PipelineConfig
from pipeshard.errors import ConfigurationError
from pipeshard.ghost import Ghost

_DIVIDED = "the plugin divides what replicas keep: pass PipelinePlugin(zero_stage=1) or fsdp=True"
_FULL = "it would cast the stages' weights: evaluate with bf16=True or fp16=True, which casts what is computed"
# Why what these arguments are set to is not for a pipeline.
REFUSED = {
    "deepspeed": _DIVIDED,
    "fsdp": _DIVIDED,
    "parallelism_config": "replicas and slices are those of PipelinePlugin(dp_size=..., tp_size=..., ep_size=...)",
    "auto_find_batch_size": "one stage alone would run out of memory: `pipeshard plan` says which batch size fits",
    "fp16_full_eval": _FULL,
    "bf16_full_eval": _FULL,
    "optim": "it updates weights inside of backward, before gradients are summed or clipped: use another optimizer",
    "use_liger_kernel": "its kernels have not been compared under a pipeline: leave it out",
    "debug": "its hooks decide on what a stage has not: PipelinePlugin(check_finite=True) finds what is not finite",
    "use_legacy_prediction_loop": "leave it out: evaluation_loop is the one that is known",
    "past_index": "stages keep nothing from one batch to the next",
    "jit_mode_eval": "stages are not traced by torch.jit",
    "train_sampling_strategy": (
        "it deals batches out to processes, but the stages of a replica read the same: use group_by_length"
    ),
    "use_vllm": "vLLM would have to be given weights that are in parts here: leave it out, and the stages generate",
    "use_transformers_continuous_batching": "its cache is made for all layers of a model: leave it out",
    "sync_ref_model": "it would mix the parameters of two models, which are in parts here: leave it out",
    "accelerator_config.dispatch_batches": "every rank reads for itself: leave it out",
}
# Which values of an argument are refused, where it is not all that are true.
SOME: dict[str, Callable[[Any], bool]] = {
    "optim": lambda value: "lomo" in str(value).lower() or "layerwise" in str(value).lower(),
    "past_index": lambda value: value >= 0,
    "train_sampling_strategy": lambda value: value == "batch_rebalance",
}
# What a single process may be given: it has no other rank that would differ.
OF_SEVERAL = ("auto_find_batch_size", "accelerator_config.dispatch_batches")


def refuse(args: TrainingArguments, config: PipelineConfig, name: str) -> None:
    """Raise ConfigurationError for arguments that a pipelined Trainer called `name` does not support."""
    for argument, why in REFUSED.items():
        value = reduce(lambda holder, part: getattr(holder, part, None), argument.split("."), args)
        if argument in OF_SEVERAL and dist.get_world_size() == 1:
            continue
        if value is not None and SOME.get(argument, bool)(value):
            raise ConfigurationError(f"{name} is refused {argument}={value!r}, since {why}")
    if dist.get_world_size() != args.world_size:
        raise ConfigurationError(
            f"torch.distributed has {dist.get_world_size()} ranks, but accelerate, and so {name}, sees "
            f"{args.world_size}: start the script by torchrun, and make TrainingArguments before the plugin, with "
            "use_cpu=True where there are no GPUs"
        )
    if config.max_norm:
        raise ConfigurationError(
            f"PipelinePlugin(max_norm={config.max_norm}) would clip what {name} clips already: give max_grad_norm"
        )
    if not config.has_exact_loss:
        raise ConfigurationError(f"PipelinePlugin(loss_reduction='microbatch') is not the loss of {name}: leave it out")


def refuse_split(model: nn.Module, name: str) -> None:
    """Raise ConfigurationError for a model that was already split into stages: this rank only has a part of it."""
    if any(isinstance(parameter, Ghost) for parameter in model.parameters()):
        raise ConfigurationError(
            f"{name} is given a {type(model).__name__} that another Trainer, or booster.boost, has split into stages: "
            "no rank has all of it. Go on with that Trainer (train() may be called again), or save the model by "
            "its save_model(folder), and give this one what from_pretrained(folder) loads"
        )


OF_TRL = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer")


def refuse_class(kind: type) -> None:
    """Raise ConfigurationError for a Trainer of TRL other than OF_TRL, also if it overrides one of them."""
    trl = [one.__name__ for one in kind.__mro__ if one.__module__.startswith("trl.") and "Trainer" in one.__name__]
    if trl and trl[0] not in OF_TRL:
        raise ConfigurationError(
            f"{trl[0]} runs several models in one step, or generates in a way that has not been compared with one "
            f"process. Of TRL's trainers, {', '.join(OF_TRL)} work, and your own subclasses of them"
        )


def cut(config: PipelineConfig, window: int) -> dict[str, int | None]:
    """How to cut each batch of a window of this many, so that the window has the requested number of microbatches."""
    if config.microbatch_size is not None:
        return {"microbatch_size": config.microbatch_size, "num_microbatches": None}
    if config.is_ragged:
        return {}
    asked = config.num_microbatches
    if asked is None or (asked == 1 and config.pp_size == 1):
        return {"num_microbatches": 1}
    if asked % window:
        raise ConfigurationError(
            f"num_microbatches={asked} is not a multiple of gradient_accumulation_steps={window}, of which each batch "
            "is cut alike: leave it out, for a microbatch each, or give a multiple"
        )
    return {"num_microbatches": asked // window}
