"""Tests of the offload of the optimizer: its values and states are on the host, and training is the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from pipeshard.distributed.collectives import local
from pipeshard.engine import engine
from pipeshard.engine.mixed_precision import MasterWeight
from pipeshard.errors import UsageError
from tests import zoo
from tests.pool import Pool
from tests.unsplit import Split, refusal

Loop = Callable[[Split, int], None]  # what a loop does between the backward and the optimizer's step


@contextlib.contextmanager
def apart(is_apart: bool = True) -> Iterator[None]:
    """Inside, models are boosted as if the CPU were a device with its own memory."""
    with mock.patch.object(engine, "has_own_memory", lambda _: is_apart):
        yield


def untouched(split: Split, step: int) -> None:
    """The loop does nothing."""


def steps(offload: str | None, loop: Loop = untouched, change: Any = None, **how: Any) -> list[Tensor]:
    """The losses, gradients, parameters and optimizer states of four steps of training."""
    model, data = zoo.build("llama", layers=4), zoo.batch("llama", rows=8)
    torch.manual_seed(1)
    model = change(model) if change is not None else model
    p = 1 if how.keys() & {"dp_size", "tp_size"} else dist.get_world_size()
    with apart():
        split = Split(model, p, data, verify=False, offload=offload, **{"num_microbatches": 4, **how})
    values = []
    for step in range(4):
        values.append(split.backward(data)["loss"])
        values += [local(q.grad).clone() for q in split.held.values() if q.grad is not None]
        loop(split, step)
        split.step()
        values += [local(q.detach()).clone() for q in split.held.values()]
    weights = split.optimizer.weights
    for tensor, name in split.optimizer.names.items():
        weight = weights[name]
        shares = weight.master.data_ptr() == local(weight.parameter).data_ptr()
        assert weight.master is tensor and shares != weight.is_double
        assert weight.is_double or offload is None or not tensor.requires_grad
        values += [state for state in split.optimizer.state[tensor].values() if isinstance(state, Tensor)]
    return [value.nan_to_num() for value in values if value is not None]  # fp16 overflows


def differing(loop: Loop = untouched, offload: str = "optimizer", change: Any = None, **how: Any) -> int:
    expected, found = steps(None, loop, change, **how), steps(offload, loop, change, **how)
    assert len(expected) == len(found)
    return sum(not torch.equal(*pair) for pair in zip(expected, found, strict=True))


def with_adapters(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {"max_norm": 0.1},
    "bf16": {"precision": "bf16", "max_norm": 0.1},
    "fp16": {"precision": "fp16", "initial_scale": 2.0**24},  # whose first steps overflow
    "zero": {"dp_size": 2, "zero_stage": 1, "precision": "bf16"},
    "fsdp": {"dp_size": 2, "fsdp": True},
    "fsdp in bf16": {"dp_size": 2, "fsdp": True, "precision": "bf16"},
    "tp": {"tp_size": 2},
    "adapters": {"change": with_adapters},
    "zbv": {"schedule": "zbv"},
    "both": {"offload": "both", "schedule": "gpipe"},
}


@pytest.mark.local
@pytest.mark.sampled(3)
@pytest.mark.parametrize("which", OPTIONS)
def test_training_is_the_same(pool: Pool, which: str) -> None:
    assert not any(pool.run(differing, 2, **OPTIONS[which]))


def clips_in_the_optimizer(split: Split, step: int) -> None:
    for group in split.optimizer.param_groups:
        nn.utils.clip_grad_value_(group["params"], 1e-3)


def halves_those_of_the_model(split: Split, step: int) -> None:
    for parameter in split.held.values():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def accumulates(split: Split, step: int) -> None:
    """Between two backwards, the optimizer's gradients are halved, and one is replaced."""
    halved = [parameter for group in split.optimizer.param_groups for parameter in group["params"]]
    for parameter in halved:
        parameter.grad.mul_(0.5)
    halved[0].grad = halved[0].grad.clone() + 1e-3
    split.backward(zoo.batch("llama", rows=4))


