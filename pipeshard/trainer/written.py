"""Written: whether a loop has written to parameters or gradients between the batches of a window."""

from collections.abc import Iterable

from torch import Tensor


class Written:
    """Detects whether parameters or gradients were modified in place, or gradients were replaced, since this object was
    created."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._of = [(parameter, *self._state(parameter)) for parameter in parameters]

    @property
    def is_changed(self) -> bool:
        return any(self._differs(*before) for before in self._of)

    def _differs(self, parameter: Tensor, version: int, gradient: Tensor | None, of_gradient: int) -> bool:
        now = self._state(parameter)
        return now[0] != version or now[1] is not gradient or now[2] != of_gradient

    @staticmethod
    def _state(parameter: Tensor) -> tuple[int, Tensor | None, int]:
        gradient = parameter.grad
        return parameter._version, gradient, 0 if gradient is None else gradient._version
