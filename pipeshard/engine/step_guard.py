"""Step guard: refuses an optimizer that steps on parameters of a boosted model but was not passed to boost.

Such an optimizer would neither clip by the norm of the whole model, nor unscale gradients, nor update fp32 master
weights. If the model was boosted without an optimizer, there would be no gradients at all. The guard is a global hook
that torch calls before the step of any optimizer. The hook is installed while a boosted model is alive.
"""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipeshard.engine.clipping import ModelGradients
from pipeshard.engine.guard import Guard
from pipeshard.errors import UsageError, listed
from pipeshard.private import global_step_pre_hooks


class StepGuard(Guard):
    """A Guard that checks each step of each optimizer in this process."""

    def __init__(self) -> None:
        super().__init__()
        self._unrelated: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()

    def watch(self, gradients: ModelGradients) -> None:
        """From now on, refuse steps on parameters of this model by optimizers that are not boosted."""
        super().watch(gradients)
        self._unrelated.clear()

    def install(self) -> None:
        if self.check not in global_step_pre_hooks.values():
            register_optimizer_step_pre_hook(self.check)

    def remove(self) -> None:
        for number, hook in list(global_step_pre_hooks.items()):
            if hook == self.check:
                del global_step_pre_hooks[number]

    def check(self, optimizer: Optimizer, *_: Any) -> None:
        """Raise UsageError if a step of this optimizer would update parameters of a boosted model without a boosted
        optimizer."""
        models = list(self._models)
        if any(optimizer is other.optim for gradients in models for other in gradients.optimizers):
            return  # the inner optimizer has its own hook
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        identities = [id(parameter) for parameter in parameters]
        if self._unrelated.get(optimizer) == identities:
            return
        related = False
        for gradients in models:
            if named := gradients.names_of(parameters):
                related = True
                _check_related(optimizer, named, gradients)
        if not related:
            self._unrelated[optimizer] = identities


STEP_GUARD = StepGuard()


def _check_related(optimizer: Optimizer, named: Mapping[Tensor, str], gradients: ModelGradients) -> None:
    """Raise UsageError unless the step is allowed. A step inside a boosted optimizer's step is allowed if both steps
    update the same tensors. An optimizer that contains a boosted optimizer may step if no copy of a parameter is stale
    afterwards. An optimizer inside a boosted optimizer may step if `refuse_alone` allows it."""
    kind = type(optimizer).__name__
    if stepping := next((other for other in gradients.optimizers if other.is_stepping), None):
        for parameter, name in named.items():
            weight = gradients.weights.get(name)
            if weight is not None and not weight.plain and parameter is not weight.master:
                raise UsageError(
                    f"the step of {type(stepping.optim).__name__} calls the step of another optimizer ({kind}), whose "
                    f"param_groups contain {name} instead of the tensor that boost put into the outer optimizer: use "
                    "the same param_groups for both optimizers (self.param_groups = self.base_optimizer.param_groups)"
                )
        return
    for other in gradients.optimizers:
        if _contains(other.optim, optimizer):
            other.refuse_alone(kind)
            return
        if _contains(optimizer, other):
            if other.is_plain:
                return
            raise UsageError(
                f"this {kind} wraps a boosted optimizer and modifies parameters itself, without updating fp32 master "
                f"weights, shards or replicas: pass the whole {kind} to boost instead, and call step() on the returned "
                "optimizer"
            )
    raise UsageError(
        f"this {kind} was not boosted, but its step would update parameters of a boosted model "
        f"({listed([*named.values()], 3)}) without max_norm, the loss scale or fp32 master weights. Pass the "
        "optimizer to pipeshard.initialize(model, optimizer, ...) or booster.boost(model, optimizer), or boost it "
        "later with model, optimizer, *_ = engine.boost(model, optimizer). Then call step() on the returned optimizer"
    )


def _contains(outer: Optimizer, wanted: object) -> bool:
    """Whether an optimizer's attributes contain `wanted`, directly or in lists, dicts or other optimizers."""
    return any(other is wanted for other in contents(outer))


def contents(container: Any) -> Iterator[Any]:
    """Yield the values in a list, a dict or an optimizer's attributes. If a value is itself a list, a dict or an
    optimizer, also yield its values, recursively."""
    queue, seen = [container], {id(container)}
    while queue:
        one = queue.pop()
        inner = vars(one) if isinstance(one, Optimizer) else one
        for value in [*(inner.values() if isinstance(inner, Mapping) else inner)]:
            yield value
            if isinstance(value, Mapping | list | tuple | Optimizer) and id(value) not in seen:
                seen.add(id(value))
                queue.append(value)
