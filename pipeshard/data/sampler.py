"""Sampler: one replica's share of the entries of a sampler."""

import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import Sampler

from pipeshard.data.order import Order
from pipeshard.data.place import LoaderPlace, Peekable
from pipeshard.data.share import Share, length_of
from pipeshard.errors import ConfigurationError
from pipeshard.graph.rng import Draws


class SharedSampler(Sampler[Any]):
    """One replica's share of a sampler, without the sampler's first `skip` entries, and with methods to set the epoch
    and the position. The sampler runs with generators that depend only on seed and epoch."""

    def __init__(self, order: Order, share: Share, place: LoaderPlace) -> None:
        self.sampler, self.order, self.share, self.place, self.skip = order.root, order, share, place, 0
        self.batch_size: int | None = getattr(order.root, "batch_size", None)
        self._entries: weakref.ref[Peekable] | None = None  # the newest iterator's entries
        length_of(self)  # warns now about samples that are dropped, if the length is known

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
            raise ConfigurationError(
                f"start_index={start_index} is not at the start of a batch of {self.share.size} samples: pass a "
                "non-negative multiple of the batch size"
            )
        self.place.move(self.place.next_epoch, batches)
