"""Skeleton: a module on meta in the place of one that only the process which holds it builds."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeshard.errors import ConfigurationError
from pipeshard.graph.rng import Randomness
from pipeshard.split.initialize import give, number
from pipeshard.split.ties import kept_tied

BLUEPRINT = "pipeshard_blueprint"  # the attribute by which a module is known to be a skeleton
OWN = frozenset(vars(nn.Module()))  # what torch itself keeps in a module: its mode, hooks and tables of tensors


@dataclass
class Blueprint:
    """How a module is built, and what it had as a skeleton: what was changed since is the user's, and stays.

    `before` has its modules by path, each with its plain attributes at that time.
    """

    place: int
    make: Callable[[], nn.Module]
    before: list[tuple[str, nn.Module, dict[str, Any]]]


def skeleton(construct: Callable[[], Any], make: Callable[[], nn.Module], place: int, name: str) -> nn.Module:
    """What `construct()` returns, on meta: names, shapes and attributes, no memory, no random number of the user's.

    `make()` is to build it for real; its values will depend on the seed and on `place`. Raises ConfigurationError where
    this does not run on meta, or makes no module.
    """
    try:
        with Randomness(torch.device("cpu")).step(0, 0), torch.device("meta"), _Unread():
            module = construct()
    except Exception as error:
        raise ConfigurationError(
            f"layer {place}, {name}, cannot be built on meta, where its shapes are found: "
            f"{type(error).__name__}: {error}. Give device='cpu' to tensors that its constructor reads, or put the "
            "module itself into the list"
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"layer {place}, {name}, builds a {type(module).__name__}, not an nn.Module")
    with kept_tied(module):  # what was made on a device of its own is known by its shape, too
        module.to("meta")
    before = [(path, inner, _plain(inner)) for path, inner in module.named_modules()]
    module.__dict__[BLUEPRINT] = Blueprint(place, make, before)
    return module


def skeletons(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` that were not built here."""
    return [module for module in model.modules() if BLUEPRINT in vars(module)]


def build(module: nn.Module, seed: int) -> None:
    """Make a skeleton what its constructor makes of it, on the default device.

    The values depend on the seed and its place alone; the user's random generators do not move. Modules and parameters
    stay the same objects, so that optimizers, hooks and ties keep them; a parameter that has values keeps those, and so
    does everything that was set since the skeleton was made. Raises ConfigurationError where it is not built like it.
    """
    blueprint: Blueprint = vars(module)[BLUEPRINT]
    try:
        with Randomness(torch.device("cpu")).step(0, 0):
            torch.manual_seed(own := number(seed, f"layer {blueprint.place}"))
            random.seed(own)
            np.random.seed(own % 2**32)
            built = blueprint.make()
        _take(module, built, blueprint)
    except Exception as error:
        raise ConfigurationError(
            f"layer {blueprint.place}, a {type(module).__name__}, was built on meta, but not in the same way with "
            f"memory: {type(error).__name__}: {error}"
        ) from error
    del module.__dict__[BLUEPRINT]


class _Unread(TorchDispatchMode):
    """A number that is read on meta is an error, which it is not everywhere: ColossalAI makes torch return 0."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            raise RuntimeError("a tensor on meta has no value to read")
        return func(*args, **(kwargs or {}))


def blank_buffers(module: nn.Module) -> None:
    """Give the buffers of a skeleton that stays one memory, as the trace of a batch and checkpoints want it."""
    for inner in module.modules():
        for key, buffer in inner._buffers.items():
            if buffer is not None and buffer.is_meta:
                inner._buffers[key] = torch.zeros_like(buffer, device="cpu")


@torch.no_grad()
def _take(module: nn.Module, built: nn.Module, blueprint: Blueprint) -> None:
    """Values, buffers and attributes of `built`; what refers to its parts then refers to those of `module`."""
    parts: dict[int, Any] = {id(built.get_submodule(path)): mine for path, mine, _ in blueprint.before}
    paths, others = {path for path, *_ in blueprint.before}, {path for path, _ in built.named_modules()}
    if paths != others:
        raise ValueError(f"it has other modules, {min(paths ^ others)} the first")
    theirs = dict(built.named_parameters(remove_duplicate=False))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in theirs:
            parts[id(theirs[name])] = parameter
        if parameter.is_meta:
            give(parameter, _like(theirs[name].detach(), parameter, name))
    for path, mine, before in blueprint.before:
        other = built.get_submodule(path)
        for key, value in other._buffers.items():
            skeleton = mine._buffers.get(key)
            if value is not None and skeleton is not None:
                if skeleton.is_meta:
                    mine._buffers[key] = _like(value, skeleton, f"{path}.{key}".lstrip("."))
                parts[id(value)] = mine._buffers[key]
        for key, value in _plain(other).items():
            if vars(mine).get(key) is before.get(key):
                mine.__dict__[key] = copy.deepcopy(value, parts)


def _like(value: Tensor, skeleton: Tensor, name: str) -> Tensor:
    if value.shape != skeleton.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, on meta it had {tuple(skeleton.shape)}")
    return value.to(skeleton.dtype)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in OWN}
