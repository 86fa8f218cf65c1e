"""Mechanisms: what detects each kind of fault, and how to disable it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn
from unittest import mock

import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from pipeshard.checkpoint import files as beside
from pipeshard.distributed import failures as alarm
from pipeshard.distributed import failures as rollcall
from pipeshard.distributed import monitor, peers, watch
from pipeshard.distributed.collectives import gather_objects
from pipeshard.engine import reader as agreement
from pipeshard.engine import stage as finite
from pipeshard.split import replay
from tests.faults.plant import BARRIER, CHILD, EXIT, GIL, LEFT, MUTE, Case


def _never(*args: object, **kwargs: object) -> None:
    return None


def _patch(owner: object, name: str, value: object) -> None:
    mock.patch.object(owner, name, value).start()


def _no_alarm() -> None:
    """Nobody is told of anything, neither by the store nor where ranks compare what failed."""
    _patch(alarm.Alarm, "tell", lambda self, fault, number: fault)
    for owner in (agreement, beside):
        _patch(owner, "gather_objects", _untold)


def _untold(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """What is no reason for a failure, from others."""
    said = enumerate(gather_objects(value, group))
    return [None if isinstance(other, str) and rank != group.rank() else other for rank, other in said]


def _no_look_at_the_store() -> None:
    """A store that does not answer is an error as any other."""

    def fail(self: watch.Watch) -> NoReturn:
        raise RuntimeError("the store does not respond")

    _patch(watch.Watch, "_without_store", fail)


def _no_watchdog() -> None:
    """Nothing looks for what does not move."""
    _patch(watch.Watch, "_is_stalled", lambda self: False)
    _patch(peers, "_is_process_stopped", lambda process: False)


def _no_look_at_processes() -> None:
    _patch(peers, "_is_gone", lambda process: False)
    _patch(peers, "_is_process_stopped", lambda process: False)


def _no_monitor() -> None:
    _patch(monitor.Monitor, "beat", _never)


def _no_names() -> None:
    """Of those that are gone."""
    _no_look_at_processes()
    _no_roll_call()


def _no_roll_call() -> None:
    _patch(rollcall.RollCall, "result", lambda self, fault, place: fault)


def _no_digest() -> None:
    _patch(agreement, "digest", lambda batch: 0)


def _no_shapes() -> None:
    _patch(replay.Replay, "_refuse_stranger", _never)
    _patch(replay.Replay, "_checked", lambda self, step, result, run, arguments: tree_leaves(result))


def _no_finite() -> None:
    _patch(finite, "_is_finite", lambda tensor: True)


MECHANISMS: dict[str, Callable[[], None]] = {
    "the alarm": _no_alarm,
    "the look at the store": _no_look_at_the_store,
    "the watchdog": _no_watchdog,
    "the roll call and the look at processes": _no_names,
    "the look at processes": _no_look_at_processes,
    "the monitor": _no_monitor,
    "the digest of batches": _no_digest,
    "the look at what is finite": _no_finite,
    "the look at shapes": _no_shapes,
}
TOLD = ("exception", "SIGTERM", "full disk", MUTE, LEFT, EXIT)
RELIES: dict[str, Callable[[Case], bool]] = {  # each case on one of them
    "the alarm": lambda case: case.kind in TOLD or (case.kind == "wrong shape" and not case.leaves),
    "the look at the store": lambda case: case.kind == "kill -9" and case.rank == 0 and case.phase != BARRIER,
    "the watchdog": lambda case: case.kind == "hang" or (case.kind == "SIGSTOP" and case.phase != BARRIER),
    "the roll call and the look at processes": lambda case: (
        case.kind == "kill -9" and (case.rank > 0 or case.phase == BARRIER)
    ),
    "the look at processes": lambda case: case.kind == CHILD or (case.kind, case.phase) == ("SIGSTOP", BARRIER),
    "the monitor": lambda case: case.kind == GIL,
    "the digest of batches": lambda case: case.kind == "different batch",
    "the look at what is finite": lambda case: case.kind == "NaN",
    "the look at shapes": lambda case: case.kind == "wrong shape" and case.leaves,
}
