"""Tests of `pipeshard launch`: it refuses jobs that cannot start, and prints an error of all ranks once."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch.distributed as dist
from click.testing import CliRunner
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.run import get_args_parser

from pipeshard import cli, launch, plugin, script
from pipeshard.distributed.watch import NOTE
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.launch import HELP, main, start
from tests.agents import interruptible

ROOT = Path(__file__).parent.parent


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop(script.ERRORS_FOLDER, None)  # of a launcher that ran in this process
    return subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=500, cwd=folder, env=environment
    )


@pytest.mark.turns
def test_an_error_that_all_ranks_have_is_told_once_and_not_tried_for_ever(tmp_path: Path) -> None:
    """A script whose import failed was started 101 times, and printed as many tracebacks for each rank."""
    (tmp_path / "train.py").write_text("open('started', 'a').write('.')\nimport nothing_of_this_name\n")
    ended = run(tmp_path, "pipeshard.launch", "--nproc-per-node", "3", "train.py")
    attempts = ended.stderr.count("ModuleNotFoundError: No module named 'nothing_of_this_name'")
    assert ended.returncode == 1 and 3 <= attempts <= 10, ended.stderr  # it looks twice a second, and they are shorter
    assert len((tmp_path / "started").read_text()) <= 3 * (attempts + 1)
    assert "runpy" not in ended.stderr and "pipeshard/script.py" not in ended.stderr
    assert "3 attempts in a row ended with the same ModuleNotFoundError: not restarting" in ended.stderr


@pytest.mark.turns
def test_with_torchrun_alone_an_error_is_told_once_too(tmp_path: Path) -> None:
    """Each of N ranks printed the traceback. Where each has a log of its own, each still does."""
    (tmp_path / "train.py").write_text("from pipeshard.script import fold\nfold()\nraise ValueError('mine')\n")
    ended = run(tmp_path, "torch.distributed.run", "--nproc-per-node", "3", "train.py")
    assert ended.returncode == 1 and ended.stderr.count("ValueError: mine\n") == 1, ended.stderr
    logs = ["--log-dir", str(tmp_path / "logs"), "--redirects", "2"]
    assert run(tmp_path, "torch.distributed.run", "--nproc-per-node", "2", *logs, "train.py").returncode == 1
    written = [path.read_text() for path in (tmp_path / "logs").rglob("stderr.log")]
    assert any(text.count("ValueError: mine\n") == 1 for text in written) and len(written) == 2
    assert not any("as another rank" in text for text in written)


def test_a_plugin_folds_unless_the_watchdog_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(plugin, "fold", lambda: called.append(1))
    for watchdog in (True, False):
        with pytest.raises(ConfigurationError):
            plugin.PipelinePlugin(pp_size=0, num_microbatches=1, watchdog=watchdog)
    assert called == [1]


def test_what_else_prints_errors_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(script.ERRORS_FOLDER, raising=False)
    monkeypatch.setenv(script.TORCHRUN, "")
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    script.fold()
    assert sys.excepthook is sys.__excepthook__ and script.notes() is None  # no torchrun
    monkeypatch.setenv(script.TORCHRUN, "attempt_0/0/error.json")
    script.fold()
    assert sys.excepthook is script.tell_once
    monkeypatch.setattr(sys, "excepthook", print)
    script.fold()
    assert sys.excepthook is print


@pytest.mark.parametrize("before", [sys.__excepthook__, print])
def test_the_hook_of_torch_is_replaced_where_it_stands_for_pythons(
    monkeypatch: pytest.MonkeyPatch, before: Any
) -> None:
    """README's script joins the process group before it makes a plugin: torch's hook was there, and every rank printed
    its traceback."""
    monkeypatch.setenv(script.TORCHRUN, "attempt_0/0/error.json")
    monkeypatch.setattr(sys, "excepthook", before)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    of_torch = sys.excepthook
    script.fold()
    assert of_torch is not before and sys.excepthook is (script.tell_once if before is sys.__excepthook__ else of_torch)


def test_the_note_of_a_rank_makes_no_other_error(tmp_path: Path) -> None:
    """Nine ranks that could not be cut printed nine tracebacks: the watch had added to each which rank it is."""
    texts = [f"PartitionError: too few\n{NOTE}this is rank {rank} (stage {rank}), in boost\n" for rank in (0, 1)]
    assert [script.record_error(tmp_path, "PartitionError", text) for text in texts] == [True, False]


@pytest.mark.turns
def test_a_failed_job_says_which_ranks_failed_how(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nif os.environ['RANK'] == '1':\n    raise SystemExit(7)\n")
    ended = run(tmp_path, "pipeshard.launch", "--max-restarts", "0", "--nproc-per-node", "2", "train.py")
    assert ended.returncode == 1 and "the job failed: rank 1 (exit status 7)" in ended.stderr
    assert "Root Cause" not in ended.stderr


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("nofile.py", None, "nofile.py: No such file or directory"),
        ("broken.py", "x = = 1\n", "broken.py is not a valid Python script: invalid syntax"),
    ],
)
def test_what_cannot_start_is_refused_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: str | None, what: str
) -> None:
    """A typo in the script's name was tried 101 times."""
    if content is not None:
        (tmp_path / name).write_text(content)
    with mock.patch("pipeshard.launch.run") as started:
        assert main(["--nproc-per-node", "2", str(tmp_path / name)]) == 2
    assert not started.called and what in caplog.text


