"""Tests of the local pool: threads of one worker behave like ranks in processes."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pipeshard.distributed import local as local_world
from pipeshard.graph.trace import trace
from tests import local, zoo
from tests.local import LocalPool, NeedsProcesses
from tests.pool import Pool, WorkerError
from tests.unsplit import Split, Unsplit, differences


@pytest.fixture
def threads(workers: Pool) -> LocalPool:
    return LocalPool(workers)


def place() -> tuple[int, int, list[int], float]:
    total = torch.tensor(float(dist.get_rank()))
    dist.barrier()
    dist.all_reduce(total)
    assert dist.is_initialized() and dist.group.WORLD is not None
    return dist.get_rank(), dist.get_world_size(), dist.get_process_group_ranks(dist.group.WORLD), float(total)


def test_torch_s_functions_are_those_of_the_rank(threads: LocalPool) -> None:
    assert threads.run(place, 3) == [(rank, 3, [0, 1, 2], 3.0) for rank in range(3)]


def numbers(count: int) -> tuple[list[float], list[float]]:
    drawn: tuple[list[float], list[float]] = [], []
    for _ in range(count):
        for _ in range(1 + dist.get_rank()):
            drawn[0].append(float(torch.rand(())))
            drawn[1].append(random.random())
        dist.barrier()
    return drawn


def test_generators_are_the_rank_s_own(threads: LocalPool, workers: Pool) -> None:
    assert threads.run(numbers, 3, 4) == workers.run(numbers, 3, 4)


class Place:
    name = "plain"


def patched() -> list[str]:
    """What a rank sees while each of them has patched the same names, and leaves in another order."""
    seen = [Place.name]
    with mock.patch.object(Place, "name", f"of {dist.get_rank()}"), mock.patch.dict(NAMES, {str(dist.get_rank()): ""}):
        dist.barrier()
        seen += [Place.name, *NAMES]
        for _ in range(dist.get_rank()):
            seen.append(Place.name)
    for _ in range(2):
        dist.barrier()
        seen += [Place.name, *NAMES]
    return seen


NAMES: dict[str, str] = {}


def test_patches_are_the_rank_s_own(threads: LocalPool, workers: Pool) -> None:
    seen = threads.run(patched, 3)
    assert seen == workers.run(patched, 3) and seen[1] == ["plain", "of 1", "1", "of 1", "plain", "plain"]
    assert threads.run(patched, 1) == [["plain", "of 0", "0", "plain", "plain"]]


def fail(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} fails")


def test_a_rank_that_raises_fails_the_test(threads: LocalPool) -> None:
    with pytest.raises(WorkerError, match="Rank 1 raised first: rank 1 fails"):
        threads.run(fail, 2, 1)
    with pytest.raises(WorkerError, match="Not every rank raised ValueError"):
        threads.run_expecting(ValueError, fail, 2, 1)
    assert threads.run_expecting(ValueError, fail, 1, 0) == ["rank 0 fails"]


def need(kind: str) -> bool:
    """Whether it runs on processes, which all can do what a thread cannot."""
    if not isinstance(dist.group.WORLD, local_world.WorldGroup):
        return True
    if kind == "waits":
        if dist.get_rank() == 0:
            raise ValueError("the other one waits")
        dist.barrier()
    if kind == "mesh":
        init_device_mesh("cpu", (2,))
    if kind == "group":
        dist.new_group([0, 1])
    if kind == "monkeypatch":
        pytest.MonkeyPatch().setattr(Place, "name", "")
    Split(zoo.build("gpt2", layers=2), 2, zoo.batch("gpt2"), num_microbatches=2, p2p="isend")
    return False


@pytest.mark.parametrize("kind", ["waits", "mesh", "group", "monkeypatch", "isend"])
def test_what_needs_processes_gets_them(threads: LocalPool, kind: str) -> None:
    assert threads.run(need, 2, kind) == [True, True]


def traces() -> tuple[list[str], list[int]]:
    """How three ranks of a local world end, and which of them have traced."""
    by: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        by.append(dist.get_rank())
        return trace(*args, **kwargs)

    with mock.patch("tests.local.trace", counted):
        ended = local.outcomes(pickle.dumps((trained, (), {})), 3)
    return [outcome.message or str(outcome.value) for outcome in ended], by


@pytest.mark.turns
def test_boost_traces_once_for_all_ranks(workers: Pool) -> None:
    """The last rank to come to a collective call goes on first."""
    assert workers.run(traces, 1) == [(["[]"] * 3, [2])]


def trained() -> list[str]:
    model, data = zoo.build("llama", layers=3), zoo.batch("llama")
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    return differences(split, unsplit, data, num_microbatches=2)


def test_the_process_is_as_it_was() -> None:
    before = dist.distributed_c10d._world, mock._patch.__enter__, sys.modules["pipeshard.plugin"].shared_grid  # type: ignore[attr-defined]
    with local.in_place_of_processes():
        assert dist.distributed_c10d._world is not before[0]
    assert before == (dist.distributed_c10d._world, mock._patch.__enter__, sys.modules["pipeshard.plugin"].shared_grid)  # type: ignore[attr-defined]


def test_what_needs_processes_is_no_error_of_the_model() -> None:
    """Nothing that catches Exception may take it for a refusal."""
    assert not issubclass(NeedsProcesses, Exception)
