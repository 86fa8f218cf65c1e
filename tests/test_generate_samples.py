"""Tests of calls of generate whose samples must stay in one microbatch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, Phi3Config, Phi3ForCausalLM

from pipeshard.errors import UsageError
from pipeshard.generate import forward
from pipeshard.hf import LAYER_CACHES
from tests import zoo
from tests.parity.build import build
from tests.parity.entries import find
from tests.pool import Pool
from tests.test_generate import GREEDY, boosted, generated, is_same

pytestmark = pytest.mark.local

SCORES: dict[str, Any] = GREEDY | {"return_dict_in_generate": True, "output_scores": True}


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**zoo.TINY | {"initializer_range": 0.3} | options))


def rotated(kind: str) -> nn.Module:
    """A llama whose longest prompt, of 7 tokens, exceeds the limit of its rotary frequencies. The others do not."""
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 6}
        return llama(rope_parameters=parameters | factors)
    return llama(rope_parameters=parameters, max_position_embeddings=6)


def phi3() -> nn.Module:
    """A Phi-3 that computes its states anew once there are more than 8 tokens."""
    torch.manual_seed(0)
    return Phi3ForCausalLM(Phi3Config(**zoo.TINY, original_max_position_embeddings=8))


class Remembering(nn.Module):
    """A layer that keeps the mean of the prompt itself, and adds it to what follows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.state = layer, None

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        if any(kwargs.get(name) is not None for name in LAYER_CACHES):
            hidden_states = self.remembered(hidden_states)
        return self.layer(hidden_states, **kwargs)

    def remembered(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.shape[1] > 1:
            self.state = hidden_states.mean(1, keepdim=True)
        elif self.state is None or len(self.state) != len(hidden_states):
            self.state = torch.zeros_like(hidden_states)
        return hidden_states + self.state


class RememberingLater(Remembering):
    """One that creates the attribute in its first forward, and another that holds no state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        del self.state

    def remembered(self, hidden_states: Tensor) -> Tensor:
        self.input_dtype = hidden_states.dtype
        if hidden_states.shape[1] > 1 or not hasattr(self, "state"):
            self.state = hidden_states.mean(1, keepdim=True)
        return hidden_states + self.state


class RememberingOfClass(Remembering):
    """One whose class has the attribute."""

    state = None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        del self.state


class RememberingPair(RememberingLater):
    """One that keeps a tuple, as an LSTM returns it."""

    def remembered(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.shape[1] > 1 or not hasattr(self, "state"):
            self.state = hidden_states.mean(1, keepdim=True), None
        return hidden_states + self.state[0]


def remembering(kind: type[nn.Module] = Remembering) -> nn.Module:
    model: Any = llama()
    for k, layer in enumerate(model.model.layers):
        model.model.layers[k] = kind(layer)
    return model


def recurrent_gemma() -> nn.Module:
    model: Any = build(find("causal-lm/recurrent_gemma")[0])
    model.config.use_cache = True
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dynamic": lambda: rotated("dynamic"),
    "longrope": lambda: rotated("longrope"),
    "own cache": phi3,
    "guidance": llama,
    "quantized": llama,
    "state": remembering,
    "later state": lambda: remembering(RememberingLater),
    "class state": lambda: remembering(RememberingOfClass),
    "pair": lambda: remembering(RememberingPair),
    "recurrent": recurrent_gemma,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "guidance": {"guidance_scale": 2.0, "negative_prompt_ids": torch.arange(3, 24).view(3, 7)},
    "quantized": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
}


def together(kind: str) -> tuple[bool, str]:
    """Whether prompts long enough for microbatches give the scores of one process, and the error if the user asks for
    two microbatches."""
    model, options = MODELS[kind](), SCORES | OPTIONS.get(kind, {})
    expected = generated(copy.deepcopy(model).eval(), "llama", **options)
    split = boosted(model, "llama", num_microbatches=1)
    with mock.patch.object(forward, "TOKENS", 7):
        same = is_same(generated(split, "llama", **options), expected, tolerance=1e-4)
    with pytest.raises(UsageError) as caught:
        generated(split, "llama", num_microbatches=2, **options)
    return same, str(caught.value)


REASONS = {
    "dynamic": "model.rotary_emb (LlamaRotaryEmbedding) computes its frequencies from the longest sample",
    "longrope": "model.rotary_emb (LlamaRotaryEmbedding) computes its frequencies from the longest sample",
    "own cache": "Phi3ForCausalLM creates a cache in its forward",
    "guidance": "LlamaForCausalLM creates a cache in its forward",
    "quantized": "QuantizedCache quantizes all samples together",
    "state": "model.layers.0 (Remembering) may keep states of samples in its attribute state",
    "later state": "model.layers.0 (RememberingLater) may keep states of samples in its attribute state",
    "class state": "model.layers.0 (RememberingOfClass) may keep states of samples in its attribute state",
    "pair": "model.layers.0 (RememberingPair) may keep states of samples in its attribute state",
    "recurrent": "(RecurrentGemmaRecurrentBlock) may keep states of samples in its attribute conv1d_state",
}


@pytest.mark.turns
@pytest.mark.parametrize("kind", MODELS)
def test_samples_that_depend_on_each_other_are_not_split(pool: Pool, kind: str) -> None:
    """Prompts of 512 tokens and more, in microbatches: short ones were rotated with other frequencies than their keys,
    fp8 keys were scaled as those of the first microbatch, and recurrent layers forgot prompts, without an error."""
    for same, message in pool.run(together, 2, kind):
        assert same and REASONS[kind] in message and "call model.generate(..., num_microbatches=1)" in message


class Shifted(LlamaModel):
    """Keeps what the positions of later tokens are ahead of their number, one row a sample, as Qwen3-VL did."""

    deltas: Any

    def forward(
        self, input_ids: Any = None, position_ids: Any = None, past_key_values: Any = None, **options: Any
    ) -> Any:
        known = 0 if past_key_values is None else past_key_values.get_seq_length()
        positions = known + torch.arange(input_ids.shape[1])[None]
        if known:
            positions = positions + self.deltas.repeat_interleave(len(input_ids) // len(self.deltas), dim=0)
        else:
            self.deltas = input_ids.sum(1, keepdim=True) % 7
        return super().forward(input_ids, position_ids=positions, past_key_values=past_key_values, **options)


def of_shifted(num_microbatches: int | None) -> bool:
    """Whether a model with shifts generates as one process does."""
    model: Any = llama()
    model.model.__class__, model.model.deltas = Shifted, None
    expected = generated(copy.deepcopy(model).eval(), "llama", **SCORES)
    split = boosted(model, "llama", num_microbatches=1)
    with mock.patch.object(forward, "TOKENS", 7):
        made = generated(split, "llama", num_microbatches=num_microbatches, **SCORES)
    return is_same(made, expected, tolerance=1e-4)


@pytest.mark.parametrize("num_microbatches", [None, 2])
def test_what_the_model_itself_keeps_of_its_samples_is_joined(pool: Pool, num_microbatches: int | None) -> None:
    """Each microbatch of the prompts replaced the state of the one before, and all samples continued with the last:
    wrong tokens, without an error."""
    assert pool.run(of_shifted, 2, num_microbatches) == [True, True]
