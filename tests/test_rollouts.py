"""Rollouts: TRL's GRPOTrainer and RLOOTrainer through a pipeline generate, score and learn as in one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from tests.pool import Pool
from tests.trainers import launched

trl = pytest.importorskip("trl")
rollouts = pytest.importorskip("tests.rollouts")
run, make, shown, differences = rollouts.run, rollouts.make, rollouts.shown, rollouts.differences
REPEATED = ("whole", "lora", "drawn", "rloo")


@pytest.mark.turns
@pytest.mark.parametrize("kind", REPEATED)
def test_ten_steps_are_those_of_one_process(pool: Pool, tmp_path: Any, kind: str) -> None:
    rollouts.base(tmp_path)
    expected = run(kind, str(tmp_path), max_steps=10)
    for size in (1, 2):
        for found in pool.run(run, size, kind, str(tmp_path), {"pp_size": size}, timeout=200, max_steps=10):
            assert differences(found, expected) == []
    assert len({entry["loss"] for entry in expected[0][:-1]}) == 10


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [name for name in rollouts.KINDS if name not in REPEATED])
def test_every_way_to_train_is_that_of_one_process(pool: Pool, tmp_path: Any, kind: str) -> None:
    rollouts.base(tmp_path)
    expected = run(kind, str(tmp_path))
    for found in pool.run(run, 2, kind, str(tmp_path), {"pp_size": 2}, timeout=200):
        assert differences(found, expected) == []


@pytest.mark.turns
def test_replicas_are_the_processes_of_trl(pool: Pool, tmp_path: Any) -> None:
    """Stages as processes would gather each reward twice, and take a replica's advantages from another one's."""
    rollouts.base(tmp_path)
    options = {"timeout": 200, "num_generations": 8}
    found = pool.run(run, 4, "often", str(tmp_path), {"pp_size": 2}, **options)
    expected = pool.run(trl_alone, 2, "often", str(tmp_path), **options)
    for rank, one in enumerate(found):
        assert differences(one, expected[rank // 2]) == []


def trl_alone(kind: str, folder: str, **others: Any) -> Any:
    with launched():
        made = make(kind, folder, **others)
        made.train()
        return shown(made)


def rewarded_by_every_rank(folder: str, plugin: dict[str, Any]) -> Any:
    base, rank = trl.GRPOTrainer._calculate_rewards, torch.distributed.get_rank()
    with (
        mock.patch("pipeshard.trainer.rollouts.Rollouts._calculate_rewards", base),
        mock.patch.object(rollouts.Drawn, "__call__", lambda self, completions, **_: [rank + 0.5] * len(completions)),
    ):
        return run("drawn", folder, plugin)


@pytest.mark.turns
def test_rewards_of_every_rank_are_seen(pool: Pool, tmp_path: Any) -> None:
    """A mutation: each rank computes rewards of its own, of which the stages train different advantages."""
    rollouts.base(tmp_path)
    first, last = pool.run(rewarded_by_every_rank, 2, str(tmp_path), {"pp_size": 2}, timeout=200)
    assert first[2]["drawn"] != last[2]["drawn"]


def with_adapters_on(folder: str, plugin: dict[str, Any]) -> Any:
    with mock.patch("trl.trainer.grpo_trainer.use_adapter", lambda *_, **__: nullcontext()):
        return run("lora", folder, plugin)


@pytest.mark.turns
def test_a_reference_with_its_adapters_on_is_seen(pool: Pool, tmp_path: Any) -> None:
    """A mutation: the model that is trained is its own reference, from which it never moves away."""
    rollouts.base(tmp_path)
    expected = run("lora", str(tmp_path))
    found = pool.run(with_adapters_on, 2, str(tmp_path), {"pp_size": 2}, timeout=200)[0]
    assert any("kl" in line for line in differences(found, expected))
    assert all(abs(entry.get("kl", 0.0)) < 1e-6 for entry in found[0]) and expected[0][3]["kl"] > 1e-6
