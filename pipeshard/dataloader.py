"""Dataloader: the same batches on every stage, in an order that can be gone on with where it was left."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler

from pipeshard.errors import CheckpointError, ConfigurationError


class ResumableDataLoader(DataLoader[Any]):
    """A DataLoader whose order depends on the seed and the epoch alone, and which knows its place in it.

    `epoch` counts from 0, `batches` are those that the training loop took of this epoch (workers may be ahead), and
    `remaining` those that it can still take. A loader that was given a `state_dict()` goes on with the next batch; what
    comes before is not loaded, except from an IterableDataset, which has to be read to that place. The generator of
    a sampler of one's own is seeded here; without one, a sampler must give the same order each time it is asked.

    Args:
        seed: what the order of the samples and the workers' seeds depend on, together with the epoch.
        options: DataLoader's own. A `generator` among them gives the seed.

    Raises ConfigurationError for a sampler that is to be shuffled.
    """

    def __init__(
        self, dataset: Dataset[Any], batch_size: int | None = 1, shuffle: bool = False, seed: int = 1024, **options: Any
    ) -> None:
        given = options.pop("generator", None)
        self.seed, self.epoch, self.batches = given.initial_seed() if given else seed, 0, 0
        self._begun = False  # whether an iterator of this epoch was made
        self._first: _From | None = None
        order, workers = torch.Generator(), torch.Generator()  # two: persistent workers are not seeded every epoch
        self._generators = [order, workers]
        if isinstance(dataset, IterableDataset):
            options["shuffle"] = shuffle  # which DataLoader refuses
        else:
            kind = "batch_sampler" if options.get("batch_sampler") is not None else "sampler"
            sampler: Any = options.get(kind)
            if sampler is None:
                sampler = RandomSampler(dataset, generator=order) if shuffle else SequentialSampler(dataset)  # type: ignore[arg-type]
            elif shuffle:
                raise ConfigurationError(f"shuffle=True, but the order is that of {kind}=...: give one of the two")
            if getattr(sampler, "generator", self) is None:
                sampler.generator = order
            self._generators += [g for g in [getattr(sampler, "generator", None)] if isinstance(g, torch.Generator)]
            self._first = options[kind] = _From(sampler)
        super().__init__(dataset, batch_size, generator=workers, **options)

    @property
    def remaining(self) -> int:
        """How many batches the iterator made last can still give, or, before any was made, the next one can."""
        return len(self) - self.batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._begun:
            self.epoch, self.batches = self.epoch + 1, 0
        self._begun = True
        for generator in self._generators:
            generator.manual_seed(self.seed + self.epoch)
        if self._first is None:
            return self._counted(islice(super().__iter__(), self.batches, None))
        self._first.skip = self.batches * (self.batch_size or 1)  # no batch_size: the sampler's entries are batches
        return self._counted(super().__iter__())

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.batches += 1
            yield batch
        self.epoch, self.batches, self._begun = self.epoch + 1, 0, False

    def state_dict(self) -> dict[str, int | None]:
        """The place of the next batch; plain numbers."""
        ended = self.batches == _length(self)
        epoch, batches = (self.epoch + 1, 0) if ended else (self.epoch, self.batches)
        return {"seed": self.seed, "epoch": epoch, "batches": batches, **self._sizes()}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Go on there with the next iterator. Raises CheckpointError where data or batch size are not the same."""
        sizes = {name: state.get(name) for name in self._sizes()}
        if sizes != self._sizes():
            raise CheckpointError(
                f"the position in the data was saved with {sizes}, but this dataloader has {self._sizes()}: make it of "
                "the same data with the same batch size, or go on with a new order by dataloader=None"
            )
        self.seed, self.epoch, self.batches = (int(state[name] or 0) for name in ("seed", "epoch", "batches"))
        self._begun = False

    def _sizes(self) -> dict[str, int | None]:
        return {"batch_size": self.batch_size, "samples": _length(self.dataset)}


class _From(Sampler[Any]):
    """A sampler without the first `skip` entries that it would give."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.skip = sampler, 0

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self.skip, None)

    def __len__(self) -> int:
        return len(self.sampler)


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None
