"""Order: the objects that determine the order of the data, their random generators, and the state that they keep.

A sampler may hold other samplers, at any depth (a BatchSampler holds a RandomSampler). Each sampler may use its own
generator or the process's generators. If one generator is not seeded, ranks with different seeds read different
batches, and a resumed epoch has a different order than the interrupted epoch.
"""

import copy
import inspect
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Sampler

from pipeshard.data.reach import SCALARS, generators_kept, is_entered, is_of_datasets, is_unseeded, reachable
from pipeshard.errors import CheckpointError, ConfigurationError
from pipeshard.graph.places import is_generator, slots
from pipeshard.graph.rng import seed_generator
from pipeshard.private import nodes_of

Attribute = tuple[str, str]  # the key of a member, and the name of its attribute
LARGE_BYTES, MANY_ENTRIES = 1 << 20, 1000  # larger arrays and longer collections are data of a stream


class Order:
    """A sampler or stream and all objects to which it refers, with their generators, epochs and states.

    Args:
        root: the sampler, batch sampler or stream.
        dataset: the dataset, which is not searched. Only its `set_epoch` is called.
    """

    def __init__(self, root: Any, dataset: Any = None) -> None:
        self.root, self.dataset = root, None if dataset is root else dataset
        found = reachable(root, skip=lambda one: self._is_data(one) or not _may_order(one))
        members = (one for one in found if one is root or not isinstance(one, CONTAINERS))
        # the samplers and streams, and the plain objects in which they may keep state
        self.members = {f"{number} {type(one).__name__}": one for number, one in enumerate(members)}
        streams = {key for key, member in self.members.items() if isinstance(member, IterableDataset)}
        # the data that streams read, such as a memory-mapped file of tokens
        self._data = {at: value for at, value in self._values().items() if at[0] in streams and is_large(value)}
        self._first = {place: copied_value(value) for place, value in self._plain_values().items()}
        self._counting = [*self.members.values(), *([] if _epoch(self.dataset) is None else [self.dataset])]
        self._told = list(map(_epoch, self._counting))

    def generators(self) -> list[Any]:
        return [one for one in reachable(self.root, skip=self._is_data) if is_generator(one)]

    def _is_data(self, value: Any) -> bool:
        """Whether this object contains the samples, and does not determine their order."""
        if value is self.root:
            return False
        return value is self.dataset or (isinstance(value, Dataset) and not isinstance(value, IterableDataset))

    def seed(self, seed: int, epoch: int) -> None:
        """Seed all generators: torch generators with seed + epoch + index (saved positions rely on this sum), all other
        generators with a hash."""
        for number, generator in enumerate(self.generators()):
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed + epoch + number)
            else:
                seed_generator(generator, seed, epoch, number)

    def set_epoch(self, epoch: int, force: bool = False) -> None:
        """Call `set_epoch` on every member that defines it, and on the dataset if it also has an attribute `epoch`.
        Unless `force`, skip objects whose epoch the user has set."""
        for number, member in enumerate(self._counting):
            if not hasattr(member, "set_epoch"):
                continue
            if force or _epoch(member) == self._told[number]:
                member.set_epoch(epoch)
                self._told[number] = _epoch(member)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context manager for computing a length. It restores states and generators on exit, since some samplers
        iterate to count batches."""
        if all(type(member).__module__.startswith("torch.") for member in self.members.values()):
            yield
            return
        state = self.state()
        with generators_kept(self.generators()):
            try:
                yield
            finally:
                if not is_equal(state, self.state()):
                    self.load_state(state)

    @property
    def epoch(self) -> int | None:
        """The epoch of the root, or None if the root has no epoch."""
        return _epoch(self.root)

    def shares(self) -> list[tuple[Any, int]]:
        """The samplers and streams that already select one of several shares (such as a DistributedSampler), each with
        its number of shares."""
        members = self.members.values()
        counts = [(one, getattr(one, "num_replicas", 1)) for one in members if isinstance(one, Sampler)]
        counts += [(one, nodes_of(one)) for one in members if is_of_datasets(one)]
        return [(one, count) for one, count in counts if _is_whole_number(count) and count > 1]

    def state(self) -> dict[str, Any]:
        """The state that members keep from one epoch to the next: their `state_dict()` or, without one, their
        attributes with plain values that have changed since the loader was created."""
        state: dict[str, Any] = {}
        for key, member in self.members.items():
            if _has_state_dict(member):
                state[key] = {"state_dict": copied_value(member.state_dict())}
        now = self._plain_values()
        for (key, name), value in now.items():
            if (key, name) not in self._first or not is_equal(value, self._first[key, name]):
                state.setdefault(key, {}).setdefault("attributes", {})[name] = copied_value(value)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` or `packed` returned. Raises CheckpointError if the state contains a sampler or
        stream that this order does not have."""
        members = self.members
        for key in state:
            if key not in members:
                raise CheckpointError(
                    f"the saved data position contains the state of {key.partition(' ')[2]}, which this dataloader "
                    "does not use, or uses at a different place (its samplers and streams, in order: "
                    f"{', '.join(key.partition(' ')[2] for key in members)}): create the dataloader as before the save"
                )
        attributes = {key: _unpacked(entry.get("attributes", {})) for key, entry in state.items()}
        for (key, name), value in self._first.items():  # reset the attributes that the state does not contain
            if key in members and name not in attributes.get(key, {}):
                _give_back(members[key], name, copied_value(value))
        for key, entry in state.items():
            if "state_dict" in entry:
                members[key].load_state_dict(entry["state_dict"])
            for name, value in attributes[key].items():
                _give_back(members[key], name, copied_value(value))
        self._told = list(map(_epoch, self._counting))

    def _plain_values(self) -> dict[Attribute, Any]:
        """The attributes with plain values. The data of streams is omitted, since it is not part of their state."""
        values = ((place, value) for place, value in self._values().items() if self._data.get(place, self) is not value)
        return {place: value for place, value in values if is_savable(value)}

    def _values(self) -> dict[Attribute, Any]:
        """The attributes of members without a `state_dict`."""
        values: dict[Attribute, Any] = {}
        for key, member in self.members.items():
            if _has_state_dict(member) or is_of_datasets(member):
                continue
            held = dict(getattr(member, "__dict__", {}))
            held |= {name: getattr(member, name) for name in slots(member) if hasattr(member, name)}
            if hasattr(member, "set_epoch"):
                held.pop("epoch", None)
            values |= {(key, name): value for name, value in held.items()}
        return values


