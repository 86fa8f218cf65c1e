"""Smaller: builds smaller copies of a large model (fewer and narrower layers), which are proven instead of the model.

Whether a split is exact depends on the code of a model: the code of its class, of its kinds of layers, and of the
user's additions. The number and width of the layers do not matter. A copy therefore keeps every kind of layer, two
layers for each stage, ties, adapters, hooks, and `requires_grad` of each parameter.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pipeshard.batch.batch import Batch
from pipeshard.engine.groups import keep
from pipeshard.engine.loss_trial import SHORT
from pipeshard.engine.optimizer_trial import copied_optimizer
from pipeshard.graph.functions import Memo
from pipeshard.hf import LABELS, config_of, has_label_per_sample, is_ids, without_adapters
from pipeshard.split.base_names import base_names
from pipeshard.split.packed import quantize_as
from pipeshard.split.ties import first_names, names_of
from pipeshard.verify.reference import Copies, copy_hooks, functions
from pipeshard.verify.small_config import (
    SETTINGS,
    all_kinds,
    factors,
    has_vocabulary,
    kind_of_layer,
    layer_counts,
    take_layers,
    take_tokens,
    take_widths,
    tokens,
)

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOK_OPTIONS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")


class Unlike(Exception):
    """A smaller copy does not represent the model. The message is the reason."""


@dataclass(frozen=True)
class Smaller:
    """A smaller copy, and a description of its reductions."""

    own: Copies
    what: str


def smaller(given: Copies, stages: int, most: float, device: torch.device) -> Iterator[Callable[[], Smaller]]:
    """Yield functions that build smaller copies of a model. Functions for smaller copies come first. The parameters of
    a copy take at most `most` bytes in fp32.

    A function raises Unlike for an unsuitable copy, or the model's own error if a copy of this size cannot be built.
    """
    if hasattr(type(without_adapters(given.model)[1]), "_from_config"):
        divisors = factors(config_of(without_adapters(given.model)[1]))
        for fewer_layers, fewer_tokens in ((True, True), (True, False), (False, True), (False, False)):
            for factor in divisors:
                yield partial(_from_config, given, stages, most, device, fewer_layers, fewer_tokens, factor)
    yield partial(_shortened, given, stages, most)


def _from_config(
    given: Copies, stages: int, most: float, device: torch.device, fewer_layers: bool, fewer_tokens: bool, factor: int
) -> Smaller:
    """Rebuild a transformers model from a smaller config, with widths divided by `factor`."""
    prefix, model = without_adapters(given.model)
    config = copy.deepcopy(config_of(model))
    layers = layer_counts(model, config, stages) if fewer_layers else {}
    ids = _ids(given, config) if fewer_tokens else None
    what = [
        *take_layers(config, layers),
        *take_widths(config, factor),
        *([] if ids is None else take_tokens(config, ids)),
    ]
    kind: Any = type(model)
    with torch.device("meta"):
        _refuse_large(kind._from_config(copy.deepcopy(config)).parameters(), most)
    with torch.device(device):
        built = kind._from_config(config, dtype=torch.float32)
        quantize_as(given.model, built, base_names(given.model))
        built = _with_adapters(given.model, built) if prefix else built
    _refuse_large(built.parameters(), most)
    _check_alike(given.model, built)
    memo = Memo(given.shared | _memo(given.model, built), functions(given.model, given.criterion, given.optimizer))
    _adopt(given.model, built, memo)
    sample = given.sample if ids is None else _renumbered(given, ids)
    sample = sample.converted(lambda path, tensor: tensor.float() if tensor.dtype in SHORT else tensor)  # like the copy
    own = _completed(given, built, sample, memo)
    memo.fill()
    return Smaller(own, ", ".join(what) or "the same size")


def _with_adapters(model: Any, base: nn.Module) -> nn.Module:
    """A smaller base model with the adapters of `model`."""
    first, *others = model.peft_config
    made = type(model)(base, copy.deepcopy(model.peft_config[first]), adapter_name=first)
    for name in others:
        made.add_adapter(name, copy.deepcopy(model.peft_config[name]))
    made.set_adapter(model.active_adapter)
    return made


def _refuse_large(parameters: Iterable[nn.Parameter], most: float, copied: str = "a smaller copy") -> None:
    needed = 4 * sum(parameter.numel() for parameter in parameters)
    if needed > most:
        raise Unlike(f"{copied} takes {needed / 2**30:.1f} GiB, more than the limit of {most / 2**30:.1f} GiB")


def _ids(given: Copies, config: Any) -> Tensor | None:
    """The sorted token ids of the sample and the config, as a smaller vocabulary. None if the sample has no token ids,
    or the config has no vocabulary."""
    leaves = [leaf.flatten().cpu() for _, leaf in _id_leaves(given)]
    if not leaves or not has_vocabulary(config):
        return None
    of_sample = {token for token in torch.cat(leaves).unique().tolist() if token >= 0}
    return torch.tensor(sorted(of_sample | tokens(config)))


def _id_leaves(given: Copies) -> Iterator[tuple[str, Tensor]]:
    """The leaves of the sample that contain token ids."""
    per_sample = has_label_per_sample(given.model)
    for path, leaf in zip(given.sample.paths, given.sample.leaves, strict=True):
        if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.ndim < 2:
            continue
        if is_ids(path) or (path.endswith(LABELS) and not per_sample):
            yield path, leaf


def _renumbered(given: Copies, ids: Tensor) -> Batch:
    """The sample with token ids of the smaller vocabulary."""
    paths = {path for path, _ in _id_leaves(given)}

    def renumber(path: str, leaf: Tensor, dim: Any) -> Tensor:
        if path not in paths:
            return leaf
        table = ids.to(leaf.device)
        return torch.where(leaf >= 0, torch.searchsorted(table, leaf.clamp_min(0).contiguous()), leaf).to(leaf.dtype)

    return given.sample.map(renumber)


def _shortened(given: Copies, stages: int, most: float) -> Smaller:
    """Copy the model with only the first layers of its lists."""
    lists: dict[nn.ModuleList, int] = {}
    what = []
    for name, module in given.model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 2 * stages:
            count = max(2 * stages, all_kinds([kind_of_layer(layer) for layer in module]))
            if count < len(module):
                lists[module] = count
                what.append(f"{count} of the {len(module)} layers of {name}")
    if not what:
        raise Unlike("the model has no list of layers to shorten")
    kept = _kept(given.model, lists)
    _refuse_large(kept, most, f"a copy with {', '.join(what)}")
    dropped = {id(p): _dropped() for p in given.model.parameters() if p not in kept}
    memo = Memo(given.shared | dropped, functions(given.model, given.criterion, given.optimizer))
    memo |= {id(module): nn.ModuleList() for module in lists}  # a layer may refer to the list
    for module, count in lists.items():
        memo[id(module)].extend(copy.deepcopy(layer, memo) for layer in list(module)[:count])
    own = _completed(given, copy.deepcopy(given.model, memo), given.sample, memo)
    memo.fill()
    return Smaller(own, ", ".join(what))


def _kept(model: nn.Module, lists: Mapping[nn.ModuleList, int]) -> set[nn.Parameter]:
    """The parameters of a model that keeps only the first modules of its lists."""
    found: set[nn.Parameter] = set()
    todo = [model]
    while todo:
        module = todo.pop()
        found |= {p for p in module._parameters.values() if p is not None}
        inner = list(module._modules.values())
        count = lists.get(module, len(inner)) if isinstance(module, nn.ModuleList) else len(inner)
        todo += [one for one in inner[:count] if one is not None]
    return found


class _Dropped(nn.Parameter):
    """A placeholder for a parameter that a smaller copy lacks."""


def _dropped() -> nn.Parameter:
    return _Dropped(torch.empty(0))


def _check_alike(model: nn.Module, built: nn.Module) -> None:
    """Raise Unlike if `built`, a smaller copy of `model`, has a module or parameter that `model` lacks, lacks a kind of
    module that `model` has, ties other weights than `model`, or differs from `model` in a module's class or a
    parameter's number of dimensions."""
    theirs, own = dict(model.named_modules()), dict(built.named_modules())
    for path, module in own.items():
        if path not in theirs or type(theirs[path]) is not type(module):
            raise Unlike(
                f"module {path!r} of a smaller {type(model).__name__} does not exist in the full-size model, or has a "
                "different class there"
            )
    if missing := {_anywhere(path) for path in theirs} - {_anywhere(path) for path in own}:
        raise Unlike(f"a smaller {type(model).__name__} has no module {sorted(missing)[0]!r}")
    named = dict(model.named_parameters())
    for name, parameter in built.named_parameters():
        if name not in named or named[name].dim() != parameter.dim():
            raise Unlike(
                f"parameter {name!r} of a smaller {type(model).__name__} does not exist in the full-size model, or has "
                "a different number of dimensions there"
            )
    if _ties(model, built) != _ties(built, model):
        raise Unlike(f"a smaller {type(model).__name__} ties different weights than the full-size model")


