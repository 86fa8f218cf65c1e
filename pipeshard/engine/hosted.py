"""Hosted weight: a MasterWeight whose values are in host memory, and with them the optimizer's states and its step.

A gradient stays on the device, on the model's parameter, until the optimizer has called its pre-hooks. Only then is it
copied to the host, so that no other code can change one of two copies. ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840)
also updates the values on the host.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.engine.mixed_precision import MasterWeight, copy_attributes
from pipeshard.errors import UsageError

STORED: Any = Tensor.grad  # the attribute of a tensor that HostParameter overrides


def stored_grad(tensor: Tensor) -> Tensor | None:
    """The gradient of a tensor. For a HostParameter, it is None except during the optimizer's update."""
    gradient: Tensor | None = STORED.__get__(tensor)
    return gradient


class HostParameter(nn.Parameter):
    """The `master` of a HostedWeight. Reading its gradient outside the optimizer's update would give None, and a loop
    that clips gradients would silently skip it, so it raises UsageError while the parameter has a gradient."""

    pipeshard_weight: "weakref.ref[HostedWeight]"

    @property
    def grad(self) -> Tensor | None:
        gradient = stored_grad(self)
        if gradient is None:
            self._check()
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._check(is_set=True)
        STORED.__set__(self, gradient)

    def _check(self, is_set: bool = False) -> None:
        reference = vars(self).get("pipeshard_weight")  # a copy of this parameter has none
        weight = None if reference is None else reference()
        if weight is not None and not weight.is_updating and (is_set or weight.parameter.grad is not None):
            raise UsageError(
                f"with offload='optimizer', the gradient of {weight.name} is on the device until optimizer.step() has "
                "called its pre-hooks: read and modify the gradients of model.parameters() instead of those in "
                "optimizer.param_groups. To clip gradients, pass max_norm, or call "
                "optimizer.clip_grad_by_norm(max_norm)"
            )


def on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory, which is pinned if the tensor is on a GPU."""
    if tensor.is_sparse:
        return tensor.detach().to("cpu", copy=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor.detach())


class HostedWeight(MasterWeight):
    """A MasterWeight whose `master` is in host memory as soon as an optimizer trains the parameter.

    Attributes:
        is_updating: whether the optimizer updates `master` now, so that `master` has a gradient.
    """

    is_updating = False

    def _like(self, value: Tensor, requires_grad: bool = True) -> nn.Parameter:
        made = HostParameter(on_host(value), requires_grad)
        made.pipeshard_weight = weakref.ref(self)
        copy_attributes(self.parameter, made)
        return made

    @property
    def is_double(self) -> bool:
        return self.master is not self.parameter

    @property
    def lacks_values(self) -> bool:
        return not self.is_double

    @property
    def graded(self) -> Tensor:
        return self.parameter

    def settle_gradient(self) -> None:
        """Do nothing: `master` has no gradient that a loop could replace."""

    def lend_gradient(self) -> None:
        """Do nothing: `take_gradient` follows."""

    @torch.no_grad()
    def take_gradient(self) -> None:
        """Copy the parameter's gradient to `master`, for the update that follows."""
        if not self.is_double:
            return
        gradient = self.parameter.grad
        self.is_updating = True
        self.master.requires_grad_(self.parameter.requires_grad)
        self.master.grad = None if gradient is None else on_host(gradient)  # new memory: an optimizer may keep it

    def drop_gradient(self) -> None:
        """Remove the gradient of `master` after the update."""
        self.master.grad, self.is_updating = None, False

    def zero_grad(self, set_to_none: bool) -> None:
        super().zero_grad(set_to_none)
        self.is_updating = False
