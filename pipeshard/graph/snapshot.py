"""Snapshot: what code can reach from some objects and change, and what has become of it since.

Code that nobody here wrote leaves values in attributes, lists, dicts, objects of its own, closures and globals. All of
them are walked, and what differs afterwards is what was changed: there is no list of ways in which that is done.
"""

import functools
import random
import sys
from argparse import Namespace
from ast import literal_eval
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet
from enum import Enum
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice)
# Of these packages objects and functions are not looked into: they have no state of a model's.
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "pipeshard", "colossalai", "tqdm", "rich", "datasets"}
NAMESPACES = (SimpleNamespace, Namespace)
# What torch keeps in modules beside what is registered; hooks are only looked into, see `_through`.
HOOKS = frozenset(name for name in nn.Module().__dict__ if name.endswith("_hooks"))
OF_TORCH = frozenset(name for name in nn.Module().__dict__ if name[0] == "_") - {"_parameters", "_buffers", "_modules"}
CODE_OF_OTHERS = LIBRARIES | {"transformers", "peft", "accelerate"}
# Their state is what they hold; those of the whole process are seeded anew everywhere, see Randomness.
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
OF_PROCESS = (torch.default_generator, random._inst, np.random.mtrand._rand)
COLLECTIONS = (MutableMapping, MutableSequence, MutableSet)
MOST = 200_000  # places that are walked


def is_comparable(value: Any) -> bool:
    """Whether two such values are the same if they are equal."""
    return isinstance(value, PLAIN)


class Step(NamedTuple):
    """One step on the way to a place: how ("attr", "item", "cell", "global"), and the name or index."""

    how: str
    key: Any


Path = tuple[Step, ...]


class Missing:
    """What a place holds that is not there."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


class Change(NamedTuple):
    """At `path` from the root, `holder[key]` was `before` and is `now`; with `before is now`, a tensor that was written
    to. The whole content of a list or set counts as one place, of which `key` is None."""

    path: Path
    holder: Any
    key: Any
    before: Any
    now: Any

    def __str__(self) -> str:
        return told(self.path)


class Holder(NamedTuple):
    """Something whose content can be changed, with that content."""

    path: Path
    object: Any
    how: str
    content: Any


class Snapshot:
    """All that is reached from `roots`, as it is now. The name of each root begins its paths."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.holders: list[Holder] = []
        self.seen: dict[int, Any] = {}
        self.paths: dict[int, Path] = {}  # by address: where what can be changed is
        self.tensors: list[tuple[Path, Any, Any, Tensor, int]] = []
        with torch._C.DisableTorchFunction():  # nothing here is an operator, and hundreds of tensors are looked at
            self._walk(deque(((Step("root", name),), root) for name, root in roots.items()))

    def changes(self) -> Iterator[Change]:
        """What differs now, in the order of the walk."""
        for path, holder, how, content in self.holders:
            now = content_of(holder, how)
            if not _differ(now, content):
                continue
            if not isinstance(now, dict):
                yield Change(path, holder, None, content, now)
                continue
            for key in dict.fromkeys((*content, *now)):
                old, new = content.get(key, MISSING), now.get(key, MISSING)
                if not is_same(old, new):
                    yield Change((*path, _step(how, key)), holder, key, old, new)
        for path, holder, key, tensor, version in self.tensors:
            if tensor._version != version:
                yield Change(path, holder, key, tensor, tensor)

    def restore(self) -> None:
        """Put back what every place held; the values of tensors are not looked at."""
        for _, holder, how, content in self.holders:
            now = content_of(holder, how)
            if not _differ(now, content):
                continue
            if not isinstance(content, dict):
                put_content(holder, content)
                continue
            for key in now.keys() | content.keys():
                if not is_same(now.get(key, MISSING), value := content.get(key, MISSING)):
                    put(holder, _step(how, key).how, key, value)

    def _walk(self, queue: deque[tuple[Path, Any]]) -> None:
        seen = self.seen  # kept alive: another object would get the address
        while queue and len(seen) < MOST:
            path, value = queue.popleft()
            if isinstance(value, PLAIN) or id(value) in seen:
                continue
            seen[id(value)] = value
            for how in _ways(value):
                self.paths[id(value)] = path
                content = content_of(value, how)
                self.holders.append(Holder(path, value, how, content))
                for key, entry in content.items() if isinstance(content, dict) else enumerate(content):
                    if isinstance(entry, Tensor):
                        if id(entry) not in seen and not entry.is_inference():
                            seen[id(entry)] = entry
                            self.tensors.append(((*path, _step(how, key)), value, key, entry, entry._version))
                    elif not isinstance(entry, PLAIN):
                        queue.append(((*path, _step(how, key)), entry))
            queue.extend(((*path, step), child) for step, child in _through(value))


