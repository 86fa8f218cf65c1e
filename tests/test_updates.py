"""Tests of updates: changes of gradients and options before an update are exact, or refused on every rank."""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipeshard.distributed.collectives import gather_objects
from pipeshard.engine import norm_guard, step_guard
from pipeshard.engine.clipping import order_of
from pipeshard.engine.guard import Guard
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.private import global_step_pre_hooks
from pipeshard.split.materialize import is_released
from tests.hunt.loops import Sides
from tests.hunt.nets import Net
from tests.pool import Pool

pytestmark = pytest.mark.local

Change = Callable[[nn.Module, Any], Any]  # of a model's gradients or an optimizer's options


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters() if not is_released(parameter)]


def listening() -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipeshard").addHandler(handler)
    return told


def of_optimizer(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients(parameters: Any) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def hook(optimizer: Any, model: nn.Module, change: Change) -> None:
    def before(inner: Any, *_: Any) -> None:
        change(model, inner)

    optimizer.register_step_pre_hook(before)


NORMS: dict[str, Change] = {
    "of the model": lambda model, _: clip_grad_norm_(model.parameters(), 0.1),
    "of what is trained": lambda model, _: clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.1),
    "of some layers": lambda model, _: clip_grad_norm_(parameters=model.layers.parameters(), max_norm=0.1),
    "of the groups": lambda _, optimizer: clip_grad_norm_(of_optimizer(optimizer), 0.1, norm_type=1.0),
    "of gradients": lambda model, _: get_total_norm(gradients(model.parameters())),
    "deprecated": lambda model, _: nn.utils.clip_grad_norm(model.parameters(), 0.1),
}


REFUSED = r"which another rank holds.*max_norm=.*clip_grad_by_norm"


def norms(options: dict[str, Any]) -> None:
    """Each of them is refused, in the loop and in a hook, before it has changed a gradient or a parameter."""
    sides = Sides({}, sgd, **options)
    model, optimizer = sides.engine.model, sides.optimizer
    before, change = values(sides.model), NORMS["of the model"]
    optimizer.register_step_pre_hook(lambda inner, *_: change(sides.model, inner))
    for change in NORMS.values():
        optimizer.zero_grad()
        sides.split_loss(sides.batches(0))
        kept = [gradient.clone() for gradient in gradients(sides.model.parameters())]
        with pytest.raises(UsageError, match=REFUSED):
            change(model, optimizer)
        with pytest.raises(UsageError, match=REFUSED):
            optimizer.step()
        assert all(map(torch.equal, kept, gradients(sides.model.parameters())))
    assert all(map(torch.equal, before, values(sides.model)))


def early_hook() -> None:
    """A hook that the optimizer had before it was boosted."""

    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(model)
        if not hasattr(model, "is_second"):
            optimizer.register_step_pre_hook(lambda inner, *_: clip_grad_norm_(of_optimizer(inner), 0.1) and None)
        return optimizer

    sides = Sides({}, hooked, verify=False)
    before = values(sides.model)
    sides.split_loss(sides.batches(0))
    with pytest.raises(UsageError, match="which another rank holds"):
        sides.optimizer.step()
    assert all(map(torch.equal, before, values(sides.model)))


@pytest.mark.turns
def test_a_norm_of_one_stage_is_refused(pool: Pool) -> None:
    """torch's clip_grad_norm_ clipped each stage by its own norm: in a loop with a warning, and silently in a hook of
    the optimizer's step."""
    pool.run(norms, 2, {}, timeout=120)
    pool.run(norms, 2, {"precision": "bf16"}, timeout=120)
    pool.run(early_hook, 2, timeout=120)


def in_two_groups(model: Any) -> torch.optim.Optimizer:
    """The second group has one parameter on each of two stages, and for each of two replicas."""
    ends = [model.embed.weight, model.head.weight]
    others = [p for p in model.parameters() if all(p is not end for end in ends)]
    return torch.optim.SGD([{"params": others}, {"params": ends, "lr": 0.2}], lr=0.5)


def norms_of_one(layout: dict[str, Any]) -> list[str]:
    """A norm of such a group is refused, and the same loop over single tensors is exact."""
    sides = Sides(layout, in_two_groups)
    batches = sides.batches(0)
    sides.split_loss(batches)
    of_group = sides.optimizer.param_groups[1]["params"]
    assert len(of_group) == 1
    for function in (lambda: clip_grad_norm_(of_group, 0.1), lambda: get_total_norm(gradients(of_group))):
        with pytest.raises(UsageError, match=r"which another (rank|replica).*max_norm=.*pass the tensor"):
            function()
    sides.loss(batches)
    for optimizer in (sides.reference, sides.optimizer):
        for parameter in optimizer.param_groups[1]["params"]:
            clip_grad_norm_(parameter, 0.01)
    sides.step()
    return sides.done()


@pytest.mark.parametrize("layout", [{}, {"dp_size": 2, "zero_stage": 1}])
@pytest.mark.turns
def test_a_norm_of_a_group_with_one_parameter_on_each_rank_is_refused(pool: Pool, layout: dict[str, Any]) -> None:
    """A loop clipped each group by its norm, and a group had one parameter on each rank: each of them was silently
    clipped by its own norm."""
    assert pool.run(norms_of_one, 2, layout, timeout=120) == [[], []]


def norms_of_layers() -> list[str]:
    """What differs after each layer was clipped by its own norm."""
    sides = Sides({}, sgd)
    sides.train(sides.batches(0))
    for model in sides.both:
        for layer in model.layers:
            clip_grad_norm_(layer.parameters(), 0.01)
    sides.step()
    return sides.done()


def norm_of_a_lone_layer() -> None:
    """The last rank trains one layer only."""
    sides = Sides({}, sgd)
    for module in (sides.model.layers[2], sides.model.head):
        module.requires_grad_(False)
    sides.split_loss(sides.batches(0))
    if dist.get_rank() == 1:
        with pytest.raises(UsageError, match="a module that contains all trained parameters of a stage, use fewer"):
            clip_grad_norm_(sides.model.layers[3].parameters(), 0.01)


@pytest.mark.turns
def test_a_norm_of_the_only_layer_of_a_stage_is_refused_with_a_remedy(pool: Pool) -> None:
    """The docs allowed to clip a module that one stage holds. If it was the only layer of a stage, the error advised
    max_norm, another algorithm, and did not say that fewer stages would work."""
    assert pool.run(norms_of_layers, 2, timeout=120) == [[], []]
    pool.run(norm_of_a_lone_layer, 2, timeout=120)


def norm_of_a_replica() -> str:
    """The error of the norm of this replica's part of a group."""
    sides = Sides({"dp_size": 2, "zero_stage": 1}, sgd)
    sides.split_loss(sides.batches(0))
    with pytest.raises(UsageError, match=r"which another replica updates.*max_norm=") as refused:
        clip_grad_norm_(sides.optimizer.param_groups[0]["params"], 0.01)
    return str(refused.value)


@pytest.mark.turns
def test_the_error_of_a_norm_of_a_replica_s_part_does_not_advise_fewer_stages(pool: Pool) -> None:
    """Replicas of one stage divided the updates of a group. The error of its norm advised to use fewer stages, although
    there was only one."""
    assert not any("stages" in refused for refused in pool.run(norm_of_a_replica, 2, timeout=120))


