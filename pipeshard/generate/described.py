"""Described: a value as plain data (JSON), with its tensors separate, for sending it to other ranks.

No code from another rank is executed: classes are looked up by name among those of outputs and caches that this
process already has.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipeshard.errors import MessageError
from pipeshard.hf import is_output_class

SMALL = 64  # numbers in a tensor of a cache that travels by value: counters and windows are no states
PLAIN = (type(None), bool, int, float, str)
Put = Callable[[Tensor], Any]  # what stands for a tensor
Get = Callable[[Any], Tensor]


def describe(value: Any, put: Put, known: Mapping[int, str]) -> Any:
    """The value for `restore`. `known` has names of objects, by id, that the other rank also has. An object that is
    neither known nor made of numbers, strings, tensors and containers becomes None."""
    if isinstance(value, Tensor | dict | list | tuple) and id(value) in known:
        return {"known": known[id(value)]}
    if isinstance(value, Tensor):
        return {"tensor": put(value)}
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if is_output_class(type(value)):
        kind = type(value)
        items = {str(key): describe(item, put, known) for key, item in value.items()}
        return {"class": [kind.__module__, kind.__qualname__], "items": items}
    if isinstance(value, dict):
        pairs = [[describe(key, put, known), describe(item, put, known)] for key, item in value.items()]
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [describe(item, put, known) for item in value]}
    return {"known": known[id(value)]} if id(value) in known else None


def restore(told: Any, get: Get, known: Mapping[str, Any]) -> Any:
    """Inverse of `describe`, with `get` for its tensors and the objects `known` here by name."""
    if not isinstance(told, dict):
        return told
    if "known" in told:
        if told["known"] not in known:
            raise MessageError(f"another rank returned {told['known']}, which no forward on this rank has returned")
        return known[told["known"]]
    if "tensor" in told:
        return get(told["tensor"])
    if "size" in told:
        return torch.Size(told["size"])
    if "class" in told:
        kind = _output_class(*told["class"])
        return kind(**{key: restore(item, get, known) for key, item in told["items"].items()})
    if "dict" in told:
        return {restore(key, get, known): restore(item, get, known) for key, item in told["dict"]}
    items = [restore(item, get, known) for item in told["list" if "list" in told else "tuple"]]
    return items if "list" in told else tuple(items)


def _output_class(module: str, name: str) -> Any:
    """A class of model outputs of this name. Raises MessageError for any other class."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not is_output_class(found):
        raise MessageError(f"{module}.{name}, received from another rank, is not a model output class on this rank")
    return found


def spec_of(tensor: Tensor) -> list[Any]:
    """Shape and dtype of a tensor as plain data."""
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name. Raises MessageError if torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise MessageError(f"{name!r}, received from another rank, is not a dtype")
    return dtype
