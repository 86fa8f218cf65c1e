"""Failures: reports of a rank's fault to the other ranks, a roll call of live ranks, and aborts of pending waits."""

import contextlib
import json
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from pipeshard.distributed.progress import NOW, collective_of, main_stack
from pipeshard.private import default_store, extend_timeout

RAISED, GONE, STALLED, ENDED, ORPHANED = "raised", "gone", "stalled", "ended", "orphaned"  # kinds of faults
THROUGH = "at the end of its program"  # the message of a rank that ended without an error


@dataclass(frozen=True)
class Fault:
    """A failure of `rank` (whose `name` is, for example, "rank 2 (stage 2)"). `kind` is the kind of failure: the rank
    raised an error, its process died, stalled or ended, or its agent died. `message` is the error's text or describes
    the failure, `where` is the activity in which the rank raised the error or ended, and `module` is the module whose
    code raised the error, if any. `told_by` is the rank that reports the failure."""

    kind: str
    rank: int
    name: str
    where: str = ""
    module: str = ""
    message: str = ""
    told_by: int = -1
    number: int = -1  # the number of the call in which the fault is reported

    @property
    def is_asked(self) -> bool:
        """Whether a roll call follows. In a roll call, every rank reports its current activity, to find the rank at
        fault."""
        return self.kind in (GONE, STALLED) and self.told_by >= 0

    def __str__(self) -> str:
        if self.kind == RAISED:
            module = f", in {self.module}" if self.module else ""
            return f"{self.name} failed in {self.where}{module}: {self.message}"
        if self.kind == ENDED and self.message == THROUGH:
            return f"{self.name} has reached the end of its program"
        if self.kind == ENDED:
            return f"{self.name} ended {self.message}, in {self.where}"
        return self.message

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        return cls(**json.loads(text))


T = TypeVar("T")
LINGER = 2.0  # seconds for which the process that hosts the store waits for the other ranks at exit


class Alarm:
    """The reported Fault of each collective call, kept in the store under the call's number. If ranks report several
    faults in one call, every rank uses the fault that was reported first.

    If `gone` is set, the store no longer responds, and `ask`, `tell` and `told` raise DistStoreError immediately.
    `asked` is True while a thread waits for the store in `ask`.
    """

    def __init__(self, rank: int, size: int) -> None:
        store: Any = PrefixStore("pipeshard.watch", default_store())
        self.store = store.clone()  # a separate connection
        self.rank, self.size, self.gone, self.asked = rank, size, False, False

    def ask(self, question: Callable[[], T]) -> T:
        """Run `question()` in a separate thread, and return the result. `question()` hangs if the store does not
        respond. Raises DistStoreError when `gone` is set."""
        answer = _answer_later(question)
        self.asked = True
        try:
            while not self.gone:
                with contextlib.suppress(TimeoutError):
                    return answer.result(timeout=0.05)
        finally:
            self.asked = False
        raise _gone()

    def tell(self, fault: Fault, number: int) -> Fault:
        """Report a fault in call `number` to all ranks, unless a fault in this call was already reported. Return the
        fault that was reported first."""
        self._refuse_gone()
        text = replace(fault, number=number).to_json()
        return Fault.from_json(self.store.compare_set(f"alarm/{number}", "", text))

    def told(self, numbers: Sequence[int], patience: float = 0.0) -> Fault | None:
        """The fault of the first call in `numbers` for which a fault is reported, or None if no fault is reported
        within `patience` seconds."""
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
        """Sign off when this process exits. If this rank hosts the store, it then waits at most LINGER seconds for all
        ranks except the ranks in `without` to sign off."""

        def leave() -> None:
            self._refuse_gone()
            self.store.set(f"left/{self.rank}", "")
            until = time.monotonic() + LINGER
            everyone = [f"left/{rank}" for rank in range(self.size) if rank not in without]
            lingers = self.rank == 0 and not has_agents()
            while lingers and time.monotonic() < until and not self.store.check(everyone):
                time.sleep(0.02)

        with contextlib.suppress(RuntimeError, TimeoutError):
            _answer_later(leave).result(timeout=LINGER + 1)

    def _refuse_gone(self) -> None:
        if self.gone:
            raise _gone()


