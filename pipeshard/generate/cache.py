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
        self._before: dict[EntryPath, Any] = {}
        self._own: set[EntryPath] = set()

    def begin(self) -> None:
        """Record the entries before a forward, for `changes`."""
        self._before = {path: _signature(entry) for path, entry in _entries(self.cache)}

    def changes(self) -> list[Any]:
        """The entries that the forward has changed on this rank, as plain data for `update` on other ranks."""
        changed = {p: e for p, e in _entries(self.cache) if self._before.get(p, _NONE) != _signature(e)}
        blank = {p for p, e in changed.items() if p not in self._before and _is_blank(e)}
        self._own |= changed.keys() - blank
        return [[path, _described(entry), path in blank] for path, entry in changed.items()]

    def update(self, changes: list[Any]) -> None:
        """Create ghosts for entries that another rank has changed, except entries that this rank has written itself.
        A blank entry, which a layer creates in passing for an earlier layer of another rank, replaces no other."""
        here = {path for path, _ in _entries(self.cache)}
        for steps, told, is_blank in changes:  # JSON has turned the path into a list
            path = tuple(steps)
            if path not in self._own and not (is_blank and path in here):
                self._set(path, told)

    def adopt(self, other: "Entries") -> None:
        """Update this cache with the entries that a forward has changed in `other`, a copy of this cache."""
        for path, entry in _entries(other.cache):
            if other._before.get(path, _NONE) != _signature(entry):
                _put_at(self._holder(path), path[-1], entry)

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


def _is_blank(entry: Any) -> bool:
    """Whether an entry holds no tensors."""
    return not tree_tensors(getattr(entry, "__dict__", entry))


def _described(entry: Any) -> Any:
    """An entry as plain data: a value, or the class name and the attributes of an object."""
    inside = getattr(entry, "__dict__", None)
    if inside is None or isinstance(entry, Tensor):
        return {"value": describe(entry, _put, {})}
    return {"kind": type(entry).__name__, "of": {name: describe(item, _put, {}) for name, item in inside.items()}}


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
