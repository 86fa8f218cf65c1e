"""The pool: worker processes, started once and reused, that run a test's function as the ranks of a gloo world.

    test process                    forkserver                     workers
    prepare ─────────── starts ───▶ imports torch, transformers
    Pool.run ────────── asks for ─▶ forks ───────────────────────▶ rank 0, 1, ...   (kept for the next job)
             ◀─────── one Outcome each, within the timeout ───────

Imports take seconds and run once; a worker is then forked in milliseconds. In a run of tests, the forkserver itself is
a fork of the process that has collected the tests.
"""

import contextlib
import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from tests.worker import POLLUTED, Job, Outcome, class_name, serve

T = TypeVar("T")

MAX_WORKERS = 8
GRACE = 3.0  # seconds that the other ranks have after one has failed
PRELOAD = [
    "pytest",
    "torch.distributed.device_mesh",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "colossalai.booster",
    "tests.unsplit",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gemma2", "gpt2", "mixtral", "t5", "vit")),
]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PIPESHARD_CRASH": "",  # crash reports are written only in tests that set a folder
    "OMP_NUM_THREADS": "1",  # a process that has started threads cannot be forked safely
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})


def prepare(copied: bool = False) -> None:
    """Start the forkserver, which imports in the background, and return at once. With `copied`, on Linux, where this is
    safe, the forkserver is a copy of this process, which has imported most modules."""
    copied = copied and sys.platform == "linux"
    way = mock.patch("multiprocessing.util.spawnv_passfds", fork) if copied else nullcontext()
    with mock.patch.dict(os.environ, ENVIRONMENT):
        resource_tracker.ensure_running()  # otherwise the forkserver would start it, also as a copy
        with way:
            forkserver.set_forkserver_preload(PRELOAD)
            forkserver.ensure_running()


def fork(path: str, args: Sequence[str], passed: Sequence[int]) -> int:
    """Run a `python -c` command in a copy of this process. The copy closes its duplicate of the pipe's other end, so it
    exits when this process ends."""
    if process := os.fork():
        return process
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {*passed}:
        with contextlib.suppress(OSError):
            if any(os.path.sameopenfile(descriptor, one) for one in passed):
                os.close(descriptor)
    logging.root.handlers.clear()  # pytest's handlers would store the workers' log records
    # The lock is held in the copy: a worker that starts its own forkserver, as a DataLoader may, would wait for it.
    forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]
    try:
        exec(args[-1], {})
    finally:
        os._exit(0)


class WorkerError(Exception):
    """A job failed. The message describes all ranks, beginning with the rank that failed first."""


