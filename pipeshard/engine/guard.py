"""Guard: an object installed in torch while a boosted model of this process is alive."""

import weakref
from abc import ABC, abstractmethod

from pipeshard.engine.clipping import ModelGradients


class Guard(ABC):
    """Identifies the boosted models of this process by their gradients, and is installed as long as there is one."""

    def __init__(self) -> None:
        self._models: weakref.WeakSet[ModelGradients] = weakref.WeakSet()
        self.is_installed = False

    def watch(self, gradients: ModelGradients) -> None:
        """Guard this model from now on."""
        self._models.add(gradients)
        weakref.finalize(gradients, self._model_ended).atexit = False
        if not self.is_installed:
            self.is_installed = True
            self.install()

    def _model_ended(self) -> None:
        if self.is_installed and not list(self._models):  # its length still counts the one that has just ended
            self.is_installed = False
            self.remove()

    @abstractmethod
    def install(self) -> None:
        """Install the guard."""

    @abstractmethod
    def remove(self) -> None:
        """Restore torch."""
