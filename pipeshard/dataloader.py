"""Dataloader: the same batches on every stage of a replica, in an order that can be resumed at any batch.

All stages of a replica must read the same batches, and the replicas' batches together those of one process. torch's
DataLoader draws its order from a global generator and forgets its position; DistributedSampler distributes single
samples, so another number of replicas reads other batches. Here the order depends only on seed and epoch, `Share`
distributes whole steps of it, and the loader counts the batches that were taken.
"""

import logging
import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    IterDataPipe,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)

from pipeshard.batch.read import collate
from pipeshard.errors import CheckpointError, ConfigurationError
from pipeshard.graph.rng import Draws, seed_generator, seed_process
from pipeshard.sampling import Order, generators_of

logger = logging.getLogger("pipeshard")


def length_of(sized: Any) -> int | None:
    """Its length; None if it has none."""
    try:
        return len(sized)
    except TypeError:
        return None


@dataclass
class Share:
    """One replica's part of an order: of every `size * replicas` consecutive entries, its own block."""

    size: int
    replica: int
    replicas: int
    drop_last: bool
    has_warned: bool = False  # of samples that are left out

    @property
    def step(self) -> int:
        """The entries that all replicas read together in one step."""
        return self.size * self.replicas

    def of(self, entries: Iterable[Any]) -> Iterator[Any]:
        """The entries of this replica."""
        entries = iter(entries)
        while True:
            together = list(islice(entries, self.step))
            if not together or (len(together) < self.step and not self._keeps(len(together))):
                return
            first = sum(self._block(len(together), replica) for replica in range(self.replica))
            yield from together[first : first + self._block(len(together), self.replica)]

    def length(self, entries: int) -> int:
        """How many of this many entries belong to this replica."""
        steps, remainder = divmod(entries, self.step)
        last = self._block(remainder, self.replica) if remainder and self._keeps(remainder) else 0
        return steps * self.size + last

    def _keeps(self, remainder: int) -> bool:
        """Whether the last few entries, fewer than a step's, give a batch to every replica."""
        if remainder < self.replicas and not (self.drop_last or self.has_warned):
            self.has_warned = True
            logger.warning(
                "the last %d of an epoch's samples (of whole batches, where the loader makes none) are left out: "
                "they are fewer than the %d replicas",
                remainder,
                self.replicas,
            )
        return remainder >= self.replicas and not self.drop_last

    def _block(self, together: int, replica: int) -> int:
        return together // self.replicas + (replica < together % self.replicas)


@dataclass
class LoaderPlace:
    """The position of a loader in the data: its epoch, the batches taken of it, and whether an iterator was created.

    The sampler holds this, not the loader. A reference cycle with the loader would leave persistent workers to the
    garbage collector, which may close their pipes before they are stopped: each then takes 5 s.
    """

    epoch: int = 0
    batches: int = 0
    begun: bool = False
    seed: int = 0
    iterators: int = 0  # that were made; the last one is counted
    counted: int | None = None  # the batches of the last epoch that was read to its end

    def set(self, epoch: int, batches: int = 0) -> None:
        self.epoch, self.batches, self.begun = epoch, batches, False

    def set_epoch(self, epoch: int) -> None:
        """Start the next iterator at the first batch of this epoch; if it would be of this epoch anyway, it
        keeps its position."""
        if epoch != self.epoch + self.begun:
            self.set(epoch)


OVER = object()  # no entry is left


class Peekable(Iterator[Any]):
    """An iterator that knows whether it is exhausted before its next entry is taken; `inside` is entered around it."""

    def __init__(self, entries: Iterator[Any], inside: AbstractContextManager[None]) -> None:
        self._entries, self._inside = entries, inside
        self._next: list[Any] = []  # the entry that was looked at

    def is_over(self) -> bool:
        if not self._next:
            with self._inside:
                self._next.append(next(self._entries, OVER))
        return self._next[0] is OVER

    def __next__(self) -> Any:
        if self.is_over():
            raise StopIteration
        return self._next.pop()