def told(path: Path) -> str:
    """A path as a person would write it."""
    text, registered = "", False
    for how, key in path:
        if how == "attr" and key in ("_modules", "_buffers", "_parameters"):
            registered = True
            continue
        if how == "state":
            continue
        if how == "root":
            text = str(key)
        elif how in ("attr", "class") or registered:
            text += f".{key}" if text else str(key)
        elif how == "item":
            text += f"[{key!r}]"
        else:
            text += f" {how} {key}"
        registered = False
    return text


def resolve(root: Any, path: Iterable[Step]) -> Any:
    """What is at the end of a path that begins at `root`."""
    for how, key in path:
        if how in ("attr", "class", "code"):
            root = getattr(root, key)
        elif how == "item":
            root = root[key]
        elif how == "cell":
            root = dict(_cells(root))[key].cell_contents
        else:
            root = root.__globals__[key]
    return root


def put(holder: Any, how: str, key: Any, value: Any) -> None:
    """Let `holder` have `value` at `key`, or nothing if that is MISSING."""
    if how == "state":
        _set_state(holder, value)
    elif how == "cell":
        dict(_cells(holder))[key].cell_contents = value
    elif how == "class":
        setattr(holder, key, value)
    elif how == "attr" and not hasattr(holder, "__dict__"):
        object.__setattr__(holder, key, value)
    else:
        live = holder.__dict__ if how == "attr" else holder.__globals__ if how == "global" else holder
        if value is MISSING:
            live.pop(key, None)
        else:
            live[key] = value


def put_content(holder: Any, content: Iterable[Any]) -> None:
    """Let these be all entries of a list, a set or a deque."""
    holder.clear()
    for entry in content:
        (holder.add if isinstance(holder, MutableSet) else holder.append)(entry)


def content_of(holder: Any, how: str) -> Any:
    """A copy of all that is in a holder now."""
    if how == "attr":
        return {key: value for key, value in holder.__dict__.items() if key not in OF_TORCH}
    if how == "dict":
        return dict(holder)
    if how == "list":
        return list(holder)
    if how == "state":
        return {"state": _state(holder)}
    if how == "cell":
        return {key: _value(cell) for key, cell in _cells(holder)}
    if how == "global":
        return {key: holder.__globals__[key] for key in _names(holder)}
    if how == "slots":
        names = _slots(type(holder))  # type: ignore[arg-type]
        return {key: getattr(holder, key) for key in names if hasattr(holder, key)}
    return {key: value for key, value in vars(holder).items() if _is_state(key, value)}


def _step(how: str, key: Any) -> Step:
    """From a holder to what it has at `key`."""
    return Step({"dict": "item", "list": "item", "slots": "attr"}.get(how, how), key)


def _ways(value: Any) -> Iterator[str]:
    """How what a value holds may be changed."""
    if is_generator(value):
        yield "state"
    if isinstance(value, MutableMapping):
        yield "dict"
    elif isinstance(value, MutableSequence | MutableSet):  # a deque, too
        yield "list"
    elif isinstance(value, FunctionType) and _is_users(value.__module__):
        if value.__closure__:
            yield "cell"
        yield "global"
    elif isinstance(value, type) and _is_users(value.__module__):
        yield "class"
    elif is_object(value) and _slots(type(value)):  # type: ignore[arg-type]
        yield "slots"
    if _has_attributes(value):
        yield "attr"