def loss_scale() -> None:
    sides = Sides({}, sgd, precision="fp16")
    sides.split_loss(sides.batches(0))
    for function in (
        lambda: clip_grad_norm_(sides.model.parameters(), 0.1),
        lambda: NORMS["of gradients"](sides.model, 0),
    ):
        with pytest.raises(UsageError, match="multiplied by the loss scale"):
            function()
    with pytest.raises(UsageError, match=r"multiplied by the loss scale.*clip_grad_by_value\(clip_value\)"):
        clip_grad_value_(sides.model.parameters(), 0.001)
    sides.optimizer.clip_grad_by_value(0.001)
    clip_grad_value_(sides.model.parameters(), 0.001)  # the gradients are no longer scaled
    largest = max(float(gradient.abs().max()) for gradient in gradients(sides.model.parameters()))
    assert largest == pytest.approx(0.001)


def test_a_norm_of_scaled_gradients_is_refused(pool: Pool) -> None:
    """Even in one process clip_grad_norm_ and clip_grad_value_ clipped gradients that were still multiplied by fp16's
    loss scale: 65,536 times as much was cut off as the loop asked for."""
    pool.run(loss_scale, 1, timeout=120)


def by_hand(model: nn.Module, optimizer: Any) -> None:
    """Clip by the norm of the gradients that this process has."""
    clip(gradients(of_optimizer(optimizer)))


def clip(found: list[Tensor]) -> None:
    norm = torch.stack([gradient.norm() for gradient in found]).norm()
    for gradient in found if norm > 0.1 else ():
        gradient.mul_(0.1 / norm)


def halves(model: nn.Module, optimizer: Any) -> None:
    for gradient in gradients(model.parameters()):
        gradient.mul_(0.5)


