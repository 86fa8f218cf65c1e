"""Limit: the time that a proof may take."""

import time
from collections.abc import Callable

from pipeshard.verify.local import Unproven

STEPS_MORE = 5  # of the unsplit model: the time that the fallback of a proof may take


class TooMuch(Unproven):
    """The proof takes more time or memory than it may."""


class Limit:
    """The seconds that a proof may take; `note` is called whenever they are checked. `step` is the number of seconds
    that a step of the unsplit model takes."""

    def __init__(self, seconds: float | None, note: Callable[[], None]) -> None:
        self.start, self.seconds, self.until, self.note = time.perf_counter(), seconds, seconds, note
        self.step = 0.0

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def tick(self) -> None:
        self.refuse_long()
        self.note()

    def refuse_long(self, more: float = 0.0) -> None:
        """Raise TooMuch if this many more seconds exceed the limit."""
        if self.until is not None and self.elapsed + more > self.until:
            raise TooMuch(f"the check takes longer than {self.seconds:g} s")

    def allow_more(self) -> None:
        """Give the next part its own time, longer for a model with long steps."""
        if self.seconds is not None:
            self.until = self.elapsed + max(self.seconds, STEPS_MORE * self.step)

    def remove(self) -> None:
        """Remove the limit: something differs, and the proof must find out whether rounding is the cause."""
        self.until = None
