"""P2P: sends a tensor from one rank of the pipeline to another.

Both ends know shapes and dtypes from the trace, so a message is nothing but a tensor's bytes: no header, no pickle, and
no handshake that could wait in another order than the schedule's.
"""

import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeshard.distributed.collectives import gather_objects
from pipeshard.errors import ConfigurationError

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
