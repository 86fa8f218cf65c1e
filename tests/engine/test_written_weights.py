"""Tests of written weights: training uses the values that a loop writes to parameters or optimizer tensors."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import pipeshard
from pipeshard.distributed.collectives import local
from pipeshard.errors import UsageError
from pipeshard.split.materialize import is_released
from tests import zoo
from tests.hunt.loops import LAYOUTS, Sides
from tests.hunt.nets import data
from tests.pool import Pool
from tests.unsplit import Split, largest_error

pytestmark = pytest.mark.local

BOUND = 0.125  # a number that 16 bits have


def materialized() -> list[float]:
    """The error of a lazy critic that is created, run and loaded while a generator is boosted."""
    data = zoo.batch("gpt2", rows=4)
    split = Split(zoo.build("gpt2"), 1, data, num_microbatches=2)
    images, critics = torch.randn(2, 3, 8, 8), []
    for _ in range(2):
        torch.manual_seed(0)
        critics.append(nn.Sequential(nn.LazyConv2d(2, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(1)))
    seen = critics[0](images)
    critics[1].load_state_dict(critics[0].state_dict())
    split.backward(data)
    with pytest.raises(ValueError, match="uninitialized parameter"):
        nn.LazyLinear(1).weight.add_(1)
    return [float((critics[1](images) - seen).detach().abs().max())]


@pytest.mark.turns
def test_lazy_modules_beside_a_boosted_model(pool: Pool) -> None:
    """A user boosted a generator, then ran a critic with a LazyLinear once on a batch. This raised torch's error about
    an uninitialized parameter, whose remedy is to do so."""
    assert pool.run(materialized, 1) == [[0.0]]


def momentum(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def of_groups(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def trained(sides: Sides) -> list[Any]:
    return [parameter for _, parameter in sides.held() if not is_released(parameter)]


@torch.no_grad()
def decays_through_groups(layout: dict[str, Any]) -> list[str]:
    """Before an evaluation, as optimizers without a schedule do, and after it again."""
    sides = Sides(layout, momentum)
    for step in range(3):
        with torch.enable_grad():
            sides.train(sides.batches(step))
        sides.step()
        for optimizer in (sides.reference, sides.optimizer):
            for parameter in of_groups(optimizer):
                parameter.mul_(0.8)
        batches = sides.batches(20 + step)
        with torch.enable_grad():
            expected = sides.loss(batches)
        sides.reference.zero_grad()
        if not abs(sides.split_loss(batches) - expected) <= 1e-5 * abs(expected):
            sides.found.append(f"evaluation after step {step}")
    for optimizer in (sides.reference, sides.optimizer):
        for parameter in of_groups(optimizer):
            parameter.mul_(0.8)
    whole = dict(pipeshard.to_sequential(sides.engine.model).named_parameters())
    for name, parameter in sides.unsplit.named_parameters():
        if not torch.allclose(whole[name], parameter, rtol=1e-4, atol=1e-5):
            sides.found.append(f"{name} as it is saved")
    return sides.done()


@pytest.mark.turns
@pytest.mark.parametrize("layout", ["two stages", "ZeRO-1"])
def test_what_is_written_to_an_optimizers_groups_is_seen_by_the_next_forward(pool: Pool, layout: str) -> None:
    """With ZeRO one replica alone has a parameter in its groups: the others computed with the old one. Schedule-free
    optimizers were evaluated and trained at other points."""
    ranks = 2 * LAYOUTS[layout].get("dp_size", 1)
    assert pool.run(decays_through_groups, ranks, dict(LAYOUTS[layout]), timeout=120) == [[]] * ranks


@torch.no_grad()
def clamps(layout: dict[str, Any], through_groups: bool, at_once: bool = False, by_data: bool = False) -> None:
    """In 16 bits, with a learning rate by which nothing leaves the bound again."""
    sides = Sides({**layout, "precision": "bf16"}, lambda model: torch.optim.SGD(model.parameters(), lr=0.0))
    for step in range(2):
        with torch.enable_grad():
            sides.split_loss(sides.batches(step))
        sides.optimizer.step()
        written = of_groups(sides.optimizer) if through_groups else trained(sides)
        if at_once:
            torch._foreach_clamp_min_(written, -BOUND)
            torch._foreach_clamp_max_(written, BOUND)
        for parameter in () if at_once else written:
            (parameter.data if by_data else parameter).clamp_(-BOUND, BOUND)
    pipeshard.to_sequential(sides.engine.model)
    sides.split_loss(sides.batches(3))
    sides.optimizer.step()
    for values in (trained(sides), of_groups(sides.optimizer)):
        largest = max(float(value.detach().abs().max()) for value in values)
        assert largest == pytest.approx(BOUND, rel=1 / 128)  # what 16 bits round to it stays
    for weight in sides.optimizer.weights.values():
        assert torch.equal(weight.parameter, weight.master.to(weight.parameter.dtype))


@torch.no_grad()
def values_after(exchanges: bool) -> list[Tensor]:
    """The fp32 values after some steps; beside them, other weights are evaluated and the former put back."""
    sides = Sides({"precision": "bf16"}, momentum)
    for step in range(4):
        with torch.enable_grad():
            sides.split_loss(sides.batches(step))
        sides.optimizer.step()
        sides.optimizer.zero_grad()
        for parameter in trained(sides) if exchanges else ():
            before = parameter.detach().clone()
            parameter.mul_(0.5)
            if step % 2:
                parameter.copy_(before)
            else:
                parameter.data = before
        sides.split_loss(sides.batches(9))
    return [value.detach().clone() for value in of_groups(sides.optimizer)]


def exchanged() -> None:
    with_exchange, without = values_after(True), values_after(False)
    assert without[0].dtype is torch.float32
    assert all(map(torch.equal, with_exchange, without))


@pytest.mark.turns
def test_what_is_written_in_16_bits_is_kept(pool: Pool) -> None:
    """The next update wrote the fp32 values over it: weights that a loop clamped or drew anew were what they had been.
    What is exchanged for an evaluation and put back leaves the fp32 values to the last bit. Writes by foreach functions
    were lost for longer, since torch does not count them in a mode, and those through `parameter.data`."""
    for through_groups in (False, True):
        pool.run(clamps, 2, {}, through_groups, timeout=120)
    pool.run(clamps, 4, {"dp_size": 2, "zero_stage": 1}, False, timeout=120)
    for through_groups in (False, True):
        pool.run(clamps, 2, {}, through_groups, at_once=True, timeout=120)
        pool.run(clamps, 2, {}, through_groups, by_data=True, timeout=120)
    pool.run(exchanged, 2, timeout=120)


def clamped_in_hooks(layout: dict[str, Any], before: bool) -> list[float]:
    """By how much weights are out of bounds that a hook of the step clamps, with a learning rate of 0."""
    sides = Sides({**layout, "precision": "bf16"}, lambda model: torch.optim.SGD(model.parameters(), lr=0.0))

    @torch.no_grad()
    def clamp(*_: Any) -> None:
        for parameter in trained(sides):
            parameter.clamp_(-BOUND, BOUND)

    register = sides.optimizer.register_step_pre_hook if before else sides.optimizer.register_step_post_hook
    register(clamp)
    for step in range(2):
        sides.split_loss(sides.batches(step))
        sides.optimizer.step()
    masters = [master.detach().to(torch.bfloat16) for master in of_groups(sides.optimizer)]
    return [float(local(value.detach()).abs().max()) for value in (*trained(sides), *masters)]


@pytest.mark.turns
@pytest.mark.parametrize("before", [False, True])
def test_what_a_hook_of_the_step_writes_in_16_bits_is_kept(pool: Pool, before: bool) -> None:
    """The values of the same step were written over it: weights that a hook clamped after each step never were."""
    for ranks, layout in ((2, {}), (4, {"dp_size": 2, "zero_stage": 1})):
        for most in pool.run(clamped_in_hooks, ranks, layout, before, timeout=120):
            assert all(value <= BOUND for value in most)


def changes_gradients(how: str, through_groups: bool) -> list[Tensor]:
    """The fp32 values after some steps in 16 bits, in which a loop has changed gradients in one place or the other."""
    sides = Sides({"precision": "bf16", "max_norm": 0.2}, momentum)
    for step in range(3):
        for k in range(2):
            sides.split_loss(sides.batches(2 * step + k))
            for parameter in of_groups(sides.optimizer) if through_groups else trained(sides):
                assert parameter.grad is not None
                if how == "clamped":
                    parameter.grad.clamp_(-1e-3, 1e-3)
                elif how == "replaced":
                    parameter.grad = parameter.grad.sign()
                elif k == 0:
                    parameter.grad = None
        sides.optimizer.step()
        sides.engine.model.zero_grad() if step % 2 else sides.optimizer.zero_grad()
    return [value.detach().clone() for value in of_groups(sides.optimizer)]


def places_of_gradients() -> None:
    for how in ("clamped", "replaced", "dropped"):
        in_groups, in_model = (changes_gradients(how, through_groups) for through_groups in (True, False))
        assert all(map(torch.equal, in_groups, in_model)), how


@pytest.mark.turns
def test_gradients_are_changed_through_the_groups_as_through_the_model(pool: Pool) -> None:
    """In 16 bits parameters in an optimizer's groups had no gradient before its step: a loop over the groups that
    clamped gradients, or dropped them, changed nothing."""
    for ranks in (1, 2):
        pool.run(places_of_gradients, ranks, timeout=120)


class Factored(torch.optim.SGD):
    """Has a factor of its own, which a loop anneals."""

    factor = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in of_groups(self):
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1 * self.factor)


def sets_attributes_of_optimizers() -> list[str]:
    factored = Sides({}, lambda model: Factored(model.parameters(), lr=0.1))
    fresh = Sides({}, momentum)
    for step in range(4):
        for optimizer in (factored.reference, factored.optimizer):
            optimizer.factor = 1.0 / (1 + step)
        for optimizer in (fresh.reference, fresh.optimizer):
            if step == 2:
                optimizer.state = collections.defaultdict(dict)
                optimizer.param_groups = [{**group, "lr": 0.02} for group in optimizer.param_groups]
        for sides in (factored, fresh):
            sides.train(sides.batches(step))
            sides.step()
    for optimizer in (factored.reference, factored.optimizer):
        del optimizer.factor
    return factored.done() + fresh.done()


@pytest.mark.turns
def test_what_is_set_on_a_boosted_optimizer_is_set_on_the_optimizer(pool: Pool) -> None:
    """`optimizer.factor = 0.5` and `optimizer.state = defaultdict(dict)` went to the object around it, which nothing
    read; `optimizer.param_groups = [...]` raised AttributeError."""
    assert pool.run(sets_attributes_of_optimizers, 2, timeout=120) == [[], []]


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def resets_state(layout: dict[str, Any]) -> list[str]:
    """Resets state, and reads it in other ways, by the model's parameters, as before and after the step; what differs
    from the unsplit model, or from the states of the tensors in the groups."""
    sides = Sides(layout, adam, verify=False)
    for step in range(3):
        sides.split_loss(sides.batches(step))
        sides.optimizer.step()
        sides.optimizer.zero_grad()
        states, held = sides.optimizer.state, set(of_groups(sides.optimizer))
        for name, parameter in sides.model.named_parameters():
            of_name = [tensor for tensor in held if sides.optimizer.names[tensor] == name]
            state = states[parameter]
            assert (parameter in states) == bool(of_name) == bool(state) == bool(states.get(parameter))
            assert not of_name or state is states[of_name[0]]
            if state and step == 1:
                state["exp_avg"].zero_()
                assert not states[of_name[0]]["exp_avg"].any()
            if step == 2:
                states[parameter] = states.setdefault(parameter, {})
                popped = states.pop(parameter, None)
                assert (popped is None) != bool(of_name) and parameter not in states
                states[parameter] = popped or {}
                if not of_name:
                    del states[parameter]
                    assert states.pop(parameter) == {}
        assert set(states) == held and len(states) == len(held)
        assert len(sides.optimizer.state_dict()["state"]) == len(held)
    sides.optimizer.state = saved = sides.optimizer.state
    assert sides.optimizer.optim.state is saved.states
    assert states.copy().keys() == copy.copy(states).keys() == set(states)
    states["count"] = 1
    del states["count"]
    return []


@pytest.mark.turns
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, {}), (1, {"precision": "bf16"}), (2, {"offload": "optimizer"}), (2, LAYOUTS["FSDP"]), (2, LAYOUTS["ZeRO-1"])],
)
def test_state_is_read_by_the_models_parameters(pool: Pool, ranks: int, layout: dict[str, Any]) -> None:
    """A reset of Adam's moments after merging LoRA read `optimizer.state[p]` of the model's parameters. In 16 bits, it
    got empty dicts, so nothing was reset; and the next `state_dict()` raised KeyError with a number."""
    assert pool.run(resets_state, ranks, dict(layout), timeout=120) == [[]] * ranks


def fills() -> float:
    """How far the weights of this rank's slices are from what a loop wrote before a small update."""
    data = zoo.batch("llama")
    split = Split(zoo.build("llama"), 1, data, tp_size=2, precision="bf16", num_microbatches=2, verify=False)
    split.backward(data)
    with torch.no_grad():
        for parameter in split.held.values():
            parameter.fill_(0.25)
    split.step()
    return largest_error(float((local(p.detach()).float() - 0.25).abs().max()) for p in split.held.values())


