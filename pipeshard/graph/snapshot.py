"""Snapshot: a record of the mutable state that code can reach from some objects, used to find later changes.

The state that a unit or glue leaves behind is found by comparison: everything that the code can reach is recorded
before a run, and compared after the run. So pipeshard needs no list of the ways in which models leave state. Running a
copy of the objects would not work, since hooks, generators and shared objects must stay the same objects.

A Dataflow is valid only for the Python state (flags) with which it was traced. torch.compile guards the values that its
trace has read. Here, some reads of glue and units are unknown, so every step compares the whole Python state. Each
known state has a number.
"""

import functools
import inspect
import itertools
import math
import operator
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipeshard.graph.places import (
    HOOKS,
    MISSING,
    PLAIN,
    PathStep,
    PlacePath,
    constants_of,
    content_of,
    defaults_of,
    entries_of,
    format_path,
    is_same,
    is_users_function,
    names_in,
    numbers_in,
    numbers_inside,
    own,
    put,
    put_content,
    slots,
    ways_to_hold,
)
from pipeshard.graph.writes import count_reads, reads
from pipeshard.options import is_number
from pipeshard.private import DisableTorchFunction
from pipeshard.replaced import StandIn

MOST_OBJECTS = 200_000  # the maximum number of objects that are walked
CALLED_HOOKS = frozenset(name for name in HOOKS if "state_dict" not in name)  # hooks that calls and backward passes run


class Thresholds(NamedTuple):
    """Numbers with which code may compare a float: `in_code` are the numbers in functions, and `in_places` counts the
    places that contain each number."""

    in_code: set[float]
    in_places: Counter[float]

    def without(self, moved: Iterable[tuple[float, float]]) -> Self:
        """These numbers without the former numbers of changed places. `moved` has (before, now) for each changed
        place."""
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
    """An object whose content can be changed, and a copy of this content. `live` is the dict that stores the content,
    if there is one, and `values` are the recorded values of this dict."""

    path: PlacePath
    object: Any
    how: str
    content: Any
    live: dict[Any, Any] | None
    values: list[Any]


class Snapshot:
    """The state of everything that is reachable from `roots`, other than through the objects in `without`, recorded
    when the Snapshot is created. Paths begin with the name of their root. `then` are roots that are walked last, so an
    object that `roots` also reach has a path from one of `roots`.

    Attributes:
        paths: the path of each holder, by id.
        tensors: for each tensor, its place (path, holder, key), the tensor, and its `_version`.
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
        """The changes of places whose values were replaced. Fast if nothing has changed, since every step
        compares the state of a whole model.

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
        """The tensors that the recorded objects contain now, with their paths. These tensors may have replaced the
        recorded tensors."""
        yield from ((path, tensor) for path, holder, _, tensor, _ in self.tensors if id(holder) not in self.paths)
        for path, holder, how, *_ in self._with_tensors:
            for key, entry in entries_of(content_of(holder, how)):
                if isinstance(entry, Tensor):
                    yield (*path, _step(how, key)), entry

    @functools.cached_property
    def _with_tensors(self) -> list[Holder]:
        return [holder for holder in self.holders if any(isinstance(e, Tensor) for _, e in entries_of(holder.content))]

    def constants(self) -> set[int]:
        """The ids of values to which other values refer without a place, such as items of a tuple."""
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
        """The entries of a holder that are walked, with their keys."""
        return entries_of(content)

    def _constants_of(self, value: Any) -> Iterator[tuple[PathStep, Any]]:
        return constants_of(value)

    def _meet(self, path: PlacePath, holder: Any, key: Any, entry: Any, queue: deque[tuple[PlacePath, Any]]) -> None:
        """Record the entry of `holder` at `key`: a tensor, or an object to walk."""
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


MOST_STATES = 16  # the maximum number of states that are recognized


class Looks:
    """Counts looks at something. `number` is the number of looks, and `new` are the numbers of the latest looks that
    found something new."""

    def __init__(self) -> None:
        self.number = 0
        self.new = deque[int](maxlen=MOST_STATES)

    def found(self) -> None:
        self.new.append(self.number)

    @property
    def is_restless(self) -> bool:
        """Whether the last look, and at least half of the latest looks, found something new."""
        new, most = self.new, self.new.maxlen or 0
        return len(new) == most and new[-1] == self.number and new[-1] - new[0] < 2 * most


