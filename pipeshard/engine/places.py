"""Places: the locations of modules and parameters in a model when it was boosted."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pipeshard.errors import UsageError


class Places:
    """All places of `model`. A module set there after boosting (a new head, an adapter) was never cut: its gradients
    would not be summed, and other ranks do not have it. With `parameters`, the places of parameters count too; FSDP
    itself changes these."""

    def __init__(self, model: nn.Module, parameters: bool) -> None:
        self._kept = [
            (name, module, dict(module._modules), dict(module._parameters) if parameters else {})
            for name, module in model.named_modules()
        ]

    def check(self) -> None:
        """Raise UsageError if a place has another module now, or if there are new parameters."""
        for name, module, children, parameters in self._kept:
            key = _changed(module._modules, children) or (parameters and _changed(module._parameters, parameters))
            if key:
                raise UsageError(
                    f"{name}.{key}".lstrip(".") + f" of this {type(module).__name__} was added or replaced after the "
                    "model was boosted: add modules, parameters and adapters before booster.boost"
                )


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The first name whose object was replaced, or that is new and has parameters; "" if there is none."""
    for key, value in before.items():
        if now.get(key) is not value:
            return key
    if len(now) > len(before):
        for key in [key for key in now if key not in before]:
            if isinstance(now[key], Tensor) or (now[key] is not None and any(True for _ in now[key].parameters())):
                return key
    return ""
