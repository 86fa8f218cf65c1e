"""Interpreter: runs one rank's actions of a Program on its stages, and sends their messages by a P2P.

Both ends know shapes and dtypes from the trace, so a message is nothing but a tensor's bytes: no header, no pickle, and
no handshake that could wait in another order than the schedule's.

torch.distributed.pipelining writes each schedule's loop of computing and communicating by hand. Here a schedule is data
in which messages are actions, too, so one loop runs them all: what was simulated and proven free of deadlocks is what
runs.
"""

import contextlib
import inspect
import itertools
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from pipeshard.distributed.collectives import gather_objects
from pipeshard.distributed.progress import NOW
from pipeshard.engine.stage import Stage
from pipeshard.errors import ConfigurationError
from pipeshard.private import profiler_is_enabled
from pipeshard.schedule.program import Action, Kind
from pipeshard.schedule.simulate import Span

Edge = tuple[int, int]


class P2P(ABC):
    """Point-to-point messages of one pipeline; subclass it to bring another transport.

    `ranks[r]` is the global rank of rank r of the pipeline and `edges` are the (source, destination) pairs, sorted,
    that will be used, in pipeline ranks. Every rank constructs it at the same time, so groups may be made here, by
    `new_group`, since there may be other pipelines beside this one. Messages of one edge arrive in the order they were
    sent. Tensors come contiguous, flat and as bytes (uint8), and both ends know their size. Neither call may wait for
    the other end: they return something whose `wait()` does.

    Attributes:
        tells: whether `is_completed()` of what `send` returns becomes true by itself. If not, what was sent is kept
            until it is waited for, which is soon.
    """

    tells = True

    def __init__(self, ranks: Sequence[int], edges: Sequence[Edge], device: torch.device) -> None:
        self.ranks, self.edges, self.device = list(ranks), list(edges), device
        self.rank = self.ranks.index(dist.get_rank())

    @staticmethod
    def new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
        """A new group of these global ranks; every rank of the world calls it with ranks of its own pipeline."""
        world: Any = dist.group.WORLD
        members = sorted({tuple(other) for other in gather_objects(list(ranks), world)})
        groups: dict[tuple[int, ...], Any] = {of_group: dist.new_group(list(of_group)) for of_group in members}
        return groups[tuple(ranks)]

    @abstractmethod
    def send(self, tensor: Tensor, destination: int) -> dist.Work:
        """Start to send; the tensor is not changed until the returned work is done."""

    @abstractmethod
    def receive(self, buffer: Tensor, source: int) -> dist.Work:
        """Start to receive into `buffer`."""


class BroadcastP2P(P2P):
    """A broadcast in a group of two, one group for each edge: works wherever collectives do, and on every device."""

    def __init__(self, ranks: Sequence[int], edges: Sequence[Edge], device: torch.device) -> None:
        super().__init__(ranks, edges, device)
        self.groups = {edge: self.new_group([self.ranks[r] for r in sorted(edge)]) for edge in self.edges}
        for source, destination in self.edges:  # connections are made now, in one order, not amid a schedule
            if self.rank in (source, destination):
                self._broadcast(torch.zeros(1, dtype=torch.uint8, device=device), source, destination).wait()

    def send(self, tensor: Tensor, destination: int) -> dist.Work:
        return self._broadcast(tensor, self.rank, destination)

    def receive(self, buffer: Tensor, source: int) -> dist.Work:
        return self._broadcast(buffer, source, self.rank)

    def _broadcast(self, tensor: Tensor, source: int, destination: int) -> dist.Work:
        group = self.groups[source, destination]
        return dist.broadcast(tensor, self.ranks[source], group=group, async_op=True)


class ISendP2P(P2P):
    """torch.distributed's own isend and irecv, in one group of the whole pipeline."""

    def __init__(self, ranks: Sequence[int], edges: Sequence[Edge], device: torch.device) -> None:
        super().__init__(ranks, edges, device)
        self.group = self.new_group(self.ranks)
        self.tells = device.type != "cpu"  # gloo does not

    def send(self, tensor: Tensor, destination: int) -> dist.Work:
        return _started(dist.isend(tensor, self.ranks[destination], group=self.group))

    def receive(self, buffer: Tensor, source: int) -> dist.Work:
        return _started(dist.irecv(buffer, self.ranks[source], group=self.group))


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise ConfigurationError("this process is not in the pipeline's group")
    return work


P2PS: dict[str, type[P2P]] = {"broadcast": BroadcastP2P, "isend": ISendP2P}


