"""Places: the locations where Python code can keep a value, and functions that read and restore these values.

A model's code leaves values in attributes, slots, lists, dicts, closures, globals, classes and random generators. Torch
tracks only registered parameters and buffers. In this module, each object that keeps such values is a holder: its
content can be listed, compared and replaced. A place is one entry of a holder, identified by the path (the steps) to
this entry.
"""

import dis
import functools
import inspect
import random
import sys
import threading
from argparse import Namespace
from ast import literal_eval
from collections import UserList, deque
from collections.abc import Iterable, Iterator, MutableMapping, MutableSequence, MutableSet
from contextvars import ContextVar
from enum import Enum
from types import CodeType, FunctionType, GeneratorType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pipeshard.errors import TraceError
from pipeshard.graph.packages import is_library, is_users
from pipeshard.hf import SELECTING, registered_functions
from pipeshard.options import is_number
from pipeshard.replaced import StandIn

OF_PYTHON = (type(None), bool, int, float, complex, str, bytes, range, slice)
PLAIN = (*OF_PYTHON, torch.dtype, torch.device, torch.Size, np.number, np.bool_)
PLAIN_OR_METHOD = (*PLAIN, MethodType)  # types whose values are compared with ==
REGISTERED = frozenset({"_modules", "_buffers", "_parameters"})  # dicts whose entries a module reads as attributes
# Other attributes that torch keeps in modules. Hooks are walked in their order, since the keys of their dicts are ids.
HOOKS = frozenset(name for name in nn.Module().__dict__ if name.endswith("_hooks"))
OF_TORCH = frozenset(name for name in nn.Module().__dict__ if name[0] == "_") - REGISTERED
NAMESPACES = (SimpleNamespace, Namespace, threading.local, UserList)
# The process's generators are not part of a model's state: Randomness seeds them.
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
OF_PROCESS = (torch.default_generator, random._inst, np.random.mtrand._rand)
FEW = 8  # arrays and tensors with more elements count as data, not as thresholds
LARGEST_ARRAY = 1 << 20  # the maximum size in bytes of a compared array: larger arrays count as data
NO_CODE = (type, ModuleType, *OF_PYTHON)  # types of values that code_of skips: they are not the user's functions
COLLECTIONS = (MutableMapping, MutableSequence, MutableSet)
BUILTIN = (dict, list, set, deque, bytearray)  # collections whose entries are not in attributes
OF_GLOBALS = ("_GLOBAL", "_GLOBALS", "LOAD_NAME")  # endings of the names of instructions that access a global


class PathStep(NamedTuple):
    """One step on the path to a place: `how` is the kind of the step ("attr", "item", "cell", "global", ...), and `key`
    is the name or index."""

    how: str
    key: Any


PlacePath = tuple[PathStep, ...]


class Missing:
    """The value of a place that does not exist."""

    def __repr__(self) -> str:
        return "nothing"

    def __reduce__(self) -> str:
        return "MISSING"  # pickle stores this name


MISSING = Missing()


def is_comparable(value: Any) -> bool:
    """Whether the value is compared with == rather than by identity."""
    return isinstance(value, PLAIN)


def is_constant(value: Any) -> bool:
    """Whether the value is plain and can be equal on all ranks. Devices are excluded, since ranks may have different
    devices."""
    return isinstance(value, PLAIN) and not isinstance(value, torch.device)


def is_same(a: Any, b: Any) -> bool:
    """Whether `a` and `b` are one object, equal plain values, or the same method of one object. Each read of a method
    creates a new object, so methods are compared with ==."""
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN_OR_METHOD) and bool(a == b))


def own(value: Any) -> Any:
    """The value itself or, for a StandIn that temporarily replaces an attribute, the attribute's own value."""
    is_replaced = isinstance(value, StandIn) and value.instead_of is not MISSING
    return value.instead_of if is_replaced else value


def is_users_function(value: Any) -> bool:
    """Whether the value is one of the user's functions. functools.wraps gives the user's function the `__module__` of
    the wrapped function, so the globals of the function are checked too."""
    if not isinstance(value, FunctionType):
        return False
    return is_users(value.__module__) or is_users(value.__globals__.get("__name__"))


def _is_users_code(value: Any) -> bool:
    """Whether a value from a class, file or registry of a package is the user's code: a function, a partial, method or
    property that contains such a function, or a callable instance of one of the user's classes."""
    if isinstance(value, functools.partial | MethodType | property):
        return any(_is_users_code(getattr(value, name, None)) for name in ("func", "__func__", "fget"))
    if isinstance(value, FunctionType):
        return is_users_function(value)
    return is_object(value) and callable(value) and is_users(type(value).__module__)


