"""Alarm: what ranks tell each other when one of them fails, in the store in which they met."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from pipeshard.runtime.fault import Fault

T = TypeVar("T")

LINGER = 2.0  # seconds that the process which holds the store waits for the others at its end


class Alarm:
    """One Fault for each call of the user's, by its number: the first that is told counts, on every rank.

    `gone` says that the store does not answer any more; then methods raise DistStoreError at once. `asked` says that
    somebody waits for what it says, in `ask`.
    """

    def __init__(self, rank: int, size: int) -> None:
        store: Any = PrefixStore("pipeshard.watch", _get_default_store())
        self.store = store.clone()  # a connection of its own
        self.rank, self.size, self.gone, self.asked = rank, size, False, False

    def ask(self, question: Callable[[], T]) -> T:
        """`question()`, in a thread of its own: it hangs at a store that is silent, but this one waits until `gone`."""
        answer: Future[T] = Future()

        def put() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:  # it is raised by the thread that waits
                answer.set_exception(error)

        try:
            threading.Thread(target=put, name="pipeshard-ask", daemon=True).start()
        except RuntimeError:  # since Python 3.12 none starts where a process ends
            return question()
        self.asked = True
        try:
            while not self.gone:
                with contextlib.suppress(TimeoutError):
                    return answer.result(timeout=0.05)
        finally:
            self.asked = False
        raise _gone()

    def tell(self, fault: Fault, number: int) -> Fault:
        """Tell all ranks, unless one was first: what they are told."""
        self._refuse_gone()
        text = replace(fault, number=number).to_json()
        return Fault.from_json(self.store.compare_set(f"alarm/{number}", "", text))

    def told(self, numbers: Sequence[int], patience: float = 0.0) -> Fault | None:
        """What was told of one of these calls, at the latest in so many seconds."""
        until = time.monotonic() + patience
        while True:
            self._refuse_gone()
            key = next((key for number in numbers if self.store.check([key := f"alarm/{number}"])), None)
            if key is not None:
                return Fault.from_json(self.store.get(key))
            if time.monotonic() >= until:
                return None
            time.sleep(0.02)

    def leave(self, without: Collection[int]) -> None:
        """At the end of the process: the one that holds the store stays until the others need it no more; `without` are
        those that will not say so."""
        with contextlib.suppress(RuntimeError):
            self._refuse_gone()
            self.store.set(f"left/{self.rank}", "")
            until = time.monotonic() + LINGER
            everyone = [f"left/{rank}" for rank in range(self.size) if rank not in without]
            while self.rank == 0 and not has_agents() and time.monotonic() < until and not self.store.check(everyone):
                time.sleep(0.02)

    def _refuse_gone(self) -> None:
        if self.gone:
            raise _gone()


def _gone() -> Exception:
    return dist.DistStoreError("the store does not answer")


def has_agents() -> bool:
    """Whether the store is torchrun's, and not that of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