def _answer_later(question: Callable[[], T]) -> Future[T]:
    """Start `question()` in a separate thread, since the call hangs if the store does not respond. Return a future of
    the result."""
    answer: Future[T] = Future()

    def put() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:  # raised in the waiting thread
            answer.set_exception(error)

    try:
        threading.Thread(target=put, name="pipeshard-ask", daemon=True).start()
    except RuntimeError:  # since Python 3.12, no thread can start during interpreter shutdown
        put()
    return answer


def _gone() -> Exception:
    return dist.DistStoreError("the store does not respond")


def has_agents() -> bool:
    """Whether torchrun's agent hosts the store, instead of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


ANSWER_SECONDS = 2.0  # seconds within which every live rank answers a roll call
LIBRARY_FRAMES = ("/pipeshard/", "/torch/", "/threading.py", "/contextlib.py")  # in paths of library code


class RollCall:
    """The ranks' reports of their current activity, kept in the store under the number of the call."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._answered = -1
        self.silent: list[int] = []  # the ranks that did not answer

    def answer(self, number: int) -> None:
        """Report the current activity of this process, once per call. A thread of the watch calls this method, so ranks
        also answer if their training thread hangs."""
        if self._answered != number:
            self._answered = number
            self.store.set(f"answer/{number}/{self.rank}", json.dumps(_process_state()))

    def result(self, fault: Fault, named: Callable[[int], str]) -> Fault:
        """Return the fault with a message based on the answers. If the fault's kind is GONE, the message names the
        ranks that do not respond. Otherwise, the message names the ranks at fault, and lists the activity of each
        rank."""
        answers = self._collect(fault.number)
        silent = self.silent = [rank for rank in range(self.size) if rank not in answers]
        if fault.kind == GONE:
            return replace(fault, message=_silent(silent, named, fault))
        busy = [rank for rank, state in answers.items() if not state["waits"] and not state["collective"]]
        found = silent or busy
        names = ", ".join(map(named, found)) or "an unknown rank"
        table = "\n".join(f"  {named(rank)} {_state_line(answers.get(rank))}" for rank in range(self.size))
        message = f"{fault.message}, because of {names}:\n{table}"
        return replace(fault, message=message, rank=found[0] if found else -1, name=named(found[0]) if found else "")

    def _collect(self, number: int) -> dict[int, Any]:
        until = time.monotonic() + ANSWER_SECONDS
        keys = {rank: f"answer/{number}/{rank}" for rank in range(self.size)}
        while time.monotonic() < until and not self.store.check(list(keys.values())):
            time.sleep(0.05)
        return {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}


def _process_state() -> dict[str, Any]:
    """The current activity of this process, as a JSON-serializable dict."""
    frames = main_stack()
    users = [frame for frame in frames if not any(part in frame.f_code.co_filename for part in LIBRARY_FRAMES)]
    at = ""
    if users:
        code = users[-1].f_code
        at = f"{code.co_filename}:{users[-1].f_lineno} in {code.co_name}"
    collective = collective_of(frames)
    return {
        "where": NOW.where,
        "waits": list(NOW.waits),
        "collective": "" if NOW.call or collective is None else collective.f_code.co_name,
        "seconds": time.monotonic() - NOW.since,
        "module": NOW.module(frames),
        "at": at,
    }


def _state_line(state: dict[str, Any] | None) -> str:
    if state is None:
        return "does not respond: it is suspended, it holds the GIL, or its process or machine is gone"
    since = f"{state['seconds']:.3g} s"
    if state["waits"]:
        others = ", ".join(map(str, state["waits"][:8])) + (", ..." if len(state["waits"]) > 8 else "")
        return f"has waited {since} for rank{'s' * (len(state['waits']) > 1)} {others} in {state['where']}"
    if state["collective"]:
        return f"waits for other ranks in the script's {state['collective']} call ({state['at']})"
    module = f", {state['module']}" if state["module"] else ""
    return f"has been {since} in {state['where']}{module}" + (f" ({state['at']})" if state["at"] else "")


