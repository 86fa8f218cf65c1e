"""Tests of coupling: only a loop that computes one number from the parameters of a stage gets a warning."""

from __future__ import annotations

import copy
import gc
import re
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.engine import norm_guard, step_guard
from pipeshard.engine.coupling import Watching
from pipeshard.private import global_step_pre_hooks, modes_entered
from pipeshard.split.materialize import is_released
from tests import zoo
from tests.hunt.loops import Sides
from tests.hunt.nets import Net, data
from tests.pool import Pool
from tests.test_updates import gradients, listening, of_optimizer
from tests.unsplit import Split

Loop = Callable[[Sides, int], Any]


def weights(sides: Sides) -> list[Tensor]:
    return of_optimizer(sides.optimizer)


def norm(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


def trains(sides: Sides, step: int) -> None:
    sides.split_loss(sides.batches(step))


def update(sides: Sides) -> None:
    sides.optimizer.step()
    sides.optimizer.zero_grad()


def ascends(sides: Sides, step: int, radius: Any) -> None:
    """Sharpness-aware minimization: `radius` is what its gradients are multiplied by."""
    trains(sides, step)
    moves = [gradient * radius for gradient in gradients(weights(sides))]
    with torch.no_grad():
        torch._foreach_add_(weights(sides), moves)
    sides.optimizer.zero_grad()
    trains(sides, step)
    with torch.no_grad():
        torch._foreach_sub_(weights(sides), moves)
    update(sides)


def sam(sides: Sides, step: int) -> None:
    trains(sides, step)
    ascends(sides, step, 0.05 / norm(gradients(weights(sides))))


def sam_by_numbers(sides: Sides, step: int) -> None:
    trains(sides, step)
    ascends(sides, step, 0.05 / sum(float(gradient.norm()) ** 2 for gradient in gradients(weights(sides))) ** 0.5)


def projects_gradients(sides: Sides, step: int) -> None:
    """PCGrad: the gradients of two tasks, of which one loses its part along the other."""
    kept = []
    for task in range(2):
        trains(sides, 2 * step + task)
        kept.append([gradient.clone() for gradient in gradients(weights(sides))])
        sides.optimizer.zero_grad()
    first, second = (torch.cat([gradient.flatten() for gradient in of_task]) for of_task in kept)
    first = first - (first @ second) / (second @ second) * second
    for parameter, part in zip(weights(sides), first.split([p.numel() for p in weights(sides)]), strict=True):
        parameter.grad = part.view_as(parameter)
    update(sides)


@torch.no_grad()
def projects_weights(sides: Sides, step: int) -> None:
    with torch.enable_grad():
        trains(sides, step)
    update(sides)
    factor = 3.0 / norm(weights(sides))
    for parameter in weights(sides):
        parameter.mul_(factor)


@torch.no_grad()
def projects_the_model(sides: Sides, step: int) -> None:
    """The same through the model's parameters, all of which each replica has."""
    with torch.enable_grad():
        trains(sides, step)
    update(sides)
    held = [parameter for _, parameter in sides.held()]
    torch._foreach_mul_(held, 3.0 / norm(held))


@torch.no_grad()
def prunes(sides: Sides, step: int) -> None:
    """By a quantile that numpy computes."""
    with torch.enable_grad():
        trains(sides, step)
    update(sides)
    flat = torch.cat([parameter.abs().flatten() for parameter in weights(sides)])
    threshold = float(np.quantile(flat.numpy(), 0.1))
    for parameter in weights(sides):
        parameter[parameter.abs() < threshold] = 0.0


@torch.no_grad()
def noisy(sides: Sides, step: int) -> None:
    with torch.enable_grad():
        trains(sides, step)
    update(sides)
    for parameter in weights(sides):
        parameter.add_(torch.randn_like(parameter), alpha=0.01)


@torch.no_grad()
def noisy_by_one_generator(sides: Sides, step: int) -> None:
    with torch.enable_grad():
        trains(sides, step)
    update(sides)
    generator = torch.Generator().manual_seed(step)
    for parameter in weights(sides):
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)


def penalizes(sides: Sides, step: int) -> None:
    """The norm of all weights in a loss of the loop's own."""
    trains(sides, step)
    norm(weights(sides)).backward()
    update(sides)


