"""Tree: nested batches as flat leaves with readable paths."""

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import (
    SUPPORTED_NODES,
    GetAttrKey,
    MappingKey,
    TreeSpec,
    keystr,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
)

from pipeshard.errors import BatchError, PartitionError


def flatten_with_names(tree: Any) -> tuple[list[tuple[str, Any]], TreeSpec]:
    """Each leaf with its name (such as "['logits']"), in torch's order, and what `tree_unflatten` takes."""
    leaves, spec = tree_flatten(tree)
    paths, _ = tree_flatten_with_path(as_dicts(tree))
    return [(keystr(path), leaf) for (path, _), leaf in zip(paths, leaves, strict=True)], spec


def field_of(name: str) -> str:
    """The field of a model's output that the leaf of this name belongs to; "" where the output is no mapping."""
    match = re.match(r"\['(.*?)'\]", name)
    return match[1] if match else ""


def without_adapters(model: nn.Module) -> tuple[str, nn.Module]:
    """The architecture's own model, which in a PeftModel is a module inside, and what its names there begin with."""
    base: Any = getattr(model, "get_base_model", lambda: model)()
    path = next(name for name, module in model.named_modules() if module is base)
    return f"{path}." if path else "", base


def paths_of(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The full names of modules, of which those inside a PeftModel may be named as the model inside names them.

    Raises PartitionError, with names that come close, for what is no module of the model, and for the model itself.
    """
    known = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    full = [full_name(model, name) for name in names]
    for name in full:
        if name in ("", without_adapters(model)[0].rstrip(".")):
            raise PartitionError(f"partition names the whole {type(model).__name__}: name modules inside of it")
        if name not in known:
            raise PartitionError(unknown("partition", name, type(model).__name__, known, "modules"))
    return full


def full_name(model: nn.Module, name: str) -> str:
    """The name of a module, where what is inside a PeftModel may be named as the model inside names it."""
    prefix, _ = without_adapters(model)
    return name if name.startswith(prefix) else f"{prefix}{name}"


def unknown(who: str, name: str, model: str, known: Collection[str], what: str = "units") -> str:
    """That somebody names what is not there, with names that come close."""
    return f"{who} names {name}, which is none of the {what} of {model}: {hint(name, known)}"


def hint(name: str, known: Collection[str]) -> str:
    """What may have been meant by a name that is none of the known ones."""
    close = get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"they are {', '.join(known) or 'none'}"


def as_dicts(tree: Any) -> Any:
    """Model outputs, which are ordered dicts, as plain ones: before version 5, transformers told torch no names."""
    return tree_map(
        lambda node: as_dicts(dict(node)) if isinstance(node, OrderedDict) else node,
        tree,
        is_leaf=lambda node: isinstance(node, OrderedDict),
    )


READS = "__getitem__ __iter__ __len__ __contains__ __reversed__ __eq__ __lt__ __add__ __mul__ __repr__ count index copy"
Decide = Callable[[str, Sequence[Any]], bool]


def flatten(data: Any, by_sample: Decide = lambda path, entries: False) -> tuple[tuple[str, ...], tuple[Any, ...], Any]:
    """The leaves of what a dataloader gives, their paths, and the tree that `tree_unflatten` puts them back into.

    What is no mapping, tuple or list becomes a tuple of that one thing. A leaf is a tensor, a list or tuple without
    any tensor in it (of strings, of one number a sample), or one with tensors of which `by_sample(path, list)` says
    that it has one entry a sample, or whatever else is no container. Dataclasses, mappings
    that torch does not know and objects that have tensors as attributes are looked into, and are put together again
    in their own class, without calling `__init__` or `__post_init__`; torch's pytree knows their classes from then on.

    The path of an entry of the mapping, or a field of the dataclass, that the batch is, is its name; anything deeper
    is written as Python reads it: ['inputs']['ids'], .inputs.ids.
    """
    if isinstance(data, Mapping):
        data = dict(data)  # also a BatchEncoding: a model gets keyword arguments of it anyway
    wrapped = not isinstance(data, dict | tuple | list)
    if wrapped:
        data = (data,)
    decided: dict[Any, bool] = {_mark(data): False}
    while True:  # from the outside to the inside: lists within one that has no entry a sample
        is_leaf = partial(_is_leaf_or_list, decided)
        leaves, tree = tree_flatten(data, is_leaf=is_leaf)
        named, _ = tree_flatten_with_path(as_dicts(data), is_leaf=is_leaf)
        keys = (path[1:] if wrapped and len(path) > 1 else path for path, _ in named)
        paths = tuple(map(_name, keys))
        lists = [(path, leaf) for path, leaf in zip(paths, leaves) if has_tensors(leaf) and _mark(leaf) not in decided]
        if not lists:
            return paths, tuple(leaves), tree
        decided |= {_mark(leaf): by_sample(path, leaf) for path, leaf in lists}


def is_entries(leaf: Any, dim: int | None = 0) -> bool:
    """Whether a leaf that is no tensor is a list or tuple that may have one entry a sample."""
    return type(leaf) in (list, tuple) and dim is not None


def text(leaf: Any) -> str:
    """What is no tensor, the same text in every process: without addresses, and sets in one order."""
    shown = sorted(map(repr, leaf)) if isinstance(leaf, set | frozenset) else leaf
    return f"{type(leaf).__name__} {re.sub(r' at 0x[0-9a-f]+', '', repr(shown))}"


def noting(entries: Sequence[Any], note: Callable[[], None]) -> Any:
    """A list or tuple equal to `entries` that calls `note` whenever it is read."""
    noted = _NOTED[type(entries)](entries)
    noted.note = note
    return noted


def _noted(base: Any) -> Any:
    def reader(name: str) -> Any:
        original = getattr(base, name)

        def read(self: Any, *args: Any) -> Any:
            self.note()
            return original(self, *args)

        return read

    return type(f"Noted{base.__name__}", (base,), {name: reader(name) for name in READS.split() if hasattr(base, name)})


_NOTED: dict[type, Any] = {base: _noted(base) for base in (list, tuple)}


def _is_leaf_or_list(decided: Mapping[Any, bool], node: Any) -> bool:
    return _is_leaf(node) or (has_tensors(node) and decided.get(_mark(node), True))


def has_tensors(node: Any) -> bool:
    """Whether a list or tuple has tensors in it."""
    return type(node) in (list, tuple) and not _is_leaf(node)


def _mark(node: Any) -> Any:
    """What tells a list from others, that is still so where all containers are copied."""
    tensors = (leaf for leaf in tree_leaves(node, is_leaf=_is_dead_end) if isinstance(leaf, Tensor))
    return type(node), len(node), tuple(map(id, tensors))


def _is_leaf(node: Any) -> bool:
    """Asked of every node before torch looks up how to take it apart, so this is where a new class is made known."""
    cls = type(node)
    if cls in (list, tuple):
        return not any(isinstance(leaf, Tensor) for leaf in tree_leaves(node, is_leaf=_is_dead_end))
    if cls not in SUPPORTED_NODES and not isinstance(node, Tensor | type):
        if isinstance(node, Mapping):
            _register_mapping(node)
        elif is_dataclass(node) or isinstance(node, SimpleNamespace) or _holds_tensors(node):
            _register(cls, _attributes, _rebuilt, GetAttrKey)
    return False


def _is_dead_end(node: Any) -> bool:
    if type(node) not in (list, tuple):
        _is_leaf(node)
    return False


def _holds_tensors(node: Any) -> bool:
    """Whether something, no dataclass, has tensors as attributes, and can be put together of its attributes."""
    cls: Any = type(node)
    plain = cls.__new__ is object.__new__ and not isinstance(node, nn.Module)
    return plain and any(isinstance(value, Tensor) for value in getattr(node, "__dict__", {}).values())


def _attributes(node: Any) -> dict[str, Any]:
    """Fields first, in their order, and then what else an instance holds."""
    names = [field.name for field in fields(node)] if is_dataclass(node) else []
    held = {name: getattr(node, name) for name in names if hasattr(node, name)}
    return {**held, **getattr(node, "__dict__", {})}


def _rebuilt(cls: Any, attributes: dict[str, Any]) -> Any:
    node = cls.__new__(cls)
    for name, value in attributes.items():
        object.__setattr__(node, name, value)  # a frozen dataclass has no other way
    return node


def _register_mapping(node: Mapping[Any, Any]) -> None:
    cls: Any = type(node)
    try:
        same = dict(cls(dict(node))).keys() == node.keys()
    except Exception:
        same = False
    if not same:
        raise BatchError(f"the batch holds a {cls.__name__} that cannot be made of a dict: put a dict in its place")
    _register(cls, dict, lambda cls, items: cls(items), MappingKey)


def _register(cls: Any, items: Callable[[Any], dict[Any, Any]], rebuilt: Callable[..., Any], key: Any) -> None:
    def flat(node: Any) -> tuple[list[Any], Any]:
        held = items(node)
        return list(held.values()), tuple(held)

    def with_keys(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
        held = items(node)
        return [(key(name), value) for name, value in held.items()], tuple(held)

    def back(leaves: Any, names: Any) -> Any:
        return rebuilt(cls, dict(zip(names, leaves, strict=True)))

    register_pytree_node(cls, flat, back, flatten_with_keys_fn=with_keys)


def _name(path: tuple[Any, ...]) -> str:
    key = (getattr(path[0], "key", None) or getattr(path[0], "name", None)) if len(path) == 1 else None
    return key if isinstance(key, str) else keystr(path)
