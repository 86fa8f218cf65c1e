"""Dataloader: the same batches on every stage of a replica, in an order that can be resumed at any batch.

All stages of a replica have to read the same batches, and the replicas' batches together those of one process. torch's
DataLoader draws its order from a global generator and forgets its place; DistributedSampler deals out single samples,
so that another number of replicas reads other batches. Here the order depends on seed and epoch alone, `Share` deals
out whole steps of it, and the loader counts the batches that were taken.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from pipeshard.batch.read import collate
from pipeshard.errors import CheckpointError, ConfigurationError
from pipeshard.graph.rng import Draws

logger = logging.getLogger("pipeshard")


def length_of(sized: Any) -> int | None:
    """Its length; None where it has none."""
    try:
        return len(sized)
    except TypeError:
        return None


@dataclass
class Share:
    """One replica's part of an order: of every `size * replicas` entries in a row, its own block."""

    size: int
    replica: int
    replicas: int
    drop_last: bool
    has_warned: bool = False  # of samples that are left out

    @property
    def step(self) -> int:
        """The entries that all replicas read together in one step."""
        return self.size * self.replicas

    def of(
        self, entries: Iterable[Any], around: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Iterator[Any]:
        """Those of this replica; entries are asked for inside `around()`."""
        entries = iter(entries)
        while True:
            with around():
                together = list(islice(entries, self.step))
            if not together or (len(together) < self.step and not self._keeps(len(together))):
                return
            first = sum(self._block(len(together), replica) for replica in range(self.replica))
            yield from together[first : first + self._block(len(together), self.replica)]

    def length(self, entries: int) -> int:
        """How many of so many entries in all are this replica's."""
        steps, remainder = divmod(entries, self.step)
        last = self._block(remainder, self.replica) if remainder and self._keeps(remainder) else 0
        return steps * self.size + last

    def _keeps(self, remainder: int) -> bool:
        """Whether the last few entries, fewer than a step's, are a batch of every replica."""
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
class Place:
    """Where in the data a loader is: its epoch, the batches taken of that, and whether an iterator of it was made.

    The sampler knows this, not the loader. In a circle with the loader, the workers that persist would be ended by the
    garbage collector, which may close their pipes before they are told: they take 5 s each then.
    """

    epoch: int = 0
    batches: int = 0
    begun: bool = False

    def set(self, epoch: int, batches: int = 0) -> None:
        self.epoch, self.batches, self.begun = epoch, batches, False

    def set_epoch(self, epoch: int) -> None:
        """Make the next iterator one of this epoch, from its first batch on; if it is one of this epoch by itself, it
        stays where it is."""
        if epoch != self.epoch + self.begun:
            self.set(epoch)


class SharedSampler(Sampler[Any]):
    """A replica's share of a sampler, without the first `skip` entries of that, and with what other samplers have: the
    epoch, and where in it to begin."""

    def __init__(self, sampler: Any, share: Share, place: Place, draws: Draws) -> None:
        self.sampler, self.share, self.place, self.draws, self.skip = sampler, share, place, draws, 0
        self.batch_size: int | None = getattr(sampler, "batch_size", None)
        length_of(self)  # warns at once of what is left out, if the length is known

    def __iter__(self) -> Iterator[Any]:
        return self.share.of(islice(iter(self.sampler), self.skip, None), self.draws.paused)

    def __len__(self) -> int:
        return self.share.length(len(self.sampler))

    def set_epoch(self, epoch: int) -> None:
        self.place.set_epoch(epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def set_start_index(self, start_index: int) -> None:
        """Begin after so many of this replica's samples (of its batches, where it gets whole ones)."""
        batches, remainder = divmod(start_index, self.share.size)
        if remainder or batches < 0:
            raise ConfigurationError(
                f"start_index={start_index} is within a batch of {self.share.size} samples: give a multiple of that"
            )
        self.place.set(self.place.epoch + self.place.begun, batches)


class SharedStream(IterableDataset[Any]):
    """A replica's share of a stream, which a worker reads of its own copy; other attributes are the stream's own."""

    stream: IterableDataset[Any]
    share: Share

    def __init__(self, stream: IterableDataset[Any], share: Share) -> None:
        self.__dict__.update(stream=stream, share=share)

    def __iter__(self) -> Iterator[Any]:
        return self.share.of(self.stream)

    def __len__(self) -> int:
        return self.share.length(len(self.stream))  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "stream" not in self.__dict__:  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.stream, name, value)  # worker_init_fn may set on each copy what to read


WORKERS = 1_000_003  # how far apart the seeds of two replicas' workers are, so that they augment differently


class ResumableDataLoader(DataLoader[Any]):
    """A DataLoader whose order depends on the seed and the epoch alone, and which knows its place in it.

    With `num_replicas` n, every step of all replicas together reads `batch_size` x n samples in a row of that order,
    and this one loads the `replica`-th of n blocks of them: the replicas' batches, one behind the other, are those of
    one process with n times the batch size. Where fewer are left at the end, each replica gets as many, the first
    ones one more where they do not divide; fewer samples than replicas are left out, with a warning, and `drop_last`
    leaves out all of them. So every replica gets equally many batches. A `sampler` of one's own is the order of all
    replicas; of a `batch_sampler`, or with batch_size=None, each replica gets every n-th batch. A stream (an
    IterableDataset) is read by every replica, and each keeps its own; with workers, this is so for each worker's copy.

    `epoch` counts from 0, `batches` are those that the training loop took of this epoch (workers may be ahead), and
    `remaining` those that it can still take. A loader that was given a `state_dict()` goes on with the next batch; what
    comes before is not loaded, except from an IterableDataset, which has to be read to that place. The generator of
    a sampler of one's own is seeded here; without one, a sampler must give the same order each time it is asked.
    What the dataset and the collator draw from the generators of torch, `random` and numpy depends on seed, epoch and
    batch too, and leaves the program's own generators as they were. `dataloader.sampler` has `set_epoch` and
    `set_start_index`.

    Args:
        batch_size: the samples of one replica's batch.
        seed: what the order of the samples and the workers' seeds depend on, together with the epoch.
        replica: which share of the data this one is.
        num_replicas: how many shares there are.
        options: DataLoader's own. A `generator` among them gives the seed; without a `collate_fn`, samples with lists
            of numbers are put together by transformers' default_data_collator.

    Raises ConfigurationError for a sampler that is to be shuffled, or that already takes a replica's share.
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
        self.seed = generator.initial_seed() if generator else seed
        self.place, self.draws = Place(), Draws()
        self._sampler: SharedSampler | None = None
        self._samples = length_of(dataset)
        kind = "batch_sampler" if options.get("batch_sampler") is not None else "sampler"
        size = 1 if kind == "batch_sampler" else batch_size or 1  # of a batch, in entries of the order
        self._share = Share(size, replica, num_replicas, bool(options.get("drop_last")))
        order, self._workers = torch.Generator(), torch.Generator()  # workers that persist keep their seeds
        self._generators = [order]
        if isinstance(dataset, IterableDataset):
            options["shuffle"] = shuffle  # which DataLoader refuses
            if num_replicas > 1:
                dataset = SharedStream(dataset, self._share)
        else:
            sampler: Any = options.get(kind)
            if sampler is None:
                sampler = RandomSampler(dataset, generator=order) if shuffle else SequentialSampler(dataset)  # type: ignore[arg-type]
            elif shuffle:
                raise ConfigurationError(f"shuffle=True, but the order is that of {kind}=...: give one of the two")
            _refuse_shares(sampler)
            if getattr(sampler, "generator", self) is None:
                sampler.generator = order
            self._generators += [g for g in [getattr(sampler, "generator", None)] if isinstance(g, torch.Generator)]
            self._sampler = options[kind] = SharedSampler(sampler, self._share, self.place, self.draws)
        if options.get("collate_fn") is None and (batch_size is not None or kind == "batch_sampler"):
            options["collate_fn"] = collate
        super().__init__(dataset, batch_size, generator=self._workers, **options)

    @property
    def epoch(self) -> int:
        return self.place.epoch

    @property
    def batches(self) -> int:
        return self.place.batches

    @property
    def remaining(self) -> int:
        """How many batches the iterator made last can still give, or, before any was made, the next one can."""
        return len(self) - self.batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.place.begun:
            self.place.set(self.epoch + 1)
        self.place.begun = True
        self._workers.manual_seed(self.seed + self.epoch + WORKERS * self._share.replica)
        for generator in self._generators:
            generator.manual_seed(self.seed + self.epoch)
        if self._sampler is None:
            return self._counted(super().__iter__(), 0, self.batches)
        self._sampler.skip = self.batches * self._share.step
        return self._counted(super().__iter__(), self.batches, self.batches)

    def _counted(self, batches: Iterator[Any], number: int, begin: int) -> Iterator[Any]:
        """Those from number `begin` of the epoch on; the first of all is `number`."""
        done = object()
        while True:
            with self.draws.of(self.seed, self.epoch, number, self._share.replica):
                batch = next(batches, done)
            if batch is done:
                break
            number += 1
            if number > begin:
                self.place.batches += 1
                yield batch
        self.place.set(self.epoch + 1)
        self._share.has_warned = True  # at the end; workers of the next epoch get a copy of this

    def set_epoch(self, epoch: int) -> None:
        """Make the next iterator one of this epoch, as `Place.set_epoch` says."""
        self.place.set_epoch(epoch)

    def state_dict(self) -> dict[str, int | None]:
        """The place of the next batch; plain numbers, the same on every replica."""
        ended = self.batches == length_of(self)
        epoch, batches = (self.epoch + 1, 0) if ended else (self.epoch, self.batches)
        return {"seed": self.seed, "epoch": epoch, "batches": batches, **self._sizes()}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Go on there with the next iterator, with any number of replicas that read as many samples a step together.

        Raises CheckpointError where the data or that number of samples are not the same.
        """
        sizes = self._sizes()
        complete = {"batches_at_once": 1, **state}  # which states of one replica once lacked
        saved = {name: complete.get(name) for name in sizes}
        if saved != sizes:
            raise CheckpointError(
                f"the position in the data was saved with {saved}, but this dataloader has {sizes} (batch_size is that "
                "of all replicas together): make it of the same data with the same batch size, or go on with a new "
                "order by dataloader=None"
            )
        self.seed, epoch, batches = (int(state[name] or 0) for name in ("seed", "epoch", "batches"))
        self.place.set(epoch, batches)
        if batches and batches == length_of(self):  # where other replicas left out less at the end
            self.place.set(epoch + 1)

    def _sizes(self) -> dict[str, int | None]:
        """What the number of batches counts: samples, or, of a loader that does not make them itself, batches."""
        n = self._share.replicas
        if self.batch_size is None:
            return {"batch_size": None, "batches_at_once": n, "samples": self._samples}
        return {"batch_size": self.batch_size * n, "samples": self._samples}


def _refuse_shares(sampler: Any) -> None:
    for one in (sampler, getattr(sampler, "sampler", None)):
        if isinstance(one, DistributedSampler) and one.num_replicas > 1:
            raise ConfigurationError(
                f"{type(one).__name__} takes one of {one.num_replicas} shares by itself, so that the stages of a "
                "pipeline would read different batches, and replicas a share of a share: pass a sampler of the whole "
                "order (or shuffle=True), it is cut here"
            )