def format_path(path: PlacePath) -> str:
    """A path as text, such as `layers.0.cache['key']`."""
    text, before = "", None
    for how, key in path:
        if how == "item" and before not in REGISTERED:
            text += f"[{key!r}]"
        elif how in ("root", "attr", "class", "hooks", "item"):
            text += f".{key}" if key not in REGISTERED else ""
        elif how != "state":
            text += f" {how} {key}"
        before = key
    return text.lstrip(".")


def resolve(root: Any, path: Iterable[PathStep]) -> Any:
    """The value at the end of a path that starts at `root`. A path that was recorded while unit calls were intercepted
    can be resolved while they are not intercepted, and vice versa."""
    for how, key in path:
        if how in ("attr", "class", "code"):
            root = getattr(root, key)
        elif how == "item":
            root = root[key]
        elif how == "cell":
            root = _cells(root)[key].cell_contents
        elif how == "state":
            root = _state(root)
        elif how == "hooks":
            root = tuple(getattr(root, key).values())
        elif how == "registry":
            root = registered_functions(root)[key]
        elif how == "file":
            root = getattr(sys.modules[root.__module__], key)
        else:
            root = _in_globals(root, key)
        root = own(root)
    return root


def put(holder: Any, how: str, key: Any, value: Any) -> None:
    """Set the entry `key` of `holder` to `value`, or delete the entry if `value` is MISSING."""
    if how == "state":
        _set_state(holder, value)
    elif how == "cell" and value is MISSING:
        del _cells(holder)[key].cell_contents
    elif how == "cell":
        _cells(holder)[key].cell_contents = value
    elif how == "class":
        setattr(holder, key, value)
    elif how == "global" and "." in key:
        module, _, name = key.partition(".")
        setattr(holder.__globals__[module], name, value)
    elif how == "attr" and key in slots(holder):
        object.__delattr__(holder, key) if value is MISSING else object.__setattr__(holder, key, value)
    else:
        live = holder.__dict__ if how == "attr" else holder.__globals__ if how == "global" else holder
        if value is MISSING:
            live.pop(key, None)
        else:
            live[key] = value


def put_content(holder: Any, content: Iterable[Any]) -> None:
    """Replace all entries of a list, a set or a deque."""
    holder.clear()
    for entry in content:
        (holder.add if isinstance(holder, MutableSet) else holder.append)(entry)


def content_of(holder: Any, how: str) -> Any:
    """A copy of the current content of a holder: a dict by key, or a list if `how` is "list"."""
    if how == "attr":
        held = {key: value for key, value in getattr(holder, "__dict__", {}).items() if key not in OF_TORCH}
        return {key: getattr(holder, key) for key in slots(holder) if hasattr(holder, key)} | held
    if how == "item":
        return dict(holder)
    if how == "list":
        return list(holder)
    if how == "state":
        return {"state": _state(holder)}
    if how == "cell":
        return {key: _value(cell) for key, cell in _cells(holder).items()}
    if how == "global":
        return {key: _in_globals(holder, key) for key in _globals(holder)}
    return {key: value for key, value in vars(holder).items() if _is_state(key, value)}


def entries_of(content: Any) -> Iterable[tuple[Any, Any]]:
    """The entries of a holder's content with their keys. The keys of a list are the indices."""
    return content.items() if isinstance(content, dict) else enumerate(content)


def ways_to_hold(value: Any) -> Iterator[str]:
    """The ways in which a value holds content that may change ("attr", "item", ...). Yields nothing for an immutable
    value, such as a tuple."""
    if _is_builtin(value):  # most values, decided fast
        yield "item" if type(value) is dict else "list"
        return
    if is_generator(value) or is_array(value) or _is_iterator(value) or isinstance(value, ContextVar):
        yield "state"
    has_attributes = is_object(value) and (hasattr(value, "__dict__") or bool(slots(value)))
    if isinstance(value, COLLECTIONS) and has_attributes and not isinstance(value, BUILTIN):
        pass  # the entries are in attributes, and reading an entry may fail (in a config with missing values)
    elif isinstance(value, MutableMapping):
        yield "item"
    elif isinstance(value, MutableSequence | MutableSet):  # also a deque
        yield "list"
    elif is_users_function(value):
        if value.__closure__:
            yield "cell"
        yield from ("global", "attr") if value.__dict__ else ("global",)
    elif isinstance(value, type) and is_users(value.__module__):
        yield "class"
    if isinstance(value, nn.Module):
        if not isinstance(value, torch.jit.ScriptModule):
            yield "attr"
    elif has_attributes:
        yield "attr"


def _is_builtin(value: Any) -> bool:
    return type(value) is dict or type(value) is list


