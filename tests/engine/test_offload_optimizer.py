"""Tests of optimizer offload: the optimizer's values and states are on the host, and training is the same."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from pipeshard import PipelinePlugin
from pipeshard.distributed.collectives import local
from pipeshard.engine import engine
from pipeshard.engine.mixed_precision import MasterWeight
from pipeshard.errors import UsageError
from pipeshard.split.materialize import is_released
from tests import zoo
from tests.pool import Pool
from tests.unsplit import Split, refusal

Make = Callable[[Any], torch.optim.Optimizer]
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
    values, skipped = [], []
    for step in range(4):
        values.append(split.backward(data)["loss"])
        gradients = [local(q.grad) for q in split.held.values() if q.grad is not None]
        values += [gradient.nan_to_num() for gradient in gradients]  # fp16 overflows
        loop(split, step)
        before = values_of(split)
        split.step()
        values += (after := values_of(split))
        skipped.append(split.optimizer.skipped)
    assert skipped == [how.get("precision") == "fp16", False, False, False]
    assert offload is not None or not all(map(torch.equal, before, after)), "the reference does not train"
    weights = split.optimizer.weights
    for tensor, name in split.optimizer.names.items():
        weight = weights[name]
        shares = weight.master.data_ptr() == local(weight.parameter).data_ptr()
        assert weight.master is tensor and shares != weight.is_double
        assert weight.is_double or offload is None or not tensor.requires_grad
        values += [state for state in split.optimizer.state[tensor].values() if isinstance(state, Tensor)]
    return [value for value in values if value is not None]


def differing(loop: Loop = untouched, offload: str = "optimizer", change: Any = None, **how: Any) -> int:
    expected, found = steps(None, loop, change, **how), steps(offload, loop, change, **how)
    assert len(expected) == len(found)
    return sum(not torch.equal(*pair) for pair in zip(expected, found, strict=True))


def with_adapters(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {"max_norm": 0.1},
    "bf16": {"precision": "bf16", "max_norm": 0.1},
    "fp16": {"precision": "fp16", "initial_scale": 2.0**20},  # whose first step overflows
    "zero": {"dp_size": 2, "zero_stage": 1},
    "zero in bf16": {"dp_size": 2, "zero_stage": 1, "precision": "bf16"},
    "adapters": {"change": with_adapters},
    "zbv": {"schedule": "zbv"},
    "both": {"offload": "both", "schedule": "gpipe"},
}


@pytest.mark.local
@pytest.mark.sampled(1)
@pytest.mark.parametrize("which", OPTIONS)
def test_training_is_the_same(pool: Pool, which: str) -> None:
    assert not any(pool.run(differing, 2, **OPTIONS[which]))


def halves(split: Split, step: int) -> None:
    for parameter in split.held.values():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def clips(split: Split, step: int) -> None:
    """The norm is read, and the gradients are changed after it."""
    split.optimizer.clip_grad_by_norm(0.5)
    split.optimizer.get_grad_norm()
    halves(split, step)


def accumulates(split: Split, step: int) -> None:
    """Between two backwards, gradients are halved, and one is replaced."""
    halves(split, step)
    first = next(iter(split.held.values()))
    assert first.grad is not None
    first.grad = first.grad.clone() + 1e-3
    split.backward(zoo.batch("llama", rows=4))


def drops(split: Split, step: int) -> None:
    """The model's gradients are cleared and computed again."""
    halves(split, step)
    split.model.zero_grad()
    split.backward(zoo.batch("llama", rows=4))


def freezes_and_writes(split: Split, step: int) -> None:
    """A weight is frozen for two steps, and every weight decays by hand."""
    first = next(iter(split.held.values()))
    first.requires_grad_(step not in (0, 1))
    with torch.no_grad():
        for parameter in split.held.values():
            parameter.mul_(0.99)


def hooks(split: Split, step: int) -> None:
    """Hooks of the step halve the model's gradients before it, and clamp the model's weights after it."""

    def clamped(*_: Any) -> None:
        with torch.no_grad():
            for parameter in split.held.values():
                parameter.clamp_(-0.01, 0.01)

    if step == 0:
        split.optimizer.register_step_pre_hook(lambda *_: halves(split, step))
        split.optimizer.register_step_post_hook(clamped)


def writes_data(split: Split, step: int) -> None:
    """Weights are clamped in the model or, in odd steps, in the groups, without a new version."""
    groups = [parameter for group in split.optimizer.param_groups for parameter in group["params"]]
    for parameter in groups if step % 2 else split.held.values():
        parameter.data.clamp_(-0.05, 0.05)


