"""Contender: a pair of processes that train with one library when the driver requests it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.speed.work import Work
from tests.hosts import INTERFACE, Hosts

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "outputs" / "benchmarks" / "logs"
RANKS = 2
PATIENCE = 300.0  # seconds: a contender that does not answer for longer has failed

Batches = Sequence[tuple[int, int | None]]  # (seed, length) of each step; None is the length of the work


@dataclass(frozen=True)
class Contender:
    """`trainer` names a module in `trainers`, and `options` are the options of its Trainer. `environment` is the folder
    of the virtual environment (by default, the current one). `variables` are additional environment variables."""

    name: str
    trainer: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: str = ""
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        return str(ROOT / self.environment / "bin" / "python") if self.environment else sys.executable


class ContenderError(Exception):
    """A contender could not start, failed, or did not answer."""


class Pair:
    """The two processes of a contender. They are stopped unless `round` is running, because threads of process groups
    poll and would slow down other contenders. With `hosts`, each process runs in a separate network namespace."""

    def __init__(self, contender: Contender, work: Work, label: str = "", hosts: Hosts | None = None) -> None:
        self.contender, self.label, self.hosts = contender, label, hosts
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        self.logs: list[Path] = []
        if not os.access(contender.python, os.X_OK):
            raise ContenderError(f"the environment {contender.environment} does not exist: run make setup-peers")
        self._scratch = tempfile.TemporaryDirectory(prefix="speed-")
        try:
            for rank in range(RANKS):
                self._start(rank, work)
            self._answers()
            self._signal(signal.SIGSTOP)
        except ContenderError:
            self.close()
            raise

    def round(self, batches: Batches) -> list[dict[str, Any]]:
        """Run one step per batch, and return the answer of each rank (see `worker.py`). Raises ContenderError."""
        try:
            self._signal(signal.SIGCONT)
            for connection in self.connections:
                connection.send(list(batches))
            answers = self._answers()
            self._signal(signal.SIGSTOP)
            return answers
        except (ContenderError, OSError) as error:
            self.close()
            raise ContenderError(str(error)) from None

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._scratch.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)  # no effect on a process that has exited

    def _start(self, rank: int, work: Work) -> None:
        contender = self.contender
        LOGS.mkdir(parents=True, exist_ok=True)
        slug = re.sub(r"\W+", "-", f"{contender.name} {self.label} {work}")
        self.logs.append(LOGS / f"{slug}-{rank}.log")
        ours, theirs = socket.socketpair()
        order = {
            "trainer": contender.trainer,
            "options": contender.options,
            "work": asdict(work),
            "rank": rank,
            "size": RANKS,
            "store": f"{self._scratch.name}/store",
        }
        worker = ("-W", "ignore", "-m", "benchmarks.speed.worker")
        host = [] if self.hosts is None else ["ip", "netns", "exec", self.hosts.names[rank]]
        interface = "lo" if self.hosts is None else INTERFACE
        with self.logs[-1].open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [*host, contender.python, *worker, str(theirs.fileno()), json.dumps(order)],
                    cwd=ROOT,
                    env=_environment(rank, interface) | contender.variables,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
        theirs.close()
        self.connections.append(Connection(ours.detach()))

    def _answers(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + PATIENCE
        answers: list[dict[str, Any]] = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise ContenderError(f"rank {rank} did not answer within {PATIENCE:.0f} s (see {self.logs[rank]})")
            try:
                answers.append(connection.recv())
            except (EOFError, ConnectionResetError):
                answers.append({"error": self._epitaph(rank), "at": 0.0})
        failed = [answer for answer in answers if "error" in answer]
        if failed:  # the first failure has the cause; the other rank lost its connection
            first = min(failed, key=lambda answer: answer["at"])
            raise ContenderError(first["error"].strip().splitlines()[0][:200])
        return answers

    def _epitaph(self, rank: int) -> str:
        """Describe how a process exited without an answer: its exit status and the last line of its log."""
        code = self.processes[rank].wait()
        lines = self.logs[rank].read_text(errors="replace").strip().splitlines()
        return f"rank {rank} exited with status {code}: {lines[-1] if lines else 'it printed nothing'}"


def _environment(rank: int, interface: str) -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": interface,
        "DS_ACCELERATOR": "cpu",
        # In all contenders, freed memory stays with the process: page faults cause much of the noise.
        "MALLOC_MMAP_THRESHOLD_": str(2**32),
        "MALLOC_TRIM_THRESHOLD_": str(2**36),
        # DeepSpeed reads these even if torch.distributed is already initialized.
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
    }
