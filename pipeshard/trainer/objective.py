"""Objective: the loss that a Trainer's own compute_loss makes of what the pipeline has computed, as a criterion."""

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from pipeshard.errors import UsageError

ITEMS = "num_items_in_batch"


class ComputesLoss(Protocol):
    model: nn.Module

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any: ...


class Objective:
    """Calls `trainer.compute_loss(model, inputs)` with an Answer in the place of the model. `num_items` is what all
    batches of a window together are to be divided by."""

    def __init__(self, trainer: ComputesLoss) -> None:
        self._trainer = weakref.ref(trainer)  # nothing of which the loss is traced through
        self.num_items: Any = None

    def __call__(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        trainer = self._trainer()
        assert trainer is not None
        answer = Answer(trainer.model, outputs, inputs)
        given = {name: value for name, value in inputs.items() if name != ITEMS}
        loss = trainer.compute_loss(answer, given, num_items_in_batch=self.num_items)
        if not isinstance(loss, Tensor):
            raise UsageError(f"compute_loss of {type(trainer).__name__} returned a {type(loss).__name__}, not a tensor")
        if not answer.was_called:
            raise UsageError(
                f"compute_loss of {type(trainer).__name__} has not called the model that it was given: let it call "
                "model(**inputs), and make the loss of what that returns"
            )
        return loss


class Answer:
    """What the pipeline has computed of a batch, as a model that is called with it."""

    def __init__(self, model: nn.Module, outputs: Any, inputs: Mapping[str, Any]) -> None:
        self.module, self.outputs, self.inputs = model, outputs, inputs
        self.was_called = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        other = [name for name in inputs if name != ITEMS and inputs[name] is not self.inputs.get(name)]
        if args or other:
            what = f"{', '.join(other)}, which the batch has not, or has otherwise" if other else "inputs by place"
            raise UsageError(
                f"compute_loss calls the model with {what}; the pipeline runs it on the batch as it is, before "
                "the loss is made: let the data collator put these into the batch, or set them in model.config"
            )
        if self.was_called:
            raise UsageError("compute_loss calls the model twice, but a pipeline runs it once on each batch")
        self.was_called = True
        return self.outputs
