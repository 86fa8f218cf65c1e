"""Tests of gradients that a loop accumulates, clips, measures or changes between execute_pipeline and step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from pipeshard.distributed.collectives import local_grad
from pipeshard.engine.optimizer_trial import gap
from pipeshard.engine.stage import Stage
from pipeshard.entry import Engine
from pipeshard.errors import BatchError, ConfigurationError, UsageError
from pipeshard.split.materialize import is_released
from tests import zoo
from tests.hunt.nets import Net, data
from tests.pool import Pool
from tests.test_loop import boost, seeded, sgd
from tests.unsplit import largest_error

pytestmark = pytest.mark.local

REPLICAS: dict[str, dict[str, Any]] = {
    "replicas": {"pp_size": 1, "dp_size": 2},
    "zero": {"pp_size": 1, "dp_size": 2, "zero_stage": 1},
    "fsdp": {"pp_size": 1, "dp_size": 2, "fsdp": True},
    "stages": {"pp_size": 2},
}


def engine_of(**options: Any) -> Engine:
    model = seeded()
    return boost(model, sgd(model.parameters()), **options)


def masters(engine: Engine) -> list[Tensor]:
    """The values that this rank updates."""
    return [p.detach().clone() for group in engine.optimizer.param_groups for p in group["params"]]


def accumulated(options: dict[str, Any], leaves_out: bool) -> list[Tensor]:
    """The values after two updates, each from two batches, of which the first (and with `leaves_out` also the last) is
    not synchronized."""
    engine = engine_of(**options)
    for seed in range(4):
        unsynced = seed % 2 == 0 or (leaves_out and seed == 3)
        with engine.no_sync(engine.model) if unsynced else nullcontext():
            engine.execute_pipeline(iter([data(seed)]))
        if seed % 2:
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return masters(engine)


def without_sync(options: dict[str, Any]) -> None:
    torch.testing.assert_close(accumulated(options, True), accumulated(options, False))


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REPLICAS)
def test_a_step_sums_what_no_sync_has_left(pool: Pool, name: str) -> None:
    """The last window of an epoch is often too short to reach its synchronized batch: each replica stepped with its own
    gradient, and the replicas were different models from then on."""
    pool.run(without_sync, 2, REPLICAS[name])


def as_with_accelerate(is_one_step: bool) -> None:
    """Accumulate two batches as docs/coming-from/accelerate.md says, and compare with accelerate's division by two."""
    whole, engine = seeded(), engine_of(pp_size=2)
    for seed in range(2):
        (whole(**data(seed))["loss"] / 2).backward()
    if is_one_step:
        engine.execute_pipeline(iter([data(0), data(1)]), num_batches=2, weight=1 / 2)
    else:
        for seed in range(2):
            with nullcontext() if seed else engine.no_sync(engine.model):
                engine.execute_pipeline(iter([data(seed)]), weight=1 / 2)
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for name, parameter in engine.model.named_parameters():
        if not is_released(parameter):
            torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.turns
@pytest.mark.parametrize("is_one_step", [True, False])
def test_accumulation_of_accelerate_divides(pool: Pool, is_one_step: bool) -> None:
    """A user replaced `accelerator.accumulate` by `no_sync`, as the docs said. accelerate divides each loss by the
    number of batches, so the gradients were too large by this factor."""
    pool.run(as_with_accelerate, 2, is_one_step)


def weighted_by_a_tensor() -> list[float]:
    """The losses of three equal steps with the same weight, and the weight afterwards."""
    engine, weight = engine_of(pp_size=1, dp_size=2, loss_reduction="batch"), torch.tensor(0.25)
    losses = [float(engine.execute_pipeline(iter([data(0)]), weight=weight)["loss"]) for _ in range(3)]
    for unusable in (torch.tensor(torch.nan), float("inf")):
        with pytest.raises(UsageError, match="weight must be a finite number"):
            engine.execute_pipeline(iter([data(0)]), weight=unusable)
    return [*losses, float(weight)]


