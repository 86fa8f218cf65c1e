"""Places: the locations of modules and parameters in a model when it was boosted."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pipeshard.errors import UsageError


class Places:
    """Records the places of the modules in `model` and, with `parameters`, of its parameters (FSDP itself changes
    these). A module that is set after boost (a new head, an adapter) was never split: its gradients would not be
    summed, and other ranks would not have it."""

    def __init__(self, model: nn.Module, parameters: bool) -> None:
        self._kept = [
            (name, module, dict(module._modules), dict(module._parameters) if parameters else {})
            for name, module in model.named_modules()
        ]

    def check(self) -> None:
        """Raise UsageError if a recorded module or parameter was replaced or removed, or if parameters were added."""
        for name, module, children, parameters in self._kept:
            key = _changed(module._modules, children) or (parameters and _changed(module._parameters, parameters))
            if key:
                raise UsageError(
                    f"{name}.{key}".lstrip(".") + f" of this {type(module).__name__} was added, replaced or removed "
                    "after the model was boosted: change modules, parameters and adapters before booster.boost"
                )


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The first name whose object was replaced or removed, otherwise the first new name whose object has parameters, or
    "" if there is none."""
    for key, value in before.items():
        if now.get(key) is not value:
            return key
    if len(now) > len(before):
        for key in [key for key in now if key not in before]:
            if isinstance(now[key], Tensor) or (now[key] is not None and any(True for _ in now[key].parameters())):
                return key
    return ""
