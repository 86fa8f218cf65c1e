"""Watching: this process's collective calls, the Watch that supervises them, and the hooks for the process's exit."""

import atexit
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch.distributed as dist

from pipeshard.distributed.failures import ENDED, RAISED, THROUGH, Alarm, Fault, text_of
from pipeshard.distributed.monitor import Monitor
from pipeshard.distributed.progress import NOW, Timeout, own_progress
from pipeshard.distributed.signals import SignalHandler
from pipeshard.distributed.watch import Interrupt, Watch
from pipeshard.errors import PipeshardError
from pipeshard.ghost import inside_pipeshard
from pipeshard.script import exit_now


class _Process:
    """The state of this process's collective calls.

    Attributes:
        world: the process group whose calls are counted.
        well: the number of the last call that succeeded without a watch, or -1 if there is none.
        interrupts: whether the watch has sent the SIGTERM that arrives next.
        pid: the id of the process that installed the hooks. Forked children inherit the hooks, but are not ranks.
        exit: a description of the program's sys.exit call, or "" if there was no such call or its status was 0.
    """

    world: dist.ProcessGroup | None = None
    watch: Watch | None = None
    well = -1
    interrupts = False
    pid = -1
    exit = ""
    monitor: Monitor | None = None


_here = _Process()
_names: list[Callable[[int], str]] = []

ANSWERED = 30.0  # seconds within which a store responds, if it responds at all

logger = logging.getLogger("pipeshard")


def watch_world(timeout: Timeout, watchdog: bool) -> None:
    """Count the collective calls in the default process group from now on and, if `watchdog` is set, supervise them.
    Call it on all ranks at the same time."""
    _count_calls()
    if watchdog:
        if _here.watch is None:
            _hook()
        if _here.watch is None or _here.watch.world is not _here.world:
            _here.watch = Watch(timeout, named, _here.well, _here.monitor)
            _here.watch.interrupt = _interrupt
        _here.watch.timeout = timeout


def _count_calls() -> None:
    """In a new world, restart the count of calls, and stop the watch of the previous world."""
    if _here.world is not dist.group.WORLD:
        NOW.reset()
        if _here.watch is not None:
            _here.watch.stop()
        _here.world, _here.well, _names[:] = dist.group.WORLD, -1, []


@contextlib.contextmanager
def constructing() -> Iterator[None]:
    """Context manager for the constructor of a plugin, which counts as a collective call. If the constructor raises a
    PipeshardError only on this rank, the other ranks raise RankError with this error's text in their next call. This
    context manager reports the error itself, since there may not be a watch yet."""
    _count_calls()
    with calling("PipelinePlugin"):
        try:
            yield
        except PipeshardError as error:
            if _here.world is not None and (_here.watch is None or _here.watch.world is not _here.world):
                rank, message = dist.get_rank(), text_of(error)
                fault = Fault(RAISED, rank, named(rank), NOW.where, message=message, told_by=rank)
                with contextlib.suppress(RuntimeError):
                    Alarm(rank, dist.get_world_size()).tell(fault, NOW.number)
            raise


@contextlib.contextmanager
def calling(name: str) -> Iterator[bool]:
    """Context manager for a collective call of the user's program. Yields whether the call counts. A call does not
    count inside another call, on a rank of a local world, or before this world's first plugin.

    With a watch, raises RankError instead of an error that another rank's failure caused.
    """
    with inside_pipeshard():
        if _here.world is None or _here.world is not dist.group.WORLD or NOW.call or own_progress() is not NOW:
            yield False
        elif _here.watch is not None and _here.watch.world is _here.world:
            with _here.watch.call(name):
                yield True
        else:
            NOW.enter(name)
            try:
                yield True
                _here.well = NOW.number
            finally:
                NOW.leave()


def name_ranks(names: Callable[[int], str]) -> None:
    """Set the function that returns the name of a rank of this world in errors."""
    _names[:] = [names]


def named(rank: int) -> str:
    """The name of a global rank in errors, such as `rank 2 (stage 2)`."""
    return _names[0](rank) if _names else f"rank {rank} of {dist.get_world_size()}"


def _hook() -> None:
    """Start the monitor, and install hooks that report errors and exits between two calls. Call it once per process."""
    _here.pid, _here.monitor = os.getpid(), Monitor()
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # prints the stacks on the monitor's SIGABRT
    before, leave = sys.excepthook, sys.exit

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        before(kind, error, trace)
        if os.getpid() == _here.pid and _here.watch is not None:
            _here.watch.ended(error)

    def exit(status: Any = None) -> NoReturn:
        handled = sys.exc_info()[1]
        _here.exit = f"with sys.exit({status!r})" + (f" after {text_of(handled)}" if handled else "") if status else ""
        leave(status)

    def at_exit() -> None:
        if os.getpid() != _here.pid:
            return
        _leaving(_here.exit or THROUGH)
        stopped = _here.watch is None or _here.watch.left()
        broken = _here.watch is not None and _here.watch.fault is not None
        if hasattr(sys, "last_value") and (broken or not stopped):  # an error was shown, and ends the process
            exit_now(1)  # torch would join threads that wait, possibly forever, for ranks that are gone
        _await_threads()

    sys.excepthook, sys.exit = excepthook, exit
    atexit.register(at_exit)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _on_sigterm.install(signal.SIGTERM)


def _await_threads() -> None:
    """Wait, at most ANSWERED seconds, for threads that still wait for a slow store. If the C++ code of these threads
    returned during Python's finalization, it would abort the process, although the program has succeeded."""
    until = time.monotonic() + ANSWERED
    for thread in threading.enumerate():
        if thread.name.startswith("pipeshard-"):
            thread.join(max(0.0, until - time.monotonic()))


def _interrupt() -> None:
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        _here.interrupts = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


@SignalHandler
def _on_sigterm(number: int, frame: Any) -> None:
    if _here.interrupts:
        _here.interrupts = False
        if _here.watch is not None and _here.watch.fault is not None and _here.watch.interrupts:
            raise Interrupt(str(_here.watch.fault) if NOW.call else _here.watch.why(), _here.watch.fault)
        return  # the call has ended by itself in the meantime
    if _here.watch is not None and (why := _here.watch.why()):  # torchrun terminates the remaining ranks
        logger.error("ended by SIGTERM, because %s", why)
    _leaving("by SIGTERM")
    raise SystemExit(128 + number)


def _leaving(how: str) -> None:
    if _here.watch is not None:
        _here.watch.leaving(ENDED, how)