class SharedSampler(Sampler[Any]):
    """A replica's share of a sampler, without its first `skip` entries, and with the usual methods of samplers: the
    epoch, and the position in it. The sampler uses generators that depend only on seed and epoch."""

    def __init__(self, order: Order, share: Share, place: LoaderPlace) -> None:
        self.sampler, self.order, self.share, self.place, self.skip = order.root, order, share, place, 0
        self.batch_size: int | None = getattr(order.root, "batch_size", None)
        self._entries: weakref.ref[Peekable] | None = None  # those of the newest iterator
        length_of(self)  # warns at once of what is left out, if the length is known

    def __iter__(self) -> Iterator[Any]:
        draws = self._draws()
        with draws:
            entries = iter(self.sampler)
        peekable = Peekable(self.share.of(islice(entries, self.skip, None)), draws)
        self._entries = weakref.ref(peekable)
        return peekable

    def __len__(self) -> int:
        with self._draws(), self.order.unchanged():
            return self.share.length(len(self.sampler))

    def finish(self) -> None:
        """After the last entry, run the sampler to its end: it may count its epochs there."""
        entries = None if self._entries is None else self._entries()
        if entries is not None:
            entries.is_over()

    def run_through(self) -> None:
        """Iterate the sampler through this epoch once, as its iterator does."""
        with self._draws():
            for _ in self.sampler:
                pass

    def _draws(self) -> Draws:
        return Draws(self.place.seed, self.place.epoch)

    def set_epoch(self, epoch: int) -> None:
        self.place.set_epoch(epoch)
        self.order.set_epoch(epoch, force=True)

    def set_start_index(self, start_index: int) -> None:
        """Start after this many of this replica's samples (of its batches, if it gets whole ones)."""
        batches, remainder = divmod(start_index, self.share.size)
        if remainder or batches < 0:
            raise ConfigurationError(
                f"start_index={start_index} is within a batch of {self.share.size} samples: give a multiple of that"
            )
        self.place.set(self.place.epoch + self.place.begun, batches)


@dataclass(frozen=True)
class Keyed:
    """The entry that a worker loads, and the key of its random numbers."""

    entry: Any
    key: tuple[int, ...]


class KeyedSampler:
    """Entries of a sampler, each with the key (seed, epoch, number of the batch, replica)."""

    def __init__(self, sampler: Any, place: LoaderPlace, replica: int) -> None:
        self.sampler, self.place, self.replica = sampler, place, replica

    def __iter__(self) -> Iterator[Keyed]:
        seed, epoch, first = self.place.seed, self.place.epoch, self.place.batches
        for number, entry in enumerate(self.sampler):
            yield Keyed(entry, (seed, epoch, first + number, self.replica))

    def __len__(self) -> int:
        return len(self.sampler)


class SeededSamples(Dataset[Any]):
    """A dataset and collator whose random numbers depend only on the Keyed entry, in whichever
    process it is loaded; other attributes are the dataset's own."""

    samples: Any
    collate_fn: Any

    def __init__(self, samples: Any, collate_fn: Any) -> None:
        self.__dict__.update(samples=samples, collate_fn=collate_fn, generators=None)

    def __getitem__(self, keyed: Keyed) -> Any:
        self._seed(keyed)
        return self.samples[keyed.entry]

    def __getitems__(self, keyed: Keyed) -> Any:
        self._seed(keyed)
        if getattr(self.samples, "__getitems__", None):
            return self.samples.__getitems__(keyed.entry)
        return [self.samples[entry] for entry in keyed.entry]

    def _seed(self, keyed: Keyed) -> None:
        seed_process(*keyed.key)
        if self.generators is None:
            self.__dict__["generators"] = generators_of(self.samples, self.collate_fn)
        for number, generator in enumerate(self.generators):
            seed_generator(generator, *keyed.key, number)

    def __len__(self) -> int:
        return len(self.samples)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "samples" not in self.__dict__:  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.samples, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.samples, name, value)


