"""Peers: the processes of the other ranks on this host, and their states as the kernel reports them.

The connections of a killed rank stay open as long as one of its forked children runs. The connections of a stopped
(suspended) rank always stay open. Neither a killed nor a stopped rank can report its own state. However, ranks on the
same host can query each other's processes, and can thus detect both states without a connection or a timeout.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

EVERY = 4  # checks of the watch per check of this class
STOPPED = 5  # consecutive checks after which a process counts as stopped, since the whole job may be paused
PDEATHSIG = 1  # option of prctl: the signal that a process receives when its parent exits
SAME = 2.0  # seconds by which readings of a start time can differ: the kernel reports the boot time in whole seconds
KILLED = "is gone: it was killed or has crashed"
UNASKED = 8  # checks of the watch without a response from the store, after which a suspect counts as killed


class Peers:
    """Finds a rank of this host that was killed or is stopped.

    `look` queries only the kernel, and is called by the thread that checks timeouts. `meet` queries the store, and is
    called by the thread that polls the store, since the store may not respond.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.left: set[int] = set()  # ranks that have signed off
        self._processes: dict[int, psutil.Process] = {}  # by rank, for the other ranks on this host
        self._stopped: dict[int, int] = {}
        self._suspect, self._sure = -1, False
        self._met, self._looks = False, 0
        own = psutil.Process()
        self.store.set(f"process/{rank}", json.dumps([own_host(), own.pid, own.create_time()]))

    def meet(self) -> None:
        """Read from the store which ranks are on this host, and whether rank 0 and the suspected rank have signed
        off."""
        keys = [f"process/{rank}" for rank in range(self.size)]
        if not self._met and self.store.check(keys):
            self._met = True
            for rank, text in enumerate(self.store.multi_get(keys)):
                host, pid, created = json.loads(text)
                if host == own_host() and rank != self.rank and (process := _process(pid, created)) is not None:
                    self._processes[rank] = process
        asked = {0, self._suspect} - self.left - {-1}  # the store ends with rank 0
        self.left |= {rank for rank in asked if self.store.check([f"left/{rank}"])}
        self._sure = self._suspect >= 0

    def look(self, silent: int = 0) -> tuple[int, str] | None:
        """Return a rank that was killed or is stopped, with a message about the rank's state, or None if no such rank
        exists. `silent` is the number of consecutive checks to which the store has not responded. A rank counts as
        killed only if it has not signed off in the store, or if the store does not respond."""
        self._looks += 1
        if self._looks % EVERY == 0:
            for rank, process in self._processes.items():
                self._stopped[rank] = self._stopped.get(rank, 0) + 1 if _is_process_stopped(process) else 0
        stopped = next((rank for rank, looks in self._stopped.items() if looks >= STOPPED), None)
        if stopped is not None:
            return stopped, f"does not respond: it is suspended (process {self._processes[stopped].pid} of this host)"
        if self._suspect in self.left or (self._suspect < 0 and self._looks % EVERY == 0):
            self._suspect, self._sure = self.killed(), False
        if self._suspect not in self.left and self._suspect >= 0 and (self._sure or silent > UNASKED):
            pid = self._processes[self._suspect].pid
            return self._suspect, f"{KILLED} (process {pid} of this host)"
        return None

    def killed(self) -> int:
        """Return a rank of this host whose process no longer exists, although the rank has not signed off, or -1 if no
        such rank exists."""
        gone = (rank for rank, process in self._processes.items() if rank not in self.left and _is_gone(process))
        return next(gone, -1)


@dataclass(frozen=True)
class Attached:
    """A DataLoader's `worker_init_fn` that makes workers exit when their rank ends for any reason (on Linux).

    Ordinary workers check only every 5 seconds whether their rank still exists. Until then, they keep the rank's
    connections and port open.
    """

    then: Callable[[int], None] | None = None

    def __call__(self, worker: int) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
        if self.then is not None:
            self.then(worker)


def attach_workers(dataloader: Any) -> None:
    """Make the workers of a DataLoader exit with this process."""
    if getattr(dataloader, "num_workers", 0) and not isinstance(dataloader.worker_init_fn, Attached):
        dataloader.worker_init_fn = Attached(dataloader.worker_init_fn)


def own_host() -> list[str]:
    """A key that is equal for two processes if they run on the same host, in the same process id namespace."""
    try:
        return [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    except OSError:  # not on Linux
        return [os.uname().nodename]


def _process(pid: int, created: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return process if abs(process.create_time() - created) < SAME else None
    except psutil.Error:
        return None


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _is_process_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