class Flags:
    """Assigns a number to each state of a model's Python objects, or of another object (`beside`), such as a criterion.

    Changes that forwards themselves make (to counters, caches, and lists that they fill) do not count: `stepped` finds
    these changes by comparing the state before and after a step. For another object, changed values of tensors (except
    parameters) also count, even if the tensor was replaced. A float of such an object counts as changed only if its
    `kind_of_number` changes, or if the float passes a number with which the code may compare it. So a criterion's
    weights may be annealed.
    """

    def __init__(self, model: nn.Module, beside: Any = None) -> None:
        self.roots: dict[str, Any] = {"": model if beside is None else beside}
        self.without = () if beside is None else (model,)
        self.states: dict[int, Snapshot] = {}
        self.values: dict[int, dict[int, Tensor]] = {}  # by state and id: values of tensors that count
        self.reads: dict[int, dict[int, int]] = {}  # by state and id: uses of the `data` of these tensors
        self.trained: dict[int, dict[PlacePath, tuple[Tensor, bool]]] = {}  # by state: leaves, their requires_grad
        self.hooks: dict[int, Hooks] = {}  # by state
        self.moved: set[tuple[int, Any]] = set()  # (id of the holder, key) of changes by forwards
        self.moved_hooks: set[int] = set()  # the ids of hooks that forwards have registered or removed
        self.first_hook = 0  # the id of the first hook that was registered after the last call of `number`
        self.unsure: set[int] = set()  # states in which no step has run yet: the places that a step changes are unknown
        self.looks = Looks()
        self.now = self.next = 0  # the number of the current state, and of the next new one

    def number(self) -> int:
        """The number of the current state: the number of an equal known state, otherwise a new number."""
        self.looks.number += 1
        self.first_hook = RemovableHandle.next_id
        self.now = self._number()
        return self.now

    @property
    def is_unchanged(self) -> bool:
        """Whether no value has changed since the current state was first found, including values that do not count
        otherwise (numbers that a forward changes, annealed floats)."""
        state = self.states[self.now]
        return not any(True for _ in (state.changes() if self.without else flagged(state)))

    def newest_change(self) -> PlacePath:
        """The place of a change since the second newest state. Returns () if no place has changed, for example if only
        `requires_grad` has changed."""
        changes = self._changes(self.next - 2) if self.next - 2 in self.states else ()
        return next((change.path for change in changes if (id(change.holder), change.key) not in self.moved), ())

    def _number(self) -> int:
        for number in reversed(self.states):
            if any(leaf.requires_grad != required for leaf, required in self.trained[number].values()):
                continue
            if all((id(change.holder), change.key) in self.moved for change in self._changes(number)):
                self.states[number] = self.states.pop(number)  # moved to the end: the states in use are kept
                return number
        self.looks.found()
        if len(self.states) >= MOST_STATES:
            oldest = next(iter(self.states))
            for of_states in (self.states, self.values, self.reads, self.trained, self.hooks):
                del of_states[oldest]
        state = self.states[self.next] = Snapshot(self.roots, self.without)
        counting = [t for *_, t, _ in state.tensors if self.without and not isinstance(t, nn.Parameter)]
        self.values[self.next] = {id(tensor): tensor.detach().clone() for tensor in counting}
        self.reads[self.next] = {id(tensor): count_reads(tensor) for tensor in counting}
        self.trained[self.next] = self._trained(state)
        self.hooks[self.next] = Hooks((h.path, h.object) for h in state.holders if isinstance(h.object, nn.Module))
        self.unsure.add(self.next)
        self.next += 1
        return self.next - 1

    def foreign(self, number: int) -> dict[str, Tensor]:
        """The leaf tensors of a state, by place, that require grad and are not parameters of the model."""
        leaves = self.trained.get(number, {})
        return {format_path(path): leaf for path, (leaf, required) in leaves.items() if required}

    def _trained(self, state: Snapshot) -> dict[PlacePath, tuple[Tensor, bool]]:
        """By path, the leaf tensors of a state with their requires_grad. The model's own parameters are omitted, since
        the engine freezes and releases them."""
        own = {id(parameter) for model in self.without or self.roots.values() for parameter in model.parameters()}
        leaves = ((path, tensor) for path, *_, tensor, _ in state.tensors if id(tensor) not in own and tensor.is_leaf)
        return {path: (leaf, leaf.requires_grad) for path, leaf in leaves}

    def stepped(self) -> None:
        """Record that a step has run since the last call of `number`. Places that the first step in a state has changed
        do not count from now on, nor do hooks that any step has registered."""
        is_first = self.now in self.unsure & self.states.keys()
        if is_first or (self.first_hook != RemovableHandle.next_id and self.now in self.states):
            for _, hooks, content in self.hooks[self.now].changed():
                self.moved_hooks |= {key for key in hooks if key >= self.first_hook}
                self.moved_hooks |= content.keys() - hooks.keys() if is_first else set()
        if is_first:
            self.moved |= {(id(change.holder), change.key) for change in self._changes(self.now)}
        self.unsure.discard(self.now)

    def _changes(self, number: int) -> Iterator[Change]:
        state, values, hooked = self.states[number], self.values[number], self._changed_hooks(number)
        if not self.without:
            return itertools.chain(hooked, flagged(state))
        counting = (entry for entry in state.tensors if id(entry[3]) in values)
        others = (
            Change(path, holder, key, tensor, tensor)
            for path, holder, key, tensor, version in counting
            if (tensor._version, reads(tensor)) != (version, self.reads[number][id(tensor)])
            and not torch.equal(tensor, values[id(tensor)])
        )
        return itertools.chain(hooked, state.replaced(_Annealing(state, values)), others)

    def _changed_hooks(self, number: int) -> Iterator[Change]:
        for path, hooks, content in self.hooks[number].changed():
            before, now = ([d[key] for key in d if key not in self.moved_hooks] for d in (content, hooks))
            if len(before) != len(now) or not all(map(_is_same_hook, before, now)):
                yield Change(path, hooks, None, content, hooks)