def _through(value: Any) -> Iterator[tuple[Step, Any]]:
    """What else is reached by a value that cannot be changed there."""
    if isinstance(value, tuple):
        yield from ((Step("item", k), entry) for k, entry in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((Step("code", name), getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, MethodType):
        yield from ((Step("code", name), getattr(value, name)) for name in ("__func__", "__self__"))
    elif isinstance(value, FunctionType) and _is_users(value.__module__):
        yield Step("code", "__defaults__"), value.__defaults__
        yield Step("code", "__kwdefaults__"), value.__kwdefaults__
    elif isinstance(value, type) and _is_users(value.__module__):
        yield from ((Step("class", k), v) for k, v in vars(value).items() if isinstance(v, FunctionType))
        yield Step("code", "__base__"), value.__base__
    elif isinstance(value, nn.Module):
        hooks = ((name, value.__dict__.get(name)) for name in HOOKS)
        yield from ((Step("attr", name), content) for name, content in hooks if content)
    if not isinstance(value, type) and _is_users(type(value).__module__):
        yield Step("attr", "__class__"), type(value)


def is_generator(value: Any) -> bool:
    """Whether random numbers are drawn from this, and not from it by everybody."""
    return isinstance(value, GENERATORS) and not any(value is other for other in OF_PROCESS)


def _state(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return _text(generator.bit_generator.state)
    return _text(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())


def _text(state: Any) -> bytes:
    """Nested plain values as Python would read them; arrays become lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return value.tolist() if isinstance(value, np.ndarray | np.generic) else value

    return repr(plain(state)).encode()


def _set_state(generator: Any, state: bytes) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = literal_eval(state.decode())
    elif isinstance(generator, random.Random):
        generator.setstate(literal_eval(state.decode()))
    else:
        generator.set_state(literal_eval(state.decode()))


def is_object(value: Any) -> bool:
    """Whether a value is an object whose attributes are looked at."""
    if isinstance(value, type | ModuleType | FunctionType | MethodType | Tensor | Enum | BaseException):
        return False
    return type(value) in NAMESPACES or type(value).__module__.partition(".")[0] not in LIBRARIES


def attributes(value: Any) -> dict[str, Any]:
    """All attributes of an object."""
    return content_of(value, "slots") | dict(getattr(value, "__dict__", {}))


def _has_attributes(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return not isinstance(value, torch.jit.ScriptModule)
    return is_object(value) and hasattr(value, "__dict__")


@functools.cache
def _is_users(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] not in CODE_OF_OTHERS


@functools.cache
def _slots(kind: Any) -> tuple[str, ...]:
    found: list[str] = []
    for base in kind.__mro__[:-1]:
        slots = base.__dict__.get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in found if not name.startswith("__"))


def _is_state(key: str, value: Any) -> bool:
    """Whether a class's attribute is something that changes, rather than code."""
    code = (FunctionType, classmethod, staticmethod, property, type)
    return not key.startswith("__") and not isinstance(value, code) and not hasattr(type(value), "__get__")


def _cells(function: Any) -> list[tuple[str, Any]]:
    return list(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _value(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _names(function: Any) -> tuple[str, ...]:
    """The global names that a function's code mentions and that stand for something that may change."""
    space = function.__globals__
    return tuple(name for name in _mentioned(function.__code__) if name in space and _changes(space[name]))


@functools.lru_cache(maxsize=4096)
def _mentioned(code: CodeType) -> tuple[str, ...]:
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _mentioned(const)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _changes(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return False
    if isinstance(value, FunctionType | type):
        return _is_users(value.__module__)
    return isinstance(value, (*PLAIN, *GENERATORS, Tensor, *COLLECTIONS)) or is_object(value)


def is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN) and bool(a == b))


def _differ(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() != before.keys() or not all(is_same(now[key], before[key]) for key in now)
    return len(now) != len(before) or not all(map(is_same, now, before))
