"""Functions: copies of functions and bound methods with their captured state, which deepcopy would share."""

import copy
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

from pipeshard.graph.places import MISSING, PLAIN, constants_of, content_of, defaults_of, entries_of, ways_to_hold

OF_OBJECT = ("attr", "item", "list")  # how objects hold the values that `inside` returns
# The types that a walk enters to find a module's functions. The walk does not enter the attributes of other objects.
CALLABLES = (Mapping, list, tuple, functools.partial, MethodType, FunctionType)


class Memo(dict[int, Any]):
    """A memo with which deepcopy copies the functions and bound methods in `found`.

    A function's copy has no captured state until `fill` copies this state, which may contain the object that is being
    copied. Methods are copied in `get`, which deepcopy calls for each object, because deepcopy itself would not copy
    the functions of the methods.
    """

    def __init__(self, known: Mapping[int, Any], found: Iterable[Any]) -> None:
        super().__init__(known)
        self._functions: list[FunctionType] = []
        self._methods: dict[int, MethodType] = {}
        for one in found:
            if isinstance(one, MethodType):
                self._methods[id(one)] = one
            elif isinstance(one, FunctionType) and id(one) not in self and _captures(one):
                self._functions.append(one)
                self[id(one)] = self._hollow(one)

    def get(self, key: int, default: Any = None) -> Any:
        if key in self._methods and key not in self:
            method = self._methods[key]
            function = super().get(id(method.__func__), method.__func__)
            self[key] = MethodType(function, copy.deepcopy(method.__self__, self))
        return super().get(key, default)

    def fill(self) -> None:
        """Copy the captured state of the functions into their copies."""
        filled = set()
        for function in self._functions:
            hollow = self[id(function)]
            defaults = copy.deepcopy((function.__defaults__, function.__kwdefaults__), self)
            hollow.__defaults__, hollow.__kwdefaults__ = defaults
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            captured = content_of(function, "cell")
            for name, cell in cells:
                if id(cell) not in filled and captured[name] is not MISSING:
                    self[id(cell)].cell_contents = copy.deepcopy(captured[name], self)
                filled.add(id(cell))

    def _hollow(self, function: FunctionType) -> FunctionType:
        """A copy of a function without its captured state. If functions share a captured variable, their copies share
        one copy of this variable."""
        cells = tuple(self.setdefault(id(cell), CellType()) for cell in function.__closure__ or ())
        made = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
        made.__qualname__ = function.__qualname__
        made.__dict__.update(function.__dict__)
        return made


def objects_within(values: Iterable[Any], known: Collection[int], kinds: Any = object) -> Iterator[Any]:
    """Yield each of the `values` that has one of the types `kinds` and, recursively, each object of these types inside
    it. Objects whose ids are in `known` are skipped."""
    queue, seen = [*values], dict[int, Any]()
    while queue:
        one = queue.pop()
        if isinstance(one, kinds) and id(one) not in known and id(one) not in seen:
            seen[id(one)] = one
            yield one
            queue += inside(one).values()


def inside(value: Any) -> dict[Any, Any]:
    """The objects to which a value refers, by the step to each object. For a function, these are the objects in its
    closure and its defaults."""
    if isinstance(value, FunctionType):
        return {("default", k): entry for k, entry in enumerate(defaults_of(value))} | content_of(value, "cell")
    ways = [how for how in ways_to_hold(value) if how in OF_OBJECT]
    held = {(how, key): entry for how in ways for key, entry in entries_of(content_of(value, how))}
    return held | {(step.how, step.key): entry for step, entry in constants_of(value)}


def _captures(function: FunctionType) -> bool:
    """Whether a function has captured variables, or default values that may change."""
    return bool(function.__closure__) or not all(isinstance(value, PLAIN) for value in defaults_of(function))
