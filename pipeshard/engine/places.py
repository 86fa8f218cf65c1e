"""Places: the locations of a model's modules and parameters at boost."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pipeshard.errors import UsageError


class Places:
    """Records the places of the modules and parameters of `model`. A module that is assigned after boost (a new head,
    an adapter) would not be split: its gradients would not be summed, and other ranks would not have this module. With
    FSDP, the places of parameters contain shards, except during a step."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (name, module, of, dict(getattr(module, of)))
            for name, module in model.named_modules()
            for of in ("_modules", "_parameters")
        ]

    def check(self) -> None:
        """Raise UsageError if a recorded module or parameter was replaced or removed, or if a parameter, or a module
        with parameters, was added."""
        for name, module, of, before in self._kept:
            if key := _changed(getattr(module, of), before):
                raise UsageError(
                    f"{name}.{key}".lstrip(".") + f" (in {type(module).__name__}) was added, replaced or removed "
                    "after the model was boosted: change modules, parameters and adapters before booster.boost. If the "
                    "forward itself replaces modules for some batches (as BigBird does for short sequences), run the "
                    "model on such a batch before boost"
                )


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Return the first name under which an object was replaced or removed. If there is none, return the first new name
    of a tensor or of a module with parameters, or ""."""
    for key, value in before.items():
        if now.get(key) is not value:
            return key
    if len(now) > len(before):
        for key in [key for key in now if key not in before]:
            if isinstance(now[key], Tensor) or (now[key] is not None and any(True for _ in now[key].parameters())):
                return key
    return ""
