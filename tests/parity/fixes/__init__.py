"""Fixes: what an architecture's tiny model or batch needs in addition to the general rules.

Each file here defines CONFIGS, config fields by model type (a dict as a value is for the sub-config of that name), and
BATCHES, functions (model, batch, generator) -> batch by model type. A key may also be "task/model_type", which takes
precedence over the model type alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.entries import Entry
from tests.parity.fixes import multimodal, multimodal_lz, old, seq2seq, text, vision

FixBatch = Callable[[nn.Module, dict[str, Tensor], torch.Generator], dict[str, Tensor]]

_FILES: tuple[Any, ...] = (text, seq2seq, vision, multimodal, multimodal_lz, old)
CONFIGS: Mapping[str, dict[str, Any]] = {key: fields for file in _FILES for key, fields in file.CONFIGS.items()}
BATCHES: Mapping[str, FixBatch] = {key: fix for file in _FILES for key, fix in file.BATCHES.items()}
UNTRAINABLE: Mapping[str, str] = {
    key: reason for file in _FILES for key, reason in getattr(file, "UNTRAINABLE", {}).items()
}


def config_fields(entry: Entry) -> dict[str, Any]:
    """Fields that win over the general rules."""
    return dict(CONFIGS.get(str(entry), CONFIGS.get(entry.model_type, {})))


def fix_batch(entry: Entry, model: nn.Module, batch: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The batch as this architecture takes it."""
    fix = BATCHES.get(str(entry), BATCHES.get(entry.model_type))
    return fix(model, batch, torch.Generator().manual_seed(seed)) if fix else batch
