"""Place: the position of a loader in its data."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class LoaderPlace:
    """The position of a loader in its data: the epoch, the number of batches taken, and whether an iterator exists.

    The sampler refers to this object instead of the loader. A reference cycle with the loader would leave persistent
    workers to the garbage collector. The garbage collector may close the workers' pipes before it stops the workers,
    and each worker then takes 5 s to exit.
    """

    epoch: int = 0
    batches: int = 0
    begun: bool = False
    seed: int = 0
    iterators: int = 0  # number of iterators created; only the newest counts batches
    outdated: int = 0  # number of iterators created before the position was loaded or set; these must not be read
    behind: int = 0  # number of iterators that existed when an older iterator was last read
    first: int = 0  # number of batches before the newest iterator
    is_kept: bool = False  # set_epoch was called with the epoch of the newest iterator, before its first batch
    counted: int | None = None  # number of batches in the last epoch that was read completely
    last_entries: dict[int, Any] = field(default_factory=dict)  # by n: the sampler's last entry in the first n batches

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iterator."""
        return self.epoch + (self.begun and not (self.is_kept and self._is_unread))

    @property
    def is_left(self) -> bool:
        """Whether an older iterator, whose batches are not counted, has been read since the newest iterator was
        created."""
        return self.behind == self.iterators > self.outdated

    @property
    def _is_unread(self) -> bool:
        """Whether the newest iterator has yielded no batch."""
        return self.begun and self.batches == self.first

    def begin(self) -> None:
        """Count a new iterator, which starts at this position or, if `next_epoch` is a later epoch, at the start of
        `next_epoch`."""
        if self.next_epoch != self.epoch:
            self.set(self.next_epoch)
        self.begun, self.is_kept, self.first = True, False, self.batches
        self.iterators += 1

    def set(self, epoch: int, batches: int = 0) -> None:
        self.epoch, self.batches, self.begun, self.is_kept = epoch, batches, False, False
        self.last_entries = {}

    def move(self, epoch: int, batches: int) -> None:
        """Set the position of the next iterator. Existing iterators become outdated: they would read from the position
        at which they were created, but count batches from this position."""
        self.set(epoch, batches)
        self.outdated = self.iterators

    def set_epoch(self, epoch: int) -> None:
        """Start the next iterator at the first batch of this epoch, and mark existing iterators as outdated. If the
        next iterator would start in this epoch anyway, or the newest iterator is in this epoch and unread, keep the
        position."""
        if self._is_unread and epoch == self.epoch:
            self.is_kept = True
        elif epoch != self.next_epoch:
            self.move(epoch, 0)


OVER = object()  # no entry is left


class Peekable(Iterator[Any]):
    """An iterator that can look ahead to check whether it is exhausted. Each entry is read in the context `inside`."""

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