def freezes_and_writes(split: Split, step: int) -> None:
    """A weight is frozen for two steps, and every weight decays by hand."""
    first = next(iter(split.held.values()))
    first.requires_grad_(step not in (0, 1))
    with torch.no_grad():
        for parameter in split.held.values():
            parameter.mul_(0.99)


@pytest.mark.local
@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "loop",
    [clips_in_the_optimizer, halves_those_of_the_model, accumulates, freezes_and_writes],
    ids=lambda f: f.__name__,
)
def test_a_loop_may_change_either_copy(pool: Pool, loop: Loop, precision: str) -> None:
    assert not any(pool.run(differing, 2, loop, precision=precision))


@pytest.mark.local
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "layout", [{"tp_size": 2}, {"dp_size": 2, "fsdp": True}, {"dp_size": 2, "zero_stage": 1}], ids=str
)
def test_a_loop_may_write_to_sharded_weights(pool: Pool, layout: dict[str, Any]) -> None:
    """A write to a DTensor did not count as one to its shard, whose other copy then overwrote it."""
    assert not any(pool.run(differing, 2, freezes_and_writes, **layout))


def changes_both(split: Split, step: int) -> None:
    halves_those_of_the_model(split, step)
    clips_in_the_optimizer(split, step)


def refused_for_both() -> str:
    with pytest.raises(UsageError) as caught:
        steps("optimizer", changes_both)
    return str(caught.value)


@pytest.mark.local
def test_gradients_that_were_changed_on_both_sides_are_refused(pool: Pool) -> None:
    """One of the changes would be lost."""
    assert all("was modified both on its device and on the host" in said for said in pool.run(refused_for_both, 2))


def resumed(folder: str, precision: str, first: str | None, then: str | None) -> list[Tensor]:
    """The parameters after four steps, two of which are resumed from a checkpoint of the first two."""
    data = zoo.batch("llama", rows=8)
    for offload, is_second in ((first, False), (then, True)):
        with apart():
            split = Split(
                zoo.build("llama", layers=4),
                2,
                data,
                verify=False,
                offload=offload,
                num_microbatches=4,
                precision=precision,
            )
        if is_second:
            split.booster.load_model(split.model, f"{folder}/model")
            split.booster.load_optimizer(split.optimizer, f"{folder}/optimizer")
        for _ in range(2):
            split.backward(data)
            split.step()
        if not is_second:
            split.booster.save_model(split.model, f"{folder}/model", shard=True)
            split.booster.save_optimizer(split.optimizer, f"{folder}/optimizer", shard=True)
    return [local(q.detach()).clone() for q in split.held.values()]


@pytest.mark.local
@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpoints_are_those_without_it(pool: Pool, precision: str, tmp_path: Path) -> None:
    expected = pool.run(resumed, 2, str(tmp_path / "a"), precision, None, None)
    for k, (first, then) in enumerate([("optimizer", None), (None, "optimizer"), ("optimizer", "optimizer")]):
        found = pool.run(resumed, 2, str(tmp_path / str(k)), precision, first, then)
        for ours, theirs in zip(found, expected, strict=True):
            assert all(map(torch.equal, ours, theirs))


def forgets(weight: MasterWeight) -> None:
    """Leaves the parameter as it was."""


def broken() -> int:
    expected = steps(None)
    with mock.patch.object(MasterWeight, "take_value", forgets):
        found = steps("optimizer")
    return sum(not torch.equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.local
def test_values_that_are_not_copied_back_are_seen(pool: Pool) -> None:
    assert all(pool.run(broken, 2))


def test_bad_input() -> None:
    assert "offload='optimiser' is unknown: did you mean optimizer?" in refusal(offload="optimiser")
    assert "is not supported with compile=True" in refusal(offload="both", compile=True)
