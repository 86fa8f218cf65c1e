"""Smaller: copies of a large model with fewer layers, and narrower ones, that stand for it in a proof.

What a split may get wrong is in the code of a model, which is that of its class, of its layers' kinds, and of what its
user has put on it. How many layers there are, and how wide they are, changes nothing of it. So a copy keeps every kind
of layer, twice as many layers as there are stages, ties, adapters, hooks, and what is trained.
"""

import copy
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pipeshard.batch.batch import Batch
from pipeshard.hf import (
    EXPERT_COUNTS,
    EXPERT_GROUPS,
    EXPERTS_OF_TOKEN,
    HEAD_COUNTS,
    INNER_WIDTHS,
    LABELS,
    LAYER_COUNTS,
    NO_WIDTHS,
    VOCABULARIES,
    WIDTHS,
    config_of,
    has_label_per_sample,
    is_ids,
    is_token,
    without_adapters,
)
from pipeshard.verify.reference import Copies, copied_optimizer

logger = logging.getLogger("pipeshard")
LEAST_WIDTH, LEAST_INNER = 64, 16  # smaller widths stay; inner widths become no smaller
NARROWER = 4  # how much narrower inner widths become than the others
LITTLE = 4  # by what widths are divided where more is too much
TOKENS = 64  # a vocabulary has at least
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOK_OPTIONS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
SETTINGS = (bool, str, float, type(None))


class Unlike(Exception):
    """A smaller copy does not stand for the model; says why."""


@dataclass(frozen=True)
class Smaller:
    """A smaller copy, and what is smaller in it."""

    own: Copies
    what: str


def smaller(given: Copies, stages: int, most: float, device: torch.device) -> Iterator[Callable[[], Smaller]]:
    """What makes the copies of a model whose parameters take `most` bytes of fp32 at most, smallest first.

    Each raises Unlike, or whatever a model raises that cannot be built in this size.
    """
    if hasattr(type(without_adapters(given.model)[1]), "_from_config"):
        factors = _factors(config_of(without_adapters(given.model)[1]))
        for layers, tokens in ((True, True), (True, False), (False, True), (False, False)):
            for factor in factors:
                yield partial(_from_config, given, stages, most, device, layers, tokens, factor)
    yield partial(_shortened, given, stages, most, device)


def _from_config(
    given: Copies, stages: int, most: float, device: torch.device, fewer_layers: bool, fewer_tokens: bool, factor: int
) -> Smaller:
    """A model of transformers, built anew from a smaller config, whose widths are divided by `factor`."""
    prefix, model = without_adapters(given.model)
    config = copy.deepcopy(config_of(model))
    layers = _layers(model, config, stages) if fewer_layers else {}
    ids = _ids(given, config) if fewer_tokens else None
    what = [
        *_take_layers(config, layers),
        *_take_widths(config, factor),
        *([] if ids is None else _take_tokens(config, ids)),
    ]
    kind: Any = type(model)
    with torch.device("meta"):
        _refuse_large(kind._from_config(copy.deepcopy(config)), most)
    with torch.device(device):
        built = kind._from_config(config, dtype=torch.float32)
        built = _with_adapters(given.model, built) if prefix else built
    _refuse_large(built, most)
    _adopt(given.model, built)
    sample = given.sample if ids is None else _renumbered(given, ids)
    return Smaller(_completed(given, built, sample), ", ".join(what) or "the same size")


def _with_adapters(model: Any, base: nn.Module) -> nn.Module:
    """The same adapters around a smaller model."""
    first, *others = model.peft_config
    made = type(model)(base, copy.deepcopy(model.peft_config[first]), adapter_name=first)
    for name in others:
        made.add_adapter(name, copy.deepcopy(model.peft_config[name]))
    made.set_adapter(model.active_adapter)
    return made


def _refuse_large(model: nn.Module, most: float) -> None:
    needed = 4 * sum(parameter.numel() for parameter in model.parameters())
    if needed > most:
        raise Unlike(f"a smaller copy takes {needed / 2**30:.1f} GiB")