def clears(split: Split, step: int) -> None:
    """A hook of the step clears some gradients in the groups, and scales the others, which the loop keeps."""

    def cleared(optimizer: Any, *_: Any) -> None:
        for k, parameter in enumerate(optimizer.param_groups[0]["params"]):
            if k % 2:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.mul_(2.0)

    if step == 0:
        split.optimizer.register_step_post_hook(cleared)
    split.optimizer.zero_grad = lambda: None  # type: ignore[method-assign]


@pytest.mark.turns
@pytest.mark.local
@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "loop",
    [halves, clips, accumulates, drops, freezes_and_writes, hooks, writes_data, clears],
    ids=lambda loop: loop.__name__,
)
def test_what_a_loop_changes_is_kept(pool: Pool, loop: Loop, precision: str) -> None:
    assert not any(pool.run(differing, 2, loop, precision=precision))


def clips_in_the_groups(split: Split, step: int) -> None:
    for group in split.optimizer.param_groups:
        nn.utils.clip_grad_norm_(group["params"], 1e-3)


def replaces_in_the_groups(split: Split, step: int) -> None:
    for group in split.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)


def clips_in_a_hook(split: Split, step: int) -> None:
    split.optimizer.register_step_pre_hook(lambda *_: clips_in_the_groups(split, step))


def refused(loop: Loop) -> str:
    with pytest.raises(UsageError) as caught:
        steps("optimizer", loop)
    return str(caught.value)


@pytest.mark.turns
@pytest.mark.local
@pytest.mark.parametrize("loop", [clips_in_the_groups, replaces_in_the_groups, clips_in_a_hook])
def test_gradients_of_the_groups_are_refused(pool: Pool, loop: Loop) -> None:
    """They are None until the update, so torch's clipping would do nothing."""
    assert all("read and modify the gradients of model.parameters()" in said for said in pool.run(refused, 2, loop))


def boosted(make: Make, offload: str | None, precision: str, p: int = 2) -> Split:
    """A llama and the optimizer that `make` returns for it."""
    model, data = zoo.build("llama", layers=4), zoo.batch("llama", rows=8)
    options: dict[str, Any] = {"verify": False, "offload": offload, "num_microbatches": 2, "precision": precision}
    with apart(), mock.patch.object(torch.optim, "AdamW", lambda *_, **__: make(model)):
        return Split(model, p, data, **options)


def values_of(split: Split) -> list[Tensor]:
    return [local(parameter.detach()).clone() for parameter in split.held.values()]


def joins(offload: str | None, precision: str) -> list[Tensor]:
    """A layer joins the optimizer after a step, and has been written to since boost."""
    split = boosted(lambda model: torch.optim.SGD(model.model.layers[1:].parameters(), lr=0.1), offload, precision)
    layer = split.model.unwrap().model.layers[0]
    for step in range(3):
        split.backward(zoo.batch("llama", rows=8))
        if step == 1:
            with torch.no_grad():
                for parameter in layer.parameters():
                    if not is_released(parameter):
                        parameter.mul_(0.5)
            split.optimizer.add_param_group({"params": list(layer.parameters())})
        split.step()
    return values_of(split)


def follows_closures(offload: str | None, precision: str) -> list[Tensor]:
    """LBFGS evaluates its closure several times in each step."""
    split = boosted(lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), offload, precision, p=1)

    def closure() -> Tensor:
        split.optimizer.zero_grad()
        loss: Tensor = split.backward(zoo.batch("llama", rows=8))["loss"]
        return loss

    for _ in range(2):
        split.optimizer.step(closure)
    return values_of(split)


def searches(offload: str | None, precision: str, options: dict[str, Any]) -> list[float]:
    """The losses before and after steps of LBFGS, which keeps a list of the parameters that it was created with."""
    split = boosted(lambda model: torch.optim.LBFGS(model.parameters(), **options), offload, precision, p=1)

    def closure() -> Tensor:
        split.optimizer.zero_grad()
        loss: Tensor = split.backward(zoo.batch("llama", rows=8))["loss"]
        return loss

    before = float(closure())
    for _ in range(2):
        split.optimizer.step(closure)
    assert split.optimizer.state_dict()["state"].keys() == {0}  # LBFGS has one state, for its first parameter
    return [before, float(closure())]


