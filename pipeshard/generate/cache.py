"""Cache: tracks the entries of a cache that this rank's units write, and describes these entries for other ranks.

A stage holds the states of its own layers. For the layers of other stages, the stage has ghosts: entries of the same
class with the same plain values, but with tensors on meta. The lengths that a cache reports are therefore correct, and
ghosts need no memory. Code that reads the values of a ghost fails with a torch error, since meta tensors have no
values.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pipeshard.errors import TraceError
from pipeshard.generate.described import SMALL, describe, dtype_of, restore, spec_of
from pipeshard.hf import is_cache
from pipeshard.private import tree_tensors

EntryPath = tuple[str | int, ...]


class GhostState(Tensor):
    """The state of another stage's layer, on meta. It stays on meta even if code moves all states of a cache to a
    device. Copies of a cache share it, since it has no values that a copy could change."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("cpu", "cuda", "to", "__deepcopy__"):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


class Entries:
    """The entries of one cache on this rank: the cache's layers, and its other attributes."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self._before: dict[EntryPath, dict[str, Any]] = {}
        self._own: dict[EntryPath, set[str]] = {}  # the attributes that this rank has written

    def begin(self) -> None:
        """Record the entries before a forward, for `changes`."""
        self._before = {path: _signatures(entry) for path, entry in _entries(self.cache)}

    def changes(self) -> list[Any]:
        """The entries that the forward has changed on this rank, as plain data for `update` on other ranks."""
        told = []
        for path, entry, names in self._changed():
            is_blank = path not in self._before and _is_blank(entry)
            if not is_blank:
                self._own.setdefault(path, set()).update(names)
            told.append([path, _described(entry, names), is_blank])
        return told

    def update(self, changes: list[Any]) -> None:
        """Create ghosts for entries that another rank has changed, except attributes that this rank has written itself:
        glue of every rank may write to an entry. A blank entry, which a layer creates in passing for an earlier layer
        of another rank, replaces no other."""
        here = {path for path, _ in _entries(self.cache)}
        for steps, told, is_blank in changes:  # JSON has turned the path into a list
            path = tuple(steps)
            own = self._own.get(path, set())
            if "of" in told:
                told["of"] = {name: item for name, item in told["of"].items() if name not in own}
            if not (is_blank and path in here) and (told.get("of") or not own):
                self._set(path, told)

    def adopt(self, other: "Entries") -> None:
        """Update this cache with the entries that a forward has changed in `other`, a copy of this cache."""
        here = dict(_entries(self.cache))
        for path, entry, names in other._changed():
            if path in here and type(here[path]) is type(entry) and _VALUE not in names:
                vars(here[path]).update({name: vars(entry)[name] for name in names})
            else:
                _put_at(self._holder(path), path[-1], entry)

    def _changed(self) -> Iterator[tuple[EntryPath, Any, set[str]]]:
        """The entries that have changed since `begin`, and the names of their changed attributes."""
        for path, entry in _entries(self.cache):
            before, now = self._before.get(path, {}), _signatures(entry)
            if names := {name for name, signature in now.items() if before.get(name, _NONE) != signature}:
                yield path, entry, names

    def _set(self, path: EntryPath, told: Any) -> None:
        holder, last = self._holder(path), path[-1]
        if isinstance(holder, list):
            self._lengthen(holder, int(last))
            here = holder[int(last)]
        else:
            here = holder.get(last) if isinstance(holder, dict) else getattr(holder, str(last), None)
        _put_at(holder, last, _ghost(told, here))

    def _holder(self, path: EntryPath) -> Any:
        """The list, mapping or object that contains the entry at this path."""
        holder = self.cache
        for step in path[:-1]:
            holder = getattr(holder, step) if isinstance(step, str) else holder[step]
        return holder

    def _lengthen(self, entries: list[Any], last: int) -> None:
        """Extend `entries` to index `last`, since some caches create their entries only when layers run."""
        if not entries:
            raise TraceError(
                f"{type(self.cache).__name__} creates its entries only when layers run, but this rank has not run a "
                "layer, so a pipeline cannot generate with this cache. Pass a cache that is created from the config "
                "(DynamicCache(config=model.config))"
            )
        while len(entries) <= last:
            entries.append(copy.copy(entries[0]))


_NONE = object()
_VALUE = ""  # stands for the value itself, if an entry is not an object with attributes


def _put_at(holder: Any, last: str | int, entry: Any) -> None:
    if isinstance(holder, list) and last == len(holder):
        holder.append(entry)
    elif isinstance(holder, list | dict):
        holder[last] = entry  # type: ignore[index]
    else:
        setattr(holder, str(last), entry)


def _entries(cache: Any, at: EntryPath = ()) -> Iterator[tuple[EntryPath, Any]]:
    """The path and the value of each entry of a cache. The entries are the members of the cache's lists and mappings,
    and the cache's other attributes. Each entry is sent separately."""
    for name, value in vars(cache).items():
        path = (*at, name)
        if is_cache(value):
            yield from _entries(value, path)
        elif isinstance(value, list):
            yield from (((*path, k), item) for k, item in enumerate(value))
        elif isinstance(value, dict):
            yield from (((*path, key), item) for key, item in value.items() if isinstance(key, str | int))
        elif not callable(value):
            yield path, value


