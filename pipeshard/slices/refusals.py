"""Refusals: errors for models and batches that slices do not support, and the relative cost of attention."""

from collections.abc import Iterable

import transformers
from torch import nn
from transformers import cache_utils

from pipeshard.batch.batch import Batch
from pipeshard.errors import BatchError, ConfigurationError
from pipeshard.hf import (
    IDS,
    LAYER_CACHES,
    MASK,
    cache_argument,
    config_of,
    is_encoder_decoder,
    padding_token,
    recomputes,
    text_config,
    without_adapters,
)
from pipeshard.slices.states import Slice


def refuse_unsliceable(model: nn.Module) -> None:
    """Raise ConfigurationError for a model whose forward cannot continue from the cache of an earlier slice, and for a
    version of transformers without caches that slices can share."""
    base = without_adapters(model)[1]
    name = type(base).__name__
    has_config = config_of(base) is not None
    if not has_config or cache_argument(model) is None:
        takes_none = f"the forward of {name} takes no {' or '.join(LAYER_CACHES)}"
        raise ConfigurationError(
            f"num_slices: {takes_none if has_config else f'{name} has no config'}, so a slice cannot read the "
            "results of earlier slices. Use num_slices=1"
        )
    if is_encoder_decoder(base):
        raise ConfigurationError(
            f"num_slices: {name} has an encoder, which reads the whole sequence in one call. Use num_slices=1"
        )
    if not hasattr(cache_utils, "LinearAttentionLayer"):
        raise ConfigurationError(
            f"num_slices: transformers {transformers.__version__} has no caches that slices can share. Install "
            "transformers 5, or use num_slices=1"
        )
    from pipeshard.slices.cache import cache_of  # this import fails with transformers 4

    cache_of(model, Slice(0, 1, 1, {}))


def refuse_cacheless(model: nn.Module, trains: bool = False) -> None:
    """Raise ConfigurationError for a model with transformers' gradient checkpointing, which in training mode calls
    layers without a cache. Pass `trains=True` if the model will be in training mode later."""
    if (model.training or trains) and any(map(recomputes, model.modules())):
        raise ConfigurationError(
            f"num_slices: transformers' own gradient checkpointing calls the layers of {type(model).__name__} without "
            "a cache. Call model.gradient_checkpointing_disable(), and use PipelinePlugin(recompute=True)"
        )


def refuse_padding(model: nn.Module, batches: Iterable[Batch], found: tuple[str, str]) -> None:
    """Raise BatchError for a batch with padding if slices with padding fail, or if their results differ from the
    results of whole sequences. `found` describes this problem for batches with an attention_mask, and for batches
    without one ("" if no problem was found)."""
    for batch in batches if any(found) else ():
        why = found[0] if MASK in batch.tensors else found[1]
        if why and is_padded(model, batch):
            raise BatchError(
                f"num_slices: this batch has padding, and slices of {type(model).__name__} with padding {why}. "
                "Use samples of equal length in each batch, or num_slices=1"
            )


def is_padded(model: nn.Module, batch: Batch) -> bool:
    """Whether a batch has padding, according to its mask or, if it has no mask, to its tokens."""
    mask, ids, token = batch.tensors.get(MASK), batch.tensors.get(IDS), padding_token(model)
    if mask is not None:
        return not bool(mask.all())
    return token is not None and ids is not None and bool((ids == token).any())


def attention_slope(model: nn.Module) -> float:
    """Return the time that each earlier position adds to the time of a position, relative to the time of the first
    position: the FLOPs of attention (QK^T and the product with V) per earlier position, divided by the FLOPs of all
    weight matrices per position (2 per parameter). Returns 0 if the config does not contain the sizes."""
    config = text_config(without_adapters(model)[1])
    layers, width = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return 2 * layers * width / parameters if parameters and type(layers) is type(width) is int else 0.0
