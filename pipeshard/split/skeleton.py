"""Skeleton: a layer on meta that is constructed again on the ranks that hold it.

A list of LayerSpecs may describe a model that is too large for any process. Each layer is first built on meta, as a
skeleton with names and shapes. The ranks that hold the layer construct a second module with allocated tensors, and move
its values to the skeleton, since optimizers, hooks and ties refer to the skeleton.
"""

import copy
from collections.abc import Callable, Iterator, MutableMapping, MutableSet
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeshard.errors import ConfigurationError, UsageError, explained, listed, summary
from pipeshard.graph.functions import Memo, inside, objects_within
from pipeshard.graph.places import COLLECTIONS, content_of, entries_of, is_same
from pipeshard.graph.rng import Randomness, seeded
from pipeshard.private import WEAKREFS, restore_meta_kernels, without_weakrefs
from pipeshard.split.blank import give
from pipeshard.split.initialize import number
from pipeshard.split.ties import kept_tied

BLUEPRINT = "pipeshard_blueprint"  # the attribute that marks a module as a skeleton
# The attributes of every module (mode, hooks, parameters, buffers), and the attribute of `without_weakrefs`.
MODULE_ATTRIBUTES = frozenset((*vars(nn.Module()), WEAKREFS))


@dataclass
class Blueprint:
    """The constructor and the original attributes of a skeleton. `build_layer` keeps attributes that have changed since
    the skeleton was made.

    `place` is the layer's number, which determines the seed of its values. `before` lists each module of the skeleton
    as (path, module, original plain attributes, entries of the collections in these attributes). `versions` lists each
    parameter as (name, parameter, original version); every write increments a parameter's version. Buffers are omitted,
    since a trace also writes to buffers.
    """

    place: int
    make: Callable[[], nn.Module]
    before: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]]
    versions: list[tuple[str, nn.Parameter, int]]


def skeleton(construct: Callable[[], Any], make: Callable[[], nn.Module], place: int, name: str) -> nn.Module:
    """Call `construct()` on meta, and return the resulting module. It has names, shapes and attributes, but no values.
    The state of the user's random generators does not change.

    `build_layer` later calls `make()` to create the values. The values depend on the seed and on `place`, the layer's
    number. Raises ConfigurationError if the constructor does not run on meta, or does not return a module. Raises
    UsageError if the returned module contains a module that existed before, since the values of that module would be
    lost.
    """
    restore_meta_kernels()
    refusal = explained(
        lambda error: ConfigurationError(
            f"layer {place}, {name}, cannot be built on meta, where pipeshard reads the layer's shapes: "
            f"{summary(error)}. Pass device='cpu' for tensors whose values the constructor reads, or put the module "
            "itself into the list"
        )
    )
    with refusal, Randomness(torch.device("cpu")).step(0, 0), torch.device("meta"):
        module = construct()
        again = construct() if isinstance(module, nn.Module) and _has_values(module) else None
    if not isinstance(module, nn.Module):
        raise ConfigurationError(
            f"layer {place}, {name}, must build an nn.Module, got an object of class {type(module).__name__}"
        )
    if again is not None:
        _refuse_existing(module, again, place, name)
    with kept_tied(module):  # also tensors that the constructor put on another device
        module.to("meta")
    plain = [(path, inner, _plain_attributes(inner)) for path, inner in module.named_modules()]
    before = [(path, inner, attributes, _entries(attributes)) for path, inner, attributes in plain]
    named = module.named_parameters(remove_duplicate=False)
    versions = [(name, parameter, parameter._version) for name, parameter in named]
    module.__dict__[BLUEPRINT] = Blueprint(place=place, make=make, before=before, versions=versions)
    return module