def test_a_script_runs_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    (tmp_path / "train.py").write_text(
        "import sys, pickle, beside\n"
        "class Own: pass\n"
        "assert pickle.loads(pickle.dumps(Own())).__class__ is Own and __name__ == '__main__'\n"
        "print(__file__, sys.argv, beside.VALUE)\n"
        "raise KeyError('mine')\n"
    )
    (tmp_path / "elsewhere").mkdir()
    ended = run(tmp_path / "elsewhere", "pipeshard.script", "../train.py", "--epochs", "3")
    plain = subprocess.run(
        [sys.executable, "../train.py", "--epochs", "3"], capture_output=True, text=True, cwd=tmp_path / "elsewhere"
    )
    assert (ended.returncode, ended.stdout) == (plain.returncode, plain.stdout)
    assert ended.stderr == plain.stderr and "line 5, in <module>" in ended.stderr


def test_a_module_runs_as_python_runs_it(tmp_path: Path) -> None:
    """A module whose import failed was started 101 times, and printed as many tracebacks for each rank: only errors of
    scripts were recorded."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(
        "import sys, pickle\n"
        "class Own: pass\n"
        "assert pickle.loads(pickle.dumps(Own())).__class__ is Own and __name__ == '__main__'\n"
        "print(__file__, __spec__.name, sys.argv, sys.path[0])\n"
        "from . import nothing\n"
    )
    told = tmp_path / "told"
    told.mkdir()
    args = launch._folded(launch.parse(["--nproc-per-node", "2", "-m", "package.train", "--epochs", "3"]))
    assert args.module and args.training_script == "pipeshard.script"
    command = [sys.executable, "-m", "pipeshard.script", *args.training_script_args]
    environment = os.environ | {"PYTHONPATH": str(ROOT), script.ERRORS_FOLDER: str(told)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    plain = [sys.executable, "-m", "package.train", "--epochs", "3"]
    expected = subprocess.run(plain, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (expected.returncode, expected.stdout)
    shown = re.sub(r'  File "<frozen runpy>".*\n', "", expected.stderr)
    assert ended.stderr == shown and "line 5, in <module>" in shown
    assert [path.name.split("-")[1] for path in told.iterdir()] == ["ImportError"]


def test_a_scripts_own_handler_of_sigusr1_is_called(tmp_path: Path) -> None:
    """Slurm sent SIGUSR1 two minutes before the time limit, and the script's handler was to save. The launcher had
    blocked the signal in all ranks, where it stayed blocked. Without a handler, the signal does not end a rank."""
    (tmp_path / "train.py").write_text(
        "import signal, sys, time\n"
        "open('started', 'w').close()\n"
        "time.sleep(0.5)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))\n"
        "time.sleep(20)\n"
    )
    before = signal.getsignal(signal.SIGUSR1)
    launch._forward(signal.SIGUSR1)
    command = [sys.executable, "-m", "pipeshard.script", "train.py"]
    try:
        rank = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
        with mock.patch.object(psutil.Process, "children", return_value=[psutil.Process(rank.pid)]):
            while not (tmp_path / "started").exists():
                time.sleep(0.02)
            rank.send_signal(signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert rank.wait(60) == 7
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])


def test_errors_are_alike_but_for_ranks_and_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script.record_error(tmp_path, "ValueError", "[rank0]: <object at 0x7f01>")
    assert not script.record_error(tmp_path, "ValueError", "[rank3]: <object at 0x7f22>")
    assert script.record_error(tmp_path, "ValueError", "another")
    assert script.repeated(tmp_path) == [("ValueError", 1)]
    assert script.endless(tmp_path, 3, 60) is None
    for attempt in ("1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        script.record_error(tmp_path, "ValueError", "another")
    assert script.endless(tmp_path, 3, 60) == "ValueError"
    late = next(file for file in tmp_path.iterdir() if file.name.startswith("2-"))
    os.utime(late, (late.stat().st_atime, late.stat().st_mtime + 100))
    assert script.endless(tmp_path, 3, 60) is None  # it trained meanwhile


def test_a_lost_rank_is_tried_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for attempt in "0123":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        script.record_error(tmp_path, "RankError", "rank 1 was lost")
    assert script.endless(tmp_path, 3, 60) is None


def test_an_agent_that_rarely_polls_may_still_read_the_status_of_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job with `--monitor-interval 30` ended with status 1 five seconds after all ranks had exited with 0: the agent
    had not looked yet."""
    looks: list[threading.Thread] = []

    def has_ended(worker: str) -> bool:
        looks.append(threading.current_thread())
        return True

    monkeypatch.setattr(launch, "LOOK_PERIOD", 0.001)
    monkeypatch.setattr(launch, "_has_ended", has_ended)
    monkeypatch.setattr(launch.psutil, "Process", lambda: mock.Mock(children=lambda: ["worker"]))
    monkeypatch.setattr(launch.os, "_exit", mock.Mock())
    args = launch.parse(["--monitor-interval", "0.2", "train.py"])
    with mock.patch.object(launch.threading, "Thread") as thread:
        launch._watch_workers(tmp_path, args.rdzv_endpoint, args.monitor_interval)
    thread.call_args.kwargs["target"]()  # here: watchers of other tests may also look
    assert looks.count(threading.current_thread()) == launch.STUCK + 200


