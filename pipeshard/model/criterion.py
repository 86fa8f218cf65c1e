"""Criterion: what makes a loss of a model's output."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pipeshard.errors import ConfigurationError
from pipeshard.model.batch import Batch

Criterion = Callable[[Any, Any], Tensor]


def loss_of(output: Any, criterion: Criterion | None, batch: Batch) -> Tensor | None:
    """The criterion's scalar, or without a criterion the output's own loss, if it has one.

    A criterion of the model's own (`of_batch`) gets the batch as it came, and says None of one without labels.
    """
    if criterion is None:
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        return loss if isinstance(loss, Tensor) else None
    if (of_batch := getattr(criterion, "of_batch", None)) is None:
        loss = criterion(output, batch.for_criterion())
    elif (loss := of_batch(output, batch.data)) is None:
        return None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else None
        raise ConfigurationError(
            f"the criterion returned {shape or repr(loss)}, not a scalar tensor: criterion(outputs, inputs) is "
            f"called with the model's output ({type(output).__name__}) and the microbatch, for example "
            "lambda outputs, inputs: outputs.loss (which is None when the batch has no labels)"
        )
    return loss
