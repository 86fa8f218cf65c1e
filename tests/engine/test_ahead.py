"""Tests of a host whose GPU runs behind it, with a fake GPU: what the host waits for, keeps in memory and measures."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeshard.distributed.p2p import P2P
from pipeshard.distributed.progress import NOW
from pipeshard.engine.interpreter import Interpreter
from pipeshard.engine.stage import Stage
from pipeshard.engine.timeline import MAX_AHEAD
from pipeshard.schedule import Action, Kind, add_ordered_communication, one_f_one_b

M = 16
F, B, WAIT = 2.0, 3.0, 0.5  # seconds that its kernels take, and that it waits for each message


class Gpu:
    """It does nothing until the host waits for it. Its own clock knows what was handed to it."""

    def __init__(self, stalls: int = -1) -> None:
        self.recorded = self.done = 0
        self.time = 1000.0
        self.stalls = stalls  # the number of an event that never comes
        self.seen: list[tuple[Any, tuple[int, ...]]] = []

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.number, self.gpu.recorded = self.gpu.recorded, self.gpu.recorded + 1
        self.time = self.gpu.time

    def synchronize(self) -> None:
        if self.number == self.gpu.stalls:
            raise RuntimeError("aborted")
        assert self.number >= self.gpu.done
        self.gpu.done = self.number + 1
        self.gpu.seen.append((NOW.action, tuple(NOW.waits)))

    def elapsed_time(self, other: Event) -> float:
        """In milliseconds, of two that have come."""
        assert max(self.number, other.number) < self.gpu.done
        return 1e3 * (other.time - self.time)


class Passing(Stage):
    """Sends and receives one number."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def values_in(self, i: int) -> list[Any]:
        return [((1,), torch.float32)]

    gradients_in = values_in

    def forward(self, i: int, entering: Any) -> list[Tensor]:
        self.gpu.time += F
        return [torch.zeros(1)]

    def backward(self, i: int, gradients: Any) -> list[Tensor]:
        self.gpu.time += B
        return [torch.zeros(1)]


class Message:
    """It is gone when the GPU has done what was handed to it before."""

    def __init__(self, gpu: Gpu, waits: float) -> None:
        self.gpu, self.after, self.waits = gpu, gpu.recorded, waits

    def is_completed(self) -> bool:
        return self.gpu.done >= self.after

    def wait(self) -> None:
        """A stream does."""
        self.gpu.time += self.waits


class Posted(P2P):
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.ranks = gpu, [10, 11, 12]

    def send(self, tensor: Tensor, destination: int) -> Any:
        return Message(self.gpu, 0.0)

    def receive(self, buffer: Tensor, source: int) -> Any:
        return Message(self.gpu, WAIT)


def made(gpu: Gpu) -> tuple[Interpreter, dict[int, Stage], list[Action]]:
    """Of the rank in the middle of three, with its stage and its actions."""
    interpreter = Interpreter((0, 1, 2), Posted(gpu), torch.device("cpu"))
    interpreter.timeline.event = gpu.event
    return interpreter, {1: Passing(gpu)}, list(add_ordered_communication(one_f_one_b(3, M)).ranks[1])


def test_the_host_is_a_few_actions_ahead_and_keeps_as_many_messages() -> None:
    """It was ahead by a whole step, and kept all that was sent in it; every rank was at the end of the step then, so a
    stall was everybody's."""
    gpu = Gpu()
    interpreter, stages, actions = made(gpu)
    ahead, kept, release = [0], [0], interpreter._release_sent

    def watched() -> None:
        release()
        ahead.append(len(interpreter.timeline._behind))
        kept.append(len(interpreter._sends))

    interpreter._release_sent = watched  # type: ignore[method-assign]
    interpreter.run(stages, actions)
    assert max(ahead) == MAX_AHEAD and max(kept) <= MAX_AHEAD + 1 < M
    sources, computed = {Kind.F: 10, Kind.B: 12}, [action for action in actions if action.kind.is_compute]
    assert gpu.seen == [seen for a in computed for seen in ((a, (sources[a.kind],)), (a, ()))]


@pytest.mark.parametrize(("number", "waits"), [(28, (10,)), (29, ())])
def test_what_stalls_is_named_whether_it_waits_or_computes(number: int, waits: tuple[int, ...]) -> None:
    NOW.waits, NOW.call = (), "execute_pipeline"
    interpreter, stages, actions = made(Gpu(stalls=number))
    with pytest.raises(RuntimeError, match="aborted"):
        interpreter.run(stages, actions)
    assert NOW.waits == waits and NOW.action == Action(Kind.F, 5, 1)
    NOW.reset()


def test_times_are_those_of_the_gpu_s_own_events() -> None:
    """They were those at which the host launches kernels, where nothing ever waits; or every action waited for the
    device, and with it for messages that were not due."""
    interpreter, stages, actions = made(Gpu())
    interpreter.run(stages, actions)
    spans, waited = interpreter.timeline.spans, interpreter.timeline.waited
    assert [span.action for span in spans] == [action for action in actions if action.kind.is_compute]
    for span in spans:
        assert span.end - span.start == pytest.approx({Kind.F: F, Kind.B: B}[span.action.kind], abs=1e-5)
    assert waited == pytest.approx({0: M * WAIT, 2: M * WAIT}, abs=1e-4)
    assert all(later.start - span.end == pytest.approx(WAIT, abs=1e-5) for span, later in itertools.pairwise(spans))
    assert spans[-1].end == pytest.approx(time.time(), abs=1.0)
    interpreter.run(stages, actions)  # nothing is left of the step before
    assert len(interpreter.timeline.spans) == len(spans) and waited is not interpreter.timeline.waited
