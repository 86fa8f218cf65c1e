"""Unit outputs: the values that leave a unit call in its result, through hooks in the unit, and at places to which the
unit writes.

A stage that does not run a unit must reproduce all outputs of the unit. The result alone is not enough: models leave
auxiliary losses in attributes, lists and contexts, and transformers collects router logits with forward hooks. Places
to which a unit writes are found by comparison with a Snapshot. Each output is a pytree whose tensors can be sent.
Objects of the user's classes are nodes of the pytree, even if the classes are not registered with torch.
"""

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Size, Tensor, nn

from pipeshard.errors import TraceError
from pipeshard.graph.places import (
    MISSING,
    PlacePath,
    content_of,
    format_path,
    is_comparable,
    is_object,
    put,
    put_content,
    resolve,
)
from pipeshard.graph.snapshot import Change, Snapshot
from pipeshard.graph.storage import storage_of
from pipeshard.private import (
    SUPPORTED_NODES,
    TreeSpec,
    is_namedtuple_instance,
    register_pytree_node,
    tree_flatten,
    tree_map,
    tree_unflatten,
)

UNIT, ARGUMENTS = "unit", "arguments"  # the roots of places


class Source(NamedTuple):
    """The way in which a tree of values leaves a unit call. If `module` and `place` are both unset, the tree is the
    unit's result.

    With `module`, the tree is the result of call number `occurrence` of this module, which is inside the unit. Forward
    hooks collect such results (attentions, router logits). With `place`, the unit left the tree at this place, given by
    a path that starts at the unit or its arguments. `how` is then "set", "added" (to a list), "all" (the content of a
    list) or "written" (into a tensor).
    """

    module: str = ""
    occurrence: int = 0
    place: PlacePath = ()
    how: str = ""

    @property
    def by_hook(self) -> bool:
        """Whether a hook inside the unit left the tree, for example as a count of the hook's runs."""
        return any(str(step.key).endswith("_hooks") for step in self.place)


class Part(NamedTuple):
    """A tree of values that leaves a unit call, and its source."""

    source: Source
    tree: TreeSpec


RESULT = Source()
LISTS = ("all", "added")
logger = logging.getLogger("pipeshard")


@dataclass(frozen=True)
class Known:
    """A placeholder for an object that was reachable at `path` before the call."""

    path: PlacePath


@dataclass(frozen=True)
class OldEntry:
    """A placeholder for the entry that a list contained at `index` before the call."""

    index: int


class _Opened:
    """A user's object or a mapping as a pytree node: its class, and the names and values of its content. The names of
    a sequence's items are their indices."""

    def __init__(self, kind: Any, content: Mapping[Any, Any], known: Mapping[int, PlacePath]) -> None:
        self.kind, self.names = kind, tuple(content)
        self.values = [opened(value, known) for value in content.values()]


def _rebuilt_node(values: Iterable[Any], context: tuple[Any, tuple[Any, ...]]) -> Any:
    """A new object or mapping of the node's class with these values."""
    kind, names = context
    if issubclass(kind, Size):
        return kind(values)
    content = dict(zip(names, values, strict=True))
    if issubclass(kind, Mapping):
        return kind(content)
    items = [value for name, value in content.items() if isinstance(name, int)]
    rebuilt = tuple.__new__(kind, items) if issubclass(kind, tuple) else kind.__new__(kind)
    if issubclass(kind, list):
        list.extend(rebuilt, items)
    for name, value in content.items():
        if not isinstance(name, int):
            object.__setattr__(rebuilt, name, value)
    return rebuilt


register_pytree_node(
    _Opened,
    lambda node: (node.values, (node.kind, node.names)),
    _rebuilt_node,
    serialized_type_name="pipeshard.unit_outputs.opened",
)


def opened(content: Any, known: Mapping[int, PlacePath] | None = None) -> Any:
    """`content` as a pytree in which objects are nodes. An object whose id is in `known` becomes a Known leaf."""
    known = known or {}
    if isinstance(content, Tensor | str | int | float | None):
        return content
    if id(content) in known:
        return Known(known[id(content)])
    if type(content) in SUPPORTED_NODES or is_namedtuple_instance(content):
        return tree_map(lambda leaf: opened(leaf, known), content, is_leaf=lambda node: node is not content)
    if isinstance(content, Mapping):
        return _Opened(type(content), content, known)
    if isinstance(content, Size):
        return _Opened(type(content), dict(enumerate(content)), known)
    if is_object(content) and not isinstance(content, nn.Module | type | set | frozenset | deque):
        items = dict(enumerate(content)) if isinstance(content, list | tuple) else {}
        return _Opened(type(content), items | content_of(content, "attr"), known)
    return content


