"""Pipeline optimizer: the user's optimizer over what a stage holds, with the norm of the whole model."""

from typing import Any

import torch
from colossalai.interface import OptimizerWrapper
from torch import Tensor
from torch.optim import Optimizer

from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.runtime.gradients import TieSync, clip_by_norm, grad_norm


class PipelineOptimizer(OptimizerWrapper):
    """Keeps the optimizer object itself, which LR schedulers hold, and narrows its groups to the held parameters.

    With `max_norm > 0` every `step` first clips the gradients of the whole model to that L2 norm.
    """

    def __init__(
        self, optim: Optimizer, held: dict[torch.nn.Parameter, str], ties: TieSync, group: Any, max_norm: float
    ) -> None:
        super().__init__(optim)
        self.names = held
        for param_group in optim.param_groups:  # a group may become empty; schedulers count on its place
            param_group["params"] = [p for p in param_group["params"] if p in held]
        for parameter in [p for p in optim.state if p not in held]:
            del optim.state[parameter]
        self.ties, self.group, self.max_norm = ties, group, max_norm
        self._norm: Tensor | None = None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self._norm = None
        if self.max_norm > 0:
            self.clip_grad_by_norm(self.max_norm)
        return self.optim.step(*args, **kwargs)

    def forget_norm(self) -> None:
        """Gradients are about to change: the norm that was clipped by is theirs no more."""
        self._norm = None

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.ties.reset()
        super().zero_grad(*args, **kwargs)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Clip to the norm over all stages, which it returns. Every rank of the pipeline has to call it."""
        self._norm = grad_norm(self.parameters, self.ties.ties, self.group, norm_type)
        if error_if_nonfinite and not torch.isfinite(self._norm):
            raise ConfigurationError(f"the gradient norm is {self._norm.item()}, so gradients cannot be clipped")
        clip_by_norm(self.parameters, self._norm, max_norm)
        return self._norm

    def get_grad_norm(self, norm_type: float = 2.0, **kwargs: Any) -> float:
        """The norm over all stages that the last `step` clipped by (as it was before), else that of the gradients now.

        In the latter case every rank of the pipeline has to call it.
        """
        if self._norm is None:
            return float(grad_norm(self.parameters, self.ties.ties, self.group, norm_type))
        return float(self._norm)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        raise UsageError(
            "the backward pass of a pipeline is part of booster.execute_pipeline(data_iter, model, criterion, "
            "optimizer), which leaves the gradients in place: drop booster.backward(...) and loss.backward()"
        )
