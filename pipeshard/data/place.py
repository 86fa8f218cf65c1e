"""Place: the position of a loader in its data."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass
class LoaderPlace:
    """The position of a loader in its data: the epoch, the number of batches taken, and whether an iterator exists.

    The sampler holds this object instead of the loader. A reference cycle with the loader would leave persistent
    workers to the garbage collector, which may close their pipes before it stops them: each worker then takes 5 s to
    exit.
    """

    epoch: int = 0
    batches: int = 0
    begun: bool = False
    seed: int = 0
    iterators: int = 0  # number created; only the newest counts batches
    outdated: int = 0  # number created before the position was loaded or set; these must not be read
    counted: int | None = None  # number of batches in the last epoch that was read completely

    def set(self, epoch: int, batches: int = 0) -> None:
        self.epoch, self.batches, self.begun = epoch, batches, False

    def move(self, epoch: int, batches: int) -> None:
        """Set the position of the next iterator. Existing iterators are outdated: they would read from the position at
        which they were created, while this position is counted."""
        self.set(epoch, batches)
        self.outdated = self.iterators

    def set_epoch(self, epoch: int) -> None:
        """Start the next iterator at the first batch of this epoch; if it would start in this epoch anyway, keep the
        position."""
        if epoch != self.epoch + self.begun:
            self.set(epoch)


OVER = object()  # no entry is left


class Peekable(Iterator[Any]):
    """An iterator that can look ahead to find whether it is exhausted; it reads each entry in the context `inside`."""

    def __init__(self, entries: Iterator[Any], inside: AbstractContextManager[None]) -> None:
        self._entries, self._inside = entries, inside
        self._next: list[Any] = []  # the entry read ahead

    def is_over(self) -> bool:
        if not self._next:
            with self._inside:
                self._next.append(next(self._entries, OVER))
        return self._next[0] is OVER

    def __next__(self) -> Any:
        if self.is_over():
            raise StopIteration
        return self._next.pop()
