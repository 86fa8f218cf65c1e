"""P2P: messages between ranks of a pipeline. Each message contains only a tensor's bytes.

Both ends have the shapes and dtypes from the trace. Messages therefore have no header, nothing is pickled, and there
are no handshakes that could wait in an order other than the schedule's. With NCCL, each message runs as a kernel on the
sending rank and a kernel on the receiving rank, and a rank runs the kernels of one communicator one after the other.
pipeshard therefore posts these messages in an order in which the kernels never deadlock (`add_ordered_communication`).
"""

import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeshard.distributed.collectives import gather_objects
from pipeshard.distributed.groups import carrier, raising_errors
from pipeshard.distributed.progress import own_progress
from pipeshard.errors import ConfigurationError
from pipeshard.private import nccl_options
from pipeshard.schedule.passes import add_communication
from pipeshard.schedule.program import Program
from pipeshard.schedule.streams import add_ordered_communication

Edge = tuple[int, int]


class P2P(ABC):
    """Point-to-point messages of one pipeline. Define a subclass to add another transport.

    `ranks[r]` is the global rank of pipeline rank r, and `edges` is the sorted list of the (source, destination) pairs
    of pipeline ranks between which messages are sent. Every rank of the world constructs its P2P at the same time, so
    the constructor may create groups. It must create them with `new_group`, since there may be other pipelines. The
    messages of one edge arrive in the order in which they were sent. Tensors are contiguous, one-dimensional, and
    contain bytes (uint8). Both ends know the tensors' sizes in advance. `send` and `receive` must not wait for the
    other end. They return an object with a method `wait()`, which waits for the other end.

    Attributes:
        kernels: whether messages are kernels on a GPU's streams. If so, a step's messages are posted in an order in
            which these kernels never deadlock.
        tells: whether `is_completed()` of the work that `send` returns becomes true without a call to `wait()`. If not,
            pipeshard calls `wait()` as soon as more than a few messages are pending, to free the sent tensors.
    """

    tells = True

    def __init__(self, ranks: Sequence[int], edges: Sequence[Edge], device: torch.device) -> None:
        self.ranks, self.edges, self.device = list(ranks), list(edges), device
        self.rank = self.ranks.index(dist.get_rank())
        self.kernels = carrier(device) == "nccl"

    def new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Create a group of these global ranks. Call it on every rank of the world. Each rank passes ranks of its own
        pipeline."""
        return self.new_groups([ranks])[0]

    def new_groups(self, members: Sequence[Sequence[int]]) -> list[dist.ProcessGroup]:
        """Create one group per list of global ranks. Call it on all ranks of the world, with the same number of
        lists."""
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
        """Start sending to pipeline rank `destination`. pipeshard does not modify the tensor until the work is done."""

    @abstractmethod
    def receive(self, buffer: Tensor, source: int) -> dist.Work:
        """Start receiving into `buffer` from pipeline rank `source`."""


class EdgeP2P(P2P):
    """A P2P with a separate group of two ranks for each edge. If both directions shared a group, a message that is
    posted early could be mistaken for a message in the other direction. The early message could also queue behind a
    message that depends on it."""

    def __init__(self, ranks: Sequence[int], edges: Sequence[Edge], device: torch.device) -> None:
        super().__init__(ranks, edges, device)
        pairs = [[self.ranks[r] for r in sorted(edge)] for edge in self.edges]
        self.groups = dict(zip(self.edges, self.new_groups(pairs)))
        for edge in self.edges:  # connect now, in the same order on all ranks, not during a schedule
            if self.rank in edge:
                self.move(torch.zeros(1, dtype=torch.uint8, device=device), *edge).wait()

    @abstractmethod
    def move(self, tensor: Tensor, source: int, destination: int) -> dist.Work:
        """Start this rank's end of a message: a send on pipeline rank `source`, a receive on `destination`."""

    def send(self, tensor: Tensor, destination: int) -> dist.Work:
        return self.move(tensor, self.rank, destination)

    def receive(self, buffer: Tensor, source: int) -> dist.Work:
        return self.move(buffer, source, self.rank)


