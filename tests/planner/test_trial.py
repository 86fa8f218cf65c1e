"""Tests of `pipeshard trace-run`: real steps in separate processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeshard.cli import main
from pipeshard.engine.recording import Recording
from pipeshard.errors import ConfigurationError
from pipeshard.schedule import add_communication, make_program
from pipeshard.trial import _meet, _spawn
from tests.remedies import nets
from tests.remedies.training import Training, run

MODEL = ["gpt2", "n_embd=32", "n_layer=4", "n_head=4", "vocab_size=61", "n_positions=32"]


@pytest.mark.turns
def test_a_step_is_run_recorded_and_drawn(tmp_path: Path) -> None:
    sizes = ["--pp", "2", "--microbatches", "3", "--seq-len", "8", "--schedule", "zbv", "--partition", "profile"]
    files = ["--draw", str(tmp_path / "step.svg"), "--json", str(tmp_path / "step.json")]
    result = CliRunner().invoke(main, ["trace-run", *MODEL, *sizes, *files])
    assert result.exit_code == 0, result.output
    assert "bubble" in result.output and "slowest is rank" in result.output
    assert Recording.load(tmp_path / "step.json").program == add_communication(make_program("zbv", 2, 3))
    assert (tmp_path / "step.svg").stat().st_size > 10_000


def killed(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.turns
def test_a_killed_process_is_one_line() -> None:
    """`trace-run` of a model that is too large for this machine, of which the kernel killed a process, ended in a
    traceback."""
    with pytest.raises(ConfigurationError, match=r"a process of the trial run failed: .* signal SIGKILL"):
        _spawn(killed, (), 1)


def failing(rank: int, folder: str) -> None:
    _meet(rank, 1, folder)
    run(Training(nets.Graph, {"verify": False, "num_microbatches": 3}, batches=nets.nodes))


@pytest.mark.turns
def test_a_step_that_fails_is_told_by_its_error(tmp_path: Path) -> None:
    """The line was the note about several microbatches, which every error of the model has in a step, instead of the
    error."""
    with pytest.raises(ConfigurationError, match="the trial run failed: IndexError"):
        _spawn(failing, (str(tmp_path),), 1)


@pytest.mark.turns
def test_what_cannot_run_is_one_line() -> None:
    wrong = ["trace-run", *MODEL, "--pp", "2", "--microbatches", "3", "--schedule", "zbx"]
    result = CliRunner().invoke(main, wrong)
    assert result.exit_code == 1
    assert result.output.startswith("error: unknown schedule 'zbx': did you mean 'zbv'?")
    result = CliRunner().invoke(main, ["trace-run", *MODEL, "--pp", "1", "--microbatches", "1", "--partition", "2,3"])
    assert result.exit_code == 1
    message = "partition [2, 3] must contain the number of unit calls (at least 1) for each stage: 1 number with"
    assert message in result.output and "Traceback" not in result.output