class Hooks:
    """The hooks of some modules, given with their paths, recorded on creation. A Snapshot walks the hooks, but does not
    compare the dicts that contain the hooks, since the keys of these dicts are ids of handles."""

    def __init__(self, modules: Iterable[tuple[PlacePath, nn.Module]], names: Iterable[str] = CALLED_HOOKS) -> None:
        held = ((path, name, module.__dict__.get(name)) for path, module in modules for name in names)
        self.recorded = [((*path, PathStep("attr", name)), d, dict(d)) for path, name, d in held if d is not None]
        self._empty = [hooks for _, hooks, content in self.recorded if not content]
        self._full = [entry for entry in self.recorded if entry[2]]

    def changed(self) -> Iterator[tuple[PlacePath, Any, Any]]:
        """The dicts of hooks that have changed, each as (path, dict, recorded content). Fast if there are none."""
        return (entry for entry in (self.recorded if any(self._empty) else self._full) if entry[1] != entry[2])


def _is_same_hook(before: Any, now: Any) -> bool:
    """Whether these are the same hook, or two functions with the same code (created in a loop) and the same values in
    their closures, defaults and attributes."""
    if not isinstance(before, FunctionType) or not isinstance(now, FunctionType) or before.__code__ is not now.__code__:
        return is_same(before, now)
    held = [(defaults_of(hook), content_of(hook, "cell").values(), vars(hook).values()) for hook in (before, now)]
    kept = [tuple(itertools.chain(*values)) for values in held]
    return before.__globals__ is now.__globals__ and len(kept[0]) == len(kept[1]) and all(map(is_same, *kept))


def flagged(before: Snapshot) -> Iterator[Change]:
    """The changes since the snapshot `before` that may affect a trace. A changed value of a tensor does not affect a
    trace."""
    return before.replaced(_is_alike)


def _is_alike(before: Any, now: Any) -> bool:
    before, now = (value.instead_of if isinstance(value, StandIn) else value for value in (before, now))
    # Objects of this package: a replaced forward of a unit, or a guard of released parameters.
    if type(before if now is MISSING else now).__module__.partition(".")[0] == "pipeshard":
        return True
    if isinstance(before, nn.Parameter) and isinstance(now, nn.Parameter):  # gathered, or released, by the engine
        return True
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return before.shape == now.shape and before.dtype == now.dtype
    return is_same(before, now) or has_same_entries(before, now)


def has_same_entries(before: Any, now: Any) -> bool:
    """Whether two collections are equal, such as the lists of active adapters that each call of peft's `set_adapter`
    creates. Equal dicts have the same order, since a forward may call layers in this order."""
    if type(before) is not type(now) or type(before) not in (list, tuple, dict) or len(before) != len(now):
        return False
    if isinstance(before, dict):
        return [*before] == [*now] and all(map(is_same, before.values(), now.values()))
    return all(map(is_same, before, now))


