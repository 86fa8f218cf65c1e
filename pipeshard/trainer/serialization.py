"""Serialization: values as plain data with the names of classes.

Other ranks look up these names among their imported classes; no code is sent.
"""

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import MutableSet
from enum import Enum
from functools import cache
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from pipeshard.errors import UsageError
from pipeshard.graph.places import MISSING, PLAIN, Path, PathStep, content_of, format_path, is_object, resolve

TRAINER_LIBRARIES = ("accelerate", "datasets", "huggingface_hub", "peft", "tokenizers")
DATA = (DataLoader, Dataset, Sampler, PreTrainedTokenizerBase)


class ValueWriter:
    """Converts values to plain data. `known` contains the paths, by id, of objects that other ranks also have."""

    def __init__(self, known: dict[int, Path], roots: dict[str, Any]) -> None:
        self.known, self.roots, self.numbers = known, roots, dict[int, int]()
        self.alive: list[Any] = []

    def place(self, path: Path, where: str) -> list[Any]:
        if _is_of_set(path, self.roots):
            raise not_sent(where, frozenset)
        if unknown := [step.key for step in path if not _is_python(step.key)]:
            raise not_sent(where, unknown[0])
        return [tuple(step) for step in path]

    def of(self, value: Any, where: str, anew: bool = False) -> Any:
        """Convert a value to plain data. Raises UsageError for a value that cannot be sent. The error names the value's
        location `where`."""
        if value is MISSING:
            return ("missing",)
        if _is_python(value) and not isinstance(value, range | slice):
            return ("plain", value)
        if id(value) in self.known and not anew and not _is_of_set(self.known[id(value)], self.roots):
            return ("known", self.place(self.known[id(value)], where))
        if id(value) in self.numbers:
            return ("again", self.numbers[id(value)])
        self.numbers[id(value)] = len(self.numbers)
        self.alive.append(value)
        return self._made(value, where)

    def _made(self, value: Any, where: str) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            is_leaf = value.is_leaf and value.requires_grad
            return ("tensor", value.detach().cpu(), value.device.type, is_leaf, isinstance(value, nn.Parameter))
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return ("array", value.dtype.str, tuple(value.shape), value.tobytes(), isinstance(value, np.generic))
        if isinstance(value, range | slice):
            return ("built", kind.__name__, [self.of(part, where) for part in (value.start, value.stop, value.step)])
        if isinstance(value, Enum):
            return ("enum", _name_of(kind, where), value.name)
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            return ("name", _name_of(value, where))
        if isinstance(value, tuple | frozenset):
            return ("fixed", _name_of(kind, where), [self.of(entry, where) for entry in value])
        if isinstance(value, deque):
            return ("deque", value.maxlen, [self.of(entry, where) for entry in value])
        if isinstance(value, list | set | bytearray):  # in iteration order, which the reader's numbering follows
            entries = [self.of(entry, where) for entry in value]
            return ("list", _name_of(kind, where), entries, self._attributes(value, where))
        if isinstance(value, dict):
            pairs = [(self.of(key, where), self.of(entry, f"{where}[{key!r}]")) for key, entry in value.items()]
            factory = self.of(getattr(value, "default_factory", None), where)
            return ("dict", _name_of(kind, where), pairs, factory, self._attributes(value, where))
        if (is_object(value) or isinstance(value, nn.Module)) and not is_apart(value) and hasattr(value, "__dict__"):
            return ("object", _name_of(kind, where), self._attributes(value, where))
        raise not_sent(where, value)

    def _attributes(self, value: Any, where: str) -> list[tuple[str, Any]]:
        if type(value) in (list, set, dict, bytearray, OrderedDict, Counter, defaultdict):
            return []
        held = vars(value) if isinstance(value, nn.Module) else content_of(value, "attr")
        return [(name, self.of(entry, f"{where}.{name}")) for name, entry in held.items()]


