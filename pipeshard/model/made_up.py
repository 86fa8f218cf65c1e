"""Made-up batches: zeros for what a model's signature and config say that it takes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.errors import BatchError
from pipeshard.model.names import without_adapters


def made_up(model: nn.Module, rows: int = 2, length: int = 8) -> dict[str, Tensor]:
    """A batch of `rows` samples, of `length` tokens each where the model takes tokens.

    Raises BatchError for a model that takes something else than tokens or images of one size.
    """
    main: Any = getattr(model, "main_input_name", None)
    config: Any = getattr(model, "config", None)
    if main == "input_ids":
        ids = torch.zeros(rows, length, dtype=torch.int64)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        if type(without_adapters(model)[1]).__name__.endswith("SequenceClassification"):
            batch["labels"] = ids[:, 0]
        return batch
    if main == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = size if isinstance(size, Sequence) else (size, size)
        pixels = torch.zeros(rows, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": pixels, "labels": torch.zeros(rows, dtype=torch.int64)}
    raise BatchError(
        f"what {type(model).__name__} takes (main input {main!r}) cannot be made up: pass a batch "
        "(PipelinePlugin(dry_run_input=...), pipeshard.plan(model, batch, ...)), or a dataloader over an indexable "
        "dataset to booster.boost"
    )