def check_p2p(kind: object) -> type[P2P]:
    """The class that a plugin's `p2p` argument means; raises ConfigurationError for anything else."""
    if isinstance(kind, str) and kind in P2PS:
        return P2PS[kind]
    if isinstance(kind, type) and issubclass(kind, P2P) and not inspect.isabstract(kind):
        return kind
    raise ConfigurationError(
        f"p2p must be one of {sorted(P2PS)} or a subclass of pipeshard.P2P that has send and receive, got {kind!r}"
    )


def make_p2p(kind: object, ranks: Sequence[int], placement: Sequence[int], device: torch.device) -> P2P | None:
    """The P2P of a pipeline with stage s on rank `placement[s]`, or None if all stages are on one."""
    pairs = {(a, b) for a, b in itertools.pairwise(placement) if a != b}
    edges = sorted(pairs | {(b, a) for a, b in pairs})
    return check_p2p(kind)(ranks, edges, device) if edges else None


MAX_PENDING_SENDS = 4  # of a transport that does not tell when a message has arrived


class Interpreter:
    """Runs actions in order; waits for a receive when its tensors are needed, and for a send only where its P2P does
    not tell when it is done, once `MAX_PENDING_SENDS` more have started.

    `stages` are this rank's by index, `placement[s]` is the rank of stage s. After `run`, `spans` has the start and
    end of every compute action by `time.time()`, without waiting, and `waited` the seconds spent on waiting for each
    other rank. On a GPU these are the times at which kernels are launched, unless `synchronous` makes every action wait
    for the device. Under torch.profiler each action is a range of its own name.
    """

    def __init__(self, stages: Mapping[int, Stage], placement: Sequence[int], p2p: P2P | None, device: torch.device):
        self.stages, self.placement, self.device = stages, placement, device
        self.p2p, self.synchronous = p2p, False
        self.spans: list[Span] = []
        self.waited: defaultdict[int, float] = defaultdict(float)
        self._incoming: dict[Action, tuple[list[Tensor], list[dist.Work]]] = {}
        self._outgoing: dict[Action, list[Tensor]] = {}
        self._sends: deque[tuple[list[dist.Work], list[Tensor], int]] = deque()

    def run(self, actions: Sequence[Action], stage_done: Callable[[int], None] | None = None) -> None:
        """Run all of them; `stage_done(s)` is called as soon as the last backward of stage s is done."""
        self.spans, self.waited = [], defaultdict(float)
        ends = {action.stage: action for action in actions if action.kind in (Kind.B, Kind.W)} if stage_done else {}
        profiled = profiler_is_enabled()
        try:
            for action in actions:
                NOW.start(action)
                with record_function(str(action)) if profiled else contextlib.nullcontext():
                    if action.kind.is_compute:
                        self._compute(action)
                    elif action.kind.is_receive:
                        self._receive(action)
                    else:
                        self._send(action)
                self._release_sent()
                if stage_done and ends.get(action.stage) is action:
                    stage_done(action.stage)
            while self._sends:
                self._release()
        finally:
            self._incoming.clear()
            self._outgoing.clear()
            self._sends.clear()

    def _compute(self, action: Action) -> None:
        kind, i, stage = action.kind, action.microbatch, self.stages[action.stage]
        taken = self._take(action) if kind is not Kind.W else []
        start = time.time()
        results: list[Tensor] = []
        if kind is Kind.F:
            results = stage.forward(i, taken)
        elif kind is Kind.B:
            results = stage.backward(i, taken)
        else:
            stage.weight(i)
        if self.synchronous:
            torch.cuda.synchronize(self.device)
        self.spans.append(Span(action, start, time.time()))
        if results:
            self._outgoing[action] = results

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
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in specs(action.microbatch)]
        works = [self.p2p.receive(_bytes(tensor), source) for tensor in tensors]
        self._incoming[action] = tensors, works

    def _send(self, action: Action) -> None:
        assert self.p2p is not None
        compute = Kind.F if action.kind is Kind.SEND_F else Kind.B
        destination = self.placement[action.partner.stage]
        tensors = self._outgoing.pop(Action(compute, action.microbatch, action.stage), [])
        self._sends.append(([self.p2p.send(_bytes(tensor), destination) for tensor in tensors], tensors, destination))

    def _release_sent(self) -> None:
        while self._sends and all(work.is_completed() for work in self._sends[0][0]):
            self._release()  # at once, or with the error that ended it
        while self.p2p is not None and not self.p2p.tells and len(self._sends) > MAX_PENDING_SENDS:
            self._release()

    def _release(self) -> None:
        works, _, destination = self._sends.popleft()
        for work in works:
            self._wait(work, destination)

    def _wait(self, work: dist.Work, other: int) -> None:
        assert self.p2p is not None
        NOW.wait(work, (self.p2p.ranks[other],))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
