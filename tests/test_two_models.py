"""Tests of several models in one Booster: each has its own gradients, steps and loss scale, and is exact."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import classify
import pipeshard
from pipeshard import PipelinePlugin, load_training_state, save_training_state
from pipeshard.errors import CheckpointError, UsageError
from pipeshard.split.materialize import is_released
from tests import zoo
from tests.pool import Pool, WorkerError
from tests.unsplit import LEARNING_RATE, Split, Unsplit, differences, gradient_error, largest_error, parameter_error

pytestmark = pytest.mark.local

Pair = tuple[Split, Unsplit]


def pair(booster: Booster, name: str, seed: int, dropout: float = 0.0) -> Pair:
    """A model behind a Booster that has others, too, and the same unsplit."""
    model = zoo.build(name, seed=seed)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    unsplit, split = Unsplit(copy.deepcopy(model)), object.__new__(Split)
    split.plugin, split.booster = booster.plugin, booster
    split.model, split.optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    return split, unsplit


def teacher_and_student() -> list[str]:
    """Two models in turns: the student learns from what the teacher, which learns too, makes of the same batch."""
    data = zoo.batch("llama-tied", rows=4)
    plugin = PipelinePlugin(dist.get_world_size(), num_microbatches=2, dry_run_input=data)
    booster = Booster(plugin=plugin)
    pairs: list[Pair] = [pair(booster, "llama-tied", seed) for seed in (0, 1)]
    for call in (plugin.sync_grads, plugin.recording):
        with pytest.raises(UsageError, match="is ambiguous with 2 boosted models"):
            call()
    with pytest.raises(UsageError, match="no_sync is ambiguous"), plugin.no_sync():
        pass
    found = []
    for seed in range(2):
        for split, unsplit in pairs:
            found += differences(split, unsplit, zoo.batch("llama-tied", rows=4, seed=seed), num_microbatches=2)
        (teacher, _), (student, unsplit_student) = pairs
        labels = teacher.evaluate(data, return_outputs="logits")["outputs"]
        chosen = [None if labels is None else labels.logits.argmax(-1)]
        dist.broadcast_object_list(chosen, src=dist.get_world_size() - 1)
        batch = data | {"labels": chosen[0]}
        with plugin.no_sync(student.model):
            student.backward(batch)
        plugin.sync_grads(student.model)
        unsplit_student.backward_in_parts(batch, num_microbatches=2)
        error = gradient_error(student, unsplit_student.model)
        found += [f"after the teacher gradients differ by {error}"] if not error <= 1e-6 else []
        assert teacher.model.pipeline.steps == seed + 1 and student.model.pipeline.steps == 2 * seed + 2
        assert plugin.recording(teacher.model).step == seed and plugin.recording(student.model).step == 2 * seed + 1
        for split, unsplit in pairs:
            split.step()
            unsplit.step()
    errors = [parameter_error(split, unsplit.model) for split, unsplit in pairs]
    return found + [f"parameters differ by {error}" for error in errors if not error <= 1e-5]


def scaled_apart() -> tuple[list[float], list[float]]:
    """The loss scales of two models in fp16, of which one overflows: the policy and its reference, say."""
    data = zoo.batch("gpt2", rows=4)
    booster = Booster(plugin=PipelinePlugin(2, num_microbatches=2, dry_run_input=data, precision="fp16", max_norm=1.0))
    (policy, _), (reference, _) = [pair(booster, "gpt2", seed) for seed in (0, 1)]
    for split in (policy, reference):
        split.backward(data)
    if dist.get_rank():
        next(p for p in policy.held.values() if p.grad is not None).grad.view(-1)[0] = float("inf")
    before = {name: p.detach().clone() for name, p in reference.held.items()}
    policy.step()
    reference.step()
    scales = [split.model.pipeline.scaling.value for split in (policy, reference)]
    return scales, [float((p - before[name]).detach().abs().max()) for name, p in reference.held.items()]


def followed() -> list[float]:
    """How far an average of a split model is from torch's average of the unsplit one: its loss, and its weights."""
    data = zoo.batch("llama-tied", rows=4)
    booster = Booster(plugin=PipelinePlugin(dist.get_world_size(), num_microbatches=2, dry_run_input=data))
    averaged = AveragedModel(zoo.build("llama-tied", seed=0), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    copied, *_ = booster.boost(zoo.build("llama-tied", seed=0), None)
    split, unsplit = pair(booster, "llama-tied", seed=0)
    averaged.update_parameters(unsplit.model)  # the first one is a copy
    for seed in range(3):
        batch = zoo.batch("llama-tied", rows=4, seed=seed)
        split.backward(batch)
        unsplit.backward_in_parts(batch, num_microbatches=2)
        split.step()
        unsplit.step()
        classify.follow(copied, split.model, decay=0.9)
        averaged.update_parameters(unsplit.model)
    copied.eval()
    averaged.eval()
    with torch.no_grad():
        loss = booster.execute_pipeline(iter([data]), copied, None)["loss"]
        expected = averaged(**data).loss
    moved = dict(averaged.module.named_parameters())
    held = {name: p for name, p in copied.unwrap().named_parameters() if not is_released(p)}
    return [float((loss - expected).abs()), *(float((p - moved[name]).abs().max()) for name, p in held.items())]


@pytest.mark.turns
def test_an_average_follows_a_split_model(pool: Pool) -> None:
    """AveragedModel of a stage is refused, as it has no values of the other stages; what helps is said and exact."""
    for errors in pool.run(followed, 2):
        assert len(errors) > 2 and largest_error(errors) < 1e-5


@pytest.mark.turns
def test_teacher_and_student_behind_one_booster(pool: Pool) -> None:
    assert pool.run(teacher_and_student, 2) == [[], []]


@pytest.mark.turns
def test_each_model_has_a_loss_scale(pool: Pool) -> None:
    for scales, moved in pool.run(scaled_apart, 2):
        assert scales == [2.0**15, 2.0**16] and max(moved) > 0


class Wide(torch.nn.Module):
    """An embedding with most of the parameters, and layers with little work."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20000, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(6))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return {"loss": x.square().mean()}


def frozen_average(partition: str) -> float:
    """The error of a frozen average of the weights after an update, with both models cut by one rule."""
    ids = torch.arange(24).view(4, 6)
    torch.manual_seed(0)
    model = Wide()
    before = copy.deepcopy(model)
    average = copy.deepcopy(model).requires_grad_(False)
    plugin = PipelinePlugin(2, num_microbatches=2, dry_run_input={"ids": ids}, partition=partition, verify=False)
    booster = Booster(plugin=plugin)
    average, *_ = booster.boost(average)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.execute_pipeline(iter([{"ids": ids}]), model, None, optimizer)
    optimizer.step()
    errors = []
    with torch.no_grad():
        pairs = zip(average.unwrap().parameters(), model.unwrap().parameters(), before.parameters(), strict=True)
        for kept, new, old in pairs:
            if not is_released(new):
                kept.lerp_(new, 0.5)
                errors.append((kept - (old + new) / 2).abs().max())
    return largest_error(errors)


@pytest.mark.turns
def test_a_frozen_average_is_cut_like_the_model(pool: Pool) -> None:
    """A frozen copy was cut elsewhere than its model, and the error's advice, to omit what is released, left the
    weights between both cuts at their initial values."""
    assert largest_error(pool.run(frozen_average, 2, "uniform")) < 1e-6
    with pytest.raises(WorkerError, match="pass partition='uniform'"):
        pool.run(frozen_average, 2, "auto")


def boosted_later() -> list[tuple[float, float]]:
    """A step of an engine before and after its teacher is boosted, without naming a model: how far the loss is from the
    student's, and how far the student moves."""
    data = zoo.batch("llama-tied", rows=4)
    student, teacher = zoo.build("llama-tied", seed=0), zoo.build("llama-tied", seed=1)
    plugin = PipelinePlugin(2, num_microbatches=2, dry_run_input=data, verify=False)
    engine = pipeshard.initialize(student, torch.optim.SGD(student.parameters(), lr=0.1), plugin=plugin)
    model, optimizer, *_ = engine
    held, found = [*model.pipeline.held_parameters()], []
    for boosts in (False, True):
        if boosts:
            engine.boost(teacher)
        before = [p.detach().clone() for p in held]
        with torch.no_grad():
            expected = float(engine.execute_pipeline(iter([data]), model)["loss"])
        error = abs(float(engine.execute_pipeline(iter([data]))["loss"]) - expected)
        optimizer.step()
        optimizer.zero_grad()
        found.append((error, largest_error((p - old).abs().max() for p, old in zip(held, before, strict=True))))
    return found


@pytest.mark.turns
def test_an_engine_trains_its_model_after_it_boosted_a_teacher(pool: Pool) -> None:
    """A teacher was boosted after the student, and `engine.execute_pipeline(batches)` then evaluated the teacher: it
    returned the teacher's loss, and the student was never trained."""
    for steps in pool.run(boosted_later, 2):
        assert all(error < 1e-6 and 0 < moved < 1 for error, moved in steps)


class Player(torch.nn.Module):
    """A generator or a critic."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 16), torch.nn.Linear(16, width)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.head(torch.tanh(self.body(x)))
        return {"loss": out.square().mean(), "out": out}


def play(models: list[Any], optimizers: list[Any], backward: Any, z: torch.Tensor) -> None:
    """An update of the critic, one of the generator, whose loss also gives the critic gradients, and one of both."""
    (generator, critic), (of_generator, of_critic) = models, optimizers
    for updated, sign in (([of_critic], 1.0), ([of_generator], -1.0), (optimizers, 0.5)):
        fake = generator(x=z)["out"]
        score = critic(x=fake.detach() if sign == 1.0 else fake)["out"].float()
        backward(score.sigmoid().mean() * sign, updated[0])
        for optimizer in updated:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def adversaries(precision: str) -> float:
    """The error of the weights of a generator and a critic that are called as plain models, after some updates."""
    torch.manual_seed(0)
    plain = [Player(8), Player(1)]
    of_plain = [torch.optim.SGD(model.parameters(), lr=0.5) for model in plain]
    sample = {"x": torch.randn(4, 8)}
    plugin = PipelinePlugin(1, num_microbatches=1, dry_run_input=sample, precision=precision, verify=False)
    booster = Booster(plugin=plugin)
    models, optimizers = [], []
    for model in copy.deepcopy(plain):
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
        models.append(model)
        optimizers.append(optimizer)
    if precision == "fp16":
        models[1].pipeline.scaling.value /= 4
    for step in range(4):
        z = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        play(plain, of_plain, lambda loss, _: loss.backward(), z)
        play(models, optimizers, booster.backward, z.chunk(dist.get_world_size())[dist.get_rank()])
    pairs = zip(torch.nn.ModuleList(models).parameters(), torch.nn.ModuleList(plain).parameters(), strict=True)
    return largest_error((one.detach().float() - other).abs().max() for one, other in pairs)


@pytest.mark.turns
@pytest.mark.parametrize(("precision", "world", "error"), [("fp32", 2, 1e-6), ("fp16", 2, 2e-3), ("fp16", 1, 2e-3)])
def test_a_loss_of_two_plain_models_trains_both(pool: Pool, precision: str, world: int, error: float) -> None:
    """`booster.backward(bce(critic(generator(z))), opt_g)` was refused, with the advice to call booster.backward."""
    assert largest_error(pool.run(adversaries, world, precision)) < error


class Critic(Player):
    """Its output contains a trained parameter itself."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.bias = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x) | {"bias": self.bias}


def penalized(critic: Any, z: torch.Tensor) -> torch.Tensor:
    """A loss of a critic with a penalty on the gradients of its scores (WGAN-GP)."""
    z = z.clone().requires_grad_()
    found = critic(x=z)
    scores = found["out"].float()
    (slopes,) = torch.autograd.grad(scores.sum(), z, create_graph=True)
    (first,) = torch.autograd.grad(scores.sum(), critic.head.weight, retain_graph=True)
    assert first.shape == critic.head.weight.shape
    return (scores * found["bias"]).mean() + (slopes.float().norm(dim=1) - 1).square().mean()


def with_penalty(precision: str) -> float:
    """The error of a critic's weights after some updates, and after an evaluation that gives it no hooks."""
    torch.manual_seed(0)
    plain = Critic(1)
    of_plain = torch.optim.SGD(plain.parameters(), lr=0.5)
    options = {"precision": precision, "initial_scale": 2.0**8, "verify": False}
    plugin = PipelinePlugin(1, num_microbatches=1, dry_run_input={"x": torch.randn(4, 8)}, **options)
    booster, model = Booster(plugin=plugin), copy.deepcopy(plain)
    critic, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    with torch.no_grad():
        critic(x=torch.randn(4, 8))
    for step in range(3):
        z = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        penalized(plain, z).backward()
        booster.backward(penalized(critic, z.chunk(dist.get_world_size())[dist.get_rank()]), optimizer)
        for each in (of_plain, optimizer):
            each.step()
            each.zero_grad()
    pairs = zip(critic.parameters(), plain.parameters(), strict=True)
    return largest_error((one.detach().float() - other).abs().max() for one, other in pairs)


@pytest.mark.turns
@pytest.mark.parametrize(("precision", "world", "error"), [("fp32", 2, 1e-6), ("fp16", 1, 1e-2)])
def test_a_plain_model_returns_a_parameter_and_is_penalized_by_its_gradients(
    pool: Pool, precision: str, world: int, error: float
) -> None:
    """A hook of boost on the returned parameter was refused as the user's, and `torch.autograd.grad` raised that
    loss.backward() would not sum over replicas, although it accumulates nothing."""
    assert largest_error(pool.run(with_penalty, world, precision)) < error


class Adapted(Player):
    """Its only trained layer is in a reentrant checkpoint, as the adapters of LoRA are."""

    def __init__(self) -> None:
        super().__init__(1)
        self.head.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden: torch.Tensor = checkpoint(self.body, x.clone().requires_grad_(), use_reentrant=True)
        out = self.head(hidden)
        return {"loss": out.square().mean(), "out": out, "hidden": hidden}


def backward_of_adapted(precision: str) -> None:
    options = {"precision": precision, "verify": False, "dry_run_input": {"x": torch.randn(4, 8)}}
    booster, model = Booster(plugin=PipelinePlugin(1, num_microbatches=1, **options)), Adapted()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.body.parameters(), lr=0.5))
    outputs = boosted(x=torch.randn(4, 8))
    for output in (outputs["out"], outputs["hidden"]):
        (slopes,) = torch.autograd.grad(outputs["out"].sum(), output, retain_graph=True)
        assert slopes.shape == output.shape
    with pytest.raises(UsageError, match=r"call booster\.backward"):
        outputs["out"].sum().backward()
    booster.backward(boosted(x=torch.randn(4, 8))["loss"], optimizer)
    assert all(parameter.grad is not None for parameter in optimizer.parameters)