def resolve_from(path: PlacePath, unit: nn.Module, arguments: Any) -> Any:
    """The value at a place whose path starts at `unit` or at the `arguments` of its call."""
    return resolve(unit if path[0].key == UNIT else arguments, path[1:])


def answer(unit: nn.Module, parts: Sequence[Part], leaves: Sequence[Any], arguments: Any) -> Any:
    """Reproduce the outputs of a unit call from `leaves`: call hooks, write to places, and return the unit's result."""
    result, remaining = None, iter(leaves)
    for source, tree in parts:
        of_part = itertools.islice(remaining, tree.num_leaves)
        known = (resolve_from(leaf.path, unit, arguments) if isinstance(leaf, Known) else leaf for leaf in of_part)
        content = tree_unflatten(known, tree)
        if source.module:
            _tell(unit, source.module, content)
        elif source.place:
            _leave(source, content, unit, arguments)
        else:
            result = content
    return result


def changed(
    snapshot: Snapshot, but: Iterable[Tensor] = (), stores: Container[int] = ()
) -> Iterator[tuple[Source, Any]]:
    """The values that a call has left at places since `snapshot`, with their sources. The roots of `snapshot` are UNIT
    and ARGUMENTS. In-place writes to the tensors `but` are omitted. `stores` are the storages to which the call has
    written."""
    known, skipped = snapshot.paths, {id(tensor) for tensor in but}
    for change in (*snapshot.changes(), *_changed_through_data(snapshot, stores)):
        if change.is_of_list and _grows(change.before, change.now):
            added = change.now[len(change.before) :]
            yield Source(place=change.path, how="added"), [opened(entry, known) for entry in added]
        elif change.is_of_list:
            yield Source(place=change.path, how="all"), _entries(change, known)
        elif change.before is not change.now:
            yield Source(place=change.path, how="set"), opened(change.now, known)
        elif id(change.now) not in skipped:
            yield Source(place=change.path, how="written"), change.now


def _changed_through_data(snapshot: Snapshot, stores: Container[int]) -> Iterator[Change]:
    """The tensors that were written to through `data`, such as running averages: their storages are in `stores`, but
    their versions have not changed. Parameters are omitted: a constraint on weights (such as a norm of at most 1) that
    each forward applies does not change weights that already satisfy the constraint."""
    for path, holder, key, tensor, version in snapshot.tensors:
        is_written = storage_of(tensor) in stores and tensor._version == version
        if is_written and not isinstance(tensor, nn.Parameter):
            yield Change(path, holder, key, tensor, tensor)


