"""Share: the part of an order (a sampler's entries or a stream's samples) that one replica reads."""

import logging
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from pipeshard.data.order import Order, copied_value, is_equal, is_savable, saved
from pipeshard.data.place import LoaderPlace, Peekable
from pipeshard.data.reach import generators_of
from pipeshard.data.seeded import Delegate
from pipeshard.errors import CheckpointError, ConfigurationError, counted
from pipeshard.graph.rng import Draws, seed_generator, seed_process

logger = logging.getLogger("pipeshard")


def length_of(sized: Any) -> int | None:
    """The length of an object, or None if it has no length."""
    try:
        return len(sized)
    except TypeError:
        return None


@dataclass
class Share:
    """One replica's part of an order: one block from every `size * replicas` consecutive entries."""

    size: int
    replica: int
    replicas: int
    drop_last: bool
    has_warned: bool = False  # about samples that are dropped

    @property
    def step(self) -> int:
        """The number of entries that all replicas together read in one step."""
        return self.size * self.replicas

    def of(self, entries: Iterable[Any]) -> Iterator[Any]:
        """Yield the entries of this replica."""
        entries = iter(entries)
        while True:
            together = list(islice(entries, self.step))
            if not together or (len(together) < self.step and not self._keeps(len(together))):
                return
            first = sum(self._block(len(together), replica) for replica in range(self.replica))
            yield from together[first : first + self._block(len(together), self.replica)]

    def length(self, entries: int) -> int:
        """The number of entries that this replica reads from an order of `entries` entries."""
        steps, remainder = divmod(entries, self.step)
        last = self._block(remainder, self.replica) if remainder and self._keeps(remainder) else 0
        return steps * self.size + last

    def _keeps(self, remainder: int) -> bool:
        """Whether replicas read an incomplete last step of `remainder` entries. With `drop_last`, replicas never read
        it. Otherwise, replicas read it if it has an entry for each replica. If it has fewer entries, this function
        warns once."""
        if remainder < self.replicas and not (self.drop_last or self.has_warned):
            self.has_warned = True
            logger.warning(
                "the last %s of each epoch (or batches, if the DataLoader does not batch) will be dropped, because "
                "there is not one for each of the %d replicas",
                counted(remainder, "sample"),
                self.replicas,
            )
        return remainder >= self.replicas and not self.drop_last

    def _block(self, together: int, replica: int) -> int:
        return together // self.replicas + (replica < together % self.replicas)


class SharedSampler(Sampler[Any]):
    """One replica's share of a sampler, without the sampler's first `skip` entries. Its methods set the epoch and the
    position. The sampler runs with generators that depend only on seed and epoch."""

    def __init__(self, order: Order, share: Share, place: LoaderPlace) -> None:
        self.sampler, self.order, self.share, self.place, self.skip = order.root, order, share, place, 0
        self.batch_size: int | None = getattr(order.root, "batch_size", None)
        self._entries: weakref.ref[Peekable] | None = None  # the newest iterator's entries
        length_of(self)  # warns now about samples that are dropped, if the length is known

    def __iter__(self) -> Iterator[Any]:
        draws = self._draws()
        with draws:
            entries = iter(self.sampler)
        peekable = Peekable(self.share.of(self._after_skip(entries)), draws)
        self._entries = weakref.ref(peekable)
        return peekable

    def _after_skip(self, entries: Iterator[Any]) -> Iterator[Any]:
        """Yield the entries after the first `skip`, and record the last entry of each step.

        Raises CheckpointError if the last skipped entry differs from the entry that was read before the position was
        saved.
        """
        step, last_entries = self.share.step, self.place.last_entries
        skipped = [*deque(islice(entries, self.skip), maxlen=1)]
        expected = last_entries.get(self.skip // step)
        if expected is not None and not is_equal(saved(skipped), saved([expected])):
            raise CheckpointError(
                f"{type(self.sampler).__name__} yields a different order than before the data position was saved: "
                f"entry {self.skip - 1} differs. The loader restores the state of the samplers at the start of the "
                "epoch (their state_dict or, without one, their changed attributes with plain values), and then skips "
                "the entries that were read. The state must therefore determine the order of a whole epoch, and must "
                "not contain a position in the epoch. Correct the sampler's state_dict. If the order depends on losses "
                "of the same epoch, save between epochs. To start at the beginning, pass dataloader=None to "
                "load_training_state"
            )
        for number, entry in enumerate(entries, self.skip + 1):
            if number % step == 0 and is_savable(entry):
                for taken in [batches for batches in last_entries if batches < self.place.batches]:
                    del last_entries[taken]
                last_entries[number // step] = copied_value(entry)
            yield entry

    def __len__(self) -> int:
        with self._draws(), self.order.unchanged():
            return self.share.length(len(self.sampler))

    def finish(self) -> None:
        """After the last entry, run the sampler to its end, since a sampler may count its epochs there."""
        entries = None if self._entries is None else self._entries()
        if entries is not None:
            entries.is_over()

    def run_through(self) -> None:
        """Iterate over the sampler once in this epoch, as the loader's iterator does."""
        with self._draws():
            for _ in self.sampler:
                pass

    def _draws(self) -> Draws:
        return Draws(self.place.seed, self.place.epoch)

    def set_epoch(self, epoch: int) -> None:
        self.place.set_epoch(epoch)
        self.order.set_epoch(epoch, force=True)

    def set_start_index(self, start_index: int) -> None:
        """Start after the first `start_index` samples of this replica (batches, if the sampler yields batches)."""
        batches, remainder = divmod(start_index, self.share.size)
        if remainder or batches < 0:
            of = "integer" if self.share.size == 1 else f"multiple of the batch size {self.share.size}"
            raise ConfigurationError(f"start_index must be a non-negative {of}, got {start_index}")
        self.place.move(self.place.next_epoch, batches)


class SharedCollate:
    """A collator for a stream's samples. The collator's random numbers depend on the replica, unlike the stream's. They
    do not advance the stream's generators, so the stream has the same order with any number of replicas."""

    def __init__(self, collate_fn: Any, replica: int) -> None:
        self.collate_fn, self.replica = collate_fn, replica

    def begin(self, *key: int) -> None:
        """In this process, begin an epoch of the stream in which random numbers depend on `key`."""
        self.key, self.batches = key, 0

    def __call__(self, samples: Any) -> Any:
        self.batches += 1
        with Draws(*self.key, self.batches, self.replica):
            return self.collate_fn(samples)


class SharedStream(Delegate, IterableDataset[Any]):
    """One replica's share of a stream. Each worker reads its own copy of the stream.

    Every replica reads the whole stream, so the stream's random numbers depend on seed, epoch and worker, not on the
    replica. `moment` (seed, epoch, the stream's epoch) is in shared memory, since otherwise persistent workers
    would not see a new epoch.
    """

    def __init__(
        self, stream: IterableDataset[Any], share: Share, collate: SharedCollate, moment: torch.Tensor
    ) -> None:
        self.__dict__.update(of=stream, share=share, collate=collate, moment=moment)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        seed, epoch, told = self.moment.tolist()
        key = (seed, epoch, 0 if info is None else info.id)
        if info is not None and hasattr(self.of, "set_epoch"):
            self.of.set_epoch(told)
        seed_process(*key)
        self.collate.begin(*key)
        for number, generator in enumerate(generators_of(self.of, self.collate.collate_fn)):
            seed_generator(generator, *key, number)
        yield from self.share.of(self.of)