def _signature(value: Any) -> Any:
    """A signature that changes when a value is changed or replaced."""
    if isinstance(value, Tensor):
        return id(value), value.shape, 0 if value.is_inference() else value._version
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((key, _signature(item)) for key, item in value.items())
    if isinstance(value, bool | int | float | str | None):
        return value
    inside = getattr(value, "__dict__", None)
    return id(value) if inside is None else (type(value), _signature(inside))


def _signatures(entry: Any) -> dict[str, Any]:
    """The signature of each attribute of an entry, or of its value."""
    if not _is_object(entry):
        return {_VALUE: _signature(entry)}
    return {name: _signature(item) for name, item in vars(entry).items()}


def _is_object(entry: Any) -> bool:
    return hasattr(entry, "__dict__") and not isinstance(entry, Tensor)


def _is_blank(entry: Any) -> bool:
    """Whether an entry holds no tensors."""
    return not tree_tensors(getattr(entry, "__dict__", entry))


def _described(entry: Any, names: set[str]) -> Any:
    """An entry as plain data: a value, or the class name and the attributes `names` of an object."""
    if not _is_object(entry):
        return {"value": describe(entry, _put, {})}
    of = {name: describe(item, _put, {}) for name, item in vars(entry).items() if name in names}
    return {"kind": type(entry).__name__, "of": of}


def _put(tensor: Tensor) -> Any:
    if tensor.numel() <= SMALL and not tensor.is_floating_point() and not tensor.is_meta:
        return [*spec_of(tensor), tensor.flatten().tolist()]
    return spec_of(tensor)


def _ghost(told: Any, here: Any) -> Any:
    """The ghost of a received entry, which replaces `here`, the current entry on this rank."""

    def get(spec: Any) -> Tensor:
        shape, dtype, *values = spec
        if values:
            return torch.tensor(values[0], dtype=dtype_of(dtype)).view(shape)
        return torch.empty(shape, dtype=dtype_of(dtype), device="meta").as_subclass(GhostState)

    if "value" in told:
        return restore(told["value"], get, {})
    if type(here).__name__ != told["kind"]:
        raise TraceError(
            f"a cache entry has the class {told['kind']} on the rank that fills it, but {type(here).__name__} on this "
            "rank. Create the same cache on all ranks before they generate"
        )
    ghost = copy.copy(here)
    for name, item in told["of"].items():
        value = restore(item, get, {})
        if value is not None or name not in vars(ghost) or vars(ghost)[name] is None or _is_plain(vars(ghost)[name]):
            setattr(ghost, name, value)
    return ghost


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor | bool | int | float | str | list | tuple | dict)