def replaces(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def of_each(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        clip_grad_norm_(parameter, 0.01)


EXACT: dict[str, Change] = {
    "values": lambda model, _: clip_grad_value_(model.parameters(), 0.001),
    "halves": halves,
    "replaces": replaces,
    "of each": of_each,
    "of the head": lambda model, _: clip_grad_norm_(model.head.parameters(), 0.01),
    "of a layer": lambda model, _: clip_grad_norm_(model.layers[0].parameters(), 0.01),
    "nothing": lambda model, _: None,
}


def exact(name: str, in_hook: bool, layout: dict[str, Any]) -> list[str]:
    """What differs from the unsplit loop, and what was warned of."""
    told = listening()
    sides = Sides(layout, sgd)
    pairs = [(sides.unsplit, sides.reference), (sides.model, sides.optimizer)]
    if in_hook:
        for model, optimizer in pairs:
            hook(optimizer, model, EXACT[name])
    for step in range(5):
        sides.train(sides.batches(step))
        for model, optimizer in [] if in_hook else pairs:
            EXACT[name](model, optimizer)
        sides.step()
    return sides.done() + [text for text in told if "gradients" in text]


@pytest.mark.turns
@pytest.mark.parametrize("name", EXACT)
def test_what_changes_each_gradient_alone_is_exact_and_silent(pool: Pool, name: str) -> None:
    """clip_grad_value_ and p.grad.mul_(0.5) were warned of as if they clipped by a norm."""
    for in_hook in (False, True):
        assert pool.run(exact, 2, name, in_hook, {}, timeout=120) == [[], []]
    if name == "values":
        assert pool.run(exact, 2, name, False, {"dp_size": 2}, timeout=120) == [[], []]


def one_stage(model: Any, optimizer: Any) -> None:
    """A constant factor for layers that are, with two stages, all of the first one."""
    for module in (model.embed, model.layers[0], model.layers[1]):
        halves(module, optimizer)


def scales_and_overflows() -> None:
    """One stage's gradients are scaled in the first step alone, which overflows."""
    sides, step = Sides({}, sgd, precision="fp16"), 0
    sides.model.head.weight.register_hook(lambda gradient: gradient * (torch.inf if step == 0 else 1.0))
    for step in range(5):
        sides.split_loss(sides.batches(step))
        if step == 0:
            one_stage(sides.model, sides.optimizer)
        sides.optimizer.step()
        sides.optimizer.zero_grad()
        assert sides.optimizer.skipped == (step == 0)


@pytest.mark.turns
def test_factors_of_a_skipped_step_are_forgotten(pool: Pool) -> None:
    """The factors of a step that overflowed were multiplied by those of the next."""
    pool.run(scales_and_overflows, 2, timeout=120)


def overflows_untrained(layout: dict[str, Any]) -> list[bool]:
    """Steps of which the first overflows in the embedding, which no optimizer trains or clears, and in a layer."""
    sides = Sides(layout, lambda model: sgd(model.layers), precision="fp16", initial_scale=1024.0)
    before = {name: parameter.detach().clone() for name, parameter in sides.held()}
    skipped = []
    for step in range(4):
        sides.split_loss(sides.batches(step))
        for gradient in gradients((sides.model.embed.weight, sides.model.layers[1].a.weight)) if step == 0 else ():
            gradient.fill_(torch.inf)
        sides.optimizer.step()
        skipped.append(sides.optimizer.skipped)
        sides.optimizer.zero_grad()
    assert sides.engine.model.pipeline.scaling.value == 512.0
    assert all(p.equal(before[name]) == ("layers" not in name) for name, p in sides.held())
    return skipped


@pytest.mark.turns
@pytest.mark.parametrize("layout", [{}, {"dp_size": 2, "zero_stage": 1}])
def test_an_overflow_of_a_parameter_in_no_optimizer_skips_no_later_step(pool: Pool, layout: dict[str, Any]) -> None:
    """The optimizer had only the layers, so its zero_grad() never cleared the inf in the embedding's gradient: after
    one overflow, every step was skipped, and the loss scale fell to 1, silently."""
    assert pool.run(overflows_untrained, 2, layout, timeout=120) == [[True, False, False, False]] * 2


def overflows_untrained_and_clips(layout: dict[str, Any]) -> list[tuple[bool, bool, float]]:
    """Of steps of which the second overflows in the embedding, which no optimizer trains, after `clip_grad_by_norm`:
    whether it was skipped, whether a weight changed, and the loss scale."""
    sides = Sides(layout, lambda model: sgd(model.layers), precision="fp16", initial_scale=1024.0)
    scaling, seen = sides.engine.model.pipeline.scaling, []
    for step in range(3):
        before = values(sides.model)
        sides.split_loss(sides.batches(step))
        for gradient in gradients([sides.model.embed.weight]) if step == 1 else ():
            gradient.fill_(torch.inf)
        sides.optimizer.clip_grad_by_norm(1.0)
        sides.optimizer.step()
        has_changed = any(not now.equal(then) for now, then in zip(values(sides.model), before))
        seen.append((sides.optimizer.skipped, has_changed, scaling.value))
        sides.model.zero_grad()
    return seen


@pytest.mark.turns
@pytest.mark.parametrize("layout", [{}, {"dp_size": 2, "zero_stage": 1}])
def test_an_overflow_that_clip_grad_by_norm_counts_skips_the_step(pool: Pool, layout: dict[str, Any]) -> None:
    """The norm of all gradients was infinite, so clip_grad_by_norm multiplied the layers' gradients by 0. These were
    finite, so the step updated the layers by their momentum alone, and did not reduce the loss scale."""
    expected = [(False, True, 1024.0), (True, False, 512.0), (False, True, 512.0)]
    assert pool.run(overflows_untrained_and_clips, 2, layout, timeout=120) == [expected] * 2


def overflows_always() -> list[str]:
    """The warnings of steps in which the gradients of a layer are never finite."""
    told = listening()
    sides = Sides({}, sgd, precision="fp16", initial_scale=4.0)
    sides.model.layers[1].a.weight.register_hook(lambda gradient: gradient * torch.inf)
    for step in range(14):
        sides.split_loss(sides.batches(step))
        sides.optimizer.step()
        sides.optimizer.zero_grad()
    return [text for text in told if "skipped" in text]


@pytest.mark.turns
def test_steps_that_are_always_skipped_are_warned_of_once(pool: Pool) -> None:
    """A model whose gradients were always NaN trained for days without an update: `optimizer.skipped` alone told."""
    (told,), _ = pool.run(overflows_always, 2, timeout=120)
    assert "last 10 steps" in told and "on every rank, directly after execute_pipeline" in told


def adds_noise(model: Any, optimizer: Any) -> None:
    for gradient in gradients(of_optimizer(optimizer)):
        gradient.add_(torch.randn_like(gradient), alpha=0.01)


def adds_noise_to_two(model: Any, optimizer: Any) -> None:
    for gradient in gradients(of_optimizer(optimizer))[:2]:
        gradient.add_(torch.randn_like(gradient), alpha=0.01)


def adds_noise_to_data(model: Any, optimizer: Any) -> None:
    for gradient in gradients(of_optimizer(optimizer)):
        gradient.data.add_(torch.randn_like(gradient), alpha=0.01)


def adds_noise_by_name(model: nn.Module, optimizer: Any) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)


def noisy(in_hook: bool, adds: Callable[[Any, Any], None]) -> None:
    sides = Sides({}, sgd)
    if in_hook:
        hook(sides.optimizer, sides.model, adds)
    before = values(sides.model)
    sides.split_loss(sides.batches(0))
    if not in_hook:
        adds(sides.model, sides.optimizer)
    with pytest.raises(UsageError, match=r"random numbers that one generator produced.*manual_seed.*name"):
        sides.optimizer.step()
    assert all(map(torch.equal, before, values(sides.model)))


def noisy_by_name() -> list[str]:
    """Beside it, other random numbers are drawn, and gradients are divided."""
    sides = Sides({}, sgd)
    for step in range(4):
        sides.train(sides.batches(step))
        for model, optimizer in ((sides.unsplit, sides.reference), (sides.model, sides.optimizer)):
            if step == 3:
                torch.rand(1)
                halves(model, optimizer)
            else:
                adds_noise_by_name(model, optimizer)
        sides.step()
    return sides.done()


@pytest.mark.turns
def test_noise_that_is_drawn_in_turn_is_refused(pool: Pool) -> None:
    """Both stages drew the same numbers for other parameters, and the copies of a tied weight got different ones.
    Noise that was added to `grad.data`, or to two parameters of a stage, was not seen."""
    for in_hook in (False, True):
        for adds in (adds_noise, adds_noise_to_data, adds_noise_to_two):
            pool.run(noisy, 2, in_hook, adds, timeout=120)
    assert pool.run(noisy_by_name, 2, timeout=120) == [[], []]


def noisy_later() -> int:
    """The step in which a loop is refused that begins with noise after the first updates."""
    sides = Sides({}, sgd)
    for step in range(8):
        try:
            sides.split_loss(sides.batches(step))
        except UsageError as error:
            assert "random numbers that one generator produced" in str(error)
            return step
        if step >= 3:
            adds_noise(sides.model, sides.optimizer)
        sides.optimizer.step()
        sides.optimizer.zero_grad()
    return 8


@pytest.mark.turns
def test_noise_that_begins_later_is_refused_on_every_rank(pool: Pool) -> None:
    """Only the rank whose gradients had noise raised an error, and the others waited for it."""
    assert pool.run(noisy_later, 2, timeout=120) == [5, 5]


def noisy_replicas(is_seeded: bool, what: str) -> list[str]:
    """What is told of replicas without stages, whose loop writes random numbers to gradients, or to weights."""
    told, sides = listening(), Sides({"dp_size": 2}, sgd)
    generator = torch.Generator().manual_seed(7 if is_seeded else 7 + dist.get_rank())
    for step in range(5):
        sides.split_loss(sides.batches(step))
        for gradient in gradients(of_optimizer(sides.optimizer)) if what == "gradients" else ():
            gradient.add_(torch.randn(gradient.shape, generator=generator), alpha=0.01)
        sides.optimizer.step()
        sides.optimizer.zero_grad()
        if what == "weights" and step == 3:
            nn.init.normal_(sides.model.head.bias, generator=generator)
    return [text for text in told if "replicas of" in text]


@pytest.mark.turns
@pytest.mark.parametrize(("what", "name"), [("gradients", "embed.weight"), ("weights", "head.bias")])
def test_random_numbers_that_differ_between_replicas_are_warned_of(pool: Pool, what: str, name: str) -> None:
    """A script seeded each rank with seed + rank, and its loop added noise to gradients or reinitialized a layer: the
    replicas trained different models from then on, silently."""
    told = {text for texts in pool.run(noisy_replicas, 2, False, what, timeout=120) for text in texts}
    assert len(told) == 1 and f"have different values of {name}" in told.pop()
    assert pool.run(noisy_replicas, 2, True, what, timeout=120) == [[], []]


def draws_batches() -> list[str]:
    """A loop that clamps gradients within a window of two batches, and draws random numbers for each batch; after some
    updates, it divides them by a constant."""
    sides = Sides({}, sgd)
    for step in range(5):
        for part in range(2):
            torch.rand(3)
            sides.train(sides.batches(2 * step + part))
            for model, optimizer in ((sides.unsplit, sides.reference), (sides.model, sides.optimizer)):
                EXACT["values" if step < 3 else "halves"](model, optimizer)
        sides.step()
    return sides.done()


@pytest.mark.turns
def test_random_numbers_of_batches_are_no_noise(pool: Pool) -> None:
    """A loop that changed gradients within an accumulation window was refused on one rank as soon as its data drew
    random numbers, in the middle of a step."""
    assert pool.run(draws_batches, 2, timeout=120) == [[], []]


def skipping(to_none: bool) -> list[str]:
    """A loop that drops the gradients of a batch, and draws the order of the next ones."""
    sides = Sides({}, sgd)
    for step in range(4):
        sides.train(sides.batches(step))
        if step % 2:
            for each in (sides.unsplit, sides.model):
                each.zero_grad(set_to_none=to_none)
            torch.randperm(4)
            sides.train(sides.batches(step + 4))
        sides.step()
    return sides.done()


@pytest.mark.turns
def test_gradients_that_are_dropped_are_no_noise(pool: Pool) -> None:
    """zero_grad before an update, and a shuffle after it, were refused as noise."""
    for to_none in (False, True):
        assert pool.run(skipping, 2, to_none, timeout=120) == [[], []]


def updates_of(sides: Any, change: Change) -> int:
    """The number of updates, of at most 6, before a loop that changes gradients is refused."""
    for step in range(6):
        try:
            sides.split_loss(sides.batches(step))
            change(sides.model, sides.optimizer)
            sides.optimizer.step()
        except UsageError as error:
            assert "norm of one stage's gradients" in str(error)
            assert "If the factor is a constant, remove it, or set the lr" in str(error)
            return step
        sides.optimizer.zero_grad()
    return 6


def scales(change: Change, in_hook: bool) -> int:
    """The number of updates before a loop is refused that scales the gradients of each stage by another factor."""
    sides = Sides({}, sgd)
    if in_hook:
        hook(sides.optimizer, sides.model, change)
    return updates_of(sides, (lambda *_: None) if in_hook else change)


@pytest.mark.turns
@pytest.mark.parametrize("change", [by_hand, one_stage])
def test_a_factor_of_one_stage_is_refused(pool: Pool, change: Change) -> None:
    """Nothing told a loop that took the norm without torch's functions that each stage was scaled by another factor.
    A loop that halved the gradients of one stage was told to use a gradient hook, which replicas and ties refuse."""
    for in_hook in (False, True):
        assert pool.run(scales, 2, change, in_hook, timeout=120) == [0, 0]


def clips_late(kind: str) -> list[int]:
    """The number of steps, of at most 8, before a loop with two optimizers is refused that scales the gradients of each
    stage by a factor of its own from step 4 on. `kind`: whether each optimizer has parameters of both stages, or of one
    stage, and whether it has a hook."""
    sides = Sides({}, verify=False)
    model = sides.model
    matrices = [p for p in model.parameters() if p.dim() > 1]
    first = [*model.embed.parameters(), *model.layers[:2].parameters()]
    if kind == "of a stage":
        parts = [first, [p for p in model.parameters() if all(p is not other for other in first)]]
    else:
        parts = [matrices, [p for p in model.parameters() if p.dim() < 2]]
    optimizers = []
    for part in parts:
        sides.engine.boost(sides.engine.model, torch.optim.SGD(part, lr=0.1))
        optimizers.append(sides.engine.optimizer)
    if kind == "with hooks":
        hook(optimizers[0], model, lambda *_: None)
    for step in range(8):
        try:
            sides.split_loss(sides.batches(step))
            if step >= 4:
                clip(gradients(model.parameters()))
            for optimizer in optimizers:
                optimizer.step()
        except UsageError as error:
            assert "norm of one stage's gradients" in str(error)
            return [step]
        for optimizer in optimizers:
            optimizer.zero_grad()
    return []


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["of both stages", "of a stage", "with hooks"])
def test_a_norm_of_ones_own_is_refused_with_two_optimizers(pool: Pool, kind: str) -> None:
    """The first optimizer's update forgot the factor of the gradients, and the ranks compared only that of the second:
    a loop that began to clip after a warm-up clipped each stage by its own norm, silently."""
    assert pool.run(clips_late, 2, kind, timeout=120) == [[6], [6]]


