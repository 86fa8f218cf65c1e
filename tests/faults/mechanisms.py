"""Mechanisms: what each kind of fault is caught by, and how to do without it."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from pipeshard.model import replay
from pipeshard.runtime import agreement, alarm, finite, rollcall, watch
from tests.faults.plant import Case


def _never(*args: object, **kwargs: object) -> None:
    return None


def _patch(owner: object, name: str, value: object) -> None:
    mock.patch.object(owner, name, value).start()


def _no_alarm() -> None:
    """Nobody is told of anything."""
    _patch(alarm.Alarm, "tell", lambda self, fault, number: fault)


def _no_watchdog() -> None:
    _patch(watch.Watch, "_is_stalled", lambda self: False)


def _no_roll_call() -> None:
    _patch(rollcall.RollCall, "result", lambda self, fault, place: fault)


def _no_digest() -> None:
    _patch(agreement, "digest", lambda batch: 0)


def _no_shapes() -> None:
    _patch(replay.Replay, "_refuse_stranger", _never)


def _no_finite() -> None:
    _patch(finite, "_is_finite", lambda tensor: True)


MECHANISMS: dict[str, Callable[[], None]] = {
    "the alarm": _no_alarm,
    "the watchdog": _no_watchdog,
    "the roll call": _no_roll_call,
    "the digest of batches": _no_digest,
    "the look at what is finite": _no_finite,
    "the look at shapes": _no_shapes,
}
INSIDE = ("warm-up", "steady", "cool-down", "tie sync")  # moments at which ranks agree on nothing
RELIES: dict[str, Callable[[Case], bool]] = {
    "the alarm": lambda case: case.kind in ("exception", "SIGTERM") and case.phase in INSIDE,
    "the watchdog": lambda case: case.kind in ("hang", "SIGSTOP"),
    "the roll call": lambda case: case.kind == "kill -9" and case.rank > 0,
    "the digest of batches": lambda case: case.kind == "different batch",
    "the look at what is finite": lambda case: case.kind == "NaN",
    "the look at shapes": lambda case: case.kind == "wrong shape" and case.leaves,
}
