"""Tests of notebooks: cells train with one stage, and start ranks that run their functions."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FunctionType
from unittest import mock

import psutil
import pytest

from pipeshard import notebook_launch
from pipeshard.errors import ConfigurationError, RankError
from tests.house import ROOT

# Of a cell: neither the class nor the functions can be imported.
CELL = """
import os
import time
from pathlib import Path

class Failing:
    def __call__(self):
        raise ValueError("boom")

def fail(rank):
    if int(os.environ["RANK"]) == rank:
        Failing()()
    return rank

def leave():
    raise SystemExit(0)

def refresh():
    print("\\r 0%\\r100%")

def wait(folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)
"""


@pytest.fixture
def cell() -> dict[str, FunctionType]:
    pytest.importorskip("cloudpickle")
    names = {"__name__": "__main__"}
    exec(CELL, names)
    return names  # type: ignore[return-value]


@pytest.mark.turns
def test_ranks_return_results_or_name_the_one_that_failed(
    cell: dict[str, FunctionType], capfd: pytest.CaptureFixture[str]
) -> None:
    """The cell of a failed rank showed the exit status of its launcher."""
    assert notebook_launch(cell["fail"], 2, 2) == [2, 2]
    with pytest.raises(RankError, match=r"^rank 1 failed: ValueError: boom$"):
        notebook_launch(cell["fail"], 2, 1)
    assert capfd.readouterr().out.count("ValueError: boom\n") == 1  # the traceback


@pytest.mark.turns
def test_a_rank_that_exits_is_named(cell: dict[str, FunctionType]) -> None:
    """A function that called sys.exit() raised FileNotFoundError of a temporary file in the cell."""
    with pytest.raises(RankError, match=r"^rank 0 failed: SystemExit: 0$"):
        notebook_launch(cell["leave"], 1)


@pytest.mark.turns
def test_a_progress_bar_stays_in_its_line(cell: dict[str, FunctionType]) -> None:
    """Each refresh of a progress bar became a line of the cell, so that those with losses were lost between them."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        notebook_launch(cell["refresh"], 1)
    assert shown.getvalue().endswith("\r 0%\r100%\n")


@pytest.mark.turns
def test_an_interrupt_ends_the_ranks(cell: dict[str, FunctionType], tmp_path: Path) -> None:
    def interrupt() -> None:
        while len([*tmp_path.iterdir()]) < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            notebook_launch(cell["wait"], 2, str(tmp_path))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [path.name for path in tmp_path.iterdir() if psutil.pid_exists(int(path.name))] == []


def test_what_cannot_start_is_refused(cell: dict[str, FunctionType]) -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigurationError, match=r"<lambda> cannot be copied to the ranks \(TypeError: cannot pickle"):
        notebook_launch(lambda: lock, 2)
    with pytest.raises(ConfigurationError, match="ranks must be a positive integer, got 0"):
        notebook_launch(cell["fail"], 0)
    with (
        mock.patch.dict(sys.modules, cloudpickle=None),
        pytest.raises(ConfigurationError, match=r"pipeshard\[notebook"),
    ):
        notebook_launch(cell["fail"], 2)


@pytest.mark.turns
def test_the_notebook_runs() -> None:
    """Its last cell draws the losses of one stage and of two ranks, which it compares before."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", 4)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path])):
        nbclient.NotebookClient(notebook, timeout=300).execute()
    outputs = [output for one in notebook.cells for output in one.get("outputs", ())]
    assert any("image/png" in output.get("data", ()) for output in outputs)