def _grows(before: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(now) > len(before) and all(a is b for a, b in zip(before, now))


def _entries(change: Change, known: Mapping[int, PlacePath]) -> list[Any]:
    # Equal numbers may be one object, so a number stays a value and does not become an OldEntry.
    before = {id(entry): k for k, entry in enumerate(change.before) if not is_comparable(entry)}
    return [OldEntry(before[id(e)]) if id(e) in before else opened(e, known) for e in change.now]


def _leave(source: Source, content: Any, unit: nn.Module, arguments: Any) -> None:
    """Write `content` to the place of `source`, as the unit call does."""
    if source.how == "written":
        target = resolve_from(source.place, unit, arguments)
        if target.is_leaf and target.requires_grad:
            raise TraceError(
                f"the forward of {type(unit).__name__} modifies {format_path(source.place[1:])}, which is trained, "
                "but the backward of an earlier microbatch may need the old values. Modify weights after "
                "optimizer.step(), or compute new tensors from the weights in the forward (torch.nn.utils.parametrize)"
            )
        target.copy_(content)
    elif source.how == "added":
        holder = resolve_from(source.place, unit, arguments)
        put_content(holder, [*holder, *content])
    elif source.how == "all":
        holder = resolve_from(source.place, unit, arguments)
        before = list(holder)
        put_content(holder, [before[e.index] if isinstance(e, OldEntry) else e for e in content])
    else:
        *way, (how, key) = source.place
        put(resolve_from(tuple(way), unit, arguments), how, key, content)


def run_collecting(
    unit: nn.Module,
    forward: Callable[..., Any],
    arguments: tuple[Any, Any],
    modules: Iterable[str] = (),
    places: Sequence[Source] = (),
    silent: bool = False,
) -> list[tuple[Source, Any]]:
    """Run one call of `unit` with `arguments` (args, kwargs), and return its outputs with their sources: the result,
    the results of `modules`, and the values of `places`.

    `modules` are names of modules inside the unit. With `silent`, the forward hooks of these modules are not called,
    except hooks that only make the module's result require a gradient. `places` are sources to read after the call.
    """
    args, kwargs = arguments
    heard: list[tuple[Source, Any]] = []
    counts: Counter[str] = Counter()

    def hear(path: str, module: nn.Module, args: Any, result: Any) -> None:
        heard.append((Source(path, counts[path]), opened(result)))
        counts[path] += 1

    before = {source: list(_at(source, unit, arguments)) for source in places if source.how in LISTS}
    with ExitStack() as stack:
        for path in modules:
            module = unit.get_submodule(path)
            if silent:
                own = dict(module._forward_hooks)
                stack.callback(module._forward_hooks.update, own)
                stack.callback(module._forward_hooks.clear)
                for key in (key for key, hook in own.items() if not _only_requires_gradient(hook)):
                    del module._forward_hooks[key]
            stack.callback(module.register_forward_hook(partial(hear, path), prepend=True).remove)
        result = forward(*args, **kwargs)
    left = [(source, _left(source, before.get(source), unit, arguments)) for source in places]
    return [(RESULT, result), *heard, *left]


def _only_requires_gradient(hook: Callable[..., Any]) -> bool:
    """Whether a forward hook only calls `requires_grad_`, like the hooks that `enable_input_require_grads` of
    transformers and peft registers. Such a hook affects only the unit's result."""
    return getattr(getattr(hook, "__code__", None), "co_names", ()) == ("requires_grad_",)


def value_at(path: PlacePath, unit: nn.Module, arguments: Any = None) -> Any:
    """The value at a place of `unit` or of the `arguments` of its call, or MISSING."""
    with suppress(AttributeError, KeyError, IndexError, TypeError):
        return resolve_from(path, unit, arguments)
    return MISSING


def _at(source: Source, unit: nn.Module, arguments: Any) -> Any:
    value = value_at(source.place, unit, arguments)
    return () if value is MISSING and source.how in LISTS else value


def _left(source: Source, before: list[Any] | None, unit: nn.Module, arguments: Any) -> Any:
    now = _at(source, unit, arguments)
    if before is None:
        return opened(now)
    if source.how == "added":
        return [opened(entry) for entry in list(now)[len(before) :]]
    return _entries(Change(source.place, None, None, before, list(now)), {})


def listened(unit: nn.Module) -> list[str]:
    """The names of the modules inside a unit that have forward hooks."""
    return [path for path, module in unit.named_modules() if path and module._forward_hooks]


def flattened(result: Any, known: Mapping[int, PlacePath]) -> tuple[list[Any], TreeSpec]:
    """The leaves and the tree of a unit's result, in the same form as in a trace."""
    return tree_flatten(opened(result, known))


def _tell(unit: nn.Module, path: str, result: Any) -> None:
    """Call the forward hooks of a module inside a unit as if the module had just returned `result`.

    The module's arguments are not available. A hook that fails without these arguments is skipped, as in the trace.
    """
    module = unit.get_submodule(path)
    for key, hook in list(module._forward_hooks.items()):
        arguments: tuple[Any, ...] = ((), {}) if key in module._forward_hooks_with_kwargs else ((),)
        try:
            changed = hook(module, *arguments, result) is not None
        except Exception as error:  # of any type: the user's hook may need arguments
            logger.debug("a forward hook on %s, inside a unit of another stage, failed: %r", path, error)
            continue
        if changed:
            raise TraceError(
                f"the forward hook on {path} ({type(module).__name__}) returns a new output. Hooks on modules inside a "
                f"unit ({type(unit).__name__}) may only read outputs, since stages without the unit run the hook, but "
                "not the code that uses the output: change the output in the module's forward instead"
            )
