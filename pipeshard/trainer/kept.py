"""Kept: the Python state of a Trainer and its callbacks, compared, restored, and sent to other ranks.

compute_loss runs on the last stage, and may change the Trainer's state. As for a model's code, the changes are found by
comparison: the state that is reachable from the Trainer is recorded before the call and compared after the call.
Changes are sent as plain data with the names of classes. Other ranks look up these names among their imported classes;
no code is sent.
"""

import io
import mmap
import sys
import threading
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, MutableSet
from enum import Enum
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from pipeshard.errors import UsageError
from pipeshard.graph.places import (
    GENERATORS,
    LARGEST_ARRAY,
    MISSING,
    PLAIN,
    Path,
    PathStep,
    content_of,
    format_path,
    is_object,
    is_same,
    put,
    put_content,
    resolve,
)
from pipeshard.graph.snapshot import Change, Snapshot, undo
from pipeshard.graph.writes import sum_of_words

# Attributes of a Trainer that compute_loss reads, but in which it keeps no state.
NOT_KEPT = frozenset(
    {"model", "model_wrapped", "ref_model", "optimizer", "lr_scheduler", "train_dataset", "eval_dataset"}
    | {"accelerator", "processing_class", "data_collator", "pipeline", "_stages", "_objective", "_loader", "_held"}
    | {"reward_funcs", "reward_processing_classes", "_buffered_inputs", "_num_items", "_left", "_unreported"}
    | {"_latest_loader"}
)
TRAINER_LIBRARIES = ("accelerate", "datasets", "huggingface_hub", "peft", "tokenizers")
DATA = (DataLoader, Dataset, Sampler, PreTrainedTokenizerBase)
LONG = 1000  # entries: in a longer list or dict, the entries' identities are compared, not their content
MANY = 64  # entries: in a longer container, only torch's version counters detect writes to tensors
SMALL_BYTES = 1 << 20  # bytes: tensors up to this size are copied for the comparison


