"""Tests of the local world: ranks in one process that run in turns, with the engine's own collectives and messages."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from pipeshard.distributed.collectives import gather, gather_objects, share_scalar, share_value, sum_scalar
from pipeshard.distributed.local import LocalGrid, LocalWorld, in_thread
from pipeshard.errors import DeadlockError, MessageSizeError
from pipeshard.graph.rng import Draws

CPU = torch.device("cpu")


def grids(pp_size: int, dp_size: int = 1, **arguments: Any) -> tuple[LocalWorld, list[LocalGrid]]:
    world = LocalWorld(pp_size * dp_size, **arguments)
    return world, [LocalGrid(world, rank, pp_size, dp_size, CPU) for rank in range(world.size)]


def test_collectives_are_those_of_processes() -> None:
    world, grid = grids(2, 2)

    def of_rank(rank: int) -> Any:
        own = grid[rank]
        assert (own.replica, own.stage) == divmod(rank, 2) and own.named(rank) == (
            f"rank {rank} (replica {rank // 2}, stage {rank % 2})"
        )
        return (
            gather(torch.tensor([rank]), own.stages).flatten().tolist(),
            gather_objects({"rank": rank}, own.replicas),
            float(sum_scalar(torch.tensor(float(rank)), own.world)),
            share_value(f"of {rank}", 3, own.world),
            float(share_scalar(torch.tensor(float(rank)), own.replica * 2 + 1, own.stages, CPU) or 0.0),
        )

    results = world.run(of_rank)
    assert [result[0] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [[each["rank"] for each in result[1]] for result in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [result[2:] for result in results] == [(6.0, "of 3", 1.0)] * 2 + [(6.0, "of 3", 3.0)] * 2


def test_ranks_compute_on_the_current_gpu_of_the_thread_that_runs_them() -> None:
    """A rank on GPU 4 was proven on threads whose current GPU is 0: device="cuda" in a forward made tensors there, and
    the proof was lost."""
    current = threading.local()

    @contextmanager
    def on(gpu: int) -> Iterator[None]:
        before = vars(current).get("gpu", 0)
        current.gpu = gpu
        yield
        current.gpu = before

    def gpu_of_rank(rank: int = 0) -> int:
        return vars(current).get("gpu", 0)

    with (
        mock.patch("torch.cuda.is_initialized", lambda: True),
        mock.patch("torch.cuda.current_device", gpu_of_rank),
        mock.patch("torch.cuda.device", on),
        on(4),
    ):
        assert LocalWorld(2).run(gpu_of_rank) == [4, 4] and in_thread(gpu_of_rank) == 4


def test_ranks_have_the_default_device_of_the_thread_that_runs_them() -> None:
    """A script called torch.set_default_device("cuda"). On the threads of its proof, a forward's torch.zeros(3) was on
    the CPU."""
    with torch.device("cuda:4"):
        found = LocalWorld(2).run(lambda rank: torch.get_default_device())
    assert found == [torch.device("cuda:4")] * 2


@pytest.mark.parametrize("around", [False, True])
def test_a_rank_casts_its_parameters_again_in_each_step(around: bool) -> None:
    """A rank's thread was inside torch.autocast all the time, so torch kept its casts: under autocast, the second step
    of a proof used the weights of the first."""

    def of_rank(rank: int) -> tuple[list[float], bool]:
        weight, x, found = torch.ones(2, 2, requires_grad=True), torch.ones(1, 2), []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                found.append((x @ weight).sum().item())
            weight.data.mul_(3.0)
        return found, torch.is_autocast_enabled("cpu")

    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        assert LocalWorld(2).run(of_rank) == [([4.0, 12.0], around)] * 2


def test_messages_arrive_in_their_order() -> None:
    """With zbv a rank waits for its receives in another order than it posts them, and each got another's message."""
    world, grid = grids(2)

    def of_rank(rank: int) -> list[int]:
        p2p = grid[rank].p2p("broadcast", (0, 1))
        assert p2p is not None
        if rank == 0:
            for k in range(3):
                sent = torch.full((2,), k, dtype=torch.uint8)
                p2p.send(sent, 1)
                sent.fill_(9)  # what was sent stays what it was
            return []
        buffers = [torch.empty(2, dtype=torch.uint8) for _ in range(3)]
        works = [p2p.receive(buffer, 0) for buffer in buffers]
        for work in reversed(works):
            work.wait()
        return [int(buffer[0]) for buffer in buffers]

    assert world.run(of_rank) == [[], [0, 1, 2]]


def test_a_message_of_another_size_is_an_error() -> None:
    world, grid = grids(2)

    def of_rank(rank: int) -> None:
        p2p = grid[rank].p2p("broadcast", (0, 1))
        assert p2p is not None
        if rank == 0:
            p2p.send(torch.empty(8, dtype=torch.uint8), 1)
        else:
            p2p.receive(torch.empty(4, dtype=torch.uint8), 0).wait()

    with pytest.raises(MessageSizeError, match="a message from rank 0 has 8 bytes, but the receiver expects 4"):
        world.run(of_rank)


def test_ranks_that_wait_for_each_other_are_found_at_once() -> None:
    world, grid = grids(2)

    def of_rank(rank: int) -> None:
        p2p = grid[rank].p2p("broadcast", (0, 1))
        assert p2p is not None
        p2p.receive(torch.empty(1, dtype=torch.uint8), 1 - rank).wait()

    with pytest.raises(DeadlockError, match="rank 0 waits for a message from rank 1; rank 1 waits for a message from"):
        world.run(of_rank)


def test_other_collectives_are_found_at_once() -> None:
    world, grid = grids(2)

    def of_rank(rank: int) -> None:
        if rank == 0:
            gather(torch.zeros(1), grid[0].world)
        else:
            sum_scalar(torch.zeros(()), grid[1].world)

    with pytest.raises(
        DeadlockError, match="rank 1 calls all_reduce, but another rank calls all_gather: make the same call"
    ):
        world.run(of_rank)


def test_an_error_ends_all_ranks() -> None:
    """Those that wait unwind: what they have opened is closed."""
    world, grid = grids(3)
    closed = []

    def of_rank(rank: int) -> None:
        if rank == 2:
            raise ValueError("a rank fails")
        try:
            gather(torch.zeros(1), grid[rank].world)
        finally:
            closed.append(rank)

    with pytest.raises(ValueError, match="a rank fails"):
        world.run(of_rank)
    assert sorted(closed) == [0, 1]


def test_each_rank_has_generators_of_its_own() -> None:
    """A rank that draws more than another does not change what that one draws, nor what the program does later."""
    world, grid = grids(2, keeping=lambda: Draws.from_here(CPU))

    def of_rank(rank: int) -> list[float]:
        drawn = []
        for _ in range(3):
            for _ in range(1 + rank):
                drawn.append(float(torch.rand(())))
            gather(torch.zeros(1), grid[rank].world)
        return drawn

    torch.manual_seed(0)
    alone = [float(torch.rand(())) for _ in range(6)]
    torch.manual_seed(0)
    first, second = world.run(of_rank)
    assert first == alone[:3] and second == alone and float(torch.rand(())) == alone[0]
