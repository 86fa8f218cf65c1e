"""Dry run: the plan that `pipeshard sft --dry_run` prints instead of training."""

import math
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeshard.errors import CheckpointError, ConfigurationError
from pipeshard.garbage import collector_paused
from pipeshard.recipe import config_source, in_settings, instance_of, model_options, plugin_arguments, trl
from pipeshard.replaced import replaced

TILES, FOLD = "trl.kernels.chunked_logprob", "_forward_tile"
# The Trainer's optimizers with the same states as AdamW. Unknown optimizers also count as AdamW, as an upper bound.
ADAMW = ("adamw", "adamw_32bit", "stable_adamw")
THREE_STATES = ("ademamix", "ademamix_32bit", "grokadamw")


@collector_paused()
def print_plan(kind: str, settings: Namespace) -> None:
    """Print the plan. Raises PartitionError if the model cannot be split, or if it needs more than `device_memory` with
    the number of slices that training uses. Raises ConfigurationError for commands other than sft."""
    if kind != "sft":
        raise ConfigurationError(
            f"--dry_run supports only pipeshard sft: the planner does not simulate a step of pipeshard {kind}. Omit "
            "--dry_run"
        )
    from pipeshard.commands import show

    made = planned(settings)
    cuts = ",".join(map(str, made.cuts))
    shown = partial(show, made, advice=f"Set partition={cuts}: training does not move the cuts to fit.")
    if settings.num_slices == "1":
        shown()
    else:
        show_slices(settings, made, shown)


@in_settings()
def show_slices(settings: Namespace, made: Any, show: Callable[..., None]) -> None:
    """Show the plan with estimates for several numbers of slices. Raises PartitionError if the model does not fit in
    `device_memory` with the number of slices that training uses."""
    from pipeshard.config import PipelineConfig
    from pipeshard.planner.plan import NUMBERS_OF_SLICES, refuse_large

    positions = [made.microbatch["input_ids"][1]] * made.num_microbatches
    n = PipelineConfig(**plugin_arguments(settings)).slices_of(positions)
    found = made.in_slices(sorted({*NUMBERS_OF_SLICES, n}), settings.device_memory)
    show(slices=found)
    refuse_large(found, n)


@in_settings()
def planned(settings: Namespace) -> Any:
    """The plan for these settings. If sequences are sliced, the plan ignores `device_memory`."""
    from pipeshard.planner import planner

    m, size = microbatches(settings)
    return planner.plan(
        blank(settings),
        pp_size=settings.pp,
        num_microbatches=m,
        microbatch_size=size,
        schedule=settings.schedule,
        num_model_chunks=settings.chunks,
        partition=settings.partition,
        device_memory=settings.device_memory if settings.num_slices == "1" else None,
        optimizer=planned_optimizer(settings),
        seq_len=settings.max_length,
        precision=settings.precision or "fp32",
        dp_size=settings.dp,
        zero_stage=settings.zero_stage,
        tp_size=settings.tp,
    )


def is_one_row(settings: Namespace) -> bool:
    """Whether SFTTrainer joins all samples of a batch into one row, which cannot be split into microbatches."""
    is_packed = getattr(settings, "packing", False) and settings.packing_strategy != "wrapped"
    return is_packed or getattr(settings, "padding_free", False)


