"""Limit: the time that a proof may take."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipeshard.verify.local import Unproven

FORWARDS = 3  # duration of a step, in forwards: a backward takes about as long as two forwards
STEPS_LEFT = 4  # smallest number of steps of a proof after its first one
STEPS_MORE = 5  # the smallest time limit of a proof's fallback, in steps of the unsplit model


class TooMuch(Unproven):
    """The proof takes more time or memory than allowed."""


class Limit:
    """The time limit of a proof in seconds (None: no limit). `tick` checks the limit and calls `note`. `step` is the
    duration of a step of the unsplit model in seconds."""

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

    @contextmanager
    def measuring(self, model: nn.Module) -> Iterator[None]:
        """Context manager for the first step of the unsplit model. Times each call of the second layer of the
        ModuleList with the most parameters (the first layer also initializes libraries). Raises TooMuch if
        STEPS_LEFT steps would take too long."""
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
        layers = max(lists, key=lambda one: sum(p.numel() for p in one.parameters()), default=None)
        if layers is None:
            yield
            return
        start = 0.0

        def begins(*_: Any) -> None:
            nonlocal start
            start = time.perf_counter()

        def ends(*_: Any) -> None:
            self.step = FORWARDS * len(layers) * (time.perf_counter() - start)
            self.refuse_long(STEPS_LEFT * self.step)

        with layers[1].register_forward_pre_hook(begins), layers[1].register_forward_hook(ends):
            yield

    def allow_more(self) -> None:
        """Restart the limit for the next part of the proof, and allow at least the time of STEPS_MORE steps."""
        if self.seconds is not None:
            self.until = self.elapsed + max(self.seconds, STEPS_MORE * self.step)

    def remove(self) -> None:
        """Remove the limit. Called after a difference is found: the proof must then determine whether rounding is the
        cause."""
        self.until = None
