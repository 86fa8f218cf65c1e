"""Local world: all ranks of a mesh as threads of one process. Only one of these threads runs at a time.

The thread of a rank runs the engine's own code. A rank yields only when it must wait for another rank, in a collective
call or for a message. The ranks take turns in rank order. Therefore, all runs are identical, only one thread at a time
uses autograd and the random generators, and a deadlock is detected immediately. torch also tests its collectives with
threads (torch.testing._internal.distributed.multi_threaded_pg), but replaces the default process group. A local world
does not replace the default process group.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipeshard.distributed.groups import LocalGroup
from pipeshard.distributed.mesh import Grid, Indices, MeshAxes, ProcessGroupMesh
from pipeshard.distributed.p2p import P2P, Edge, edges_of
from pipeshard.distributed.progress import Progress, running
from pipeshard.errors import DeadlockError, MessageSizeError
from pipeshard.schedule.program import Action

T = TypeVar("T")


class Aborted(BaseException):
    """Raised in the thread of a rank to end the thread after another rank has failed."""


class _Rank:
    """A thread that runs one rank. After each `resume()`, it runs until it waits, pauses or ends."""

    def __init__(self, number: int, work: Callable[[int], Any]) -> None:
        self.number, self._work = number, work
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = lambda: True  # None: the rank is paused
        self.waits_for = ""
        self.is_done = self._is_aborted = self._has_turn = False
        self.result: Any = None
        self.error: BaseException | None = None
        context = copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=f"rank {number}", daemon=True)

    def give_back(self, ready: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        """Let the world's thread continue, and wait for the next `resume()`. Called by the rank's thread."""
        if self._is_aborted:
            raise Aborted
        self.ready, self.waits_for = ready, waits_for
        self._back.release()
        self._turn.acquire()
        if self._is_aborted:
            raise Aborted

    def resume(self) -> None:
        """Run the thread until it waits, pauses or ends."""
        if self._thread.ident is None:
            self._thread.start()
        self._has_turn = True
        self._turn.release()
        self._back.acquire()
        self._has_turn = False

    def abort(self) -> None:
        """End the rank's thread if it is waiting. After an interrupt, a thread that still computes ends at its next
        wait."""
        self._is_aborted = True
        if self._thread.ident is not None and not self.is_done and not self._has_turn:
            self.resume()

    def _run(self) -> None:
        self._turn.acquire()
        try:
            self.result = self._work(self.number)
        except BaseException as error:  # `LocalWorld.run` raises it
            self.error = error
        finally:
            self.is_done = True
            self._back.release()


class LocalWork:
    """Handle of a collective call or a message. `wait()` returns when the call or message has completed."""

    def __init__(self, world: "LocalWorld", done: Callable[[], bool], waits_for: str) -> None:
        self._world, self._done, self._waits_for = world, done, waits_for

    def is_completed(self) -> bool:
        return self._done()

    def wait(self, timeout: Any = None) -> bool:
        if not self._done():
            self._world.wait(self._done, self._waits_for)
        return True


class _Noting(Progress):
    """A rank's Progress, which pauses the rank before each action."""

    def __init__(self, world: "LocalWorld") -> None:
        super().__init__()
        self._world = world

    def start(self, action: Action | str) -> None:
        super().start(action)
        self._world.pause()


@dataclass
class _Meeting:
    """One collective call of a group. `brought` contains each rank's arguments, by the rank's index in the group."""

    kind: str
    brought: dict[int, Any] = field(default_factory=dict)
    is_done: bool = False


