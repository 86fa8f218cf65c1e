"""Tests of a Trainer's logs: what compute_loss logs is reported as in one process, in training and in evaluation."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import Trainer, TrainerCallback

from pipeshard.trainer.kept import KeptState
from tests.pool import Pool
from tests.trainers import TASKS, differences, launched, trainer


class Reporting(TrainerCallback):
    """Reports what is logged, as an experiment tracker does, and writes it to a file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "reported"

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with self.file.open("a") as file:
                file.write(f"{state.global_step} {sorted(logs)}\n")


class Telling(Trainer):
    """Logs two parts of its loss, before the model is called and after."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.log({"tokens": float(inputs["input_ids"].numel())})
        outputs = model(**inputs)
        self.log({"ce": outputs.loss.detach().item()})
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def told(folder: Path, plugin: dict[str, Any] | None = None, **others: Any) -> list[dict[str, float]]:
    """The whole history of the logs, but for times."""
    with launched() if plugin else nullcontext(), mock.patch.object(TASKS["causal"], "kind", Telling):
        made = trainer("causal", folder, plugin, {"callbacks": [Reporting(folder)]}, max_steps=2, **others)
        made.train()
        made.evaluate()
        names = [name for entry in made.state.log_history for name in entry]
        timed = {name for name in names if "per_second" in name or "time" in name}
        return [{name: entry[name] for name in entry if name not in timed} for entry in made.state.log_history]


@pytest.mark.turns
def test_what_compute_loss_logs_is_reported_once_by_the_first_rank(pool: Pool, tmp_path: Path) -> None:
    """A compute_loss called `self.log(...)`: callbacks of rank 0, such as a tracker, received what trials of the trace
    logged, and never what the step on the last stage logged."""
    whole, split = tmp_path / "whole", tmp_path / "split"
    whole.mkdir()
    split.mkdir()
    expected = told(whole)
    assert sum("ce" in entry for entry in expected) == 2 * 3 + 3
    for found in pool.run(told, 2, split, {"pp_size": 2}, timeout=120):
        assert differences(found, expected, 3e-6) == []
    assert (split / "reported").read_text() == (whole / "reported").read_text()


class Remembering(Telling):
    """Keeps a history of its own, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.past: list[float] = []
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.past.append(float(len(self.past)))
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


def history(folder: Path, plugin: dict[str, Any] | None = None) -> tuple[list[float], list[int]]:
    """The history at the end, and the sizes of what was sent after each step."""
    sizes: list[int] = []

    def sent(kept: KeptState, value: Any) -> Any:
        said = TOLD(kept, value)
        sizes.append(len(pickle.dumps(said)))
        return said

    with (
        launched() if plugin else nullcontext(),
        mock.patch.object(TASKS["causal"], "kind", Remembering),
        mock.patch.object(KeptState, "told", sent),
    ):
        made = trainer("causal", folder, plugin, max_steps=8)
        made.train()
        return made.past, sizes


TOLD = KeptState.told


@pytest.mark.turns
def test_a_history_is_not_sent_in_each_step(pool: Pool, tmp_path: Path) -> None:
    """After each step, the last stage sent the whole history that compute_loss had logged: the bytes of 10,000 steps
    grew with their square."""
    past, _ = history(tmp_path)
    (first, _), (last, sizes) = pool.run(history, 2, tmp_path, {"pp_size": 2}, timeout=120)
    assert past == first == last and len(sizes) == 8
    assert max(sizes) < 1.1 * sizes[1]  # the first is smaller: its epoch is 0, an int


class Penalizing(Remembering):
    """Reads parameters of all stages, after it has kept its history."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, **kwargs)
        loss = loss + 1e-4 * sum(parameter.pow(2).sum() for parameter in self.model.parameters())
        return (loss, outputs) if return_outputs else loss


def penalized_history(folder: Path, plugin: dict[str, Any] | None = None) -> list[float]:
    with launched() if plugin else nullcontext(), mock.patch.object(TASKS["causal"], "kind", Penalizing):
        made = trainer("causal", folder, plugin, max_steps=2)
        made.train()
        made.evaluate()
        return list(made.past)


@pytest.mark.turns
def test_a_history_has_each_evaluated_batch_once(pool: Pool, tmp_path: Path) -> None:
    """In evaluation, every rank appended to its history, then failed for a parameter of another stage, and appended
    what the last stage had added: each batch was in the history twice, also on rank 0, which logs."""
    expected = penalized_history(tmp_path)
    assert pool.run(penalized_history, 2, tmp_path, {"pp_size": 2}, timeout=120) == [expected, expected]
