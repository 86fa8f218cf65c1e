"""Dataloader: loads the same batches on every stage of a replica, in an order that can be resumed at any batch.

All stages of a replica must read the same batches, and the replicas together must read the batches that one process
would read. torch's DataLoader shuffles with the global generator, and does not save its position.
DistributedSampler distributes single samples, so the batches depend on the number of replicas. With
ResumableDataLoader, the order depends only on the seed and the epoch. `Share` divides the samples of each step among
the replicas, and the loader counts the batches that the training loop takes.
"""

import logging
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, RandomSampler, SequentialSampler

from pipeshard.batch.read import collate
from pipeshard.data.order import Order, packed, refuse_unseeded, saved
from pipeshard.data.place import OVER, LoaderPlace, Peekable
from pipeshard.data.seeded import KeyedSampler, SeededCollate, SeededSamples
from pipeshard.data.share import Share, SharedCollate, SharedSampler, SharedStream, length_of
from pipeshard.errors import CheckpointError, ConfigurationError, UsageError, counted, summary
from pipeshard.graph.rng import Draws

logger = logging.getLogger("pipeshard")


class Failed(NamedTuple):
    """An error that takes the place of a batch, so that `Peekable` can look ahead without losing the error."""

    error: Exception

    @property
    def has_read_nothing(self) -> bool:
        """Whether the workers exceeded `timeout`. In this case, the next call reads the batch that they did not load in
        time."""
        return str(self.error).startswith("DataLoader timed out")


class Batches(Iterator[Any]):
    """An iterator over the batches of one epoch. It updates the number of batches in `place`. The iterator holds no
    reference to the loader (see LoaderPlace)."""

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
        """Whether this is the loader's newest iterator."""
        return self.number == self.place.iterators

    def is_over(self) -> bool:
        """Whether no batch is left. To find out, this method may load the next batch."""
        return self.batches.is_over()

    def __next__(self) -> Any:
        if self.number <= self.place.outdated:
            raise UsageError(
                "this iterator was created before the position of its dataloader was loaded or set, and would continue "
                "from the old position: call iter(dataloader) after load_training_state, load_state_dict, set_epoch or "
                "set_start_index"
            )
        batch = next(self.batches, OVER)
        if isinstance(batch, Failed):
            if not batch.has_read_nothing:
                self._count()  # the next call reads the next batch, as on ranks that loaded this batch
            try:
                raise batch.error
            finally:
                del batch  # the error refers to this frame: a cycle would keep the workers
        if batch is OVER:
            if self.is_counted and self.place.begun:
                if not self.place.batches:
                    logger.warning(
                        "a dataloader yielded no batch in epoch %d: its sampler or stream is empty, yields fewer "
                        "samples than a step needs, can be iterated only once, or has a state_dict that contains a "
                        "position within an epoch",
                        self.place.epoch,
                    )
                self.place.counted = self.place.batches
                self.place.set(self.place.epoch + 1)
            self.share.has_warned = True  # the next epoch's workers copy the share, and would warn again
            raise StopIteration
        self._count()
        return batch

    def _count(self) -> None:
        if self.is_counted:
            self.place.batches += 1
            if self.sampler is not None and self.place.batches == self.length:
                self.sampler.finish()
        else:
            self.place.behind = self.place.iterators


WORKERS = 1_000_003  # distance between the worker seeds of two replicas, whose workers then augment differently