@pytest.mark.turns
def test_a_weight_that_is_a_tensor_is_not_changed(pool: Pool) -> None:
    """A loop passed its weight as a tensor. With loss_reduction="batch", each step divided this tensor in place by
    dp_size, so the gradients became smaller in every step, silently."""
    for first, second, third, weight in pool.run(weighted_by_a_tensor, 2):
        assert first == second == third and weight == 0.25


def frozen_between(options: dict[str, Any], syncs: bool) -> list[Tensor]:
    """The values after an update of two batches, each replica's own; layers are frozen after the first batch, which is
    synchronized or not."""
    engine = engine_of(**options)
    for seed in range(2):
        with nullcontext() if syncs or seed else engine.no_sync(engine.model):
            engine.execute_pipeline(iter([data(2 * seed + dist.get_rank() % engine.plugin.grid.dp_size)]))
        engine.model.get_submodule("layers.1").requires_grad_(False)
        engine.model.head.requires_grad_(False)
    engine.optimizer.step()
    return masters(engine)


def without_sync_and_frozen(options: dict[str, Any]) -> list[Tensor]:
    values = frozen_between(options, syncs=False)
    torch.testing.assert_close(values, frozen_between(options, syncs=True))
    return values


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["replicas", "zero", "fsdp"])
def test_a_gradient_of_no_sync_is_summed_although_its_parameter_is_frozen_since(pool: Pool, name: str) -> None:
    """Only gradients of trained parameters were summed, and optimizers step whatever has a gradient: each replica
    stepped with its own, and the replicas were different models from then on."""
    first, second = pool.run(without_sync_and_frozen, 2, REPLICAS[name])
    if name == "replicas":
        assert all(map(torch.equal, first, second))


class Sometimes(Net):
    """Skips a layer if a batch has the token 0."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.skips = bool((ids == 0).any())
        return super().forward(ids, labels)

    def body(self, x: Tensor) -> Any:
        for k, layer in enumerate(self.layers):
            x = x if k == 1 and self.skips else layer(x)
        return x


def batch_with(has_zero: bool, seed: int) -> dict[str, Tensor]:
    batch = data(seed)
    batch["ids"].clamp_(min=1)
    batch["ids"][:, 0] *= not has_zero
    return batch


def frozen_and_skipped(syncs: bool) -> list[Tensor]:
    """As `frozen_between`, with a layer that only one replica has called."""
    model = seeded(Sometimes)
    engine = boost(model, sgd(model.parameters()), dry_run_input=batch_with(False, 0), **REPLICAS["fsdp"])
    with nullcontext() if syncs else engine.no_sync(engine.model):
        engine.execute_pipeline(iter([batch_with(dist.get_rank() == 0, 0)]))
    engine.model.get_submodule("layers.1").requires_grad_(False)
    engine.execute_pipeline(iter([batch_with(False, 1)]))
    engine.optimizer.step()
    return masters(engine)


def skipped_alike() -> None:
    torch.testing.assert_close(frozen_and_skipped(False), frozen_and_skipped(True))


@pytest.mark.turns
def test_a_gradient_of_one_replica_is_summed_although_its_parameter_is_frozen_since(pool: Pool) -> None:
    """With fsdp, only that replica took part in the sum: the process ended, by a collective mismatch."""
    pool.run(skipped_alike, 2)


def cleared_by_the_model(options: dict[str, Any], of_model: bool) -> list[Tensor]:
    """The values after an update of one batch, after another under `no_sync` whose gradients are dropped."""
    engine = engine_of(**options)
    with engine.no_sync(engine.model):
        engine.execute_pipeline(iter([data(0)]))
    (engine.model if of_model else engine.optimizer).zero_grad()
    engine.execute_pipeline(iter([data(1)]))
    engine.optimizer.step()
    return masters(engine)


def cleared_alike(options: dict[str, Any]) -> None:
    torch.testing.assert_close(cleared_by_the_model(options, True), cleared_by_the_model(options, False))


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["replicas", "fsdp"])
def test_the_model_s_zero_grad_drops_what_no_sync_has_left(pool: Pool, name: str) -> None:
    """With fsdp, only the optimizer's zero_grad dropped them: those of an earlier window were added to the next."""
    pool.run(cleared_alike, 2, REPLICAS[name])


