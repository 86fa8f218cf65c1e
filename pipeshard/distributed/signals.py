"""Signals: pipeshard's signal handlers, and the hooks that remove the SIGTERM handler from forked children."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

_mask = threading.local()  # the signal mask of a thread that is in fork()


@dataclass(frozen=True, eq=False)
class SignalHandler:
    """A signal handler of pipeshard."""

    then: Callable[[int, Any], None]

    def __call__(self, number: int, frame: Any) -> None:
        self.then(number, frame)

    def install(self, number: int) -> None:
        _hook()
        signal.signal(number, self)


@cache
def _hook() -> None:
    os.register_at_fork(before=_block_sigterm, after_in_parent=_unblock_sigterm, after_in_child=_in_child)


def _block_sigterm() -> None:
    # Python drops signals that a child receives before it leaves fork(), such as the SIGTERM of Process.terminate.
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _in_child() -> None:
    """Restore the default handler of SIGTERM in a forked child, since the child is not a rank and must exit when its
    parent terminates it. The handler of SIGUSR1 remains, since the default handler would end the child."""
    if isinstance(signal.getsignal(signal.SIGTERM), SignalHandler):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock_sigterm()
