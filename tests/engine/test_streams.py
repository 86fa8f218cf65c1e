"""Tests of real steps under the rules of NCCL's streams, emulated on the CPU: exact, and deadlocks are detected."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from pipeshard.engine.stage import Stage
from pipeshard.schedule import SCHEDULES
from tests import zoo
from tests.pool import Pool, WorkerError
from tests.strict import EarlyP2P, OrderedPairP2P, OrderError, PairP2P, StrictP2P
from tests.unsplit import Split, Unsplit, differences


@contextlib.contextmanager
def synchronizing() -> Iterator[None]:
    """Inside, something in every action waits for the device, as an autotuner does."""

    def settled(method: Any) -> Any:
        def call(stage: Stage, *args: Any) -> Any:
            StrictP2P.last.synchronize()
            result = method(stage, *args)
            StrictP2P.last.synchronize()
            return result

        return call

    methods = {name: settled(getattr(Stage, name)) for name in ("forward", "backward", "weight")}
    with mock.patch.multiple(Stage, **methods):
        yield


def trained(schedule: str, p2p: type, synchronizes: bool, m: int = 4) -> list[str]:
    """What differs from the unsplit model in two steps, the second of other sizes, and an evaluation."""
    model, p = zoo.build("llama", layers=6), dist.get_world_size()
    unsplit, chunks = Unsplit(copy.deepcopy(model)), 2 if schedule == "interleaved" else 1
    data = zoo.batch("llama", rows=m)
    split = Split(model, p, data, num_microbatches=m, schedule=schedule, num_model_chunks=chunks, p2p=p2p)
    with synchronizing() if synchronizes else contextlib.nullcontext():
        found = differences(split, unsplit, data, num_microbatches=m)
        split.step()
        unsplit.step()
        found += differences(split, unsplit, zoo.batch("llama", rows=m, length=9, seed=1), num_microbatches=m)
        split.evaluate(data)
    return found


@pytest.mark.turns
@pytest.mark.sampled(4)
@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_exact_where_each_action_waits_for_the_device(pool: Pool, schedule: str, p: int) -> None:
    assert pool.run(trained, p, schedule, StrictP2P, True) == [[]] * p


@pytest.mark.turns
def test_in_one_order_a_pair_may_share_a_stream(pool: Pool) -> None:
    assert pool.run(trained, 2, "1f1b", OrderedPairP2P, True) == [[]] * 2


@pytest.mark.turns
def test_early_receives_are_exact_until_something_waits_for_the_device(pool: Pool) -> None:
    assert pool.run(trained, 2, "1f1b", EarlyP2P, False) == [[]] * 2
    with pytest.raises(WorkerError, match=r"OrderError: a synchronization of the device has waited 3.0 s"):
        pool.run(trained, 2, "1f1b", EarlyP2P, True)


def test_what_pairs_share_is_seen_to_be_wrong(pool: Pool) -> None:
    said = r"OrderError: one end is at message \d+ of \d+ bytes from rank \d, the other one at message \d+ of \d+ bytes"
    with pytest.raises(WorkerError, match=said):
        pool.run(trained, 2, "1f1b", PairP2P, False)
    assert issubclass(OrderError, RuntimeError)