class In16Bits(Net):
    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()


def updates_with(net: type[Net], change: Change) -> int:
    """The number of updates before a loop is refused that changes gradients of a `net`."""
    with mock.patch("tests.hunt.loops.Net", net):
        sides = Sides({}, sgd, verify=False)
    return updates_of(sides, change)


@pytest.mark.turns
def test_factors_of_16_bit_gradients_are_compared(pool: Pool) -> None:
    """Products in bf16 have relative errors of 0.4 %, so no factor was found, and a norm of one stage was only warned
    of."""
    first, second = pool.run(updates_with, 2, In16Bits, by_hand, timeout=120)
    assert first == second < 6


def nearly_alike(model: Any, optimizer: Any) -> None:
    """Factors that differ by 0.2 % between the stages."""
    for gradient in gradients(of_optimizer(optimizer)):
        gradient.mul_(0.5 + 0.001 * dist.get_rank())


@pytest.mark.turns
def test_only_factors_of_coarse_gradients_may_differ_by_rounding(pool: Pool) -> None:
    """Factors of gradients in fp32 that differed by less than bf16 rounds passed as one."""
    assert pool.run(updates_with, 2, Net, nearly_alike, timeout=120) == [0, 0]
    assert pool.run(updates_with, 2, In16Bits, nearly_alike, timeout=120) == [6, 6]


def by_rank(model: nn.Module, optimizer: Any) -> None:
    """Another factor on each rank, through the optimizer's groups."""
    for gradient in gradients(of_optimizer(optimizer)):
        gradient.mul_(0.5 + 0.1 * dist.get_rank())


CLIPS: dict[str, Change] = {
    "none": lambda *_: None,
    "by norm": lambda _, optimizer: optimizer.clip_grad_by_norm(0.01),
    "by value": lambda _, optimizer: optimizer.clip_grad_by_value(0.001),
    "torch's, by value": lambda model, _: clip_grad_value_(model.parameters(), 0.001),
    "torch's, each by value": lambda model, _: [
        clip_grad_value_(p, 0.001) for p in model.parameters() if p.grad is not None
    ],
    "torch's, of each layer": lambda model, _: [clip_grad_norm_(layer.parameters(), 1e-3) for layer in model.layers],
}


def scales_and_clips(layout: dict[str, Any], kind: str, in_hook: bool, start: int) -> str:
    """The error of a loop that multiplies gradients by a factor of the rank, from step `start` on, and then clips."""
    sides, step = Sides(layout, sgd), 0

    def changes(model: nn.Module, _: Any) -> None:
        for change in (by_rank, CLIPS[kind]) if step >= start else ():
            change(model, sides.optimizer)

    if in_hook:
        hook(sides.optimizer, sides.model, changes)
    for step in range(7):
        try:
            sides.split_loss(sides.batches(step))
            if not in_hook:
                changes(sides.model, sides.optimizer)
            sides.optimizer.step()
        except UsageError as error:
            assert step == (0 if start == 0 else start + 2)
            return str(error)
        sides.optimizer.zero_grad()
    return ""


@pytest.mark.turns
@pytest.mark.parametrize("kind", [kind for kind in CLIPS if kind != "none"])
def test_a_factor_of_one_stage_is_refused_although_gradients_are_clipped_then(pool: Pool, kind: str) -> None:
    """A loop multiplied each stage's gradients by a factor of its own and then clipped by value, or did both in a hook
    of the optimizer's step: no factor explained the sum of the changes, so the stages trained differently, silently."""
    for in_hook, start in ((False, 0), (True, 0), (True, 4)):
        for told in pool.run(scales_and_clips, 2, {}, kind, in_hook, start, timeout=120):
            assert "different factors: 0.5 on rank 0 (stage 0), 0.6 on rank 1" in told


@pytest.mark.turns
@pytest.mark.parametrize("layout", [{"dp_size": 2, "zero_stage": 1}, {"dp_size": 2, "fsdp": True}])
def test_factors_of_shards_and_of_owned_gradients_are_compared(pool: Pool, layout: dict[str, Any]) -> None:
    """With ZeRO and fsdp, a loop multiplied the gradients of the optimizer's groups by a factor of the rank. Changes of
    local shards were not seen, and gradients that another replica's optimizer uses kept their values: no error."""
    for kind in ("none", "by norm"):
        for start in (0, 4):
            for told in pool.run(scales_and_clips, 2, layout, kind, False, start, timeout=120):
                assert "different factors: 0.5 on rank 0 (replica 0, stage 0), 0.6 on rank 1" in told


