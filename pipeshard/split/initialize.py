"""Initialize: the initial values of tensors on meta, and the construction of layers only on the ranks that hold them.

transformers' `model.init_weights()` uses one generator for all modules in order, so the values of a parameter depend on
all parameters before it. A stage does not have all of these. So here, every parameter has its own generator, seeded
with the parameter's name.

A list of LayerSpecs may describe a model that is too large for any process. Each layer is first built on meta, as a
skeleton with names and shapes. On the ranks that hold the layer, it is built again with allocated tensors. Optimizers,
hooks and ties refer to the skeleton, so the values of the second module are then moved to the skeleton.
"""

import copy
import functools
import hashlib
import inspect
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, MutableSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeshard.errors import ConfigurationError, UsageError, explained, listed, summary
from pipeshard.graph.functions import Memo, inside, reached
from pipeshard.graph.places import COLLECTIONS, content_of, entries_of, is_same
from pipeshard.graph.rng import Randomness, seeded
from pipeshard.graph.taint import mutated, storage_of
from pipeshard.private import WEAKREFS, DispatchMode, restore_meta_kernels, without_weakrefs
from pipeshard.split.packed import packed_layers
from pipeshard.split.ties import kept_tied

logger = logging.getLogger("pipeshard")

# How meta tensors are initialized. True: by the architecture's own rule. False: not at all. A function: fn(module) or
# fn(module, name), called for each module with tensors of its own to initialize.
InitWeights = bool | Callable[..., Any]


def initialize(
    model: nn.Module,
    parameters: Collection[str],
    buffers: Mapping[str, bool],
    rule: InitWeights,
    seed: int,
    constructed: Mapping[str, int] | None = None,
) -> None:
    """Initialize the parameters with these first names and these buffers, and no other tensor of the model.

    With `rule` True, a module is initialized by `_init_weights` of its nearest PreTrainedModel, then by its own
    `reset_parameters` if tensors still have no values. Buffers are initialized in this way with any `rule`. A
    parameter's values depend only on the seed and the parameter's name. The user's random generators do not change.
    `buffers` is the result of `allocate`, and `constructed` of `written_again`: a warning names a parameter whose value
    the constructor set. Quantized weights are skipped, since a checkpoint provides their values.
    Raises ConfigurationError if a buffer, or (unless `rule` is False) a parameter, still has no values.
    """
    parameters = set(parameters).difference(name for name, _ in packed_layers(model))
    by_architecture = set(buffers)
    missing: set[str] = set()
    if callable(rule):
        missing = _fill(model, parameters, seed, functools.partial(_by_function, rule))
    elif rule:
        by_architecture |= parameters
    missing |= _fill(model, by_architecture, seed, _by_architecture, constructed if rule is True else None)
    missing -= {name for name, is_known in buffers.items() if is_known}
    if missing:
        first = min(missing)
        why = (
            "no _init_weights of a PreTrainedModel sets this tensor, and the tensor's module has no reset_parameters()"
        )
        raise ConfigurationError(
            f"{len(missing)} tensors on meta were not initialized (the first is {first} of "
            f"{type(model.get_submodule(first.rpartition('.')[0])).__name__}): "
            f"{'init_weights=fn did not write to it' if callable(rule) else why}. Add a reset_parameters(), pass "
            "PipelinePlugin(init_weights=fn) with an fn(module, name) that fills all of a module's own tensors, or "
            "pass init_weights=False and load all weights with booster.load_model"
        )


def written_again(model: nn.Module, names: Collection[str]) -> dict[str, int]:
    """How often the constructor wrote to each of these meta parameters, for those with more than one write.

    Parameters of a PreTrainedModel are omitted, since its rule sets all values, and so are tied parameters, to which
    the rule writes several times.
    """
    from transformers import PreTrainedModel

    uses = Counter(map(id, dict(model.named_parameters(remove_duplicate=False)).values()))
    written = {name: (model.get_parameter(name), model.get_parameter(name)._version) for name in names}
    return {
        name: version
        for name, (parameter, version) in written.items()
        if version > 1 and uses[id(parameter)] == 1
        if not any(isinstance(module, PreTrainedModel) for module in _around(model, name))
    }


