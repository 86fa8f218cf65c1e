"""Failures: how a rank's fault is reported to the others, which ranks still respond, and how waits are ended."""

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
from pipeshard.private import default_store

RAISED, GONE, STALLED, ENDED, ORPHANED = "raised", "gone", "stalled", "ended", "orphaned"  # kinds
THROUGH = "its program being through"  # the message of one that has ended without an error


@dataclass(frozen=True)
class Fault:
    """`rank` (whose `name` is "rank 2 (stage 2)") has raised an error with `message` while it was at `where`, possibly
    in the code of `module`; or its process has died, stalled or ended, or its agent has. `told_by` is the rank that
    reports it."""

    kind: str
    rank: int
    name: str
    where: str = ""
    module: str = ""
    message: str = ""
    told_by: int = -1
    number: int = -1  # of the call of which it is told

    @property
    def is_asked(self) -> bool:
        """Whether the ranks are asked what they are doing, to find the rank at fault."""
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
LINGER = 2.0  # seconds that the process which holds the store waits for the others at its end


class Alarm:
    """One Fault for each call of the user's, by its number: the first report counts, on every rank.

    `gone` means that the store does not respond any more; then methods raise DistStoreError at once. `asked` means that
    a thread waits for the store, in `ask`.
    """

    def __init__(self, rank: int, size: int) -> None:
        store: Any = PrefixStore("pipeshard.watch", default_store())
        self.store = store.clone()  # a connection of its own
        self.rank, self.size, self.gone, self.asked = rank, size, False, False

    def ask(self, question: Callable[[], T]) -> T:
        """`question()`, in a separate thread: it hangs if the store is silent, but this call waits until `gone`."""
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
        """Report a fault to all ranks, unless one was first; returns the fault that counts."""
        self._refuse_gone()
        text = replace(fault, number=number).to_json()
        return Fault.from_json(self.store.compare_set(f"alarm/{number}", "", text))

    def told(self, numbers: Sequence[int], patience: float = 0.0) -> Fault | None:
        """The fault reported in one of these calls, within this many seconds."""
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
        """At the end of the process: the process that holds the store stays until the others no longer need it;
        `without` are those that will not sign off."""

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
    """Ask in a separate thread, since the question hangs if the store is silent; returns its future."""
    answer: Future[T] = Future()

    def put() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:  # it is raised by the thread that waits
            answer.set_exception(error)

    try:
        threading.Thread(target=put, name="pipeshard-ask", daemon=True).start()
    except RuntimeError:  # since Python 3.12 none starts where a process ends
        put()
    return answer


def _gone() -> Exception:
    return dist.DistStoreError("the store does not answer")


def has_agents() -> bool:
    """Whether the store is torchrun's, and not that of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


ANSWER_SECONDS = 2.0  # in which a rank that lives has answered
LIBRARY_FRAMES = ("/pipeshard/", "/torch/", "/threading.py", "/contextlib.py")  # frames that are not the user's


class RollCall:
    """Answers in the store, one per rank, under the number of a call."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._answered = -1
        self.silent: list[int] = []  # the ranks that did not answer

    def answer(self, number: int) -> None:
        """Called once per call, by the watch thread: it runs even if the training thread hangs."""
        if self._answered != number:
            self._answered = number
            self.store.set(f"answer/{number}/{self.rank}", json.dumps(_process_state()))

    def result(self, fault: Fault, named: Callable[[int], str]) -> Fault:
        """The fault with a message that names the ranks that do not respond, or what each of them is doing."""
        answers = self._collect(fault.number)
        silent = self.silent = [rank for rank in range(self.size) if rank not in answers]
        if fault.kind == GONE:
            return replace(fault, message=_silent(silent, named, fault))
        busy = [rank for rank, state in answers.items() if not state["waits"] and not state["collective"]]
        found = silent or busy
        names = ", ".join(map(named, found)) or "no single rank"
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
    """What this process is doing."""
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
        return "does not respond: it is stopped, it holds the GIL, or its process or machine is gone"
    since = f"{state['seconds']:.3g} s"
    if state["waits"]:
        others = ", ".join(map(str, state["waits"][:8])) + (", ..." if len(state["waits"]) > 8 else "")
        return f"has waited {since} for rank{'s' * (len(state['waits']) > 1)} {others} in {state['where']}"
    if state["collective"]:
        return f"waits for other ranks in its own {state['collective']} call ({state['at']})"
    module = f", {state['module']}" if state["module"] else ""
    return f"has been {since} in {state['where']}{module}" + (f" ({state['at']})" if state["at"] else "")


def _silent(silent: list[int], named: Callable[[int], str], fault: Fault) -> str:
    if not silent:
        return f"rank {fault.told_by} lost a connection in {fault.where}, but all ranks respond: check the network"
    names = ", ".join(map(named, silent))
    return f"{names} is gone: it was killed, has crashed, or is offline (seen by rank {fault.told_by} in {fault.where})"


TAG = 7919  # of a message that nobody sends


def abort_groups() -> None:
    """Break the connections of all process groups, so that a wait in any of them, in any thread, raises at once.

    Collectives of gloo cannot be aborted, but cancelling a receive closes the connections of its group, and
    ends everything in flight there; a receive over an already broken connection does not. Without this, a
    process whose messages are not received would not even exit: it joins the threads that send them at its end.
    """
    backends: list[tuple[dist.ProcessGroup, Any]] = [
        (group, group._get_backend(torch.device(device)))
        for group in dist.distributed_c10d._world.pg_map
        if isinstance(group, dist.ProcessGroup) and group.size() > 1
        for device in sorted({str(device) for device in group._device_types})
    ]
    _abort([backend for _, backend in backends if backend.name() != "gloo"])
    for group, backend in backends:
        if backend.name() == "gloo":
            others = (other for other in range(group.size()) if other != group.rank())
            next((other for other in others if _gives_up(backend, other)), None)


ABORTING = 5.0  # seconds, after which those that are not aborted are left behind


def _abort(backends: Sequence[Any]) -> None:
    """Abort all at the same time: the abort of an NCCL communicator frees memory, which waits for everything that runs
    on the GPU, and so for the messages of the other communicators, which end only when these are aborted, too."""

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
    """Whether a receive was started, and cancelled."""
    try:
        backend.recv([torch.empty(1)], other, TAG).wait(timedelta(milliseconds=1))
    except RuntimeError as error:
        return "Timed out" in str(error)
    return False


TEXT = 2000  # characters of an error that others are told
OURS = ("/torch/", "/pipeshard/")  # where an error of a lost connection is raised
LOST = re.compile(r"gloo/transport|pair closure|Connection (was )?(closed|reset)|Broken pipe|NCCL|nccl")


def text_of(error: BaseException) -> str:
    """The text of an error for other ranks, even if its own text fails."""
    try:
        text = str(error)
    except Exception as why:  # of the user's own class
        text = f"(its text cannot be shown: {type(why).__name__})"
    return f"{type(error).__name__}: {text if len(text) <= TEXT else text[:TEXT] + ' ...'}"


def is_lost(error: BaseException) -> bool:
    """Whether an error is that of a broken connection, and so not this rank's own. It must come from a function of
    torch's: the user's own code may use the same words."""
    if isinstance(error, dist.DistError) or type(error) is not RuntimeError or not LOST.search(str(error)):
        return isinstance(error, dist.DistError)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return not frames or any(part in frames[-1].f_code.co_filename for part in OURS)


def ending(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "by Ctrl-C"
    sigterm = isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM
    return "by SIGTERM" if sigterm else f"by {text_of(error)}"