def halves_what_one_replica_owns() -> list[str]:
    """Halves gradients by name: those of the first stage that its first replica's optimizer uses."""
    sides = Sides({"dp_size": 2, "zero_stage": 1}, sgd)
    owned = [weight.name for weight in sides.optimizer.weights.values() if weight.owner == 0]
    names, *_ = gather_objects(owned, sides.plugin.grid.world)
    for step in range(5):
        sides.train(sides.batches(step))
        for model in sides.both:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and name in names:
                    parameter.grad.mul_(0.5)
        sides.step()
    return sides.done()


@pytest.mark.turns
def test_a_constant_factor_of_what_one_replica_owns_is_exact(pool: Pool) -> None:
    """The factors of ZeRO's owners alone would refuse a loop that halves a parameter's gradient by name."""
    assert pool.run(halves_what_one_replica_owns, 4, timeout=120) == [[]] * 4


def clips_with_factors(kind: str, in_hook: bool) -> list[str]:
    """What differs from the unsplit loop that halves all gradients, and then clips each element or layer."""
    told, sides = listening(), Sides({}, sgd)

    def changes(model: Any, optimizer: Any) -> None:
        halves(model, optimizer)
        CLIPS[kind](model, optimizer)

    pairs = [(sides.unsplit, sides.reference), (sides.model, sides.optimizer)]
    if in_hook:
        for model, optimizer in pairs:
            hook(optimizer, model, changes)
    for step in range(5):
        sides.train(sides.batches(step))
        for model, optimizer in [] if in_hook else pairs:
            changes(model, optimizer)
        sides.step()
    return sides.done() + [text for text in told if "gradients" in text]


@pytest.mark.turns
@pytest.mark.parametrize("kind", [kind for kind in CLIPS if kind.startswith("torch's")])
def test_a_factor_of_all_ranks_and_a_clip_are_exact(pool: Pool, kind: str) -> None:
    """Neighbours of the loops that are refused: the factor is the same on all ranks."""
    for in_hook in (False, True):
        assert pool.run(clips_with_factors, 2, kind, in_hook, timeout=120) == [[], []]


def of_rank(model: nn.Module, optimizer: Any) -> float:
    return float(torch.stack([gradient.norm() for gradient in gradients(model.parameters())]).norm())


def sets(key: str, value: Callable[[float], Any]) -> Change:
    def change(model: nn.Module, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group[key] = value(of_rank(model, optimizer))

    return change


OPTIONS: dict[str, Change] = {
    "lr": sets("lr", lambda norm: 0.1 / (1 + norm)),
    "a tensor": sets("lr", lambda norm: torch.tensor(0.1 / (1 + norm))),
    "momentum": sets("momentum", lambda norm: 0.9 / (1 + norm)),
    "weight decay": sets("weight_decay", lambda norm: norm),
    "a switch": sets("nesterov", lambda norm: dist.get_rank() == 0),
}


def options_of_a_rank(name: str, late: bool) -> None:
    """In the first update before it changes a parameter; later at the beginning of the next step."""
    sides = Sides({}, sgd)
    for _ in range(5 if late else 0):
        sides.split_loss(sides.batches(0))
        sides.optimizer.step()
    before = values(sides.model)
    sides.split_loss(sides.batches(0))
    OPTIONS[name](sides.model, sides.optimizer)
    with pytest.raises(
        UsageError, match=r"of group 0 of SGD is .* on rank 0.* but .* on rank 1.*optimizer.get_grad_norm"
    ):
        if late:
            sides.optimizer.step()
            sides.optimizer.param_groups[0].update({**sides.optimizer.defaults, "lr": 0.5})
            sides.split_loss(sides.batches(0))
        else:
            sides.optimizer.step()
    assert late or all(map(torch.equal, before, values(sides.model)))


def replicas_of_one_stage() -> None:
    sides = Sides({"dp_size": 2}, sgd)
    sides.optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()
    with pytest.raises(UsageError, match="lr of group 0"):
        sides.split_loss(sides.batches(0))


@pytest.mark.turns
def test_options_that_differ_between_ranks_are_refused(pool: Pool) -> None:
    """A learning rate set from the gradient norm of `model.parameters()` trained each stage at another rate."""
    for name in OPTIONS:
        pool.run(options_of_a_rank, 2, name, False, timeout=120)
    pool.run(options_of_a_rank, 2, "lr", True, timeout=120)
    pool.run(replicas_of_one_stage, 2, timeout=120)


def alone(what: str) -> list[str]:
    """What is told of a loop whose first rank drops gradients in step 4 before its update, or keeps them after it."""
    told, sides = listening(), Sides({}, sgd)
    for step in range(6):
        sides.split_loss(sides.batches(step))
        is_alone = step == 4 and dist.get_rank() == 0
        if is_alone and what == "drops":
            sides.optimizer.zero_grad()
        sides.optimizer.step()
        if not (is_alone and what == "keeps"):
            sides.optimizer.zero_grad()
    return [text for text in told if "or set to None or 0) on only one of rank 0" in text]


def skips_together(freezes: bool) -> list[str]:
    """By the norm of the whole model; `freezes`: one stage has no gradients."""
    told, sides = listening(), Sides({}, sgd)
    for model in sides.both:
        model.embed.requires_grad_(not freezes)
        model.layers[:2].requires_grad_(not freezes)
    norms = []
    for step in range(6):
        sides.train(sides.batches(step))
        norms.append(sides.optimizer.get_grad_norm())
        if step == 5 or norms[-1] < max(norms):
            sides.step()
        elif step % 2:
            for optimizer in (sides.reference, sides.optimizer):
                optimizer.zero_grad()
    return sides.done() + [text for text in told if "gradients were cleared" in text]


@pytest.mark.turns
def test_gradients_that_one_rank_drops_are_warned_of(pool: Pool) -> None:
    """A loop that dropped gradients where the norm of its own stage was large trained the stages on other batches, from
    the fourth update on silently."""
    assert all(any(pool.run(alone, 2, what, timeout=120)) for what in ("drops", "keeps"))
    for freezes in (False, True):
        assert pool.run(skips_together, 2, freezes, timeout=120) == [[], []]


def zeroes(model: Any, _: Any) -> None:
    for gradient in gradients(model.parameters()):
        gradient.zero_()


def replaces_by_zeros(model: Any, _: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter)


ZEROES: dict[str, Change] = {
    "zeroes": zeroes,
    "multiplies": lambda model, _: [gradient.mul_(0) for gradient in gradients(model.parameters())],
    "of the groups": lambda _, optimizer: torch._foreach_zero_(gradients(of_optimizer(optimizer))),
    "replaces": replaces_by_zeros,
    "zero_grad": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "and clips": lambda model, optimizer: (zeroes(model, optimizer), clip_grad_value_(model.parameters(), 1.0)),
}
PLACES = "before the update", "in a hook", "after the update", "within a window"


def zeroes_alone(layout: dict[str, Any], kind: str, place: str, ranks: list[int]) -> list[str]:
    """What is told of a loop in which only some ranks set their gradients to 0, in step 4."""
    told, sides, step = listening(), Sides(layout, sgd), 0

    def changes(now: str) -> None:
        if now == place and step == 4 and dist.get_rank() in ranks:
            ZEROES[kind](sides.model, sides.optimizer)

    if place == "in a hook":
        sides.optimizer.register_step_pre_hook(lambda *_: changes("in a hook"))
    for step in range(7):
        sides.split_loss(sides.batches(step))
        if place == "within a window":
            changes(place)
            sides.split_loss(sides.batches(step))
        changes("before the update")
        sides.optimizer.step()
        changes("after the update")
        if step != 4 or place != "after the update":
            sides.optimizer.zero_grad()
    return [text for text in told if "or set to None or 0) on only one of rank 0" in text]


@pytest.mark.turns
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ZEROES)
def test_gradients_that_one_rank_sets_to_zero_are_warned_of(pool: Pool, kind: str, place: str) -> None:
    """One rank set its gradients to 0 (`p.grad.zero_()`, `mul_(0)`, `zero_grad(set_to_none=False)`), where `p.grad =
    None` was warned of. No factor explained the change, so its stage skipped this update, silently."""
    assert any(pool.run(zeroes_alone, 2, {}, kind, place, [0], timeout=120))
    assert pool.run(zeroes_alone, 2, {}, kind, place, [0, 1], timeout=120) == [[], []]