# The config of a smaller model.


def _parts(config: Any) -> Iterator[Any]:
    """A config and those inside it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_diff_dict"):
            yield from _parts(value)


def _numbers(config: Any, names: re.Pattern[str]) -> Iterator[tuple[Any, str, int]]:
    """The whole numbers of a config and those inside it whose names fit: the config, the name and the number."""
    for part in _parts(config):
        for name, value in vars(part).items():
            if type(value) is int and names.search(name):
                yield part, name, value


def _factors(config: Any) -> list[int]:
    """What all widths and numbers of heads can be divided by: as much as possible, and a little."""
    heads = [value for _, _, value in _numbers(config, HEAD_COUNTS) if value > 1]
    widths = [value for _, _, value in _numbers(config, WIDTHS) if value >= LEAST_WIDTH]
    largest = gcd(*heads, *widths) if heads else 1
    return sorted({largest, gcd(largest, LITTLE)}, reverse=True)


def _layers(model: nn.Module, config: Any, stages: int) -> dict[int, int]:
    """How many of n layers a smaller model has, by n: all kinds of layers are among the first ones."""
    counts = {value for _, _, value in _numbers(config, LAYER_COUNTS)}
    needed = {value: 2 * stages for value in counts if value > 2 * stages}
    for part in _parts(config):
        for value in vars(part).values():
            if isinstance(value, list | tuple) and len(value) in needed:
                needed[len(value)] = max(needed[len(value)], _all_kinds([repr(item) for item in value]))
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) in needed:
            needed[len(module)] = max(needed[len(module)], _all_kinds([_kind(layer) for layer in module]))
    return {value: count for value, count in needed.items() if count < value}


def _all_kinds(kinds: Sequence[Any]) -> int:
    """How many of these, from the first one on, are of all kinds that there are."""
    return 1 + max(kinds.index(kind) for kind in set(kinds))


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Alike for two layers whose modules, parameters and settings are alike."""
    return tuple(
        (
            path,
            type(module),
            tuple(sorted((key, repr(value)) for key, value in vars(module).items() if isinstance(value, SETTINGS))),
            tuple((name, tuple(p.shape), p.requires_grad) for name, p in module.named_parameters(recurse=False)),
        )
        for path, module in layer.named_modules()
    )


def _take_layers(config: Any, layers: Mapping[int, int]) -> Iterator[str]:
    changed = [(part, name, value) for part, name, value in _numbers(config, LAYER_COUNTS) if value in layers]
    for part, name, value in changed:
        for key, items in list(vars(part).items()):
            if isinstance(items, list | tuple) and len(items) == value:
                setattr(part, key, items[: layers[value]])
        setattr(part, name, layers[value])
        yield f"{layers[value]} of {value} layers"


