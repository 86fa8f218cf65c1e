"""States: a view of a boosted optimizer's state with the model's parameters as keys, and the conversion of states for
master weights."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from pipeshard.distributed.collectives import slice_like
from pipeshard.engine.mixed_precision import MasterWeight
from pipeshard.errors import ConfigurationError


class States(MutableMapping[Any, Any]):
    """The state of a boosted optimizer, as `optimizer.state` returns it.

    For a parameter of the model, `states[parameter]` is the state of the tensor that the optimizer updates in its
    place. For a parameter that this rank does not update, `states[parameter]` is a new dict that is not stored, since
    `state_dict` requires that all keys are in the groups.

    Attributes:
        states: the state of the inner optimizer.
    """

    def __init__(self, states: Any, key: Callable[[Any], Any]) -> None:
        self.states, self._key = states, key

    def __getitem__(self, key: Any) -> Any:
        return {} if (own := self._key(key)) is None else self.states[own]

    def __setitem__(self, key: Any, value: Any) -> None:
        if (own := self._key(key)) is not None:
            self.states[own] = value

    def __delitem__(self, key: Any) -> None:
        if (own := self._key(key)) is not None:
            del self.states[own]

    def __contains__(self, key: Any) -> bool:
        return self._key(key) in self.states

    def __iter__(self) -> Iterator[Any]:
        return iter(self.states)

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return repr(self.states)

    def get(self, key: Any, default: Any = None) -> Any:
        return self.states.get(self._key(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        own = self._key(key)
        return self.states.pop(own, *default) if own is not None else default[0] if default else {}

    def copy(self) -> Any:
        return self.states.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self.states,)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return default if (own := self._key(key)) is None else self.states.setdefault(own, default)


def filled(optim: Optimizer, state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the state of a parameter, with values for tensors that the optimizer's constructor created while the model
    was on meta. Only Adagrad's initial values (constants) are known. Raises ConfigurationError for other optimizers
    with such tensors."""
    blank = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.is_meta}
    start = {"step": 0.0, "sum": optim.defaults["initial_accumulator_value"]} if isinstance(optim, Adagrad) else {}
    if unknown := sorted(blank.keys() - start.keys()):
        name = type(optim).__name__
        raise ConfigurationError(
            f"{name} created its state {unknown[0]!r} in its constructor, when the model was on the meta device, so "
            "this state has no values: create the states in the first step, as most optimizers do, or create the "
            "optimizer for a model that is not on the meta device (load the model with from_pretrained of its own "
            "class, not of PipelinePlugin)"
        )
    return {**state, **{key: torch.full_like(value, start[key], device=device) for key, value in blank.items()}}


def converted(key: str, value: Any, before: Tensor, weight: MasterWeight, group: Mapping[str, Any]) -> Any:
    """Convert a state value of the tensor `before`, which the `master` of `weight` replaces in `group`. The value is
    moved to the device of `master`. A step count on the host stays there, unless the group is fused or capturable (as
    in torch's load_state_dict). A value with the tensor's shape is cast if it has the tensor's dtype, and sharded if
    the tensor is unsharded."""
    if not isinstance(value, Tensor):
        return value
    is_like = value.shape == before.shape
    dtype = weight.master.dtype if is_like and value.dtype is before.dtype else value.dtype
    # Devices alone do not decide this: boost has moved `before` without its states, which may all be on the host.
    is_on_host = key == "step" and value.device != before.device and not (group.get("fused") or group.get("capturable"))
    value = value.to(value.device if is_on_host else weight.master.device, dtype)
    return slice_like(value, weight.parameter) if is_like and before.shape == weight.parameter.shape else value
