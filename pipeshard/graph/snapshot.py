"""Snapshot: a record of the mutable state that code can reach from some objects, used to find later changes.

The state that a unit or glue leaves behind is found by comparison: everything that the code can reach is recorded
before a run, and compared after the run. So pipeshard needs no list of the ways in which models leave state. A run on a
copy of the objects would not work, since hooks, generators and shared objects must remain the original objects.
"""

import functools
import itertools
import operator
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from pipeshard.graph.places import (
    HOOKS,
    MISSING,
    PLAIN,
    PathStep,
    PlacePath,
    constants_of,
    content_of,
    entries_of,
    is_same,
    numbers_in,
    numbers_inside,
    own,
    put,
    put_content,
    slots,
    ways_to_hold,
)
from pipeshard.options import is_number
from pipeshard.private import DisableTorchFunction

MOST_OBJECTS = 200_000  # the maximum number of objects that are walked
CALLED_HOOKS = frozenset(name for name in HOOKS if "state_dict" not in name)  # hooks that calls and backward passes run


class Thresholds(NamedTuple):
    """Numbers with which code may compare a float: `in_code` are the numbers in functions, and `in_places` counts the
    places that contain each number."""

    in_code: set[float]
    in_places: Counter[float]

    def without(self, moved: Iterable[tuple[float, float]]) -> Self:
        """These numbers without the former numbers of places that have changed. `moved` contains (before, now) for each
        of these places."""
        return self._replace(in_places=self.in_places - Counter(before for before, _ in moved))

    def lie_between(self, before: float, now: float) -> bool:
        """Whether a comparison with one of these numbers may have different results for `before` and `now`."""
        least, most = min(before, now), max(before, now)
        return any(least <= number <= most for number in itertools.chain(self.in_code, self.in_places))


class Change(NamedTuple):
    """A change at `path`: `holder[key]` was `before` and is `now`. If `before is now`, the value is a tensor that was
    written to. The whole content of a list or set counts as one place, whose `key` is None."""

    path: PlacePath
    holder: Any
    key: Any
    before: Any
    now: Any

    @property
    def is_of_list(self) -> bool:
        """Whether `before` and `now` are the whole contents of a list or a set."""
        return self.key is None and not isinstance(self.holder, MutableMapping)


class Holder(NamedTuple):
    """An object whose content can change, and a copy of this content. `live` is the dict that stores the content, or
    None if no dict does. `values` are the recorded values of this dict."""

    path: PlacePath
    object: Any
    how: str
    content: Any
    live: dict[Any, Any] | None
    values: list[Any]


class Snapshot:
    """The state of everything that is reachable from `roots`, recorded when the Snapshot is created. Objects in
    `without` are not entered. A path begins with the name of its root. `then` contains further roots, which are walked
    last: the path of an object that can also be reached from `roots` begins at one of `roots`.

    Attributes:
        paths: the path of each holder, by id.
        tensors: for each tensor, the path, holder and key of its place, the tensor itself, and its `_version`.
    """

    def __init__(
        self, roots: Mapping[str, Any], without: Iterable[Any] = (), then: Mapping[str, Any] | None = None
    ) -> None:
        self.holders: list[Holder] = []
        self.paths: dict[int, PlacePath] = {}
        self.tensors: list[tuple[PlacePath, Any, Any, Tensor, int]] = []
        self._seen = {id(value): value for value in without}  # kept alive, so that no id is reused
        with DisableTorchFunction():  # faster: no operator runs, but attributes of hundreds of tensors are read
            for group in (roots, then or {}):
                self._walk(deque(((PathStep("root", name),), root) for name, root in group.items()))
        self._empty = [holder.live for holder in self.holders if holder.live is not None and not holder.values]
        self._full = [holder for holder in self.holders if holder.live is None or holder.values]

    def changes(self) -> Iterator[Change]:
        """The changes since the Snapshot was created: replaced values, then tensors that were written to, both in the
        order of the walk."""
        yield from self.replaced()
        with DisableTorchFunction():
            written = [entry for entry in self.tensors if entry[3]._version != entry[4]]
        for path, holder, key, tensor, _ in written:
            yield Change(path, holder, key, tensor, tensor)

    def replaced(self, same: Callable[[Any, Any], bool] = is_same) -> Iterator[Change]:
        """The changes of places whose values were replaced. This method must be fast if nothing has changed, since
        every step compares the state of a whole model.

        `same(before, now)` decides whether two different objects count as equal.
        """
        for path, holder, how, content, live, values in self.holders if any(self._empty) else self._full:
            if live is not None and len(live) == len(values) and all(map(operator.is_, live.values(), values)):
                continue
            now = content_of(holder, how)
            if not isinstance(now, dict):
                if len(now) != len(content) or not all(map(same, content, now)):
                    yield Change(path, holder, None, content, now)
                continue
            for key in dict.fromkeys((*content, *now)):
                old, new = content.get(key, MISSING), now.get(key, MISSING)
                if old is not new and not same(old, new):
                    yield Change((*path, _step(how, key)), holder, key, old, new)

    @functools.cached_property
    def thresholds(self) -> Thresholds:
        """The numbers with which code may compare a float: numbers in the code of functions, in places, and inside
        tuples, small arrays and small tensors."""
        functions = [value for value in self._seen.values() if isinstance(value, FunctionType)]
        contents = (holder.content for holder in self.holders)
        values = (value for held in contents for value in (held.values() if isinstance(held, dict) else held))
        in_code = {float(number) for function in functions for number in numbers_in(function)}
        inside = (number for value in self._seen.values() for number in numbers_inside(value))
        return Thresholds(in_code, Counter([*(float(value) for value in values if is_number(value)), *inside]))

    @property
    def reached(self) -> Iterable[Any]:
        """All objects and tensors that the walk has met, including objects that it does not enter."""
        return self._seen.values()

    def current(self) -> Iterator[tuple[PlacePath, Tensor]]:
        """The tensors that the recorded objects contain now, with their paths. Some of them may have replaced recorded
        tensors."""
        yield from ((path, tensor) for path, holder, _, tensor, _ in self.tensors if id(holder) not in self.paths)
        for path, holder, how, *_ in self._with_tensors:
            for key, entry in entries_of(content_of(holder, how)):
                if isinstance(entry, Tensor):
                    yield (*path, _step(how, key)), entry

    @functools.cached_property
    def _with_tensors(self) -> list[Holder]:
        return [holder for holder in self.holders if any(isinstance(e, Tensor) for _, e in entries_of(holder.content))]

    def constants(self) -> set[int]:
        """The ids of values to which other values refer, but not at a place (for example, the items of a tuple)."""
        return {id(value) for seen in self._seen.values() for _, value in constants_of(seen)}

    def restore(self) -> None:
        """Restore the content of every place, except the values of tensors."""
        for change in list(self.replaced()):
            undo(change)

    def _walk(self, queue: deque[tuple[PlacePath, Any]]) -> None:
        seen = self._seen
        while queue and len(seen) < MOST_OBJECTS:
            path, value = queue.popleft()
            if id(value) in seen or isinstance(value, PLAIN) or self._skips(path, value):
                continue
            seen[id(value)] = value
            for how in self._ways_to_hold(value):
                self.paths[id(value)] = path
                content = content_of(value, how)
                live = _live_dict(value, how)
                self.holders.append(Holder(path, value, how, content, live, list(live.values()) if live else []))
                for key, entry in self._entries(path, content):
                    if not isinstance(entry, PLAIN):
                        self._meet((*path, _step(how, key)), value, key, entry, queue)
            for step, child in self._constants_of(value):
                self._meet((*path, step), value, step.key, child, queue)

    # Subclasses may override the following methods.

    def _skips(self, path: PlacePath, value: Any) -> bool:
        return False

    def _ways_to_hold(self, value: Any) -> Iterable[str]:
        return ways_to_hold(value)

    def _entries(self, path: PlacePath, content: Any) -> Iterable[tuple[Any, Any]]:
        """The entries of a holder that the walk visits, with their keys."""
        return entries_of(content)

    def _constants_of(self, value: Any) -> Iterator[tuple[PathStep, Any]]:
        return constants_of(value)

    def _meet(self, path: PlacePath, holder: Any, key: Any, entry: Any, queue: deque[tuple[PlacePath, Any]]) -> None:
        """Record `entry`, which `holder` contains at `key`, if it is a tensor. Add any other object to the walk."""
        if not isinstance(entry, Tensor):
            queue.append((path, own(entry)))
        elif id(entry) not in self._seen and not entry.is_inference():
            self._seen[id(entry)] = entry
            self.tensors.append((path, holder, key, entry, entry._version))


