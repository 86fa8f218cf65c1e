"""Initialize: the initial values of tensors on meta.

transformers' `model.init_weights()` uses one generator for all modules in order, so the values of a parameter depend on
all parameters before it. A stage does not have all of these parameters. Here, every parameter therefore has its own
generator, seeded with the parameter's name.
"""

import functools
import hashlib
import inspect
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipeshard.errors import ConfigurationError, explained, listed, summary
from pipeshard.graph.operators import mutated
from pipeshard.graph.rng import seeded
from pipeshard.graph.storage import storage_of
from pipeshard.private import DispatchMode
from pipeshard.split.packed import packed_layers

logger = logging.getLogger("pipeshard")

# The rule that initializes meta tensors. True: the architecture's own rule. False: no rule. A function: fn(module) or
# fn(module, name), called for each module that has its own tensors to initialize.
InitWeights = bool | Callable[..., Any]


def initialize_tensors(
    model: nn.Module,
    parameters: Collection[str],
    buffers: Mapping[str, bool],
    rule: InitWeights,
    seed: int,
    constructed: Mapping[str, int] | None = None,
) -> None:
    """Initialize `parameters`, which are given by their first names, and `buffers`. Write to no other tensor of the
    model.

    If `rule` is True, a module is initialized by `_init_weights` of its nearest PreTrainedModel, then by its own
    `reset_parameters` if some tensors still have no values. Buffers are initialized in this way regardless of `rule`. A
    parameter's values depend only on the seed and the parameter's name. The user's random generators do not change.
    `buffers` is the result of `allocate`, and `constructed` is the result of `written_again`. A warning names
    parameters whose initial values the constructor set, since these values are lost. Quantized weights are skipped,
    since a checkpoint provides their values.

    Raises ConfigurationError if a buffer, or (unless `rule` is False) a parameter, still has no values, or if a
    function `rule` fails.
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
        fills, load = (
            "fills all of a module's own tensors",
            "pass init_weights=False and load all weights with load_model",
        )
        why = "neither the _init_weights of a PreTrainedModel nor the module's reset_parameters() writes to it"
        remedy = (
            f"Add a reset_parameters(), pass PipelinePlugin(init_weights=fn) with an fn(module, name) that {fills}, or "
            f"{load}"
        )
        if first not in parameters:
            remedy = "Add a reset_parameters() that sets it, or build the model under accelerate's init_empty_weights()"
        elif callable(rule):
            why, remedy = "init_weights=fn did not write to it", f"Pass an fn(module, name) that {fills}, or {load}"
        others = f" (one of {len(missing)} such tensors)" if len(missing) > 1 else ""
        kind = type(model.get_submodule(first.rpartition(".")[0])).__name__
        raise ConfigurationError(f"{first} of {kind} is on meta and was not initialized{others}: {why}. {remedy}")


def written_again(model: nn.Module, names: Collection[str]) -> dict[str, int]:
    """For each of these meta parameters to which the constructor wrote more than once, the number of these writes.

    Parameters of a PreTrainedModel are omitted, since the model's rule sets all their values. Tied parameters are
    omitted, since the rule writes to them several times.
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
    """Warn of parameters to which the constructor wrote more often than the rules of the surrounding modules would."""
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
    """Call `fill` for each module that contains some of the tensors `names`. Return the names of the tensors that were
    not written.

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
        reset()  # as in the constructor, also writes to children (the bias of an attention's output projection)
    elif names - writes.written:
        writes.settled = set(writes.written)
        reset()
        writes.settled = set()
    elif is_of_torch and names & writes.constructed.keys():
        writes.settled = set(writes.names.values())  # so that the writes of reset() are only counted
        reset()
        writes.settled = set()


def _by_function(
    rule: Callable[..., Any], path: str, module: nn.Module, owner: Any, names: set[str], writes: "_SeededWrites"
) -> None:
    if not names:
        return
    parameters = list(inspect.signature(rule).parameters.values())
    takes_name = len(parameters) > 1 and parameters[1].default is inspect.Parameter.empty
    what = f"init_weights failed for {path} ({type(module).__name__}, with the tensors {', '.join(sorted(names))})"
    with explained(lambda error: ConfigurationError(f"{what}: {summary(error)}")):
        rule(module, path) if takes_name else rule(module)


class _SeededWrites(DispatchMode):
    """Dispatch mode that skips writes to the model's tensors, except writes to tensors in `names` of the current module
    (see `inside`). A random write uses a generator seeded with the tensor's name and the number of earlier random
    writes to the tensor.

    A parameter with several names is written only by the module of its first name. Otherwise, the other modules would
    initialize the parameter again.
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
        self.settled: set[str] = set()  # tensors that must not be written to (again)
        self.draws: Counter[str] = Counter()
        self.constructed: Mapping[str, int] = {}  # by parameter: the constructor's number of writes
        self.count: Counter[str] = Counter()  # by tensor: the rule's number of writes

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


def number(seed: int, text: str) -> int:
    """A seed derived from `seed` and `text`."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {text}".encode(), digest_size=7).digest(), "little")
