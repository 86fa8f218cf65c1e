"""Reach: the objects that a sampler or a dataset holds, at any depth, and their random generators."""

import functools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from pipeshard.graph.places import content_of, is_generator, is_object, names_in, put, slots

MOST_REACHED = 10_000  # maximum number of objects per search, nearest first
MOST_ENTRIES = 64  # maximum number of entries per collection
SCALARS = (type(None), bool, int, float, str, bytes)
LARGEST_SEED = 1 << 64  # larger seeds are random: without a seed, numpy uses 128 random bits


def reachable(*roots: Any, skip: Callable[[Any], bool] = lambda value: False) -> Iterator[Any]:
    """Yield the roots, and every object and generator that is reachable from the roots, nearest first. Objects that
    `skip` selects are neither yielded nor searched.

    Does not search the attributes of library objects other than samplers, datasets, modules and collators.
    """
    queue, seen = deque(roots), set[int]()
    visited = 0
    while queue and visited < MOST_REACHED:
        value = queue.popleft()
        if id(value) in seen or isinstance(value, (*SCALARS, Tensor, np.ndarray)) or skip(value):
            continue
        seen.add(id(value))
        visited += 1
        yield value
        queue.extend(_held_by(value))


def _held_by(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from _first_entries(value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from _first_entries(value)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        yield from _held_by_function(value)
    elif is_of_datasets(value):
        described = getattr(value, "format", None)
        if isinstance(described, Mapping):
            yield from described.get("format_kwargs", {}).values()  # the function passed to set_transform
    elif is_entered(value):
        yield from list(getattr(value, "__dict__", {}).values())
        yield from (getattr(value, name) for name in slots(value) if hasattr(value, name))
        for base in type(value).__mro__[:-1]:
            functions = [entry for entry in vars(base).values() if isinstance(entry, FunctionType)]
            for function in functions:
                yield from _global_generators(function)


def _first_entries(entries: Collection[Any]) -> list[Any]:
    """The first entries of a collection, or an empty list if the collection starts with a number or string, as lists of
    indices do."""
    first = next(iter(entries), None)
    if isinstance(first, SCALARS) and first is not None:
        return []
    return [entry for entry, _ in zip(entries, range(MOST_ENTRIES), strict=False)]


def _held_by_function(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from _global_generators(function)


def _global_generators(function: FunctionType) -> Iterator[Any]:
    found = (function.__globals__.get(name) for name in names_in(function.__code__))
    return (value for value in found if is_generator(value))


def is_entered(value: Any) -> bool:
    """Whether the search visits the attributes of this object."""
    if isinstance(value, Sampler | Dataset | nn.Module):
        return not is_of_datasets(value)
    return is_object(value) or "Collator" in type(value).__name__  # transformers' collators may hold a generator


def is_of_datasets(value: Any) -> bool:
    """Whether this object is from Hugging Face's `datasets`. pipeshard does not seed the generators in such objects,
    since each epoch uses copies of these generators."""
    return type(value).__module__.partition(".")[0] == "datasets"


def is_unseeded(root: Any) -> bool:
    """Whether a stream of Hugging Face's `datasets` reachable from `root` contains a generator without a seed."""
    queue, seen = deque(filter(is_of_datasets, reachable(root))), set[int]()
    while queue:
        value = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, np.random.Generator) and _entropy(value) > LARGEST_SEED:
            return True
        if isinstance(value, list | tuple):
            queue.extend(value)
        elif is_of_datasets(value):
            queue.extend(getattr(value, "__dict__", {}).values())
    return False


def _entropy(generator: np.random.Generator) -> int:
    entropy = getattr(getattr(generator.bit_generator, "seed_seq", None), "entropy", 0)
    return entropy if isinstance(entropy, int) else 0


def generators_of(*roots: Any) -> list[Any]:
    """The random generators reachable from the roots, in an order that is the same on every rank. This function creates
    the generators that transformers' collators with a seed would otherwise create in their first call."""
    found = []
    for value in reachable(*roots):
        if hasattr(value, "create_rng") and value.seed is not None and value.generator is None:
            value.create_rng()  # before the search enters the collator
        if is_generator(value):
            found.append(value)
    return found


@contextmanager
def generators_kept(generators: Iterable[Any]) -> Iterator[None]:
    """Context manager that restores the states of `generators` on exit."""
    generators = list(generators)
    states = states_of(generators)
    try:
        yield
    finally:
        set_states(generators, states)


def states_of(generators: Iterable[Any]) -> list[Any]:
    return [content_of(generator, "state")["state"] for generator in generators]


def set_states(generators: Iterable[Any], states: Iterable[Any]) -> None:
    for generator, state in zip(generators, states, strict=True):
        put(generator, "state", "state", state)