def _has_values(module: nn.Module) -> bool:
    return not all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def _refuse_existing(module: nn.Module, again: nn.Module, place: int, name: str) -> None:
    """Raise UsageError if the results of two calls of a constructor share a module that has values."""
    known = set(module.modules())
    existing = next((inner for inner in again.modules() if inner in known and _has_values(inner)), None)
    if existing is not None:
        raise UsageError(
            f"layer {place}, {name}, contains an existing module ({type(existing).__name__}), but a LayerSpec must "
            "build all modules of the layer, on the rank that holds the layer: the values of the existing module would "
            "be lost. Pass the class and its arguments, or put the existing module directly into the list of layers"
        )


def skeletons(model: nn.Module) -> list[nn.Module]:
    """The skeletons in `model` that are not built yet."""
    return [module for module in model.modules() if BLUEPRINT in vars(module)]


def build_layer(module: nn.Module, seed: int) -> None:
    """Call a skeleton's constructor on the default device, and give the skeleton the values of the new module.

    The values depend only on the seed and the layer's number. The state of the user's random generators does not
    change. Modules and parameters stay the same objects, so that optimizers, hooks and ties still refer to them. Keeps
    parameters that already have values, and attributes that were set after the skeleton was made. Raises
    ConfigurationError if the constructor fails, if the names or shapes of the new module differ from the skeleton's, or
    if a parameter was modified on meta.
    """
    blueprint: Blueprint = vars(module)[BLUEPRINT]
    for name, parameter, version in blueprint.versions:
        if parameter.is_meta and parameter._version > version:
            raise ConfigurationError(
                f"{name} of layer {blueprint.place} ({type(module).__name__}) was modified before the layer was "
                "built, so the values are lost: call model.build() before you set values, or pass "
                "PipelinePlugin(init_weights=fn) with a function that sets them"
            )
    with explained(  # also for errors in the user's constructor
        lambda error: ConfigurationError(
            f"layer {blueprint.place} ({type(module).__name__}) was built on meta, but cannot be built with "
            f"allocated tensors: {summary(error)}"
        )
    ):
        with seeded(number(seed, f"layer {blueprint.place}")):
            built = blueprint.make()
        _take(module, built, blueprint)
    del module.__dict__[BLUEPRINT]


def blank_buffers(module: nn.Module) -> None:
    """Allocate zero-filled CPU buffers for a skeleton that this rank does not build: traces and checkpoints need these
    buffers."""
    for inner in module.modules():
        for key, buffer in inner._buffers.items():
            if buffer is not None and buffer.is_meta:
                inner._buffers[key] = torch.zeros_like(buffer, device="cpu")


@torch.no_grad()
def _take(module: nn.Module, built: nn.Module, blueprint: Blueprint) -> None:
    """Copy the values, buffers and attributes of `built` to `module`. References to submodules and tensors of `built`
    become references to the corresponding objects in `module`. Objects that the constructor did not create are shared,
    not copied."""
    paths, built_paths = {path for path, *_ in blueprint.before}, {path for path, _ in built.named_modules()}
    if paths != built_paths:
        raise ValueError(
            f"the modules differ from the modules on meta (the first difference is {min(paths ^ built_paths)})"
        )
    parts: dict[int, Any] = {id(built.get_submodule(path)): inner for path, inner, *_ in blueprint.before}
    _give_values(module, built, blueprint, parts)
    taken: list[Taken] = []
    for path, inner, before, entries in blueprint.before:
        source = built.get_submodule(path)
        for key, value in source._buffers.items():
            skeleton = inner._buffers.get(key)
            if value is not None and skeleton is not None:
                if skeleton.is_meta:
                    inner._buffers[key] = _like(value, skeleton, f"{path}.{key}".lstrip("."))
                parts[id(value)] = inner._buffers[key]
        for key, value in _plain_attributes(source).items():
            now = vars(inner).get(key)
            if now is before.get(key):
                taken += _unchanged(Taken(vars(inner), key, now, value), entries.get(key), parts)
    for place in taken:
        _match(place.now, place.built, parts, set())
    found = list(objects_within((place.built for place in taken), parts))
    memo = Memo(parts | {id(one): one for one in found if not (inside(one) or _is_copyable(one))}, found)
    for place in taken:
        place.holder[place.key] = copy.deepcopy(place.built, memo)
    memo.fill()