def microbatches(settings: Namespace, rows_each: int = 1) -> tuple[int, int]:
    """The number of microbatches per step, and the number of rows in the largest microbatch. A batch has at most as
    many microbatches as rows. Each sample has `rows_each` rows."""
    window, samples = settings.gradient_accumulation_steps, settings.per_device_train_batch_size * rows_each
    of_batch = 1 if is_one_row(settings) else max(1, min((settings.microbatches or window) // window, samples))
    return of_batch * window, math.ceil(samples / of_batch)


def planned_optimizer(settings: Namespace) -> str:
    """The planner's name for the optimizer `optim`. If the planner does not know the optimizer, the result is "adamw",
    whose states are an upper bound. Raises ConfigurationError for optimizers with more states than AdamW."""
    from pipeshard.planner.memory import IN_8_BITS, OF_TRAINER, OPTIMIZERS

    name = plain_name(settings.optim)
    if name in THREE_STATES:
        raise ConfigurationError(
            f"--dry_run does not support optim={settings.optim}, which keeps three states per parameter. Plan with "
            "optim=adamw_torch, and add the memory of one more fp32 value per parameter"
        )
    return OF_TRAINER + name if name in IN_8_BITS else name if name in OPTIMIZERS else "adamw"


def plain_name(optim: str) -> str:
    """The name of a Trainer's optimizer without the parts that identify the implementation."""
    return re.sub("^paged_|_bnb|_torch", "", str(optim))


def blank(settings: Namespace) -> Any:
    """Build the model on meta from its config, with quantized weights and adapters if the settings request them."""
    import torch
    from peft import get_peft_model

    from pipeshard.planner.models import DTYPE_NAMES, build_on_meta
    from pipeshard.split.adapters import put_adapters
    from pipeshard.split.quantized import quantization_of, quantize_blank

    dtypes = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPE_NAMES.items()}
    recomputes = settings.gradient_checkpointing if settings.recompute is None else settings.recompute == 1
    source, *sizes = config_source(settings)
    options = model_options("sft", settings)
    dtype = dtypes.get(options.pop("dtype", options.pop("torch_dtype", "auto")))
    quantization, trusts = options.pop("quantization_config", None), options.pop("trust_remote_code")
    if options.get("attn_implementation") != "eager":  # the other kernels take as much memory as the default
        options.pop("attn_implementation", None)
    otherwise = partial(dtype_of_weights, Path(source))
    model = build_on_meta(
        source, sizes, dtype, recomputes, trust_remote_code=trusts, options=options, otherwise=otherwise
    )
    packing = quantization_of(model.config, source, quantization)
    if packing is not None:
        quantize_blank(model, packing)
    fuse_head(model)
    adapters = trl().get_peft_config(instance_of(trl().ModelConfig, settings))
    if adapters is None and packing is not None:
        raise ConfigurationError("the model's weights are quantized, so there is nothing to train: set use_peft=true")
    if adapters is None:
        return model
    put = partial(get_peft_model, low_cpu_mem_usage=True)  # adapters on meta: a plan does not need their values
    adapted = put_adapters(model, adapters, put)
    for parameter in adapted.parameters() if packing is not None else ():
        if parameter.requires_grad:  # TRL trains the adapters of a quantized base in bf16
            parameter.data = parameter.data.to(torch.bfloat16)
    return adapted


def dtype_of_weights(folder: Path) -> Any:
    """The dtype for `dtype: auto` if the config has none: the dtype of the weights in `folder`, fp32 if the weights are
    not complete, or bf16 if `folder` does not exist."""
    import torch

    from pipeshard.checkpoint.blank import auto_dtype

    if not folder.is_dir():
        return torch.bfloat16
    try:
        return auto_dtype(folder)
    except CheckpointError:  # not downloaded yet
        return torch.float32


def fuse_head(model: Any) -> None:
    """Make the model's forward compute the loss as TRL's SFTTrainer does: with TRL's fused head, if TRL has one."""
    add = getattr(import_module("trl.trainer.utils"), "add_fused_lm_head", None)
    if add is None:
        return
    add(model, outputs=("log_probs", "entropy", "is_top1"))
    with_head = model.forward

    @wraps(with_head)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with folding_once():
            return with_head(*args, fused_lm_head=True, **kwargs)

    model.forward = forward


@contextmanager
def folding_once() -> Iterator[None]:
    """Context manager in which TRL's chunked loss runs its operators only for the first tile of each shape, to save
    time. A plan does not need the values, and all tiles of one shape take the same amount of memory. With 64k tokens
    and a vocabulary of 128k entries, there are 64 tiles of 134 million elements."""
    kernels = sys.modules.get(TILES)  # imported by trl.trainer.utils in versions that have this module
    if not hasattr(kernels, FOLD):
        yield
        return
    fold, folded = getattr(kernels, FOLD), set[Any]()

    def once(tile: Any, *args: Any, **kwargs: Any) -> None:
        if tile.shape not in folded:
            folded.add(tile.shape)
            fold(tile, *args, **kwargs)

    with replaced(kernels, **{FOLD: once}):
        yield
