"""Trainer: what PipelineTrainer logs, evaluates and resumes is what transformers' Trainer does in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.trainers import differences, run, run_pipeline

EVALUATED = {"eval_strategy": "steps", "eval_steps": 4}


@pytest.mark.parametrize(
    ("name", "ranks", "plugin", "others"),
    [
        ("causal", 2, {}, {"max_steps": 50, "num_train_epochs": 5}),
        ("causal", 2, {"num_microbatches": 6}, {}),
        ("classifier", 2, {}, {}),
        ("seq2seq", 2, {}, {}),
        ("smoothed", 2, {}, {}),
        ("smoothed", 2, {"num_microbatches": 4}, {}),
        ("lora", 2, {}, {}),
        ("weighted", 2, {}, {}),
        ("function", 2, {}, {}),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_logs_are_those_of_one_process(
    pool: Pool, tmp_path: Path, name: str, ranks: int, plugin: dict[str, Any], others: dict[str, Any]
) -> None:
    expected = run(name, tmp_path, **EVALUATED, **others)
    plugin = {"pp_size": ranks, **plugin}
    for found in pool.run(run_pipeline, ranks, name, str(tmp_path), plugin=plugin, **EVALUATED, **others):
        assert differences(found, expected) == []


@pytest.mark.parametrize("name", ["causal", "classifier"])
def test_replicas_share_a_window(pool: Pool, tmp_path: Path, name: str) -> None:
    expected = run(name, tmp_path, gradient_accumulation_steps=4, **EVALUATED)
    options = {"plugin": {"pp_size": 2}, "gradient_accumulation_steps": 2}
    for found in pool.run(run_pipeline, 4, name, str(tmp_path), **options, **EVALUATED):
        assert differences(found, expected) == []


STEPS = {"max_steps": 11, "save_strategy": "steps", "save_steps": 7, "per_device_train_batch_size": 2}


def resumed(pool: Pool, name: str, folder: Path, ranks: int, plugin: dict[str, Any], **others: Any) -> list[Any]:
    return pool.run(
        run_pipeline, ranks, name, str(folder), True, plugin=plugin, **{**STEPS, "save_strategy": "no", **others}
    )[0]


@pytest.mark.parametrize("name", ["causal", "lora"])
def test_a_run_goes_on_with_other_ranks(pool: Pool, tmp_path: Path, name: str) -> None:
    options = {"gradient_accumulation_steps": 2}
    expected = run(name, tmp_path / "whole", **STEPS | options)
    pool.run(run_pipeline, 2, name, str(tmp_path / "split"), plugin={"pp_size": 2}, **STEPS | options)
    incomplete = tmp_path / "split" / "checkpoint-11"  # as a save that is killed leaves it
    incomplete.mkdir()
    (incomplete / "trainer_state.json").write_text('{"global_step": 11')
    for ranks, plugin in ((1, {"pp_size": 1}), (3, {"pp_size": 3})):
        found = resumed(pool, name, tmp_path / "split", ranks, plugin, **options)
        assert differences(found[:-2], expected[:-2]) == [] and differences(found[-1:], expected[-1:]) == []
    if name == "causal":
        found = resumed(pool, name, tmp_path / "split", 4, {"pp_size": 2}, gradient_accumulation_steps=1)
        assert differences(found[:-2], expected[:-2]) == [] and differences(found[-1:], expected[-1:]) == []