def _anywhere(path: str) -> str:
    """The path of a module with * in place of the numbers of layers or experts."""
    return re.sub(r"\d+", "*", path)


def _ties(model: nn.Module, other: nn.Module) -> set[frozenset[str]]:
    """The groups of names that refer to the same parameter of `model`, without names that `other` does not have."""
    known = frozenset(first_names(other))
    groups = {known.intersection(names) for names in names_of(model).values()}
    return {group for group in groups if len(group) > 1}


def _memo(model: nn.Module, built: nn.Module) -> dict[int, Any]:
    """A deepcopy memo that replaces the modules and parameters of `model` with those of `built`."""
    own = dict(built.named_parameters(remove_duplicate=False))
    memo: dict[int, Any] = {id(p): own[name] if name in own else _dropped() for name, p in model.named_parameters()}
    modules = dict(built.named_modules())
    return memo | {id(module): modules[path] for path, module in model.named_modules() if path in modules}


def _adopt(model: nn.Module, built: nn.Module, memo: dict[int, Any]) -> None:
    """Copy the attributes and hooks of modules and parameters, and the parameters' requires_grad, to a smaller
    model."""
    theirs, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for path, module in built.named_modules():
        _adopt_settings(theirs[path], module, memo)
        _adopt_hooks(theirs[path], module, memo)
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(parameters[name].requires_grad)
        copy_hooks(parameters[name], parameter, memo)