def _live_dict(holder: Any, how: str) -> dict[Any, Any] | None:
    """The dict that stores a holder's content (dicts are fast to compare), or None."""
    live = holder
    if how == "attr":
        live = None if slots(holder) else holder.__dict__
    return live if how in ("attr", "item") and type(live) is dict else None


def undo(change: Change) -> None:
    """Restore the value that a place had before the change."""
    if change.is_of_list:
        put_content(change.holder, change.before)
    else:
        put(change.holder, change.path[-1].how, change.key, change.before)


def _step(how: str, key: Any) -> PathStep:
    """The step from a holder to its entry `key`."""
    return PathStep("item" if how == "list" else how, key)


@contextmanager
def noting_reads(objects: Iterable[Any], note: Callable[[Any, str], None]) -> Iterator[set[int]]:
    """Context manager that calls `note(object, name)` whenever the attribute `name` of an object in `objects` is read.

    Yields the ids of the objects that are watched. An object whose class is implemented in C cannot be watched.
    """
    classes: dict[Any, set[int]] = {}
    for value in objects:
        classes.setdefault(type(value), set()).add(id(value))
    with ExitStack() as stack:
        for kind, watched in list(classes.items()):
            override, get = kind.__dict__.get("__getattribute__"), kind.__getattribute__

            def noting(self: Any, name: str, get: Any = get, watched: set[int] = watched) -> Any:
                if id(self) in watched:
                    note(self, name)
                return get(self, name)

            try:
                kind.__getattribute__ = noting
            except TypeError:
                del classes[kind]
            else:
                undo = functools.partial(setattr, kind, "__getattribute__", override)
                stack.callback(undo if override else functools.partial(delattr, kind, "__getattribute__"))
        yield set().union(*classes.values())


class Hooks:
    """The hooks of `modules` at the time when this object is created. Each of `modules` is given as (path, module). A
    Snapshot walks the hooks, but does not compare the dicts that contain the hooks, since the keys of these dicts are
    ids of handles."""

    def __init__(self, modules: Iterable[tuple[PlacePath, nn.Module]], names: Iterable[str] = CALLED_HOOKS) -> None:
        held = ((path, name, module.__dict__.get(name)) for path, module in modules for name in names)
        self.recorded = [((*path, PathStep("attr", name)), d, dict(d)) for path, name, d in held if d is not None]
        self._empty = [hooks for _, hooks, content in self.recorded if not content]
        self._full = [entry for entry in self.recorded if entry[2]]

    def changed(self) -> Iterator[tuple[PlacePath, Any, Any]]:
        """The dicts of hooks that have changed, each as (path, dict, recorded content). This method is fast if the
        modules have no hooks."""
        return (entry for entry in (self.recorded if any(self._empty) else self._full) if entry[1] != entry[2])
