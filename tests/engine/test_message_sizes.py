"""Tests of message sizes: both ends of every message compute the same shape, and reading a value that was not sent is
detected."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import pipeshard
from pipeshard.distributed import collectives
from pipeshard.engine.traces import Traces
from pipeshard.graph.dataflow import Reads
from pipeshard.graph.tracer import Tracer
from tests.engine.test_state import Marking, batch
from tests.hunt import nets, values
from tests.hunt.nets import data
from tests.pool import Pool


def engine(make: Callable[[], torch.nn.Module], **options: Any) -> Any:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = torch.distributed.get_world_size()
    options = {"pp_size": size, "num_microbatches": 1, "dry_run_input": data(), "verify": False, **options}
    return pipeshard.initialize(model, optimizer, **options)


def held(made: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in made.model.unwrap().parameters() if not hasattr(p, "pipeshard_trainable")]


def said(run: Callable[[], object], made: Any) -> str:
    """The error of a call, which has changed no parameter."""
    before = held(made)
    with pytest.raises(pipeshard.errors.TraceError) as caught:
        run()
    assert all(map(torch.equal, before, held(made)))
    return str(caught.value)


def other_sizes() -> str:
    """What a step says on this rank where ranks lend each other nothing."""
    made = engine(values.Pruned)
    made.execute_pipeline(iter([data()]))
    with mock.patch("pipeshard.engine.traces.lend", lambda units, asked, *_: {}):
        return said(lambda: made.execute_pipeline(iter([data(1, length=8)])), made)


@pytest.mark.turns
def test_other_sizes_at_both_ends_are_an_error_on_all_ranks(pool: Pool) -> None:
    """A rank traced a message of another size than the one that sends it: gloo aborted the process, or left memory of
    something else in the rest of a longer buffer."""
    first, second = pool.run(other_sizes, 2)
    assert first == second
    for part in ("result 0 of unit layers.1", "rank 0 (stage 0)", "rank 1 (stage 1)", "(2, 3, 16)", "(2, 8, 16)"):
        assert part.replace("(2,", "(4,") in first, (part, first)
    assert "a tensor of a fixed size and a mask" in first


def not_lent(make: Callable[[], torch.nn.Module], batches: list[Any], **options: Any) -> str:
    """The error of a step in which the model is traced again, with zeros for the weights of other stages."""
    made = engine(make, **options)
    made.execute_pipeline(iter(batches[:1]))
    made.model.unwrap().use = True  # so that it is traced again
    with mock.patch("pipeshard.engine.traces.lend", lambda units, asked, *_: {}):
        return said(lambda: made.execute_pipeline(iter(batches[1:])), made)


def other_numbers() -> str:
    return not_lent(values.ByNumber, [data(), data(1)], partition=[2, 4])


@pytest.mark.turns
def test_other_numbers_of_a_unit_are_an_error_on_all_ranks(pool: Pool) -> None:
    """A unit returned 3, which it read off a frozen parameter, and 0 on the stages that do not have it."""
    first, second = pool.run(other_numbers, 2)
    assert first == second and "is 3 in the trace on rank 0 (stage 0), but is 0 on rank 1 (stage 1)" in first


def other_attributes() -> str:
    return not_lent(Marking, [batch(0), batch(1)], dry_run_input=batch(0))


@pytest.mark.turns
def test_other_numbers_in_attributes_are_an_error_on_all_ranks(pool: Pool) -> None:
    """A layer left 2 in an attribute, as its weights are not zero, and 1 on the stages that do not have them."""
    first, second = pool.run(other_attributes, 2)
    assert first == second
    assert "mark, which unit layers.0 (call 1) stores, is 2 in the trace on rank 0 (stage 0), but is 1 on" in first


def collectives_of_steps(make: Callable[[], torch.nn.Module]) -> tuple[list[int], list[int]]:
    """How often the ranks gather something in each of four steps, and in how many they look at their ways."""
    made, gather = engine(make, num_microbatches=2), collectives.gather
    counts: list[int] = []
    looks: list[int] = []

    def counting(*args: Any) -> Any:
        counts[-1] += 1
        return gather(*args)

    def step(length: int) -> None:
        made.execute_pipeline(iter([data(length, length=length)]))
        made.optimizer.step()
        made.optimizer.zero_grad()

    for _ in range(3):  # in which ranks compare the optimizer's updates
        step(6)
    find_alike = mock.Mock(side_effect=Traces.find_alike)
    patched = mock.patch.object(Traces, "find_alike", lambda *args: find_alike(*args))
    with mock.patch.object(collectives, "gather", counting), patched:
        for length in (6, 8, 6, 8):
            counts.append(0)
            looks.append(find_alike.call_count)
            step(length)
    return counts, looks


@pytest.mark.turns
def test_sizes_are_compared_without_another_message(pool: Pool) -> None:
    """Ranks meet at the beginning of a step in any case: the number of their ways is one more in that message."""
    for counts, looks in pool.run(collectives_of_steps, 2, nets.Net):
        assert looks == [0] * 4 and counts[2] == counts[3] == 1
    for counts, looks in pool.run(collectives_of_steps, 2, values.Pruned):
        assert looks == [0, 0, 1, 1] and counts[2] == counts[3] == 1 < counts[1]  # lent once, for the new length


def unseen(is_unseen: Callable[[torch.dtype], bool]) -> Any:
    """The trace does not see that anything reads such results of units."""
    use = Tracer._use

    def missing(self: Tracer, tensors: Any, others: Any = frozenset()) -> Reads:
        found = use(self, tensors, others)
        gone = {value for value in found.values if is_unseen(self.calls[value.call].leaves[value.leaf].dtype)}
        return replace(found, values=found.values - gone)

    return mock.patch.object(Tracer, "_use", missing)


def unseen_codes(make: Callable[[], torch.nn.Module]) -> str:
    with unseen(lambda dtype: dtype in (torch.int64, torch.bool)):
        made = engine(make, partition=[3, 3])
        try:
            made.execute_pipeline(iter([data()]))
        except pipeshard.errors.PipeshardError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("make", [values.ByCodes, values.ByMask])
def test_zeros_for_what_was_not_sent_are_followed(pool: Pool, make: Any) -> None:
    """An integer that glue computes with is 0 where nobody sends it, and no result shows that."""
    for error in pool.run(unseen_codes, 2, make):
        assert (
            "unit layers.3 (stage 1) reads a value computed from integer or boolean results of unit layers.0" in error
        )


def unseen_activations(how: str) -> str:
    """What is said where a stage was sent nothing of the ones before it, and nobody asks for the loss."""
    with unseen(lambda dtype: dtype.is_floating_point):
        made = engine(nets.Net, partition=[3, 3])
    options: dict[str, Any] = {"return_loss": False}
    if how == "evaluated":
        options["return_outputs"] = True
    pipeline = made.model.pipeline
    pipeline.looks_at_once = how != "late"

    def step() -> None:
        with torch.no_grad() if how == "evaluated" else contextlib.nullcontext():
            made.execute_pipeline(iter([data()]), **options)

    if how == "late":
        step()
    return said(step, made)


@pytest.mark.turns
@pytest.mark.parametrize("how", ["at once", "late", "evaluated"])
def test_not_a_number_is_seen_without_the_loss(pool: Pool, how: str) -> None:
    """With return_loss=False nobody looked whether the loss was a number: a stage trained on what nobody had sent."""
    for error in pool.run(unseen_activations, 2, how):
        assert "uses different unit outputs or parameters than in its trace" in error


class Marked(nets.Net):
    """Runs its last layer twice for batches in which a token is 0."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[-1](super().body(x)) if self.has_mark else super().body(x)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.has_mark = bool(ids.eq(0).any())
        return super().forward(ids, labels)