class KeptState(Snapshot):
    """A snapshot of everything reachable from a Trainer, its callbacks and its classes, except models, data and library
    objects.

    With `copies`, tensors and arrays of any size can be restored, except sparse tensors, mapped files, and arrays that
    can be written to only through a base outside the snapshot. Otherwise, only tensors of at most SMALL_BYTES bytes and
    arrays of at most LARGEST_ARRAY bytes can be restored.
    """

    def __init__(self, trainer: Any, copies: bool = False) -> None:
        self.trainer, self.copies = trainer, copies
        self.roots = _roots(trainer)
        self.marks: list[Any] = []  # one per tensor
        self.arrays: list[tuple[Path, np.ndarray[Any, Any], int]] = []  # large arrays, with their sums
        self.files: list[tuple[Path, Any, int]] = []
        self._of_threads = _changed_by_threads(trainer)
        named = ((name, vars(trainer).get(name)) for name in NOT_KEPT)
        self._apart = {id(value): (PathStep("root", "trainer"), PathStep("attr", name)) for name, value in named}
        super().__init__(self.roots, [value for name in NOT_KEPT if (value := vars(trainer).get(name)) is not None])
        self.marks = [
            _mark(tensor, copies) if copies or not hasattr(holder, "__len__") or len(holder) <= MANY else None
            for _, holder, _, tensor, _ in self.tensors
        ]
        self.copied = _copied(array for _, array, _ in self.arrays) if copies else {}  # large arrays: id -> copy

    def changes(self) -> Iterator[Change]:
        """Yield the differences from the snapshot. Raises UsageError if the position of an open file has changed."""
        for change in self.replaced():
            if not (change.holder is self.trainer and change.key in NOT_KEPT):
                yield change
        for (path, holder, key, tensor, version), mark in zip(self.tensors, self.marks, strict=True):
            if tensor._version != version or not _is_marked(tensor, mark):
                yield Change(path, holder, key, tensor, tensor)
        for path, array, code in self.arrays:
            if _code(array) != code:
                yield Change(path, array, None, array, array)
        for path, file, at in self.files:
            if _position(file) != at:
                raise UsageError(
                    f"compute_loss reads or writes the open file {_place_name(path)}. In a step, only the last stage "
                    "calls compute_loss, and a trace cannot undo the access: use a list instead, and read or write the "
                    "file in log() or in a callback"
                )

    def restore(self) -> None:
        """Restore everything that has changed. Raises UsageError, after restoring the rest, for a tensor or an array
        that cannot be restored."""
        marks = {id(tensor): mark for (*_, tensor, _), mark in zip(self.tensors, self.marks, strict=True)}
        sums, lost = {id(array): code for _, array, code in self.arrays}, list[Change]()
        for change in list(self.changes()):
            copy = self.copied.get(id(change.now), marks.get(id(change.now)))
            if change.before is not change.now:
                undo(change)
            elif isinstance(copy, Tensor | np.ndarray):
                _write(change.now, copy)
            else:
                lost.append(change)
        for path, _, _, value, _ in lost:
            # a view without a copy has been restored with its base
            if isinstance(value, Tensor) or _code(value) != sums[id(value)]:
                raise self._not_restored(path, value)

    def _not_restored(self, path: Path, value: Any) -> UsageError:
        is_sparse = isinstance(value, Tensor) and value.layout is not torch.strided  # has no nbytes
        size = "" if is_sparse else f" ({value.nbytes / 2**20:.1f} MiB)"
        what = f"compute_loss modifies {_place_name(path)}{size} in place"
        if self.copies:
            return UsageError(
                f"{what}, but a trace cannot undo a change to a mapped file, to the base of a read-only array or to a "
                "sparse tensor: use an array in memory or a dense tensor, or make the change in a callback"
            )
        return UsageError(
            f"{what} before it calls the model, and every rank would have to undo this change: make the change after "
            "the model call"
        )

    def _skips(self, path: Path, value: Any) -> bool:
        """Whether the walk skips the value. Also records large arrays and open files."""
        if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.nbytes > LARGEST_ARRAY:
            self.arrays.append((path, value, _code(value)))
        elif isinstance(value, io.IOBase) and (at := _position(value)) >= 0:
            self.files.append((path, value, at))
        return _is_apart(value) or id(value) in self._of_threads

    def _ways_to_hold(self, value: Any) -> Iterable[str]:
        return ("attr",) if value is self.trainer else super()._ways_to_hold(value)

    def _entries(self, path: Path, content: Any) -> Iterable[tuple[Any, Any]]:
        is_long = len(content) > LONG or path[-1].key == "log_history"
        return () if is_long else super()._entries(path, content)

    def _constants_of(self, value: Any) -> Iterator[tuple[PathStep, Any]]:
        for step, child in super()._constants_of(value):
            if not isinstance(child, type | FunctionType) or _is_own(child.__module__):
                yield step, child

    # changes sent to other ranks

    def told(self) -> list[Any]:
        """The changes, as plain data for `learn`. Raises UsageError for changes that cannot be sent."""
        if not (changes := list(self.changes())):
            return []
        writer, said = self._writer(), list[Any]()
        for change in changes:
            where = _place_name(change.path)
            if change.before is change.now:
                said.append(("write", writer.place(change.path, where), writer.of(change.now, "", anew=True)))
            elif added := _added(change):
                content = [writer.of(entry, where) for entry in (len(change.before), *added)]
                said.append(("added", writer.place(change.path, where), content))
            elif change.is_of_list:
                content = [writer.of(entry, where) for entry in change.now]
                said.append(("content", writer.place(change.path, where), content))
            elif change.path[-1].how == "state" and not isinstance(change.holder, (np.ndarray, *GENERATORS)):
                raise _not_sent(where, change.holder)
            else:
                value = writer.of(change.now, where)
                said.append(("put", writer.place(change.path, where), value))
        return said

    def written(self, value: Any) -> Any:
        """Convert a value that compute_loss has returned or logged to plain data for `adopt`."""
        return self._writer().of(value, "the result or log of compute_loss")

    def _writer(self) -> "ValueWriter":
        tensors = {id(tensor): path for path, _, _, tensor, _ in self.tensors}
        return ValueWriter({**self.paths, **self._apart, **tensors}, self.roots)

    @staticmethod
    def adopt(trainer: Any, said: tuple[list[Any], Any], device: torch.device) -> Any:
        """Apply the changes that another rank has `told`, and return the value that the other rank has `written`."""
        changes, value = said
        KeptState.learn(trainer, changes, device)
        return ValueReader(_roots(trainer), device).of(value)

    @staticmethod
    def learn(trainer: Any, said: list[Any], device: torch.device) -> None:
        """Apply the changes received from another rank to this rank's state."""
        reader = ValueReader(_roots(trainer), device)
        # resolve all paths before the first change; for `put`, the path without its last step
        found = [reader.at(path[:-1] if how == "put" else path) for how, path, _ in said]
        values = [
            [reader.of(entry) for entry in content] if how in ("content", "added") else reader.of(content)
            for how, _, content in said
        ]
        for (how, path, _), holder, value in zip(said, found, values, strict=True):
            if how == "put":
                put(holder, path[-1][0], path[-1][1], value)
            elif how == "content":
                put_content(holder, value)
            elif how == "added":
                start, *entries = value
                holder[start:] = entries  # in evaluation, this rank has already appended its own
            else:
                _write(holder, value)


