"""Cache: a transformers cache for one slice of a microbatch, with the keys, values and states of earlier slices."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from pipeshard.errors import ConfigurationError
from pipeshard.hf import config_of, without_adapters
from pipeshard.slices.attention import FRESH, Fresh, register
from pipeshard.slices.states import Slice


def cache_of(model: nn.Module, now: Slice, has_encoder: bool = False, has_whole_mask: bool = False) -> Cache:
    """Create the cache that is passed to the model for a slice. Keys and values of an encoder's output are recomputed
    for each slice. With a mask for all positions so far (`has_whole_mask`), layers that attend to a window also
    receive the keys of all these positions, as without slices.

    Raises ConfigurationError if a layer caches anything except keys, values and states, or if the config does not
    define the layers of the cache.
    """
    register()
    try:
        cache = DynamicCache(config=config_of(without_adapters(model)[1]))
    except AttributeError as error:
        raise ConfigurationError(
            f"num_slices: the config of {type(model).__name__} does not define the layers of its cache ({error}). Use "
            "num_slices=1"
        ) from None
    for number, layer in enumerate(cache.layers):
        kind = SLICED_LAYERS.get(type(layer))
        if kind is None:
            raise ConfigurationError(
                f"num_slices: the cache of layer {number} of {type(model).__name__} has class {type(layer).__name__}, "
                "which slices do not support. Use num_slices=1"
            )
        if kind is not DummyLayer:
            layer.__class__ = kind
            layer.begin(now, number)
            if has_whole_mask and isinstance(layer, Keys):
                layer.window = None
    if {*map(type, cache.layers)} <= {Keys}:  # a decoder may have more such layers than its config declares
        numbers = itertools.count(len(cache.layers))  # if `another` held the cache, only the GC would free both

        def another() -> Keys:
            layer = Keys()
            layer.begin(now, next(numbers))
            return layer

        cache.layer_class_to_replicate = another
    return EncoderDecoderCache(cache, DynamicCache()) if has_encoder else cache


def has_keys(cache: Any) -> bool:
    """Whether a layer of the cache attends to earlier positions, and therefore needs a mask for these positions. Layers
    that have only states do not attend."""
    return {*map(type, getattr(cache, "self_attention_cache", cache).layers)} != {LayerStates}


class Keys(DynamicLayer):
    """Keys and values of one layer."""

    window: int | None = None
    is_updated = False

    def begin(self, now: Slice, number: int) -> None:
        """Prepare this layer for slice `now`. `number` is the layer's index in the cache."""
        self.now, self.number = now, number

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        names = (self.number, "keys"), (self.number, "values")
        self.keys = self.now.grow(names[0], key_states, -2, self.window)
        self.values = self.now.grow(names[1], value_states, -2, self.window)
        if self.window is None:
            grown = self.now.states[names[0]], self.now.states[names[1]]
            setattr(self.keys, FRESH, Fresh(self.now, key_states, value_states, *grown, self.values))
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = self.is_updated = True
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.now.end if self.is_updated else self.now.start


class SlidingKeys(Keys, DynamicSlidingWindowLayer):
    """Keys and values of a layer that attends to a window of positions."""

    def begin(self, now: Slice, number: int) -> None:
        super().begin(now, number)
        self.window, self.cumulative_length = self.sliding_window, now.start


class IndexedKeys(Keys, DynamicIndexedLayer):
    """Keys and values of a layer with an indexer, whose keys select positions."""

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        return self.now.grow((self.number, "index"), indexer_key_states, 1)


class LayerStates(LinearAttentionLayer):
    """Convolution and recurrent states of one layer, which continue from the end of the previous slice."""

    def begin(self, now: Slice, number: int) -> None:
        self.now, self.number = now, number
        for k in range(self.number_of_states):
            self.conv_states[k] = now.take((number, "convolution", k))
            self.recurrent_states[k] = now.take((number, "recurrent", k))
            self.has_previous_state[k] = now.start > 0
            self.is_conv_states_initialized[k] = self.conv_states[k] is not None
            self.is_recurrent_states_initialized[k] = self.recurrent_states[k] is not None

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        before = self.conv_states[state_idx]
        size = before.shape[-1] if before is not None else conv_kernel_size or conv_states.shape[-1]
        whole = functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        if before is not None:
            whole = torch.cat([before, conv_states], dim=-1)
        self.now.hand_over((self.number, "convolution", state_idx), whole[..., -size:])
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.now.hand_over((self.number, "recurrent", state_idx), recurrent_states)
        return recurrent_states


class StatesAndKeys(LayerStates, Keys, LinearAttentionAndFullAttentionLayer):
    """Keys, values and states of a layer that attends to all earlier positions and has states."""


class StatesAndSlidingKeys(LayerStates, SlidingKeys, LinearAttentionAndSlidingWindowAttentionLayer):
    """Keys, values and states of a layer that attends to a window of positions and has states."""

    def begin(self, now: Slice, number: int) -> None:
        LayerStates.begin(self, now, number)
        SlidingKeys.begin(self, now, number)


SLICED_LAYERS: dict[type, Any] = {
    DynamicLayer: Keys,
    DynamicSlidingWindowLayer: SlidingKeys,
    DynamicIndexedLayer: IndexedKeys,
    LinearAttentionLayer: LayerStates,
    LinearAttentionAndFullAttentionLayer: StatesAndKeys,
    LinearAttentionAndSlidingWindowAttentionLayer: StatesAndSlidingKeys,
    DummyLayer: DummyLayer,
}
