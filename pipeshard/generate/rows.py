"""Rows: splits caches, states and outputs by samples, so that a forward can have several microbatches in flight."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.hf import is_cache


class CacheParts:
    """A cache split into one cache per microbatch. Microbatch i has `sizes[i]` samples.

    Attributes:
        parts: the cache of each microbatch. Its tensors with one row per sample are views of the original's
            tensors, so that in-place writes change the original.
    """

    def __init__(self, cache: Any, sizes: Sequence[int]) -> None:
        self.cache, self.sizes = cache, sizes
        self._given: dict[int, tuple[Tensor, int]] = {}  # by id: a new part's tensor, and its version (-1: a view)
        starts = [end - size for size, end in zip(sizes, accumulate(sizes))]
        self.parts = [self._cut(cache, start, size) for start, size in zip(starts, sizes)]

    def join(self) -> None:
        """Update the original cache with the concatenated states of all parts."""
        self._join(self.cache, self.parts)

    def _cut(self, value: Any, start: int, size: int) -> Any:
        if isinstance(value, Tensor):
            if value.ndim == 0 or value.shape[0] != sum(self.sizes):
                counter = value.clone()  # every part updates its own counter in place
                self._given[id(counter)] = counter, counter._version
                return counter
            view = value[start : start + size]
            self._given[id(view)] = view, -1
            return view
        if isinstance(value, list | tuple):
            return type(value)(self._cut(item, start, size) for item in value)
        if isinstance(value, dict):
            return {key: self._cut(item, start, size) for key, item in value.items()}
        if not _is_open(value):
            return value
        part = copy.copy(value)
        vars(part).update({name: self._cut(item, start, size) for name, item in vars(value).items()})
        return part

    def _join(self, whole: Any, parts: Sequence[Any]) -> Any:
        """Join `parts`, the parts of `whole`, into one value, and return this value. Changes `whole` in place if
        possible."""
        first = parts[0]
        if isinstance(first, Tensor):
            return whole if all(map(self._is_as_given, parts)) else joined(parts, self.sizes)
        if isinstance(first, list):
            here = whole if isinstance(whole, list) else []
            pairs = enumerate(zip(*parts))
            here[:] = [self._join(here[k] if k < len(here) else None, of_item) for k, of_item in pairs]
            return here
        if isinstance(first, tuple):
            before = whole if isinstance(whole, tuple) and len(whole) == len(first) else (None,) * len(first)
            return tuple(self._join(one, of_item) for one, of_item in zip(before, zip(*parts)))
        if isinstance(first, dict):
            known = whole if isinstance(whole, dict) else {}
            known.update({key: self._join(known.get(key), [part[key] for part in parts]) for key in first})
            return known
        if not _is_open(first):
            return first
        mine = copy.copy(first) if whole is None else whole
        for name in vars(first):
            setattr(mine, name, self._join(vars(mine).get(name), [vars(part)[name] for part in parts]))
        return mine

    def _is_as_given(self, part: Tensor) -> bool:
        """Whether the tensor `part` is a view of a tensor of the original cache, or an unchanged copy. The original is
        then up to date."""
        _, version = self._given.get(id(part), (None, -2))
        return version == -1 or version == part._version


OfModule = tuple[nn.Module, str]  # a module, and the name of its attribute


class StateParts:
    """Tensors with one row per sample that modules store in attributes, such as the positions of a prompt with images.
    They are split for one forward: microbatch i has `sizes[i]` samples.

    Args:
        known: the states that earlier forwards have assigned, which `join` updates.
    """

    def __init__(self, modules: Sequence[nn.Module], known: dict[OfModule, Tensor], sizes: Sequence[int]) -> None:
        self.modules, self.known, self.sizes = modules, known, sizes
        self._whole = {place: state for place, state in known.items() if self._is_split(place, state)}
        self._assigned: list[dict[OfModule, Tensor]] = [{} for _ in sizes]

    @contextmanager
    def part(self, i: int) -> Iterator[None]:
        """Context manager in which the attributes have only the rows of microbatch i."""
        start, size = sum(self.sizes[:i]), self.sizes[i]
        _assign({place: state[start : start + size] for place, state in self._whole.items()})
        given = [dict(vars(module)) for module in self.modules]
        try:
            yield
            for module, before in zip(self.modules, given):
                for name, value in vars(module).items():
                    if value is not before.get(name) and isinstance(value, Tensor) and value.shape[:1] == (size,):
                        self._assigned[i][module, name] = value
        finally:
            _assign(self._whole)

    def join(self) -> None:
        """Concatenate the states that all microbatches have assigned, and assign the results to the attributes."""
        first, *others = self._assigned
        places = [place for place in first if all(place in other for other in others)]
        whole = {place: torch.cat([part[place] for part in self._assigned]) for place in places} if others else first
        _assign(whole)
        self.known.update(whole)

    def _is_split(self, place: OfModule, state: Tensor) -> bool:
        module, name = place
        return len(self.sizes) > 1 and vars(module).get(name) is state and len(state) == sum(self.sizes)


def _assign(states: dict[OfModule, Tensor]) -> None:
    for (module, name), state in states.items():
        setattr(module, name, state)


def _is_open(value: Any) -> bool:
    """Whether the value is a cache, or a cache's entry for one layer (and not the class of such entries)."""
    is_entry = hasattr(value, "get_seq_length") or hasattr(value, "reorder_cache")
    return is_cache(value) or (is_entry and not isinstance(value, type))


def joined(parts: Sequence[Any], sizes: Sequence[int], whole: dict[int, Any] | None = None) -> Any:
    """Join the results of microbatches with `sizes[i]` samples into one result. `whole` maps the id of a part (a cache)
    to the original object, which replaces its parts."""
    first, whole = parts[0], whole or {}
    if id(first) in whole:
        return whole[id(first)]
    if isinstance(first, Tensor):
        by_sample = all(part.ndim and part.shape[0] == size for part, size in zip(parts, sizes))
        return torch.cat(list(parts)) if by_sample and len(parts) > 1 else first
    if isinstance(first, dict):
        items = {key: joined([part[key] for part in parts], sizes, whole) for key in first}
        return type(first)(**items) if type(first) is not dict else items
    if isinstance(first, list | tuple):
        return type(first)(joined(column, sizes, whole) for column in zip(*parts))
    return first