class ValueWriter:
    """Converts values to plain data. `known` contains the paths, by id, of objects that other ranks also have."""

    def __init__(self, known: dict[int, Path], roots: dict[str, Any]) -> None:
        self.known, self.roots, self.numbers = known, roots, dict[int, int]()
        self.alive: list[Any] = []

    def place(self, path: Path, where: str) -> list[Any]:
        if _is_of_set(path, self.roots):
            raise _not_sent(where, frozenset)
        if unknown := [step.key for step in path if not _is_python(step.key)]:
            raise _not_sent(where, unknown[0])
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
        if (is_object(value) or isinstance(value, nn.Module)) and not _is_apart(value) and hasattr(value, "__dict__"):
            return ("object", _name_of(kind, where), self._attributes(value, where))
        raise _not_sent(where, value)

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
            where = _place_name(tuple(PathStep(*step) for step in path))
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


def _roots(trainer: Any) -> dict[str, Any]:
    """The objects to walk, by name: the Trainer, and the classes in its MRO that the script defines."""
    return {"trainer": trainer} | {
        kind.__qualname__: kind for kind in type(trainer).__mro__ if _is_own(kind.__module__)
    }


@cache
def _is_own(module: str | None) -> bool:
    """Whether a module is the user's script or a local file, and not part of Python, pipeshard or an installed
    package."""
    name = (module or "").partition(".")[0]
    if not name or name == "pipeshard" or name in sys.stdlib_module_names - {"__main__"}:
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def _is_apart(value: Any) -> bool:
    """Whether the walk skips a value: a dataset, loader, sampler or tokenizer, an object of TRAINER_LIBRARIES, or a
    class or function that is not the user's own."""
    if isinstance(value, DATA):
        return True
    if isinstance(value, type | FunctionType):
        return not _is_own(value.__module__)
    return type(value).__module__.partition(".")[0] in TRAINER_LIBRARIES


