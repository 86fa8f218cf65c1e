"""Kept: finds changes to the Python state of a Trainer and its callbacks, and undoes them or sends them to other ranks.

compute_loss runs on the last stage, and may change the Trainer's state. KeptState finds the changes by comparison, as
Snapshot does for changes by a model's code: it records the state that is reachable from the Trainer before the call,
and compares it with the state after the call. trainer/serialization.py pickles the changes.
"""

import io
import threading
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from pickle import PicklingError
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeshard.errors import UsageError
from pipeshard.graph.places import (
    GENERATORS,
    LARGEST_ARRAY,
    PLAIN,
    PathStep,
    PlacePath,
    content_of,
    is_object,
    is_same,
    put,
    put_content,
)
from pipeshard.graph.snapshot import Change, Snapshot, undo
from pipeshard.graph.writes import sum_of_words
from pipeshard.trainer.serialization import (
    Pickled,
    ValueReader,
    ValueWriter,
    is_apart,
    is_of_script,
    place_name,
    sending,
)

# Attributes of a Trainer that KeptState skips: compute_loss may read them, but keeps no state in them.
NOT_KEPT = frozenset(
    {"model", "model_wrapped", "ref_model", "optimizer", "lr_scheduler", "train_dataset", "eval_dataset"}
    | {"accelerator", "processing_class", "data_collator", "pipeline", "_stages", "_objective", "_loader", "_held"}
    | {"reward_funcs", "reward_processing_classes", "_buffered_inputs", "_num_items", "_left", "_unreported"}
    | {"_latest_loader"}
)
LONG = 1000  # entries: in a longer list or dict, the entries' identities are compared, not their content
MANY = 64  # entries: in a longer container, only torch's version counters detect writes to tensors
SMALL_BYTES = 1 << 20  # bytes: tensors up to this size are copied for the comparison


class KeptState(Snapshot):
    """A snapshot of everything reachable from a Trainer, its callbacks and its classes, except models, data and library
    objects.

    With `copies`, dense tensors of any size can be restored; otherwise, only dense tensors of up to SMALL_BYTES. Sparse
    tensors, and arrays of more than LARGEST_ARRAY bytes, are compared, but cannot be restored.
    """

    def __init__(self, trainer: Any, copies: bool = False) -> None:
        self.trainer, self.copies = trainer, copies
        self.roots = _roots(trainer)
        self.marks: list[Any] = []  # one per tensor
        self.arrays: list[tuple[PlacePath, np.ndarray[Any, Any], int]] = []  # large arrays, with checksums
        self.files: list[tuple[PlacePath, Any, int]] = []
        self._of_threads = _changed_by_threads(trainer)
        named = ((name, vars(trainer).get(name)) for name in NOT_KEPT)
        self._apart = {id(value): (PathStep("root", "trainer"), PathStep("attr", name)) for name, value in named}
        super().__init__(self.roots, [value for name in NOT_KEPT if (value := vars(trainer).get(name)) is not None])
        self.marks = [
            _mark(tensor, copies) if copies or not hasattr(holder, "__len__") or len(holder) <= MANY else None
            for _, holder, _, tensor, _ in self.tensors
        ]

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
                    f"compute_loss reads or writes the open file {place_name(path)}. In a step, only the last stage "
                    "calls compute_loss, and a trace cannot undo the access: read or write the file in log() or in a "
                    "callback, and exchange the values with compute_loss through a list"
                )

    def restore(self) -> None:
        """Restore everything that has changed. Raises UsageError, after restoring the rest, for a tensor or an array
        that cannot be restored."""
        marks = {id(tensor): mark for (*_, tensor, _), mark in zip(self.tensors, self.marks, strict=True)}
        sums, lost = {id(array): code for _, array, code in self.arrays}, list[Change]()
        for change in list(self.changes()):
            mark = marks.get(id(change.now))
            if change.before is not change.now:
                undo(change)
            elif isinstance(mark, Tensor):
                _write(change.now, mark)
            else:
                lost.append(change)
        for path, _, _, value, _ in lost:
            # restoring a small view of an array may have restored the array
            if isinstance(value, Tensor) or _code(value) != sums[id(value)]:
                raise self._refused(path, value)

    def _refused(self, path: PlacePath, value: Any) -> UsageError:
        """Return the error for a modified tensor or large array that cannot be restored."""
        is_sparse = isinstance(value, Tensor) and value.layout is not torch.strided  # has no nbytes
        size = "" if is_sparse else f" ({value.nbytes / 2**20:.1f} MiB)"
        what = f"compute_loss modifies {place_name(path)}{size} in place"
        if isinstance(value, np.ndarray):
            return UsageError(
                f"{what}, but a change to an array of more than 1 MiB cannot be undone: use a torch tensor and change "
                "it after the model call, or make the change in a callback"
            )
        if self.copies:
            return UsageError(
                f"{what}, but a trace cannot undo a change to a sparse tensor: use a dense tensor, or make the change "
                "in a callback"
            )
        return UsageError(
            f"{what} before it calls the model, but every rank would have to undo this change: make the change after "
            "the model call"
        )

    def _skips(self, path: PlacePath, value: Any) -> bool:
        """Whether the walk skips the value. Also records large arrays and open files."""
        if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.nbytes > LARGEST_ARRAY:
            self.arrays.append((path, value, _code(value)))
        elif isinstance(value, io.IOBase) and (at := _position(value)) >= 0:
            self.files.append((path, value, at))
        return is_apart(value) or id(value) in self._of_threads

    def _ways_to_hold(self, value: Any) -> Iterable[str]:
        return ("attr",) if value is self.trainer else super()._ways_to_hold(value)

    def _entries(self, path: PlacePath, content: Any) -> Iterable[tuple[Any, Any]]:
        is_long = len(content) > LONG or path[-1].key == "log_history"
        return () if is_long else super()._entries(path, content)

    def _constants_of(self, value: Any) -> Iterator[tuple[PathStep, Any]]:
        for step, child in super()._constants_of(value):
            if not isinstance(child, type | FunctionType) or is_of_script(child.__module__):
                yield step, child

    # changes sent to other ranks

    def told(self, value: Any) -> Pickled:
        """Pickle the changes, and a value that compute_loss has returned or logged, for `adopt`. Raises UsageError if
        a change or the value cannot be sent."""
        tensors = {id(tensor): path for path, _, _, tensor, _ in self.tensors}
        writer = ValueWriter({**self.paths, **self._apart, **tensors}, self.roots)
        changes = list(self.changes())
        writer.dump(len(changes))
        for change in changes:
            if change.before is change.now and isinstance(change.now, np.ndarray):
                raise self._refused(change.path, change.now)
            with sending(place_name(change.path)):
                writer.dump(_said(change, writer))
        with sending("the result or log of compute_loss"):
            writer.dump(value)
        return writer.written

    @staticmethod
    def adopt(trainer: Any, told: Pickled, device: torch.device) -> Any:
        """Apply the changes in `told`, which another rank has pickled, and return that rank's value."""
        reader = ValueReader(told, _roots(trainer), device)
        changes = [reader.load() for _ in range(reader.load())]  # resolves all paths before the first change
        value = reader.load()
        for how, holder, key, now in changes:
            if how == "write":
                _write(holder, now)
            elif how == "added":
                holder[key:] = now  # in evaluation, replaces the entries that this rank has appended
            elif how == "content":
                put_content(holder, now)
            else:
                put(holder, how, key, now)
        return value


