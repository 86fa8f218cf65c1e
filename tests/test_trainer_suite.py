"""Tests of the suite of transformers' own Trainer tests: its harness, and its results."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import pipeshard
from pipeshard.batch.criterion import own_loss
from pipeshard.data.first_samples import first_samples
from tests.pool import Pool
from tests.trainer_suite import __main__ as suite
from tests.trainer_suite.fleet import Fleet
from tests.trainer_suite.summary import table, unexplained
from tests.trainer_suite.worker import give_units

ROOT = Path(__file__).parents[1]


class Line(nn.Module):
    """Has no units, and returns a tuple, as transformers' own toy models do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        y = x * self.a + self.b
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


class Layers(nn.Module):
    """The same with units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(1, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        y = self.two(self.one(x[:, None]).tanh())[:, 0]
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


class Stream(IterableDataset[Any]):
    """Yields each sample once, whoever iterates: what is read ahead of training would be lost."""

    def __init__(self, length: int = 20) -> None:
        self.at, self.x = 0, np.random.default_rng(0).normal(size=length).astype(np.float32)

    def __iter__(self) -> Any:
        while self.at < len(self.x):
            yield {"x": self.x[self.at], "labels": 2 * self.x[self.at] + 3}
            self.at += 1


def train(model: nn.Module, pp_size: int, num_microbatches: int) -> tuple[list[float], list[float]]:
    """The losses of a pipeline on the stream, and those of the unsplit model."""
    plain = type(model)()
    plain.load_state_dict(model.state_dict())
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    loader = DataLoader(Stream(), batch_size=4)
    engine = pipeshard.initialize(
        model, ours, None, loader, pp_size=pp_size, num_microbatches=num_microbatches, watchdog=False
    )
    assert engine.model is not None and engine.optimizer is not None
    batches, got, expected = iter(loader), [], []
    for batch in DataLoader(Stream(), batch_size=4):
        out = engine.execute_pipeline(batches, engine.model, None, engine.optimizer, return_outputs=True)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        loss = plain(**batch)[0]
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        got.append(out["loss"].item())
        expected.append(loss.item())
    return got, expected


def stages_on_a_stream() -> None:
    for num_microbatches in (1, 3):
        got, expected = train(Layers(), 2, num_microbatches)
        assert len(got) == 5
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@pytest.mark.turns
def test_a_tuple_and_a_stream_train_on_two_stages(pool: Pool) -> None:
    """A model returned (loss, logits) as Trainer allows, and "nothing gives a loss". A stream's model takes neither
    tokens nor images, and a batch of text was made up to trace it with."""
    pool.run(stages_on_a_stream, 2)


ALONE = """
    import torch
    from tests.test_trainer_suite import Line, train
    for num_microbatches in (1, 3):
        got, expected = train(Line(), 1, num_microbatches)
        assert len(got) == 5
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)

    import tempfile
    from transformers import TrainingArguments
    from pipeshard import PipelinePlugin
    from pipeshard.trainer import PipelineTrainer
    from tests.test_trainer_suite import Stream
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, use_cpu=True, report_to=[], label_names=["labels"])
        trainer = PipelineTrainer(Line(), args, eval_dataset=Stream(18), pipeline=PipelinePlugin(pp_size=1))
        assert [type(c).__name__ for c in trainer.callback_handler.callbacks][:1] == ["DefaultFlowCallback"]
        assert not any("Random" in type(c).__name__ for c in trainer.callback_handler.callbacks)
        x = torch.tensor(Stream(18).x)
        expected = (x * 0.5 + 0.1 - 2 * x - 3).square().mean().item()
        torch.testing.assert_close(trainer.evaluate()["eval_loss"], expected, rtol=1e-5, atol=0)
        wrapped = torch.nn.DataParallel(trainer.model)
        assert trainer.accelerator.unwrap_model(wrapped) is trainer.model