def in_a_hook(sides: Sides, step: int) -> None:
    @torch.no_grad()
    def shrinks(optimizer: Any, *_: Any) -> None:
        for parameter in of_optimizer(optimizer):
            parameter.sub_(0.01 * whole)

    with torch.no_grad():
        whole = norm(weights(sides))
    handle = sides.optimizer.register_step_post_hook(shrinks)
    trains(sides, step)
    update(sides)
    handle.remove()


def of_moments(sides: Sides, step: int) -> None:
    """From what the optimizer keeps, in every update from the fifth on."""
    trains(sides, step)
    kept = [state["momentum_buffer"] for state in sides.optimizer.state.values()]
    if step >= 4:
        torch._foreach_add_(gradients(weights(sides)), kept, alpha=float(0.1 / norm(kept)))
    update(sides)


def of_the_only_layer(sides: Sides, step: int) -> None:
    """Each stage trains one layer, so that its norm is that of all that is trained there."""
    for layer in (sides.model.embed, sides.model.layers[0], sides.model.layers[2], sides.model.head):
        layer.requires_grad_(False)
    trains(sides, step)
    shift = 0.01 * norm(gradients(weights(sides)))
    for gradient in gradients(weights(sides)):
        gradient.add_(shift)
    update(sides)


COUPLED: dict[str, Loop] = {
    "sam": sam,
    "sam by numbers": sam_by_numbers,
    "projects gradients": projects_gradients,
    "projects weights": projects_weights,
    "projects the model": projects_the_model,
    "prunes": prunes,
    "noisy": noisy,
    "noisy by one generator": noisy_by_one_generator,
    "penalizes": penalizes,
    "in a hook": in_a_hook,
    "of moments": of_moments,
    "of the only layer": of_the_only_layer,
}


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def warnings(name: str, layout: dict[str, Any]) -> list[str]:
    """What is told of a loop."""
    told, steps = listening(), 9 if name == "of moments" else 3
    sides = Sides(layout, momentum, verify=False)
    del told[:]
    for step in range(steps):
        LOOPS[name](sides, step)
    trains(sides, 0)
    return [text for text in told if "training loop" in text]


@pytest.mark.local
@pytest.mark.turns
@pytest.mark.parametrize("name", COUPLED)
def test_what_is_computed_from_one_stage_is_warned_of_once(pool: Pool, name: str) -> None:
    """Each stage took a radius, a projection, a threshold or noise of its own, silently."""
    text, *others = {*map(tuple, pool.run(warnings, 2, name, {}, timeout=120))} - {()}
    assert len(text) == 1 and others == []
    assert re.search(
        r"(embed|layers\.1\.a)\.(weight|bias).* on rank 0 \(stage 0\).*all_reduce|computed from the parameter's name",
        text[0],
    )


@pytest.mark.turns
@pytest.mark.local
@pytest.mark.parametrize("layout", [{"precision": "bf16"}, {"dp_size": 2, "zero_stage": 1}])
def test_masters_and_shards_are_watched_as_parameters_are(pool: Pool, layout: dict[str, Any]) -> None:
    """In 16 bits a loop may write in two places. With ZeRO the optimizer's groups are parts of a stage, its model is
    none. A frozen weight of a layer counted as one that another rank trains."""
    names = "sam", "projects the model", "clips", "averages", "merges"
    found = [any(pool.run(warnings, 2, name, layout, timeout=120)) for name in names]
    assert found == [True, "precision" in layout, False, False, False]


def clips(sides: Sides, step: int) -> None:
    """By value, beside a log of every norm and a constant factor."""
    trains(sides, step)
    assert sum(gradient.norm().item() for gradient in gradients(weights(sides))) > 0
    torch.nn.utils.clip_grad_value_(sides.model.parameters(), 0.01)
    torch._foreach_mul_(gradients(weights(sides)), 0.5 + 0.1 * step)
    update(sides)


def of_a_layer(sides: Sides, step: int) -> None:
    """Norms of one layer, and of one parameter, as numbers of Python's too."""
    trains(sides, step)
    for layer in sides.model.layers:
        found = gradients(layer.parameters())
        factor = 0.1 / norm(found) if found else 1.0
        for gradient in found:
            gradient.mul_(factor)
    for parameter in weights(sides):
        parameter.grad.mul_(float(parameter.norm()) / float(parameter.grad.norm()))
    update(sides)


