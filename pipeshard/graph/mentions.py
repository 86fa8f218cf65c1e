"""Mentions: whether other code of a model names a place to which a unit has written."""

import functools
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from pipeshard.graph.places import PlacePath, is_users_function, names_in, own


class Outside:
    """The code of a model outside a unit. Such code may read the values that a call of the unit has written to places
    whose names the code mentions."""

    def __init__(self, unit: nn.Module, model: nn.Module, criterion: Any) -> None:
        self.unit, self.model, self.criterion = unit, model, criterion

    def mentions(self, place: PlacePath) -> bool:
        """Whether the code mentions the name of `place`. True for a place without a name."""
        name = next((step.key for step in reversed(place) if step.how in ("attr", "class", "cell", "global")), None)
        return name is None or name.rpartition(".")[2] in self._names

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        """All names in the criterion, the model's classes, the user's decorators in these classes, and functions in
        attributes of modules, except in a class, decorator or function that the unit also has."""
        around, inside = _classes_in(self.model), _classes_in(self.unit)
        others, code = around - inside, set[CodeType]()
        if isinstance(self.criterion, FunctionType):
            code.add(self.criterion.__code__)
        else:
            others.add(type(self.criterion))
        functions = (_undecorated(value) for kind in others for value in _members_of(kind))
        code |= {function.__code__ for function in functions if function}
        code |= _decorating(others) - _decorating(inside)
        code |= _code_held(self.model) - _code_held(self.unit)
        return frozenset(name for each in code for name in names_in(each))


def _classes_in(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules()}


def _members_of(kind: type) -> Iterator[Any]:
    """The values in the `__dict__` of a class and of each of its bases, except nn.Module and object. The values are not
    cached, since the user may replace them."""
    for base in kind.__mro__:
        if base not in (nn.Module, object):
            yield from vars(base).values()


def _decorating(kinds: Iterable[type]) -> set[CodeType]:
    """The code of the user's decorators on functions in these classes."""
    values = (value for kind in kinds for value in _members_of(kind))
    return {decorator.__code__ for value in values if (decorator := _decorator(value))}


def _code_held(model: nn.Module) -> set[CodeType]:
    """The code of each function that is an attribute of a module in `model`, such as a replaced forward, and the code
    of the user's decorator on this function."""
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
    """The user's decorator on the function of a method, a property or a partial. None if the function has no such
    decorator."""
    function = _called(value)
    return function if function is not inspect.unwrap(function) and is_users_function(function) else None
