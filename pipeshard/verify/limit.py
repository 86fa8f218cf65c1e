"""Limit: the time that a proof may take."""

import time
from collections.abc import Callable

from pipeshard.verify.local import Unproven

STEPS_MORE = 5  # the smallest time limit of a proof's fallback, in steps of the unsplit model


class TooMuch(Unproven):
    """The proof takes more time or memory than it may."""


class Limit:
    """The time limit of a proof in seconds (None: no limit); `note` is called at each check. `step` is the duration of
    a step of the unsplit model in seconds."""

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
        """Raise TooMuch if `more` additional seconds would exceed the limit."""
        if self.until is not None and self.elapsed + more > self.until:
            raise TooMuch(f"the check takes longer than {self.seconds:g} s")

    def allow_more(self) -> None:
        """Restart the limit for the next part of the proof, which may take at least STEPS_MORE steps."""
        if self.seconds is not None:
            self.until = self.elapsed + max(self.seconds, STEPS_MORE * self.step)

    def remove(self) -> None:
        """Remove the limit: there is a difference, and the proof must determine whether rounding is the cause."""
        self.until = None