def _take_widths(config: Any, factor: int) -> Iterator[str]:
    widths = {value for _, _, value in _numbers(config, WIDTHS) if value >= LEAST_WIDTH}
    inner = {value: _inner(value, factor) for _, _, value in _numbers(config, INNER_WIDTHS) if value >= LEAST_WIDTH}
    narrow = inner | {value: value // factor for value in widths}
    for part in list(_parts(config)):
        for name, value in list(vars(part).items()):
            if type(value) is int and value in narrow and not NO_WIDTHS.search(name):
                setattr(part, name, narrow[value])
    for part, name, value in list(_numbers(config, HEAD_COUNTS)):
        setattr(part, name, max(1, value // factor))
    for part, name, value in list(_numbers(config, EXPERT_COUNTS)):
        setattr(part, name, _experts(part, value))
    yield from (f"width {narrow[value]} of {value}" for value in sorted(widths) if narrow[value] != value)


def _inner(value: int, factor: int) -> int:
    return min(value, max(LEAST_INNER, value // (NARROWER * factor) // 8 * 8))


def _experts(config: Any, count: int) -> int:
    """A number of experts that divides theirs, leaves a choice, and fills the groups."""
    chosen = max((value for _, _, value in _numbers(config, EXPERTS_OF_TOKEN)), default=1)
    groups = max((value for _, _, value in _numbers(config, EXPERT_GROUPS)), default=1)
    least = 2 * max(chosen, groups)
    return next(n for n in range(1, count + 1) if n == count or (n >= least and count % n == 0 and n % groups == 0))


def _ids(given: Copies, config: Any) -> Tensor | None:
    """The tokens that the sample and the config name, sorted: a smaller vocabulary has these alone."""
    leaves = [leaf for path, leaf in _id_leaves(given)]
    if not leaves or not any(True for _ in _numbers(config, VOCABULARIES)):
        return None
    tokens = {token for part in _parts(config) for token in _tokens(part)}
    found = torch.cat([leaf.flatten().cpu() for leaf in leaves]).unique()
    return torch.tensor(sorted({int(token) for token in found if token >= 0} | {t for t in tokens if t >= 0}))


def _tokens(config: Any) -> Iterator[int]:
    for name, value in vars(config).items():
        if is_token(name):
            yield from [value] if type(value) is int else value if isinstance(value, list | tuple) else []


def _id_leaves(given: Copies) -> Iterator[tuple[str, Tensor]]:
    """The leaves of the sample that hold tokens."""
    per_sample = has_label_per_sample(given.model)
    for path, leaf in zip(given.sample.paths, given.sample.leaves, strict=True):
        if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.ndim < 2:
            continue
        if is_ids(path) or (path.endswith(LABELS) and not per_sample):
            yield path, leaf


def _take_tokens(config: Any, ids: Tensor) -> Iterator[str]:
    size, largest = max(TOKENS, len(ids)), int(ids.max())
    for part, name, value in list(_numbers(config, VOCABULARIES)):
        if value > max(size, largest):
            setattr(part, name, size)
            yield f"{size} of {value} tokens"
    for part in list(_parts(config)):
        for name, value in list(vars(part).items()):
            if is_token(name) and type(value) is int and value >= 0:
                setattr(part, name, int(torch.searchsorted(ids, value)))
            elif is_token(name) and isinstance(value, list | tuple):
                setattr(part, name, [int(torch.searchsorted(ids, token)) for token in value])


def _renumbered(given: Copies, ids: Tensor) -> Batch:
    """The sample with its tokens numbered as in the smaller vocabulary."""
    paths = {path for path, _ in _id_leaves(given)}

    def renumber(path: str, leaf: Tensor, dim: Any) -> Tensor:
        if path not in paths:
            return leaf
        table = ids.to(leaf.device)
        return torch.where(leaf >= 0, torch.searchsorted(table, leaf.clamp_min(0).contiguous()), leaf).to(leaf.dtype)

    return given.sample.map(renumber)


# A model that has fewer layers.


def _shortened(given: Copies, stages: int, most: float, device: torch.device) -> Smaller:
    """The model itself with the first layers of its lists alone."""
    memo: dict[int, Any] = {}
    what = []
    for name, module in given.model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 2 * stages:
            count = max(2 * stages, _all_kinds([_kind(layer) for layer in module]))
            if count < len(module):
                what.append(f"{count} of the {len(module)} layers of {name}")
                memo[id(module)] = copy.deepcopy(nn.ModuleList(list(module)[:count]), memo)
    if not what:
        raise Unlike("it has no list of layers that could be shorter")
    kept = sum(parameter.numel() for parameter in _kept(given.model, memo))
    if 4 * kept > most:
        raise Unlike(f"a copy with {', '.join(what)} takes {4 * kept / 2**30:.1f} GiB")
    built = copy.deepcopy(given.model, memo)
    return Smaller(_completed(given, built, given.sample), ", ".join(what))


def _kept(model: nn.Module, memo: Mapping[int, Any]) -> set[nn.Parameter]:
    """The parameters that a shorter copy has."""
    found: set[nn.Parameter] = set()
    todo = [model]
    while todo:
        module = todo.pop()
        module = memo.get(id(module), module)
        found |= {p for p in module._parameters.values() if p is not None}
        todo += [inner for inner in module._modules.values() if inner is not None]
    return found


# What is the user's: settings of modules, what is trained, the optimizer and the criterion.


def _adopt(model: nn.Module, built: nn.Module) -> None:
    """Give a smaller model what its user has set on the modules. Raises Unlike where it differs otherwise."""
    theirs, own = dict(model.named_modules()), dict(built.named_modules())
    for path, module in own.items():
        if path not in theirs or type(theirs[path]) is not type(module):
            raise Unlike(f"a smaller {type(model).__name__} has another module {path!r}")
        _adopt_settings(path, theirs[path], module)
    if missing := {_anywhere(path) for path in theirs} - {_anywhere(path) for path in own}:
        raise Unlike(f"a smaller {type(model).__name__} has no module {sorted(missing)[0]!r}")
    named = dict(model.named_parameters())
    for name, parameter in built.named_parameters():
        if name not in named or named[name].dim() != parameter.dim():
            raise Unlike(f"a smaller {type(model).__name__} has another parameter {name!r}")
        parameter.requires_grad_(named[name].requires_grad)
    if _ties(model, set(_all_names(built))) != _ties(built, set(_all_names(model))):
        raise Unlike(f"a smaller {type(model).__name__} has other tied weights")


def _anywhere(path: str) -> str:
    """The path of a module, whatever its number among layers or experts."""
    return re.sub(r"\d+", "*", path)


def _all_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _ties(model: nn.Module, names: set[str]) -> set[frozenset[str]]:
    """Names of one parameter each, among these."""
    of: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in names:
            of.setdefault(parameter, set()).add(name)
    return {frozenset(group) for group in of.values() if len(group) > 1}


def _adopt_settings(path: str, theirs: nn.Module, module: nn.Module) -> None:
    module.training = theirs.training
    for hooks in HOOK_TABLES:
        if len(getattr(theirs, hooks)) == len(getattr(module, hooks)):  # the class itself has registered them
            continue
        for key, hook in getattr(theirs, hooks).items():
            getattr(module, hooks)[key] = _carried(hook, f"a hook of {path!r}")
    for options in HOOK_OPTIONS:
        getattr(module, options).update(getattr(theirs, options))
    for name, value in vars(theirs).items():
        if name in ("training", *HOOK_TABLES) or (name in vars(module) and not isinstance(value, SETTINGS)):
            continue
        if isinstance(value, SETTINGS):
            setattr(module, name, value)
        elif name not in vars(module) and not _is_of_handles(value):
            setattr(module, name, _carried(value, f"{name!r} of {path!r}"))


def _is_of_handles(value: Any) -> bool:
    """Whether it is what removes hooks."""
    return all(isinstance(one, RemovableHandle) for one in (value if isinstance(value, list | tuple) else [value]))


def _carried(value: Any, what: str) -> Any:
    """What a smaller model can share with the model: a function that carries nothing of it."""
    inner = value.func if isinstance(value, partial) else value
    if isinstance(inner, FunctionType) and (not inner.__closure__ or inner.__module__.startswith("torch.")):
        return value
    raise Unlike(f"a smaller copy has not {what}")


def _completed(given: Copies, built: nn.Module, sample: Batch) -> Copies:
    """The copy's optimizer and criterion, which know its parameters in place of the model's."""
    own = dict(built.named_parameters(remove_duplicate=False))
    dropped = nn.Parameter(torch.empty(0))
    memo: dict[int, Any] = {id(p): own.get(name, dropped) for name, p in given.model.named_parameters()}
    memo[id(given.model)] = built
    optimizer = None if given.optimizer is None else copied_optimizer(given.optimizer, memo)
    if optimizer is not None:
        _without(optimizer, dropped)
    return Copies(built, copy.deepcopy(given.criterion, memo), optimizer, sample)


def _without(optimizer: Optimizer, dropped: nn.Parameter) -> None:
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not dropped]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    optimizer.state.pop(dropped, None)
