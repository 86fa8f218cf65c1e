"""Timeline: when one rank's compute actions begin and end, by the host's clock or by a GPU's events.

A host hands work to its GPU and goes on, so its own clock says when an action was launched, not when it ran; to wait
for the device in every action would change what is measured. Events are recorded among the kernels instead, and read
when a step has ended. They also tell how far the GPU is behind.
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

MAX_AHEAD = 3  # compute actions that a host may be ahead of its GPU


@dataclass(slots=True)
class Moments:
    """Of one compute action: when it was its turn, when its messages were there, when it was done. Each is a time on
    the host, or an event. `source` is the rank of the pipeline that sends the messages, `waits` the same in the world.
    """

    action: Action
    turn: Any
    start: Any = None
    end: Any = None
    source: int | None = None
    waits: Sequence[int] = ()


class Timeline:
    """Of the steps of one rank on a device, one after the other: `begin`, then for each compute action `turn`,
    `received` and `done`, then `end`.

    On a GPU the host goes on before an action is done, but not further than `MAX_AHEAD` of them: so it lets go of what
    was sent, and the watch sees which action does not end, and whether that waits for a message or computes.

    Attributes:
        spans: of the last step, the start and end of every compute action by `time.time()`, without waiting.
        waited: the seconds that it has waited for each other rank of the pipeline.
        event: makes an event of the device; None where the host computes.
    """

    def __init__(self, device: torch.device) -> None:
        events = functools.partial(torch.cuda.Event, enable_timing=True, blocking=True)
        self.event: Callable[[], Any] | None = events if device.type == "cuda" else None
        self.begin()

    def begin(self) -> None:
        self.spans: list[Span] = []
        self.waited: defaultdict[int, float] = defaultdict(float)
        self._moments: list[Moments] = []
        self._behind: deque[Moments] = deque()  # what the GPU may not have done yet

    def turn(self, action: Action) -> None:
        now = self._now()
        self._moments.append(Moments(action, now, now))

    def received(self, source: int, waits: Sequence[int]) -> None:
        """What the action needs is there, or the GPU waits for it before it goes on."""
        last = self._moments[-1]
        last.start, last.source, last.waits = self._now(), source, waits

    def done(self) -> None:
        last = self._moments[-1]
        last.end = self._now()
        if self.event is not None:
            self._behind.append(last)
            self._catch_up(MAX_AHEAD)

    def end(self) -> None:
        """Wait for the GPU, and know the times of the step."""
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
        """Wait until the GPU is behind by so many actions at most."""
        while len(self._behind) > most:
            moments = self._behind.popleft()
            own_progress().start(moments.action)
            if moments.waits:
                own_progress().wait_until(moments.start.synchronize, moments.waits)
                own_progress().start(moments.action)
            own_progress().wait_until(moments.end.synchronize, ())

    def _host_time(self) -> Callable[[Any], float]:
        """What turns a moment of the step into a time of the host, whose last one is now."""
        if self.event is None or not self._moments:
            return float
        now, last = time.time(), self._moments[-1].end
        return lambda event: now - event.elapsed_time(last) / 1e3
