"""Inputs: a batch for a tiny model, by task."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.tiny import FIRST_TEXT, SPECIAL, VOCABULARY

ROWS, LENGTH = 4, 12


def make_batch(task: str, model: nn.Module, rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs with uneven labels."""
    generator = torch.Generator().manual_seed(seed)
    return _TASKS[task](model, rows, length, generator)


def text(rows: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(FIRST_TEXT, VOCABULARY, (rows, length), generator=generator)


def uneven(labels: Tensor) -> Tensor:
    """Row k keeps another number of labels than row k + 1."""
    rows, length = labels.shape
    keep = torch.tensor([length - (3 * row) % (length - 2) for row in range(rows)])
    return labels.masked_fill(torch.arange(length) >= keep[:, None], -100)


def _causal(model: nn.Module, rows: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    ids = text(rows, length, generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": uneven(ids)}


def _classes(model: nn.Module, rows: int, generator: torch.Generator) -> Tensor:
    config: Any = model.config
    return torch.randint(0, config.num_labels, (rows,), generator=generator)


def _sequence_classification(model: nn.Module, rows: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    ids = text(rows, length, generator)
    ids[:, -1] = SPECIAL["eos_token_id"]  # which encoder-decoders classify by
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": _classes(model, rows, generator)}


def _seq2seq(model: nn.Module, rows: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    ids = text(rows, length, generator)
    labels = uneven(text(rows, length - 3, generator))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _images(model: nn.Module, rows: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    config: Any = model.config
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 32)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", 3)
    pixels = torch.randn(rows, channels, height, width, generator=generator)
    return {"pixel_values": pixels, "labels": _classes(model, rows, generator)}


_TASKS = {
    "causal-lm": _causal,
    "masked-lm": _causal,
    "sequence-classification": _sequence_classification,
    "seq2seq-lm": _seq2seq,
    "image-classification": _images,
    "image-text-to-text": _causal,
    "speech-seq2seq": _seq2seq,
}