@pytest.mark.turns
@pytest.mark.parametrize("layout", [{"zero_stage": 1}, {"fsdp": True}])
def test_gradients_of_the_groups_that_one_replica_sets_to_zero_are_warned_of(pool: Pool, layout: Any) -> None:
    """A replica that set the gradients of its optimizer's groups to 0 skipped the update of its part of the model."""
    kind, options = "of the groups", {"dp_size": 2, **layout}
    assert any(pool.run(zeroes_alone, 2, options, kind, "before the update", [0], timeout=120))
    assert not any(pool.run(zeroes_alone, 2, options, kind, "before the update", [0, 1], timeout=120))


def zeroes_by_name(kind: str) -> list[str]:
    """What differs from the unsplit loop that sets the gradient of one parameter, or of one row, to 0 in each step; or
    from one whose head is 0 at first, so that other gradients are 0 without the loop."""
    told, sides = listening(), Sides({}, sgd, max_norm=1e9)
    for model in sides.both if kind == "zero head" else ():
        if not is_released(model.head.weight):
            nn.init.zeros_(model.head.weight)
    for step in range(5):
        sides.train(sides.batches(step))
        for gradient in [g for model in sides.both for g in gradients([model.embed.weight]) if kind != "zero head"]:
            (gradient[3] if kind == "a row" else gradient).zero_()
        for optimizer in (sides.reference, sides.optimizer):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return sides.done() + told


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["a parameter", "a row", "zero head"])
def test_a_gradient_of_one_parameter_may_be_set_to_zero(pool: Pool, kind: str) -> None:
    """Only the stage that has the parameter can set its gradient to 0, and this is exact: no warning."""
    assert pool.run(zeroes_by_name, 2, kind, timeout=120) == [[], []]


def in_turn(pauses: bool) -> tuple[list[str], list[str], int]:
    """What is told of a loop with an optimizer for each stage, which are stepped and cleared one after the other, and
    the number of comparisons in later steps; then what is told of a rank that clears its gradients before the update.
    `pauses`: the second optimizer steps only in every other step."""
    told = listening()
    sides = Sides(
        {}, lambda model: torch.optim.SGD([*model.embed.parameters(), *model.layers[:2].parameters()], lr=0.1)
    )
    rest = [*sides.model.layers[2:].parameters(), *sides.model.head.parameters()]
    sides.engine.boost(sides.engine.model, torch.optim.SGD(rest, lr=0.1))
    optimizers, count = [sides.optimizer, sides.engine.optimizer], 0
    updates = sides.engine.model.pipeline.gradients.updates
    for step in range(6):
        with mock.patch.object(updates, "compare", wraps=updates.compare) as compare:
            sides.split_loss(sides.batches(step))
            for optimizer in optimizers[: 1 if pauses and step % 2 else 2]:
                optimizer.step()
                optimizer.zero_grad()
        count += compare.call_count if step > 2 else 0
    early = len(told)
    sides.split_loss(sides.batches(0))
    if dist.get_rank() == 0:
        optimizers[0].zero_grad()
    optimizers[0].step()
    sides.split_loss(sides.batches(0))
    return told[:early], told[early:], count


@pytest.mark.turns
@pytest.mark.parametrize("pauses", [False, True])
def test_optimizers_that_are_cleared_in_turn_are_cleared_on_every_rank(pool: Pool, pauses: bool) -> None:
    """Each optimizer was cleared right after its step, on every rank. One stage then had no gradients left, and another
    had all of its own: a warning said that one rank had cleared its gradients, and true findings were silent."""
    reports = pool.run(in_turn, 2, pauses, timeout=120)
    assert all(told == [] and count == 0 for told, _, count in reports)
    assert any("or set to None or 0) on only one of" in text for _, told, _ in reports for text in told)


def without_optimizer() -> list[str]:
    """What is told of updates after evaluations without an optimizer, under gradients: in two training steps, where
    the first stage has no gradients, and then in two updates that only follow evaluations."""
    told, sides = listening(), Sides({}, sgd)
    for module in (sides.engine.model.embed, sides.engine.model.layers[:3]):
        module.requires_grad_(False)
    for runs in ("evaluates, trains", "trains, evaluates", "evaluates, steps", "evaluates", "evaluates"):
        for run in runs.split(", "):
            if run == "trains":
                sides.split_loss(sides.batches(0))
            elif run == "evaluates":
                sides.engine.execute_pipeline(iter(sides.batches(0)), sides.engine.model)
        closure = (lambda: sides.split_loss(sides.batches(0))) if "steps" in runs else None
        assert runs == "evaluates" or not any("only evaluates" in text for text in told)
        sides.optimizer.step(closure)
        sides.optimizer.zero_grad()
    return [text for text in told if "only evaluates" in text]


@pytest.mark.turns
def test_a_step_after_evaluations_alone_is_warned_of(pool: Pool) -> None:
    """A loop passed the model to `execute_pipeline` and forgot the optimizer: each step only evaluated the model, and
    the loss never fell."""
    (text,) = pool.run(without_optimizer, 2)[0]
    assert "call execute_pipeline(batches, model, criterion, optimizer)" in text


def groups(model: Any) -> torch.optim.Optimizer:
    """Layer decay: a group is on one stage, and empty on the other."""
    parts = [model.embed, *model.layers, model.head]
    rates = [{"params": [*part.parameters()], "lr": 0.01 * 0.8**k} for k, part in enumerate(parts)]
    return torch.optim.AdamW([group for group in rates if group["params"]])


def remedies(layout: dict[str, Any]) -> list[str]:
    """Layer decay under a schedule, and a rate from the norm of the whole model."""
    sides = Sides(layout, groups)
    optimizers = sides.reference, sides.optimizer
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.9**k) for optimizer in optimizers]
    for step in range(5):
        sides.train(sides.batches(step))
        norm = clip_grad_norm_(sides.unsplit.parameters(), 0.1)
        found = sides.optimizer.clip_grad_by_norm(0.1)
        for optimizer, of_optimizer in zip(optimizers, (norm, found), strict=True):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + float(of_optimizer))
        sides.step()
        for schedule in schedules:
            schedule.step()
    return sides.done()


