"""Flags: whether a model is as it was when it was traced: its attributes, configs, lists, all its code may read.

A Dataflow is good for the flags it was traced with. torch.compile guards what its trace has read; here what glue and
units read is not known one by one, so the whole Python state is compared, in every step, and a state that has been seen
before is known again by its number.
"""

import functools
import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from pipeshard.graph.places import MISSING, Path, is_same, names_in
from pipeshard.graph.snapshot import Change, Snapshot

MOST = 16  # states that are known again


class Flags:
    """Numbers the states in which the Python side of a model has been.

    What the forwards themselves change (counters, caches, lists that they fill) does not count: it is found by
    comparing a state before and after a step.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots = roots
        self.states: dict[int, Snapshot] = {}
        self.moved: set[tuple[int, Any]] = set()  # address of a holder, and key
        self.unsure: int | None = None  # the state of which it is not known yet what a step changes
        self.next = 0

    def number(self) -> int:
        """That of the state in which the model is now."""
        for number, state in self.states.items():
            if all((id(change.holder), change.key) in self.moved for change in flagged(state)):
                return number
        if len(self.states) >= MOST:
            del self.states[next(iter(self.states))]
        self.states[self.next] = Snapshot(self.roots)
        self.unsure, self.next = self.next, self.next + 1
        return self.unsure

    def stepped(self) -> None:
        """A step has been run since `number` was asked for."""
        if self.unsure is not None and self.unsure in self.states:
            self.moved |= {(id(change.holder), change.key) for change in flagged(self.states[self.unsure])}
        self.unsure = None


def flagged(before: Snapshot) -> Iterator[Change]:
    """What differs from a snapshot in a way that a trace may depend on: not by the values of tensors."""
    return before.replaced(_is_alike)


def _is_alike(before: Any, now: Any) -> bool:
    # What this package puts there: what stands in for a unit's forward, or guards what is released.
    if type(before if now is MISSING else now).__module__.partition(".")[0] == "pipeshard":
        return True
    if isinstance(before, nn.Parameter) and isinstance(now, nn.Parameter):  # gathered, or released, by the engine
        return True
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return before.shape == now.shape and before.dtype == now.dtype
    return is_same(before, now)


def is_mentioned(place: Path, unit: nn.Module, model: nn.Module, criterion: Any) -> bool:
    """Whether the code of another module than those in `unit`, or a criterion, could read what is at a place that a
    call of the unit has written to."""
    name = next((step.key for step in reversed(place) if step.how in ("attr", "class", "cell", "global")), None)
    if name is None:
        return True
    if isinstance(criterion, FunctionType):
        known = frozenset(names_in(criterion.__code__))
    else:
        known = _names_in_class(type(criterion))  # type: ignore[arg-type]
    kinds = {type(module) for module in model.modules()} - {type(module) for module in unit.modules()}
    return name in known or any(name in _names_in_class(kind) for kind in kinds)  # type: ignore[arg-type]


@functools.cache
def _names_in_class(kind: Any) -> frozenset[str]:
    bases = [base for base in kind.__mro__ if base not in (nn.Module, object)]
    return frozenset(name for base in bases for function in _functions(base) for name in names_in(function.__code__))


def _functions(kind: type) -> Iterator[FunctionType]:
    for value in vars(kind).values():
        function: Any = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
        if isinstance(function, FunctionType):
            yield function