def constants_of(value: Any) -> Iterator[tuple[PathStep, Any]]:
    """Yield (step, object) for each object to which a value refers and that cannot be replaced in the value."""
    if _is_builtin(value):
        return
    if isinstance(value, tuple):
        yield from ((PathStep("item", k), entry) for k, entry in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((PathStep("code", name), getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, MethodType):
        yield from ((PathStep("code", name), getattr(value, name)) for name in ("__func__", "__self__"))
    elif isinstance(value, property):
        yield from ((PathStep("code", name), getattr(value, name)) for name in ("fget", "fset"))
    elif is_users_function(value):
        yield from ((PathStep("code", name), getattr(value, name)) for name in ("__defaults__", "__kwdefaults__"))
    elif isinstance(value, type) and _has_code(value):
        yield from code_of(value)
        yield PathStep("code", "__bases__"), value.__bases__
    elif isinstance(value, nn.Module):
        held = value.__dict__
        yield from ((PathStep("hooks", name), tuple(held[name].values())) for name in HOOKS if held.get(name))
    elif hasattr(type(value), SELECTING):
        of_registries = registered_functions(value).items()
        yield from ((PathStep("registry", key), one) for key, one in of_registries if _is_users_code(one))
    if not isinstance(value, type) and _has_code(type(value)):
        yield PathStep("attr", "__class__"), type(value)


def _has_code(kind: Any) -> bool:
    """Whether the walk looks for functions in this class: the class is the user's own, or a package's layer, which the
    user may have patched."""
    return is_users(kind.__module__) or (issubclass(kind, nn.Module) and kind is not nn.Module)


def code_of(kind: Any) -> Iterator[tuple[PathStep, Any]]:
    """The functions and properties of a class that is the user's own. For a package's class, the user's code in the
    class, in the bases of the class that are not layers, and in the Python module of the class."""
    code = _attributes_of(kind)
    if is_users(kind.__module__):
        yield from ((PathStep("class", name), v) for name, v in code.items() if isinstance(v, FunctionType | property))
        return
    for base in reversed(kind.__bases__):
        code = code if base is object or _has_code(base) else _attributes_of(base) | code
    beside = vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}
    for how, held in (("class", code), ("file", dict(beside))):
        found = ((name, value) for name, value in held.items() if not isinstance(value, NO_CODE))  # decided fast
        others = (pair for pair in found if type(pair[1]) is not FunctionType or pair[1].__globals__ is not beside)
        yield from ((PathStep(how, name), value) for name, value in others if _is_users_code(value))


def _attributes_of(kind: Any) -> dict[str, Any]:
    """The attributes of a class, by name. Static and class methods are replaced by their functions."""
    return {name: getattr(value, "__func__", value) for name, value in vars(kind).items()}


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> tuple[str, ...]:
    """All names and all strings in a function's code, since the function may pass a string to `getattr`."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in names_in(const)]
    strings = (const for const in code.co_consts if isinstance(const, str))
    return tuple(dict.fromkeys((*code.co_names, *code.co_freevars, *strings, *inner)))


@functools.lru_cache(maxsize=4096)
def names_stored_in(code: CodeType) -> frozenset[str]:
    """The names of the attributes, globals and cells that a function's code sets. If the code sets items or calls
    `setattr`, all strings in the code are included."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in names_stored_in(const)]
    steps = [step for step in dis.get_instructions(code) if step.opname.startswith("STORE_")]
    own = [step.argval for step in steps if step.opname in ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")]
    by_key = "setattr" in code.co_names or any(step.opname == "STORE_SUBSCR" for step in steps)
    return frozenset((*inner, *own, *(const for const in code.co_consts if by_key and isinstance(const, str))))


@functools.lru_cache(maxsize=4096)
def _globals_in(code: CodeType) -> tuple[str, ...]:
    """The names that a function's code looks up in its globals, or all names in the code if it calls `globals`."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _globals_in(const)]
    own = [step.argval for step in dis.get_instructions(code) if step.opname.endswith(OF_GLOBALS)]
    names = tuple(dict.fromkeys((*own, *inner)))
    return names_in(code) if "globals" in names else names


def defaults_of(function: FunctionType) -> tuple[Any, ...]:
    """The default values of a function's arguments."""
    return *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()


def numbers_in(function: FunctionType) -> Iterator[int | float]:
    """All numbers in a function's code, and in the default values of its arguments."""
    constants = deque[Any]([*defaults_of(function), function.__code__])
    while constants:
        constant = constants.popleft()
        if isinstance(constant, CodeType):
            constants += constant.co_consts
        elif type(constant) is tuple:
            constants += constant
        elif type(constant) in (int, float):
            yield constant


def numbers_inside(value: Any) -> Iterator[float]:
    """The numbers in a tuple, a frozenset, or an array or tensor (not a parameter) with at most FEW elements."""
    if isinstance(value, tuple | frozenset):
        yield from (float(number) for number in value if is_number(number))
    elif isinstance(value, np.ndarray) and value.dtype.kind in "iuf" and value.size <= FEW:
        yield from map(float, value.flat)
    elif type(value) is Tensor and value.numel() <= FEW:
        is_real = value.layout is torch.strided and not (value.is_meta or value.is_complex())
        yield from map(float, value.flatten().tolist() if is_real else ())


def is_generator(value: Any) -> bool:
    """Whether the value is a random generator, but not one of the process's default generators."""
    return isinstance(value, GENERATORS) and not any(value is other for other in OF_PROCESS)


def is_array(value: Any) -> bool:
    """Whether the value is a numpy array whose elements are compared."""
    return isinstance(value, np.ndarray) and not value.dtype.hasobject and value.nbytes <= LARGEST_ARRAY


def _is_iterator(value: Any) -> bool:
    """Whether the value is one of Python's built-in iterators, which cannot be rewound."""
    return hasattr(type(value), "__next__") and type(value).__module__ in ("builtins", "itertools")


def _whereabouts(value: Any) -> Any:
    """A value that changes when an iterator advances."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        inner = () if frame is None else [(name, _whereabouts(of)) for name, of in frame.f_locals.items()]
        return frame and frame.f_lasti, inner, _whereabouts(value.gi_yieldfrom)
    if _is_iterator(value):
        try:
            return [_whereabouts(part) for part in value.__reduce__()[1:]]
        except TypeError:
            return id(value)
    if isinstance(value, tuple):
        return list(map(_whereabouts, value))
    return value if isinstance(value, PLAIN) else id(value)


def _state(generator: Any) -> Any:
    if isinstance(generator, ContextVar):
        return generator.get(MISSING)
    if is_array(generator):
        return generator.tobytes()
    if _is_iterator(generator):
        return repr(_whereabouts(generator)).encode()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return _text(generator.bit_generator.state)
    return _text(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())


def _text(state: Any) -> bytes:
    """Encode nested plain values in Python syntax, with arrays as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return value.tolist() if isinstance(value, np.ndarray | np.generic) else value

    return repr(plain(state)).encode()


def _set_state(generator: Any, state: Any) -> None:
    if _is_iterator(generator):
        raise TraceError(
            f"a forward reads from an iterator ({type(generator).__name__}) that cannot be rewound, so the trace and "
            "the stages cannot read the same items: store the items in a list, and index the list with a counter in an "
            "attribute (self.step += 1)"
        )
    if isinstance(generator, ContextVar):
        generator.set(None if state is MISSING else state)
    elif is_array(generator):
        generator[...] = np.frombuffer(state, generator.dtype).reshape(generator.shape)
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = literal_eval(state.decode())
    else:
        set_state = generator.setstate if isinstance(generator, random.Random) else generator.set_state
        set_state(literal_eval(state.decode()))


def is_object(value: Any) -> bool:
    """Whether a walk enters the attributes of this value."""
    if isinstance(value, type | ModuleType | FunctionType | MethodType | Tensor | Enum | BaseException):
        return False
    is_known = type(value) in NAMESPACES or isinstance(value, torch.distributions.Distribution)
    return is_known or not is_library(type(value).__module__)


def slots(value: Any) -> tuple[str, ...]:
    return _slots_of(type(value))  # type: ignore[arg-type]


@functools.cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    names: list[str] = []
    for base in kind.__mro__[:-1]:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    # a subclass may replace a slot with a property, which stores nothing and may have no setter
    return tuple(name for name in names if not name.startswith("__") and _is_slot(kind, name))


def _is_slot(kind: Any, name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name, None), MemberDescriptorType)


def _is_state(key: str, value: Any) -> bool:
    """Whether a class's attribute is mutable state rather than code."""
    code = (FunctionType, classmethod, staticmethod, property, type)
    return not key.startswith("__") and not isinstance(value, code) and not hasattr(type(value), "__get__")


def _cells(function: Any) -> dict[str, Any]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _value(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return MISSING


def _globals(function: Any) -> Iterator[str]:
    """The global names in a function's code whose values may change. Such names in the user's modules are included as
    `module.name`."""
    space, code = function.__globals__, function.__code__
    for name in _globals_in(code):
        if name in space and _may_change(space[name]):
            yield name
        elif isinstance(module := space.get(name), ModuleType) and is_users(module.__name__):
            yield from (f"{name}.{inner}" for inner in names_in(code) if _may_change(vars(module).get(inner, module)))


def _in_globals(function: Any, key: str) -> Any:
    name, _, inner = key.partition(".")
    return vars(function.__globals__[name])[inner] if inner else function.__globals__[name]


def _may_change(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return False
    if isinstance(value, FunctionType | type):
        return is_users_function(value) or (isinstance(value, type) and is_users(value.__module__))
    kinds = (*PLAIN, *GENERATORS, Tensor, np.ndarray, ContextVar, tuple, frozenset, *COLLECTIONS)
    return isinstance(value, kinds) or is_object(value)