def _said(change: Change, writer: ValueWriter) -> tuple[str, Any, Any, Any]:
    """A change as (how, holder, key, new value). Raises PicklingError for a change that other ranks cannot apply."""
    how, key = change.path[-1]
    said = how, change.holder, key, change.now
    if change.before is change.now:
        said = "write", change.now, None, change.now.detach()
    elif added := _added(change):
        said = "added", change.holder, len(change.before), added
    elif change.is_of_list:
        said = "content", change.holder, None, change.now
    elif how == "state" and not isinstance(change.holder, (np.ndarray, *GENERATORS)):
        raise PicklingError(f"it holds an instance of {type(change.holder).__name__}")
    if writer.path_of(said[1]) is None or not isinstance(said[2], PLAIN):
        raise PicklingError("it is in a set, in an object that was removed, or in a dict whose keys are objects")
    return said


def _roots(trainer: Any) -> dict[str, Any]:
    """The objects to walk, by name: the Trainer, and the classes in its MRO that the script defines."""
    return {"trainer": trainer} | {
        kind.__qualname__: kind for kind in type(trainer).__mro__ if is_of_script(kind.__module__)
    }


def _changed_by_threads(trainer: Any) -> set[int]:
    """The ids of the objects that running threads may change.

    A callback (such as a monitor) is included if the callback itself, or an object in its attributes, is a thread, the
    owner of a method that a thread runs, or an argument of a thread. The value of a Trainer's attribute is included if
    the value is a thread or the owner of such a method, such as transformers' memory tracker.
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
    """Whether the value, or an object in its attributes up to `depth`, has an id in `ids`. Skips the Trainer itself."""
    if id(value) in ids:
        return value is not trainer
    if not depth or value is trainer or isinstance(value, nn.Module) or not is_object(value) or is_apart(value):
        return False
    return any(_reaches(each, ids, trainer, depth - 1) for each in content_of(value, "attr").values())


def _added(change: Change) -> list[Any]:
    """The entries that were appended to a list, or [] for any other change of the list. Only the appended entries are
    sent, so that a step does not send the history of all steps."""
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
    return tensor.detach().clone() if copies or is_small else int(sum_of_words(tensor))


def _is_marked(tensor: Tensor, mark: Any) -> bool:
    if mark is None:
        return True
    if not isinstance(mark, Tensor):
        return int(sum_of_words(tensor)) == mark
    if tensor.shape != mark.shape or tensor.dtype != mark.dtype or tensor.is_meta:
        return False
    if torch.equal(tensor, mark):
        return True
    return mark.is_floating_point() and torch.equal(tensor.nan_to_num(), mark.nan_to_num())


def _write(target: Tensor, value: Tensor) -> None:
    """Overwrite the values of a tensor in place."""
    with torch.no_grad():
        target.data.copy_(value)


def _code(array: np.ndarray[Any, Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


def _position(file: Any) -> int:
    try:
        return int(file.tell())
    except (OSError, ValueError):  # a pipe, or closed
        return -1
