"""Readers: the code that reads attributes of the units' modules in a trace."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from pipeshard.graph.dataflow import Call, Observed
from pipeshard.graph.kinds import CallKind, Settings
from pipeshard.graph.mentions import Outside
from pipeshard.graph.places import MISSING, PathStep, PlacePath, is_comparable, is_constant, names_in, names_stored_in
from pipeshard.graph.snapshot import noting_reads
from pipeshard.replaced import replaced

OF_MODULES = frozenset(dir(nn.Module()))  # attributes that every module has


class Readers:
    """Records the readers of attributes: the indices of calls, and -1 for glue and the criterion."""

    def __init__(self, units: Mapping[str, nn.Module], model: nn.Module, criterion: Any) -> None:
        self.model, self.criterion = model, criterion
        self.inner = [inner for unit in units.values() for inner in unit.modules()]
        self.in_glue = True
        self._readers = defaultdict[int, Any](partial(defaultdict, set))  # by the module's id, then by attribute

    def noting(self) -> AbstractContextManager[object]:
        """Context manager in which glue's reads are recorded."""

        def note(module: nn.Module, name: str) -> None:
            if self.in_glue:
                self._readers[id(module)][name].add(-1)

        return noting_reads(self.inner, note)

    def outside_glue(self) -> AbstractContextManager[None]:
        """Context manager in which reads of attributes do not count as reads by glue."""
        return replaced(self, in_glue=False)

    def note_call(self, index: int, kind: CallKind, settings: Settings) -> None:
        """Record the attributes that call `index` reads from modules outside the unit. The unit has `settings`."""
        modules = settings.modules if kind.reads_outside else {}
        addresses = {path: address for address, (_, path) in modules.items()}
        for path, name in kind.reads_outside:
            if path in addresses:
                self._readers[addresses[path]][name].add(index)

    def observed(self, calls: Sequence[Call], settings: Mapping[str, Settings]) -> Iterator[Observed]:
        """For each unit, the attributes that other code reads in modules that the unit reaches: attributes in which the
        unit leaves a value in one of `calls`, and all attributes with plain values in the unit's own modules. Places
        inside other objects follow (`_observed_in_objects`)."""
        left = {(call.unit, part.source.place) for call in calls for part in call.parts}
        for unit in dict.fromkeys(call.unit for call in calls):
            reached = settings[unit].modules
            for address in self._readers.keys() & reached.keys():
                module, path = reached[address]
                for name, readers in self._readers[address].items():
                    place = (*path, PathStep("attr", name))
                    is_plain = name not in OF_MODULES and is_comparable(inspect.getattr_static(module, name, MISSING))
                    if (unit, place) in left or (is_plain and address in settings[unit].own):
                        yield Observed(unit, place, frozenset(readers))
        yield from self._observed_in_objects(calls, settings)

    def numbers(self, valued: Iterable[str], settings: Mapping[str, Settings]) -> Iterator[tuple[Observed, str]]:
        """The constants that are now in attributes of the units in `valued`, if code outside the unit reads the
        attribute, each with its value as text. Constants inside dicts and lists are included."""
        for unit in valued:
            for module, path in settings[unit].modules.values():
                for name, readers in self._readers[id(module)].items() if id(module) in settings[unit].own else ():
                    value = inspect.getattr_static(module, name, None) if name not in OF_MODULES else MISSING
                    for place, text in _as_text((*path, PathStep("attr", name)), value):
                        yield Observed(unit, place, frozenset(readers)), text

    def _observed_in_objects(self, calls: Sequence[Call], settings: Mapping[str, Settings]) -> Iterator[Observed]:
        """The places with plain values in objects that several units reach, if a unit's code may write to the place and
        other code mentions the place."""
        units = {call.unit: settings[call.unit] for call in calls}
        layers = nn.ModuleList(own.root for own in units.values())
        outside = Outside(layers, self.model, self.criterion)
        stored, named = (
            {unit: _names(own, code) for unit, own in units.items()} for code in (names_stored_in, names_in)
        )
        for unit, own in units.items():
            for path, holder, how, content, *_ in own.snapshot.holders if stored[unit] else ():
                reaching = {other for other, of in units.items() if id(holder) in of.snapshot.paths}
                if len(reaching) == 1 or isinstance(holder, nn.Module) or not isinstance(content, dict):
                    continue
                for key in (key for key in content.keys() & stored[unit] if is_comparable(content[key])):
                    place = (*path, PathStep(how, key))
                    others = {other for other in reaching - {unit} if key in named[other]}
                    readers = {k for k, call in enumerate(calls) if call.unit in others}
                    if outside.mentions(place):
                        readers.add(-1)
                    if readers:
                        yield Observed(unit, place, frozenset(readers))


def _as_text(place: PlacePath, value: Any, around: tuple[int, ...] = ()) -> Iterator[tuple[PlacePath, str]]:
    """If the value is a constant or a list of constants, yield the place with the value as text. For a dict, yield each
    entry that has such a value. `around` are the ids of the dicts that contain the value, since a dict may contain
    itself."""
    if type(value) is dict and id(value) not in around:
        for key, entry in value.items():
            yield from _as_text((*place, PathStep("item", key)), entry, (*around, id(value)))
    elif is_constant(value) or (type(value) is list and all(map(is_constant, value))):
        yield place, repr(value)


def _names(settings: Settings, names_of: Callable[[CodeType], Iterable[str]]) -> set[str]:
    """The names in the code of each of the user's functions that a unit reaches."""
    functions = (value for value in settings.snapshot.reached if isinstance(value, FunctionType))
    return {name for function in functions for name in names_of(function.__code__)}
