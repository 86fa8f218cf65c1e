"""Places: where the modules and parameters of a boosted model are, and have to stay."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from pipeshard.errors import UsageError


class Places:
    """All places of `model`. What takes one after boosting (a new head, an adapter) has never been cut: nobody sums
    its gradients, or knows that it is there. With `parameters` theirs count too, which FSDP changes by itself."""

    def __init__(self, model: nn.Module, parameters: bool) -> None:
        self._kept = [
            (name, module, dict(module._modules), dict(module._parameters) if parameters else {})
            for name, module in model.named_modules()
        ]

    def check(self) -> None:
        """Raise UsageError where something else is in a place now, or parameters are where there was none."""
        for name, module, children, own in self._kept:
            key = _changed(module._modules, children) or (own and _changed(module._parameters, own))
            if key:
                raise UsageError(
                    f"{name}.{key}".lstrip(".") + f" of this {type(module).__name__} is not what it was when the model "
                    "was boosted: put in modules, parameters and adapters before booster.boost"
                )


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The first name that stands for something else, or is new and has parameters; "" if there is none."""
    for key, value in before.items():
        if now.get(key) is not value:
            return key
    new = [now[key] for key in now.keys() - before.keys()] if len(now) > len(before) else []
    held = (value for value in new if not isinstance(value, nn.Module) or next(value.parameters(), None) is not None)
    return next((key for value in held for key in now if now[key] is value), "")