class SharedStream(IterableDataset[Any]):
    """A replica's share of a stream, of which each worker reads its own copy; other attributes are the stream's own.

    Every replica reads the whole stream, so its random numbers depend on seed, epoch and worker, not on the replica.
    `moment` is memory that is shared with the workers, since persistent ones receive no new epoch.
    """

    stream: IterableDataset[Any]
    share: Share
    collate_fn: Any
    moment: torch.Tensor

    def __init__(self, stream: IterableDataset[Any], share: Share, collate_fn: Any, moment: torch.Tensor) -> None:
        self.__dict__.update(stream=stream, share=share, collate_fn=collate_fn, moment=moment)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        seed, epoch, told = self.moment.tolist()
        key = (seed, epoch, 0 if info is None else info.id)
        if info is not None and hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(told)
        seed_process(*key)
        for number, generator in enumerate(generators_of(self.stream, self.collate_fn)):
            seed_generator(generator, *key, number)
        yield from self.share.of(self.stream)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "stream" not in self.__dict__:  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.stream, name, value)  # worker_init_fn may set on each copy what to read


@dataclass(frozen=True)
class SharedCollate:
    """A collator of a stream's samples that uses different random numbers on each replica, unlike the stream."""

    collate_fn: Any
    replica: int

    def __call__(self, samples: Any) -> Any:
        with Draws(int(torch.randint(2**62, ())), self.replica):
            return self.collate_fn(samples)


class Batches(Iterator[Any]):
    """One epoch's batches, counted in `place` as they are taken. It does not hold the loader, see Place."""

    def __init__(
        self,
        batches: Iterator[Any],
        place: LoaderPlace,
        sampler: SharedSampler | None,
        share: Share,
        length: int | None,
    ) -> None:
        self.batches = Peekable(batches, Draws(place.seed, place.epoch))
        self.place, self.sampler, self.share, self.length = place, sampler, share, length
        self.number = place.iterators

    @property
    def is_counted(self) -> bool:
        """Whether the loader has created no other iterator since."""
        return self.number == self.place.iterators

    def is_over(self) -> bool:
        """Whether no batch is left; may load the next one to find out."""
        return self.batches.is_over()

    def __next__(self) -> Any:
        batch = next(self.batches, OVER)
        if batch is OVER:
            if self.is_counted and self.place.begun:
                self.place.counted = self.place.batches
                self.place.set(self.place.epoch + 1)
            self.share.has_warned = True  # at the end; workers of the next epoch get a copy of this
            raise StopIteration
        if self.is_counted:
            self.place.batches += 1
            if self.sampler is not None and self.place.batches == self.length:
                self.sampler.finish()
        return batch


WORKERS = 1_000_003  # how far apart the seeds of two replicas' workers are, so that they augment differently


