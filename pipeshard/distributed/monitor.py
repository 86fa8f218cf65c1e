"""Monitor: a small process for each rank that kills the rank if it hangs while it holds the GIL.

A thread of the rank would need the GIL to kill the rank, but a hanging extension or regular expression may never
release the GIL. The monitor is therefore a separate process. It imports only the standard library, and uses 10 MB.

    rank ── each second: how long the rank may be silent ──▶ monitor ── SIGABRT, then SIGKILL ──▶ rank
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

LOOK = 0.5  # seconds between two checks
SLACK = 2.0  # seconds by which a rank may exceed its limit
KILL_AFTER = 2.0  # seconds from SIGABRT to SIGKILL


class Monitor:
    """The rank's side of the monitor: starts the monitor process and sends it heartbeats."""

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
        """Send a heartbeat. `limit` is the number of seconds for which this process may be silent from now on. Infinity
        means no limit."""
        with contextlib.suppress(OSError):  # the monitor was killed or is stopped: training continues without it
            os.write(self._pipe, f"{0 if limit == float('inf') else limit:.3f}\n".encode())


def supervise(rank: int) -> None:
    """Supervise the parent process, whose process id is `rank`, until it exits. Kill the parent if it sends no
    heartbeat for too long. Time during which this process or the parent is stopped does not count."""
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
    """Whether a signal or a debugger has stopped a process. False if the system does not report this."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in b"Tt"
    except OSError:
        return False


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    supervise(int(sys.argv[1]))