def nan_losses(how: str) -> list[bool]:
    """Whether the loss of each step is NaN. The first replica reads both kinds of batches, the second only one."""
    made = engine(Marked, pp_size=1, dp_size=2)
    marked, plain = data(torch.distributed.get_rank()), data(torch.distributed.get_rank())
    marked["ids"][0, 0] = 0
    plain["ids"].clamp_(min=1)
    with torch.no_grad():
        made.model.unwrap().head.bias.fill_(torch.nan)
    made.model.pipeline.looks_at_once = how != "late"
    losses = []
    for first in (marked, plain, marked):
        batch = plain if torch.distributed.get_rank() else first
        losses.append(made.execute_pipeline(iter([batch]), return_loss=how != "late")["loss"])
        made.optimizer.zero_grad()
    return [loss is None or bool(loss.isnan()) for loss in losses]


@pytest.mark.local
@pytest.mark.turns
@pytest.mark.parametrize("how", ["at once", "late"])
def test_replicas_check_the_traces_of_different_batches_together(pool: Pool, how: str) -> None:
    """A run diverged, and a user skipped its steps: at the second NaN loss, a replica whose padded batches were already
    checked went on alone, while the other one waited for it, and the run ended with a lost connection."""
    assert pool.run(nan_losses, 2, how) == [[True] * 3] * 2