class _Annealing:
    """Compares current values with the recorded values of a state. A changed float counts as equal if its
    `kind_of_number` is the same, and if comparisons with all other numbers, including other changed floats, have the
    same results."""

    def __init__(self, state: Snapshot, values: Mapping[int, Tensor]) -> None:
        self.state, self.values = state, values

    def __call__(self, before: Any, now: Any) -> bool:
        if _are_floats(before, now):
            before, now = float(before), float(now)
            return before == now or (kind_of_number(before) == kind_of_number(now) and self._keeps_order(before, now))
        if id(before) in self.values and isinstance(now, Tensor) and not isinstance(now, nn.Parameter):
            return _is_alike(before, now) and torch.equal(self.values[id(before)].to(now.device), now)
        return _is_alike(before, now)

    def _keeps_order(self, before: float, now: float) -> bool:
        moved, others = self._moved
        crossed = (_order(before, old) != _order(now, new) for old, new in moved)
        return not others.lie_between(before, now) and not any(crossed)

    @functools.cached_property
    def _moved(self) -> tuple[list[tuple[float, float]], Thresholds]:
        """All floats that have changed, as (before, now), and the other numbers with which code may compare a float."""
        moved: list[tuple[float, float]] = []

        def note(before: Any, now: Any) -> bool:
            if _are_floats(before, now) and before != now:
                moved.append((float(before), float(now)))
            return True

        deque(self.state.replaced(note), maxlen=0)
        return moved, self.state.thresholds.without(moved)


def _are_floats(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, float | np.floating)


def _order(a: float, b: float) -> tuple[bool, bool]:
    return a < b, a > b


COUNTED = 64  # the largest integer that is compared by value


def kind_of_number(number: float) -> Hashable:
    """The kind of a number that a user may change in every step: the value of an integer up to COUNTED, or the sign and
    the next power of four of any other number."""
    if not math.isfinite(number) or (number.is_integer() and abs(number) <= COUNTED):
        return repr(number)
    return number > 0, math.ceil(math.log(abs(number), 4))


def is_mentioned(place: PlacePath, unit: nn.Module, model: nn.Module, criterion: Any) -> bool:
    """Whether code outside `unit` mentions the name of `place`, and may therefore read the value that a call of the
    unit has written to the place. This code is the criterion's code, the classes of modules that `unit` does not
    contain, and functions in attributes of such modules. A user's decorator that `unit` also has does not count. True
    for a place without a name."""
    name = next((step.key for step in reversed(place) if step.how in ("attr", "class", "cell", "global")), None)
    if name is None:
        return True
    name = name.rpartition(".")[2]
    around, inside = _classes_in(model), _classes_in(unit)
    others, code = around - inside, set[CodeType]()
    if isinstance(criterion, FunctionType):
        code.add(criterion.__code__)
    else:
        others.add(type(criterion))
    functions = (_undecorated(value) for kind in others for value in _members_of(kind))
    code |= {function.__code__ for function in functions if function}
    code |= _decorating(others) - _decorating(inside)
    code |= _code_held(model) - _code_held(unit)
    return any(name in names_in(each) for each in code)


def _classes_in(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules()}


def _members_of(kind: type) -> Iterator[Any]:
    """The values in the dicts of a class and its bases, except nn.Module. The values are not cached, since the user may
    replace them."""
    for base in kind.__mro__:
        if base not in (nn.Module, object):
            yield from vars(base).values()


def _decorating(kinds: Iterable[type]) -> set[CodeType]:
    """The code of the user's decorators of functions in these classes."""
    values = (value for kind in kinds for value in _members_of(kind))
    return {decorator.__code__ for value in values if (decorator := _decorator(value))}


def _code_held(model: nn.Module) -> set[CodeType]:
    """The code of the functions in attributes of the modules of `model`, such as a replaced forward, and of their
    decorators."""
    values = (own(value) for module in model.modules() for value in vars(module).values())
    held = [value for value in values if isinstance(value, FunctionType | MethodType | functools.partial)]
    found = (function for value in held for function in (_undecorated(value), _decorator(value)))
    return {function.__code__ for function in found if function}


def _called(value: Any) -> Any:
    """The function of a method, a property or a partial."""
    return getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))


def _undecorated(value: Any) -> FunctionType | None:
    function = inspect.unwrap(_called(value))
    return function if isinstance(function, FunctionType) else None


def _decorator(value: Any) -> FunctionType | None:
    """The user's decorator of the function of a method, a property or a partial, or None."""
    function = _called(value)
    return function if function is not inspect.unwrap(function) and is_users_function(function) else None
