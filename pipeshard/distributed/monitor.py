"""Monitor: a small process for each rank, which ends the rank if it hangs while it holds the interpreter's lock.

A thread of the rank itself needs the GIL to end it, which a hanging extension or regular expression
may hold forever. This program runs separately, and imports only the standard library; it takes 10 MB.

    rank ── each second: how long it may be silent ──▶ monitor ── SIGABRT, then SIGKILL ──▶ rank
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

LOOK = 0.5  # seconds between two looks
SLACK = 2.0  # seconds beyond the limit
KILL_AFTER = 2.0  # seconds from SIGABRT to SIGKILL


class Monitor:
    """The rank's end of it."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
        nowhere = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, bufsize=0, start_new_session=True
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)

    def beat(self, limit: float) -> None:
        """Report that this process lives, and for how many seconds it may be silent from now on; infinity is
        forever."""
        with contextlib.suppress(OSError):  # it was killed, or is stopped: training goes on without it
            os.write(self._pipe, f"{0 if limit == float('inf') else limit:.3f}\n".encode())


def supervise(rank: int) -> None:
    """Supervise the process `rank`, the parent of this one, until it has ended. Time in which it is stopped, or this
    process is, does not count."""
    limit, silent = 0.0, 0.0
    while os.getppid() == rank:
        ready, _, _ = select.select([0], [], [], LOOK)
        if ready:
            if not (text := os.read(0, 65536)):
                return
            limit, silent = float(text.split()[-1]), 0.0
            time.sleep(LOOK)
        elif not _is_stopped(rank):
            silent += LOOK
        if limit and silent > limit + SLACK:
            os.kill(rank, signal.SIGABRT)
            time.sleep(KILL_AFTER)
            if os.getppid() == rank:
                os.kill(rank, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped it; False if the system does not report it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in b"Tt"
    except OSError:
        return False


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    supervise(int(sys.argv[1]))
