"""Flags: numbers the states of a model's Python objects, so that each step can find the Dataflow for the current state.

A Dataflow is valid only for the Python state (flags) with which it was traced. torch.compile guards only the values
that its trace has read. pipeshard does not know every read of glue and units, so every step compares the whole Python
state.
"""

import functools
import itertools
import math
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipeshard.graph.places import MISSING, PlacePath, content_of, defaults_of, format_path, is_same
from pipeshard.graph.snapshot import Change, Hooks, Snapshot, Thresholds
from pipeshard.graph.writes import count_reads, reads
from pipeshard.replaced import StandIn

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
    these changes by comparing the state before and after a step. For another object, a changed value of a tensor
    (except a parameter) also counts, even if the tensor was replaced. A float of such an object counts as changed only
    if its `kind_of_number` changes, or if the float passes a number with which the code may compare it. So the user may
    anneal a criterion's weights.
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
        """A place that has changed since the second newest state. Returns () if no place has changed, for example if
        only `requires_grad` has changed."""
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
        """The leaf tensors of a state by path, each with its requires_grad. The model's own parameters are omitted,
        since the engine freezes and releases them."""
        own = {id(parameter) for model in self.without or self.roots.values() for parameter in model.parameters()}
        leaves = ((path, tensor) for path, *_, tensor, _ in state.tensors if id(tensor) not in own and tensor.is_leaf)
        return {path: (leaf, leaf.requires_grad) for path, leaf in leaves}

    def stepped(self) -> None:
        """Record that a step has run since the last call of `number`. From now on, places that the first step in a
        state has changed do not count. Hooks that any step has registered do not count either."""
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


def _is_same_hook(before: Any, now: Any) -> bool:
    """Whether `before` and `now` are the same hook, or are two functions (for example, created in a loop) with the same
    code and the same values in their closures, defaults and attributes."""
    if not isinstance(before, FunctionType) or not isinstance(now, FunctionType) or before.__code__ is not now.__code__:
        return is_same(before, now)
    held = [(defaults_of(hook), content_of(hook, "cell").values(), vars(hook).values()) for hook in (before, now)]
    kept = [tuple(itertools.chain(*values)) for values in held]
    return before.__globals__ is now.__globals__ and len(kept[0]) == len(kept[1]) and all(map(is_same, *kept))


def flagged(before: Snapshot) -> Iterator[Change]:
    """The changes that have occurred since the snapshot `before` and may affect a trace. A changed value of a tensor
    does not affect a trace."""
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
    creates. Dicts are equal only if their entries have the same order, since a forward may call layers in this
    order."""
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
    """The kind of a number that a user may change in every step: the value itself, if it is not finite or is an integer
    with an absolute value of at most COUNTED. Otherwise, the sign and the next power of four."""
    if not math.isfinite(number) or (number.is_integer() and abs(number) <= COUNTED):
        return repr(number)
    return number > 0, math.ceil(math.log(abs(number), 4))
