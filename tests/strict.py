"""Strict: a P2P on gloo and the CPU whose messages are ordered and block as NCCL's kernels on streams do.

Each communicator has a thread (its stream), on which messages run in the order in which they were posted. The two ends
of a message meet before any byte is transferred, and exchange the names of their messages. If the names differ, so that
the messages would be confused or wait forever, both ends raise OrderError.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeshard.distributed.p2p import Edge, EdgeP2P
from tests.streams import Lanes

PATIENCE = 3.0  # seconds after which a wait counts as a deadlock


class OrderError(RuntimeError):
    """With NCCL, ranks would deadlock, or receive another message than the expected one."""


class Stream:
    """The stream of one communicator of two ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.posted = group, 0
        self.thread = ThreadPoolExecutor(1)
        self.works: list[StrictWork] = []

    def post(self, tensor: Tensor, source: int) -> StrictWork:
        self.posted += 1
        done = self.thread.submit(self._meet, tensor, source, self.posted)
        self.works = [work for work in self.works if not work.is_completed()] + [StrictWork(done)]
        return self.works[-1]

    def _meet(self, tensor: Tensor, source: int, number: int) -> None:
        own = torch.tensor([number, source, tensor.numel()])
        ends = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(ends, own, group=self.group, async_op=True).wait(timedelta(seconds=3 * PATIENCE))
        if not torch.equal(*ends):
            said = [f"message {n} of {size} bytes from rank {rank}" for n, rank, size in map(Tensor.tolist, ends)]
            raise OrderError(f"one end is at {said[0]}, the other one at {said[1]}")
        dist.broadcast(tensor, source, group=self.group)


class StrictWork:
    """A posted message, with the methods of `dist.Work`."""

    def __init__(self, done: Future[None]) -> None:
        self.done = done

    def wait(self, timeout: Any = None) -> bool:
        self.done.result(4 * PATIENCE)
        return True

    def is_completed(self) -> bool:
        return self.done.done()


class StrictP2P(EdgeP2P):
    """A stream for each edge. `kernels` is True, so messages are posted in an order that does not deadlock."""

    lanes = Lanes("edge", numbered=True)
    last: StrictP2P

    def __init__(self, ranks: Sequence[int], edges: Sequence[Edge], device: torch.device) -> None:
        self.streams: dict[tuple[int, ...], Stream] = {}
        super().__init__(ranks, edges, device)
        self.kernels = True
        StrictP2P.last = self

    def move(self, tensor: Tensor, source: int, destination: int) -> Any:
        lane = self.lanes.of(source, destination)
        if lane not in self.streams:
            self.streams[lane] = Stream(self.groups[source, destination])
        return self.streams[lane].post(tensor, self.ranks[source])

    def synchronize(self) -> None:
        """Wait for all posted messages, like torch.cuda.synchronize()."""
        until = time.monotonic() + PATIENCE
        while not all(work.is_completed() for stream in self.streams.values() for work in stream.works):
            if time.monotonic() > until:
                raise OrderError(f"a synchronization of the device has waited {PATIENCE} s")
            time.sleep(0.0005)


class EarlyP2P(StrictP2P):
    """Receives are posted early, as in a transport whose messages are not kernels."""

    def __init__(self, ranks: Sequence[int], edges: Sequence[Edge], device: torch.device) -> None:
        super().__init__(ranks, edges, device)
        self.kernels = False


class PairP2P(EarlyP2P):
    """Early receives, and one stream for both directions of a pair of ranks, as p2p="isend" once had with NCCL."""

    lanes = Lanes("pair", numbered=True)


class OrderedPairP2P(StrictP2P):
    lanes = Lanes("pair", numbered=True)
