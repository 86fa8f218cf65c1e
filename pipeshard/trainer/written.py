"""Written: whether a loop has written to parameters or gradients between the batches of a window."""

from collections.abc import Iterable

from torch import Tensor

from pipeshard.graph.writes import Noted, is_written, note


class Written:
    """Detects whether parameters or gradients were modified in place, or gradients were replaced, since this object was
    created."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._of = [(parameter, note(parameter), *_noted(parameter.grad)) for parameter in parameters]

    @property
    def is_changed(self) -> bool:
        return any(
            parameter.grad is not gradient
            or is_written(parameter, noted)
            or (gradient is not None and is_written(gradient, of_gradient))
            for parameter, noted, gradient, of_gradient in self._of
        )


def _noted(gradient: Tensor | None) -> tuple[Tensor | None, Noted]:
    return gradient, Noted(0, 0) if gradient is None else note(gradient)
