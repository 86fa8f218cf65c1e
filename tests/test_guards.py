"""Tests of guards: dependencies that a trace was made to miss are detected in a step, before any parameter changes.

A value that was not sent is NaN if glue reads it, and then the loss is NaN too.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

from pipeshard import PipelinePlugin
from pipeshard.batch.read import read_batch
from pipeshard.errors import PipeshardError
from pipeshard.verify.decide import alone
from pipeshard.verify.proof import EXACT, prove
from tests.hunt.cases import CASES
from tests.hunt.run import run
from tests.pool import Pool

pytestmark = pytest.mark.local


def nothing_left() -> Any:
    """Visits do not look at what a unit has changed beside its result."""
    return mock.patch("pipeshard.graph.kinds.changed", lambda *_, **__: ())


def one_kind() -> Any:
    """All units of one class are of one kind."""
    return mock.patch("pipeshard.graph.kinds.CallKind.is_of", lambda *_: True)


def reused() -> Any:
    """Flags, configs and answers do not count: the first Dataflow is used for every batch."""
    one_way().start()
    return mock.patch("pipeshard.graph.flags.Flags.number", lambda self: 0)


def unreached() -> Any:
    """No result of a unit is known to depend on its arguments."""
    return mock.patch("pipeshard.graph.kinds.reached", lambda *_: frozenset())


def one_way() -> Any:
    """Numbers that glue reads off a batch are as if they were always the same."""
    return mock.patch("pipeshard.graph.dataflow.Dataflow.deltas", lambda self, batch: self.axes.deltas(batch))


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


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("mutation", "name"), [(m, name) for m, (_, names) in MUTATIONS.items() for name in names])
def test_what_the_trace_misses_is_caught(pool: Pool, mutation: str, name: str) -> None:
    assert {*pool.run(caught, 2, mutation, name, timeout=120)} <= {"TraceError", "RankError", "not a number"}


UNGUARDED = {
    "pipeshard.split.replay.Replay._prove": lambda *_: None,
    "pipeshard.engine.stage.Stage._refuse_lost": lambda *_: None,
}


def verdict(name: str) -> str:
    """What the proof says of a case."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    with alone():
        plugin = PipelinePlugin(pp_size=2, **{"num_microbatches": 1, **case.options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sample = read_batch(model, dict(case.batches[0]))
    return prove(plugin.config, plugin.device, model, optimizer, None, sample).kind


def verdicts(mutation: str) -> list[str]:
    """Cases of which the proof says otherwise than it should, with the trace as it is and as it misses something."""
    names, wrong = MUTATIONS[mutation][1], []
    for name in names:
        if verdict(name) != EXACT:
            wrong.append(f"{name} is exact")
        with contextlib.ExitStack() as stack:
            for place, nothing in UNGUARDED.items():
                stack.enter_context(mock.patch(place, nothing))
            stack.enter_context(MUTATIONS[mutation][0]())
            if verdict(name) == EXACT:
                wrong.append(f"{name} is not")
    return wrong


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mutation", ["nothing left", "one kind", "unreached"])
def test_what_the_trace_misses_is_no_proof(pool: Pool, mutation: str) -> None:
    """The same is found at boost, with the guards of a step taken out, too."""
    assert pool.run(verdicts, 1, mutation, timeout=120) == [[]]