def _adopt_settings(theirs: nn.Module, module: nn.Module, memo: dict[int, Any]) -> None:
    for name, value in vars(theirs).items():
        if isinstance(value, SETTINGS):
            setattr(module, name, value)
        elif name not in vars(module) and not _is_of_handles(value):
            setattr(module, name, copy.deepcopy(value, memo))


def _adopt_hooks(theirs: nn.Module, module: nn.Module, memo: dict[int, Any]) -> None:
    for table in HOOK_TABLES:
        if len(getattr(theirs, table)) == len(getattr(module, table)):  # registered by the class itself
            continue
        for key, hook in getattr(theirs, table).items():
            getattr(module, table)[key] = copy.deepcopy(hook, memo)
    for options in HOOK_OPTIONS:
        getattr(module, options).update(getattr(theirs, options))


def _is_of_handles(value: Any) -> bool:
    """Whether a value is a handle that removes hooks, or a list or tuple of such handles."""
    return all(isinstance(one, RemovableHandle) for one in (value if isinstance(value, list | tuple) else [value]))


def _completed(given: Copies, built: nn.Module, sample: Batch, memo: dict[int, Any]) -> Copies:
    """The Copies of a smaller model, with an optimizer and a criterion that refer to its parameters."""
    optimizer = None if given.optimizer is None else copied_optimizer(given.optimizer, memo)
    if optimizer is not None:
        _drop(optimizer)
    return Copies(built, copy.deepcopy(given.criterion, memo), optimizer, sample)


def _drop(optimizer: Optimizer) -> None:
    """Remove from an optimizer the parameters that a smaller copy lacks, and groups that are then empty."""
    for group in optimizer.param_groups:
        keep(group, [k for k, parameter in enumerate(group["params"]) if not isinstance(parameter, _Dropped)])
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    for parameter in [one for one in optimizer.state if isinstance(one, _Dropped)]:
        del optimizer.state[parameter]