def _changed_by_threads(trainer: Any) -> set[int]:
    """The ids of the objects that running threads may change.

    A callback, such as a monitor, is included if the callback or an object in its attributes is a thread, has a method
    that is the target of a thread, or is an argument of a target. An attribute of the Trainer is included if it is a
    thread or has such a method, as transformers' memory tracker does.
    """
    running = [(thread, getattr(thread, "_target", None)) for thread in threading.enumerate()]
    running += [(thread, thread.function) for thread, _ in running if isinstance(thread, threading.Timer)]
    called = {id(thread) for thread, _ in running if thread is not threading.main_thread()}
    called |= {id(target.__self__) for _, target in running if isinstance(target, MethodType)}
    monitors = {id(each) for each in vars(trainer).values() if id(each) in called}
    passed = [argument for thread, _ in running for argument in getattr(thread, "_args", ())]
    called |= {id(one) for one in passed if is_object(one) or isinstance(one, list | dict | set | deque)}
    return monitors | {id(each) for each in trainer.callback_handler.callbacks if _reaches(each, called, trainer)}


def _reaches(value: Any, ids: Collection[int], trainer: Any, depth: int = 3) -> bool:
    """Whether the value, unless it is the Trainer, or an object in its attributes up to this depth has such an id."""
    if id(value) in ids:
        return value is not trainer
    if not depth or value is trainer or isinstance(value, nn.Module) or not is_object(value) or _is_apart(value):
        return False
    return any(_reaches(each, ids, trainer, depth - 1) for each in content_of(value, "attr").values())


def _added(change: Change) -> list[Any]:
    """The entries that were appended to a list, or [] if the list has changed in another way. Only these entries
    are sent, so that a history of all steps is not sent in each step."""
    if not isinstance(change.holder, list) or len(change.now) <= len(change.before):
        return []
    is_longer = all(map(is_same, change.before, change.now))
    return list(change.now[len(change.before) :]) if is_longer else []


def _mark(tensor: Tensor, copies: bool) -> Any:
    """A mark that changes with a tensor's values: a copy or, for a large tensor without `copies`, a sum. None if the
    tensor is on meta or not strided."""
    is_small = tensor.numel() * tensor.element_size() <= SMALL_BYTES
    if tensor.is_meta or tensor.layout is not torch.strided:
        return None
    return tensor.detach().clone() if copies or is_small else _tensor_sum(tensor)


def _is_marked(tensor: Tensor, mark: Any) -> bool:
    if mark is None:
        return True
    if not isinstance(mark, Tensor):
        return bool(_tensor_sum(tensor) == mark)
    if tensor.shape != mark.shape or tensor.dtype != mark.dtype or tensor.is_meta:
        return False
    if torch.equal(tensor, mark):
        return True
    return mark.is_floating_point() and torch.equal(tensor.nan_to_num(), mark.nan_to_num())


def _write(target: Any, value: Any) -> None:
    """Overwrite the values of a tensor or an array in place."""
    if isinstance(target, np.ndarray):
        target[...] = value
        return
    with torch.no_grad():
        target.data.copy_(value)


def _tensor_sum(tensor: Tensor) -> int:
    return int(sum_of_words(tensor))


def _copied(arrays: Iterable[np.ndarray[Any, Any]]) -> dict[int, np.ndarray[Any, Any]]:
    """Copies of the arrays that can be written to, by id. A view is restored with its base, if that is also copied."""
    writable = {id(array): array for array in arrays if array.flags.writeable and not _is_mapped(array)}
    return {number: array.copy() for number, array in writable.items() if id(array.base) not in writable}


def _is_mapped(array: np.ndarray[Any, Any]) -> bool:
    """Whether the array is a part of a mapped file, which may exceed the memory."""
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return isinstance(base, mmap.mmap)


def _code(array: np.ndarray[Any, Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


def _position(file: Any) -> int:
    try:
        return int(file.tell())
    except (OSError, ValueError):  # a pipe, or closed
        return -1


def _place_name(path: Path) -> str:
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
    raise _not_sent(where, value)


def _found(name: Any) -> Any:
    """The class or function of this name in a module that this process has imported."""
    module, path = name
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _is_python(value: Any) -> bool:
    """Whether a value is a plain Python or torch value. False for numpy's scalars, which are sent as bytes."""
    return isinstance(value, PLAIN) and not isinstance(value, np.generic)


def _not_sent(where: str, value: Any) -> UsageError:
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
