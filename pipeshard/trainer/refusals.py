"""Refusals: raises errors for Trainer arguments that a pipeline does not support. Each error names an alternative."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments

from pipeshard.config import PipelineConfig
from pipeshard.dataloader import ResumableDataLoader
from pipeshard.distributed.mesh import num_replicas
from pipeshard.engine.refusals import differing
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.ghost import Ghost
from pipeshard.replaced import replaced
from pipeshard.split.blank import is_blank

_DIVIDED = "shard across replicas with PipelinePlugin(zero_stage=1) or PipelinePlugin(fsdp=True) instead"
_FULL = "it would cast the stages' weights: evaluate with bf16=True or fp16=True, which only cast the computation"
# By argument: why a pipeline does not support the argument, and what to do instead.
REFUSED_ARGUMENTS = {
    "deepspeed": _DIVIDED,
    "fsdp": _DIVIDED,
    "activation_offloading": (
        "its hooks expect that each backward follows its own forward, but stages interleave microbatches: set "
        "PipelinePlugin(offload='activations') instead"
    ),
    "parallelism_config": "set PipelinePlugin(dp_size=..., tp_size=..., ep_size=...) instead",
    "auto_find_batch_size": (
        "only a rank that runs out of memory would reduce its batch size: find a batch size with `pipeshard plan`"
    ),
    "fp16_full_eval": _FULL,
    "bf16_full_eval": _FULL,
    "optim": "it updates weights during the backward, before gradients are summed or clipped: use another optimizer",
    "use_liger_kernel": "its kernels have not been verified in a pipeline: remove it",
    "debug": "its hooks need values of other stages: use PipelinePlugin(check_finite=True) to find non-finite values",
    "use_legacy_prediction_loop": "a pipeline supports only evaluation_loop: remove it",
    "past_index": "stages keep no state between batches: remove it",
    "jit_mode_eval": "torch.jit does not trace stages: remove it",
    "train_sampling_strategy": (
        "it assigns different batches to processes, but all stages of a replica must read the same batch: use "
        "'group_by_length'"
    ),
    "use_vllm": "vLLM needs the full weights, but a pipeline splits them: remove it to generate with the stages",
    "use_transformers_continuous_batching": "its cache needs all layers on one rank, but stages divide them: remove it",
    "sync_ref_model": "it averages the full weights of two models, but a pipeline splits them: remove it",
    "accelerator_config.dispatch_batches": "each rank of a pipeline reads its batches itself: remove it",
    "dataloader_in_order": (
        "batches would be read in the order in which workers finish, but all stages of a replica must read the same "
        "batch: remove it"
    ),
}
# By argument: whether a value is refused. For arguments without an entry, every truthy value is refused.
SOME: dict[str, Callable[[Any], bool]] = {
    "optim": lambda value: "lomo" in str(value).lower() or "layerwise" in str(value).lower(),
    "past_index": lambda value: value >= 0,
    "train_sampling_strategy": lambda value: value == "batch_rebalance",
    "dataloader_in_order": lambda value: not value,
}
# Arguments that are supported in a world of one process.
OF_SEVERAL = ("auto_find_batch_size", "accelerator_config.dispatch_batches", "dataloader_in_order")


def refuse(args: TrainingArguments, config: PipelineConfig, name: str) -> None:
    """Raise ConfigurationError for arguments that a pipelined Trainer called `name` does not support, or if accelerate
    has a different number of ranks than torch.distributed."""
    for argument, why in REFUSED_ARGUMENTS.items():
        value = reduce(lambda holder, part: getattr(holder, part, None), argument.split("."), args)
        if argument in OF_SEVERAL and dist.get_world_size() == 1:
            continue
        if value is not None and SOME.get(argument, bool)(value):
            raise ConfigurationError(f"{name} does not support {argument}={value!r}: {why}")
    if dist.get_world_size() != args.world_size:
        raise ConfigurationError(
            f"torch.distributed has {dist.get_world_size()} ranks, but accelerate, which {name} uses, has "
            f"{args.world_size}: start the script with torchrun, and create TrainingArguments before the plugin, with "
            "use_cpu=True if there are no GPUs"
        )
    _refuse_uneven(args, config, name)
    if config.max_norm:
        raise ConfigurationError(
            f"{name} clips gradients itself: instead of PipelinePlugin(max_norm={config.max_norm}), set "
            "TrainingArguments(max_grad_norm=...)"
        )
    if not config.has_exact_loss:
        raise ConfigurationError(
            f"PipelinePlugin(loss_reduction='microbatch') computes a different loss than {name}: omit loss_reduction"
        )


def _refuse_uneven(args: TrainingArguments, config: PipelineConfig, name: str) -> None:
    """Raise ConfigurationError if replicas could have different numbers of batches."""
    replicas = num_replicas(config.pp_size, config.dp_size, config.tp_size, config.ep_size)
    is_even: bool = args.accelerator_config.even_batches or args.dataloader_drop_last
    if replicas > 1 and not is_even:
        raise ConfigurationError(
            f"{name} does not support accelerator_config.even_batches=False with dp_size={replicas}: replicas with "
            "fewer batches would begin the next epoch earlier. Remove even_batches=False, or set "
            "dataloader_drop_last=True"
        )


def refuse_precision(mixed_precision: str, name: str) -> None:
    """Raise ConfigurationError if stages do not support the mixed precision that `accelerate launch` has set."""
    if mixed_precision not in ("no", "bf16", "fp16"):
        raise ConfigurationError(
            f"{name} does not support the mixed precision {mixed_precision!r} of `accelerate launch`: set bf16=True in "
            "TrainingArguments, and start the script with torchrun or `accelerate launch --mixed_precision bf16`"
        )


def refuse_prepared(loader: Any, where: str) -> None:
    """Raise UsageError for a loader that `prepare_dataloader` returned, since a Trainer distributes the samples
    itself."""
    if isinstance(loader, ResumableDataLoader):
        raise UsageError(
            f"{where} a dataloader from plugin.prepare_dataloader, which distributes the samples among the replicas "
            "and keeps its position. A Trainer also does both: it would distribute the samples again, or repeat some "
            "and skip others in a resumed run. Use self.accelerator.prepare(DataLoader(dataset, ...)) with a torch "
            "DataLoader, or pass train_dataset"
        )


RELOAD = (
    "save the model (trainer.save_model(folder), or booster.save_model(model, folder, shard=True)) and pass the model "
    "that from_pretrained(folder) returns"
)


def refuse_split(model: nn.Module, name: str) -> None:
    """Raise ConfigurationError if booster.boost, or a Trainer of a model with the same parameters, has already split
    the model, so that this rank holds only a part of it."""
    if any(isinstance(parameter, Ghost) for parameter in model.parameters()):
        raise ConfigurationError(
            f"the {type(model).__name__} passed to {name} was already split, by booster.boost or by a Trainer whose "
            "model has the same parameters, so no rank holds the full model. If a Trainer split it, pass that "
            f"Trainer's model (trainer.model). Alternatively, or if booster.boost split it, {RELOAD}"
        )


def refuse_other_arguments(config: PipelineConfig, other: PipelineConfig, name: str) -> None:
    """Raise ConfigurationError if a Trainer called `name` would run stages that were created with arguments other than
    its own."""
    if (argument := differing(config, other)) is not None:
        raise ConfigurationError(
            f"another Trainer has split this model with {argument}={getattr(config, argument)!r}, but {name} needs "
            f"{argument}={getattr(other, argument)!r}: pass the same PipelinePlugin arguments, bf16, fp16 and "
            "torch_compile to both Trainers (num_microbatches is divided by gradient_accumulation_steps), or "
            f"{RELOAD}"
        )


def refuse_blank_reference(model: Any, given: Iterable[Any]) -> None:
    """Raise ConfigurationError if the Trainer's constructor would run a reference `model` that is on meta. `given` are
    the constructor's arguments."""
    is_precomputed = any(getattr(one, "precompute_ref_log_probs", False) for one in given)
    if is_precomputed and isinstance(model, nn.Module) and is_blank(model):
        raise ConfigurationError(
            "precompute_ref_log_probs=True runs the whole reference model on each rank before training, but its "
            "weights are on the meta device until the stages load them: omit precompute_ref_log_probs, so that the "
            "stages run the reference model before each step, or load the reference model with its weights"
        )