@torch.no_grad()
def averages(sides: Sides, step: int) -> None:
    """An average of the weights, kept by one operator for all, is evaluated; then the weights are put back."""
    with torch.enable_grad():
        trains(sides, step)
    update(sides)
    kept = sides.__dict__.setdefault("kept", [parameter.clone() for parameter in weights(sides)])
    torch._foreach_lerp_(kept, weights(sides), 0.1)
    before = [parameter.clone() for parameter in weights(sides)]
    torch._foreach_copy_(weights(sides), kept)
    trains(sides, step)
    scratch = torch.empty(max(parameter.numel() for parameter in weights(sides)))
    for parameter, value in zip(weights(sides), before, strict=True):
        scratch.zero_()
        parameter.data = scratch[: value.numel()].copy_(value.flatten()).view_as(value).clone()
        parameter.clamp_(-1, 1).mul_(1 - 0.01 * 0.9**step)


@torch.no_grad()
def merges(sides: Sides, step: int) -> None:
    """The trained half of each layer into its frozen half, as ReLoRA merges adapters."""
    for layer in sides.model.layers:
        layer.b.requires_grad_(False)
    with torch.enable_grad():
        trains(sides, step)
    update(sides)
    for layer in sides.model.layers:
        if not is_released(layer.b.weight):
            layer.b.weight.add_(layer.a.weight * layer.a.bias, alpha=0.1)


@torch.no_grad()
def copies(sides: Sides, step: int) -> None:
    """One parameter to another one, which the loop has named."""
    with torch.enable_grad():
        trains(sides, step)
    update(sides)
    first, second = [sides.model.layers[k].a.weight for k in (0, 1)]
    if not is_released(second):
        second.lerp_(first, 0.1)


def reduced(sides: Sides, step: int) -> None:
    """The remedies: a norm that the ranks add up, as a tensor and as a number, or that of the optimizer."""
    trains(sides, step)
    total = torch.stack([gradient.norm() for gradient in gradients(weights(sides))]).square().sum()
    if step == 1:
        total = torch.tensor(float(total))
    dist.all_reduce(total)
    scale = (0.05 / total.sqrt(), 0.05 / float(total) ** 0.5, 0.05 / sides.optimizer.get_grad_norm())[step]
    for gradient in gradients(weights(sides)):
        gradient.mul_(scale)
    update(sides)


@torch.no_grad()
def noisy_by_name(sides: Sides, step: int) -> None:
    with torch.enable_grad():
        trains(sides, step)
    update(sides)
    for name, parameter in sides.held():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
        torch.manual_seed(zlib.crc32(name.encode()))
        parameter.add_(torch.randn_like(parameter), alpha=0.01)