class Taken(NamedTuple):
    """An attribute of a module in a skeleton (or an entry of a collection in the attribute), with the built module's
    value."""

    holder: Any
    key: Any
    now: Any
    built: Any


def _unchanged(place: Taken, before: Any, parts: dict[int, Any], around: tuple[Any, ...] = ()) -> Iterator[Taken]:
    """Yield `place` if its entries still equal `before`. Otherwise, keep the collection at `place` as the same object,
    and yield the unchanged places in it."""
    now, built = place.now, place.built
    if _are_same(_entries(now, around), before):
        yield place
    elif isinstance(now, COLLECTIONS) and type(now) is type(built):
        parts[id(built)] = now
        if now is built or isinstance(now, MutableSet) or type(before) is not dict:
            return
        theirs = _held(built)
        for key, entry in _held(now).items():
            if key in theirs and key in before:
                yield from _unchanged(Taken(now, key, entry, theirs[key]), before[key], parts, (*around, now))


def _give_values(module: nn.Module, built: nn.Module, blueprint: Blueprint, parts: dict[int, Any]) -> None:
    """Set the meta parameters of `module` to the values of the parameters in `built`, and add all parameters of `built`
    to `parts`. Since the skeleton was made, a parameter may have been tied, or may have another name because an adapter
    wraps its module."""
    values = dict(built.named_parameters(remove_duplicate=False))
    parameters = dict(module.named_parameters(remove_duplicate=False))
    known = {name: parameter for name, parameter, _ in blueprint.versions} | parameters
    with without_weakrefs(module):
        for name, value in values.items():
            parts[id(value)] = parameter = known[name]
            if parameter.is_meta:
                give(parameter, _like(value.detach(), parameter, name))
    if blank := [name for name, parameter in parameters.items() if parameter.is_meta]:
        raise ValueError(
            f"its constructor does not create {listed(blank, 3)}. Call model.build() before you add adapters, "
            "parametrizations or parameters"
        )


def _match(before: Any, now: Any, parts: dict[int, Any], seen: set[int]) -> None:
    """Add to `parts` the objects in `now` that `deepcopy` must not copy. `before` is the corresponding value in the
    skeleton: an object that both values contain exists outside the layer."""
    if before is now:
        parts.setdefault(id(now), now)
    if type(before) is not type(now) or id(now) in parts or id(now) in seen:
        return
    seen.add(id(now))
    twins, entries = inside(before), inside(now)
    for step in entries.keys() & twins.keys():
        _match(twins[step], entries[step], parts, seen)


def _is_copyable(value: Any) -> bool:
    """Whether deepcopy can copy a value: deepcopy cannot copy locks, streams or non-leaf tensors."""
    if isinstance(value, Tensor):
        return value.is_leaf
    try:
        copy.deepcopy(value)
    except Exception:  # deepcopy may raise anything
        return False
    return True


def _entries(value: Any, around: tuple[Any, ...] = ()) -> Any:
    """Convert a collection, and the collections nested in it, to dicts of their entries. Return any other value
    unchanged."""
    if any(value is outer for outer in around):
        return ...
    if not isinstance(value, (*COLLECTIONS, tuple)):
        return value
    return {key: _entries(entry, (*around, value)) for key, entry in _held(value).items()}


def _held(collection: Any) -> dict[Any, Any]:
    """A dict of the entries of a collection, by key or index."""
    return dict(entries_of(content_of(collection, "item" if isinstance(collection, MutableMapping) else "list")))


def _are_same(before: Any, now: Any) -> bool:
    """Whether two results of `_entries` are equal."""
    if type(before) is dict and type(now) is dict:
        return before.keys() == now.keys() and all(_are_same(before[key], now[key]) for key in before)
    return is_same(before, now)


def _like(value: Tensor, skeleton: Tensor, name: str) -> Tensor:
    if value.shape != skeleton.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, but {tuple(skeleton.shape)} on meta")
    return value.to(skeleton.dtype)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in MODULE_ATTRIBUTES}