@contextmanager
def refusing_resize(model: nn.Module, name: str) -> Iterator[None]:
    """Context manager for the constructor of a Trainer called `name`. It raises ConfigurationError if the constructor
    resizes the embeddings of a `model` on meta, as TRL does to add the tokens of another model's chat template."""
    resize = getattr(model, "resize_token_embeddings", None)
    if resize is None:
        yield
        return

    def same_size(new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **options: Any) -> Any:
        before: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        multiple = pad_to_multiple_of or 1
        after = math.ceil((new_num_tokens or before) / multiple) * multiple
        if after != before:
            raise ConfigurationError(
                f"{name} would resize the embeddings from {before} to {after} tokens, but the weights of the model are "
                "on the meta device until the stages load them. If chat_template_path names a model, set it to a file "
                "with a Jinja template (.jinja), such as that model's chat_template.jinja. Otherwise, load the model "
                "with transformers' from_pretrained, resize its embeddings, save it with save_pretrained, and pass the "
                "new folder to PipelinePlugin.from_pretrained"
            )
        return resize(new_num_tokens, pad_to_multiple_of, **options)

    with replaced(model, resize_token_embeddings=same_size):
        yield


OF_TRL = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer")


def refuse_class(kind: type) -> None:
    """Raise ConfigurationError for a TRL Trainer that is not in OF_TRL (even if one of its base classes is), or for a
    subclass of Trainer that overrides `_save`."""
    trl = [one.__name__ for one in kind.__mro__ if one.__module__.startswith("trl.") and "Trainer" in one.__name__]
    if trl and trl[0] not in OF_TRL:
        raise ConfigurationError(
            f"{trl[0]} is not supported: its steps have not been compared with those of a single process. The "
            f"supported TRL trainers are {', '.join(OF_TRL)}, and your own subclasses of these trainers"
        )
    if any("_save" in vars(one) for one in kind.__mro__ if one is not Trainer):
        raise ConfigurationError(
            f"{kind.__name__} overrides _save, which a pipeline does not call, since no rank holds the full weights: "
            "override save_model instead, and in save_model, call super().save_model(...) on every rank"
        )


