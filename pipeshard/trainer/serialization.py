"""Serialization: pickles values for other ranks, with references to objects that these ranks also have.

Tensors are sent separately from the pickle. Classes and functions are sent as names, which the receiving rank looks up
in the modules that it has imported.
"""

import io
import pickle
import sys
from collections.abc import Mapping, MutableSet
from contextlib import AbstractContextManager
from functools import cache
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from pipeshard.distributed.collectives import reason
from pipeshard.errors import UsageError, explained
from pipeshard.graph.places import PLAIN, PlacePath, format_path, resolve

TRAINER_LIBRARIES = ("accelerate", "datasets", "huggingface_hub", "peft", "tokenizers")
DATA = (DataLoader, Dataset, Sampler, PreTrainedTokenizerBase)
NAMED = (type, FunctionType, BuiltinFunctionType)
Pickled = tuple[bytes, list[tuple[Tensor, str, bool, bool]]]  # a pickle, and the arguments of `_placed` for each tensor


class ValueWriter(pickle.Pickler):
    """Pickles values for a ValueReader. `known` maps the ids of objects to the paths at which other ranks have the
    same objects. Each path begins at one of `roots`."""

    def __init__(self, known: Mapping[int, PlacePath], roots: Mapping[str, Any]) -> None:
        self.known, self.roots = known, roots
        self.tensors: dict[int, tuple[int, Tensor]] = {}  # by id: the tensor's number, and the tensor, kept alive
        self.content = io.BytesIO()
        super().__init__(self.content)

    def persistent_id(self, value: Any) -> PlacePath | int | None:
        """The path of a known object, or the number of a tensor. None for any other value, which is pickled."""
        if isinstance(value, PLAIN):
            return None
        if (path := self.path_of(value)) is not None:
            return path
        if isinstance(value, Tensor):
            return self.tensors.setdefault(id(value), (len(self.tensors), value))[0]
        if not isinstance(value, NAMED) and is_apart(value):
            raise pickle.PicklingError(f"it holds an instance of {type(value).__name__}")
        return None

    def path_of(self, value: Any) -> PlacePath | None:
        """The path at which other ranks find this object, or None."""
        path = self.known.get(id(value))
        if path is None or _is_of_set(path, self.roots):
            return None
        if all(isinstance(step.key, PLAIN) for step in path):
            return path
        if isinstance(value, NAMED):
            return None  # other ranks find it by its name
        raise pickle.PicklingError(f"it holds {place_name(path)}, whose path contains an object")

    @property
    def written(self) -> Pickled:
        return self.content.getvalue(), [
            (
                tensor.detach().cpu(),
                tensor.device.type,
                tensor.is_leaf and tensor.requires_grad,
                isinstance(tensor, nn.Parameter),
            )
            for _, tensor in self.tensors.values()
        ]


class ValueReader(pickle.Unpickler):
    """Loads the values that a ValueWriter has pickled."""

    def __init__(self, written: Pickled, roots: Mapping[str, Any], device: torch.device) -> None:
        content, tensors = written
        super().__init__(io.BytesIO(content))
        self.roots, self.tensors = roots, [_placed(device, *tensor) for tensor in tensors]

    def find_class(self, module: str, name: str) -> Any:
        """The class or function of this name. Imports nothing: raises UsageError if this rank has not imported it."""
        try:
            return attrgetter(name)(sys.modules[module])
        except (AttributeError, KeyError) as error:
            raise UsageError(
                f"the last stage sends {module}.{name}, which this rank has not imported: import it at the top of the "
                "script"
            ) from error

    def persistent_load(self, said: PlacePath | int) -> Any:
        """This rank's object at a path, or the tensor with this number. Raises UsageError if this rank has no object at
        the path."""
        if isinstance(said, int):
            return self.tensors[said]
        try:
            return resolve(self.roots[said[0].key], said[1:])
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise UsageError(
                f"compute_loss changes {place_name(said)} on the last stage, or stores, logs or returns it, but this "
                f"rank has no such object ({error}). Create it in __init__ or in a callback: both run on every rank"
            ) from error


def _placed(device: torch.device, tensor: Tensor, kind: str, requires_grad: bool, is_parameter: bool) -> Tensor:
    placed = tensor if kind == "cpu" else tensor.to(device)
    return nn.Parameter(placed, requires_grad) if is_parameter else placed.requires_grad_(requires_grad)


def sending(where: str) -> AbstractContextManager[None]:
    """Context manager that raises a UsageError naming the place `where` if the value at this place cannot be
    pickled."""
    return explained(
        lambda error: UsageError(
            f"{where} cannot be sent ({reason(error)}). The last stage sends the model's outputs, and the results and "
            "changed state of compute_loss, to the other ranks: use tensors, arrays, numbers, strings, collections of "
            "these, or objects of a class at the top of a module (a .py file, not a notebook cell)"
        )
    )


@cache
def is_of_script(module: str | None) -> bool:
    """Whether a module is the user's script or a local file, and not part of Python, pipeshard or an installed
    package."""
    name = (module or "").partition(".")[0]
    if not name or name == "pipeshard" or name in sys.stdlib_module_names - {"__main__"}:
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def is_apart(value: Any) -> bool:
    """Whether KeptState skips a value: a dataset, loader, sampler or tokenizer, an object of TRAINER_LIBRARIES, or a
    class or function that is not the user's own."""
    if isinstance(value, DATA):
        return True
    if isinstance(value, type | FunctionType):
        return not is_of_script(value.__module__)
    return type(value).__module__.partition(".")[0] in TRAINER_LIBRARIES


def place_name(path: PlacePath) -> str:
    """A path in the user's notation, such as `self.name`."""
    name = format_path(path[1:])
    return f"self.{name}" if path[0].key == "trainer" else f"{path[0].key}.{name}"


def _is_of_set(path: PlacePath, roots: Mapping[str, Any]) -> bool:
    """Whether a path cannot be resolved, or leads through a set, whose order may differ between ranks."""
    holder = roots[path[0].key]
    for step in path[1:]:
        if isinstance(holder, MutableSet | frozenset):
            return True
        try:
            holder = resolve(holder, (step,))
        except (AttributeError, KeyError, IndexError, TypeError):
            return True
    return False