class BroadcastP2P(EdgeP2P):
    """Sends messages as broadcasts in the group of an edge. Works with every backend that supports collectives."""

    def move(self, tensor: Tensor, source: int, destination: int) -> dist.Work:
        group = self.groups[source, destination]
        # `data` has a separate version counter: gloo copies a sent message back into the GPU's tensor, which autograd
        # may have saved.
        return _started(dist.broadcast(tensor.data, self.ranks[source], group=group, async_op=True))


class ISendP2P(EdgeP2P):
    """Sends messages with torch.distributed.isend and irecv in the group of an edge."""

    def __init__(self, ranks: Sequence[int], edges: Sequence[Edge], device: torch.device) -> None:
        if device.type == "cuda" and carrier(device) == "gloo":
            raise ConfigurationError(
                "p2p='isend' cannot send CUDA tensors with gloo: use p2p='broadcast', or a process group with NCCL "
                "(init_process_group() without a backend, or with the backend 'cpu:gloo,cuda:nccl')"
            )
        self.tells = device.type != "cpu"  # gloo's is_completed() stays False
        super().__init__(ranks, edges, device)

    def move(self, tensor: Tensor, source: int, destination: int) -> dist.Work:
        group = self.groups[source, destination]
        if self.rank == source:
            return _started(dist.isend(tensor, self.ranks[destination], group=group))
        return _started(dist.irecv(tensor, self.ranks[source], group=group))


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise ConfigurationError(
            "this process is not in the process group of the message: create groups with P2P.new_group"
        )
    return work


P2PS: dict[str, type[P2P]] = {"broadcast": BroadcastP2P, "isend": ISendP2P}


def wait_for(works: Iterable[dist.Work], p2p: P2P, other: int) -> None:
    """Wait for messages from or to pipeline rank `other`."""
    for work in works:
        own_progress().wait(work, (p2p.ranks[other],))


def check_p2p(kind: object) -> type[P2P]:
    """The class for a plugin's `p2p` argument. Raises ConfigurationError for an invalid argument."""
    if isinstance(kind, str) and kind in P2PS:
        return P2PS[kind]
    if isinstance(kind, type) and issubclass(kind, P2P) and not inspect.isabstract(kind):
        return kind
    raise ConfigurationError(
        f"p2p must be one of {sorted(P2PS)} or a subclass of pipeshard.P2P with send and receive, got {kind!r}"
    )


def edges_of(placement: Sequence[int]) -> list[Edge]:
    """The sorted (source, destination) pairs of pipeline ranks between which messages are sent, with stage s on
    `placement[s]`."""
    pairs = {(a, b) for a, b in itertools.pairwise(placement) if a != b}
    return sorted(pairs | {(b, a) for a, b in pairs})


def make_p2p(kind: object, ranks: Sequence[int], placement: Sequence[int], device: torch.device) -> P2P | None:
    """Create the P2P of a pipeline with stage s on pipeline rank `placement[s]`. Returns None if one rank holds all
    stages."""
    edges = edges_of(placement)
    return check_p2p(kind)(ranks, edges, device) if edges else None


def with_messages(program: Program, p2p: P2P | None) -> Program:
    """Add messages to `program`, in an order that cannot deadlock on GPU streams if the P2P's messages are kernels."""
    has_kernels = p2p is not None and p2p.kernels
    return add_ordered_communication(program) if has_kernels else add_communication(program)


def options_of_kernels() -> dict[str, Any]:
    """The `new_group` options of a group that is used only for messages. NCCL's own timer would start when the host
    posts a message, and abort the process without an explanation. This timer is therefore set to a day, and the
    watchdog detects stalls instead. The streams have high priority, so that a message does not wait behind the next
    layer's kernels."""
    day = timedelta(days=1)
    return {"backend": "nccl", "timeout": day, "pg_options": nccl_options(day)}
