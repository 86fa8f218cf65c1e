"""Fleet: the ranks that run one test at a time in lockstep, with a time limit for each test.

A zygote process imports the tests once and forks the ranks, so that new ranks can start immediately after a test that
did not end in the same way on every rank.
"""

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
START, LIMIT, GRACE = 180.0, 120.0, 30.0  # seconds for imports, for a test, and for the other ranks after the first one
WORST = ("hang", "died", "raw", "different", "refused", "skipped", "passed")  # a test's kind is its worst rank's
ENDED = ""
Result = dict[str, Any]


class Rank:
    """A forked rank: names of tests go in, one per line, and a line of JSON comes out for each."""

    def __init__(self, folder: Path, name: str) -> None:
        self.lines: queue.Queue[str] = queue.Queue()
        self.input = (folder / f"in-{name}").open("w")
        threading.Thread(target=self._read, args=(folder / f"out-{name}",), daemon=True).start()
        self.pid: int | None = None

    def _read(self, path: Path) -> None:
        with open(path) as stream:
            for line in stream:
                self.lines.put(line)
        self.lines.put(ENDED)

    def next_line(self, seconds: float) -> str | None:
        """The next line, ENDED, or None if there is none in time."""
        try:
            return self.lines.get(timeout=max(seconds, 0.001))
        except queue.Empty:
            return None


class Fleet:
    """`max(stages, 1)` ranks, forked anew after a test that did not end alike on every rank."""

    def __init__(self, checkout: Path, stages: int, limit: float = LIMIT, worker: Path = WORKER) -> None:
        self.size, self.limit = max(stages, 1), limit
        self.ranks: list[Rank] = []
        self.folder = Path(tempfile.mkdtemp(prefix="suite"))
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"PIPESHARD_CRASH": "", "WANDB_DISABLED": "true"}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            environment.pop(name, None)
        self.zygote = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(worker), str(checkout), str(stages), str(self.folder)],
            cwd=checkout,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def start(self) -> dict[str, Any]:
        """Fork the ranks; returns the names of the tests, and the modules that cannot be imported."""
        assert self.zygote.stdin is not None
        port = free_port()
        names = [f"{port}-{number}" for number in range(self.size)]
        for name in names:
            os.mkfifo(self.folder / f"in-{name}")
            os.mkfifo(self.folder / f"out-{name}")
        self.zygote.stdin.write(f"{port}\n")
        self.zygote.stdin.flush()
        self._wait_for_import()
        self.ranks = [Rank(self.folder, name) for name in names]
        hello: dict[str, Any] = {}
        for rank in self.ranks:
            if not (line := rank.next_line(START)):
                raise RuntimeError("a rank has ended before its first test")
            hello = json.loads(line)
            rank.pid = hello["pid"]
        return hello

    def _wait_for_import(self) -> None:
        deadline = time.monotonic() + START
        while not (self.folder / "ready").exists():
            if self.zygote.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the process that imports the tests has ended, or takes over {START:.0f} s")
            time.sleep(0.05)

    def run(self, name: str) -> Result:
        """The result of one test: the worst of the ranks'."""
        if not self.ranks:
            self.start()
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):  # it has ended, which is its result
                rank.input.write(name + "\n")
                rank.input.flush()
        results = self._collect()
        kinds = {result["kind"] for result in results}
        if len(kinds) > 1 or len(results) < self.size or kinds & {"hang", "died"}:
            self.stop_ranks()  # they may be at different messages
        worst = min(results, key=lambda result: WORST.index(result["kind"]))
        return worst | {"ranks": [result["kind"] for result in results]}

    def _collect(self) -> list[Result]:
        deadline, found = time.monotonic() + self.limit, dict[int, Result]()
        while len(found) < self.size and time.monotonic() < deadline:
            for number in set(range(self.size)) - found.keys():
                line = self.ranks[number].next_line(0.02)
                if line is None:
                    continue
                found[number] = json.loads(line) if line != ENDED else without(f"rank {number} ended", "died")
                deadline = min(deadline, time.monotonic() + GRACE)
        # The ranks that wait for one that failed have no result of their own.
        if all(result["kind"] in ("passed", "skipped") for result in found.values()):
            for number in set(range(self.size)) - found.keys():
                found[number] = without(
                    f"rank {number} has not ended in {self.limit:.0f} s, or after the other", "hang"
                )
        return [found[number] for number in sorted(found)]

    def stop_ranks(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.input.close()
            if rank.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
        self.ranks = []

    def stop(self) -> None:
        self.stop_ranks()
        self.zygote.kill()
        self.zygote.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def without(why: str, kind: str) -> Result:
    return {"kind": kind, "why": why, "text": why, "trainers": 0}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