def _around(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules that contain this parameter, from the model to the parameter's own module."""
    return [model, *map(model.get_submodule, itertools.accumulate(name.split(".")[:-1], "{}.{}".format))]


def _warn_of_lost_values(model: nn.Module, constructed: Mapping[str, int], writes: Counter[str]) -> None:
    """Warn of parameters to which the constructor wrote more often than the rules of all modules around them do."""
    lost = []
    for name, count in constructed.items():
        around = _around(model, name)
        rules = sum(hasattr(module, "_init_weights") for module in around)
        resets = sum(hasattr(module, "reset_parameters") or hasattr(module, "_reset_parameters") for module in around)
        if count > writes[name] * max(rules, resets):
            lost.append(name)
    if lost:
        logger.warning(
            "the constructor of %s sets initial values of %s on meta, where they are lost: with init_weights=True, "
            "_init_weights or reset_parameters() sets other values. Pass PipelinePlugin(init_weights=fn) with an fn "
            "that sets them, build the model on the CPU, or pass init_weights=False and load all weights",
            type(model).__name__,
            listed(lost),
        )


def _fill(
    model: nn.Module,
    names: set[str],
    seed: int,
    fill: Callable[..., None],
    constructed: Mapping[str, int] | None = None,
) -> set[str]:
    """Call `fill` for each module that contains some of these tensors. Return the names of the tensors that were not
    written.

    Children are filled before their parents, as in transformers. `fill` also receives the module's owner: the module
    itself or its nearest ancestor that has `_init_weights`, or None.
    """
    if not names:
        return set()

    def walk(path: str, module: nn.Module, owner: Any) -> None:
        owner = module if hasattr(module, "_init_weights") else owner
        for name, child in module.named_children():
            walk(f"{path}.{name}" if path else name, child, owner)
        if path in writes.below:
            with writes.inside(path):
                direct = {name for name in writes.below[path] if name.rpartition(".")[0] == path}
                fill(path, module, owner, direct, writes)

    with torch.no_grad(), _SeededWrites(model, names, seed) as writes:
        writes.constructed = constructed or {}
        walk("", model, None)
    _warn_of_lost_values(model, writes.constructed, writes.count)
    return names - writes.written


def _by_architecture(path: str, module: nn.Module, owner: Any, names: set[str], writes: "_SeededWrites") -> None:
    if owner is not None:
        owner._init_weights(module)
    reset: Any = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    if reset is None:
        return
    is_of_torch = type(module).__module__.startswith("torch.nn.")
    if is_of_torch and owner is None:
        reset()  # as in its constructor, it also writes to children (the bias of an attention's output projection)
    elif names - writes.written:
        writes.settled = set(writes.written)
        reset()
        writes.settled = set()
    elif is_of_torch and names & writes.constructed.keys():
        writes.settled = set(writes.names.values())  # so that its writes are only counted
        reset()
        writes.settled = set()


def _by_function(
    rule: Callable[..., Any], path: str, module: nn.Module, owner: Any, names: set[str], writes: "_SeededWrites"
) -> None:
    if not names:
        return
    parameters = list(inspect.signature(rule).parameters.values())
    takes_name = len(parameters) > 1 and parameters[1].default is inspect.Parameter.empty
    what = f"init_weights failed for {path} ({type(module).__name__}, with {', '.join(sorted(names))})"
    with explained(lambda error: ConfigurationError(f"{what}: {summary(error)}")):
        rule(module, path) if takes_name else rule(module)


class _SeededWrites(DispatchMode):
    """Dispatch mode that skips writes to the model's tensors, except tensors in `names`. A random write uses a
    generator seeded with the tensor's name.

    A parameter with several names is written only by the module of its first name. Otherwise, the other modules would
    initialize it again.
    """

    def __init__(self, model: nn.Module, names: Collection[str], seed: int) -> None:
        super().__init__()
        self.seed, self.path = seed, ""
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self.names = {storage_of(tensor): name for name, tensor in tensors.items()}  # by storage: the first name
        self.below: dict[str, set[str]] = {"": set(names)}  # by module path: the names to write
        for name in names:
            for path in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
                self.below.setdefault(path, set()).add(name)
        self.written: set[str] = set()
        self.settled: set[str] = set()  # already written, not to be overwritten
        self.draws: Counter[str] = Counter()
        self.constructed: Mapping[str, int] = {}  # how often the constructor wrote to a parameter
        self.count: Counter[str] = Counter()  # how often the rule wrote to it

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Context manager that allows writes only to tensors of the module at `path`. Random generators are seeded
        with the path, and restored on exit."""
        self.path = path
        with seeded(number(self.seed, path)):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        for target in mutated(func, args, kwargs) if func._schema.is_mutable else ():
            name = self.names.get(storage_of(target))
            if name is None:
                continue
            self.count[name] += 1
            if name in self.settled or name not in self.below[self.path]:
                return target
            self.written.add(name)
            if any(argument.name == "generator" for argument in func._schema.arguments):
                seed = number(self.seed, f"{name}#{self.draws[name]}")
                kwargs["generator"] = torch.Generator(target.device).manual_seed(seed)
                self.draws[name] += 1
        return func(*args, **kwargs)


class Noted(NamedTuple):
    """A parameter of a model of PipelinePlugin.from_pretrained when the model was created: its name, its version, and
    the model's folder."""

    name: str
    version: int
    folder: str


def note_blank(model: Any) -> None:
    """Move to meta the parameters that a constructor has created on the CPU (`torch.Tensor(3)` ignores the
    default device), and record a `Noted` for each parameter, for `adapters.refuse_changed_blank`."""
    with without_weakrefs(model):
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                give(parameter, torch.empty_like(parameter, device="meta"))
            vars(parameter)[NOTED] = Noted(name, parameter._version, model._pretrained)


def give(parameter: nn.Parameter, values: Tensor) -> None:
    """Replace a parameter's data; `values` may be on another device. The parameter's identity and class are kept."""
    kept = {key: value for key, value in parameter.__dict__.items() if key != "_is_hf_initialized"}
    kind = type(parameter)
    torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
    parameter.__class__ = kind
    parameter.__dict__.update(kept)
    if NOTED in kept:
        vars(parameter)[NOTED] = kept[NOTED]._replace(version=parameter._version)


def number(seed: int, text: str) -> int:
    """A seed derived from `seed` and `text`."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {text}".encode(), digest_size=7).digest(), "little")


NOTED = "pipeshard_noted"  # the attribute of a parameter on meta with its Noted
BLUEPRINT = "pipeshard_blueprint"  # the attribute that marks a module as a skeleton
# Attributes of every module (mode, hooks, parameters, buffers), and those that `without_weakrefs` sets.
MODULE_ATTRIBUTES = frozenset((*vars(nn.Module()), WEAKREFS))


@dataclass
class Blueprint:
    """The constructor and the original attributes of a skeleton. `build` keeps attributes that have changed since the
    skeleton was made.

    `place` is the layer's number, which seeds the values. `before` lists each module of the skeleton as (path, module,
    original plain attributes, entries of the collections in them), and `versions` each parameter with its version,
    which writes increase. (A trace also writes to buffers.)
    """

    place: int
    make: Callable[[], nn.Module]
    before: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]]
    versions: list[tuple[str, nn.Parameter, int]]


def skeleton(construct: Callable[[], Any], make: Callable[[], nn.Module], place: int, name: str) -> nn.Module:
    """Call `construct()` on meta, and return the module, which has names, shapes and attributes but no values. The
    user's generators do not change.

    `build` later calls `make()` for the values. These depend on the seed and on `place`, the layer's number. Raises
    ConfigurationError if the constructor does not run on meta, or does not return a module, and UsageError if it
    returns a module that existed before, whose values would be lost.
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
        raise ConfigurationError(f"layer {place}, {name}, builds a {type(module).__name__}, not an nn.Module")
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
    """Raise UsageError if two results of a constructor contain the same module, and this module has values."""
    known = set(module.modules())
    existing = next((inner for inner in again.modules() if inner in known and _has_values(inner)), None)
    if existing is not None:
        raise UsageError(
            f"layer {place}, {name}, contains a {type(existing).__name__} instance that exists already, but a "
            "LayerSpec builds the layer itself, on the rank that holds the layer, so the instance's values would be "
            "lost: pass the class and its arguments, or put the instance directly into the list of layers"
        )


