"""NaN checks: stop where a stage first makes a NaN or an infinity, and say which microbatch and parameter.

A NaN in one stage's gradient is in all parameters after the next step, on every rank; torch's anomaly mode finds its
operator, but is slow and knows neither stages nor microbatches.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pipeshard.distributed.collectives import local, local_grad
from pipeshard.errors import NonFiniteError


class Finite:
    """Checks what stage `stage`, which holds `parameters` by name, computes; `gradients` too, unless a loss scale makes
    them overflow now and then.

    Every method raises NonFiniteError, with the stage, the microbatch, and a parameter where one is to blame.
    """

    def __init__(self, stage: int, parameters: Mapping[str, nn.Parameter], gradients: bool = True) -> None:
        self.stage, self.parameters, self.gradients = stage, parameters, gradients

    def forward(self, i: int, units: Sequence[str], sent: Sequence[Tensor], loss: Tensor | None) -> None:
        """Check what microbatch i has become: the result of each of `units` for the next stages, or the loss."""
        for unit, tensor in zip(units, sent, strict=True):
            if not _is_finite(tensor):
                self._stop(f"the result of {unit} for microbatch {i} is not finite")
        if loss is not None and not _is_finite(loss):
            self._stop(f"the loss of microbatch {i} is {float(loss.detach()):g}")

    def backward(self, i: int, sent: Sequence[Tensor] = ()) -> None:
        """Check the gradients that have accumulated with microbatch i, and those for the previous stage."""
        self._gradients(f"after the backward pass of microbatch {i}")
        if self.gradients and not all(map(_is_finite, sent)):
            self._stop(f"the gradient for the previous stage is not finite for microbatch {i}")

    def before_update(self) -> None:
        """Check the gradients, summed over all ranks that hold a parameter."""
        self._gradients("when the optimizer is to use it")

    def after_update(self) -> None:
        """Check the parameters that an optimizer has updated, before they are saved or used."""
        if (broken := self._broken()) is not None:
            self._stop(f"{broken} is not finite after the optimizer's step")

    def _gradients(self, when: str) -> None:
        named = {name: grad for name, p in self.parameters.items() if (grad := local_grad(p)) is not None}
        if not (self.gradients and named):
            return
        if not bool(torch.isfinite(torch.stack(torch._foreach_norm(list(named.values())))).all()):
            broken = [name for name, grad in named.items() if not _is_finite(grad)]
            if broken:  # and not a norm alone that overflows; backward computes the last one first
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
