"""Finite: stops where what a stage computes is no finite number, before it spreads."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pipeshard.distributed.collectives import local, local_grad
from pipeshard.errors import NonFiniteError


class Finite:
    """Looks at what the stage `stage`, which has `parameters` by name, makes of each microbatch.

    Every method raises NonFiniteError that names the stage, the microbatch, and a parameter where one is to blame.
    """

    def __init__(self, stage: int, parameters: Mapping[str, nn.Parameter], gradients: bool = True) -> None:
        self.stage, self.parameters, self.gradients = stage, parameters, gradients

    def forward(self, i: int, units: Sequence[str], sent: Sequence[Tensor], loss: Tensor | None) -> None:
        """What microbatch i has become: what each of `units` gives to the next stages, or the loss."""
        for unit, tensor in zip(units, sent, strict=True):
            if not _is_finite(tensor):
                self._stop(f"what {unit} gives for microbatch {i} is not finite")
        if loss is not None and not _is_finite(loss):
            self._stop(f"the loss of microbatch {i} is {float(loss.detach()):g}")

    def backward(self, i: int, sent: Sequence[Tensor] = ()) -> None:
        """The gradients that have been added up with microbatch i, and those that the previous stage is to get."""
        self._gradients(f"after the backward pass of microbatch {i}")
        if self.gradients and not all(map(_is_finite, sent)):
            self._stop(f"the gradient that goes back to the stage before is not finite for microbatch {i}")

    def before_update(self) -> None:
        """The gradients, summed over all that hold a parameter."""
        self._gradients("when the optimizer is to use it")

    def after_update(self) -> None:
        """The values that an optimizer has made, before they are saved or used."""
        if (broken := self._broken()) is not None:
            self._stop(f"the optimizer has made {broken} what is not finite")

    def _gradients(self, when: str) -> None:
        if not self.gradients:
            return
        named = [(name, g) for name, p in self.parameters.items() if (g := local_grad(p)) is not None]
        if named and not bool(torch.isfinite(torch.stack(torch._foreach_norm([g for _, g in named]))).all()):
            broken = [name for name, g in named if not _is_finite(g)]  # none, where a norm alone overflows
            if broken:  # the last one was made first
                self._stop(f"the gradient of {broken[-1]} is not finite {when}")

    def _broken(self) -> str | None:
        return next((name for name, p in self.parameters.items() if not _is_finite(local(p.detach()))), None)

    def _stop(self, what: str) -> None:
        broken = self._broken()
        why = f"its parameter {broken} is not finite itself" if broken else "its parameters are: look at the batch"
        raise NonFiniteError(
            f"on stage {self.stage} {what}; {why}. Go on from the last training state, with a smaller learning rate, "
            "max_norm, or without this batch"
        )


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
