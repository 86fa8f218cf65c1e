"""Registry: which Policy is for which model."""

import importlib
from collections.abc import Callable
from functools import cache
from importlib import metadata, util
from typing import Any, TypeVar

from torch import nn

from pipeshard.errors import ConfigurationError
from pipeshard.model.names import without_adapters
from pipeshard.model.policy import Policy

PACKAGE = "pipeshard.policies"  # with the shipped ones
ENTRY_POINTS = "pipeshard.policies"  # the group; an entry point's name is a model type, its value a Policy
_REGISTRY: dict[str | type[nn.Module], type[Policy]] = {}
_SHIPPED: dict[str | type[nn.Module], type[Policy]] = {}
PolicyClass = TypeVar("PolicyClass", bound=type[Policy])


def register_policy(*keys: str | type[nn.Module], shipped: bool = False) -> Callable[[PolicyClass], PolicyClass]:
    """Class decorator: use this Policy for models of these classes or with these `config.model_type`s.

    It wins over entry points, and over the policies that are `shipped` with pipeshard.
    """

    def register(policy: PolicyClass) -> PolicyClass:
        (_SHIPPED if shipped else _REGISTRY).update(dict.fromkeys(keys, _checked(policy, "register_policy")))
        return policy

    return register


def find_policy(model: nn.Module) -> type[Policy]:
    """The policy registered for the model's class, one of its bases, or its `config.model_type`; else that of an
    installed package's entry point; else the one pipeshard ships; else Policy. For a PeftModel it is that of the model
    inside, unless one is registered for the PeftModel itself.

    Raises ConfigurationError for an entry point that does not load.
    """
    model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
    _, base = without_adapters(model)
    keys: tuple[Any, ...] = (*type(model).__mro__, *type(base).__mro__, model_type)
    registered = next((_REGISTRY[key] for key in keys if key in _REGISTRY), None)
    return registered or _advertised(model_type) or _shipped(model_type) or Policy


@cache
def _advertised(model_type: str) -> type[Policy] | None:
    points = {point.value: point for point in metadata.entry_points(group=ENTRY_POINTS, name=model_type)}
    if len(points) > 1:
        raise ConfigurationError(
            f"several packages offer a policy for {model_type!r}: {', '.join(points)}. Choose with register_policy"
        )
    for value, point in points.items():
        where = f"entry point {model_type} = {value} of group {ENTRY_POINTS}"
        try:
            policy = point.load()
        except Exception as error:
            raise ConfigurationError(
                f"{where} does not load ({type(error).__name__}: {error}): mend or remove the package that has it, or "
                "choose another policy with register_policy"
            ) from error
        return _checked(policy, where)
    return None


def _shipped(model_type: str) -> type[Policy] | None:
    if util.find_spec(PACKAGE):  # there is none in a source tree that is not installed
        importlib.import_module(PACKAGE)
    return _SHIPPED.get(model_type)


def _checked(policy: Any, who: str) -> type[Policy]:
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ConfigurationError(f"{who} wants a subclass of Policy, not {policy!r}")
    return policy