class ResumableDataLoader(DataLoader[Any]):
    """A DataLoader whose order depends only on the seed and the epoch, and whose position can be saved.

    With `num_replicas` n, the replicas together read `batch_size` x n consecutive samples of that order per step, and
    this loader loads block `replica` of the n blocks. If concatenated, the replicas' batches equal the batches of one
    process with n times the batch size. If fewer than `batch_size` x n samples are left for the last step, these
    samples are divided evenly among the replicas, and the first replicas read one more sample if necessary. If fewer
    samples than replicas are left, these samples are omitted with a warning. With `drop_last`, an incomplete last step
    is always omitted. Every replica therefore has the same number of batches. Your own `sampler` defines the order for
    all replicas. With a `batch_sampler`, or with batch_size=None, each replica loads every n-th batch. Every replica
    reads all of a stream (an IterableDataset) and keeps its own share. With workers, each worker reads all of its copy
    of the stream, and keeps the replica's share.

    `epoch` counts from 0. `batches` is the number of batches that the training loop has taken in this epoch (workers
    may have loaded more), and `remaining` is the number of batches that the loop can still take. After
    `load_state_dict(...)`, the loader continues with the next batch. The loader does not load earlier batches again,
    except from an IterableDataset, which must be read up to the saved position.

    Before each epoch, the loader seeds every random generator of a sampler, including generators of nested samplers.
    While samplers run, the process's generators are also seeded. The loader calls `set_epoch` on every sampler and
    stream that defines this method, and on a dataset that also has an attribute `epoch`. The state that a sampler keeps
    from one epoch to the next is saved with the position: the sampler's `state_dict()` or, if the sampler has no such
    method, its changed attributes with plain values. The random numbers of the dataset and the collator depend only on
    seed, epoch, batch and replica, with any number of workers. The random numbers of a stream depend on seed, epoch,
    worker and the position in the stream. Loading a batch does not change the state of the process's generators. Unless
    the dataset is a stream, `dataloader.sampler` (or `batch_sampler`, if you passed one) has the methods `set_epoch`
    and `set_start_index`.

    Args:
        batch_size: the number of samples in one replica's batch.
        seed: an integer that, together with the epoch, determines the order of the samples and the workers' seeds.
        replica: the index of this loader's share of the data.
        num_replicas: the number of shares.
        options: DataLoader's other arguments. If a `generator` is given, its initial seed replaces `seed`. Without a
            `collate_fn`, samples with lists of numbers are collated by transformers' default_data_collator.

    Raises ConfigurationError for:
    - a sampler together with shuffle=True;
    - a sampler or a stream that already selects one of several shares;
    - a DataPipe with a `sharding_filter()`, on several ranks;
    - a stream of `datasets` that was shuffled or interleaved without a seed;
    - `in_order=False`;
    - an invalid `seed` or `replica`.
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
        if not options.get("in_order", True):
            raise ConfigurationError(
                "in_order=False is not supported: batches would be read in the order in which workers finish, so "
                "stages would read different batches, and a resumed run would repeat some batches and skip others. "
                "Remove in_order=False"
            )
        generator = options.pop("generator", None)
        seed = generator.initial_seed() if generator else seed
        if not isinstance(seed, Integral):
            raise ConfigurationError(f"seed must be an integer, the same on every rank, got {seed!r}")
        self.place = LoaderPlace(seed=int(seed))
        self._newest: weakref.ref[Batches] | None = None
        self._sampler: SharedSampler | None = None
        self._samples = length_of(dataset)
        kind = "batch_sampler" if options.get("batch_sampler") is not None else "sampler"
        size = 1 if kind == "batch_sampler" else batch_size or 1  # entries of the order per batch
        self._share = Share(size, replica, num_replicas, bool(options.get("drop_last")))
        self.shared_by = num_replicas  # PipelineTrainer refuses to evaluate with a loader that replicas share
        self._workers = torch.Generator()
        if isinstance(dataset, IterableDataset):
            options["shuffle"] = shuffle  # DataLoader refuses shuffle=True for a stream
            refuse_unseeded(dataset)
            self._order = Order(dataset)
            _refuse_shares(self._order)
            if num_replicas > 1 or (dist.is_initialized() and dist.get_world_size() > 1):
                _refuse_sharding(self._order)
        else:
            sampler: Any = options.get(kind)
            generator = torch.Generator()
            if sampler is None:
                sampler = RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)  # type: ignore[arg-type]
            elif shuffle:
                raise ConfigurationError(
                    f"shuffle=True is not supported with {kind}=..., which already sets the order: pass only one"
                )
            if getattr(sampler, "generator", self) is None:
                sampler.generator = generator
            self._order = Order(sampler, dataset)
            _refuse_shares(self._order)
            self._sampler = options[kind] = SharedSampler(self._order, self._share, self.place)
        self._began = self._order.state()  # the order's state before the epoch
        self._moment = torch.zeros(3, dtype=torch.int64)  # seed, epoch, and the epoch for the stream's set_epoch
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
        """The number of batches left in the newest iterator. Before the first iterator is created, the number of
        batches in an epoch."""
        return len(self) - self.batches

    def __len__(self) -> int:
        """The number of batches of an epoch. For a stream with several workers, the number is an estimate until one
        epoch has been read completely. The estimate assumes that all workers have the same number of samples."""
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
        self.place.begin()
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
            batches = After(super().__iter__(), skip, self._order.root)
        new = Batches(batches, self.place, self._sampler, self._share, self._length)
        self._newest = weakref.ref(new)
        return new

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Context manager in which DataLoader creates iterators whose random numbers depend only on the seed, the
        position and the replica (for a stream, also on the worker)."""
        parts = ("dataset", "collate_fn", "sampler", "batch_sampler")
        own = {name: self.__dict__[name] for name in parts}
        new = dict(own)
        replica = self._share.replica
        if self._sampler is not None:
            new["dataset"] = SeededSamples(self.dataset, self.collate_fn)
            new["collate_fn"] = SeededCollate(new["dataset"], is_batched=self.batch_sampler is not None)
            kind = "sampler" if self.batch_sampler is None else "batch_sampler"
            new[kind] = KeyedSampler(own[kind], self.place, replica)
        elif self._share.replicas > 1 or not isinstance(self.dataset, IterDataPipe):
            new["collate_fn"] = SharedCollate(self.collate_fn, replica)
            new["dataset"] = SharedStream(self.dataset, self._share, new["collate_fn"], self._moment)  # type: ignore[arg-type]
        self.__dict__.update(new)
        try:
            yield
        finally:
            self.__dict__.update(own)

    def set_epoch(self, epoch: int) -> None:
        """Start the next iterator in this epoch (see `LoaderPlace.set_epoch`)."""
        self.place.set_epoch(epoch)

    @property
    def _length(self) -> int | None:
        """The number of batches of an epoch, or None if it is unknown."""
        return length_of(self) if self._sampler is not None or self.num_workers <= 1 else None

    def _has_ended(self) -> bool:
        """Whether all batches of this epoch have been taken. False before the first batch."""
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
        """The position of the next batch, the same on every replica: numbers, and the states that samplers keep.

        If the length is unknown, this method may load the next batch, to determine whether the epoch is over.

        Raises UsageError if an older iterator has been read since the newest iterator was created, and CheckpointError
        for a sampler's state that cannot be saved.
        """
        if self.place.is_left:
            raise UsageError(
                "this dataloader has no position to save: a batch was read from an older iterator, but only the newest "
                "iterator counts its batches, so a resumed run would skip the rest of the older iterator's epoch. To "
                "evaluate or read a batch (next(iter(dataloader))) within an epoch, create another dataloader"
            )
        ended = self._has_ended()
        epoch, batches = (self.epoch + 1, 0) if ended else (self.epoch, self.batches)
        order = self._began if self.place.begun and not ended else self._order.state()
        kept = {"order": packed(order)} if order else {}
        if batches in self.place.last_entries and not ended:
            kept["last_entry"] = saved(self.place.last_entries[batches])
        return {"seed": self.seed, "epoch": epoch, "batches": batches, **self._sizes(), **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iterator at a saved position. The number of replicas may have changed since the save, as long
        as all replicas together read the same number of samples per step. Iterators created earlier raise UsageError
        when they are read.

        Raises CheckpointError if the data, the sampler, the number of samples per step, or a stream's number of workers
        has changed.
        """
        sizes = self._sizes()
        # States saved by older versions lack these keys: they are states of one replica, and do not contain a stream's
        # number of workers.
        complete = {"batches_at_once": 1, "workers": sizes.get("workers"), **state}
        former = {name: complete.get(name) for name in sizes}
        if former != sizes:
            raise CheckpointError(
                f"the data position was saved with {former}, but this dataloader has {sizes} (batch_size counts all "
                "replicas together, batches_at_once is the number of replicas, and workers is num_workers, but at "
                "least 1). Create the dataloader from the same data with the same sizes, or pass dataloader=None to "
                "load_training_state to start at the beginning"
            )
        self._order.load_state(state.get("order", {}))
        self.place.seed, epoch, batches = (int(state[name] or 0) for name in ("seed", "epoch", "batches"))
        self.place.move(epoch, batches)
        if "last_entry" in state:
            self.place.last_entries[batches] = state["last_entry"]
        if batches and batches == self._length:  # the replicas that saved the position had one more batch to read
            if self._sampler is not None and "order" in state:
                self._order.set_epoch(epoch)
                self._order.seed(self.seed, epoch)
                self._sampler.run_through()
            self.place.set(epoch + 1)

    def _sizes(self) -> dict[str, int | None]:
        """The sizes that must equal the sizes of a saved position: batch size (or the number of batches read together),
        number of samples and, for a stream, number of workers."""
        n = self._share.replicas
        if self.batch_size is None:
            sizes = {"batch_size": None, "batches_at_once": n, "samples": self._samples}
        else:
            sizes = {"batch_size": self.batch_size * n, "samples": self._samples}
        if self._sampler is None:
            sizes["workers"] = max(1, self.num_workers)  # each worker reads a part, and their batches alternate
        return sizes


class After(Iterator[Any]):
    """The batches after the first `count` batches, which were read before the position was saved. If loading a batch
    raises an error, the iterator yields Failed."""

    def __init__(self, batches: Iterator[Any], count: int, stream: Any) -> None:
        self.batches, self.count, self.stream = batches, count, stream
        self.skipped, self.has_warned = 0, False

    def __next__(self) -> Any:
        last = self._skip()
        batch = self._read()
        if batch is OVER:
            raise last.error if isinstance(last, Failed) else StopIteration
        return batch

    def _read(self) -> Any:
        try:
            return next(self.batches, OVER)
        except Exception as error:
            return Failed(error)

    def _skip(self) -> Any:
        """Skip the first `count` batches, and return the last batch that was skipped. A batch that raises an error is
        also skipped, unless the stream ends after this batch: the batch may have failed before the position was saved.
        Raises CheckpointError if the stream has fewer batches."""
        batch = None
        while self.skipped < self.count:
            last, batch = batch, self._read()
            if batch is OVER:
                raise last.error if isinstance(last, Failed) else self._ended()
            if isinstance(batch, Failed):
                if batch.has_read_nothing:
                    raise batch.error
                self._warn(batch.error)
            self.skipped += 1
        return batch

    def _warn(self, error: Exception) -> None:
        if not self.has_warned:
            logger.warning(
                "batch %d of an epoch of %s raised an error while the loader skipped the batches that were read before "
                "the data position was saved (only the first such error is logged): %s",
                self.skipped,
                type(self.stream).__name__,
                summary(error),
            )
        self.has_warned = True

    def _ended(self) -> CheckpointError:
        return CheckpointError(
            f"{type(self.stream).__name__} ended after {counted(self.skipped, 'batch')} of an epoch, but {self.count} "
            "had been read when the data position was saved. The loader restores the state that the stream had at the "
            "start of the epoch (its state_dict or, without one, its changed attributes with plain values), and reads "
            "the stream up to the position. The state itself must therefore not be a position in the stream. Correct "
            "the stream's state_dict, or pass dataloader=None to load_training_state to start at the beginning"
        )


def _refuse_shares(order: Order) -> None:
    for one, count in order.shares():
        raise ConfigurationError(
            f"{type(one).__name__} already splits the data into {count} shares, so stages of a pipeline could read "
            "different batches, or each replica could read only a part of its share. Pass a sampler over the whole "
            "dataset (or shuffle=True), or a stream without split_dataset_by_node. pipeshard itself divides the "
            "samples among the replicas"
        )


def _refuse_sharding(order: Order) -> None:
    """Raise ConfigurationError for a DataPipe that torch shards by the rank of the process."""
    for one in order.members.values():
        if isinstance(one, IterDataPipe) and hasattr(one, "apply_sharding"):
            raise ConfigurationError(
                f"{type(one).__name__} shards the stream by the rank of the process, so stages would read different "
                "samples, and workers of different replicas would read the same samples. Remove sharding_filter(): the "
                "loader itself divides the samples among the replicas. If num_workers > 1, shard the stream among the "
                "workers with torch's get_worker_info()"
            )
