"""Stage: one part of the model, run forward and backward on one microbatch at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipeshard.errors import UsageError
from pipeshard.model.batch import Batch
from pipeshard.model.replay import Replay, Route
from pipeshard.model.taint import Value
from pipeshard.model.tracer import Criterion, loss_of


@dataclass(frozen=True)
class Microbatch:
    """One microbatch with its route through a stage; `weight` is its loss's share in that of the batch."""

    batch: Batch
    route: Route
    deltas: tuple[int, ...]
    weight: float

    def shape(self, value: Value) -> tuple[tuple[int, ...], torch.dtype]:
        spec = self.route.flow.spec(value)
        return spec.at(self.deltas), spec.dtype


class Stage:
    """Runs the model as stage `index` does: `forward` and `backward` of microbatch i, in any legal order.

    The last stage computes the loss: `loss` sums it over the microbatches, and `outputs` keeps the model's outputs if
    they are wanted.
    """

    def __init__(self, model: nn.Module, replay: Replay, index: int, is_last: bool) -> None:
        self.model, self.replay, self.index, self.is_last = model, replay, index, is_last

    def begin(
        self, microbatches: Sequence[Microbatch], criterion: Criterion | None, train: bool, keep_outputs: bool
    ) -> None:
        self.microbatches, self.criterion, self.train, self.keep_outputs = microbatches, criterion, train, keep_outputs
        self.loss: Tensor | None = None
        self.outputs: list[Any] = []
        self.alive: dict[int, tuple[dict[Value, Tensor], dict[Value, Tensor], Tensor | None]] = {}

    def entering(self, i: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what `forward(i, ...)` takes."""
        microbatch = self.microbatches[i]
        return [microbatch.shape(value) for value in microbatch.route.enters.values]

    def returning(self, i: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what `backward(i, ...)` takes."""
        microbatch = self.microbatches[i]
        return [microbatch.shape(value) for value in microbatch.route.leaves.gradients]

    def forward(self, i: int, entering: Sequence[Tensor]) -> list[Tensor]:
        """Run microbatch i on what the previous stage sent; returns what the next stage is to get."""
        microbatch = self.microbatches[i]
        route = microbatch.route
        received = dict(zip(route.enters.values, entering, strict=True))
        if self.train:
            for value, tensor in received.items():
                tensor.requires_grad_(route.flow.spec(value).requires_grad)
        self.replay.randomness.microbatch(i)
        output, made = self.replay.run(route, microbatch.deltas, received, lambda: microbatch.batch.call(self.model))
        loss = self._loss(output, microbatch) if self.is_last else None
        if self.train:
            self.alive[i] = received, made, loss
        return [made[value].detach().contiguous() for value in route.leaves.values]

    def backward(self, i: int, returning: Sequence[Tensor]) -> list[Tensor]:
        """Back-propagate the gradients of what `forward(i)` returned; returns those of what it took."""
        received, made, loss = self.alive.pop(i)
        microbatch = self.microbatches[i]
        if self.is_last:
            if loss is not None and microbatch.weight != 0:  # no label: no gradient, rather than 0/0
                loss.backward(torch.full_like(loss, microbatch.weight))
        else:
            pairs = zip((made[value] for value in microbatch.route.leaves.gradients), returning, strict=True)
            needed = [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]
            if needed:
                torch.autograd.backward([tensor for tensor, _ in needed], [gradient for _, gradient in needed])
        entered = [received[value] for value in microbatch.route.enters.gradients]
        return [torch.zeros_like(t) if t.grad is None else t.grad.contiguous() for t in entered]

    def _loss(self, output: Any, microbatch: Microbatch) -> Tensor | None:
        if self.keep_outputs:
            self.outputs.append(tree_map_only(Tensor, lambda t: t.detach(), output))
        loss = loss_of(output, self.criterion, microbatch.batch)
        if loss is None:
            if self.train:
                raise UsageError("there is no loss to train on: give the batch labels, or pass a criterion")
            return None
        share = loss.detach() * microbatch.weight if microbatch.weight != 0 else torch.zeros_like(loss)
        self.loss = share if self.loss is None else self.loss + share
        return loss
