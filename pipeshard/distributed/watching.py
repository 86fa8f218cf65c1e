"""Watching: the Watch of this process, and what it is told when the process ends."""

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from pipeshard.distributed.failures import ENDED, RAISED
from pipeshard.distributed.progress import NOW
from pipeshard.distributed.watch import Interrupt, Watch
from pipeshard.ghost import inside_pipeshard

_watch: Watch | None = None
_interrupts = False  # whether the next SIGTERM is the watch's own


def watch_world(timeout: float | str | None) -> Watch | None:
    """The Watch of the default process group, if there is one; every rank makes it at the same time."""
    global _watch
    if not dist.is_initialized():
        return None
    if _watch is None:
        _hook()
    elif _watch.world is not dist.group.WORLD:
        _watch.stop()
    if _watch is None or _watch.world is not dist.group.WORLD:
        NOW.reset()
        _watch = Watch(timeout)
        _watch.interrupt = _interrupt
    _watch.timeout = timeout
    return _watch


@contextlib.contextmanager
def calling(name: str) -> Iterator[Watch | None]:
    """`Watch.call` of this process's Watch, which it gives; None where there is none, and inside of another call."""
    with inside_pipeshard():
        if _watch is None or _watch.world is not dist.group.WORLD or NOW.call:
            yield None
            return
        with _watch.call(name):
            yield _watch


def named(rank: int) -> str:
    """What errors call a rank of the world, as `rank 2 (stage 2)`."""
    return f"rank {rank}" if _watch is None else _watch.named(rank)


def _hook() -> None:
    """Once in a process: the others are told what ends it between two calls, too."""
    before = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        before(kind, error, trace)
        _leaving(RAISED, f"{kind.__name__}: {error}")

    def at_exit() -> None:
        _leaving(ENDED, "its program being through")
        stopped = _watch is None or _watch.left()
        broken = _watch is not None and _watch.fault is not None
        if hasattr(sys, "last_value") and (broken or not stopped):  # an error was shown, and ends the process
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # torch would join threads that wait for ranks which are gone, and may do so for ever

    sys.excepthook = excepthook
    atexit.register(at_exit)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _interrupt() -> None:
    global _interrupts
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        _interrupts = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _on_sigterm(number: int, frame: Any) -> None:
    global _interrupts
    if _interrupts:
        _interrupts = False
        if _watch is not None and _watch.fault is not None and _watch.interrupts:
            raise Interrupt(str(_watch.fault), _watch.fault)
        return  # it has come out by itself meanwhile
    _leaving(ENDED, "by SIGTERM")
    raise SystemExit(128 + number)


def _leaving(kind: str, message: str) -> None:
    if _watch is not None:
        _watch.leaving(kind, message)
