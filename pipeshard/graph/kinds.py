"""Kinds: when two calls of units do the same, so that a trace needs to run only one of them."""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.graph.shapes import is_trainable
from pipeshard.graph.snapshot import HOOKS, PLAIN, Path, Snapshot
from pipeshard.graph.taint import CASTING

Place = tuple[Path, Any]
Settings = Mapping[Place, Any]


def settings(unit: nn.Module, snapshot: Snapshot) -> dict[Place, Any]:
    """All that the code of a unit could read, but for the values of tensors."""
    found: dict[Place, Any] = {((), "class"): type(unit)}
    for path, _, _, content in snapshot.holders:
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            found[path, key] = _comparable(value)
    for path, module in unit.named_modules():
        for name in HOOKS:
            if hooks := module.__dict__.get(name):
                found[(), f"{path} {name}"] = tuple(map(id, hooks.values()))
    return found


def describe(leaf: Any) -> Any:
    """What an argument has in common with others for which a unit does the same."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    if isinstance(leaf, PLAIN):
        return type(leaf), leaf if not isinstance(leaf, slice) else str(leaf)
    inside = Snapshot({"": leaf}).holders
    content = ((path, key, _comparable(v)) for path, _, _, c in inside if isinstance(c, dict) for key, v in c.items())
    lists = ((path, tuple(map(_comparable, c))) for path, _, _, c in inside if not isinstance(c, dict))
    return _comparable(leaf), (*content, *lists)


def modes() -> tuple[Any, ...]:
    """What glue may switch between two calls, and torch computes by."""
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in CASTING]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), *casts


def differing(units: Mapping[str, tuple[type, Settings]]) -> dict[str, set[str]]:
    """The attributes, by the module inside a unit that has them, in which units of one class differ: where among many
    they are (`layer_idx`), what they are to do."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    groups: defaultdict[type, list[Settings]] = defaultdict(list)
    for kind, own in units.values():
        groups[kind].append(own)
    for first, *others in groups.values():
        for other in others:
            for path, key in differences(first, other):
                if (module := module_at(path)) is not None:
                    found[module].add(key)
    return dict(found)


def differences(a: Settings, b: Settings) -> set[Place]:
    return {place for place in a.keys() | b.keys() if place not in a or place not in b or a[place] != b[place]}


def module_at(path: Path) -> str | None:
    """The name inside its unit of the module that a path leads to, if it leads to one."""
    names, steps = [], iter(path[1:])
    for step in steps:
        if step.how != "attr" or step.key != "_modules":
            return None
        names.append(str(next(steps, step).key))
    return ".".join(names) if path else None


@contextlib.contextmanager
def watching(unit: nn.Module, attributes: Mapping[str, set[str]]) -> Iterator[set[tuple[str, str]]]:
    """Inside, those of these attributes that are read; what cannot be watched counts as read."""
    read: set[tuple[str, str]] = set()
    with contextlib.ExitStack() as stack:
        for path, module in unit.named_modules():
            names = {name for name in attributes.get(path, ()) if name in module.__dict__}
            if names:
                try:
                    stack.callback(setattr, module, "__class__", type(module))
                    module.__class__ = _watched(type(module), path, names, read)
                except TypeError:
                    read |= {(path, name) for name in names}
        yield read


def _watched(base: Any, path: str, names: set[str], read: set[tuple[str, str]]) -> Any:
    """The class `base`, noting when one of these attributes is read."""

    def noted(name: str) -> property:
        def get(self: Any) -> Any:
            read.add((path, name))
            return self.__dict__[name]

        return property(get, lambda self, value: self.__dict__.__setitem__(name, value))

    same = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    made = type(base.__name__, (base,), {**same, **{name: noted(name) for name in names}})
    for name in vars(made).keys() - names:  # what `__init_subclass__` has put there: transformers' wraps forwards
        if not name.startswith("__"):
            delattr(made, name)
    return made


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, is_trainable(value)
    if isinstance(value, slice):
        return str(value)
    if isinstance(value, (*PLAIN, Enum)):
        return type(value), value
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    if isinstance(value, functools.partial):
        return _comparable(value.func), _comparable(value.args), repr(sorted(value.keywords))
    if isinstance(value, MethodType):
        return _comparable(value.__func__), type(value.__self__)
    return value.__code__ if isinstance(value, FunctionType) else type(value)
