"""Families: the main architectures as tiny models with their config fields, and batches of every layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from pipeshard.graph.units import find_units
from tests.parity.build import build
from tests.parity.entries import Entry, find
from tests.parity.fixes import CONFIGS, config_fields

DECODERS = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gpt_neox", "opt"),
    *("falcon", "bloom", "olmo2", "cohere", "starcoder2", "stablelm", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"),
)
ENCODER_DECODERS = ("t5", "bart")
FAMILIES = (*DECODERS, *ENCODER_DECODERS)
ALWAYS_TIED = ("t5",)  # the config class sets tie_word_embeddings itself
# Mixtures of experts with an auxiliary loss, and the config fields that add this loss with a weight of 0.5.
_HALF = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
AUXILIARY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v4", "ernie4_5_moe", "flex_olmo", "flint", "gpt_oss", "granitemoe"), _HALF),
    **dict.fromkeys(("granitemoe_swa", "granitemoehybrid", "granitemoeshared", "jamba", "laguna", "mellum"), _HALF),
    **dict.fromkeys(("minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral", "olmoe", "phimoe"), _HALF),
    **dict.fromkeys(("qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen4_exp_text"), _HALF),
    "dbrx": {"output_router_logits": True, "ffn_config": {"moe_top_k": 2, "moe_loss_weight": 0.5}},
    "doge": {**_HALF, "is_moe": True},
    "jetmoe": {"output_router_logits": True, "aux_loss_coef": 0.5},
}
CALLS = {"gpt2": 8, "opt": 8, "bloom": 8, "t5": 13, "bart": 15}  # unit calls per forward; all other families make 7
STARTS = (5, 9, 0, 3)  # where the second sequence of each packed row starts; row 2 has only one


def entry_of(name: str) -> Entry:
    """The entry of a family's language model."""
    return (find(f"seq2seq-lm/{name}") or find(f"causal-lm/{name}"))[0]


def build_with(entry: Entry, **fields: Any) -> nn.Module:
    """The entry's model with these fields of its config."""
    with mock.patch.dict(CONFIGS, {str(entry): {**config_fields(entry), **fields}}):
        return build(entry)


def is_tied(model: Any) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def takes_positions(model: nn.Module) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def left_padded(data: dict[str, Tensor]) -> dict[str, Tensor]:
    return _without(data, lambda places, length, pad: places < pad)


def right_padded(data: dict[str, Tensor]) -> dict[str, Tensor]:
    return _without(data, lambda places, length, pad: places >= length - pad)


def packed(data: dict[str, Tensor], shift: int = 0) -> dict[str, Tensor]:
    """Two sequences per row (row 2 has one). The model derives its mask from `position_ids`, which restart at 0."""
    ids = data["input_ids"]
    starts = torch.tensor([start + shift if start else 0 for start in STARTS])[:, None]
    places = torch.arange(ids.shape[1]).expand_as(ids)
    labels = data["labels"].masked_fill(places == starts, -100)  # no token is predicted from another sequence
    return {"input_ids": ids, "position_ids": torch.where(places < starts, places, places - starts), "labels": labels}


def packed_with_mask(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """Like `packed`, with a (b, 1, s, s) mask that is added to the attention scores."""
    batch = packed(data)
    length = batch["input_ids"].shape[1]
    sequence = (batch["position_ids"] == 0).cumsum(1)
    seen = (sequence[:, :, None] == sequence[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    return {**batch, "attention_mask": torch.zeros(seen.shape).masked_fill(~seen, -1e9)[:, None]}


def _without(data: dict[str, Tensor], padding: Callable[[Tensor, int, Tensor], Tensor]) -> dict[str, Tensor]:
    """Replace k tokens of row k with padding, at the positions that `padding(positions, length, k)` selects."""
    rows, length = data["input_ids"].shape
    pad = padding(torch.arange(length), length, torch.arange(rows)[:, None])
    labels = data["labels"].masked_fill(pad, -100) if data["labels"].shape == pad.shape else data["labels"]
    mask = data["attention_mask"].masked_fill(pad, 0)
    return {"input_ids": data["input_ids"].masked_fill(pad, 0), "attention_mask": mask, "labels": labels}


def layouts_of(model: nn.Module, data: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The batch in each layout that the model supports, by the layout's name."""
    padded = {"left padding": left_padded(data), "right padding": right_padded(data)}
    if not takes_positions(model):
        return padded
    return {
        **padded,
        "packed": packed(data),
        "packed elsewhere": packed(data, shift=1),
        "4D mask": packed_with_mask(data),
    }


def layers_of(model: nn.Module) -> list[str]:
    """The names of the model's layers."""
    return [name for name in find_units(model) if name.rpartition(".")[2].isdigit()]
