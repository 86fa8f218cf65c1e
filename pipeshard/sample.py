"""Sample: the batch that a model is traced with."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from pipeshard.collate import first_samples
from pipeshard.model.batch import Batch
from pipeshard.model.made_up import made_up
from pipeshard.model.media import read_batch
from pipeshard.model.rows import BatchDims, refuse_unknown


def find_sample(
    model: nn.Module,
    given: Any,
    dataloader: DataLoader[Any] | None,
    batch_dims: BatchDims,
    size: int,
    device: torch.device,
) -> Batch:
    """What is `given` (a batch, or a function `fn(size, device)` that makes one), the dataset's first samples, or else
    one made up for the model.

    Raises BatchError for what cannot be read or made up, ConfigurationError for declared leaves that it has not.
    """
    data = given(size, device) if callable(given) and not isinstance(given, Mapping) else given
    if data is None and dataloader is not None:
        data = first_samples(dataloader)
    batch = read_batch(model, made_up(model) if data is None else data, batch_dims)
    if data is not None:
        refuse_unknown(batch.paths, batch_dims)
    return batch
