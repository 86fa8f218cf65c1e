"""Guard: patches torch functions while this process has a boosted model."""

import threading
import weakref
from abc import ABC, abstractmethod

from pipeshard.engine.clipping import ModelGradients


class Guard(ABC):
    """Base class of guards. A guard tracks the boosted models of this process by their ModelGradients. The guard is
    installed while any of these models is alive."""

    def __init__(self) -> None:
        self._models: weakref.WeakSet[ModelGradients] = weakref.WeakSet()
        self.is_installed = False
        self._lock = threading.RLock()  # a model may be finalized in any thread, even inside `watch`

    def watch(self, gradients: ModelGradients) -> None:
        """Start guarding the model that has these gradients."""
        weakref.finalize(gradients, self._model_ended).atexit = False
        with self._lock:
            self._models.add(gradients)
            if not self.is_installed:
                self.is_installed = True
                self.install()

    def _model_ended(self) -> None:
        with self._lock:
            alive = list(self._models)  # len() would still count the model that is being finalized
            if self.is_installed and not alive:
                self.is_installed = False
                self.remove()

    @abstractmethod
    def install(self) -> None:
        """Patch torch's functions."""

    @abstractmethod
    def remove(self) -> None:
        """Restore torch's functions."""
