"""Deferred initialisation: a module on meta, which only the process that holds it builds for real.

A list of LayerSpecs may describe a model that no process could hold. Each layer is constructed on meta, for its names
and shapes, and constructed again with memory where it is held; the module that optimizers, hooks and ties know takes
over what the second construction computed.
"""

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
    """How a module is built, and what it was as a skeleton: attributes changed since then are the user's, and stay.

    `place` seeds its values. `before` has its modules by path, each with its plain attributes at that time.
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
    except Exception as error:  # whatever the user's constructor raises
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
    module.__dict__[BLUEPRINT] = Blueprint(place=place, make=make, before=before)
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
            torch.manual_seed(of_layer := number(seed, f"layer {blueprint.place}"))
            random.seed(of_layer)
            np.random.seed(of_layer % 2**32)
            built = blueprint.make()
        _take(module, built, blueprint)
    except Exception as error:  # of the user's constructor, too
        raise ConfigurationError(
            f"layer {blueprint.place}, a {type(module).__name__}, was built on meta, but not in the same way with "
            f"memory: {type(error).__name__}: {error}"
        ) from error
    del module.__dict__[BLUEPRINT]


class _Unread(TorchDispatchMode):
    """Reading a number on meta is an error, which it is not everywhere: ColossalAI makes torch return 0."""

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
    """Take the values, buffers and attributes of `built`; references to its parts become those to parts of `module`."""
    parts: dict[int, Any] = {id(built.get_submodule(path)): inner for path, inner, _ in blueprint.before}
    paths, built_paths = {path for path, *_ in blueprint.before}, {path for path, _ in built.named_modules()}
    if paths != built_paths:
        raise ValueError(f"it has other modules, {min(paths ^ built_paths)} the first")
    values = dict(built.named_parameters(remove_duplicate=False))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in values:
            parts[id(values[name])] = parameter
        if parameter.is_meta:
            give(parameter, _like(values[name].detach(), parameter, name))
    for path, inner, before in blueprint.before:
        source = built.get_submodule(path)
        for key, value in source._buffers.items():
            skeleton = inner._buffers.get(key)
            if value is not None and skeleton is not None:
                if skeleton.is_meta:
                    inner._buffers[key] = _like(value, skeleton, f"{path}.{key}".lstrip("."))
                parts[id(value)] = inner._buffers[key]
        for key, value in _plain(source).items():
            if vars(inner).get(key) is before.get(key):
                inner.__dict__[key] = copy.deepcopy(value, parts)


def _like(value: Tensor, skeleton: Tensor, name: str) -> Tensor:
    if value.shape != skeleton.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, on meta it had {tuple(skeleton.shape)}")
    return value.to(skeleton.dtype)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in OWN}