class ValueReader:
    """Rebuilds the values that a ValueWriter has written."""

    def __init__(self, roots: dict[str, Any], device: torch.device) -> None:
        self.roots, self.device = roots, device
        self.made: list[Any] = []

    def at(self, path: Any) -> Any:
        """This rank's object at a path. Raises UsageError if this rank has no such object."""
        (_, root), *steps = path
        try:
            return resolve(self.roots[root], (PathStep(*step) for step in steps))
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            where = place_name(tuple(PathStep(*step) for step in path))
            raise UsageError(
                f"compute_loss has changed {where} on the last stage, but this rank does not have it ({error}). "
                "Create it in __init__ or in a callback: both run on every rank"
            ) from error

    def of(self, said: Any) -> Any:
        how, *content = said
        if how == "missing":
            return MISSING
        if how == "plain":
            return content[0]
        if how == "known":
            return self.at(content[0])
        if how == "again":
            return self.made[content[0]]
        number = len(self.made)
        self.made.append(None)
        self.made[number] = getattr(self, f"_{how}")(number, *content)
        return self.made[number]

    def _tensor(self, number: int, tensor: Tensor, kind: str, requires_grad: bool, is_parameter: bool) -> Any:
        placed = tensor if kind == "cpu" else tensor.to(self.device)
        return nn.Parameter(placed, requires_grad) if is_parameter else placed.requires_grad_(requires_grad)

    def _array(self, number: int, dtype: str, shape: Any, content: bytes, is_scalar: bool) -> Any:
        array = np.frombuffer(content, np.dtype(dtype)).reshape(shape).copy()
        return array[()] if is_scalar else array

    def _built(self, number: int, name: str, parts: Any) -> Any:
        values = [self.of(part) for part in parts]
        return range(*values) if name == "range" else slice(*values)

    def _enum(self, number: int, kind: Any, name: str) -> Any:
        return _found(kind)[name]

    def _name(self, number: int, name: Any) -> Any:
        return _found(name)

    def _fixed(self, number: int, kind: Any, entries: Any) -> Any:
        values = [self.of(entry) for entry in entries]
        base = frozenset if issubclass(_found(kind), frozenset) else tuple
        return base.__new__(_found(kind), values)

    def _deque(self, number: int, maxlen: int | None, entries: Any) -> Any:
        made = self.made[number] = deque[Any](maxlen=maxlen)
        made.extend(self.of(entry) for entry in entries)
        return made

    def _list(self, number: int, kind: Any, entries: Any, attributes: Any) -> Any:
        made = self.made[number] = self._empty(_found(kind))
        for entry in entries:
            (made.add if isinstance(made, MutableSet) else made.append)(self.of(entry))
        return self._with(made, attributes)

    def _dict(self, number: int, kind: Any, pairs: Any, factory: Any, attributes: Any) -> Any:
        made = self.made[number] = self._empty(_found(kind))
        for key, entry in pairs:
            (OrderedDict if isinstance(made, OrderedDict) else dict).__setitem__(made, self.of(key), self.of(entry))
        default = self.of(factory)
        if isinstance(made, defaultdict):
            made.default_factory = default
        return self._with(made, attributes)

    def _object(self, number: int, kind: Any, attributes: Any) -> Any:
        made = self.made[number] = object.__new__(_found(kind))
        return self._with(made, attributes)

    def _with(self, made: Any, attributes: Any) -> Any:
        for name, entry in attributes:
            object.__setattr__(made, name, self.of(entry))
        return made

    def _empty(self, kind: Any) -> Any:
        """An empty list, set or dict of this class, without calling its `__init__`."""
        base = next(base for base in kind.__mro__ if base.__module__ in ("builtins", "collections"))
        return base.__new__(kind)


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


def place_name(path: Path) -> str:
    """A path in the user's notation, such as `self.name`."""
    name = format_path(path[1:])
    return f"self.{name}" if path[0].key == "trainer" else f"{path[0].key}.{name}"


def _is_of_set(path: Path, roots: dict[str, Any]) -> bool:
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


def _name_of(value: Any, where: str) -> list[str]:
    name = [value.__module__, value.__qualname__]
    try:
        if _found(name) is value:
            return name
    except (AttributeError, KeyError):
        pass
    raise not_sent(where, value)


def _found(name: Any) -> Any:
    """The class or function of this name in a module that this process has imported."""
    module, path = name
    return attrgetter(path)(sys.modules[module])


def _is_python(value: Any) -> bool:
    """Whether a value is a plain Python or torch value. False for numpy's scalars, which are sent as bytes."""
    return isinstance(value, PLAIN) and not isinstance(value, np.generic)


def not_sent(where: str, value: Any) -> UsageError:
    what = (
        f"{value.__module__}.{value.__qualname__}"
        if hasattr(value, "__qualname__")
        else f"an instance of {type(value).__name__}"
    )
    return UsageError(
        f"the last stage runs compute_loss and sends changed state and results to the other ranks, but {where} holds "
        f"{what}, which cannot be sent: use tensors, arrays, numbers, strings, collections of these, or objects of a "
        "class that every rank can import"
    )
