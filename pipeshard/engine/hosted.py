"""Hosted weight: a MasterWeight whose values and optimizer state are in host memory, where the optimizer updates them.

The model's parameter keeps its gradient on the device. The gradient is copied to the host only after the optimizer has
called its pre-hooks, so that no other code can change just one of the two copies. ZeRO-Offload (Ren et al. 2021,
arXiv:2101.06840) also updates the values on the host.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.engine.mixed_precision import MasterWeight, copy_attributes
from pipeshard.errors import UsageError

STORED: Any = Tensor.grad  # the attribute of a tensor that HostParameter overrides
Mark = tuple[Tensor, int] | None  # a gradient and its version


def stored_grad(tensor: Tensor) -> Tensor | None:
    """The gradient of a tensor. For a HostParameter, the gradient is None except during the optimizer's update."""
    gradient: Tensor | None = STORED.__get__(tensor)
    return gradient


class HostParameter(nn.Parameter):
    """The `master` of a HostedWeight. Outside the optimizer's update, `master` has no gradient, so a loop that clips
    gradients would silently skip `master`. To prevent this, reading `grad` outside the update raises UsageError if the
    model's parameter has a gradient. Setting `grad` outside the update raises UsageError unless the new value is
    None."""

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

    def __getstate__(self) -> Any:
        state = super().__getstate__()
        return {k: v for k, v in state.items() if k != "pipeshard_weight"} if isinstance(state, dict) else state

    def _check(self, is_set: bool = False) -> None:
        reference = vars(self).get("pipeshard_weight")  # missing in a copy of this parameter
        weight = None if reference is None else reference()
        if weight is not None and not weight.is_updating and (is_set or weight.parameter.grad is not None):
            raise UsageError(
                f"cannot read or set the gradient of {weight.name} through optimizer.param_groups: with "
                "offload='optimizer', the gradient is on the device until optimizer.step() has called its pre-hooks. "
                "Instead, read and modify the gradients of model.parameters(). To clip gradients, pass max_norm (in a "
                "Trainer, max_grad_norm), or call optimizer.clip_grad_by_norm(max_norm)"
            )


def on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory. The host memory is pinned if the tensor is dense and on a GPU."""
    if tensor.is_sparse:
        return tensor.detach().to("cpu", copy=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor.detach())


class HostedWeight(MasterWeight):
    """A MasterWeight whose `master` is kept in host memory once an optimizer trains the parameter.

    Attributes:
        is_updating: whether the optimizer is updating `master`. `master` has a gradient only during the update.
    """

    is_updating = False
    _given: Mark = None  # the gradient on the device that was copied
    _taken: Mark = None  # the copy of this gradient on the host

    @property
    def is_double(self) -> bool:
        return self.master is not self.parameter

    @property
    def lacks_values(self) -> bool:
        return not isinstance(self.master, HostParameter)

    def complete(self) -> None:
        """Copy the values to the host. Until this call, the fp32 master weight of a 16-bit parameter is on the
        device."""
        if self.is_double:
            self.follow(is_written=True, is_master_written=False, adopts=True)
        value = self.master.detach()
        made = HostParameter(on_host(value.float() if self.lowered else value), self.parameter.requires_grad)
        made.pipeshard_weight = weakref.ref(self)
        copy_attributes(self.parameter, made)
        self.master, self.plain, self._lent = made, False, None

    @property
    def graded(self) -> Tensor:
        return self.parameter

    def settle_gradient(self) -> None:
        """Do nothing: `master` has no gradient that a loop could replace."""

    def lend_gradient(self) -> None:
        """Do nothing: `take_gradient` copies the gradient later."""

    @torch.no_grad()
    def take_gradient(self) -> None:
        """Copy the parameter's gradient to `master` for the next update, unless `master` already has this gradient."""
        given = _mark(self.parameter.grad)
        if self.is_updating and _same(given, self._given):
            return
        self.is_updating, self._given = True, given
        self.master.requires_grad_(self.parameter.requires_grad)
        self.master.grad = None if given is None else on_host(given[0])  # new memory: an optimizer may keep it
        self._taken = _mark(self.master.grad)

    @torch.no_grad()
    def drop_gradient(self) -> None:
        """Remove the gradient of `master` after the update. If the optimizer has modified or cleared this gradient,
        modify or clear the parameter's gradient in the same way."""
        gradient, given = stored_grad(self.master), self._given
        if given is not None and not _same(_mark(gradient), self._taken):
            if gradient is None or gradient.is_sparse or self.parameter.grad is not given[0]:
                self.parameter.grad = None if gradient is None else gradient.to(self.parameter.device)
            else:
                given[0].copy_(gradient)
        self.master.grad, self.is_updating = None, False
        self._given = self._taken = None

    def zero_grad(self, set_to_none: bool) -> None:
        super().zero_grad(set_to_none)
        self._given = None
        self.drop_gradient()


def _mark(gradient: Tensor | None) -> Mark:
    return None if gradient is None else (gradient, gradient._version)


def _same(one: Mark, other: Mark) -> bool:
    if one is None or other is None:
        return one is other
    return one[0] is other[0] and one[1] == other[1]
