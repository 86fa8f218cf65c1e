"""Tests of AutoConfig: the layout that it chooses, from estimates or measured times, and within a memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pipeshard import AutoConfig, plan, trace
from pipeshard.errors import ConfigurationError, PartitionError, UsageError
from pipeshard.planner import Profile, profile_units
from pipeshard.split.partition import Cost
from tests import zoo

BATCH = 12


def choose(ranks: int = 4, model: Any = None, **options: Any) -> AutoConfig:
    return AutoConfig.choose(model or zoo.build("llama"), zoo.batch("llama"), ranks, BATCH, **options)


def test_without_a_limit_replicas_of_the_whole_model_are_fastest() -> None:
    found = choose()
    assert (found.pp_size, found.dp_size, found.num_microbatches, found.schedule) == (1, 4, 3, "1f1b")
    assert (found.time, found.unit) == (pytest.approx(1), "relative")
    assert {(c.layout.pp_size, c.layout.dp_size) for c in found.considered} == {(4, 1), (2, 2), (1, 4)}
    times = [c.estimate.time for c in found.considered if not c.estimate.problem]
    assert times == sorted(times) and len(times) >= 12


@pytest.mark.turns
def test_every_figure_is_that_of_a_plan() -> None:
    found = choose()
    for each in found.considered:
        options = {"pp_size": each.layout.pp_size, "num_microbatches": each.layout.num_microbatches}
        planned = plan(zoo.build("llama"), None, microbatch_size=1, seq_len=12, **options)
        name = each.estimate.schedule, each.estimate.num_model_chunks
        (same,) = [e for e in planned.schedules if (e.schedule, e.num_model_chunks) == name]
        assert (each.estimate.counts, each.estimate.problem) == (same.counts, same.problem)
        assert each.estimate.bubble == pytest.approx(same.bubble, abs=1e-6)


def least(found: AutoConfig, pp_size: int) -> int:
    """What the fullest rank takes, under the schedule that takes least."""
    possible = [c for c in found.considered if c.layout.pp_size == pp_size and not c.estimate.problem]
    return min(c.estimate.peak for c in possible)


@pytest.mark.turns
def test_a_memory_limit_asks_for_stages() -> None:
    free = choose()
    peaks = {p: least(free, p) for p in (1, 2, 4)}
    assert peaks[1] > peaks[2] > peaks[4]
    for p, limit in ((2, peaks[1] - 1), (4, peaks[4])):
        found = choose(device_memory=limit)
        assert found.pp_size == p
        (estimate,) = [
            c.estimate
            for c in found.considered
            if (c.layout.pp_size, c.estimate.schedule, c.estimate.counts) == (p, found.schedule, tuple(found.partition))
        ]
        assert estimate.peak <= limit and found.time == estimate.time
    with pytest.raises(
        PartitionError,
        match=r"no layout of 4 ranks fits in device_memory=1\.00 kB: .*\(pp_size=4, .* rank 0.*more ranks",
    ):
        choose(device_memory="1kB")


@pytest.mark.turns
def test_fewer_ranks_take_the_stages_that_fit() -> None:
    limit = least(choose(1), 1) - 1
    assert [choose(ranks, device_memory=limit).pp_size for ranks in (4, 3, 2)] == [2, 3, 2]


def measured(seconds: Sequence[float], rows: int = 1) -> Profile:
    model = zoo.build("llama")
    batch = zoo.batch("llama", rows)
    profile = profile_units(model, trace(model, batch), batch, "cpu", repeats=1)
    costs = tuple(Cost(each, each, each) for each in seconds)
    assert len(costs) == len(profile.units)
    return Profile(profile.model, profile.units, profile.microbatch, profile.torch, profile.device, costs)


@pytest.mark.turns
def test_measured_times_are_seconds_and_pick_the_schedule() -> None:
    profile = measured([0.01, 1, 1, 1, 1, 0.01, 0.01])
    found = choose(profile=profile, schedules=["gpipe", "1f1b", "zb-h1"], pp_size=4)
    assert (found.pp_size, found.unit) == (1, "seconds")
    assert found.time == pytest.approx(3 * 3 * 4.03)  # 3 microbatches, of F, B and W each, on every replica
    pipeline = [c for c in found.considered if c.layout.pp_size == 4]
    assert pipeline[0].estimate.schedule == "zb-h1"  # a third of 1F1B's idle time
    limit = pipeline[0].estimate.peak
    stages = choose(profile=profile, schedules=["1f1b", "zb-h1"], device_memory=limit)
    assert (stages.pp_size, stages.schedule, stages.partition) == (4, "zb-h1", (2, 1, 1, 3))
    assert stages.arguments == {
        "pp_size": 4,
        "dp_size": 1,
        "microbatch_size": 1,
        "schedule": "zb-h1",
        "num_model_chunks": 1,
        "partition": [2, 1, 1, 3],
    }


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ranks": 5, "pp_size": 3}, ConfigurationError, "5 ranks cannot train with pp_size=3 or less"),
        ({"schedules": ["1f1v"]}, ConfigurationError, r"schedules must list one or more of gpipe.*, got \['1f1v'\]"),
        ({"schedules": []}, ConfigurationError, "schedules must list one or more"),
        ({"microbatch_size": [1, 3]}, ConfigurationError, r"microbatch_size must be a positive integer, got \[1, 3\]"),
        ({"microbatch_size": 5}, ConfigurationError, "global_batch=12 must be a multiple of microbatch_size=5"),
        (
            {"microbatch_size": 12, "ranks": 1},
            ConfigurationError,
            "microbatch_size=12, but the batch has only 8 samples",
        ),
        ({"ranks": 3, "pp_size": 3, "device_memory": "much"}, ConfigurationError, "is not a positive size"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose(**options)


def test_a_model_that_cannot_be_cut_so_is_told() -> None:
    with pytest.raises(PartitionError, match="the model cannot be cut for any layout: "):
        AutoConfig.choose(zoo.build("llama"), zoo.batch("llama"), 11, 1)
    with pytest.raises(UsageError, match="found no loss to train on"):
        AutoConfig.choose(zoo.build("llama"), {"input_ids": torch.zeros(2, 6, dtype=torch.int64)}, 2, 4)


def test_the_table_reads_well() -> None:
    row = str(choose().considered[0])
    assert row.startswith("p=1 dp=4 m=3×1 ") and "idle 0.0%, takes " in row
    wide = choose(6, device_memory="1GB", pp_size=6).considered[-1]
    assert str(wide).startswith("p=6 dp=1 m=12×1 ") and str(wide).endswith("cannot be cut this way")
