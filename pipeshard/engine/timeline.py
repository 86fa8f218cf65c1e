"""Timeline: the start and end of one rank's compute actions, from the host's clock or a GPU's events.

A host queues work on its GPU and continues, so the host's clock shows when an action was launched, not when it ran.
Waiting for the device in every action would change the measurement. Instead, a Timeline records events between kernels,
and reads them at the end of the step. The events also show how far the GPU is behind the host.
"""

import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeshard.distributed.progress import own_progress
from pipeshard.schedule.program import Action
from pipeshard.schedule.simulate import Span

MAX_AHEAD = 3  # the largest number of compute actions by which a host may be ahead of its GPU


@dataclass(slots=True)
class Moments:
    """The moments of one compute action: the start of its turn, the arrival of its messages (`start`) and its end. Each
    moment is a time on the host or a GPU event. `source` is the pipeline rank that sends the messages, and `waits`
    contains the global rank of `source`.
    """

    action: Action
    turn: Any
    start: Any = None
    end: Any = None
    source: int | None = None
    waits: Sequence[int] = ()


class Timeline:
    """Records the timeline of each step of one rank: call `begin`, then `turn`, `received` and `done` for each compute
    action, then `end`.

    With a GPU, the host continues before an action has finished, but is at most `MAX_AHEAD` actions ahead of the GPU.
    Because of this limit, the host can release sent tensors, and the watchdog can report which action hangs, and
    whether this action waits for a message or computes.

    Attributes:
        spans: the start and end of every compute action of the last step, as values of `time.time()`. The start is
            after the wait for messages.
        waited: the seconds that this rank has waited for each other rank of the pipeline in the last step.
        event: a function that creates a GPU event, or None on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        events = functools.partial(torch.cuda.Event, enable_timing=True, blocking=True)
        self.event: Callable[[], Any] | None = events if device.type == "cuda" else None
        self.begin()

    def begin(self) -> None:
        self.spans: list[Span] = []
        self.waited: defaultdict[int, float] = defaultdict(float)
        self._moments: list[Moments] = []
        self._behind: deque[Moments] = deque()  # actions that the GPU may not have completed

    def turn(self, action: Action) -> None:
        now = self._now()
        self._moments.append(Moments(action, now, now))

    def received(self, source: int, waits: Sequence[int]) -> None:
        """Record that the inputs of the current action have arrived, or that the GPU waits for these inputs before it
        continues."""
        last = self._moments[-1]
        last.start, last.source, last.waits = self._now(), source, waits

    def done(self) -> None:
        last = self._moments[-1]
        last.end = self._now()
        if self.event is not None:
            self._behind.append(last)
            self._catch_up(MAX_AHEAD)

    def end(self) -> None:
        """Wait for the GPU, and compute the times of the step. Errors of the GPU's last actions are raised here."""
        self._catch_up(0)
        at = self._host_time()
        for moments in self._moments:
            turn, start, end = at(moments.turn), at(moments.start), at(moments.end)
            self.spans.append(Span(moments.action, start, end))
            if moments.source is not None:
                self.waited[moments.source] += start - turn
        self._moments.clear()

    def _now(self) -> Any:
        if self.event is None:
            return time.time()
        event = self.event()
        event.record()
        return event

    def _catch_up(self, most: int) -> None:
        """Wait until the GPU is at most `most` actions behind."""
        while len(self._behind) > most:
            moments = self._behind.popleft()
            own_progress().start(moments.action)
            if moments.waits:
                own_progress().wait_until(moments.start.synchronize, moments.waits)
                own_progress().start(moments.action)
            own_progress().wait_until(moments.end.synchronize, ())

    def _host_time(self) -> Callable[[Any], float]:
        """Return a function that converts a moment of the step to a time on the host. The last moment of the step
        counts as the current time."""
        if self.event is None or not self._moments:
            return float
        now, last = time.time(), self._moments[-1].end
        return lambda event: now - event.elapsed_time(last) / 1e3
