"""Share: one replica's part of an order of samples, or of a stream."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, Sampler

from pipeshard.errors import ConfigurationError

if TYPE_CHECKING:
    from pipeshard.dataloader import ResumableDataLoader

logger = logging.getLogger("pipeshard")


def length_of(sized: Any) -> int | None:
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
    told: bool = False  # whether it was said what is left out

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
            if not together:
                return
            if len(together) < self.step and not self._keeps(len(together)):
                return
            first = sum(self._block(len(together), replica) for replica in range(self.replica))
            yield from together[first : first + self._block(len(together), self.replica)]

    def length(self, entries: int) -> int:
        """How many of so many entries in all are this replica's."""
        steps, rest = divmod(entries, self.step)
        return steps * self.size + (self._block(rest, self.replica) if rest and self._keeps(rest) else 0)

    def _keeps(self, rest: int) -> bool:
        """Whether the last few entries, fewer than a step's, are a batch of every replica."""
        if rest < self.replicas and not (self.drop_last or self.told):
            self.told = True
            logger.warning(
                "the last %d of an epoch's samples (of whole batches, where the loader makes none) are left out: "
                "they are fewer than the %d replicas",
                rest,
                self.replicas,
            )
        return rest >= self.replicas and not self.drop_last

    def _block(self, together: int, replica: int) -> int:
        return together // self.replicas + (replica < together % self.replicas)


class From(Sampler[Any]):
    """A replica's share of a sampler, without the first `skip` entries that the sampler would give.

    It has what other samplers are told: the epoch, and where in it to begin.
    """

    def __init__(self, sampler: Any, share: Share, loader: "ResumableDataLoader") -> None:
        self.sampler, self.share, self.loader, self.skip = sampler, share, loader, 0
        self.batch_size: int | None = getattr(sampler, "batch_size", None)
        length_of(self)  # says at once what is left out, if the length is known

    def __iter__(self) -> Iterator[Any]:
        return self.share.of(islice(iter(self.sampler), self.skip, None), self.loader.draws.paused)

    def __len__(self) -> int:
        return self.share.length(len(self.sampler))

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def set_start_index(self, start_index: int) -> None:
        """Begin after so many of this replica's samples (of its batches, where it is given whole ones)."""
        batches, rest = divmod(start_index, self.share.size)
        if rest or batches < 0:
            raise ConfigurationError(
                f"start_index={start_index} is within a batch of {self.share.size} samples: give a multiple of that"
            )
        self.loader.set_start(batches)


class StreamShare(IterableDataset[Any]):
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
        setattr(self.stream, name, value)  # worker_init_fn may tell each copy what to read
