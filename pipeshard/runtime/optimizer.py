"""Pipeline optimizer: the user's optimizer over what a stage holds, with the norm of the whole model."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from colossalai.interface import OptimizerWrapper
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.grid import Grid
from pipeshard.runtime.agreement import together_in
from pipeshard.runtime.finite import Finite
from pipeshard.runtime.gradients import clip_by_norm, grad_norm
from pipeshard.runtime.holdings import Holdings
from pipeshard.runtime.local import local_grad, slice_like
from pipeshard.runtime.scaling import LossScale
from pipeshard.runtime.watching import calling
from pipeshard.runtime.weights import assign, share_updates


class PipelineOptimizer(OptimizerWrapper):
    """Keeps the optimizer object itself, which LR schedulers hold, and narrows its groups to what this rank trains.

    With `max_norm > 0` every `step` first clips the gradients of the whole model to that L2 norm. With `scaling`,
    gradients are those of the scaled loss until they are clipped or stepped by; a step in which one of them is not
    finite, on any rank, is left out on all. With `zero` each replica keeps the state of some parameters only, and
    tells the others what it has made of them.

    Attributes:
        names: what the optimizer trains, and the names of the model's parameters that it stands for.
        weights: by name, all that the optimizers of the replicas update together.
    """

    def __init__(
        self,
        optim: Optimizer,
        holdings: Holdings,
        grid: Grid,
        max_norm: float,
        scaling: LossScale | None = None,
        zero: bool = False,
        finite: Finite | None = None,
    ) -> None:
        super().__init__(optim)
        self.sync, self.grid, self.max_norm, self.scaling = holdings.sync, grid, max_norm, scaling
        self.finite = finite
        weights = holdings.weights
        given = dict.fromkeys(p for param_group in optim.param_groups for p in param_group["params"])
        self.weights = {weights[p].name: weights[p] for p in given if p in weights}
        self.owners = assign(self.weights.values(), grid.dp_size) if zero and grid.dp_size > 1 else {}
        elsewhere = {name for name, replica in self.owners.items() if replica != grid.replica}
        own = {p: w for p, w in weights.items() if w.name not in elsewhere}
        for param_group in optim.param_groups:  # a group may become empty; schedulers count on its place
            param_group["params"] = [own[p].trained() for p in param_group["params"] if p in own]
        self.names = {w.trained(): w.name for w in self.weights.values() if w.name not in elsewhere}
        for parameter in [p for p in optim.state if isinstance(p, nn.Parameter)]:
            state = optim.state.pop(parameter)
            if parameter in own:
                sliced = {k: _sliced(v, parameter, own[parameter].parameter) for k, v in state.items()}
                optim.state[own[parameter].trained()] = sliced
        self._holders = {weight.parameter: weight.holders for weight in self.weights.values()}
        self._norm: Tensor | None = None
        self._scaled = scaling is not None

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks that have a part of the optimizer's state."""
        return self.grid.world

    def step(self, *args: Any, **kwargs: Any) -> Any:
        meets = self.max_norm > 0 or self.scaling is not None or bool(self.owners)
        with together_in("optimizer.step") if meets else calling("optimizer.step"):
            return self._step(*args, **kwargs)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        if self.finite is not None:
            self.finite.before_update()
        self._norm = None
        if self.max_norm > 0:
            self.clip_grad_by_norm(self.max_norm)
        elif self.scaling is not None:
            self._norm = self._unscaled_norm(2.0)
        if self.scaling is not None:
            overflow = self._norm is not None and not bool(torch.isfinite(self._norm))
            self._unscale()
            self.scaling.update(overflow)
            if overflow:
                return None
        for weight in self.weights.values():
            weight.give_gradient()
        result = self.optim.step(*args, **kwargs)
        for weight in self.weights.values():
            weight.take_value()
        if self.finite is not None:
            self.finite.after_update()
        if self.owners:
            share_updates(self.weights.values(), self.owners, self.grid.replicas)
        return result

    def forget_norm(self) -> None:
        """Gradients are about to be added: the norm that was clipped by is theirs no more, and all have one scale."""
        self._norm = None
        if self.scaling is not None and not self._scaled:
            self._multiply(self.scaling.value)
        self._scaled = self.scaling is not None

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.sync.reset()
        self.optim.zero_grad(set_to_none)
        for weight in self.weights.values():
            weight.zero_grad(set_to_none)

    @together_in("optimizer.clip_grad_by_norm")
    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Clip to the norm over the whole model, which it returns. Every rank has to call it."""
        self._norm = self._unscaled_norm(norm_type)
        self._unscale()
        if error_if_nonfinite and not torch.isfinite(self._norm):
            raise ConfigurationError(f"the gradient norm is {self._norm.item()}, so gradients cannot be clipped")
        clip_by_norm(self._holders, self._norm, max_norm)
        return self._norm

    def get_grad_norm(self, norm_type: float = 2.0, **kwargs: Any) -> float:
        """The norm over the whole model that the last `step` clipped by (as it was before), else that of the gradients
        now. In the latter case every rank has to call it."""
        if self._norm is not None:
            return float(self._norm)
        with together_in("optimizer.get_grad_norm"):
            return float(self._unscaled_norm(norm_type))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        raise UsageError(
            "the backward pass of a pipeline is part of booster.execute_pipeline(data_iter, model, criterion, "
            "optimizer), which leaves the gradients in place: drop booster.backward(...) and loss.backward()"
        )

    def _unscaled_norm(self, norm_type: float) -> Tensor:
        norm = grad_norm(self._holders, self._holders.__getitem__, self.grid.world, norm_type)
        return norm / self.scaling.value if self.scaling is not None and self._scaled else norm

    def _unscale(self) -> None:
        if self.scaling is not None and self._scaled:
            self._multiply(1.0 / self.scaling.value)
            self._scaled = False

    def _multiply(self, factor: float) -> None:
        gradients = [gradient for p in self._holders if (gradient := local_grad(p)) is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)


def replace_parameters(optim: Optimizer, became: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Where parameters became others, let the optimizer train those, each in the first group that has it."""
    seen: set[nn.Parameter] = set()
    for group in optim.param_groups if became else ():
        now = dict.fromkeys(became.get(parameter, parameter) for parameter in group["params"])
        group["params"] = [parameter for parameter in now if parameter not in seen]
        seen |= now.keys()
    for parameter in became:
        optim.state.pop(parameter, None)


def _sliced(value: Any, whole: Tensor, parameter: Tensor) -> Any:
    """A state of a whole parameter, from before it was boosted, as it belongs to the rank's part of it."""
    return slice_like(value, parameter) if isinstance(value, Tensor) and value.shape == whole.shape else value