def of_what_is_held() -> list[str]:
    """Groups that are made after boost, of what a rank holds, are other groups on each rank."""
    sides = Sides({}, verify=False)
    held = [parameter for _, parameter in sides.held()]
    made = torch.optim.SGD([{"params": [p], "lr": 0.1 + 0.1 * k} for k, p in enumerate(held)])
    sides.engine.boost(sides.engine.model, made)
    before = values(sides.model)
    for step in range(5):
        sides.split_loss(sides.batches(step))
        sides.engine.optimizer.step()
    return [str(k) for k, pair in enumerate(zip(before, values(sides.model), strict=True)) if torch.equal(*pair)]


def trained_of_a_rank(late: bool) -> None:
    """Groups that are made after boost, of what a rank trains, are the same groups on all ranks."""
    sides = Sides({}, verify=False)
    trained = [parameter for parameter in sides.model.parameters() if parameter.requires_grad]
    parts = [[p for p in trained if (p.dim() > 1) is has_decay] for has_decay in (True, False)]
    made = [{"params": part, "weight_decay": 0.1 * k} for k, part in enumerate(parts)]
    sides.engine.boost(sides.engine.model, torch.optim.SGD(made, lr=0.1))
    optimizer = sides.engine.optimizer
    for step in range(5 if late else 0):
        sides.split_loss(sides.batches(step))
        optimizer.step()
    sides.split_loss(sides.batches(0))
    for group in optimizer.param_groups:
        with pytest.raises(UsageError, match=REFUSED):
            clip_grad_norm_(group["params"], 0.1)
    optimizer.param_groups[1]["lr"] = 0.1 + 0.1 * dist.get_rank()
    with pytest.raises(UsageError, match=r"lr of group 1 of SGD is 0.1 on rank 0.* but 0.2 on rank 1"):
        optimizer.step()
        sides.split_loss(sides.batches(0))


@pytest.mark.turns
@pytest.mark.parametrize("late", [False, True])
def test_groups_of_what_a_rank_trains_are_compared(pool: Pool, late: bool) -> None:
    """An optimizer of what required a gradient on a boosted model had other names on each rank: rates that differed
    between the stages, and norms of one stage, were silent."""
    pool.run(trained_of_a_rank, 2, late, timeout=120)


def trained_on_one_rank() -> list[bool]:
    """Whether a step changes each parameter of a rank, if the first rank trains none."""
    sides = Sides({}, verify=False)
    for _, parameter in sides.held():
        parameter.requires_grad_(dist.get_rank() == 1)
    trained = [parameter for parameter in sides.model.parameters() if parameter.requires_grad]
    made = torch.optim.SGD([{"params": trained}, {"params": [], "weight_decay": 0.1}], lr=0.1)
    sides.engine.boost(sides.engine.model, made)
    before = values(sides.model)
    sides.split_loss(sides.batches(0))
    sides.engine.optimizer.step()
    return [not torch.equal(*pair) for pair in zip(before, values(sides.model), strict=True)]


@pytest.mark.turns
def test_groups_may_be_empty_on_a_rank_that_trains_nothing(pool: Pool) -> None:
    """An optimizer of what required a gradient on a boosted model, such as one of adapters on one stage, raised
    IndexError where a rank trained no parameter."""
    first, second = pool.run(trained_on_one_rank, 2)
    assert first and second and not any(first) and all(second)


def rates_of_ranks(kind: str) -> list[str]:
    """What is told of an optimizer of what a rank trains: with a rate of the rank, or with rates of layers."""
    sides, told = Sides({}, verify=False), listening()
    trained = [parameter for parameter in sides.model.parameters() if parameter.requires_grad]
    rates = {
        "of the rank": [0.1 + 0.1 * dist.get_rank()] * 2,
        "of layers": [0.1 + 0.2 * dist.get_rank(), 0.2 + 0.2 * dist.get_rank()],
        "of the loop": [0.1, 0.2],
    }[kind]
    made = [{"params": part, "lr": lr} for part, lr in zip((trained[1:], trained[:1]), rates, strict=True)]
    sides.engine.boost(sides.engine.model, torch.optim.SGD(made))
    return [text for text in told if "every group" in text]


@pytest.mark.processes
@pytest.mark.turns
@pytest.mark.parametrize("kind", ["of the rank", "of layers", "of the loop"])
def test_a_rate_that_each_rank_has_for_itself_is_warned_of(pool: Pool, kind: str) -> None:
    """A rate that a loop computed from the number of parameters on a rank trained the stages differently, silently."""
    first, second = pool.run(rates_of_ranks, 2, kind)
    assert second == [] and len(first) == (kind == "of the rank")
    assert all("lr of every group of SGD is 0.1 on rank 0 (stage 0), but 0.2 on rank 1" in text for text in first)


@pytest.mark.turns
def test_groups_of_a_stage_and_schedules_are_exact(pool: Pool) -> None:
    """Groups may differ between ranks in what they hold, and in their options where they are other groups."""
    assert pool.run(remedies, 2, {}, timeout=120) == [[], []]
    assert pool.run(remedies, 3, {}, timeout=120) == [[]] * 3
    assert pool.run(of_what_is_held, 2, timeout=120) == [[], []]


