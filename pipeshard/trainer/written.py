"""Written: detects writes to tensors and their gradients, such as writes to parameters between batches of a window."""

from collections.abc import Iterable

from torch import Tensor

from pipeshard.graph.writes import is_written, note


class Written:
    """Detects changes to tensors (parameters, or the tensors of a batch) since this object was created: writes to the
    tensors or to their gradients, and replaced gradients."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        self._noted = [(tensor, note(tensor)) for pair in self._gradients for tensor in pair if tensor is not None]

    @property
    def is_changed(self) -> bool:
        are_replaced = (parameter.grad is not gradient for parameter, gradient in self._gradients)
        return any(are_replaced) or any(is_written(tensor, noted) for tensor, noted in self._noted)
