"""What a trace was made to miss is caught by the guards of a step, before any parameter is changed.

A value that was not sent is not-a-number where glue reads it after all, which is seen in the loss.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from pipeshard.errors import PipeshardError
from tests.hunt.cases import CASES
from tests.hunt.run import run
from tests.pool import Pool


def nothing_left() -> Any:
    """Visits do not look at what a unit has changed beside its result."""
    return mock.patch("pipeshard.model.tracer.changed", lambda *_, **__: ())


def one_kind() -> Any:
    """All units of one class are of one kind."""
    return mock.patch("pipeshard.model.tracer._Kind.is_of", lambda *_: True)


def reused() -> Any:
    """Flags, configs and answers do not count: the first Dataflow is used for every batch."""
    found = mock.patch("pipeshard.runtime.step._answers", lambda *_: True)
    found.start()
    return mock.patch("pipeshard.model.flags.Flags.number", lambda self: 0)


def unreached() -> Any:
    """No result of a unit is known to depend on its arguments."""
    return mock.patch("pipeshard.model.tracer._reached", lambda count, *_: (frozenset(),) * count)


def one_way() -> Any:
    """Numbers that glue reads off a batch are as if they were always the same."""
    return mock.patch("pipeshard.runtime.step._answers", lambda *_: True)


MUTATIONS = {
    "nothing left": (nothing_left, ["stashed on the layer", "in a list", "in a global", "a running buffer", "popping"]),
    "one kind": (one_kind, ["by place", "own number"]),
    "reused": (reused, ["warming up", "two tasks"]),
    "unreached": (unreached, ["control", "a context"]),
    "one way": (one_way, ["steps by labels"]),
}


def caught(mutation: str, name: str) -> str:
    """What ends the steps of a case on this rank while the trace misses something."""
    try:
        with MUTATIONS[mutation][0]():
            return "not a number" if any("loss nan" in found for found in run(CASES[name])) else "no error"
    except PipeshardError as error:
        return type(error).__name__
    finally:
        mock.patch.stopall()


@pytest.mark.parametrize(("mutation", "name"), [(m, name) for m, (_, names) in MUTATIONS.items() for name in names])
def test_what_the_trace_misses_is_caught(pool: Pool, mutation: str, name: str) -> None:
    assert {*pool.run(caught, 2, mutation, name, timeout=120)} <= {"TraceError", "RankError", "not a number"}