def steps_inside() -> tuple[int, list[str]]:
    """How many updates are counted in 3 steps of an optimizer whose step calls that of its class, of which the first
    rank alone has made an instance."""

    class Plain(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    class Scaled(Plain):
        """Subtracts half of an update twice."""

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            super().step()
            return super().step(closure)

    if dist.get_rank() == 0:
        Plain([nn.Parameter(torch.zeros(1))], lr=0.1)
    sides = Sides({}, lambda model: Scaled(model.parameters(), lr=0.1))
    sides.optimizer.register_step_post_hook(lambda *_: None)
    for step in range(3):
        sides.train(sides.batches(step))
        sides.step()
    return sides.optimizer.gradients.updates.count, sides.done()


@pytest.mark.turns
def test_a_step_that_calls_that_of_its_class_is_one_update(pool: Pool) -> None:
    """torch wraps a class's step when it first makes an instance, so hooks ran twice in one step on that rank alone: it
    compared an update of which the other ranks knew nothing, and gloo aborted."""
    assert pool.run(steps_inside, 2, timeout=60) == [(3, []), (3, [])]


@contextmanager
def without_other_models() -> Iterator[None]:
    """The guards forget the models that earlier tests of this process have left."""
    left = [(guard, list(guard._models)) for guard in (norm_guard.NORM_GUARD, step_guard.STEP_GUARD)]
    for guard, _ in left:
        guard._models.clear()
    yield
    for guard, models in left:
        for model in models:
            guard.watch(model)


def guards() -> list[bool]:
    is_hooked = any(hook == step_guard.STEP_GUARD.check for hook in global_step_pre_hooks.values())
    return [norm_guard.NORM_GUARD.is_installed, step_guard.STEP_GUARD.is_installed, is_hooked]


def guards_with_and_after_a_model() -> tuple[list[bool], list[bool], float]:
    """Whether the guards are there, and the norm that torch's function finds of what it can read only once."""
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    with without_other_models():
        sides = Sides({}, sgd, verify=False)
        installed = guards()
        register_optimizer_step_pre_hook(step_guard.STEP_GUARD.check)
        del sides
        for _ in range(100):  # another thread may be collecting, and end the model
            gc.collect()
            if not any(guards()):
                break
            time.sleep(0.1)
        return installed, guards(), float(clip_grad_norm_((p for p in [parameter]), 1.0))


def test_torchs_functions_are_its_own_after_a_model(pool: Pool) -> None:
    """The guards stand inside of torch's functions, so they have to be gone when nothing needs them. A worker once had
    two hooks of the guard in torch's list: the last model took only one of them with it."""
    assert pool.run(guards_with_and_after_a_model, 1) == [([True] * 3, [False] * 3, 2.0)]


class Slow(Guard):
    """Counts what is installed. A removal begins, and lets other threads go on, before it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.installed, self.handle = set[object](), object()
        self.removes = threading.Event()

    def install(self) -> None:
        self.handle = object()
        self.installed.add(self.handle)

    def remove(self) -> None:
        self.removes.set()
        time.sleep(0.2)
        self.installed.discard(self.handle)


class Watched:
    """Stands for the gradients of a boosted model."""


def test_a_model_that_ends_in_another_thread_removes_its_own_guard() -> None:
    """A model ended in one thread while another thread boosted a model: the removal took the new guard, and the old one
    stayed for ever."""
    guard: Any = Slow()
    models = [Watched()]
    guard.watch(models[0])
    ends = threading.Thread(target=models.clear)
    ends.start()
    assert guard.removes.wait(10)
    new = Watched()
    guard.watch(new)
    ends.join(10)
    assert guard.is_installed and guard.installed == {guard.handle}
    del new
    gc.collect()
    assert not guard.is_installed and not guard.installed


def renewed() -> None:
    """A second optimizer, with other options; the first one is collected on the last rank alone."""
    sides = Sides({}, lambda model: torch.optim.Adam(model.parameters(), amsgrad=True))
    kept = [sides.optimizer] if dist.get_rank() == 0 else []
    plain = torch.optim.Adam(sides.engine.model.unwrap().parameters())
    _, sides.optimizer, *_ = sides.engine.boost(sides.engine.model, plain)
    sides.engine.optimizer = sides.optimizer
    for step in range(4):
        if step == 2:
            gc.collect()
            assert len(sides.engine.model.pipeline.gradients.updates.in_use()) == 1 + len(kept)
        sides.split_loss(sides.batches(step))
        sides.optimizer.step()
        sides.optimizer.zero_grad()


def phases(layout: dict[str, Any], keeps: str) -> tuple[int, list[str]]:
    """Two optimizers, one after the other, with writes to the model between their steps. Returns the number of
    optimizers in use after the garbage collector was off, and what differs from the unsplit loop."""
    sides = Sides(layout)
    kept: list[Any] = []
    for phase, rate in enumerate((0.1, 0.2)):
        if phase:
            kept += [sides.optimizer] if keeps == "all" or (keeps == "first" and dist.get_rank() == 0) else []
            sides.reference = torch.optim.Adam(sides.unsplit.parameters(), lr=rate)
            sides.engine.boost(sides.engine.model, torch.optim.Adam(sides.model.parameters(), lr=rate))
            sides.optimizer = sides.engine.optimizer
        for step in range(3):
            sides.train(sides.batches(step))
            sides.step()
            for parameter in (*sides.unsplit.parameters(), *(held for _, held in sides.held())):
                parameter.data.mul_(0.5)
    return len(sides.engine.model.pipeline.gradients.updates.in_use()), sides.done()


def without_collector(layout: dict[str, Any], keeps: str) -> tuple[int, list[str]]:
    gc.disable()
    try:
        return phases(layout, keeps)
    finally:
        gc.enable()


LAYOUTS = [{}, {"dp_size": 2, "zero_stage": 1}]


@pytest.mark.turns
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replaced_optimizer_is_freed_at_once(pool: Pool, layout: dict[str, Any]) -> None:
    """An optimizer and its boosted optimizer referenced each other: the states of a first phase of training stayed in
    memory, until Python's garbage collector ran."""
    assert pool.run(without_collector, 2, layout, "", timeout=120) == [(1, [])] * 2


@pytest.mark.turns
@pytest.mark.parametrize("keeps", ["first", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_that_some_ranks_keep_has_no_effect(pool: Pool, layout: dict[str, Any], keeps: str) -> None:
    """With ZeRO, a rank that still had the optimizer of an earlier phase sent all weights once more than others."""
    found = pool.run(phases, 2, layout, keeps, timeout=120)
    assert [differ for _, differ in found] == [[], []]
    assert [number for number, _ in found] == ([2, 1] if keeps == "first" else [2, 2])


def written() -> bool:
    """Whether a loop that writes to the model's 16-bit parameters in a second phase has its writes in the next step."""
    sides = Sides({}, sgd, precision="bf16")
    first = sides.optimizer
    for phase in range(2):
        if phase:
            sides.engine.boost(sides.engine.model, sgd(sides.model))
        for step in range(3):
            sides.split_loss(sides.batches(step))
            sides.engine.optimizer.step()
            sides.engine.optimizer.zero_grad()
            for _, parameter in sides.held():
                parameter.data.zero_()
    sides.split_loss(sides.batches(0))
    assert first is not sides.engine.optimizer
    return not any(bool(tensor.any()) for tensor in of_optimizer(sides.engine.optimizer))


@pytest.mark.turns
def test_a_write_after_the_step_of_a_second_optimizer_is_one_write(pool: Pool) -> None:
    """In 16 bits, the update of the second optimizer counted as a write to the tensors of the first one, so a loop that
    wrote to the model was refused."""
    assert pool.run(written, 2, timeout=120) == [True, True]


def kept_inner() -> None:
    """Only the inner optimizer is kept: its step is refused, and its other methods are those of its class."""
    for precision in ("fp32", "bf16"):
        sides = Sides({}, sgd, precision=precision)
        inner = sides.optimizer.unwrap()
        sides.engine.optimizer = sides.optimizer = None
        sides.engine.execute_pipeline(sides.own(sides.batches(0)), sides.engine.model)
        for parameter in of_optimizer(inner):
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(UsageError, match=r"this SGD was not boosted.*call step\(\) on the returned optimizer"):
            inner.step()
        inner.zero_grad()
        assert not gradients(of_optimizer(inner))
        inner.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        assert len(inner.param_groups) == 2


@pytest.mark.turns
def test_an_optimizer_whose_boosted_optimizer_is_gone_is_refused(pool: Pool) -> None:
    """It would train without max_norm, the loss scale or fp32 master weights."""
    pool.run(kept_inner, 2)


@pytest.mark.turns
def test_an_optimizer_that_is_collected_on_some_ranks_alone_is_not_compared(pool: Pool) -> None:
    """Ranks compared the options of one optimizer with those of another, as garbage is collected at other times: a
    loop that boosted a second optimizer was refused now and then."""
    pool.run(renewed, 2)


@pytest.mark.parametrize("norm_type", ["max", None, 0.0, math.nan])
def test_an_order_of_a_norm_other_than_a_positive_number_is_refused(norm_type: Any) -> None:
    """`clip_grad_by_norm(1.0, "max")` raised float()'s own error, which did not name the argument."""
    with pytest.raises(ConfigurationError, match="norm_type must be a positive number or 'inf', got"):
        order_of(norm_type)
    assert order_of("inf") == math.inf