class ResumableDataLoader(DataLoader[Any]):
    """A DataLoader whose order depends only on the seed and the epoch, and which knows its position.

    With `num_replicas` n, every step of all replicas together reads `batch_size` x n consecutive samples of that order,
    and this one loads the `replica`-th of n blocks of them. Concatenated, the replicas' batches are those of
    one process with n times the batch size. If fewer are left at the end, each replica gets equally many; if they do
    not divide, the first ones get one more. Fewer samples than replicas are omitted, with a warning, and `drop_last`
    omits all of them. So every replica gets equally many batches. Your own `sampler` gives the order of all
    replicas; of a `batch_sampler`, or with batch_size=None, each replica gets every n-th batch. A stream (an
    IterableDataset) is read by every replica, and each keeps its own samples; with workers, this holds for each
    worker's copy.

    `epoch` counts from 0, `batches` are those that the training loop took of this epoch (workers may be ahead), and
    `remaining` those that it can still take. After `load_state_dict(...)`, a loader continues with the next batch;
    earlier ones are not loaded, except from an IterableDataset, which must be read up to that position.

    The sampler's order depends only on the seed and the epoch: every random generator that it holds is seeded before
    each epoch, however deeply samplers are nested, and it uses the process's generators as if nothing else did.
    `set_epoch` is called on every sampler (and dataset) that has it. State that a sampler keeps from one epoch to the
    next is saved with the position: its own `state_dict()`, or else its attributes with plain values that have changed.
    The random numbers of the dataset and the collator depend on seed, epoch and batch too, with any number of workers;
    those of a stream on seed, epoch, worker and the place in the stream. The program's own generators do not change.
    `dataloader.sampler` has `set_epoch` and `set_start_index`.

    Args:
        batch_size: the samples of one replica's batch.
        seed: determines the order of the samples and the workers' seeds, together with the epoch.
        replica: which share of the data this one is.
        num_replicas: how many shares there are.
        options: DataLoader's own. A `generator` among them gives the seed; without a `collate_fn`, samples with lists
            of numbers are collated by transformers' default_data_collator.

    Raises ConfigurationError for a sampler together with shuffle, or one that already takes a replica's share.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool = False,
        seed: int = 1024,
        *,
        replica: int = 0,
        num_replicas: int = 1,
        **options: Any,
    ) -> None:
        if not 0 <= replica < num_replicas:
            raise ConfigurationError(
                f"replica must be from 0 to num_replicas - 1, got replica={replica} with num_replicas={num_replicas}"
            )
        generator = options.pop("generator", None)
        self.place = LoaderPlace(seed=generator.initial_seed() if generator else seed)
        self._newest: weakref.ref[Batches] | None = None
        self._sampler: SharedSampler | None = None
        self._samples = length_of(dataset)
        kind = "batch_sampler" if options.get("batch_sampler") is not None else "sampler"
        size = 1 if kind == "batch_sampler" else batch_size or 1  # of a batch, in entries of the order
        self._share = Share(size, replica, num_replicas, bool(options.get("drop_last")))
        self._workers = torch.Generator()
        if isinstance(dataset, IterableDataset):
            options["shuffle"] = shuffle  # which DataLoader refuses
            self._order = Order(dataset)
        else:
            sampler: Any = options.get(kind)
            generator = torch.Generator()
            if sampler is None:
                sampler = RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)  # type: ignore[arg-type]
            elif shuffle:
                raise ConfigurationError(f"shuffle=True, but the order is that of {kind}=...: give one of the two")
            if getattr(sampler, "generator", self) is None:
                sampler.generator = generator
            self._order = Order(sampler, dataset)
            _refuse_shares(self._order)
            self._sampler = options[kind] = SharedSampler(self._order, self._share, self.place)
        self._began = self._order.state()  # as the order was before the epoch
        self._moment = torch.zeros(3, dtype=torch.int64)  # seed and epoch, and the epoch that the stream is told
        if options.get("num_workers") and self._sampler is None:
            self._moment.share_memory_()
        if options.get("collate_fn") is None and (batch_size is not None or kind == "batch_sampler"):
            options["collate_fn"] = collate
        super().__init__(dataset, batch_size, generator=self._workers, **options)

    @property
    def seed(self) -> int:
        return self.place.seed

    @property
    def epoch(self) -> int:
        return self.place.epoch

    @property
    def batches(self) -> int:
        return self.place.batches

    @property
    def remaining(self) -> int:
        """How many batches the last iterator can still give or, before any was created, the next one can."""
        return len(self) - self.batches

    def __len__(self) -> int:
        """The number of batches of an epoch. For a stream with several workers it is an estimate, which assumes equal
        parts, until an epoch has been read to its end."""
        if self._sampler is not None:
            return super().__len__()
        samples, workers = len(self.dataset), max(1, self.num_workers)  # type: ignore[arg-type]
        if workers > 1 and self.place.counted is not None:
            return self.place.counted
        entries = [self._share.length(len(range(worker, samples, workers))) for worker in range(workers)]
        if self.batch_size is None:
            return sum(entries)
        if self.drop_last:
            return sum(count // self.batch_size for count in entries)
        return sum(math.ceil(count / self.batch_size) for count in entries)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.place.begun:
            self.place.set(self.epoch + 1)
        self.place.begun = True
        self.place.iterators += 1
        self._order.set_epoch(self.epoch)
        self._began = self._order.state()
        self._order.seed(self.seed, self.epoch)
        told = self._order.epoch
        self._moment.copy_(torch.tensor([self.seed, self.epoch, self.epoch if told is None else told]))
        replica = 0 if self._sampler is None else self._share.replica  # replicas read the same stream
        self._workers.manual_seed(self.seed + self.epoch + WORKERS * replica)
        skip = self.batches
        if self._sampler is not None:
            self._sampler.skip, skip = self.batches * self._share.step, 0
        with self._seeded():
            batches = islice(super().__iter__(), skip, None)
        new = Batches(batches, self.place, self._sampler, self._share, self._length)
        self._newest = weakref.ref(new)
        return new

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Let DataLoader create an iterator whose random numbers depend on the position."""
        parts = ("dataset", "collate_fn", "sampler", "batch_sampler")
        own = {name: self.__dict__[name] for name in parts}
        new = dict(own)
        replica = self._share.replica
        if self._sampler is not None:
            new["dataset"] = SeededSamples(self.dataset, self.collate_fn)
            kind = "sampler" if self.batch_sampler is None else "batch_sampler"
            new[kind] = KeyedSampler(own[kind], self.place, replica)
        elif self._share.replicas > 1 or not isinstance(self.dataset, IterDataPipe):
            new["dataset"] = SharedStream(self.dataset, self._share, self.collate_fn, self._moment)  # type: ignore[arg-type]
            if self._share.replicas > 1:
                new["collate_fn"] = SharedCollate(self.collate_fn, replica)
        self.__dict__.update(new)
        try:
            yield
        finally:
            self.__dict__.update(own)

    def set_epoch(self, epoch: int) -> None:
        """Start the next iterator in this epoch, see `LoaderPlace.set_epoch`."""
        self.place.set_epoch(epoch)

    @property
    def _length(self) -> int | None:
        """The number of batches of an epoch, if it is known."""
        return length_of(self) if self._sampler is not None or self.num_workers <= 1 else None

    def _has_ended(self) -> bool:
        """Whether no batch of this epoch is left."""
        if not self.batches:
            return False
        length = self._length
        if length is not None and self._sampler is not None and self.batches < length:
            return False
        newest = None if self._newest is None else self._newest()
        if newest is not None and newest.is_counted and self.place.begun:
            return newest.is_over()
        return self.batches == length

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, the same on every replica: numbers, and the state of samplers that keep one.

        If the length is unknown, it may load the next batch to know whether the epoch is over.
        """
        ended = self._has_ended()
        epoch, batches = (self.epoch + 1, 0) if ended else (self.epoch, self.batches)
        order = self._began if self.place.begun and not ended else self._order.state()
        kept = {"order": order} if order else {}
        return {"seed": self.seed, "epoch": epoch, "batches": batches, **self._sizes(), **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there with the next iterator, with any number of replicas that together read as many samples per
        step.

        Raises CheckpointError if the data, the sampler, that number of samples or the workers of a stream have
        changed.
        """
        sizes = self._sizes()
        # which older states lack: all of them were of one replica; of a stream's workers it is not known
        complete = {"batches_at_once": 1, "workers": sizes.get("workers"), **state}
        saved = {name: complete.get(name) for name in sizes}
        if saved != sizes:
            raise CheckpointError(
                f"the position in the data was saved with {saved}, but this dataloader has {sizes} (batch_size is that "
                "of all replicas together, workers is the num_workers of a stream). Create it from the same data with "
                "the same batch size, or pass dataloader=None to go on with a new order"
            )
        self._order.load_state(state.get("order", {}))
        self.place.seed, epoch, batches = (int(state[name] or 0) for name in ("seed", "epoch", "batches"))
        self.place.set(epoch, batches)
        if batches and batches == self._length:  # where other replicas left out less at the end
            if self._sampler is not None and "order" in state:
                self._order.set_epoch(epoch)
                self._order.seed(self.seed, epoch)
                self._sampler.run_through()
            self.place.set(epoch + 1)

    def _sizes(self) -> dict[str, int | None]:
        """The items that the number of batches counts: samples or, for a loader that does not build batches,
        batches."""
        n = self._share.replicas
        if self.batch_size is None:
            sizes = {"batch_size": None, "batches_at_once": n, "samples": self._samples}
        else:
            sizes = {"batch_size": self.batch_size * n, "samples": self._samples}
        if self._sampler is None:
            sizes["workers"] = max(1, self.num_workers)  # each reads a part, and their batches take turns
        return sizes


def _refuse_shares(order: Order) -> None:
    for one in order.shares():
        raise ConfigurationError(
            f"{type(one).__name__} takes one of {one.num_replicas} shares by itself, so that the stages of a "
            "pipeline would read different batches, and replicas a share of a share: pass a sampler of the whole "
            "order (or shuffle=True), it is cut here"
        )
