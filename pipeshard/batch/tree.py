"""Tree: nested batches as flat leaves with readable paths.

A batch is split, compared and sent leaf by leaf, and reassembled for the model. torch's pytree flattens dicts, lists,
tuples and registered classes. A registration is process-wide and permanent. Batches also contain dataclasses,
namespaces, mappings and plain objects with tensors, and some lists are leaves in one batch but not in another. This
module therefore walks batches itself. It uses pytree, one level at a time, for containers that torch knows, and
flattens all other containers by their keys or attributes. It registers no class.
"""

import copy
import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

from pipeshard.errors import BatchError
from pipeshard.private import (
    GetAttrKey,
    MappingKey,
    SequenceKey,
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)

PLAIN_VALUES = (bool, int, float, str, type(None))
Decide = Callable[[str, Sequence[Any]], bool]
PathKey = MappingKey[Any, Any] | SequenceKey[Any] | GetAttrKey


class Bare:
    """The `kind` of the Tree of a batch that is not a mapping, tuple or list, but the model's only argument."""


@dataclass(frozen=True)
class Tree:
    """The structure of a batch: the class of a container, the keys of its children, and the children's Trees. A leaf
    has no class."""

    kind: type | None = None
    keys: tuple[Any, ...] = ()
    parts: tuple["Tree", ...] = ()
    make: Callable[[list[Any]], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def kinds(self) -> Iterator[type]:
        """The classes of all containers."""
        if self.kind is not None:
            yield self.kind
        for part in self.parts:
            yield from part.kinds

    @property
    def size(self) -> int:
        """The number of leaves."""
        return 1 if self.make is None else sum(part.size for part in self.parts)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Reassemble the flattened object with these leaves."""
        return self._filled(iter(leaves))

    def _filled(self, leaves: Iterator[Any]) -> Any:
        return next(leaves) if self.make is None else self.make([part._filled(leaves) for part in self.parts])


def flatten(
    data: Any, by_sample: Decide = lambda path, entries: False
) -> tuple[tuple[str, ...], tuple[Any, ...], Tree]:
    """Flatten the data that a dataloader yielded. Returns the paths of the leaves, the leaves, and the Tree that
    reassembles the data.

    An object that is not a mapping, tuple or list becomes a tuple with this object as its only entry, and the Tree's
    kind is then Bare. Dataclasses, namespaces and objects with tensors as attributes are reassembled without calling
    `__init__` or `__post_init__`.

    A leaf is one of the following:

    - a tensor;
    - a list or tuple without tensors, such as a list of strings or of one number per sample;
    - a list or tuple with tensors for which `by_sample(path, list)` is true (one entry per sample);
    - any other object that is not a container.

    The path of a top-level entry or field is its name. Deeper paths are Python expressions: ['inputs']['ids'],
    .inputs.ids.
    """
    if isinstance(data, Mapping):
        data = dict(data)  # also a BatchEncoding: a model receives it as keyword arguments anyway
    is_alone = not isinstance(data, dict | tuple | list)
    paths: list[str] = []
    leaves: list[Any] = []

    def walk(node: Any, keys: tuple[PathKey, ...]) -> Tree:
        path = _name(keys[1:] if is_alone and len(keys) > 1 else keys)
        is_entry_list = type(node) in (list, tuple) and keys and (not has_tensors(node) or by_sample(path, node))
        opened = None if is_entry_list else _opened(node)
        if opened is None:
            paths.append(path)
            leaves.append(node)
            return Tree()
        children, make = opened
        parts = tuple(walk(child, (*keys, key)) for key, child in children)
        return Tree(type(node), tuple(map(str, (key for key, _ in children))), parts, make)

    tree = Tree(Bare, ("[0]",), (walk(data, (SequenceKey(0),)),), tuple) if is_alone else walk(data, ())
    return tuple(paths), tuple(leaves), tree


def tensors_in(node: Any) -> list[Tensor]:
    """All tensors inside a nested object."""
    if isinstance(node, Tensor):
        return [node]
    opened = _opened(node)
    return [] if opened is None else [tensor for _, child in opened[0] for tensor in tensors_in(child)]


def map_tensors(function: Callable[[Tensor], Tensor], node: Any) -> Any:
    """A nested object with each tensor replaced by `function(tensor)`."""
    if isinstance(node, Tensor):
        return function(node)
    opened = _opened(node)
    if opened is None:
        return node
    children, make = opened
    return make([map_tensors(function, child) for _, child in children])


def has_tensors(node: Any) -> bool:
    """Whether a node is a list or tuple that contains tensors."""
    return type(node) in (list, tuple) and bool(tensors_in(node))


def is_entries(leaf: Any, dim: int | None = 0) -> bool:
    """Whether a leaf is a list, tuple or numpy array that may have one entry per sample (`dim` is not None)."""
    is_array = isinstance(leaf, np.ndarray) and leaf.ndim > 0
    return (is_array or type(leaf) in (list, tuple)) and dim is not None


def text(leaf: Any) -> str:
    """A value as a string that is the same in every process. Addresses are removed and sets are sorted. An array is
    represented by its dtype, its shape and a hash, since its repr omits most elements."""
    shown = sorted(map(repr, leaf)) if isinstance(leaf, set | frozenset) else leaf
    if isinstance(leaf, np.ndarray):
        content = repr(leaf.tolist()).encode() if leaf.dtype.hasobject else leaf.tobytes()
        shown = leaf.dtype, leaf.shape, hashlib.blake2b(content, digest_size=16).hexdigest()
    return f"{type(leaf).__name__} {re.sub(r' at 0x[0-9a-f]+', '', repr(shown))}"


def flatten_with_names(tree: Any) -> tuple[list[tuple[str, Any]], TreeSpec]:
    """The leaves of a model's output in torch's order, each with its name (such as "['logits']"), and the output's
    TreeSpec."""
    leaves, spec = tree_flatten(tree)
    paths, _ = tree_flatten_with_path(_as_dicts(tree))
    return [(keystr(path), leaf) for (path, _), leaf in zip(paths, leaves, strict=True)], spec


def field_of(name: str) -> str:
    """The field of a model's output that contains the leaf with this name, or "" if the output is not a mapping."""
    match = re.match(r"\['(.*?)'\]", name)
    return match[1] if match else ""


def _as_dicts(tree: Any) -> Any:
    """Convert ordered dicts such as ModelOutput to dicts: before version 5, transformers registered them without key
    names."""
    return tree_map(
        lambda node: _as_dicts(dict(node)) if isinstance(node, OrderedDict) else node,
        tree,
        is_leaf=lambda node: isinstance(node, OrderedDict),
    )


def _opened(node: Any) -> tuple[list[tuple[Any, Any]], Callable[[list[Any]], Any]] | None:
    """The (key, child) pairs of a container, and a function that rebuilds it from new children, or None for a leaf."""
    if isinstance(node, Tensor | nn.Module | type | str | int | float | None):
        return None
    children, spec = tree_flatten(node, is_leaf=lambda part: part is not node)  # one level, if torch knows the class
    if not spec.is_leaf():
        return list(zip(_keys(node), children, strict=True)), lambda values: tree_unflatten(values, spec)
    if isinstance(node, Mapping):
        return _opened_mapping(node)
    if keys := _tensor_keys(node):
        return [(MappingKey(key), node[key]) for key in keys], lambda values: _filled(node, keys, values)
    if is_dataclass(node) or isinstance(node, SimpleNamespace) or _holds_tensors(node):
        held = _attributes(node)
        return [(GetAttrKey(name), value) for name, value in held.items()], lambda values: _rebuilt(
            type(node), dict(zip(held, values, strict=True))
        )
    return None


def _keys(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        return [MappingKey(key) for key in node]
    return [path[0] for path, _ in tree_flatten_with_path(node, is_leaf=lambda part: part is not node)[0]]


def _opened_mapping(node: Mapping[Any, Any]) -> tuple[list[tuple[Any, Any]], Callable[[list[Any]], Any]]:
    cls: Any = type(node)
    names = list(node)
    try:
        is_same = list(cls(dict(node))) == names
    except Exception:  # its constructor may raise anything for a dict
        is_same = False
    if not is_same:
        raise BatchError(
            f"the batch contains an instance of {cls.__name__} that cannot be built from a dict: use a dict instead"
        )
    return [(MappingKey(name), node[name]) for name in names], lambda values: cls(dict(zip(names, values, strict=True)))


def is_keyed(node: Any) -> bool:
    """Whether an object that is not a mapping has entries that can be listed, read and set, like torch_geometric's
    Data."""
    kind = type(node)
    return not isinstance(node, type | nn.Module | Tensor) and all(
        callable(getattr(kind, name, None)) for name in ("keys", "__getitem__", "__setitem__")
    )


def _tensor_keys(node: Any) -> list[str]:
    """The sorted keys of an object, if `is_keyed` is true for it and at least one entry is a tensor. Otherwise, an
    empty list."""
    if not is_keyed(node):
        return []
    try:
        keys = sorted(node.keys(), key=str)  # the order of a set differs between processes
        probed = copy.copy(node)  # reading a missing entry may create it
        values = [probed[key] for key in keys]
    except Exception:  # raised by the class if its keys are not the keys of its entries
        return []
    return keys if any(isinstance(value, Tensor) for value in values) else []


def _filled(node: Any, keys: Sequence[str], values: Sequence[Any]) -> Any:
    filled = copy.copy(node)
    for key, value in zip(keys, values, strict=True):
        filled[key] = value
    return filled


def _holds_tensors(node: Any) -> bool:
    """Whether an object that is not a dataclass has tensors as attributes, and can be rebuilt from its attributes."""
    cls: Any = type(node)
    attributes = getattr(node, "__dict__", {}).values()
    return cls.__new__ is object.__new__ and any(isinstance(value, Tensor) for value in attributes)


def _attributes(node: Any) -> dict[str, Any]:
    """The attributes of an object: first a dataclass's fields, in their order, then all other attributes."""
    names = [each.name for each in fields(node)] if is_dataclass(node) else []
    held = {name: getattr(node, name) for name in names if hasattr(node, name)}
    return {**held, **getattr(node, "__dict__", {})}


def _rebuilt(cls: Any, attributes: dict[str, Any]) -> Any:
    node = cls.__new__(cls)
    for name, value in attributes.items():
        object.__setattr__(node, name, value)  # also works for a frozen dataclass
    return node


def _name(keys: tuple[PathKey, ...]) -> str:
    key = (getattr(keys[0], "key", None) or getattr(keys[0], "name", None)) if len(keys) == 1 else None
    return key if isinstance(key, str) else keystr(keys)