class LocalWorld:
    """A world of `size` ranks in this process. `run` calls a function on each rank.

    `note` is called before each action of a rank's steps. `keeping()` returns a context manager for each rank. The
    world enters this context manager whenever the rank runs, for example to switch to the rank's own random generators.
    """

    def __init__(
        self,
        size: int,
        note: Callable[[], None] | None = None,
        keeping: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.size, self.note, self.keeping = size, note, keeping
        self.progress = [_Noting(self) for _ in range(size)]
        self.edges: dict[tuple[tuple[int, ...], Edge], _EdgeMessages] = defaultdict(_EdgeMessages)
        self._meetings: dict[tuple[int, ...], list[_Meeting]] = defaultdict(list)
        self._running: _Rank | None = None

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Call `work(rank)` on every rank and return the results.

        Raises the first error of a rank, or DeadlockError if all ranks wait for each other.
        """
        inherited = _inherited()

        def of_rank(number: int) -> T:
            with inherited(), running(self.progress[number]):
                return work(number)

        ranks = [_Rank(number, of_rank) for number in range(self.size)]
        contexts = [self.keeping() for _ in ranks]
        try:
            while left := [rank for rank in ranks if not rank.is_done]:
                moved = [self._turn(rank, contexts[rank.number]) for rank in left]
                if not any(moved):
                    waits = "; ".join(f"rank {rank.number} waits for {rank.waits_for}" for rank in left)
                    raise DeadlockError(f"the ranks are deadlocked: {waits}")
        finally:
            for rank in ranks:
                rank.abort()
        return [rank.result for rank in ranks]

    def _turn(self, rank: _Rank, context: AbstractContextManager[None]) -> bool:
        """Run a rank until it waits or ends, and raise its error, if any. If the rank cannot continue yet, return False
        without running it."""
        if rank.ready is not None and not rank.ready():
            return False
        self._running = rank
        with context:
            rank.resume()
        while self.note is not None and rank.ready is None and not rank.is_done:
            self.note()
            with context:
                rank.resume()
        if rank.error is not None:
            raise rank.error
        return True

    def wait(self, ready: Callable[[], bool], waits_for: str) -> None:
        """Let other ranks run until `ready()` returns True. Called by the running rank."""
        assert self._running is not None
        self._running.give_back(ready, waits_for)

    def pause(self) -> None:
        """Let the world's thread call `note`, if `note` is set. Called by the running rank."""
        assert self._running is not None
        if self.note is not None:
            self._running.give_back()

    def meet(self, group: "WorldGroup", kind: str, brought: Any, finish: Callable[[list[Any]], None]) -> LocalWork:
        """Join a collective call of a group. When the last rank joins, `finish` receives the arguments of all ranks."""
        meetings, place = self._meetings[group.ranks], group.rank()
        meeting = next((other for other in meetings if place not in other.brought), None)
        if meeting is None:
            meeting = _Meeting(kind)
            meetings.append(meeting)
        if meeting.kind != kind:
            raise DeadlockError(
                f"rank {group.ranks[place]} calls {kind}, but another rank calls {meeting.kind}: make the same call on "
                "every rank"
            )
        meeting.brought[place] = brought
        if len(meeting.brought) == group.size():
            finish([brought for _, brought in sorted(meeting.brought.items())])
            meetings.remove(meeting)
            meeting.is_done = True
        return LocalWork(self, lambda: meeting.is_done, f"{kind} of ranks {list(group.ranks)}")


class WorldGroup(LocalGroup):
    """A process group of a local world, for torch.distributed functions. Sums are computed in rank order."""

    def __init__(self, world: LocalWorld, ranks: Sequence[int], rank: int) -> None:
        super().__init__(tuple(ranks), rank)
        self._world = world

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        def finish(brought: list[Tensor]) -> None:
            total = brought[0].clone()
            for tensor in brought[1:]:
                total.add_(tensor)
            for tensor in brought:
                tensor.copy_(total)

        return self._world.meet(self, "all_reduce", tensors[0].detach(), finish)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        def finish(brought: list[tuple[list[Tensor], Tensor]]) -> None:
            for gathered, _ in brought:
                for tensor, (_, sent) in zip(gathered, brought, strict=True):
                    tensor.copy_(sent)

        return self._world.meet(self, "all_gather", (outputs[0], inputs[0].detach()), finish)

    def broadcast(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        source = options.rootRank

        def finish(brought: list[Tensor]) -> None:
            for place, tensor in enumerate(brought):
                if place != source:
                    tensor.copy_(brought[source])

        return self._world.meet(self, f"broadcast from {source}", tensors[0].detach(), finish)

    def barrier(self, opts: Any = None) -> Any:
        return self._world.meet(self, "barrier", None, lambda _: None)


class LocalP2P(P2P):
    """Messages between ranks of a local world. Each message arrives as soon as it is sent."""

    def __init__(self, world: LocalWorld, ranks: Sequence[int], rank: int, device: torch.device) -> None:
        self.world, self.ranks, self.rank, self.device = world, list(ranks), rank, device
        self.kernels = False

    def send(self, tensor: Tensor, destination: int) -> Any:
        self._edge(self.rank, destination).sent.append(tensor.clone())
        return LocalWork(self.world, lambda: True, "")

    def receive(self, buffer: Tensor, source: int) -> Any:
        edge = self._edge(source, self.rank)
        edge.received += 1
        return _Receipt(self, edge, edge.received - 1, buffer, source)

    def _edge(self, source: int, destination: int) -> "_EdgeMessages":
        return self.world.edges[tuple(self.ranks), (source, destination)]


@dataclass
class _EdgeMessages:
    """The messages from one rank to another. As between processes, the n-th receive that the program posts gets the
    n-th message, regardless of the order in which the program waits for receives."""

    sent: list[Tensor | None] = field(default_factory=list)  # None: already received
    received: int = 0  # the number of posted receives


class _Receipt(LocalWork):
    """Handle of a receive. `wait()` copies message `number` of an edge into the buffer."""

    def __init__(self, p2p: LocalP2P, edge: _EdgeMessages, number: int, buffer: Tensor, source: int) -> None:
        self._edge, self._number, self._buffer = edge, number, buffer
        super().__init__(p2p.world, lambda: len(edge.sent) > number, f"a message from rank {p2p.ranks[source]}")

    def wait(self, timeout: Any = None) -> bool:
        super().wait(timeout)
        message, self._edge.sent[self._number] = self._edge.sent[self._number], None
        if message is None:
            return True  # already received
        if message.shape != self._buffer.shape:
            sizes = f"{message.numel()} bytes, but the receiver expects {self._buffer.numel()}"
            raise MessageSizeError(f"{self._waits_for} has {sizes}")
        self._buffer.copy_(message)
        return True


class LocalMesh(ProcessGroupMesh):
    """The mesh of a rank of a local world."""

    def __init__(self, world: LocalWorld, rank: int, *size: int) -> None:
        self.world, self.rank, self.shape = world, rank, size

    def get_group_along_axis(
        self, axis: MeshAxes, indices_at_axis: Indices | None = None, backend: str | None = None
    ) -> Any:
        ranks = self._ranks_along(axis, indices_at_axis)[self.rank]
        return WorldGroup(self.world, ranks, self.rank) if self.rank in ranks else None

    create_group_along_axis = get_group_along_axis

    def warm_up(self, device: torch.device) -> None:
        """Does nothing: a local world has no connections."""


def in_thread(work: Callable[[], T]) -> T:
    """Call `work()` in a thread, as for a rank of a local world, and return its result. Like a rank, `work` cannot read
    the main thread's `threading.local` values."""
    return LocalWorld(1).run(lambda rank: work())[0]


class LocalGrid(Grid):
    """The grid of a rank of a local world, without tensor parallelism (tp_size=1)."""

    def __init__(self, world: LocalWorld, rank: int, pp_size: int, dp_size: int, device: torch.device) -> None:
        self.dp_size, self.pp_size, self.tp_size, self.device = dp_size, pp_size, 1, device
        self._place(LocalMesh(world, rank, dp_size, pp_size, 1))
        self._world = world

    def p2p(self, kind: object, placement: Sequence[int]) -> P2P | None:
        ranks = self.mesh.get_ranks_in_group(self.stages)
        return LocalP2P(self._world, ranks, self.stage, self.device) if edges_of(placement) else None


def _inherited() -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of context managers that apply the calling thread's autocast, default device and current GPU.
    In a new thread, autocast is off, the default device is the CPU, and the current GPU is GPU 0."""
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    device = torch.get_default_device()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    @contextmanager
    def inherited() -> Iterator[None]:
        with ExitStack() as stack:
            if gpu is not None:
                stack.enter_context(torch.cuda.device(gpu))
            if device.type not in ("cpu", "meta"):
                stack.enter_context(device)
            # While a thread is inside torch.autocast, torch does not clear the cache of casts, so a rank's second step
            # would use casts from the first step.
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield

    return inherited
