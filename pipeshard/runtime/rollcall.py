"""Roll call: which ranks still answer, and what each of them does, when nothing moves."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipeshard.runtime.fault import GONE, Fault
from pipeshard.runtime.progress import NOW, main_stack

SECONDS = 2.0  # in which a rank that lives has answered
OWN = ("/pipeshard/", "/torch/", "/threading.py", "/contextlib.py")  # frames that are not the user's


class RollCall:
    """Answers in the store, one of each rank, under the number of a call."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._answered = -1
        self.silent: list[int] = []  # the ranks that did not answer

    def answer(self, number: int) -> None:
        """Once for each call, by the thread that watches: it lives also where the one that trains hangs."""
        if self._answered != number:
            self._answered = number
            self.store.set(f"answer/{number}/{self.rank}", json.dumps(_state()))

    def result(self, fault: Fault, named: Callable[[int], str]) -> Fault:
        """The fault with a message that names who does not answer, or what everybody does."""
        answers = self._collect(fault.number)
        silent = self.silent = [rank for rank in range(self.size) if rank not in answers]
        if fault.kind == GONE:
            return replace(fault, message=_gone(silent, named, fault))
        busy = [rank for rank, state in answers.items() if not state["waits"]]
        found = silent or busy
        names = ", ".join(map(named, found)) or "no rank alone"
        table = "\n".join(f"  {named(rank)} {_line(answers.get(rank))}" for rank in range(self.size))
        message = f"{fault.message}, because of {names}:\n{table}"
        return replace(fault, message=message, rank=found[0] if found else -1, name=named(found[0]) if found else "")

    def _collect(self, number: int) -> dict[int, Any]:
        until = time.monotonic() + SECONDS
        keys = {rank: f"answer/{number}/{rank}" for rank in range(self.size)}
        while time.monotonic() < until and not self.store.check(list(keys.values())):
            time.sleep(0.05)
        return {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}


def _state() -> dict[str, Any]:
    """What this process does."""
    frames = main_stack()
    users = [frame for frame in frames if not any(part in frame.f_code.co_filename for part in OWN)]
    at = ""
    if users:
        code = users[-1].f_code
        at = f"{code.co_filename}:{users[-1].f_lineno} in {code.co_name}"
    seconds = time.monotonic() - NOW.since
    return {"where": NOW.where, "waits": list(NOW.waits), "seconds": seconds, "module": NOW.module(frames), "at": at}


def _line(state: dict[str, Any] | None) -> str:
    if state is None:
        return "does not answer: it is stopped, or its process or machine is gone"
    since = f"{state['seconds']:.3g} s"
    if state["waits"]:
        others = ", ".join(map(str, state["waits"][:8])) + (", ..." if len(state["waits"]) > 8 else "")
        return f"has waited {since} for rank{'s' * (len(state['waits']) > 1)} {others} in {state['where']}"
    module = f", {state['module']}" if state["module"] else ""
    return f"has been {since} in {state['where']}{module}" + (f" ({state['at']})" if state["at"] else "")


def _gone(silent: list[int], named: Callable[[int], str], fault: Fault) -> str:
    if not silent:
        return f"a connection of rank {fault.told_by} broke in {fault.where}, but all ranks answer: look at the network"
    names = ", ".join(map(named, silent))
    return f"{names} is gone: it was killed, has crashed, or is cut off (seen by rank {fault.told_by} in {fault.where})"
