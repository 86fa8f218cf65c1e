"""Agents: the elastic agents of one job, as processes of this machine, each with its own workers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

import elastic
from tests.pool import ENVIRONMENT

PACE = 0.3  # minimum seconds per step, until `Agents.hurry` is called
LAST = 10  # the number of last steps that wait for `Agents.hurry`


def interruptible() -> None:
    """Make a new process end on Ctrl-C: processes that a shell script starts with & ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass(frozen=True)
class Line:
    """A line that rank 0 writes after a step: the step's number, layout and loss."""

    step: int
    pp_size: int
    dp_size: int
    loss: float


def lines(folder: Path) -> list[Line]:
    """The complete lines that rank 0 has written so far."""
    path = folder / "steps.txt"
    text = path.read_text() if path.exists() else ""
    words = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return [Line(int(step), int(pp), int(dp), float(loss)) for step, pp, dp, loss in words]


class Agents:
    """Runs `examples/elastic.py` in `folder` with these arguments, slowly enough for a test to act between steps.

    As a context manager, it kills all agents and their workers on exit.
    """

    def __init__(self, folder: Path, nnodes: str, arguments: Sequence[str]) -> None:
        self.folder, self.nnodes, self.arguments = folder, nnodes, [*arguments, "--output", str(folder)]
        self.all: list[subprocess.Popen[bytes]] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.endpoint = f"localhost:{server.getsockname()[1]}"
        self.script = folder / "script.py"
        self.script.write_text(
            textwrap.dedent(f"""
            import pathlib, sys, time
            import elastic
            from pipeshard import ElasticJob
            done = ElasticJob.step_done
            steps = elastic.parse(sys.argv[1:]).steps
            hurry = pathlib.Path({str(folder / "hurry")!r})
            def slowly(job):
                start = time.monotonic()
                while not hurry.exists() and not job._wishes and (
                    time.monotonic() < start + {PACE} or job.step >= steps - {LAST}
                ):
                    time.sleep(0.02)
                done(job)
            ElasticJob.step_done = slowly
            sys.exit(elastic.main())
            """)
        )

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *error: object) -> None:
        for agent in self.all:
            self.kill(agent)

    def start(self, processes: int = 1) -> subprocess.Popen[bytes]:
        """Start another agent. The first agent hosts the rendezvous store."""
        flags = ["--nnodes", self.nnodes, "--nproc-per-node", str(processes), "--rdzv-endpoint", self.endpoint]
        conf = ["--rdzv-conf", f"is_host={int(not self.all)}"]
        command = [sys.executable, "-W", "ignore", "-m", "pipeshard.launch", *flags, *conf]
        path = os.pathsep.join([str(Path(elastic.__file__).parent), *filter(None, sys.path)])
        unset = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        environment |= {**ENVIRONMENT, "PYTHONPATH": path}
        with self._output(len(self.all)).open("wb") as output:
            agent = subprocess.Popen(
                [*command, str(self.script), *self.arguments], env=environment, stdout=output, stderr=output
            )
        self.all.append(agent)
        return agent

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        """Kill an agent and its workers, as if their machine were lost."""
        try:
            everyone = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            everyone = []
        for process in everyone:
            process.kill()
        agent.wait()

    def hurry(self) -> None:
        (self.folder / "hurry").touch()

    def until(self, what: str, condition: Callable[[list[Line]], bool], timeout: float = 150) -> list[Line]:
        """Wait until `condition` is true of the written lines. Raises AssertionError with all outputs on a timeout."""
        start = time.monotonic()
        while not condition(written := lines(self.folder)):
            if time.monotonic() > start + timeout:
                raise AssertionError(f"timeout after {timeout} seconds, waiting for: {what}\n{self._report()}")
            time.sleep(0.05)
        return written

    def statuses(self, agents: Sequence[subprocess.Popen[bytes]], timeout: float = 150) -> list[int]:
        """Wait until these agents have exited. Returns their exit statuses."""
        self.until("the end", lambda _: all(agent.poll() is not None for agent in agents), timeout)
        return [agent.returncode for agent in agents]

    def _output(self, number: int) -> Path:
        return self.folder / f"agent{number}.txt"

    def _report(self) -> str:
        outputs = [f"--- agent {k}\n{self._output(k).read_text()[-4000:]}" for k in range(len(self.all))]
        steps = [f"{line.step}: p={line.pp_size} dp={line.dp_size}" for line in lines(self.folder)]
        return "\n".join([*outputs, "--- steps", *steps])
