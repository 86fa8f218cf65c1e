"""Interpreter: runs one rank's actions of a Program on its stages."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pipeshard.runtime.p2p import P2P
from pipeshard.runtime.stage import Stage
from pipeshard.schedule.program import Action, Kind
from pipeshard.schedule.simulate import Span


class Interpreter:
    """Does what each action says, in order; never waits for a send, and for a receive only where it is needed.

    `stages` are this rank's by index, `placement[s]` is the rank of stage s. After `run`, `spans` has the start and
    end of every compute action in seconds of `time.perf_counter`, waiting apart.
    """

    def __init__(self, stages: Mapping[int, Stage], placement: Sequence[int], p2p: P2P | None, device: torch.device):
        self.stages, self.placement, self.device = stages, placement, device
        self.p2p = p2p
        self.spans: list[Span] = []
        self._incoming: dict[Action, tuple[list[Tensor], list[dist.Work]]] = {}
        self._outgoing: dict[Action, list[Tensor]] = {}
        self._sends: list[tuple[dist.Work, Tensor]] = []
        compute, receive, send = self._compute, self._receive, self._send
        self._do: dict[Kind, Callable[[Action], None]] = {
            Kind.F: compute,
            Kind.B: compute,
            Kind.RECV_F: receive,
            Kind.RECV_B: receive,
            Kind.SEND_F: send,
            Kind.SEND_B: send,
        }

    def run(self, actions: Iterable[Action]) -> None:
        self.spans = []
        try:
            for action in actions:
                self._do[action.kind](action)
            for work, _ in self._sends:
                work.wait()
        finally:
            self._incoming.clear()
            self._outgoing.clear()
            self._sends.clear()

    def _compute(self, action: Action) -> None:
        forward, i, stage = action.kind is Kind.F, action.microbatch, self.stages[action.stage]
        taken = self._take(action)
        start = time.perf_counter()
        made = stage.forward(i, taken) if forward else stage.backward(i, taken)
        self.spans.append(Span(action, start, time.perf_counter()))
        self._outgoing[action] = made

    def _take(self, action: Action) -> list[Tensor]:
        """The input of a compute action: received, or left by a neighbouring stage on this rank."""
        receive = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
        message = Action(receive, action.microbatch, action.stage)
        if message not in self._incoming:
            return self._outgoing.pop(Action(action.kind, action.microbatch, message.partner.stage), [])
        tensors, works = self._incoming.pop(message)
        for work in works:
            work.wait()
        return tensors

    def _receive(self, action: Action) -> None:
        assert self.p2p is not None
        stage = self.stages[action.stage]
        specs = stage.entering if action.kind is Kind.RECV_F else stage.returning
        source = self.placement[action.partner.stage]
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in specs(action.microbatch)]
        works = [self.p2p.receive(_bytes(tensor), source) for tensor in tensors]
        self._incoming[action] = tensors, works

    def _send(self, action: Action) -> None:
        assert self.p2p is not None
        compute = Kind.F if action.kind is Kind.SEND_F else Kind.B
        destination = self.placement[action.partner.stage]
        for tensor in self._outgoing.pop(Action(compute, action.microbatch, action.stage)):
            self._sends.append((self.p2p.send(_bytes(tensor), destination), tensor))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