CALLS: dict[str, Callable[[Engine], Any]] = {
    "step": lambda engine: engine.optimizer.step(),
    "clip_grad_by_value": lambda engine: engine.optimizer.clip_grad_by_value(1.0),
    "sync_grads": lambda engine: engine.plugin.sync_grads(engine.model),
    "execute_pipeline": lambda engine: engine.execute_pipeline(iter([data(1)])),
}


def clamp_data(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """The idiom of scripts that are older than clip_grad_value_."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.data.clamp_(-limit, limit)


def clamped(engine: Engine, syncs: bool, clamp: Callable[..., Any]) -> None:
    """Clamp, on the first rank alone or once they are summed on both, the gradients of a batch under `no_sync`."""
    engine.optimizer.zero_grad()
    with engine.no_sync(engine.model):
        engine.execute_pipeline(iter([data(0)]))
    if syncs:
        engine.plugin.sync_grads(engine.model)
    if syncs or dist.get_rank() == 0:
        clamp(engine.model.unwrap().parameters(), 1e-3)


def modified_parts(clamp: Callable[..., Any]) -> None:
    engine = engine_of(**REPLICAS["replicas"])
    before = masters(engine)
    for call in CALLS.values():
        clamped(engine, False, clamp)
        with pytest.raises(
            UsageError, match=r"was modified before it was summed over the ranks \(no_sync postpones the sum"
        ):
            call(engine)
        assert all(map(torch.equal, before, masters(engine)))
    clamped(engine, True, clamp)  # the remedy
    engine.optimizer.step()


@pytest.mark.turns
def test_a_modified_part_of_a_gradient_is_refused(pool: Pool) -> None:
    """In the first window since zero_grad, the replicas' clamped parts were summed: up to twice the limit, with two.
    A clamp of `grad.data` was not seen in any window."""
    for clamp in (torch.nn.utils.clip_grad_value_, clamp_data):
        pool.run(modified_parts, 2, clamp)


def clipped_by_value(options: dict[str, Any]) -> float:
    """The largest change of a value in a step of size 0.5, with gradients of at most 0.01."""
    engine = engine_of(**options)
    before = masters(engine)
    engine.execute_pipeline(iter([data(0)]))
    engine.optimizer.clip_grad_by_value(0.01)
    engine.optimizer.step()
    pairs = zip(before, masters(engine), strict=True)
    return largest_error([0.0, *((old - new).abs().max() for old, new in pairs if old.numel())])


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_clip_by_value_is_one_of_unscaled_gradients(pool: Pool, precision: str) -> None:
    """In fp16, the limit was compared with gradients that were multiplied by the loss scale."""
    for name in ("stages", "zero"):
        assert largest_error(pool.run(clipped_by_value, 2, REPLICAS[name] | {"precision": precision})) == pytest.approx(
            5e-3, rel=1e-3
        )


def infinite() -> bool:
    engine = engine_of(precision="fp16")
    before = masters(engine)
    engine.execute_pipeline(iter([data(0)]))
    for weight in engine.optimizer.weights.values():
        if (gradient := local_grad(weight.parameter)) is not None:
            gradient.view(-1)[0] = float("inf")
    engine.optimizer.clip_grad_by_value(0.01)
    engine.optimizer.step()
    return all(map(torch.equal, before, masters(engine)))


@pytest.mark.turns
def test_a_clip_by_value_does_not_hide_an_overflow(pool: Pool) -> None:
    """A clamp makes a number of infinity, and the update would not be skipped."""
    assert pool.run(infinite, 2) == [True, True]


def norms(options: dict[str, Any]) -> None:
    engine = engine_of(**options)
    engine.execute_pipeline(iter([data(0)]))
    largest = engine.optimizer.get_grad_norm(float("inf"))
    norm = float(engine.optimizer.clip_grad_by_norm(1e-3))
    assert norm > largest > 1e-3
    engine.optimizer.step()
    assert engine.optimizer.get_grad_norm() == norm
    assert engine.optimizer.get_grad_norm(float("inf")) <= 1e-3
    engine.optimizer.zero_grad()
    assert engine.optimizer.get_grad_norm() == norm
    engine.execute_pipeline(iter([data(1)]))
    assert engine.optimizer.get_grad_norm() not in (norm, 0.0)


@pytest.mark.turns
def test_the_norm_is_that_before_clipping(pool: Pool) -> None:
    """A step forgot the norm of the loop's own clipping, so it was 1.0, or 0.0 after zero_grad; and the norm of another
    type was the 2-norm."""
    for options in ({}, {"precision": "fp16"}):
        pool.run(norms, 2, options)


def evaluated() -> bool:
    """Whether an evaluation between a synchronized batch and its update leaves gradients to sum."""
    engine = engine_of(**REPLICAS["fsdp"])
    engine.execute_pipeline(iter([data(0)]))
    with torch.no_grad():
        engine.execute_pipeline(iter([data(1)]))
    return engine.model.pipeline.sync.is_partial


@pytest.mark.turns
def test_an_evaluation_leaves_no_gradients_to_sum(pool: Pool) -> None:
    """With fsdp, it counted as a batch under no_sync: the next update gathered all parameters, and summed zeros."""
    assert pool.run(evaluated, 2) == [False, False]


class Narrow(Net):
    """Two of its parameters have a first dimension of 1."""

    def __init__(self) -> None:
        super().__init__()
        width = self.head.in_features
        self.layers[0].a, self.layers[0].b = nn.Linear(width, 1), nn.Linear(1, width)


def largest_element() -> None:
    model, unsplit = seeded(Narrow), seeded(Narrow)
    engine = boost(model, sgd(model.parameters()), **REPLICAS["fsdp"])
    engine.execute_pipeline(iter([data(0)]))
    unsplit(**data(0))["loss"].backward()
    expected = max(float(p.grad.abs().max()) for p in unsplit.parameters() if p.grad is not None)
    assert engine.optimizer.get_grad_norm(float("inf")) == pytest.approx(expected, rel=1e-5)


@pytest.mark.turns
def test_an_infinity_norm_leaves_out_empty_shards(pool: Pool) -> None:
    """With fsdp, a parameter with fewer rows than replicas has an empty shard, whose infinity norm is torch's error: on
    one rank, while the others waited."""
    pool.run(largest_element, 2)


def of_embedding(options: dict[str, Any], is_sparse: bool) -> list[Tensor]:
    """The values after two updates, the first from two batches."""
    model = seeded()
    model.embed.sparse = is_sparse
    engine = boost(model, sgd(model.parameters()), **options)
    for seed in range(3):
        with nullcontext() if seed else engine.no_sync(engine.model):
            engine.execute_pipeline(iter([data(seed)]))
        if seed:
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return masters(engine)


def sparse_and_dense(options: dict[str, Any], tolerance: float) -> None:
    torch.testing.assert_close(of_embedding(options, True), of_embedding(options, False), rtol=0, atol=tolerance)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 1e-4)])
def test_sparse_gradients_of_shards_are_summed(pool: Pool, precision: str, tolerance: float) -> None:
    """With fsdp, nn.Embedding(sparse=True) was an error of torch at the end of the first step; replicas without
    fsdp sum such gradients as dense ones."""
    pool.run(sparse_and_dense, 2, REPLICAS["fsdp"] | {"precision": precision}, tolerance)


def changed_gradients() -> float:
    """The norm, with ZeRO, of gradients that are changed through the optimizer's groups alone."""
    engine = engine_of(**REPLICAS["zero"], max_norm=1e9)
    engine.execute_pipeline(iter([data(0)]))
    for parameter in engine.model.unwrap().parameters():
        if parameter.grad is not None:
            parameter.grad.view(-1)[0] = float("nan")
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.nan_to_num_()
    engine.optimizer.step()
    assert all(bool(value.isfinite().all()) for value in masters(engine))
    return engine.optimizer.get_grad_norm()


def test_with_zero_the_norm_is_that_of_the_owners(pool: Pool) -> None:
    """Each replica gave a part of the norm, also of gradients that the loop could not change there: NaN, here."""
    first, second = pool.run(changed_gradients, 2)
    assert first == second and first == first


def clipped_shards() -> None:
    engine = engine_of(**REPLICAS["fsdp"])
    engine.execute_pipeline(iter([data(0)]))
    with pytest.raises(UsageError, match="got sharded gradients"):
        torch.nn.utils.clip_grad_norm_([p for g in engine.optimizer.param_groups for p in g["params"]], 1.0)


@pytest.mark.turns
def test_a_norm_of_shards_is_refused(pool: Pool) -> None:
    """torch's clip_grad_norm_ over the optimizer's groups scaled each shard by a norm of its own."""
    pool.run(clipped_shards, 2)


def clipped_of_one_owner(precision: str) -> None:
    """Refused through the optimizer's groups; of the model's parameters, replicas compute the same norm."""
    engine = engine_of(**REPLICAS["zero"], precision=precision)
    engine.execute_pipeline(iter([data(0)]))
    with pytest.raises(UsageError, match="which another replica updates"):
        torch.nn.utils.clip_grad_norm_([p for g in engine.optimizer.param_groups for p in g["params"]], 1.0)
    norm = engine.optimizer.get_grad_norm()
    total = float(torch.nn.utils.clip_grad_norm_(engine.model.unwrap().parameters(), 1e-3))
    assert total == pytest.approx(norm, rel=1e-3)
    assert engine.optimizer.get_grad_norm() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.turns
def test_a_norm_of_one_owner_is_refused(pool: Pool) -> None:
    """With ZeRO, the groups of each replica have other parameters: each was clipped by a norm of its own."""
    for precision in ("fp32", "bf16"):
        pool.run(clipped_of_one_owner, 2, precision)


def attributes(options: dict[str, Any]) -> list[Any]:
    model = seeded()
    for parameter in model.parameters():
        parameter.lr_scale = 0.1  # type: ignore[attr-defined]
    engine = boost(model, sgd(model.parameters()), **options)
    return [getattr(p, "lr_scale", None) for group in engine.optimizer.param_groups for p in group["params"]]


@pytest.mark.turns
def test_an_optimizer_sees_the_attributes_of_parameters(pool: Pool) -> None:
    """An optimizer that reads a factor of the learning rate from its parameters found none in 16 bits, and no error."""
    for options in ({"precision": "bf16"}, REPLICAS["zero"] | {"precision": "bf16"}, REPLICAS["fsdp"]):
        for found in pool.run(attributes, 2, options):
            assert found and set(found) == {0.1}


class ByNorm(torch.optim.SGD):
    """Divides its gradients by their common norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        super().step()


def warmed_up() -> None:
    model = seeded()
    optimizer = ByNorm(model.parameters(), lr=0.5)
    LambdaLR(optimizer, lambda step: step / 100)
    assert optimizer.param_groups[0]["lr"] == 0.0 and gap(optimizer, model, sliced=False) > 0.1
    with pytest.raises(ConfigurationError, match="couples parameters"):
        boost(model, optimizer)


def test_an_optimizer_is_tried_although_its_schedule_begins_with_0(pool: Pool) -> None:
    """With a learning rate of 0, nothing moves, and no optimizer seemed to couple its parameters."""
    pool.run(warmed_up, 2)


def silent(options: dict[str, Any], on_groups: bool) -> None:
    engine = engine_of(**options)
    of_groups = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    for parameter in of_groups if on_groups else engine.model.unwrap().parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: 0 * gradient)
    with pytest.raises(UsageError, match="has a gradient hook that would not run"):
        engine.execute_pipeline(iter([data(0)]))


@pytest.mark.turns
def test_hooks_that_would_not_run_are_refused(pool: Pool) -> None:
    """A mask on the gradient of a shard, or of an optimizer's fp32 values, was ignored: frozen rows were trained."""
    pool.run(silent, 2, REPLICAS["fsdp"], False)
    pool.run(silent, 2, {"precision": "bf16"}, True)


def hooked() -> None:
    batch = zoo.batch("llama")
    model: nn.Module = zoo.build("llama")
    options = {"num_microbatches": 1, "num_slices": 2, "dry_run_input": batch}
    engine = boost(model, sgd(model.parameters()), **options)
    for parameter in engine.model.unwrap().parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(UsageError, match="register_post_accumulate_grad_hook"):
        engine.execute_pipeline(iter([batch]))


def test_a_hook_on_the_gradient_of_a_slice_is_refused(pool: Pool) -> None:
    """Only microbatches were counted: with one in slices, hooks ran on each slice's part."""
    pool.run(hooked, 2)


def fails(engine: Engine, seed: int, microbatch: int, error: BaseException) -> None:
    """A step whose forward raises `error` in this microbatch."""
    forward = Stage.forward

    def failing(stage: Stage, i: int, *args: Any) -> Any:
        if i == microbatch:
            raise error
        return forward(stage, i, *args)

    with mock.patch.object(Stage, "forward", failing), pytest.raises((ValueError, KeyboardInterrupt, BatchError)):
        engine.execute_pipeline(iter([data(seed)]))


def after_failures(precision: str, error: BaseException) -> None:
    engine, other = engine_of(precision=precision), engine_of(precision=precision)
    for seed in range(3):
        fails(engine, 5, 1, error)
        for each in (engine, other):
            each.execute_pipeline(iter([data(seed)]))
            each.optimizer.step()
            each.optimizer.zero_grad()
    assert all(map(torch.equal, masters(engine), masters(other)))


@pytest.mark.turns
@pytest.mark.parametrize(("precision", "error"), [("fp32", KeyboardInterrupt()), ("bf16", ValueError("bad sample"))])
def test_a_failed_step_of_one_process_leaves_no_gradients(pool: Pool, precision: str, error: BaseException) -> None:
    """A loop skipped batches that ran out of memory, or a cell was interrupted and run again: the gradients of the
    failed step's first microbatches were added to those of the next step."""
    pool.run(after_failures, 1, precision, error)


def within_a_window() -> str:
    engine, other = engine_of(), engine_of()
    for each in (engine, other):
        each.execute_pipeline(iter([data(0)]))
    fails(engine, 5, 1, ValueError())
    with pytest.raises(UsageError) as refused:
        engine.execute_pipeline(iter([data(2)]))
    with pytest.raises(UsageError):
        engine.optimizer.step()
    assert all(map(torch.equal, masters(engine), masters(other)))
    for each in (engine, other):
        each.optimizer.zero_grad(set_to_none=each is other)
        each.execute_pipeline(iter([data(2)]))
        each.optimizer.step()
    assert all(map(torch.equal, masters(engine), masters(other)))
    return str(refused.value)


@pytest.mark.turns
def test_a_failed_step_within_a_window_is_refused(pool: Pool) -> None:
    """The gradients of the failed step's first microbatches were added to those of the window's earlier steps."""
    (said,) = pool.run(within_a_window, 1)
    assert "optimizer.zero_grad()" in said and "embed.weight" in said


def of_the_head() -> None:
    model = seeded()
    engine = boost(model, sgd(model.head.parameters()))
    for seed in range(2):
        fails(engine, 5, 1, ValueError())
        engine.execute_pipeline(iter([data(seed)]))
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def test_gradients_that_no_optimizer_clears_do_not_refuse_a_step(pool: Pool) -> None:
    """An optimizer had only the head's parameters, so the body's gradients were never cleared. After a failed step,
    every further step was refused, even after optimizer.zero_grad()."""
    pool.run(of_the_head, 1)