@pytest.mark.turns
def test_a_script_starts_its_own_ranks(tmp_path: Path) -> None:
    """Each example to copy needed a launcher in a second file. The ranks of `python -m jobs.train` ran a file, in which
    relative imports failed."""
    (jobs := tmp_path / "jobs").mkdir()
    (jobs / "names.py").touch()
    (jobs / "train.py").write_text(
        "import os, sys\n"
        "from . import names\n"
        "from pipeshard.launch import start\n"
        "if 'RANK' not in os.environ:\n"
        "    sys.exit(start(2))\n"
        "open('rank' + os.environ['RANK'] + sys.argv[1], 'w').close()\n"
    )
    ended = run(tmp_path, "jobs.train", "--steps=3")
    assert ended.returncode == 0, ended.stderr
    assert {path.name for path in tmp_path.glob("rank*")} == {"rank0--steps=3", "rank1--steps=3"}


def test_help_is_of_this_command() -> None:
    """It was torchrun's text."""
    for shown in (CliRunner().invoke(cli.main, ["launch", "--help"]).output,):
        assert shown == HELP and "usage: pipeshard launch" in shown and max(map(len, HELP.splitlines())) <= 110


@pytest.mark.turns
@pytest.mark.parametrize("program", ["pipeshard.launch", "start"])
def test_impatient_people(tmp_path: Path, program: str) -> None:
    """Ctrl-C a dozen times within half a second: tracebacks of the launcher were chained to each other."""
    (tmp_path / "train.py").write_text(
        "import os, sys, time\n"
        "open(str(os.getpid()) + '.pid', 'w').close()\n"
        "from pipeshard.launch import start\n"
        "if 'RANK' not in os.environ:\n"
        "    os.unlink(str(os.getpid()) + '.pid')\n"
        "    sys.exit(start(2))\n"
        "time.sleep(300)\n"
    )
    command = ["-m", program, "--nproc-per-node", "2", "train.py"] if program != "start" else ["train.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop(script.ERRORS_FOLDER, None)  # of a launcher that ran in this process
    environment.pop("RANK", None)
    agent = subprocess.Popen(
        [sys.executable, *command],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
    )
    deadline = time.monotonic() + 300
    while len(pids := list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    for _ in range(12):
        agent.send_signal(signal.SIGINT)
        time.sleep(0.03)
    _, told = agent.communicate(timeout=100)
    assert agent.returncode == 130 and "Traceback" not in told, told
    left = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker = psutil.Process(int(pid.stem))
            left += [worker] if worker.status() != psutil.STATUS_ZOMBIE else []
    assert len(pids) == 2 and not left


@pytest.mark.parametrize("given", ["flag", "variable"])
def test_the_time_to_save_counts_for_every_stop(tmp_path: Path, given: str) -> None:
    """When an agent joined, torch killed the ranks of the others after 30 seconds despite --shutdown-timeout, in the
    middle of their save."""
    (tmp_path / "train.py").touch()
    context, seconds = mock.Mock(_tail_logs=[]), 7

    def stop(_: Any) -> None:
        PContext.close(context, signal.SIGTERM, 30)  # as where an agent joins
        PContext.close(context, signal.SIGTERM)  # as before torch 2.12
        PContext.close(context)  # as where a rank fails

    flags = ["--shutdown-timeout", str(seconds)] if given == "flag" else []
    variable = {} if flags else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(seconds)}
    threads = {name: mock.Mock(return_value=[]) for name in ("_forward", "_watch_workers")}
    with mock.patch.multiple(launch, run=stop, **threads), mock.patch.dict(os.environ, variable):
        assert main([*flags, str(tmp_path / "train.py")]) == 0
    assert [call.kwargs["timeout"] for call in context._close.call_args_list] == [seconds, seconds, 30]


def test_a_torch_without_the_flag_gets_it() -> None:
    """torch has --shutdown-timeout since 2.12: with 2.9 to 2.11, examples/train.slurm ended with exit status 2."""

    def older() -> argparse.ArgumentParser:
        parser = get_args_parser()
        (action,) = (action for action in parser._actions if action.dest == "shutdown_timeout")
        for name in action.option_strings:
            del parser._option_string_actions[name]
        parser._actions.remove(action)
        return parser

    with mock.patch.object(launch, "get_args_parser", older):
        assert launch.parse(["--shutdown-timeout", "100", "script.py"]).shutdown_timeout == 100
        assert launch.parse(["script.py"]).shutdown_timeout is None
        with mock.patch.dict(os.environ, {"PET_SHUTDOWN_TIMEOUT": "50"}):
            assert launch.parse(["script.py"]).shutdown_timeout == 50


def test_a_rank_cannot_start_ranks() -> None:
    """A script called `start` without asking for RANK: its ranks started ranks, and these started more."""
    with mock.patch.dict(os.environ, RANK="0"), pytest.raises(UsageError, match="a rank cannot start ranks"):
        start(2)
