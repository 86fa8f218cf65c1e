"""P2P: messages from one rank of a pipeline to another, which contain only a tensor's bytes.

Both ends know shapes and dtypes from the trace: no header is sent, nothing is pickled, and no handshake could wait in
another order than the schedule's. On a GPU with NCCL a message is a kernel on both ranks, and kernels of
one communicator run one after the other on each rank; so a P2P states which messages share one (its `lanes`).
"""

import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeshard.distributed.collectives import gather_objects
from pipeshard.distributed.groups import carrier, raising_errors
from pipeshard.errors import ConfigurationError
from pipeshard.private import nccl_options
from pipeshard.schedule.passes import add_communication
from pipeshard.schedule.program import Program
from pipeshard.schedule.streams import WORST, Lanes, add_ordered_communication, check_streams

Edge = tuple[int, int]


class P2P(ABC):
    """Point-to-point messages of one pipeline; subclass it to add another transport.

    `ranks[r]` is the global rank of rank r of the pipeline and `edges` are the (source, destination) pairs, sorted,
    that will be used, in pipeline ranks. Every rank constructs it at the same time, so groups may be created here, with
    `new_group`, since there may be other pipelines. Messages of one edge arrive in the order they were
    sent. Tensors are contiguous, flat bytes (uint8), and both ends know their size. Neither call may wait for
    the other end: they return an object whose `wait()` does.

    Attributes:
        lanes: which messages share a communicator; by default, all do.
        kernels: whether messages are kernels on a GPU's streams. Then a step's messages are posted in an order in which
            these never deadlock.
        tells: whether `is_completed()` of the result of `send` becomes true by itself. If not, the sent tensor is kept
            until it is waited for, which is soon.
    """

    lanes: ClassVar[Lanes] = Lanes()
    tells = True

    def __init__(self, ranks: Sequence[int], edges: Sequence[Edge], device: torch.device) -> None:
        self.ranks, self.edges, self.device = list(ranks), list(edges), device
        self.rank = self.ranks.index(dist.get_rank())
        self.kernels = carrier(device) == "nccl"

    def new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A new group of these global ranks. Call it on every rank of the world with ranks of its own pipeline."""
        return self.new_groups([ranks])[0]

    def new_groups(self, members: Sequence[Sequence[int]]) -> list[dist.ProcessGroup]:
        """Several separate groups. Request equally many on every rank of the world."""
        world: Any = dist.group.WORLD
        options = options_of_kernels() if self.kernels else {}
        groups: list[Any] = []
        for own, wanted in zip(members, zip(*gather_objects([list(ranks) for ranks in members], world))):
            with raising_errors():
                made = {ranks: dist.new_group(list(ranks), **options) for ranks in sorted({*map(tuple, wanted)})}
            groups.append(made[tuple(own)])
        return groups

    @abstractmethod
    def send(self, tensor: Tensor, destination: int) -> dist.Work:
        """Start to send; the tensor is not changed until the returned work is done."""

    @abstractmethod
    def receive(self, buffer: Tensor, source: int) -> dist.Work:
        """Start to receive into `buffer`."""


class EdgeP2P(P2P):
    """A group of two for each edge, not one for both directions of a pair: messages of one direction would
    queue behind those of the other, which may need them first, or be mistaken for them (see `check_streams`)."""

    def __init__(self, ranks: Sequence[int], edges: Sequence[Edge], device: torch.device) -> None:
        super().__init__(ranks, edges, device)
        pairs = [[self.ranks[r] for r in sorted(edge)] for edge in self.edges]
        self.groups = dict(zip(self.edges, self.new_groups(pairs)))
        for edge in self.edges:  # connections are made now, in one order, not amid a schedule
            if self.rank in edge:
                self.move(torch.zeros(1, dtype=torch.uint8, device=device), *edge).wait()

    @abstractmethod
    def move(self, tensor: Tensor, source: int, destination: int) -> dist.Work:
        """Start this rank's end of a message."""

    def send(self, tensor: Tensor, destination: int) -> dist.Work:
        return self.move(tensor, self.rank, destination)

    def receive(self, buffer: Tensor, source: int) -> dist.Work:
        return self.move(buffer, source, self.rank)


class BroadcastP2P(EdgeP2P):
    """A broadcast in the group of an edge: works wherever collectives do, and on every device."""

    lanes = Lanes("edge", numbered=True)

    def move(self, tensor: Tensor, source: int, destination: int) -> dist.Work:
        group = self.groups[source, destination]
        # `data` has a separate version counter: gloo copies a sent message back into the GPU's tensor, which autograd
        # may have saved.
        return _started(dist.broadcast(tensor.data, self.ranks[source], group=group, async_op=True))


class ISendP2P(EdgeP2P):
    """torch.distributed's own isend and irecv, in the group of an edge."""

    lanes = Lanes("edge")

    def __init__(self, ranks: Sequence[int], edges: Sequence[Edge], device: torch.device) -> None:
        if device.type == "cuda" and carrier(device) == "gloo":
            raise ConfigurationError(
                "p2p='isend' cannot send CUDA tensors with gloo: use p2p='broadcast', or a process group with NCCL "
                "(init_process_group() without a backend, or 'cpu:gloo,cuda:nccl')"
            )
        self.tells = device.type != "cpu"  # gloo does not
        super().__init__(ranks, edges, device)

    def move(self, tensor: Tensor, source: int, destination: int) -> dist.Work:
        group = self.groups[source, destination]
        if self.rank == source:
            return _started(dist.isend(tensor, self.ranks[destination], group=group))
        return _started(dist.irecv(tensor, self.ranks[source], group=group))


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise ConfigurationError("this process does not belong to the process group of this message")
    return work


P2PS: dict[str, type[P2P]] = {"broadcast": BroadcastP2P, "isend": ISendP2P}


def check_p2p(kind: object) -> type[P2P]:
    """The class for a plugin's `p2p` argument; raises ConfigurationError for anything else."""
    if isinstance(kind, str) and kind in P2PS:
        return P2PS[kind]
    if isinstance(kind, type) and issubclass(kind, P2P) and not inspect.isabstract(kind):
        return kind
    raise ConfigurationError(
        f"p2p must be one of {sorted(P2PS)} or a subclass of pipeshard.P2P with send and receive, got {kind!r}"
    )


def edges_of(placement: Sequence[int]) -> list[Edge]:
    """The pairs of ranks of a pipeline between which messages are sent, with stage s on rank `placement[s]`."""
    pairs = {(a, b) for a, b in itertools.pairwise(placement) if a != b}
    return sorted(pairs | {(b, a) for a, b in pairs})


def make_p2p(kind: object, ranks: Sequence[int], placement: Sequence[int], device: torch.device) -> P2P | None:
    """The P2P of a pipeline with stage s on rank `placement[s]`, or None if all stages are on one."""
    edges = edges_of(placement)
    return check_p2p(kind)(ranks, edges, device) if edges else None


def with_messages(program: Program, p2p: P2P | None) -> Program:
    """`program` with messages for this P2P. If they are kernels, it is proven to end; raises DeadlockError
    otherwise."""
    if p2p is None or not p2p.kernels:
        return add_communication(program)
    program = add_ordered_communication(program)
    check_streams(program, p2p.lanes, WORST)
    return program


def options_of_kernels() -> dict[str, Any]:
    """Options of a group only for messages, without gloo. NCCL's own timer starts when the
    host posts a message, and aborts the process without an explanation: the watchdog decides what is a stall. A message
    does not wait for resources behind the next layer's kernels."""
    day = timedelta(days=1)
    return {"backend": "nccl", "timeout": day, "pg_options": nccl_options(day)}