@pytest.mark.local
@pytest.mark.parametrize("options", [{"max_iter": 1}, {"max_iter": 3, "line_search_fn": "strong_wolfe"}], ids=str)
@pytest.mark.turns
def test_an_optimizer_that_keeps_a_list_of_parameters_trains(pool: Pool, options: dict[str, Any]) -> None:
    """LBFGS writes to the parameters themselves. In 16 bits, or with offload, the values in the groups were copied over
    its last write of each step: with max_iter=1, nothing ever trained."""
    (expected,) = pool.run(searches, 1, None, "fp32", options)
    for offload, precision in (("optimizer", "fp32"), (None, "bf16"), ("optimizer", "bf16")):
        (found,) = pool.run(searches, 1, offload, precision, options)
        assert found == pytest.approx(expected, abs=1e-6 if precision == "fp32" else 0.1)
        assert found[1] < found[0] - 0.2


def is_boosted_later(offload: str | None, precision: str) -> list[Tensor]:
    """An optimizer is boosted after the model, whose weights have been drawn again since."""
    data = zoo.batch("llama", rows=8)
    options: dict[str, Any] = {"verify": False, "offload": offload, "num_microbatches": 2, "precision": precision}
    with apart():
        booster = Booster(plugin=PipelinePlugin(pp_size=2, dry_run_input=data, **options))
        model, *_ = booster.boost(zoo.build("llama", layers=4))
        held = [parameter for parameter in model.unwrap().parameters() if not is_released(parameter)]
        with torch.no_grad():
            for parameter in held:
                parameter.mul_(0.5)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        booster.execute_pipeline(iter([data]), model, None, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in held]


class Inner(torch.optim.SGD):
    """Calls a closure twice, and clears the gradients of the first call in between by its own means."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


def calls_its_closure_twice(offload: str | None, precision: str) -> list[Tensor]:
    split = boosted(lambda model: Inner(model.parameters(), lr=0.1), offload, precision)
    for _ in range(2):
        split.optimizer.step(lambda: split.backward(zoo.batch("llama", rows=8))["loss"])
        split.optimizer.zero_grad()
    return values_of(split)


WAYS = [joins, follows_closures, is_boosted_later, calls_its_closure_twice]


@pytest.mark.turns
@pytest.mark.local
@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_ways_of_an_optimizer(pool: Pool, way: Callable[..., list[Tensor]], precision: str) -> None:
    """What was written between boost and add_param_group was lost in 16 bits: no optimizer followed the layer. A
    gradient that a step cleared on the host alone was added to the next one."""
    p = 1 if way is follows_closures else 2
    for plain, hosted in zip(*(pool.run(way, p, offload, precision) for offload in (None, "optimizer")), strict=True):
        assert all(map(torch.equal, plain, hosted))


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


@pytest.mark.turns
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


@pytest.mark.turns
@pytest.mark.local
def test_values_that_are_not_copied_back_are_seen(pool: Pool) -> None:
    assert all(pool.run(broken, 2))


def both(offload: str | None, precision: str) -> str:
    """The loop writes other values to the model's weights than to those in the groups."""
    data = zoo.batch("llama", rows=8)
    options: dict[str, Any] = {"verify": False, "num_microbatches": 2, "precision": precision}
    with apart():
        split = Split(zoo.build("llama"), 2, data, offload=offload, **options)
    split.backward(data)
    split.step()
    with torch.no_grad(), pytest.raises(UsageError) as caught:
        for parameter in split.held.values():
            parameter.mul_(0.5)
        for parameter in split.optimizer.param_groups[0]["params"]:
            parameter.mul_(0.9)
        split.evaluate(data, return_loss=True)
    assert len(pickle.dumps(split.optimizer.param_groups))
    return str(caught.value)


@pytest.mark.local
@pytest.mark.parametrize(("offload", "precision"), [("optimizer", "fp32"), ("optimizer", "bf16"), (None, "bf16")])
@pytest.mark.turns
def test_weights_that_were_written_in_both_places_are_refused(pool: Pool, offload: str | None, precision: str) -> None:
    """One of the writes was lost without a word."""
    assert all("different values to the model's parameter" in said for said in pool.run(both, 2, offload, precision))


def test_bad_input() -> None:
    assert "offload='optimiser' is unknown: did you mean optimizer?" in refusal(offload="optimiser")
    assert "is not supported with compile=True" in refusal(offload="both", compile=True)
    for sharding in ({"fsdp": True}, {"tp_size": 2}, {"ep_size": 2}):
        assert "is not supported with" in refusal(offload="optimizer", **sharding)
