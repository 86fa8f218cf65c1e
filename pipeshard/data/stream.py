"""Stream: one replica's share of the samples of an iterable dataset."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from pipeshard.data.reach import generators_of
from pipeshard.data.share import Share
from pipeshard.graph.rng import Draws, seed_generator, seed_process


class SharedCollate:
    """A collator for a stream's samples. Unlike the stream's random numbers, those of the collator depend on the
    replica. They do not change the stream's generators, so the stream has the same order with any number of
    replicas."""

    def __init__(self, collate_fn: Any, replica: int) -> None:
        self.collate_fn, self.replica = collate_fn, replica

    def begin(self, *key: int) -> None:
        """Start the random numbers of an epoch of the stream in this process."""
        self.key, self.batches = key, 0

    def __call__(self, samples: Any) -> Any:
        self.batches += 1
        with Draws(*self.key, self.batches, self.replica):
            return self.collate_fn(samples)


class SharedStream(IterableDataset[Any]):
    """One replica's share of a stream. Each worker reads its own copy of the stream. Other attributes are delegated to
    the stream.

    Every replica reads the whole stream, so the stream's random numbers depend on seed, epoch and worker, not on the
    replica. `moment` (seed, epoch, the stream's epoch) is in shared memory, since persistent workers receive no new
    epoch.
    """

    stream: IterableDataset[Any]
    share: Share
    collate: SharedCollate
    moment: torch.Tensor

    def __init__(
        self, stream: IterableDataset[Any], share: Share, collate: SharedCollate, moment: torch.Tensor
    ) -> None:
        self.__dict__.update(stream=stream, share=share, collate=collate, moment=moment)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        seed, epoch, told = self.moment.tolist()
        key = (seed, epoch, 0 if info is None else info.id)
        if info is not None and hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(told)
        seed_process(*key)
        self.collate.begin(*key)
        for number, generator in enumerate(generators_of(self.stream, self.collate.collate_fn)):
            seed_generator(generator, *key, number)
        yield from self.share.of(self.stream)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "stream" not in self.__dict__:  # during unpickling
            raise AttributeError(name)
        return getattr(self.stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.stream, name, value)  # a worker_init_fn may configure each copy
