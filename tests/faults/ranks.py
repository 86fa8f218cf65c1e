"""Ranks: the processes of one run, forked from this process, which has already imported everything."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


class Ranks:
    """Forks `size` processes; in each of them `rank` is its number, and the caller has to go on as that rank, so that
    it ends as any Python program does. In the one that forked, `rank` is None."""

    def __init__(self, folder: Path, name: str, size: int) -> None:
        self.folder, self.name, self.size = folder, name, size
        self.rank: int | None = None
        self.port = free_port()
        self.pids: list[int] = []
        self.statuses: dict[int, int] = {}
        self.ended: dict[int, float] = {}
        for rank in range(size):
            if (pid := os.fork()) == 0:
                self.rank = rank
                output = os.open(self.output(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(output, 1)
                os.dup2(output, 2)
                sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
                return
            self.pids.append(pid)

    def join(self) -> None:
        """Make a process group of them, in each of them; SIGUSR1 shows where one is."""
        logging.basicConfig(level=logging.INFO)
        torch.set_num_threads(1)
        faulthandler.register(signal.SIGUSR1)
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        os.environ["PIPESHARD_CRASH"] = str(self.folder / "crash")
        os.environ.update(where, RANK=str(self.rank), WORLD_SIZE=str(self.size))
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))

    def output(self, rank: int) -> Path:
        return self.folder / f"{self.name}{rank}.txt"

    def text(self, rank: int) -> str:
        return self.output(rank).read_text(errors="replace")

    def wait(self, until: Callable[[], bool]) -> bool:
        """Until all have ended; False if `until()` came to hold before."""
        while len(self.statuses) < self.size:
            for rank, pid in enumerate(self.pids):
                if rank not in self.statuses:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        self.statuses[rank] = os.waitstatus_to_exitcode(status)
                        self.ended[rank] = time.monotonic()
            if until():
                return len(self.statuses) == self.size
            time.sleep(0.01)
        return True

    def signal(self, number: signal.Signals, rank: int) -> None:
        if rank not in self.statuses:
            os.kill(self.pids[rank], number)

    def kill(self) -> None:
        """End those that are left, which show where they are before."""
        for rank in range(self.size):
            self.signal(signal.SIGCONT, rank)
            self.signal(signal.SIGUSR1, rank)
        if len(self.statuses) < self.size:
            time.sleep(0.5)
        for rank in range(self.size):
            self.signal(signal.SIGKILL, rank)
        self.wait(lambda: False)

    @property
    def port_is_free(self) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended linger
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                return False
        return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