def _silent(silent: list[int], named: Callable[[int], str], fault: Fault) -> str:
    if not silent:
        return f"rank {fault.told_by} lost a connection in {fault.where}, but all ranks respond: check the network"
    names = ", ".join(map(named, silent))
    are = "is" if len(silent) == 1 else "are"
    return f"{names} {are} gone (killed, crashed or offline), detected by rank {fault.told_by} in {fault.where}"


TAG = 7919  # the tag of a message that no rank sends


def abort_groups() -> None:
    """Abort all process groups, so that every pending wait in these groups ends immediately, in any thread.

    Gloo collectives cannot be aborted directly. However, cancelling a receive closes all connections of the receive's
    group, unless the receive's own connection was already broken. Closing the connections aborts all operations in
    flight in this group. Without an abort, a process whose peers have not received its messages
    could not even exit, since on exit it joins the threads that send these messages.
    """
    backends = _backends()
    _abort([backend for _, backend in backends if backend.name() != "gloo"])
    for group, backend in backends:
        if backend.name() == "gloo":
            others = (other for other in range(group.size()) if other != group.rank())
            next((other for other in others if _gives_up(backend, other)), None)


def outlast_watch() -> None:
    """Extend the timeout of all gloo groups that have torch's default timeout (half an hour) to a day. The watch's
    timeout then expires first, with an error that shows the reason."""
    for _, backend in _backends():
        if backend.name() == "gloo":
            extend_timeout(backend, dist.default_pg_timeout, timedelta(days=1))


def _backends() -> list[tuple[dist.ProcessGroup, Any]]:
    """All process groups with more than one rank, each paired with each of its backends."""
    return [
        (group, group._get_backend(torch.device(device)))
        for group in dist.distributed_c10d._world.pg_map
        if isinstance(group, dist.ProcessGroup) and group.size() > 1
        for device in sorted({str(device) for device in group._device_types})
    ]


ABORTING = 5.0  # seconds after which unfinished aborts are abandoned


def _abort(backends: Sequence[Any]) -> None:
    """Abort all backends at the same time. Aborting an NCCL communicator frees memory, and freeing memory waits for all
    kernels on the GPU. These kernels include messages of other communicators, which end only when their own
    communicator is aborted."""

    def abort(backend: Any) -> None:
        with contextlib.suppress(RuntimeError):
            backend.abort()

    threads = [threading.Thread(target=abort, args=(backend,), daemon=True) for backend in backends]
    until = time.monotonic() + ABORTING
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _gives_up(backend: Any, other: int) -> bool:
    """Start a receive from `other` and let it time out. Return False if the connection was already broken."""
    try:
        backend.recv([torch.empty(1)], other, TAG).wait(timedelta(milliseconds=1))
    except RuntimeError as error:
        return "Timed out" in str(error)
    return False


TEXT = 2000  # characters of an error's text that are sent to other ranks
OURS = ("/torch/", "/pipeshard/")  # in the paths of code that raises an error if a connection is lost
LOST = re.compile(r"gloo/transport|pair closure|Connection (was )?(closed|reset)|Broken pipe|NCCL|nccl")


def text_of(error: BaseException) -> str:
    """The type and text of an error, for other ranks. The text is cut after TEXT characters, and replaced if the
    error's `__str__` raises."""
    try:
        text = str(error)
    except Exception as why:  # `__str__` of a user's exception class
        text = f"(its text cannot be shown, since __str__ raised {type(why).__name__})"
    return f"{type(error).__name__}: {text if len(text) <= TEXT else text[:TEXT] + ' ...'}"


def is_lost(error: BaseException) -> bool:
    """Whether a broken connection caused this error, which means that another rank is at fault. Any DistError counts. A
    RuntimeError counts only if torch or pipeshard raised it, since user code may raise errors with the same text."""
    if isinstance(error, dist.DistError) or type(error) is not RuntimeError or not LOST.search(str(error)):
        return isinstance(error, dist.DistError)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return not frames or any(part in frames[-1].f_code.co_filename for part in OURS)


def ending(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "by Ctrl-C"
    sigterm = isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM
    return "by SIGTERM" if sigterm else f"by {text_of(error)}"
