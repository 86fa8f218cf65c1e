"""Exits: the ways by which values leave a unit call: its result, forward hooks inside it, mappings it fills."""

import functools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Self

from torch import nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from pipeshard.errors import TraceError


class Source(NamedTuple):
    """Where a tree of values leaves a unit call.

    The result of the unit itself (no `module`, no `argument`); what a module inside the unit returned in its call
    number `occurrence`, which its forward hooks take away (attentions, router logits); or what the unit put into a
    mapping, which is leaf `argument` of its arguments (keys and values that layers share).
    """

    module: str = ""
    occurrence: int = 0
    argument: int = -1


class Part(NamedTuple):
    """A tree of values that leaves a unit call."""

    source: Source
    tree: TreeSpec


RESULT = Source()

logger = logging.getLogger("pipeshard")


def answer(unit: nn.Module, parts: Sequence[Part], leaves: Sequence[Any], arguments: Any) -> Any:
    """Return the result that `leaves` make, once hooks and mappings have got what the unit would have given them."""
    at, result = 0, None
    for (module, _, argument), tree in parts:
        content = tree_unflatten(leaves[at : at + tree.num_leaves], tree)
        at += tree.num_leaves
        if module:
            _tell(unit, module, content)
        elif argument >= 0:
            tree_leaves(arguments)[argument].update(content)
        else:
            result = content
    return result


def mappings(arguments: Any) -> dict[int, MutableMapping[Any, Any]]:
    """The mappings among the leaves of a call's arguments; a plain dict is no leaf."""
    return {k: leaf for k, leaf in enumerate(tree_leaves(arguments)) if isinstance(leaf, MutableMapping)}


class Exits:
    """Runs one unit call, `forward(*args, **kwargs)`, and collects all that leaves it, the result first.

    `modules` are those inside whose results count; with `silent` their hooks hear nothing of it.
    """

    def __init__(self, unit: nn.Module, modules: Iterable[str], silent: bool = False) -> None:
        self.modules, self.silent = {path: unit.get_submodule(path) for path in modules}, silent
        self.heard: list[tuple[Source, Any]] = []

    def __enter__(self) -> Self:
        counts: Counter[str] = Counter()

        def hear(path: str, module: nn.Module, args: Any, result: Any) -> None:
            self.heard.append((Source(path, counts[path]), result))
            counts[path] += 1

        self.hooks = {path: dict(module._forward_hooks) for path, module in self.modules.items()}
        self.handles = []
        for path, module in self.modules.items():
            if self.silent:
                module._forward_hooks.clear()
            self.handles.append(module.register_forward_hook(functools.partial(hear, path), prepend=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()
        for path, module in self.modules.items() if self.silent else ():
            module._forward_hooks.update(self.hooks[path])

    def run(self, forward: Any, args: Any, kwargs: Any) -> list[tuple[Source, Any]]:
        shelves = mappings((args, kwargs))
        before = {argument: dict(shelf) for argument, shelf in shelves.items()}
        result = forward(*args, **kwargs)
        added = [(Source(argument=k), _added(before[k], shelf)) for k, shelf in shelves.items()]
        return [(RESULT, result), *self.heard, *((source, content) for source, content in added if content)]


def listened(unit: nn.Module) -> list[str]:
    """The modules inside a unit that have forward hooks."""
    return [path for path, module in unit.named_modules() if path and module._forward_hooks]


def _added(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in now.items() if key not in before or before[key] is not value}


def _tell(unit: nn.Module, path: str, result: Any) -> None:
    """Call the forward hooks of a module inside a unit as if it had just returned `result`.

    There are no arguments to tell: a hook that fails for want of them is passed over, here as in the trace.
    """
    module = unit.get_submodule(path)
    for key, hook in list(module._forward_hooks.items()):
        arguments: tuple[Any, ...] = ((), {}) if key in module._forward_hooks_with_kwargs else ((),)
        try:
            changed = hook(module, *arguments, result) is not None
        except Exception as error:
            logger.debug("a forward hook on %s, inside a unit of another stage, failed: %r", path, error)
            continue
        if changed:
            raise TraceError(
                f"a forward hook on {path} ({type(module).__name__}), inside a unit, changes its result: do that in "
                "the module's forward, so that the stages which do not run the module need not know"
            )