_GENERATES = (
    "it generates with the whole model, from different prompts on each process. In your own callback, call "
    "trainer.generate(...) on every rank with the same prompts, and log the completions on rank 0"
)
_AVERAGES = "it averages the full weights, which no rank holds: remove it"
# By TRL callback: why a pipeline does not support the callback, and what to do instead.
CALLBACKS = {
    "LogCompletionsCallback": _GENERATES,
    "WeaveCallback": _GENERATES,
    "BEMACallback": _AVERAGES,
    "SyncRefModelCallback": _AVERAGES,
}


def refuse_callback(callback: Any, name: str, config: PipelineConfig) -> None:
    """Raise ConfigurationError if the callback (an object or a class) is one of TRL's CALLBACKS, which require the
    whole model, but no rank holds the whole model. `name` is the name of the Trainer's class."""
    if config.pp_size * config.tp_size * config.ep_size == 1 and not config.fsdp:
        return
    kind = callback if isinstance(callback, type) else type(callback)
    for each in kind.__mro__:
        if each.__module__.startswith("trl.") and each.__name__ in CALLBACKS:
            raise ConfigurationError(f"{name} does not support TRL's {each.__name__}: {CALLBACKS[each.__name__]}")


def cut_arguments(config: PipelineConfig, window: int) -> dict[str, int | None]:
    """Return the PipelinePlugin arguments that split one batch of a gradient accumulation window into microbatches. A
    window has `window` batches, and `config.num_microbatches` is their total number of microbatches. Raises
    ConfigurationError if this total is not a multiple of `window`."""
    if config.microbatch_size is not None:
        return {"microbatch_size": config.microbatch_size, "num_microbatches": None}
    if config.is_ragged:
        return {}
    asked = config.num_microbatches
    if asked is None or (asked == 1 and config.pp_size == 1):
        return {"num_microbatches": 1}
    if asked % window:
        raise ConfigurationError(
            f"num_microbatches={asked} is not a multiple of gradient_accumulation_steps={window}, but every batch must "
            "have the same number of microbatches: pass a multiple, or omit num_microbatches for one microbatch per "
            "batch"
        )
    return {"num_microbatches": asked // window}
