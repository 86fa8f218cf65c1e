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

PACE = 0.3  # seconds that a step takes at least, until the job is told to hurry
LAST = 10  # steps that are not begun before that


def interruptible() -> None:
    """Let a new process end on Ctrl-C: nohup, and the & of a script, have all that they start ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass(frozen=True)
class Line:
    """What rank 0 wrote after a step: the step's number, the layout it ran with, and its loss."""

    step: int
    pp_size: int
    dp_size: int
    loss: float


def lines(folder: Path) -> list[Line]:
    """What is written so far."""
    path = folder / "steps.txt"
    text = path.read_text() if path.exists() else ""
    words = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return [Line(int(step), int(pp), int(dp), float(loss)) for step, pp, dp, loss in words]


class Agents:
    """Runs `examples/elastic.py` in `folder`, with these arguments, slowly enough to see what happens on the way.

    As a context, it leaves no process behind.
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
        """One more agent. The first one holds the store in which all of them meet."""
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
        """An agent and its workers, at once, as where a machine is lost."""
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
        """Wait until `condition` holds for the lines written; an AssertionError with all outputs ends the wait."""
        start = time.monotonic()
        while not condition(written := lines(self.folder)):
            if time.monotonic() > start + timeout:
                raise AssertionError(f"not in {timeout} seconds: {what}\n{self._report()}")
            time.sleep(0.05)
        return written

    def statuses(self, agents: Sequence[subprocess.Popen[bytes]], timeout: float = 150) -> list[int]:
        """The exit statuses of agents that end by themselves."""
        self.until("the end", lambda _: all(agent.poll() is not None for agent in agents), timeout)
        return [agent.returncode for agent in agents]

    def _output(self, number: int) -> Path:
        return self.folder / f"agent{number}.txt"

    def _report(self) -> str:
        outputs = [f"--- agent {k}\n{self._output(k).read_text()[-4000:]}" for k in range(len(self.all))]
        steps = [f"{line.step}: p={line.pp_size} dp={line.dp_size}" for line in lines(self.folder)]
        return "\n".join([*outputs, "--- steps", *steps])
