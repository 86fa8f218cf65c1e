"""Tests of the supervision of a rank: its monitor, the checks between processes of a host, and child processes."""

from __future__ import annotations

import atexit
import io
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from pipeshard.distributed import crash, monitor, peers
from pipeshard.distributed.failures import RAISED, Alarm, Fault, is_lost, text_of
from pipeshard.distributed.peers import Attached, Peers, attach_workers
from pipeshard.distributed.progress import NOW, allowed
from pipeshard.distributed.watch import AGENT
from pipeshard.errors import CheckpointError, RankError
from tests import zoo
from tests.hooks import register_unseen
from tests.house import ROOT
from tests.pool import Pool
from tests.unsplit import Split

RANK = """
import re, sys, time
from pipeshard.distributed.monitor import Monitor
monitor = Monitor()
monitor.beat(float(sys.argv[1]))
print(flush=True)
exec(sys.argv[2])
"""


def rank_with_monitor(limit: float, code: str, seconds: float) -> int | None:
    """The exit status of a process that runs this after its last word to its monitor; None if it is there by then."""
    process = subprocess.Popen([sys.executable, "-c", RANK, str(limit), code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        process.wait()


@pytest.mark.turns
def test_a_regular_expression_that_never_ends_is_ended_from_outside() -> None:
    # A collator matched "(a+)+b": the expression holds the interpreter's lock, and no thread of the rank could end it.
    assert rank_with_monitor(0.5, "re.match(r'(a+)+b', 'a' * 60)", 30) == -signal.SIGABRT


@pytest.mark.turns
def test_a_process_that_takes_no_notice_of_sigabrt_is_killed() -> None:
    ignoring = "import signal; signal.signal(signal.SIGABRT, signal.SIG_IGN); re.match(r'(a+)+b', 'a' * 60)"
    assert rank_with_monitor(0.5, ignoring, 30) == -signal.SIGKILL


@pytest.mark.turns
def test_a_process_without_a_limit_or_that_ends_by_itself_is_left_alone() -> None:
    assert rank_with_monitor(float("inf"), "time.sleep(4)", 30) == 0


@pytest.mark.turns
def test_time_in_which_a_process_is_stopped_does_not_count() -> None:
    # A job was paused as a whole, with SIGSTOP, for longer than its timeout, and had to go on afterwards.
    code = "import os, signal, subprocess; subprocess.Popen(['sh', '-c', f'sleep 5; kill -CONT {os.getpid()}']); "
    code += "os.kill(os.getpid(), signal.SIGSTOP); monitor.beat(60)"
    assert rank_with_monitor(1.0, code, 30) == 0


@pytest.mark.turns
def test_the_monitor_ends_with_its_rank() -> None:
    process = subprocess.Popen([sys.executable, "-c", RANK, "60", "time.sleep(60)"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    children = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    assert len(children) == 1 and not psutil.wait_procs(children, timeout=5)[1]


class Store(dict[str, str]):
    """One that answers at once."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def multi_get(self, keys: list[str]) -> list[str]:
        return [self[key] for key in keys]


def seen(store: Store, looks: int, meets: bool = True) -> tuple[int, str] | None:
    """What rank 0 of two comes to see in so many looks."""
    watched = Peers(store, 0, 2)
    watched.meet()
    found = None
    for _ in range(looks * peers.EVERY):
        found = watched.look(silent=0 if meets else 100)
        if meets:
            watched.meet()
    return found


def other(store: Store, code: str = "import time; time.sleep(60)") -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", code])
    store.set("process/1", json.dumps([peers.own_host(), process.pid, psutil.Process(process.pid).create_time()]))
    return process


def until(process: subprocess.Popen[bytes], *statuses: str) -> None:
    """A signal is taken when the process next runs, which may be late on a busy machine."""
    deadline = time.monotonic() + 20
    while psutil.Process(process.pid).status() not in statuses:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_rank_is_seen_unless_it_has_said_that_it_leaves() -> None:
    # A rank was killed, and the child that it had forked kept its connections: the others waited for the watchdog.
    store = Store()
    process = other(store)
    try:
        assert seen(store, 2) is None
        process.kill()  # and nobody asks for its status
        until(process, psutil.STATUS_ZOMBIE)
        for meets in (True, False):  # also where the store has gone with it
            found = seen(store, 2, meets) if meets else _silent(store)
            assert found is not None and found[0] == 1 and "was killed" in found[1]
        store.set("left/1", "")
        assert seen(store, 3) is None
    finally:
        process.wait()


def _silent(store: Store) -> tuple[int, str] | None:
    watched = Peers(store, 0, 2)
    process = psutil.Process(json.loads(store["process/1"])[1])
    watched._processes[1] = process
    looks = [watched.look(silent=k) for k in range(4 * peers.EVERY + peers.UNASKED)]
    assert looks[peers.UNASKED - 1] is None
    return looks[-1]


def test_a_stopped_rank_is_seen_after_some_looks_and_one_that_goes_on_is_not() -> None:
    store = Store()
    process = other(store)
    try:
        process.send_signal(signal.SIGSTOP)
        until(process, psutil.STATUS_STOPPED)
        assert seen(store, peers.STOPPED - 1) is None
        found = seen(store, peers.STOPPED)
        assert found is not None and "is suspended" in found[1]
        process.send_signal(signal.SIGCONT)
        until(process, psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)
        assert seen(store, peers.STOPPED) is None
    finally:
        process.kill()
        process.wait()


def test_a_process_of_another_host_or_with_a_number_that_was_given_again_is_not_looked_at() -> None:
    own = psutil.Process()
    for host, created in ((["another"], own.create_time()), (peers.own_host(), own.create_time() - 100)):
        store = Store({"process/1": json.dumps([host, own.pid, created])})
        watched = Peers(store, 0, 2)
        watched.meet()
        assert watched._processes == {}


def cut(stages: int, **options: Any) -> Split:
    return Split(zoo.build("gpt2"), stages, zoo.batch("gpt2"), num_microbatches=2, **options)


def step(split: Split) -> None:
    split.backward(zoo.batch("gpt2"))
    split.step()


def exit_of_a_child(program: Callable[[], object]) -> int:
    """The exit code of a forked child that runs a program and ends as an interpreter does, with all hooks: 7."""
    if (pid := os.fork()) == 0:
        try:
            with mock.patch("sys.stderr", io.StringIO()):
                try:
                    program()
                except (SystemExit, ArithmeticError) as error:
                    if not isinstance(error, SystemExit):
                        sys.excepthook(type(error), error, error.__traceback__)
                atexit._run_exitfuncs()
            os._exit(7)
        finally:
            os._exit(8)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def train_with_children() -> list[Any]:
    """A step, what users' code does with children, and a step."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    split = cut(2, timeout=20.0)
    step(split)
    context = multiprocessing.get_context("fork")
    asleep = context.Process(target=time.sleep, args=(60,))
    asleep.start()
    time.sleep(0.3)
    asleep.terminate()
    asleep.join(10)
    with context.Pool(2) as pool:
        squares = pool.map(abs, [-1, -2])
    exits = []
    if dist.get_rank() == 1:  # the other rank waits in its step, where it would hear of it
        exits = [exit_of_a_child(end) for end in (lambda: None, lambda: sys.exit(0), lambda: 1 / 0)]
        time.sleep(1.0)
    step(split)
    return [asleep.exitcode, squares, exits]


@pytest.mark.turns
def test_children_of_a_rank_leave_the_job_alone(pool: Pool) -> None:
    # Process.terminate, Pool and a forked child that raised ended a healthy job: they had inherited handlers and hooks.
    for found, exits in zip(pool.run(train_with_children, 2, timeout=90), ([], [7, 7, 7]), strict=True):
        assert found == [-signal.SIGTERM, [1, 2], exits]


def hooks_in_a_child() -> tuple[int, int]:
    """How children end that a rank has forked: one whose program raises, and one that gets SIGTERM."""
    step(cut(1))
    statuses = []
    for ends in (lambda: sys.excepthook(ValueError, ValueError("of a child"), None), lambda: time.sleep(30)):
        if (pid := os.fork()) == 0:
            with mock.patch("pipeshard.distributed.watch.Watch.ended", side_effect=SystemExit):
                try:
                    ends()
                    os._exit(3)
                finally:
                    os._exit(4)
        time.sleep(0.3)
        os.kill(pid, signal.SIGTERM)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return statuses[0], statuses[1]


@pytest.mark.turns
def test_hooks_belong_to_the_process_that_made_them(pool: Pool) -> None:
    [(raised, terminated)] = pool.run(hooks_in_a_child, 1)
    assert raised in (3, -signal.SIGTERM) and terminated == -signal.SIGTERM


def terminated_at_once() -> list[int]:
    """How 40 children end that get SIGTERM as soon as they exist."""
    step(cut(1))
    ends = []
    for _ in range(40):
        if (pid := os.fork()) == 0:
            signal.alarm(5)
            time.sleep(30)
            os._exit(3)
        os.kill(pid, signal.SIGTERM)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return ends


@pytest.mark.turns
def test_a_child_that_is_terminated_while_it_is_forked_ends(pool: Pool) -> None:
    # Python cleared the signal, which the rank's handler had taken, and Pool.terminate waited for ever.
    [ends] = pool.run(terminated_at_once, 1, timeout=120)
    assert ends == [-signal.SIGTERM] * 40


@pytest.mark.turns
def test_workers_of_a_dataloader_end_with_their_rank(tmp_path: Path) -> None:
    # Four to six workers, and with them the port, lived for 4 seconds after a rank that was killed.
    code = """
import sys, os
from torch.utils.data import DataLoader
from pipeshard.distributed.peers import attach_workers
loader = DataLoader(range(8), num_workers=2, persistent_workers=True)
attach_workers(loader)
next(iter(loader)) if False else [batch for batch in loader]
import psutil
print(*(child.pid for child in psutil.Process().children()), flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in done.stdout.split()]
    deadline = time.monotonic() + 2
    while (alive := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) >= 2 and not alive


def test_the_users_own_worker_init_fn_is_called_and_wrapped_once() -> None:
    called: list[int] = []
    loader = DataLoader(range(2), num_workers=1, worker_init_fn=called.append)  # type: ignore[arg-type]
    attach_workers(loader)
    attach_workers(loader)
    assert isinstance(loader.worker_init_fn, Attached) and loader.worker_init_fn.then == called.append
    with mock.patch("ctypes.CDLL"):
        loader.worker_init_fn(3)
    assert called == [3]


def step_of_an_orphan() -> str:
    with mock.patch.dict(os.environ, {AGENT: "job"}):
        split = cut(1)
        with mock.patch("os.getppid", return_value=1), pytest.raises(RankError) as raised:
            while True:
                step(split)
                time.sleep(0.1)
        return str(raised.value)


@pytest.mark.turns
def test_a_rank_whose_agent_is_gone_ends(pool: Pool) -> None:
    # Ranks whose torchrun was killed trained on for hours, and saved into the folder of the job that was started again.
    [message] = pool.run(step_of_an_orphan, 1, timeout=60)
    assert "the agent of this process (torchrun or pipeshard.launch) is gone" in message


class Loud(Exception):
    def __str__(self) -> str:
        return "a" * 30_000_000


class Mute(Exception):
    def __str__(self) -> str:
        raise TypeError


def test_an_error_of_any_text_can_be_told() -> None:
    # An exception with a text of 20 MB, over the store's limit, and one whose __str__ raises: the others said that
    # the rank was killed.
    assert text_of(Mute()) == "Mute: (its text cannot be shown, since __str__ raised TypeError)"
    assert len(text_of(Loud())) < 3000 and text_of(Loud()).startswith("Loud: aaa")


def test_a_users_own_words_are_not_taken_for_a_lost_connection() -> None:
    # A data loader's RuntimeError("Connection reset by peer") was "look at the network" on every other rank.
    def raised(make: Callable[[], Any]) -> BaseException:
        try:
            make()
        except RuntimeError as error:
            return error
        raise AssertionError

    def own() -> None:
        raise RuntimeError("Connection reset by peer: the bucket")

    assert not is_lost(raised(own)) and is_lost(dist.DistNetworkError("x"))
    assert is_lost(raised(lambda: torch._check(False, lambda: "gloo: Connection closed by peer")))


@pytest.mark.turns
def test_a_silent_store_does_not_hold_up_the_end_of_a_process() -> None:
    # A process that ended while the store was silent hung in its last word to it.
    alarm = Alarm.__new__(Alarm)
    alarm.store, alarm.rank, alarm.size, alarm.gone, alarm.asked = mock.Mock(), 0, 2, False, False
    alarm.store.set.side_effect = lambda *_: threading.Event().wait(30)
    begin = time.monotonic()
    alarm.leave(without=[])
    assert time.monotonic() - begin < 10


SLOW_AT_EXIT = """
import time
from datetime import timedelta
import torch.distributed as dist
from pipeshard.distributed import watching
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(4)
slow, store = Slow(), dist.TCPStore("localhost", 0, 1, True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
watching.watch_world(600.0, True)
answer = lambda *_: store.wait(["never"], timedelta(seconds=4))
watching._here.watch._told = answer
time.sleep(1)
"""


@pytest.mark.turns
def test_a_slow_store_does_not_abort_the_end_of_a_process() -> None:
    """On a busy machine, a script that had trained ended by SIGABRT ("terminate called without an active exception"): a
    thread came back from the store while Python finalized."""
    command = [sys.executable, "-W", "ignore", "-c", SLOW_AT_EXIT]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("timeout", "call", "longest", "seconds"),
    [
        (600.0, "execute_pipeline", 0.0, 600.0),
        (600.0, "save_model", 0.0, 1800.0),
        (600.0, "", 0.0, 1800.0),
        (None, "execute_pipeline", 0.0, float("inf")),
        ("adaptive", "execute_pipeline", 0.0, 600.0),
        ("adaptive", "execute_pipeline", 3.0, 60.0),
        ({"step": 5.0}, "execute_pipeline", 0.0, 5.0),
        ({"step": 5.0}, "save_model", 0.0, 1800.0),
        ({"between": 7.0}, "", 0.0, 7.0),
        ({"other": None}, "boost", 0.0, float("inf")),
    ],
)
def test_timeouts(timeout: Any, call: str, longest: float, seconds: float) -> None:
    with mock.patch.multiple(NOW, call=call, longest=longest, has_stepped=longest > 0):
        assert allowed(timeout) == seconds


def test_the_first_step_may_take_ten_minutes() -> None:
    """The time until its first action, some microseconds, counted as an action: with "adaptive", 30 seconds were left
    for a first forward that compiles."""
    with mock.patch.multiple(NOW, call="", longest=0.0, has_stepped=False, action=None, number=0):
        NOW.enter("execute_pipeline")
        NOW.start("a forward")
        NOW.start("a backward")
        assert allowed("adaptive") == 600.0
        NOW.leave()
        NOW.enter("optimizer.step")
        assert allowed("adaptive") == 600.0
        NOW.leave()
        NOW.enter("execute_pipeline")
        assert allowed("adaptive") == 30.0
        NOW.longest = 100.0  # of an action that compiled
        assert allowed("adaptive") == 2000.0


def leave_reports(folder: str) -> None:
    with mock.patch.dict(os.environ, {crash.VARIABLE: folder}):
        split = cut(2)
        step(split)
        hooks = ExitStack()
        if dist.get_rank() == 1:
            unit = split.model.pipeline.policy.get_held_layers()[0]
            hooks.callback(register_unseen(unit, lambda *_: 1 / 0).remove)
        try:
            with hooks:
                step(split)
        except Exception:
            return
        raise AssertionError


@pytest.mark.turns
def test_ranks_that_fail_leave_reports_that_tell_what_happened(pool: Pool, tmp_path: Path) -> None:
    pool.run(leave_reports, 2, str(tmp_path))
    found, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (1, 0))
    assert found["run"] == other["run"] != ""
    assert found["fault"]["kind"] == RAISED and "ZeroDivisionError" in found["error"]
    assert len(found["actions"]) > 4 and found["memory"]["resident"] > 1e6 and "MainThread" in found["stacks"]
    text = "\n".join(crash.page(tmp_path))
    assert text.startswith("What happened: rank 1 (stage 1) failed in execute_pipeline, F0@1")
    assert re.search(r"s before: F0@1", text) and "rank 0 (stage 0)" in text


@pytest.mark.parametrize("text", ["", "[]", '{"rank": 1}', "[" * 100_000, '{"rank": "x", "fault": 3}'])
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank-0.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"rank-0\.json is not a valid crash report"):
        list(crash.page(tmp_path))


def test_the_allocator_of_the_gpu_is_not_asked_by_the_watch() -> None:
    """A rank that hung in the allocator of its GPU was not killed: the watch first waited, with the GIL, for the
    allocator's lock. The reports of all ranks but the first also said that nothing was allocated: GPU 0 was asked."""
    fault = Fault(RAISED, 1, "rank 1 (stage 1)")
    write = partial(crash.report, 1, "rank 1 (stage 1)", fault, None)
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.is_initialized", lambda: True),
        mock.patch("torch.cuda.memory_allocated", lambda: 5),
        mock.patch("torch.cuda.max_memory_allocated", lambda: 10),
    ):
        memory = write()["memory"]
        with ThreadPoolExecutor(1) as watch:
            of_watch = watch.submit(write).result()["memory"]
    assert (memory["allocated"], memory["allocated at most"]) == (5, 10)
    assert of_watch.keys() == {"resident", "of the host"}


def test_a_rank_that_was_killed_is_named_by_the_others(tmp_path: Path) -> None:
    fault = Fault("gone", 1, "rank 1 (stage 1)", message="rank 1 (stage 1) is gone")
    (tmp_path / "rank-0.json").write_text(json.dumps(crash.report(0, "rank 0 (stage 0)", fault, None)))
    lines = list(crash.page(tmp_path))
    assert lines[0] == "What happened: rank 1 (stage 1) is gone" and lines[1].startswith("Rank 1 has no report here")


def test_reports_of_an_earlier_run_are_not_shown(tmp_path: Path) -> None:
    """Rank 1 was killed, and the page told of an error that rank 1 had raised the day before: its report of that day
    was still in the folder."""
    raised = Fault(RAISED, 1, "rank 1 (stage 1)", "execute_pipeline", message="ValueError: planted")
    gone = Fault("gone", 1, "rank 1 (stage 1)", message="rank 1 (stage 1) is gone")
    for rank, fault, run in ((1, raised, "yesterday"), (0, gone, "today")):
        text = json.dumps(crash.report(rank, f"rank {rank} (stage {rank})", fault, None, run))
        (tmp_path / f"rank-{rank}.json").write_text(text)
    lines = list(crash.page(tmp_path))
    assert lines[0] == "What happened: rank 1 (stage 1) is gone" and lines[1].startswith("Rank 1 has no report here")
    assert lines[2] == "Not shown: rank-1.json, of an earlier run or attempt" and "planted" not in "".join(lines)


def test_monitor_and_library_agree_on_what_is_stopped() -> None:
    assert not monitor._is_stopped(os.getpid())


ALONE = """
import os, sys
import torch, torch.distributed as dist
import pipeshard
from tests.hunt.nets import Net, data
dist.init_process_group("gloo")
model = Net()
engine = pipeshard.initialize(
    model, torch.optim.SGD(model.parameters(), 0.1), pp_size=2, num_microbatches=2, verify=False, dry_run_input=data()
)
if dist.get_rank() == 0:
    engine.save_model(engine.model, sys.argv[1])
"""


@pytest.mark.turns
def test_a_call_of_rank_0_alone_is_named(tmp_path: Path) -> None:
    """A save inside `if rank == 0:` at the end of a script was told as "Connection closed by peer", and that rank 1 had
    ended, "its program being through"."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", ALONE, str(tmp_path / "saved")]
    ranks = [
        subprocess.Popen(
            command, cwd=tmp_path, env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 0], told
    assert re.search(
        r"RankError: rank 1 \(stage 1\) has reached the end of its program, but rank 0 \(stage 0\) waits for it in "
        r"save_model: every rank must call save_model\. If the call is inside a condition on the rank ",
        told[0],
    ), told[0]
    assert "Connection closed" not in told[0] and "Traceback" not in told[1]