def refuse_unseeded(root: Any) -> None:
    """Raise ConfigurationError for a stream of `datasets` that each process shuffles in a different order."""
    if is_unseeded(root):
        raise ConfigurationError(
            f"the {type(root).__name__} was shuffled or interleaved without a seed, so its order would differ between "
            "ranks, and in a resumed run. Some samples would be read twice, and others never. Pass a seed, as in "
            "stream.shuffle(seed=0, buffer_size=1000) or interleave_datasets(streams, probabilities, seed=0)"
        )


CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)


def _may_order(value: Any) -> bool:
    """Whether `value` may be a sampler, a stream, or an object with the state of a sampler or a stream."""
    if isinstance(value, type):
        return False
    if isinstance(value, (Sampler, IterableDataset, SimpleNamespace, *CONTAINERS)) or is_dataclass(value):
        return True
    return hasattr(type(value), "__iter__") and is_entered(value) and not isinstance(value, nn.Module)


def _epoch(member: Any) -> Any:
    epoch: Any = getattr(member, "epoch", None)
    return int(epoch) if _is_whole_number(epoch) else None


def _is_whole_number(value: Any) -> bool:
    return isinstance(value, int | np.integer)


def _has_state_dict(member: Any) -> bool:
    """Whether a member saves its state. A `state_dict` with required arguments is meant for the loader of the member's
    library, and does not count."""
    if not (hasattr(member, "state_dict") and hasattr(member, "load_state_dict")) or is_of_datasets(member):
        return False
    try:
        inspect.signature(member.state_dict).bind()
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def is_large(value: Any) -> bool:
    """Whether a stream's attribute is so large that it counts as data, not as state. A list of numbers or strings never
    counts as data, since copying it is fast at any size."""
    if isinstance(value, np.ndarray | Tensor):
        return isinstance(value, np.memmap) or value.nbytes > LARGE_BYTES
    return isinstance(value, list | tuple | dict) and len(value) > MANY_ENTRIES and not _has_scalars(value)


def is_savable(value: Any) -> bool:
    """Whether a value can be copied, and saved in a checkpoint."""
    if isinstance(value, Mapping):
        return type(value) in MAPPINGS and is_savable(list(value)) and is_savable(list(value.values()))
    if type(value) in (list, tuple, set, deque):
        return _has_scalars(value) or all(map(is_savable, value))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    return isinstance(value, (*SCALARS, Tensor, np.generic))


def _has_scalars(values: Collection[Any]) -> bool:
    """Whether a collection contains only scalars. Fast even for a million indices."""
    return set(map(type, values)) <= set(SCALARS)


