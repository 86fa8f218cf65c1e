"""Mentions: the names that code could read an attribute by, as they are in its bytecode."""

import functools
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from pipeshard.model.snapshot import Path


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
