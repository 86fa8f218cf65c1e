"""Units: the modules that are never cut, and the interception of their calls."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from torch import nn

from pipeshard.errors import TraceError

# handler(unit name, the unit's own forward, positional arguments, keyword arguments) -> the unit's result
Handler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """The units of `model` by name, in the order of registration.

    A unit is a member of an outermost `nn.ModuleList` of modules with parameters, or any other child with parameters
    of the modules around those lists. A module reached under several names counts once, under its first name.
    """
    lists = _outermost_lists(model)
    containers = {prefix for name in lists for prefix in _ancestors(name)} | {""}
    units: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()

    def add(name: str, module: nn.Module) -> None:
        if module not in seen and _has_parameters(module):
            seen.add(module)
            units[name] = module

    def walk(prefix: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            name = f"{prefix}.{child_name}" if prefix else child_name
            if name in lists:
                for member_name, member in child.named_children():
                    add(f"{name}.{member_name}", member)
            elif name in containers:
                walk(name, child)
            else:
                add(name, child)

    walk("", model)
    return units


def _outermost_lists(model: nn.Module) -> set[str]:
    outermost: set[str] = set()
    for name, module in model.named_modules():  # parents come before their children
        inside = any(ancestor in outermost for ancestor in _ancestors(name))
        if isinstance(module, nn.ModuleList) and not inside and any(map(_has_parameters, module)):
            outermost.add(name)
    return outermost


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


class Interception:
    """Stands in for one unit's `forward`; whoever sets `handler` decides what a call of the unit does.

    It is set on the instance, so the unit keeps its class, its hooks and its activation checkpointing.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.original: Callable[..., Any] = module.forward
        self.handler: Handler | None = None
        functools.update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.handler is None:
            return self.original(*args, **kwargs)
        return self.handler(self.name, self.original, args, kwargs)


def intercept(units: Mapping[str, nn.Module]) -> list[Interception]:
    """Put an Interception before each unit's `forward`, or return the one that is there."""
    interceptions = []
    for name, module in units.items():
        if not isinstance(module.forward, Interception):
            module.forward = Interception(name, module)
        interceptions.append(module.forward)
    return interceptions


class Listening:
    """What modules inside a unit return to their forward hooks: (path, occurrence, result), in the order of calls.

    With `silent` the hooks themselves hear nothing of it.
    """

    def __init__(self, unit: nn.Module, paths: Iterable[str], silent: bool = False) -> None:
        self.modules, self.silent = {path: unit.get_submodule(path) for path in paths}, silent
        self.heard: list[tuple[str, int, Any]] = []

    def __enter__(self) -> Self:
        counts: Counter[str] = Counter()

        def hear(path: str, result: Any) -> None:
            self.heard.append((path, counts[path], result))
            counts[path] += 1

        self.hooks = {path: dict(module._forward_hooks) for path, module in self.modules.items()}
        self.handles = []
        for path, module in self.modules.items():
            if self.silent:
                module._forward_hooks.clear()
            listener = functools.partial(lambda path, module, args, result: hear(path, result), path)
            self.handles.append(module.register_forward_hook(listener, prepend=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()
        for path, module in self.modules.items() if self.silent else ():
            module._forward_hooks.update(self.hooks[path])


def listened(unit: nn.Module) -> list[str]:
    """The modules inside a unit that have forward hooks."""
    return [path for path, module in unit.named_modules() if path and module._forward_hooks]


def tell(unit: nn.Module, path: str, result: Any) -> None:
    """Call the forward hooks of a module inside a unit as if it had just returned `result`."""
    module = unit.get_submodule(path)
    for key, hook in list(module._forward_hooks.items()):
        arguments: tuple[Any, ...] = ((), {}) if key in module._forward_hooks_with_kwargs else ((),)
        if hook(module, *arguments, result) is not None:
            raise TraceError(
                f"a forward hook on {path} ({type(module).__name__}), inside a unit, changes its result: do that in "
                "the module's forward, so that the stages which do not run the module need not know"
            )


@contextmanager
def handled(units: Mapping[str, nn.Module], handler: Handler) -> Iterator[None]:
    """Let `handler` answer the units' calls inside this context; afterwards everything is as it was."""
    before = {name: module.__dict__.get("forward") for name, module in units.items()}
    interceptions = intercept(units)
    handlers = [interception.handler for interception in interceptions]
    for interception in interceptions:
        interception.handler = handler
    try:
        yield
    finally:
        for interception, previous in zip(interceptions, handlers, strict=True):
            interception.handler = previous
        for name, module in units.items():
            if before[name] is None:
                module.__dict__.pop("forward", None)