def copied_value(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, set) and _has_scalars(value) else copy.deepcopy(value)


MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
KIND = "pipeshard.kind"  # the key for the original type of a value that JSON cannot hold
FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (list, dict, set, deque, int, float)}
KINDS: dict[str, Callable[..., Any]] = {
    "array": lambda tensor: tensor.numpy(),
    "tuple": tuple,
    "dict": lambda keys, values: dict(zip(keys, values, strict=True)),
    "set": set,
    "deque": deque,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": lambda entries, factory: defaultdict(FACTORIES.get(factory), entries),
}


def saved(value: Any) -> Any:
    """Copy a plain value. The copy contains only tensors, bytes and types that JSON restores: values of other types are
    converted and marked. Raises CheckpointError for an object whose class derives from str, bytes, int or float, since
    JSON would lose the class."""
    if isinstance(value, defaultdict):
        return _marked("defaultdict", saved(dict(value)), getattr(value.default_factory, "__name__", None))
    if isinstance(value, Mapping) and type(value) is not dict:
        return _marked(type(value).__name__, saved(dict(value)))
    if isinstance(value, dict) and not all(type(key) is str for key in value):
        return _marked("dict", saved(list(value)), saved(list(value.values())))
    if isinstance(value, dict):
        return {key: saved(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return list(value) if _has_scalars(value) else [saved(entry) for entry in value]
    if isinstance(value, tuple | set):
        return _marked(type(value).__name__, saved(list(value)))
    if isinstance(value, deque):
        return _marked("deque", saved(list(value)), value.maxlen)
    if isinstance(value, np.ndarray):
        return _marked("array", torch.from_numpy(value.copy()))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, SCALARS) and type(value) not in SCALARS:
        raise CheckpointError(
            f"the data position contains {value!r}, which would lose its class {type(value).__name__}: in samplers and "
            "streams, keep plain numbers and strings (such as the value of an enum), or define state_dict and "
            "load_state_dict"
        )
    return copied_value(value)


def _marked(kind: str, *arguments: Any) -> dict[str, Any]:
    return {KIND: kind, "arguments": list(arguments)}


def packed(state: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Convert a result of `Order.state` for a checkpoint: the attributes of each member become JSON text in one tensor,
    and the tensors that the attributes contain are stored beside this tensor. Unpickling a list would take a step for
    each value, and `load_plain` limits the number of steps."""
    return {
        key: {part: _packed(values) if part == "attributes" else values for part, values in entry.items()}
        for key, entry in state.items()
    }


def _packed(attributes: Mapping[str, Any]) -> dict[str, Any]:
    others: list[Any] = []  # values that JSON cannot hold

    def mark(value: Any) -> dict[str, Any]:
        others.append(value)
        return _marked("other", len(others) - 1)

    text = json.dumps(saved(attributes), default=mark).encode()
    return _marked("json", torch.frombuffer(bytearray(text), dtype=torch.uint8), *others)


def _unpacked(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Restore attributes that `_packed` converted. Attributes that are not packed, as in states of version 0.2.0, are
    returned unchanged. Reads the JSON tensor's storage, which has the size that the file contains, since a file may
    declare any shape for a few bytes."""
    if KIND not in attributes:
        return attributes
    text, *others = attributes["arguments"]
    kinds = KINDS | {"other": others.__getitem__}
    stored = torch.empty(0, dtype=torch.uint8).set_(text.untyped_storage())

    def unmark(entry: dict[str, Any]) -> Any:
        return kinds[entry[KIND]](*entry["arguments"]) if KIND in entry else entry

    return json.loads(stored.numpy().tobytes(), object_hook=unmark)


def _give_back(member: Any, name: str, value: Any) -> None:
    """Set an attribute to a value. Collections are refilled in place, since they may be shared."""
    current = getattr(member, name, None)
    if isinstance(current, np.ndarray) and isinstance(value, Tensor):  # a state of an older version
        value = value.numpy()
    if isinstance(current, list) and isinstance(value, list):
        current[:] = value
    elif isinstance(current, dict) and isinstance(value, dict):
        current.clear()
        current.update(value)
    elif isinstance(current, set | deque):
        current.clear()
        (current.update if isinstance(current, set) else current.extend)(value)
    else:
        object.__setattr__(member, name, value)


def is_equal(a: Any, b: Any) -> bool:
    """Whether two values are equal. The values may be nested, and may contain tensors and arrays."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque) and not (_has_scalars(a) and _has_scalars(b)):
        return len(a) == len(b) and all(map(is_equal, a, b))
    return bool(a == b)
