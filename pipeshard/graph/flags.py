"""Flags: whether a model is as it was when it was traced: its attributes, configs, lists, all its code may read."""

import functools
import operator
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from pipeshard.graph.snapshot import Holder, Path, Snapshot, content_of, is_same


@functools.cache
def mentions(kind: Any) -> frozenset[str]:
    """All names in the methods of a class, and in its strings, which `getattr` may be given."""
    bases = [base for base in kind.__mro__ if base not in (nn.Module, object)]
    return frozenset(name for base in bases for function in _functions(base) for name in _names(function.__code__))


def is_mentioned(place: Path, unit: nn.Module, model: nn.Module, criterion: Any) -> bool:
    """Whether the code of another module than those in `unit`, or a criterion, could read what is at a place that a
    call of the unit has written to."""
    name = next((step.key for step in reversed(place) if step.how in ("attr", "class", "cell", "global")), None)
    if name is None:
        return True
    if isinstance(criterion, FunctionType):
        known = frozenset(_names(criterion.__code__))
    else:
        known = mentions(type(criterion))  # type: ignore[arg-type]
    kinds = {type(module) for module in model.modules()} - {type(module) for module in unit.modules()}
    return name in known or any(name in mentions(kind) for kind in kinds)  # type: ignore[arg-type]


def _functions(kind: type) -> Iterator[FunctionType]:
    for value in vars(kind).values():
        inner: Any = getattr(value, "__func__", getattr(value, "fget", value))
        while inner is not None and hasattr(inner, "__wrapped__"):  # decorated
            inner = inner.__wrapped__
        if isinstance(inner, FunctionType):
            yield inner


def _names(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for const in code.co_consts:
        if isinstance(const, str):
            yield const
        elif isinstance(const, CodeType):
            yield from _names(const)


MOST = 16  # states that are known again
Place = tuple[int, Any]


class State:
    """A snapshot, laid out to be compared fast: hundreds of modules are looked at in every step."""

    def __init__(self, holders: list[Holder]) -> None:
        self.holders = holders
        self.full: list[tuple[dict[Any, Any], list[Any], Holder]] = []
        self.empty: list[dict[Any, Any]] = []
        self.others: list[Holder] = []
        for holder in holders:
            live = holder.object.__dict__ if holder.how == "attr" else holder.object
            if type(live) is not dict or holder.how not in ("attr", "dict"):
                self.others.append(holder)
            elif live:
                self.full.append((live, list(live.values()), holder))
            else:
                self.empty.append(live)

    def suspects(self) -> Iterator[Holder]:
        """Those in which something may be another than it was."""
        if any(self.empty):
            yield from self.holders
            return
        for live, values, holder in self.full:
            if len(live) != len(values) or not all(map(operator.is_, live.values(), values)):
                yield holder
        yield from self.others

    def is_same(self) -> bool:
        """Whether nothing has changed."""
        return not any(_changed(holder) for holder in self.suspects())


class Flags:
    """Numbers the states in which the Python side of a model has been.

    What the forwards themselves change (counters, caches, lists that they fill) is told by comparing a state before and
    after a step, and does not count: what they read of it is not known before it is read.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots = roots
        self.states: dict[int, State] = {}
        self.moved: set[Place] = set()
        self.unsure: int | None = None  # the state of which it is not known yet what a step changes
        self.next = 0

    def number(self) -> int:
        """That of the state in which the model is now."""
        for number, state in self.states.items():
            if all(self._is_same(holder) for holder in state.suspects()):
                return number
        if len(self.states) >= MOST:
            del self.states[next(iter(self.states))]
        self.states[self.next] = State(Snapshot(self.roots).holders)
        self.unsure, self.next = self.next, self.next + 1
        return self.unsure

    def stepped(self) -> None:
        """A step has been run since `number` was asked for."""
        if self.unsure is not None and self.unsure in self.states:
            for holder in self.states[self.unsure].suspects():
                self.moved |= {(id(holder.object), key) for key in _changed(holder)}
        self.unsure = None

    def _is_same(self, holder: Holder) -> bool:
        return all((id(holder.object), key) in self.moved for key in _changed(holder))


def _changed(holder: Holder) -> set[Any]:
    """What a holder has now another value for; tensors of one shape and type, and parameters, count as equal."""
    now, before = content_of(holder.object, holder.how), holder.content
    if not isinstance(now, dict):
        return set() if len(now) == len(before) and all(map(_is_alike, now, before)) else {None}
    found = {key for key, value in now.items() if key not in before or not _is_alike(value, before[key])}
    return {key for key in found | (before.keys() - now.keys()) if not _is_own(now.get(key, before.get(key)))}


def _is_alike(a: Any, b: Any) -> bool:
    if isinstance(a, nn.Parameter) and isinstance(b, nn.Parameter):  # gathered, or released: the runtime's affair
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype
    return is_same(a, b)


def _is_own(value: Any) -> bool:
    """Whether it was put there by this package: what stands in for a unit's forward, or guards what is released."""
    return type(value).__module__.partition(".")[0] == "pipeshard"
