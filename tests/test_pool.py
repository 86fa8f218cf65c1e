"""Tests of the pool of workers."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, WorkerError


def add_ranks(base: int, scale: int = 1) -> tuple[int, int, float]:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), base + scale * total.item()


def process_id() -> int:
    dist.barrier()
    return os.getpid()


def threads_and_environment() -> tuple[int, str | None]:
    return torch.get_num_threads(), os.environ.get("HF_HUB_OFFLINE")


def has_imported(module: str) -> bool:
    return module in sys.modules


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has had enough")
    wait_in_barrier()


def wait_in_barrier() -> None:
    dist.barrier()


def fail_while_others_sleep(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("bad luck")
    sleep_forever()


def sleep_forever() -> None:
    while True:
        time.sleep(1)


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("about to sleep")
        sleep_forever()


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    wait_in_barrier()


def never_leave(rank: int) -> None:
    if dist.get_rank() == rank:
        dist.destroy_process_group = sleep_forever  # type: ignore[assignment]


def fail_to_meet(file: str) -> None:
    dist.destroy_process_group()
    alone = {"init_method": f"file://{file}", "rank": 0, "world_size": 2, "timeout": timedelta(seconds=0.1)}
    dist.init_process_group("gloo", **alone)  # type: ignore[arg-type]


def pollute(rank: int) -> int:
    if dist.get_rank() == rank:
        torch.set_default_dtype(torch.float64)
    return process_id()


def default_dtype() -> torch.dtype:
    return torch.get_default_dtype()


def refuse(message: str) -> None:
    raise FileNotFoundError(f"{message} on {dist.get_rank()}")


def refuse_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise FileNotFoundError("nothing here")


def greet() -> None:
    print(f"hello from {dist.get_rank()}")


def lambda_of_rank() -> object:
    return lambda: dist.get_rank()


def test_returns_the_ranks_values_in_order(pool: Pool) -> None:
    assert pool.run(add_ranks, 3, 10, scale=2) == [(rank, 3, 16.0) for rank in range(3)]


def test_tensors_travel_by_value(pool: Pool) -> None:
    values = pool.run(torch.ones, 2, 3)
    assert all(torch.equal(value, torch.ones(3)) for value in values)


def test_workers_are_reused_and_added_on_demand(pool: Pool) -> None:
    two, four, again = pool.run(process_id, 2), pool.run(process_id, 4), pool.run(process_id, 4)
    assert four[:2] == two and again == four and len(set(four)) == 4


def test_a_worker_whose_job_left_other_settings_is_replaced(pool: Pool) -> None:
    before, after = pool.run(pollute, 2, 1), pool.run(process_id, 2)
    assert after[0] == before[0] and after[1] != before[1]
    assert pool.run(default_dtype, 2) == [torch.float32] * 2


def test_a_worker_begins_as_a_copy_of_this_process(pool: Pool) -> None:
    """Each imported again what this process had, for seconds."""
    assert pool.run(has_imported, 1, "hypothesis") == [sys.platform == "linux"]


def test_at_most_eight_workers(pool: Pool) -> None:
    with pytest.raises(ValueError, match="world_size=9"):
        pool.run(process_id, 9)


def test_one_thread_and_no_network(pool: Pool) -> None:
    assert pool.run(threads_and_environment, 1) == [(1, "1")]


def test_a_rank_that_raises_wakes_those_in_a_barrier(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="Rank 1 raised first: rank 1 has had enough") as info:
        pool.run(fail_on, 3, 1)
    text = str(info.value)
    assert text.index("in fail_on") < text.index("in wait_in_barrier")
    assert all(f"===== rank {rank} raised" in text for rank in range(3))


@pytest.mark.slow
def test_ranks_that_never_notice_are_killed_with_their_stacks(pool: Pool) -> None:
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="Rank 0 raised first: bad luck") as info:
        pool.run(fail_while_others_sleep, 2, 0)
    assert time.monotonic() - begin < 10
    assert "rank 1 stuck" in str(info.value) and "in sleep_forever" in str(info.value)
    assert pool.run(add_ranks, 2, 0) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_timeout_shows_where_a_rank_hangs(pool: Pool) -> None:
    before = pool.run(process_id, 2)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="Timeout: after 1 s") as info:
        pool.run(sleep_on, 2, 1, timeout=1)
    assert time.monotonic() - begin < 6
    text = str(info.value)
    assert "in sleep_forever" in text and "in sleep_on" in text and "about to sleep" in text
    assert "rank 0 returned" in text
    after = pool.run(process_id, 2)
    assert after[0] == before[0] and after[1] != before[1]


def test_a_dead_rank_is_named(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="exit code 7"):
        pool.run(exit_on, 2, 1)
    assert len(pool.run(process_id, 2)) == 2


@pytest.mark.slow
def test_a_rank_that_cannot_leave_its_groups_is_stuck(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="rank 0 stuck leaving its process groups") as info:
        pool.run(never_leave, 2, 0, timeout=1)
    assert "in sleep_forever" in str(info.value)


def test_a_worker_that_could_not_meet_the_others_is_replaced(pool: Pool, tmp_path: Path) -> None:
    pool.run_expecting(RuntimeError, fail_to_meet, 1, tmp_path / "store")
    assert len(pool.run(process_id, 2, timeout=10)) == 2


def test_expected_errors_give_their_messages(pool: Pool) -> None:
    assert pool.run_expecting(OSError, refuse, 2, "no file") == ["no file on 0", "no file on 1"]


@pytest.mark.parametrize("error, world_size", [(KeyError, 1), (OSError, 2)])
def test_an_error_other_than_expected_or_on_some_ranks_only_fails(
    pool: Pool, error: type[Exception], world_size: int
) -> None:
    with pytest.raises(WorkerError, match=f"Not every rank raised {error.__name__}"):
        pool.run_expecting(error, refuse_on, world_size, 0)


def test_a_value_that_cannot_travel_is_an_error(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="lambda_of_rank"):
        pool.run(lambda_of_rank, 1)


def test_output_is_shown(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run(greet, 2)
    assert capsys.readouterr().out == ("--- rank 0 printed ---\nhello from 0\n--- rank 1 printed ---\nhello from 1\n")


def test_shutdown_leaves_no_worker() -> None:
    pool = Pool()
    processes = pool.run(process_id, 2)
    pool.shutdown()
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
