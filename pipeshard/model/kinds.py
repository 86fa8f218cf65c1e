"""Kinds: what unit calls have in common that return the same shapes."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.model.standin import is_trainable

PLACE = re.compile(r"(^|_)(idx|id|index|number)$")  # attributes that only say which of many layers this is


def kind_name(module: nn.Module) -> Any:
    """What two units share if their results have the same shapes for the same inputs, and both or neither drop some."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    flags = tuple(
        (name, key, value != 0 if isinstance(value, float) else value)  # a dropout's p
        for name, child in module.named_modules()
        for key, value in child.__dict__.items()
        if _is_setting(value) and not PLACE.search(key)
    )
    return type(module), tuple((name, tuple(t.shape), t.dtype, is_trainable(t)) for name, t in tensors), flags


def _is_setting(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_setting, value))
    return isinstance(value, bool | int | float | str)


def describe(leaf: Any) -> Any:
    """What an argument has in common with others for which a unit returns the same shapes."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, bool | int | float | str | torch.dtype | None) else type(leaf)