@pytest.mark.turns
@pytest.mark.parametrize(("precision", "world"), [("fp32", 2), ("fp16", 1)])
def test_a_backward_that_runs_reentrant_checkpoints_is_refused(pool: Pool, precision: str, world: int) -> None:
    """The parameters of such checkpoints are in no graph yet, so loss.backward() of replicas passed as a pass that adds
    to no gradient."""
    pool.run(backward_of_adapted, world, precision)


def of_two_precisions(first: str, second: str) -> tuple[list[Any], list[Any], Booster]:
    models, optimizers = [], []
    for width, precision in ((8, first), (1, second)):
        plugin = PipelinePlugin(
            1, num_microbatches=1, dry_run_input={"x": torch.randn(4, 8)}, precision=precision, verify=False
        )
        model = Player(width)
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        models.append(model)
        optimizers.append(optimizer)
    return models, optimizers, booster


def overflowing() -> tuple[float, bool]:
    """The loss scale of a critic, and whether the generator has moved, whose gradients alone overflow at first."""
    models, optimizers, booster = of_two_precisions("fp16", "fp16")
    before = models[0].unwrap().head.weight.detach().clone()
    for _ in range(14):
        fake = models[0](x=torch.ones(8, 8))["out"]
        fake.register_hook(lambda gradient: gradient * 2.0**8)
        booster.backward(models[1](x=fake)["out"].float().mean(), optimizers[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return models[1].pipeline.scaling.value, not torch.equal(models[0].unwrap().head.weight, before)


@pytest.mark.turns
def test_the_scale_of_a_loss_of_two_models_falls_if_either_overflows(pool: Pool) -> None:
    """The other model halved its own scale, with which no loss was scaled, and skipped every update, silently."""
    for scale, moved in pool.run(overflowing, 1):
        assert scale < 2.0**16 and moved


def of_other_precision() -> None:
    models, optimizers, booster = of_two_precisions("fp32", "fp16")
    models[0].requires_grad_(False)
    booster.backward(models[1](x=models[0](x=torch.ones(8, 8))["out"])["out"].float().mean(), optimizers[1])
    models[0].requires_grad_(True)
    booster.backward(models[1](x=models[0](x=torch.ones(8, 8))["out"])["out"].float().mean(), optimizers[1])


@pytest.mark.turns
def test_two_models_of_which_one_has_a_loss_scale_are_refused(pool: Pool) -> None:
    """The gradients of the other one kept the factor 65536."""
    for message in pool.run_expecting(UsageError, of_other_precision, 1):
        assert "but only one of them has a loss scale" in message


class Rivals:
    """Two models with dropout in fp16 that train in turns, the second one twice as often; its first step overflows."""

    def __init__(self, seed: int) -> None:
        self.data = zoo.batch("gpt2", rows=4)
        plugin = PipelinePlugin(dist.get_world_size(), num_microbatches=2, dry_run_input=self.data, precision="fp16")
        booster = Booster(plugin=plugin)
        self.sides = [pair(booster, "gpt2", seed + k, dropout=0.1)[0] for k in range(2)]
        self.models, self.optimizers = [side.model for side in self.sides], [side.optimizer for side in self.sides]

    def step(self, overflows: bool = False) -> list[float]:
        losses = []
        for side in (self.sides[0], self.sides[1], self.sides[1]):
            losses.append(float(side.backward(self.data)["loss"]))
            if overflows and side is self.sides[1]:
                next(p for p in side.held.values() if p.grad is not None).grad.view(-1)[0] = float("inf")
            side.step()
        return [*losses, *(model.pipeline.scaling.value for model in self.models)]


def rivals(folder: Path, use_async: bool) -> list[str]:
    """Steps of a resumed pair of models beside an uninterrupted one, and the errors if one model's part is omitted."""
    first = Rivals(0)
    first.step(overflows=True)
    save_training_state(folder, 1, first.models, first.optimizers, use_async=use_async)
    expected = first.step()
    second = Rivals(2)
    assert load_training_state(folder, second.models, second.optimizers) == 1
    found = second.step()
    assert found == expected, (found, expected)
    told = []
    for models, optimizers in ((second.models, second.optimizers[0]), (second.models[0], second.optimizers)):
        with pytest.raises(CheckpointError) as caught:
            save_training_state(folder, 2, models, optimizers)
        told.append(str(caught.value))
    return told


@pytest.mark.turns
@pytest.mark.parametrize("use_async", [False, True])
def test_two_models_resume_together(pool: Pool, tmp_path: Path, use_async: bool) -> None:
    """The models of a GAN resumed from different steps or, saved as an average of the other, one of them began with
    the dropout of its first step and the first loss scale."""
    for told in pool.run(rivals, 2, tmp_path, use_async):
        assert "also boosted with AdamW" in told[0] and "belongs to another model" in told[1], told