@pytest.mark.turns
def test_what_is_written_to_a_sharded_weight_is_kept(pool: Pool) -> None:
    """A write to a DTensor does not count as one to its shard, which alone was watched."""
    assert largest_error(pool.run(fills, 2)) < 0.01


@torch.no_grad()
def calls() -> tuple[float, float]:
    """The loss of a plain call, and then of a pipeline, after a loop has written to the optimizer's tensors."""
    data = zoo.batch("llama")
    split = Split(zoo.build("llama"), 1, data, precision="bf16", num_microbatches=1, verify=False)
    for parameter in of_groups(split.optimizer):
        parameter.mul_(3.0)
    return float(split.model(**data).loss), float(split.evaluate(data, return_loss=True)["loss"])


def test_what_is_written_to_the_optimizers_tensors_is_seen_by_a_plain_call(pool: Pool) -> None:
    """Each closure of a line search (LBFGS) computed with the weights from before the step."""
    ((plain, pipelined),) = pool.run(calls, 1)
    assert plain == pytest.approx(pipelined, rel=1e-3)


ZERO = {"dp_size": 2, "zero_stage": 1}


class ScheduleFree(torch.optim.SGD):
    """Computes gradients between the newest weights and their average, and evaluates the average: `train` and `eval`
    write the one or the other to the parameters."""

    is_training = False

    @torch.no_grad()
    def _move(self, trains: bool, weight: float) -> None:
        for parameter in of_groups(self) if trains is not self.is_training else ():
            if "newest" in self.state[parameter]:
                parameter.lerp_(self.state[parameter]["newest"], weight)
        self.is_training = trains

    def train(self) -> None:
        self._move(True, 1 - 0.9)

    def eval(self) -> None:
        self._move(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in of_groups(self):
            if parameter.grad is not None:
                newest = self.state[parameter].setdefault("newest", parameter.clone())
                parameter.lerp_(newest, 0.5).sub_(parameter.grad, alpha=0.1)
                newest.sub_(parameter.grad, alpha=0.4)


def plain(sides: Sides, batches: list[Any]) -> Any:
    """The loss of a plain call on this replica's batch."""
    return sides.engine.model(**next(sides.own(batches)))["loss"]


def evaluates_schedule_free(layout: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The losses of evaluations by plain calls on one batch, and those of the unsplit model."""
    sides = Sides(layout, lambda model: ScheduleFree(model.parameters(), lr=0.1), verify=False)
    losses, expected = list[float](), list[float]()
    for step in range(3):
        for optimizer in (sides.reference, sides.optimizer):
            optimizer.train()
        batches = [data(step), data(step + 10)]
        sides.loss(batches)
        sides.engine.backward(plain(sides, batches), sides.optimizer)
        sides.step()
        for optimizer in (sides.reference, sides.optimizer):
            optimizer.eval()
        with torch.no_grad():
            losses.append(float(plain(sides, [data(20), data(20)])))
            expected.append(float(sides.unsplit(**data(20))["loss"]))
    return losses, expected


@pytest.mark.turns
@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-6), ("bf16", 1e-2)])
def test_a_schedule_free_optimizer_is_evaluated_by_plain_calls(pool: Pool, precision: str, error: float) -> None:
    """With ZeRO, `optimizer.eval()` writes to the weights that a replica owns. Each replica then evaluated with these
    and the others' old weights, and got another loss."""
    layout = {**ZERO, "precision": precision}
    (first, expected), (second, _) = pool.run(evaluates_schedule_free, 2, layout, timeout=120)
    assert first == second == pytest.approx(expected, rel=error)


Write = Callable[[Sides], Any]


@torch.no_grad()
def halves(tensors: Iterable[Any]) -> None:
    for tensor in tensors:
        tensor.mul_(0.5)


def swaps_on_one_rank(sides: Sides) -> None:
    """One rank evaluates other weights, reads its weights' data, and restores them."""
    for parameter in trained(sides) if dist.get_rank() == 0 else ():
        before = parameter.detach().clone()
        halves([parameter.data])
        with torch.no_grad():
            parameter.copy_(before)


ALIKE: list[Write] = [  # on all replicas, or without effect
    lambda sides: halves(trained(sides)),
    lambda sides: halves([sides.model.head.bias]),
    lambda sides: halves(sides.model.layers.parameters()),
    lambda sides: [parameter.data.norm() for parameter in of_groups(sides.optimizer)],
    swaps_on_one_rank,
]
APART: list[Write] = [
    lambda sides: halves(of_groups(sides.optimizer)),
    lambda sides: halves(parameter.data for parameter in of_groups(sides.optimizer)),
]


def writes_before_plain_calls(layout: dict[str, Any]) -> list[float]:
    """What the loop writes is refused before a plain call where replicas would differ, and otherwise used."""
    sides, losses = Sides(layout, momentum, verify=False), []
    for step, write in enumerate([*ALIKE, *APART]):
        sides.engine.backward(plain(sides, [data(step), data(step)]), sides.optimizer)
        sides.step()
        write(sides)
        if write in APART:
            with pytest.raises(UsageError, match=r"through optimizer\.param_groups .* zero_stage=1"):
                plain(sides, [data(step), data(step)])
            sides.split_loss([data(step), data(step)])
        sides.engine.backward(plain(sides, [data(step), data(step)]), sides.optimizer)
        with torch.no_grad():
            losses.append(float(plain(sides, [data(9), data(9)])))
    if layout["precision"] == "fp32":  # one of several: it might be written on all replicas, until these compare
        halves(of_groups(sides.optimizer)[:1] if dist.get_rank() == 0 else ())
        loss = plain(sides, [data(0), data(0)])
        with pytest.raises(UsageError, match=r"through optimizer\.param_groups .* zero_stage=1"):
            sides.engine.backward(loss, sides.optimizer)
    else:  # boost gives the new optimizer its values: this is no write of the loop
        sides.engine.boost(sides.engine.model, torch.optim.SGD(sides.engine.model.parameters(), lr=0.1))
        plain(sides, [data(0), data(0)])
    return losses


@pytest.mark.turns
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_one_replica_alone_has_written_is_refused_before_a_plain_call(pool: Pool, precision: str) -> None:
    """A loop wrote to the weights in the optimizer's groups, which with ZeRO are those of one replica. Plain calls
    computed with the others' old weights, and each replica evaluated and trained another model."""
    first, second = pool.run(writes_before_plain_calls, 2, {**ZERO, "precision": precision}, timeout=120)
    assert first == second


def loads_before_plain_calls(folder: str, parts: list[str]) -> float:
    """The loss of a plain call after `parts` of a checkpoint, made three updates later, are loaded."""
    sides = Sides({**ZERO, "precision": "bf16"}, adam, verify=False)
    saved = Sides({**ZERO, "precision": "bf16"}, adam, verify=False)
    for step in range(3):
        saved.split_loss([data(step), data(step + 10)])
        saved.optimizer.step()
    saved.engine.save_model(saved.engine.model, f"{folder}/model", shard=True)
    saved.engine.save_optimizer(saved.optimizer, f"{folder}/optimizer", shard=True)
    for part in parts:
        if part == "model":
            sides.engine.load_model(sides.engine.model, f"{folder}/model")
        else:
            sides.engine.load_optimizer(sides.optimizer, f"{folder}/optimizer")
    loss = plain(sides, [data(9), data(9)])
    sides.engine.backward(loss, sides.optimizer)
    assert abs(float(loss) - float(plain(saved, [data(9), data(9)]))) < 1e-6
    return float(loss)


@pytest.mark.turns
@pytest.mark.parametrize("parts", [["model"], ["optimizer"], ["optimizer", "model"], ["model", "optimizer"]])
def test_loaded_weights_are_those_of_all_replicas_in_a_plain_call(pool: Pool, tmp_path: Path, parts: list[str]) -> None:
    """In 16 bits, a replica loads the fp32 values of the weights that it owns; the other replicas computed with their
    old weights until a step."""
    first, second = pool.run(loads_before_plain_calls, 2, str(tmp_path), parts, timeout=120)
    assert first == second


def writes_before_it_is_shared(folder: str) -> list[list[Tensor]]:
    """The weights with which the next forward computes, after the loop wrote through the groups: before a step that is
    skipped, and before the optimizer alone is saved."""
    sides, computed = Sides({**ZERO, "precision": "fp16"}, momentum, verify=False), []
    batches = [data(0), data(10)]
    for is_skipped in (True, False):
        sides.split_loss(batches)
        halves(of_groups(sides.optimizer))
        if is_skipped:
            sides.model.head.bias.grad[0] = float("inf")
            sides.optimizer.step()
            assert sides.optimizer.skipped
        else:
            sides.engine.save_optimizer(sides.optimizer, folder, shard=True)
        sides.optimizer.zero_grad()
        sides.split_loss(batches)
        computed.append([parameter.detach().clone() for parameter in sides.model.parameters()])
    return computed


@pytest.mark.turns
def test_what_is_written_before_a_skipped_step_is_shared(pool: Pool, tmp_path: Path) -> None:
    """A loop decayed weights before a step that overflowed, or saved the optimizer only. The replica copied the write
    to its own parameter and forgot it: the others computed with the old weights until the next update."""
    first, second = pool.run(writes_before_it_is_shared, 2, str(tmp_path), timeout=120)
    for one, other in zip(first, second, strict=True):
        assert all(map(torch.equal, one, other))


def clamps_before_a_save() -> float:
    """The largest value after the model is clamped, evaluated and gathered, and an update with a learning rate of 0."""
    sides = Sides({**ZERO, "precision": "bf16"}, lambda model: torch.optim.SGD(model.parameters(), lr=0.0))
    sides.split_loss([data(0), data(10)])
    for parameter in trained(sides):
        parameter.detach().clamp_(-BOUND, BOUND)
    pipeshard.to_sequential(sides.engine.model)
    sides.optimizer.step()
    return max(float(parameter.detach().abs().max()) for parameter in trained(sides))


@pytest.mark.turns
def test_what_is_written_in_16_bits_before_a_save_is_kept(pool: Pool) -> None:
    """With ZeRO, a save sends each weight to all replicas. The replica then took the loop's write for its own, and the
    next update wrote the fp32 values over it."""
    assert pool.run(clamps_before_a_save, 2, timeout=120) == [BOUND, BOUND]


class Assigning(torch.optim.SGD):
    """Assigns new values to `data`, and keeps the tensor of the values before."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, now = self.state[parameter], parameter.data
                moved = now - state.get("before", now)
                parameter.data = now - group["lr"] * parameter.grad + 0.5 * moved
                state["before"] = now


def assigns_in_a_step() -> list[str]:
    """Against the unsplit model: steps that assign `data`, and an exchange of values through the groups."""
    sides = Sides({"dp_size": 2}, lambda model: Assigning(model.parameters(), lr=0.1), verify=False)
    for step in range(3):
        sides.train(sides.batches(step))
        sides.step()
    others = [(optimizer, [p.data for p in of_groups(optimizer)]) for optimizer in (sides.reference, sides.optimizer)]
    for factor in (0.5, 1.0):
        for optimizer, before in others:
            for parameter, value in zip(of_groups(optimizer), before, strict=True):
                parameter.data = value * factor if factor < 1 else value
        sides.train(sides.batches(5))
        for optimizer in (sides.reference, sides.optimizer):
            optimizer.zero_grad()
    return sides.done()


@pytest.mark.turns
def test_data_that_a_step_assigns_is_trained(pool: Pool) -> None:
    assert pool.run(assigns_in_a_step, 2, timeout=120) == [[]] * 2


class Average:
    """The average of the weights as many scripts have it, which exchanges the `data` of parameters."""

    def __init__(self, model: Any) -> None:
        self.model, self.backup = model, dict[str, Tensor]()
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters() if p.requires_grad}

    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.shadow[name] = 0.5 * parameter.data + 0.5 * self.shadow[name]

    def apply_shadow(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.backup[name] = parameter.data
            parameter.data = self.shadow[name]

    def restore(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.data = self.backup[name]


def evaluates_the_average() -> list[str]:
    sides = Sides({"dp_size": 2}, momentum, verify=False)
    averages = [Average(model) for model in sides.both]
    for step in range(3):
        sides.train(sides.batches(step))
        sides.step()
        for average in averages:
            average.update()
            average.apply_shadow()
        sides.train(sides.batches(20 + step))
        saved = pipeshard.to_sequential(sides.engine.model).state_dict()
        assert all(torch.allclose(saved[name], value, atol=1e-5) for name, value in averages[0].shadow.items())
        for average, optimizer in zip(averages, (sides.reference, sides.optimizer), strict=True):
            average.restore()
            optimizer.zero_grad()
    return sides.done()


@pytest.mark.turns
def test_data_that_is_exchanged_is_used(pool: Pool) -> None:
    assert pool.run(evaluates_the_average, 2, timeout=120) == [[]] * 2


def assigns_to_shards(**options: Any) -> None:
    """Beside new data, contiguous data is assigned to itself, as the optimizers of bitsandbytes do in each step."""
    data = zoo.batch("llama")
    split = Split(zoo.build("llama"), 1, data, num_microbatches=2, verify=False, **options)
    before = float(split.evaluate(data)["loss"])
    sharded = [weight for weight in split.optimizer.weights.values() if isinstance(weight.parameter, DTensor)]
    assert sharded
    for weight in sharded:
        for tensor in (weight.parameter,) if weight.is_double else (weight.parameter, weight.master):
            with pytest.raises(UsageError, match=rf"cannot assign to .data of {weight.name}.*p\.data\.copy_\(value\)"):
                tensor.data = tensor.data * 0.5
        if not weight.is_double:
            weight.master.data = weight.master.data.contiguous()
    assert float(split.evaluate(data)["loss"]) == before
    for weight in sharded:
        weight.parameter.data.copy_(weight.parameter.data * 0.5)
    assert float(split.evaluate(data)["loss"]) != before


@pytest.mark.turns
@pytest.mark.parametrize("options", [{"fsdp": True, "dp_size": 2}, {"tp_size": 2}, {"tp_size": 2, "precision": "bf16"}])
def test_data_that_is_assigned_to_a_sharded_parameter_is_refused(pool: Pool, options: dict[str, Any]) -> None:
    """A script's average of the weights exchanged `param.data` for an evaluation, and an optimizer wrote
    `p.data = p.data - lr * p.grad`. The model computed with the former values, and these were saved."""
    pool.run(assigns_to_shards, 2, timeout=120, **options)
