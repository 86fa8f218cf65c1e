"""Interpreter: runs one rank's actions of a Program on its stages."""

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for
from torch.profiler import record_function

from pipeshard.distributed.progress import NOW
from pipeshard.engine.p2p import P2P
from pipeshard.engine.stage import Stage
from pipeshard.schedule.program import Action, Kind
from pipeshard.schedule.simulate import Span

BufferKind = tuple[tuple[int, ...], torch.dtype]
strides_of = lru_cache(make_contiguous_strides_for)  # a step takes the same few shapes, again and again


class Buffers:
    """Tensors by shape and dtype. One is free as soon as its storage has no other owner: no leaf, no graph, no send."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[BufferKind, list[torch.UntypedStorage]] = {}
        self._asked: set[BufferKind] = set()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor without values of its own."""
        kind = shape, dtype
        self._asked.add(kind)
        kept = self._kept.setdefault(kind, [])
        for k, storage in enumerate(kept):
            if _owners(storage) == 1:
                kept.append(kept.pop(k))  # the next to be free is that which was lent first
                empty = torch.empty(0, dtype=dtype, device=self.device)
                return empty.set_(storage, 0, shape, strides_of(shape))
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        kept.append(tensor.untyped_storage())
        return tensor

    def trim(self) -> None:
        """Let go of the shapes that were not asked for since the last `trim`: sequence lengths change."""
        self._kept = {kind: kept for kind, kept in self._kept.items() if kind in self._asked}
        self._asked = set()


def _owners(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)


UNTOLD = 4  # messages on their way at most, where nobody tells that one has arrived


class Interpreter:
    """Does what each action says, in order; waits for a receive only where it is needed, and for a send only where its
    P2P does not tell when it is done, once four more are on their way.

    `stages` are this rank's by index, `placement[s]` is the rank of stage s. After `run`, `spans` has the start and
    end of every compute action in seconds of `time.perf_counter`, waiting apart, and `waited` the seconds spent on
    waiting for each other rank. On a GPU these are times of its queue being filled, unless `synchronous` makes every
    action wait for the device. Under torch.profiler each action is a range of its own name.
    """

    def __init__(self, stages: Mapping[int, Stage], placement: Sequence[int], p2p: P2P | None, device: torch.device):
        self.stages, self.placement, self.device = stages, placement, device
        self.p2p, self.synchronous = p2p, False
        self.spans: list[Span] = []
        self.waited: defaultdict[int, float] = defaultdict(float)
        self._buffers = Buffers(device)
        self._incoming: dict[Action, tuple[list[Tensor], list[dist.Work]]] = {}
        self._outgoing: dict[Action, list[Tensor]] = {}
        self._sends: deque[tuple[list[dist.Work], list[Tensor], int]] = deque()
        compute, receive, send = self._compute, self._receive, self._send
        self._do: dict[Kind, Callable[[Action], None]] = {
            Kind.F: compute,
            Kind.B: compute,
            Kind.W: compute,
            Kind.RECV_F: receive,
            Kind.RECV_B: receive,
            Kind.SEND_F: send,
            Kind.SEND_B: send,
        }

    def run(self, actions: Sequence[Action], stage_done: Callable[[int], None] | None = None) -> None:
        """Run them all; `stage_done` is told each stage whose last backward is through, as soon as it is."""
        self.spans, self.waited = [], defaultdict(float)
        ends = {action.stage: action for action in actions if action.kind in (Kind.B, Kind.W)} if stage_done else {}
        profiled = torch._C._autograd._profiler_enabled()
        try:
            for action in actions:
                NOW.start(action)
                with record_function(str(action)) if profiled else contextlib.nullcontext():
                    self._do[action.kind](action)
                self._let_go_of_sent()
                if stage_done and ends.get(action.stage) is action:
                    stage_done(action.stage)
            while self._sends:
                self._let_go()
        finally:
            self._incoming.clear()
            self._outgoing.clear()
            self._sends.clear()
            self._buffers.trim()

    def _compute(self, action: Action) -> None:
        kind, i, stage = action.kind, action.microbatch, self.stages[action.stage]
        taken = self._take(action) if kind is not Kind.W else []
        start = time.perf_counter()
        made: list[Tensor] = []
        if kind is Kind.F:
            made = stage.forward(i, taken)
        elif kind is Kind.B:
            made = stage.backward(i, taken)
        else:
            stage.weight(i)
        if self.synchronous:
            torch.cuda.synchronize(self.device)
        self.spans.append(Span(action, start, time.perf_counter()))
        if made:
            self._outgoing[action] = made

    def _take(self, action: Action) -> list[Tensor]:
        """The input of a compute action: received, or left by a neighbouring stage on this rank."""
        receive = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
        message = Action(receive, action.microbatch, action.stage)
        if message not in self._incoming:
            return self._outgoing.pop(Action(action.kind, action.microbatch, message.partner.stage), [])
        tensors, works = self._incoming.pop(message)
        source = self.placement[message.partner.stage]
        start = time.perf_counter()
        for work in works:
            self._wait(work, source)
        self.waited[source] += time.perf_counter() - start
        return tensors

    def _receive(self, action: Action) -> None:
        assert self.p2p is not None
        stage = self.stages[action.stage]
        specs = stage.entering if action.kind is Kind.RECV_F else stage.returning
        source = self.placement[action.partner.stage]
        tensors = [self._buffers.take(shape, dtype) for shape, dtype in specs(action.microbatch)]
        works = [self.p2p.receive(_bytes(tensor), source) for tensor in tensors]
        self._incoming[action] = tensors, works

    def _send(self, action: Action) -> None:
        assert self.p2p is not None
        compute = Kind.F if action.kind is Kind.SEND_F else Kind.B
        destination = self.placement[action.partner.stage]
        tensors = self._outgoing.pop(Action(compute, action.microbatch, action.stage), [])
        self._sends.append(([self.p2p.send(_bytes(tensor), destination) for tensor in tensors], tensors, destination))

    def _let_go_of_sent(self) -> None:
        while self._sends and all(work.is_completed() for work in self._sends[0][0]):
            self._let_go()  # at once, or with the error that ended it
        while self.p2p is not None and not self.p2p.tells and len(self._sends) > UNTOLD:
            self._let_go()

    def _let_go(self) -> None:
        works, _, destination = self._sends.popleft()
        for work in works:
            self._wait(work, destination)

    def _wait(self, work: dist.Work, other: int) -> None:
        assert self.p2p is not None
        NOW.wait(work, (self.p2p.ranks[other],))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
