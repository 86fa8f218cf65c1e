"""Progress: what this process is doing, and which ranks it waits for."""

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn

from pipeshard.distributed.groups import ranks_of
from pipeshard.schedule.program import Action, Kind

Timeout = float | str | None | Mapping[str, Any]
STEPS = ("execute_pipeline", "optimizer.step")
OTHER_CALLS = 3  # the timeout outside a step (a save, a load, a boost), as a multiple of the timeout of a step's action
COMPUTES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight gradients"}


class Progress:
    """The current activity of a rank. The training thread records this activity with only a few assignments, and the
    watch reads it.

    Attributes:
        call: the current collective call of the user's program, such as `execute_pipeline`, or "" between calls.
        number: the number of collective calls of any kind that this process has begun. It is the same on every rank.
        action: the current action of a step, or the purpose of a wait.
        waits: the global ranks that this process waits for, or () while it computes.
        since: when `call`, `action` or `waits` last changed, in seconds of `time.monotonic`.
        longest: the longest time between two changes within a step so far, in seconds.
        has_stepped: whether a call of `optimizer.step` has ended. The first training step may take longer, since it may
            compile or allocate states.
        in_flight: whether messages are in flight that no rank would receive if the step ended now.
        history: the last actions and calls, each with its start time.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset all attributes, for a new world."""
        self.call, self.number, self.in_flight = "", 0, False
        self.action: Action | str | None = None
        self.history: deque[tuple[float, Action | str]] = deque(maxlen=50)
        self.waits: Sequence[int] = ()
        self.since, self.longest, self.has_stepped = time.monotonic(), 0.0, False
        self._model: Callable[[], nn.Module | None] = lambda: None  # a weak reference
        self._chunks: Sequence[int] = ()

    def begin(self, model: nn.Module, chunks: Sequence[int]) -> None:
        """Set the model that runs from now on, and this process's stages of the model (`chunks`), for use in errors."""
        self._model, self._chunks = weakref.ref(model), chunks

    def start(self, action: Action | str) -> None:
        """Record the start of an action of a step: an Action of the schedule, or the name of another action."""
        now = time.monotonic()
        if self.call in STEPS:  # not during the verification at boost
            self.longest = max(self.longest, now - self.since)
        self.action, self.since = action, now
        self.history.append((now, action))

    def wait(self, work: Any, ranks: Sequence[int]) -> None:
        """Call `work.wait()`, and record that this process waits for these ranks. If `work.wait()` raises within a
        collective call, `waits` keeps the ranks."""
        self.wait_until(work.wait, ranks)

    def wait_until(self, done: Callable[[], Any], ranks: Sequence[int]) -> None:
        """Like `wait`, for a function that returns when the ranks have responded."""
        self.waits, self.since = ranks, time.monotonic()
        try:
            done()
        except BaseException:
            self.waits = ranks if self.call else ()
            raise
        now = time.monotonic()
        if self.action is not None and self.call in STEPS:
            self.longest = max(self.longest, now - self.since)
        self.waits, self.since = (), now

    def wait_in(self, group: dist.ProcessGroup, work: Any) -> None:
        """Like `wait`, for a collective that waits for the other ranks of `group`."""
        own = group.rank()
        self.wait(work, [rank for place, rank in enumerate(ranks_of(group)) if place != own])

    def enter(self, call: str) -> None:
        self.number += 1
        self.call, self.action, self.waits, self.since = call, None, (), time.monotonic()
        self.history.append((self.since, call))

    def leave(self) -> None:
        self.has_stepped |= self.call == STEPS[-1]
        self.call, self.action, self.waits, self.since, self.in_flight = "", None, (), time.monotonic(), False

    @property
    def present(self) -> int:
        """The number of the current call or, between calls, of the next call."""
        return self.number + (not self.call)

    @property
    def where(self) -> str:
        """The current activity in words, such as `execute_pipeline, F3@2 (forward of microbatch 3 on stage 2)`."""
        if not self.call:
            return "the program, between two calls"
        if self.action is None or isinstance(self.action, str):
            return ", ".join(filter(None, [self.call, self.action]))
        kind, i, stage = self.action
        chunk = f", chunk {list(self._chunks).index(stage)}" if len(self._chunks) > 1 and stage in self._chunks else ""
        what = f"{COMPUTES[kind]} of microbatch {i} on stage {stage}{chunk}" if kind.is_compute else f"microbatch {i}"
        return f"{self.call}, {self.action} ({what})"

    def module(self, frames: Iterable[FrameType]) -> str:
        """The name of the innermost module whose code runs in these frames (outermost first), or "" for none."""
        model = self._model()
        if model is None:
            return ""
        names = {id(module): name for name, module in model.named_modules() if name}
        found = [names[id(frame.f_locals.get("self"))] for frame in frames if id(frame.f_locals.get("self")) in names]
        return found[-1] if found else ""


NOW = Progress()  # the progress of this process, whose main thread trains
_of_rank: ContextVar[Progress | None] = ContextVar("progress", default=None)


def own_progress() -> Progress:
    """Return the Progress of the rank that this thread runs: the process itself, or a rank of a local world."""
    return _of_rank.get() or NOW


@contextmanager
def running(progress: Progress) -> Iterator[None]:
    """Context manager that sets the progress of the rank that this thread runs."""
    token = _of_rank.set(progress)
    try:
        yield
    finally:
        _of_rank.reset(token)


def allowed(timeout: Timeout) -> float:
    """The number of seconds that the current action or wait may last according to the plugin's `timeout`. Infinity
    means no limit."""
    kind = "step" if NOW.call in STEPS else "other" if NOW.call else "between"
    factor, limit = 1 if kind == "step" else OTHER_CALLS, timeout
    if isinstance(timeout, Mapping):
        factor, limit = 1, timeout.get(kind, factor * 600.0)
    if limit == "adaptive":
        limit = max(30.0 if NOW.has_stepped else 600.0, 20 * NOW.longest)
    return factor * limit if isinstance(limit, int | float) else float("inf")


def collective_of(frames: Sequence[FrameType]) -> FrameType | None:
    """Return the innermost frame if it is a torch.distributed function, such as `barrier`, that waits for other ranks.
    Otherwise, return None."""
    return frames[-1] if frames and frames[-1].f_code.co_filename.endswith("/distributed_c10d.py") else None


def main_stack() -> list[FrameType]:
    """The frames of the main thread, outermost first."""
    frame, frames = sys._current_frames().get(threading.main_thread().ident or 0), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]