"""


@pytest.mark.turns
def test_one_stage_needs_no_launcher_and_no_unit() -> None:
    """A notebook asked for init_process_group, and a model without units for pp_size <= 0. The loss of an evaluated
    stream counted its short last batch as a full one."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", dedent(ALONE)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_first_samples_of_a_stream_are_read_from_a_copy() -> None:
    """A stream that keeps its own position lost a batch to whoever looked at it; one that cannot be copied is left."""
    loader = DataLoader(Stream(), batch_size=4)
    np.testing.assert_array_equal(first_samples(loader)["x"], Stream().x[:4])
    assert loader.dataset.at == 0  # type: ignore[attr-defined]
    loader.dataset.generator = (k for k in range(3))  # type: ignore[attr-defined]
    assert first_samples(loader) is None
    assert first_samples(DataLoader(Stream(0), batch_size=4)) is None


@pytest.mark.parametrize("output", [(torch.ones(3),), (torch.ones(1), 2), (torch.tensor(1), 2), (), (1.0, 2.0)])
def test_a_tuple_without_a_loss_in_front_has_none(output: Any) -> None:
    assert own_loss(output) is None


FAKE = """
import json, os, sys, time
folder, size = sys.argv[3], max(int(sys.argv[2]), 1)
open(folder + "/ready", "w").close()
for line in sys.stdin:
    for rank in range(size):
        if os.fork() == 0:
            names = open(f"{folder}/in-{line.strip()}-{rank}")
            results = open(f"{folder}/out-{line.strip()}-{rank}", "w")
            print(json.dumps({"tests": ["good"], "broken": {}, "pid": os.getpid()}), file=results, flush=True)
            for name in names:
                kind = "passed"
                if "hang" in name: time.sleep(60)
                if "died" in name and rank == 1: os._exit(3)
                if "uneven" in name and rank == 0: kind = "different"
                if "waits" in name:
                    if rank == 1: time.sleep(60)
                    kind = "raw"
                print(json.dumps({"kind": kind, "why": "", "trainers": 1}), file=results, flush=True)
            os._exit(0)
"""


@pytest.mark.turns
def test_a_fleet_goes_on_after_ranks_that_hang_or_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test that hung would have ended the whole suite, or made the next one fail for it."""
    monkeypatch.setattr("tests.trainer_suite.fleet.GRACE", 1.0)
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE)
    fleet = Fleet(tmp_path, 2, limit=3.0, worker=worker)
    try:
        assert fleet.start()["tests"] == ["good"]
        names = ("good", "hang", "good", "died", "uneven", "waits", "good")
        kinds = [fleet.run(name)["kind"] for name in names]
    finally:
        fleet.stop()
    assert kinds == ["passed", "hang", "passed", "died", "different", "raw", "passed"]


def result(kind: str, trainers: int = 1) -> dict[str, Any]:
    return {"kind": kind, "why": "why", "trainers": trainers}


def test_what_the_list_does_not_explain_is_told() -> None:
    """A test that fails and is not listed is a fault; one that is listed and passes has no place in the list."""
    listed, case = "tests.trainer.test_trainer_data.AnotherClass.test_accelerator_config_from_dict", "m.Case.test"
    results = {
        listed: {0: result("passed"), 1: result("passed"), 2: result("refused")},
        f"{case}_bad": {0: result("passed"), 1: result("different"), 2: result("passed")},
        f"{case}_plainly_bad": {0: result("raw"), 1: result("raw")},
        f"{case}_without_trainer": {0: result("passed", 0), 1: result("raw")},
    }
    assert unexplained(results) == [f"p=1 {case}_bad: different: why"]
    assert "| passed | 1 | 1 |" in table(results) and "construct a Trainer and pass plainly: 2" in table(results)
    results[listed][2] = result("passed")
    assert f"p=2 {listed}: is listed, but passes" in unexplained(results)


def test_the_target_says_what_to_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in ("", str(tmp_path)):
        monkeypatch.setattr(sys, "argv", ["suite", given])
        assert suite.main() == 2
        assert "pass TRANSFORMERS=<folder>" in capsys.readouterr().out


def test_models_of_another_module_of_tests_get_units() -> None:
    """transformers moved its toy models to trainer_test_utils.py, from which its tests import them: they had no units
    there, and no test with two stages could train."""

    class Toy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.a + self.b

    Toy.__module__ = "tests.trainer.trainer_test_utils"
    give_units(SimpleNamespace(Toy=Toy, __name__="tests.trainer.test_trainer_data"))
    model = Toy()
    assert [name for name, _ in model.named_children()] == ["unit_a", "unit_b"]
    torch.testing.assert_close(model(torch.tensor(3.0)).item(), 7.0)