def skeletons(model: nn.Module) -> list[nn.Module]:
    """The skeletons in `model` that are not built yet."""
    return [module for module in model.modules() if BLUEPRINT in vars(module)]


def build(module: nn.Module, seed: int) -> None:
    """Call a skeleton's constructor on the default device, and give the skeleton the values of the new module.

    The values depend only on the seed and the layer's number; the user's random generators do not change. Modules and
    parameters stay the same objects, so that optimizers, hooks and ties still refer to them. Parameters that already
    have values, and attributes set since the skeleton was made, are kept. Raises ConfigurationError if the constructor
    fails, or builds a module with different names or shapes, and for a parameter that was modified on meta.
    """
    blueprint: Blueprint = vars(module)[BLUEPRINT]
    for name, parameter, version in blueprint.versions:
        if parameter.is_meta and parameter._version > version:
            raise ConfigurationError(
                f"{name} of layer {blueprint.place}, a {type(module).__name__}, was modified before the layer was "
                "built, so the values are lost: call model.build() before you set values, or pass a function that sets "
                "them, PipelinePlugin(init_weights=fn)"
            )
    with explained(  # also for errors in the user's constructor
        lambda error: ConfigurationError(
            f"layer {blueprint.place}, a {type(module).__name__}, was built on meta, but cannot be built with "
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
    become references to the corresponding objects in `module`. Objects that the constructor has not made are not
    copied."""
    paths, built_paths = {path for path, *_ in blueprint.before}, {path for path, _ in built.named_modules()}
    if paths != built_paths:
        raise ValueError(f"the modules differ (the first difference is {min(paths ^ built_paths)})")
    parts: dict[int, Any] = {id(built.get_submodule(path)): inner for path, inner, *_ in blueprint.before}
    _give_values(module, built, blueprint, parts)
    taken: list[Place] = []
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
                taken += _unchanged(Place(vars(inner), key, now, value), entries.get(key), parts)
    for place in taken:
        _match(place.now, place.built, parts, set())
    found = list(reached((place.built for place in taken), parts))
    memo = Memo(parts | {id(one): one for one in found if not (inside(one) or _is_copyable(one))}, found)
    for place in taken:
        place.holder[place.key] = copy.deepcopy(place.built, memo)
    memo.fill()


class Place(NamedTuple):
    """An attribute of a skeleton's module, or an entry of a collection in it, with the value of the built module."""

    holder: Any
    key: Any
    now: Any
    built: Any


def _unchanged(place: Place, before: Any, parts: dict[int, Any], around: tuple[Any, ...] = ()) -> Iterator[Place]:
    """The place itself if its entries are those `before`; otherwise the unchanged places in its collection, which stays
    the same object."""
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
                yield from _unchanged(Place(now, key, entry, theirs[key]), before[key], parts, (*around, now))


def _give_values(module: nn.Module, built: nn.Module, blueprint: Blueprint, parts: dict[int, Any]) -> None:
    """Give the parameters on meta in `module` their values in `built`, and add all parameters to `parts`. Since the
    skeleton was made, a parameter may have been tied, or its module wrapped by an adapter, under another name."""
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
    """Add to `parts` objects in `now` that `deepcopy` must not copy. `before` is the corresponding value in the
    skeleton: what both contain exists outside the layer."""
    if before is now:
        parts.setdefault(id(now), now)
    if type(before) is not type(now) or id(now) in parts or id(now) in seen:
        return
    seen.add(id(now))
    twins, entries = inside(before), inside(now)
    for step in entries.keys() & twins.keys():
        _match(twins[step], entries[step], parts, seen)


def _is_copyable(value: Any) -> bool:
    """Whether deepcopy copies a value, unlike a lock, a stream or the result of an operator."""
    if isinstance(value, Tensor):
        return value.is_leaf
    try:
        copy.deepcopy(value)
    except Exception:  # deepcopy may raise anything
        return False
    return True


def _entries(value: Any, around: tuple[Any, ...] = ()) -> Any:
    """The entries of a collection, and of the collections in it, as dicts. Any other value is returned as it is."""
    if any(value is outer for outer in around):
        return ...
    if not isinstance(value, (*COLLECTIONS, tuple)):
        return value
    return {key: _entries(entry, (*around, value)) for key, entry in _held(value).items()}


def _held(collection: Any) -> dict[Any, Any]:
    """The entries of a collection by their keys or indices."""
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
