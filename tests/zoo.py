"""Zoo: tiny random models of the main architectures, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 61
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def _with(sizes: dict[str, Any], layers: int) -> dict[str, Any]:
    return {**sizes, "num_hidden_layers": layers}


def _gpt2(layers: int) -> nn.Module:
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    special = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=layers, n_head=4, n_positions=64, **dropout, **special
    )
    return transformers.GPT2LMHeadModel(config)


def _t5(layers: int) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": layers - 1, "num_heads": 4}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, tie_word_embeddings=True)
    return transformers.T5ForConditionalGeneration(config)


def _vit(layers: int) -> nn.Module:
    config = transformers.ViTConfig(**_with(ENCODER, layers), image_size=16, patch_size=4, num_labels=5)
    return transformers.ViTForImageClassification(config)


def _bert(layers: int) -> nn.Module:
    config = transformers.BertConfig(**_with(ENCODER, layers), vocab_size=VOCABULARY, max_position_embeddings=64)
    return transformers.BertForMaskedLM(config)


def _gemma2(layers: int) -> nn.Module:
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**_with(TINY, layers), head_dim=8, sliding_window=4)
    )


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "gpt2": _gpt2,
    "llama-tied": lambda layers: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**_with(TINY, layers), tie_word_embeddings=True)
    ),
    "llama": lambda layers: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**_with(TINY, layers), tie_word_embeddings=False)
    ),
    "granite": lambda layers: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**_with(TINY, layers), embedding_multiplier=12.0, tie_word_embeddings=True)
    ),
    "bert": _bert,
    "t5": _t5,
    "gemma2": _gemma2,
    "mixtral": lambda layers: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**_with(TINY, layers), num_local_experts=4, num_experts_per_tok=2)
    ),
    "vit": _vit,
}


# Models for some tests only. Qwen3 normalizes the queries and keys of each head.
EXTRA: dict[str, Callable[[int], nn.Module]] = {
    "qwen3": lambda layers: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**_with(TINY, layers), head_dim=8, tie_word_embeddings=True)
    )
}


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, layers: int = 4) -> nn.Module:
    """A model of the zoo in training mode, without dropout. Its weights depend only on the arguments."""
    torch.manual_seed(seed)
    model: Any = {**MODELS, **EXTRA}[name](layers).to(dtype).train()
    if name == "t5":
        model.config.use_cache = False
    return model


def batch(name: str, rows: int = 8, length: int = 12, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A batch. For language models, each row has another number of labels; row 2 has none."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        pixels = torch.randn(rows, 3, 16, 16, generator=generator, dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.randint(0, 5, (rows,), generator=generator)}
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    targets = torch.randint(3, VOCABULARY, (rows, length - 3), generator=generator) if name == "t5" else ids.clone()
    return {"input_ids": ids, "attention_mask": mask, "labels": uneven(targets)}


def packed(*lengths: int) -> Any:
    """One row of documents of these lengths, with their boundaries."""
    flatten = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    return flatten([{"input_ids": list(range(1, length + 1))} for length in lengths])


def part(data: Any, replica: int, rows: list[int]) -> Any:
    """The `rows[replica]` samples of one replica."""
    first = sum(rows[:replica])
    return {name: value[first : first + rows[replica]] for name, value in data.items()}


def uneven(labels: Tensor) -> Tensor:
    rows, length = labels.shape
    keep = torch.tensor([0 if row == 2 else 2 + (5 * row) % (length - 1) for row in range(rows)])
    return labels.masked_fill(torch.arange(length) >= keep[:, None], -100)


def left_padded(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same batch, in which row k begins with k % 4 padding tokens."""
    ids, mask, labels = data["input_ids"].clone(), data["attention_mask"].clone(), data["labels"].clone()
    for row in range(len(ids)):
        pad = row % 4
        ids[row, :pad], mask[row, :pad] = 0, 0
        if labels.shape == ids.shape:
            labels[row, :pad] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
