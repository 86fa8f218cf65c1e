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
    for each slice. With a mask for all positions so far (`has_whole_mask`), layers that attend to a window also get
    the keys of all these positions, as without slices.

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
        kind = KINDS.get(type(layer))
        if kind is None:
            raise ConfigurationError(
                f"num_slices: layer {number} of {type(model).__name__} keeps a {type(layer).__name__} in its cache, "
                "which slices do not support. Use num_slices=1"
            )
        if kind is not DummyLayer:
            cache.layers[number] = made = kind(now, number, layer)
            if has_whole_mask and isinstance(made, Keys):
                made.window = None
    if {*map(type, cache.layers)} <= {Keys}:  # a decoder may have more such layers than its config declares
        numbers = itertools.count(len(cache.layers))  # not the cache itself: only the GC would free such a cycle
        cache.layer_class_to_replicate = lambda: Keys(now, next(numbers))
    return EncoderDecoderCache(cache, DynamicCache()) if has_encoder else cache


def has_keys(cache: Any) -> bool:
    """Whether a layer of the cache attends to earlier positions, and therefore needs a mask for these positions. Layers
    with states only do not attend."""
    return {*map(type, getattr(cache, "self_attention_cache", cache).layers)} != {States}


class Keys(DynamicLayer):
    """Keys and values of one layer."""

    window: int | None = None

    def __init__(self, now: Slice, number: int, like: Any = None) -> None:
        super().__init__()
        self.now, self.number, self.is_updated = now, number, False

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

    def __init__(self, now: Slice, number: int, like: Any) -> None:
        DynamicSlidingWindowLayer.__init__(self, like.sliding_window)
        self.now, self.number, self.is_updated = now, number, False
        self.window = like.sliding_window
        self.cumulative_length = now.start


class IndexedKeys(Keys, DynamicIndexedLayer):
    """Keys and values of a layer with an indexer, whose keys select positions."""

    def __init__(self, now: Slice, number: int, like: Any) -> None:
        DynamicIndexedLayer.__init__(self)
        self.now, self.number, self.is_updated = now, number, False

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        return self.now.grow((self.number, "index"), indexer_key_states, 1)


class States(LinearAttentionLayer):
    """Convolution and recurrent states of one layer, which continue from the end of the previous slice."""

    def __init__(self, now: Slice, number: int, like: Any) -> None:
        LinearAttentionLayer.__init__(self, like.number_of_states)
        self._take(now, number)

    def _take(self, now: Slice, number: int) -> None:
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


class StatesAndKeys(States, Keys, LinearAttentionAndFullAttentionLayer):
    """Keys, values and states of a layer that attends and has states."""

    def __init__(self, now: Slice, number: int, like: Any) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self, like.number_of_states)
        self.is_updated = False
        self._take(now, number)


class StatesAndSlidingKeys(States, SlidingKeys, LinearAttentionAndSlidingWindowAttentionLayer):
    """Keys, values and states of a layer that attends to a window of positions and has states."""

    def __init__(self, now: Slice, number: int, like: Any) -> None:
        LinearAttentionAndSlidingWindowAttentionLayer.__init__(self, like.sliding_window, like.number_of_states)
        self.is_updated, self.window, self.cumulative_length = False, like.sliding_window, now.start
        self._take(now, number)


KINDS: dict[type, Any] = {
    DynamicLayer: Keys,
    DynamicSlidingWindowLayer: SlidingKeys,
    DynamicIndexedLayer: IndexedKeys,
    LinearAttentionLayer: States,
    LinearAttentionAndFullAttentionLayer: StatesAndKeys,
    LinearAttentionAndSlidingWindowAttentionLayer: StatesAndSlidingKeys,
    DummyLayer: DummyLayer,
}
