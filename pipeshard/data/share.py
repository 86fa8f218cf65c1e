"""Share: the part of an order of samples that one replica reads."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

logger = logging.getLogger("pipeshard")


def length_of(sized: Any) -> int | None:
    """The length of an object, or None if it has no length."""
    try:
        return len(sized)
    except TypeError:
        return None


@dataclass
class Share:
    """One replica's part of an order: one block of every `size * replicas` consecutive entries."""

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
        """The number of this replica's entries in an order of `entries` entries."""
        steps, remainder = divmod(entries, self.step)
        last = self._block(remainder, self.replica) if remainder and self._keeps(remainder) else 0
        return steps * self.size + last

    def _keeps(self, remainder: int) -> bool:
        """Whether an incomplete last step of `remainder` entries is read. It is read only without `drop_last`, and only
        if there is an entry for each replica (otherwise, warns once)."""
        if remainder < self.replicas and not (self.drop_last or self.has_warned):
            self.has_warned = True
            logger.warning(
                "the last %d samples of each epoch (batches, if the DataLoader does not batch) are dropped, because "
                "they are fewer than the %d replicas",
                remainder,
                self.replicas,
            )
        return remainder >= self.replicas and not self.drop_last

    def _block(self, together: int, replica: int) -> int:
        return together // self.replicas + (replica < together % self.replicas)
