"""Mutations: earlier faults, put back one at a time; each makes the comparison with the unsplit model fail."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from pipeshard.engine import clipping
from pipeshard.engine import grad_sync as gradients
from pipeshard.engine.interpreter import Interpreter
from pipeshard.engine.loss import LossRule
from pipeshard.engine.stage import Stage
from pipeshard.errors import PipeshardError
from pipeshard.split.boundary import Boundary, boundaries
from tests import zoo
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, compared, differences

pytestmark = pytest.mark.local

M = 3


def no_tie_sync() -> Any:
    return mock.patch("pipeshard.engine.grad_sync.GradientSync.finish", lambda self, sync: None)


def ties_averaged() -> Any:
    summed = gradients.Bucket.summed

    def averaged(self: gradients.Bucket, counts: Any) -> Any:
        for parameter, total in summed(self, counts):
            yield parameter, None if total is None else total / self.group.size()

    return mock.patch("pipeshard.engine.grad_sync.Bucket.summed", averaged)


def tie_counted_twice() -> Any:
    norm = clipping.grad_norm
    return mock.patch(
        "pipeshard.engine.clipping.grad_norm", lambda holders, *rest: norm(dict.fromkeys(holders, 1), *rest)
    )


def microbatches_swapped() -> Any:
    begin = Stage.begin

    def swapped(self: Stage, microbatches: Sequence[Any], *rest: Any) -> None:
        first, second, *others = microbatches
        begin(self, [second, first, *others] if self.is_last else microbatches, *rest)

    return mock.patch("pipeshard.engine.stage.Stage.begin", swapped)


def share_left_out() -> Any:
    shares = LossRule.shares

    def left_out(rule: LossRule, parts: Sequence[Any], *of_step: Any) -> list[float]:
        return [1.0] * len(parts) if of_step else shares(rule, parts)  # that of a proof stays

    return mock.patch("pipeshard.engine.loss.LossRule.shares", left_out)


def bypassing_gradient_dropped() -> Any:
    def dropped(*arguments: Any) -> list[Boundary]:
        return [Boundary(b.values, b.gradients[-1:]) for b in boundaries(*arguments)]

    return mock.patch("pipeshard.engine.routes.boundaries", dropped)


def nothing() -> Any:
    return mock.patch("pipeshard.engine.loss_search.LENGTH", 8)


def mutated(name: str, mutation: Callable[[], Any]) -> list[str]:
    model = zoo.build(name)
    unsplit = Unsplit(copy.deepcopy(model))
    data = zoo.batch(name)
    with mutation():
        split = Split(model, dist.get_world_size(), data, num_microbatches=M)
        try:
            return differences(split, unsplit, data, num_microbatches=M)
        except PipeshardError as error:
            return [str(error)]


@pytest.mark.turns
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_without_a_mutation_nothing_differs(pool: Pool, name: str) -> None:
    assert pool.run(mutated, 3, name, nothing) == [[], [], []]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "mutation", "what"),
    [
        ("gpt2", no_tie_sync, "gradients differ"),
        ("gpt2", ties_averaged, "gradients differ"),
        ("gpt2", tie_counted_twice, "norm"),
        ("gpt2", microbatches_swapped, "gradients differ"),
        ("gpt2", share_left_out, "loss"),
        ("t5", bypassing_gradient_dropped, "receives a gradient that the trace did not record"),
        ("t5", no_tie_sync, "gradients differ"),
    ],
)
def test_a_mutation_is_seen(pool: Pool, name: str, mutation: Callable[[], Any], what: str) -> None:
    found = [difference for rank in pool.run(mutated, 3, name, mutation) for difference in rank]
    assert any(what in difference for difference in found), found


def own_labels_only() -> Any:
    return mock.patch("pipeshard.engine.loss_shares.LossShares._total", lambda self, count, rule: count)


def replicas_not_reduced() -> Any:
    start = gradients.Bucket.start
    return mock.patch("pipeshard.engine.grad_sync.Bucket.start", lambda self: start(self) if self.tie else None)


def reduced_before_the_last_backward() -> Any:
    run = Interpreter.run

    def early(self: Interpreter, stages: Any, actions: Any, stage_done: Any = None) -> None:
        if stage_done is not None:
            for stage in stages:
                stage_done(stage)
        run(self, stages, actions)

    return mock.patch("pipeshard.engine.interpreter.Interpreter.run", early)


def replicas_counted_apart_in_the_norm() -> Any:
    norm = clipping.grad_norm
    return mock.patch(
        "pipeshard.engine.clipping.grad_norm",
        lambda holders, *rest: norm({p: max(1, count // 2) for p, count in holders.items()}, *rest),
    )


def mutated_replicas(mutation: Callable[[], Any]) -> list[str]:
    """What differs from one process after a step of two replicas, whose labels are uneven."""
    model, data = zoo.build("gpt2"), zoo.batch("gpt2")
    unsplit = Unsplit(copy.deepcopy(model))
    halves = [zoo.part(data, replica, [4, 4]) for replica in range(2)]
    with mutation():
        split = Split(model, 2, halves[0], num_microbatches=2)
        loss = split.backward(halves[split.plugin.grid.replica])["loss"]
        return compared(split, unsplit, loss, unsplit.backward(data))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mutation", "what"),
    [
        (nothing, ""),
        (own_labels_only, "loss"),
        (replicas_not_reduced, "gradients differ"),
        (reduced_before_the_last_backward, "gradients differ"),
        (replicas_counted_apart_in_the_norm, "norm"),
    ],
)
def test_a_mutation_of_replicas_is_seen(pool: Pool, mutation: Callable[[], Any], what: str) -> None:
    found = [difference for rank in pool.run(mutated_replicas, 4, mutation) for difference in rank]
    assert any(what in difference for difference in found) if what else not found, found
