"""Hooks: forward hooks that inject a fault into a step, or observe it, and are no part of the model's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle


def register_unseen(module: nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a forward hook of one module that causes no new trace, since torch keeps it outside the module."""

    def called(other: nn.Module, args: Any, output: Any) -> Any:
        return hook(other, args, output) if other is module else None

    return register_module_forward_hook(called)
