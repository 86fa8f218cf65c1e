"""Seeded: samples whose random numbers depend on their batch, and not on the process that loads them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from pipeshard.data.place import LoaderPlace
from pipeshard.data.reach import generators_of, reachable, set_states, states_of
from pipeshard.distributed.collectives import share_in_turn
from pipeshard.graph.places import is_generator
from pipeshard.graph.rng import seed_generator, seed_process


@dataclass(frozen=True)
class Keyed:
    """A sampler's entry, and the key with which SeededSamples seeds the random generators before it loads the entry."""

    entry: Any
    key: tuple[int, ...]


class KeyedSampler:
    """The entries of a sampler (one entry per batch), each with the key (seed, epoch, batch number, replica)."""

    def __init__(self, sampler: Any, place: LoaderPlace, replica: int) -> None:
        self.sampler, self.place, self.replica = sampler, place, replica

    def __iter__(self) -> Iterator[Keyed]:
        seed, epoch, first = self.place.seed, self.place.epoch, self.place.batches
        for number, entry in enumerate(self.sampler):
            yield Keyed(entry, (seed, epoch, first + number, self.replica))

    def __len__(self) -> int:
        return len(self.sampler)


class Delegate:
    """Delegates attribute access to the object `of`, except reads of attributes in the Delegate's own `__dict__`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "of" not in self.__dict__:  # during unpickling
            raise AttributeError(name)
        return getattr(self.of, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.of, name, value)  # a worker_init_fn may configure each copy of a stream


class SeededSamples(Delegate, Dataset[Any]):
    """A dataset that seeds the random generators with the key of each entry before it loads the entry. The random
    numbers of the samples and the collator are therefore the same in any process."""

    def __init__(self, samples: Any, collate_fn: Any) -> None:
        self.__dict__.update(of=samples, collate_fn=collate_fn, generators=None, is_complete=False)

    def __getitem__(self, keyed: Keyed) -> Any:
        self._seed(keyed)
        return self.of[keyed.entry]

    def __getitems__(self, keyed: Keyed) -> Any:
        self._seed(keyed)
        if getattr(self.of, "__getitems__", None):
            return self.of.__getitems__(keyed.entry)
        return [self.of[entry] for entry in keyed.entry]

    def _seed(self, keyed: Keyed) -> None:
        seed_process(*keyed.key)
        self.__dict__["last"] = keyed
        if self.generators is None:
            self._search()
        for number, generator in enumerate(self.generators):
            seed_generator(generator, *keyed.key, number)

    def _search(self) -> None:
        self.__dict__["generators"] = generators_of(self.of, self.collate_fn)

    def has_created(self) -> bool:
        """Whether the first batch has created generators, which were therefore not seeded. False for later batches."""
        if self.is_complete:
            return False
        before = len(self.generators)
        self._search()
        self.__dict__["is_complete"] = True
        return len(self.generators) > before

    def __len__(self) -> int:
        return len(self.of)


class SeededCollate:
    """The collator for SeededSamples. If the first batch in this process creates random generators, it is loaded again
    with these generators seeded."""

    def __init__(self, samples: SeededSamples, is_batched: bool) -> None:
        self.samples, self.is_batched = samples, is_batched

    def __call__(self, data: Any) -> Any:
        batch = self.samples.collate_fn(data)
        if not self.samples.has_created():
            return batch
        read = self.samples.__getitems__ if self.is_batched else self.samples.__getitem__
        return self.samples.collate_fn(read(self.samples.last))


def share_generators(loader: Any, *groups: dist.ProcessGroup) -> None:
    """Copy the states of the random generators in the loader's dataset and collator from the first rank of each group
    to the group's other ranks, one group after the other. `set_seed` does not seed these generators."""
    roots = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    held = reachable(*roots, skip=lambda value: isinstance(value, nn.Module))  # a collator may contain the model
    generators = [value for value in held if is_generator(value)]
    kinds = [type(generator).__name__ for generator in generators]
    shared, states = share_in_turn((kinds, states_of(generators)), *groups)
    if shared == kinds:
        set_states(generators, states)
