"""A host and a GPU that is behind it, on the CPU: what the host knows of it, and what it keeps for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeshard.distributed.p2p import P2P
from pipeshard.distributed.progress import NOW
from pipeshard.engine.interpreter import MAX_AHEAD, Interpreter
from pipeshard.engine.stage import Stage
from pipeshard.schedule import Action, Kind, add_ordered_communication, one_f_one_b

M = 16


class Gpu:
    """It does nothing until the host waits for it."""

    def __init__(self, stalls: int = -1) -> None:
        self.recorded = self.done = 0
        self.stalls = stalls  # the number of an event that never comes
        self.seen: list[tuple[Any, tuple[int, ...]]] = []

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.number, self.gpu.recorded = self.gpu.recorded, self.gpu.recorded + 1

    def synchronize(self) -> None:
        if self.number == self.gpu.stalls:
            raise RuntimeError("aborted")
        assert self.number == self.gpu.done
        self.gpu.done += 1
        self.gpu.seen.append((NOW.action, tuple(NOW.waits)))

    wait = synchronize

    def is_completed(self) -> bool:
        return self.number < self.gpu.done


class Passing(Stage):
    """Sends and receives one number."""

    def __init__(self) -> None:
        pass

    def entering(self, i: int) -> list[Any]:
        return [((1,), torch.float32)]

    returning = entering

    def forward(self, i: int, entering: Any) -> list[Tensor]:
        return [torch.zeros(1)]

    backward = forward


class Sent:
    """It is gone when the GPU has done what was handed to it before."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.after = gpu, gpu.recorded

    def is_completed(self) -> bool:
        return self.gpu.done >= self.after

    def wait(self) -> None:
        """A stream does."""


class Posted(P2P):
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.ranks = gpu, [10, 11, 12]

    def send(self, tensor: Tensor, destination: int) -> Any:
        return Sent(self.gpu)

    receive = send


def run(gpu: Gpu) -> tuple[list[Action], int, int]:
    """Of the rank in the middle of three: its actions, how far it was ahead, and the most messages that it kept."""
    interpreter = Interpreter({1: Passing()}, (0, 1, 2), Posted(gpu), torch.device("cpu"))
    interpreter.event = gpu.event
    actions = add_ordered_communication(one_f_one_b(3, M)).ranks[1]
    ahead, kept, release = [0], [0], interpreter._release_sent

    def watched() -> None:
        release()
        ahead.append((gpu.recorded - gpu.done) // 2)
        kept.append(len(interpreter._sends))

    interpreter._release_sent = watched  # type: ignore[method-assign]
    interpreter.run(actions)
    return [action for action in actions if action.kind.is_compute], max(ahead), max(kept)


def test_the_host_is_a_few_actions_ahead_and_keeps_as_many_messages() -> None:
    """It was ahead by a whole step, and kept all that was sent in it; every rank was at the end of the step then, so a
    stall was everybody's."""
    gpu = Gpu()
    actions, ahead, kept = run(gpu)
    assert ahead == MAX_AHEAD and kept <= MAX_AHEAD + 1 < M
    sources = {Kind.F: 10, Kind.B: 12}
    assert gpu.seen == [seen for a in actions for seen in ((a, (sources[a.kind],)), (a, ()))]


@pytest.mark.parametrize(("number", "waits"), [(18, (10,)), (19, ())])
def test_what_stalls_is_named_whether_it_waits_or_computes(number: int, waits: tuple[int, ...]) -> None:
    NOW.waits = ()
    with pytest.raises(RuntimeError, match="aborted"):
        run(Gpu(stalls=number))
    assert NOW.waits == waits and NOW.action == Action(Kind.F, 5, 1)
    NOW.reset()