def teaches(sides: Sides, step: int) -> None:
    """Another model is trained beside, with norms, noise and a clip of its own."""
    trains(sides, step)
    other = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    other(torch.randn(2, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    torch.optim.Adam(other.parameters()).step()
    copy.deepcopy(other)
    update(sides)


def clears_sparse_gradients(sides: Sides, step: int) -> None:
    """In place; the gradients remain sparse."""
    for model in sides.both:
        model.embed.sparse = True
    trains(sides, step)
    if not is_released(sides.model.embed.weight):
        assert sides.model.embed.weight.grad.is_sparse
    for gradient in gradients(weights(sides)):
        gradient.zero_()
    sides.optimizer.zero_grad(set_to_none=False)


ALONE: dict[str, Loop] = {
    "clips": clips,
    "of a layer": of_a_layer,
    "averages": averages,
    "copies": copies,
    "merges": merges,
    "noisy by name": noisy_by_name,
    "teaches": teaches,
    "clears sparse gradients": clears_sparse_gradients,
}


@pytest.mark.local
@pytest.mark.turns
@pytest.mark.parametrize("name", ALONE)
def test_what_is_computed_for_each_parameter_alone_is_not_warned_of(pool: Pool, name: str) -> None:
    """A clamp or an average looks like the others in the values that it leaves."""
    assert pool.run(warnings, 2, name, {}, timeout=120) == [[], []]


def test_what_is_reduced_over_all_ranks_is_not_warned_of(pool: Pool) -> None:
    """What the warning tells a loop to do must not be warned of in turn."""
    assert pool.run(warnings, 2, "reduced", {}, timeout=120) == [[], []]


class ClipsLate(torch.optim.SGD):
    """As ZClip: the first norms only become statistics."""

    reads, count = False, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        found = gradients(of_optimizer(self))
        total = norm(found)
        if self.count > 12:
            torch._foreach_mul_(found, 0.1 / float(total) if self.reads else 0.1 / total)
        return super().step(closure)


class ClipsLateByNumbers(ClipsLate):
    reads = True


class InBatches(torch.optim.SGD):
    """As Muon: one operator for all parameters of a size, and step sizes that are read for all at once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = gradients(of_optimizer(self))
        sizes = [float(0.1 / gradient.norm()) for gradient in found]
        for shape in {gradient.shape for gradient in found}:
            alike = [gradient for gradient in found if gradient.shape == shape]
            torch._foreach_copy_(alike, [*torch.stack(alike).sign()])
        for gradient, size in zip(found, sizes, strict=True):
            gradient.mul_(size)
        return super().step(closure)


@torch.compile(backend="eager", fullgraph=True, dynamic=True)
def direction(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 1e-6)


class Compiled(torch.optim.SGD):
    """As those whose update is one compiled function."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for gradient in gradients(of_optimizer(self)):
            gradient.copy_(direction(gradient.flatten()).view_as(gradient))
        return super().step(closure)


class ClipsLateBeforeItsClosure(ClipsLate):
    def step(self, closure: Any = None) -> Any:
        super().step()
        if closure is not None:
            closure()


def told_of(kind: type[torch.optim.Optimizer], steps: int, count: int = 0, step_of: Any = update) -> list[str]:
    """What is told of updates by an optimizer of a user's, resumed after `count` updates."""
    told = listening()
    sides = Sides({}, lambda model: kind(of_two_rates(model), lr=0.1, momentum=0.9), verify=False)
    del told[:]
    sides.optimizer.count = count
    for parameter in sides.optimizer.parameters if count else ():
        sides.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    for step in range(steps):
        trains(sides, step)
        step_of(sides)
    trains(sides, 0)
    return told


def of_two_rates(model: nn.Module) -> list[dict[str, Any]]:
    """The groups of Net's parameters; each rank has another rate."""
    half = len(layers := list(model.layers)) // 2
    first = [p for part in (model.embed, *layers[:half]) for p in part.parameters()]
    return [
        {"params": first},
        {"params": [p for p in model.parameters() if all(p is not o for o in first)], "lr": 0.05},
    ]


def logs_and_updates(sides: Sides) -> None:
    assert sum(gradient.norm().item() for gradient in gradients(weights(sides))) > 0
    update(sides)


def updates_by_a_closure(sides: Sides) -> None:
    sides.optimizer.step(lambda: None)
    sides.optimizer.zero_grad()


@pytest.mark.turns
@pytest.mark.parametrize("kind", [ClipsLate, ClipsLateByNumbers])
def test_an_optimizer_that_begins_to_couple_after_its_trial_is_warned_of(pool: Pool, kind: type[ClipsLate]) -> None:
    """The trial has ten steps: from the 13th on, each stage clipped by its own norm, silently."""
    first, second = pool.run(told_of, 2, kind, 16, timeout=120)
    assert len(first) == 1 and re.search(r"step of ClipsLate changed|optimizer's own step", first[0]) and not second


@pytest.mark.turns
@pytest.mark.parametrize(("kind", "how"), [(ClipsLate, update), (ClipsLateBeforeItsClosure, updates_by_a_closure)])
def test_a_resumed_optimizer_that_couples_is_warned_of(pool: Pool, kind: type[ClipsLate], how: Any) -> None:
    """It couples from its first step in this process on. The trial, before the state was loaded, had found it
    independent. What it did before its closure was told as done by the loop."""
    first, second = pool.run(told_of, 2, kind, 2, 20, how, timeout=120)
    assert len(first) == 1 and "step of ClipsLate" in first[0] and not second


class Lion(torch.optim.SGD):
    """An optimizer of a user's that updates each parameter alone."""


@pytest.mark.turns
def test_a_log_before_a_step_is_not_one_of_the_step(pool: Pool) -> None:
    """The norms that a loop had logged made the constants of the optimizer's step suspicious, which differ by rank."""
    assert pool.run(told_of, 2, Lion, 16, 0, logs_and_updates, timeout=120) == [[], []]


@pytest.mark.processes
def test_an_optimizer_with_a_compiled_step_trains(pool: Pool) -> None:
    """torch had tried to compile it in the mode of the trial, and then raised in each step: no compiled frames."""
    assert pool.run(told_of, 2, Compiled, 4, timeout=120) == [[], []]


def test_an_optimizer_that_computes_in_batches_is_not_warned_of(pool: Pool) -> None:
    """The trial has found its results independent, but its operators combine parameters."""
    assert pool.run(told_of, 2, InBatches, 16, timeout=120) == [[], []]


def left_after_models() -> list[Any]:
    """What is there of models that have been deleted in updates that are watched."""
    models: list[Any] = []
    for _ in range(3):
        sides = Sides({}, momentum, verify=False)
        trains(sides, 0)
        update(sides)
        models.append(weakref.ref(sides.model))
        assert len(modes_entered()) == 2  # its own
        del sides
        gc.collect()
    installed = [norm_guard.NORM_GUARD.is_installed, step_guard.STEP_GUARD.is_installed, bool(global_step_pre_hooks)]
    return [*(model() for model in models), *installed]


@pytest.mark.turns
def test_a_model_that_is_deleted_ends_its_watch(pool: Pool) -> None:
    """The modes kept every model alive, and slowed down all operators of the process more and more. A finalizer that
    ended them did so within an operator: "Hit Python dispatch key but no arguments had PyInterpreter". The guards
    stayed, since a WeakSet still counts an object whose finalizer runs."""
    assert pool.run(left_after_models, 2) == [[None, None, None, False, False, False]] * 2


def watching() -> int:
    return sum(isinstance(mode, Watching) for mode in modes_entered())


def watches_beside(is_trained: bool) -> tuple[list[int], list[int]]:
    """The numbers of modes within the student's steps, and in the loop after each step, in which another model is
    evaluated or trained."""
    within, between = list[int](), list[int]()

    def criterion(output: Any, batch: Any) -> Tensor:
        within.append(watching())
        loss: Tensor = output["logits"].square().mean()
        return loss

    sides, model = Sides({}, momentum, criterion, verify=False), Net()
    student = sides.engine.model
    other, optimizer, *_ = sides.engine.boost(model, momentum(model) if is_trained else None)
    for step in range(7):
        sides.engine.execute_pipeline(sides.own(sides.batches(step)), student, criterion, sides.optimizer)
        update(sides)
        batch = iter([data(step)])
        with torch.set_grad_enabled(is_trained):
            sides.engine.execute_pipeline(batch, other, None, optimizer)
        if is_trained:
            optimizer.step()
        between.append(watching())
    return within, between


@pytest.mark.turns
@pytest.mark.parametrize("is_trained", [False, True])
def test_a_model_is_not_watched_in_steps_of_another(pool: Pool, is_trained: bool) -> None:
    """After the first evaluation of an average of the weights, which no optimizer updates, every operator of the
    student's steps ran through Python, in every step."""
    (_, first), (within, last) = pool.run(watches_beside, 2, is_trained)
    assert within and set(within) == {0}
    assert first[0] > 0 and first[-1] == last[-1] == 0


def proven_after_one_that_is_deleted() -> None:
    data = zoo.batch("llama")
    for _ in range(2):
        model = zoo.build("llama")
        model.gradient_checkpointing_enable()  # type: ignore[operator]
        split = Split(model, 2, data, num_microbatches=2, verify=True)
        split.backward(data)
        split.step()
        del model, split
        gc.collect()


@pytest.mark.turns
def test_a_model_is_proven_after_one_that_is_deleted(pool: Pool) -> None:
    """The modes ended within the first function of the proof that was recomputed, with the same error."""
    pool.run(proven_after_one_that_is_deleted, 2)


LOOPS = COUPLED | ALONE | {"reduced": reduced}
