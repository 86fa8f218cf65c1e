"""Place: the position of a loader in its data."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


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
