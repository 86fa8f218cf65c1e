"""Untouched: after a proof, restores the objects that the user's code can reach.

A proof runs copies, but these copies share some objects with the user's code: the globals that functions read, and
objects without model state, such as files. `untouched` therefore restores the Python state, the values and gradients of
tensors outside the model, and the gradients of parameters.
"""

import contextlib
from collections.abc import Iterator

from torch import Tensor

from pipeshard.graph.preserve import Writes
from pipeshard.graph.snapshot import Snapshot
from pipeshard.graph.storage import storage_of
from pipeshard.verify.reference import Copies


@contextlib.contextmanager
def untouched(given: Copies) -> Iterator[None]:
    """Context manager that undoes changes to objects reachable from the model, the criterion and the optimizer."""
    snapshot = Snapshot({"": given.model, "the criterion": given.criterion, "the optimizer": given.optimizer})
    copied = {id(tensor) for tensor in (*given.model.parameters(), *given.model.buffers())}
    shared = [tensor for *_, tensor, _ in snapshot.tensors if id(tensor) not in copied]
    leaves = [tensor for tensor in shared if tensor.is_leaf]
    gradients = [_Gradient(tensor) for tensor in (*leaves, *given.model.parameters())]
    writes = Writes({storage_of(tensor) for tensor in shared})
    try:
        with writes if shared else contextlib.nullcontext():
            yield
    finally:
        for gradient in gradients:
            gradient.restore()
        writes.undo()
        snapshot.restore()


class _Gradient:
    """The gradient and requires_grad of a leaf tensor, to be restored."""

    def __init__(self, leaf: Tensor) -> None:
        self.leaf, self.object = leaf, leaf.grad
        self.requires_grad = leaf.requires_grad
        self.values = None if leaf.grad is None else leaf.grad.clone()

    def restore(self) -> None:
        self.leaf.grad = self.object
        if self.object is not None and self.values is not None:
            self.object.detach().copy_(self.values)
        if self.leaf.requires_grad != self.requires_grad:
            self.leaf.requires_grad_(self.requires_grad)
