"""Dataloader: the same batches on every stage of a replica, in an order that can be resumed at any batch.

All stages of a replica must read the same batches, and the replicas' batches together those of one process. torch's
DataLoader draws its order from a global generator and forgets its position; DistributedSampler distributes single
samples, so another number of replicas reads other batches. Here the order depends only on seed and epoch, `Share`
distributes whole steps of it, and the loader counts the batches that were taken.
"""

import logging
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, RandomSampler, SequentialSampler

from pipeshard.batch.read import collate
from pipeshard.data.order import Order
from pipeshard.data.place import OVER, LoaderPlace, Peekable
from pipeshard.data.sampler import SharedSampler
from pipeshard.data.seeded import KeyedSampler, SeededSamples
from pipeshard.data.share import Share, length_of
from pipeshard.data.stream import SharedCollate, SharedStream
from pipeshard.errors import CheckpointError, ConfigurationError
from pipeshard.graph.rng import Draws

logger = logging.getLogger("pipeshard")


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
                raise ConfigurationError(f"shuffle=True, but {kind}=... already sets the order: pass only one of them")
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
                f"the data position was saved with {saved}, but this dataloader has {sizes} (batch_size counts all "
                "replicas together, workers is the num_workers of a streaming dataset). Create it from the same data "
                "with the same batch size, or pass dataloader=None to continue in a new order"
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
            f"{type(one).__name__} already splits the data into {one.num_replicas} shares, so the stages of a "
            "pipeline would read different batches, and each replica would read only a part of a share: pass a sampler "
            "over the whole dataset (or shuffle=True), which pipeshard shards itself"
        )
