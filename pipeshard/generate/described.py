"""Described: converts values to plain data (JSON) for other ranks. Tensors are stored separately.

No code from another rank is executed: a class is looked up by its name, and must be a class of model outputs in a
module that this process has already imported.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipeshard.batch.tree import PLAIN_VALUES
from pipeshard.errors import MessageError
from pipeshard.hf import is_output_class

SMALL = 64  # the maximum number of elements of an integer tensor in a cache that is sent by value (counters, windows)
Put = Callable[[Tensor], Any]  # stores a tensor, and returns plain data that represents it
Get = Callable[[Any], Tensor]


def describe(value: Any, put: Put, known: Mapping[int, str]) -> Any:
    """The value as plain data for `restore`. `known` maps ids to names, for objects that the other ranks also have. Any
    object other than a known object, a plain value, a tensor or a container becomes None."""
    if isinstance(value, Tensor | dict | list | tuple) and id(value) in known:
        return {"known": known[id(value)]}
    if isinstance(value, Tensor):
        return {"tensor": put(value)}
    if isinstance(value, PLAIN_VALUES):
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
    """The inverse of `describe`: `get` returns the tensor for a result of `put`, and `known` maps names to objects on
    this rank. Raises MessageError for an unknown name or class."""
    if not isinstance(told, dict):
        return told
    if "known" in told:
        if told["known"] not in known:
            raise MessageError(
                f"another rank's message refers to {told['known']}, but this rank has no input or cache of this name. "
                "Call generate on all ranks of a pipeline with the same prompts and arguments"
            )
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
    """The model output class with this name in `module`. Raises MessageError for any other class."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not is_output_class(found):
        raise MessageError(
            f"{module}.{name}, received from another rank, is not a model output class on this rank: use the same "
            "versions of transformers and of your code on all ranks"
        )
    return found


def spec_of(tensor: Tensor) -> list[Any]:
    """The shape and the dtype of a tensor as plain data."""
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype with this name. Raises MessageError if torch has no such dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise MessageError(
            f"{name!r}, received from another rank, is not a torch dtype: use the same version of torch on all ranks"
        )
    return dtype