class Pool:
    """Up to 8 workers. When a job has ended, their output is printed as output of the test.

    With method "spawn", each worker imports all modules itself, since a process that has used a GPU cannot be forked.
    """

    def __init__(self, method: str = "forkserver") -> None:
        self._method = method
        self._workers: list[_Worker] = []
        self._jobs = 0
        self._folder = tempfile.TemporaryDirectory(prefix="pool-")

    def run(self, fn: Callable[..., T], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[T]:
        """Call `fn(*args, **kwargs)` on every rank of a new gloo world. Returns the list of the ranks' results.

        Args:
            fn: a function of a module. The function, its arguments and its results are pickled.
            world_size: at most 8.
            timeout: seconds.

        Raises:
            WorkerError: a rank raised, died, or did not return in time.
        """
        outcomes = self._run(fn, world_size, args, kwargs, timeout)
        if any(outcome.kind != "returned" for outcome in outcomes):
            raise WorkerError(_describe(outcomes, timeout))
        return [outcome.value for outcome in outcomes]

    def run_expecting(
        self,
        error: type[BaseException],
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        **kwargs: Any,
    ) -> list[str]:
        """Like `run`, but every rank must raise `error`. Returns the list of the ranks' messages.

        Raises:
            WorkerError: a rank returned, raised anything else, died, or was stuck.
        """
        outcomes = self._run(fn, world_size, args, kwargs, timeout)
        if any(class_name(error) not in outcome.classes for outcome in outcomes):
            raise WorkerError(f"Not every rank raised {error.__name__}.\n" + _describe(outcomes, timeout))
        return [outcome.message for outcome in outcomes]

    def shutdown(self) -> None:
        """End every worker."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(GRACE)
            worker.kill()
        self._workers.clear()
        self._folder.cleanup()

    def _run(
        self, fn: Callable[..., Any], world_size: int, args: Sequence[Any], kwargs: dict[str, Any], timeout: float
    ) -> list[Outcome]:
        call = pickle.dumps((fn, args, kwargs))
        workers = self._hire(world_size)
        self._jobs += 1
        meeting_point = f"{self._folder.name}/job{self._jobs}"
        try:
            for rank, worker in enumerate(workers):
                worker.begin(Job(rank, world_size, meeting_point, timeout, call))
            outcomes = _collect(workers, timeout)
        finally:
            for worker in workers:
                if worker.busy:
                    worker.kill()
        for rank, worker in enumerate(workers):
            if outcomes[rank].kind == "returned" and (text := worker.output()):
                print(f"--- rank {rank} printed ---\n{text}", end="")
        return outcomes

    def _hire(self, count: int) -> list["_Worker"]:
        if not 1 <= count <= MAX_WORKERS:
            raise ValueError(f"world_size={count}: use 1 to {MAX_WORKERS}.")
        if self._method == "forkserver":
            prepare()
        # A killed worker may take a while to exit, if the machine is out of memory.
        self._workers = [one for one in self._workers if one.process.is_alive() and not one.connection.closed]
        while len(self._workers) < count:
            self._workers.append(_Worker(Path(self._folder.name), self._method))
        return self._workers[:count]


class _Worker:
    """A worker, as the test process sees it."""

    def __init__(self, logs: Path, method: str) -> None:
        context: Any = get_context(method)
        self.connection, theirs = context.Pipe()
        handle, self._log = tempfile.mkstemp(dir=logs)
        os.close(handle)
        self.process = context.Process(target=serve, args=(theirs, self._log), daemon=True)
        self.process.start()
        theirs.close()
        self.busy = False

    def begin(self, job: Job) -> None:
        self.busy = True
        os.truncate(self._log, 0)
        self.connection.send_bytes(pickle.dumps(job))

    def outcome(self) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(self.connection.recv_bytes())
            return outcome
        except (EOFError, OSError):
            self.process.join(GRACE)
            return Outcome("died", message=f"exit code {self.process.exitcode}", text=self.output())

    def output(self) -> str:
        return Path(self._log).read_text(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.join(GRACE)
        self.connection.close()


@dataclass
class _Deadline:
    at: float  # seconds of the monotonic clock; may change during the wait


def _collect(workers: list[_Worker], timeout: float) -> list[Outcome]:
    deadline = _Deadline(time.monotonic() + timeout)
    outcomes: dict[int, Outcome] = {}
    for rank in _ready(workers, range(len(workers)), deadline):
        outcomes[rank] = workers[rank].outcome()
        if outcomes[rank].kind != "returned":
            deadline.at = min(deadline.at, time.monotonic() + GRACE)
    # Ranks that returned leave their groups only now, so that no slower rank loses its connection to them.
    closing = [rank for rank, outcome in outcomes.items() if outcome.kind != "died"]
    for rank in closing:
        with contextlib.suppress(OSError):
            workers[rank].connection.send_bytes(b"leave")
    deadline.at = max(deadline.at, time.monotonic() + GRACE)
    for rank in _ready(workers, closing, deadline):
        with contextlib.suppress(EOFError, OSError):
            left = workers[rank].connection.recv_bytes()
            workers[rank].busy = False
            if left == POLLUTED:
                workers[rank].kill()
    stuck = [rank for rank, worker in enumerate(workers) if worker.busy and rank not in outcomes]
    stuck += [rank for rank in closing if workers[rank].busy and outcomes[rank].kind == "returned"]
    for rank, text in _stacks(workers, stuck).items():
        outcomes[rank] = Outcome("stuck", message="leaving its process groups" if rank in outcomes else "", text=text)
    return [outcomes[rank] for rank in range(len(workers))]


def _ready(workers: list[_Worker], ranks: Sequence[int], deadline: _Deadline) -> Iterator[int]:
    """Yield each of `ranks` as soon as it has sent a message, until the deadline."""
    pending: dict[Any, int] = {workers[rank].connection: rank for rank in ranks}
    while pending and (ready := wait(list(pending), max(0.0, deadline.at - time.monotonic()))):
        for connection in ready:
            yield pending.pop(connection)


def _stacks(workers: list[_Worker], ranks: Sequence[int]) -> dict[int, str]:
    """The output of each of these ranks, followed by the Python stacks of all its threads."""
    before = {rank: len(workers[rank].output()) for rank in ranks}
    for rank in ranks:
        os.kill(workers[rank].process.pid or 0, signal.SIGUSR1)
    seen: dict[int, str] = {}
    deadline = time.monotonic() + 2.0
    while ranks and time.monotonic() < deadline:
        time.sleep(0.1)
        # A dump is complete if it has begun and no longer grows.
        last, seen = seen, {rank: workers[rank].output() for rank in ranks}
        if last == seen and all(len(seen[rank]) > before[rank] for rank in ranks):
            break
    return seen


def _describe(outcomes: list[Outcome], timeout: float) -> str:
    """Describe all ranks: failed ranks in the order of their failures, then stuck ranks, then ranks that returned."""
    order = {"died": 0, "raised": 0, "stuck": 1, "returned": 2}
    ranks = sorted(range(len(outcomes)), key=lambda rank: (order[outcomes[rank].kind], outcomes[rank].at))
    first = outcomes[ranks[0]]
    if first.kind == "stuck":
        lines = [f"Timeout: after {timeout:g} s not every rank had returned."]
    elif first.kind == "returned":
        lines = ["Every rank returned."]
    else:
        lines = [f"Rank {ranks[0]} {first.kind} first: {first.message}"]
    for rank in ranks:
        outcome = outcomes[rank]
        headline = " ".join(filter(None, [f"rank {rank} {outcome.kind}", outcome.message.partition("\n")[0]]))
        lines += [f"===== {headline} =====", outcome.text] if outcome.text else [f"===== {headline} ====="]
    return "\n".join(lines)
