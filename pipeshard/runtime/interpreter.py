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

Key = tuple[Kind, int, int]


class Interpreter:
    """Does what each action says, in order; never waits for a send, and for a receive only where it is needed.

    `stages` are this rank's by index, `placement[s]` is the rank of stage s. After `run`, `spans` has the start and
    end of every compute action in seconds of `time.perf_counter`, waiting apart.
    """

    def __init__(self, stages: Mapping[int, Stage], placement: Sequence[int], p2p: P2P | None, device: torch.device):
        self.stages, self.placement, self.device = stages, placement, device
        self.p2p = p2p
        self.spans: list[Span] = []
        self._incoming: dict[Key, tuple[list[Tensor], list[dist.Work]]] = {}
        self._outgoing: dict[Key, list[Tensor]] = {}
        self._sends: list[tuple[dist.Work, Tensor]] = []
        self._do: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.RECV_F: self._receive_activations,
            Kind.RECV_B: self._receive_gradients,
            Kind.SEND_F: self._send_activations,
            Kind.SEND_B: self._send_gradients,
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

    def _forward(self, action: Action) -> None:
        i, stage = action.microbatch, action.stage
        entering = self._take(Kind.RECV_F, Kind.F, i, stage, stage - 1)
        start = time.perf_counter()
        self._outgoing[Kind.F, i, stage] = self.stages[stage].forward(i, entering)
        self.spans.append(Span(action, start, time.perf_counter()))

    def _backward(self, action: Action) -> None:
        i, stage = action.microbatch, action.stage
        returning = self._take(Kind.RECV_B, Kind.B, i, stage, stage + 1)
        start = time.perf_counter()
        self._outgoing[Kind.B, i, stage] = self.stages[stage].backward(i, returning)
        self.spans.append(Span(action, start, time.perf_counter()))

    def _take(self, receive: Kind, compute: Kind, i: int, stage: int, neighbour: int) -> list[Tensor]:
        """The input of a compute action: received, or left by a neighbouring stage on this rank."""
        if (receive, i, stage) not in self._incoming:
            return self._outgoing.pop((compute, i, neighbour), [])
        tensors, works = self._incoming.pop((receive, i, stage))
        for work in works:
            work.wait()
        return tensors

    def _receive_activations(self, action: Action) -> None:
        self._receive(action, self.stages[action.stage].entering(action.microbatch), self.placement[action.stage - 1])

    def _receive_gradients(self, action: Action) -> None:
        self._receive(action, self.stages[action.stage].returning(action.microbatch), self.placement[action.stage + 1])

    def _send_activations(self, action: Action) -> None:
        self._send((Kind.F, action.microbatch, action.stage), self.placement[action.stage + 1])

    def _send_gradients(self, action: Action) -> None:
        self._send((Kind.B, action.microbatch, action.stage), self.placement[action.stage - 1])

    def _receive(self, action: Action, specs: Sequence[tuple[tuple[int, ...], torch.dtype]], source: int) -> None:
        assert self.p2p is not None
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in specs]
        works = [self.p2p.receive(_bytes(tensor), source) for tensor in tensors]
        self._incoming[action.kind, action.microbatch, action.stage] = tensors, works

    def _send(self, key: Key, destination: int) -> None:
        assert self.p2p is not None
        for tensor in self._outgoing.pop(key):
            self._sends.append((self.p2p.send(_bytes(tensor), destination), tensor))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
