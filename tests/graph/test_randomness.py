"""Tests of dropout: masks do not depend on the number of stages, with or without activation recompute."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch import nn

from pipeshard import PipelinePlugin, load_training_state, save_training_state
from pipeshard.graph.rng import Randomness
from tests import zoo
from tests.covering import covering
from tests.pool import Pool
from tests.unsplit import Split

pytestmark = pytest.mark.local

STEPS = 3


def losses(name: str, recompute: str, seed: int = 0) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of three steps with dropout 0.1, and this stage's gradients of the last one."""
    model = with_dropout(zoo.build(name))
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})  # type: ignore[operator]
    split = Split(model, dist.get_world_size(), zoo.batch(name), num_microbatches=3)
    torch.manual_seed(seed if dist.get_rank() == 0 else 1000 + dist.get_rank())  # the first rank's counts
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    found = []
    for step in range(STEPS):
        split.optimizer.zero_grad()
        found.append(float(split.backward(zoo.batch(name, seed=step))["loss"]))
        split.evaluate(zoo.batch(name))  # draws nothing that the next step would
        if step < STEPS - 1:
            split.optimizer.step()
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert before[2] == np.random.get_state()[2]
    return found, {key: p.grad.clone() for key, p in split.held.items() if p.grad is not None}


def with_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
        for attribute in ("attention_dropout", "dropout", "dropout_prob", "hidden_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.1)
    return model


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "recompute"), covering(["gpt2", "llama", "bert", "t5"], ["reentrant", "non-reentrant", ""], strength=1)
)
def test_dropout_is_the_same_for_every_number_of_stages(pool: Pool, name: str, recompute: str) -> None:
    expected, whole = pool.run(losses, 1, name, recompute)[0]
    plain, _ = pool.run(losses, 1, name, "")[0]
    assert expected == pytest.approx(plain, rel=1e-6), "recomputing changes the masks"
    # So many losses are equal to the bit: BERT's step adds up tied gradients in another order.
    equal = {"t5": 0, "bert": 1}.get(name, STEPS)
    for p in (2, 4):
        for found, gradients in pool.run(losses, p, name, recompute):
            assert found[:equal] == expected[:equal] and found == pytest.approx(expected, rel=1e-6)
            for key, gradient in gradients.items():
                assert (gradient - whole[key]).norm() <= 1e-5 * whole[key].norm() + 1e-8, (key, p)


@pytest.mark.turns
def test_dropout_follows_the_seed_and_the_step(pool: Pool) -> None:
    first, other = (pool.run(losses, 2, "gpt2", "", seed)[0][0] for seed in (0, 1))
    assert first != other
    same_batch = pool.run(repeated, 2)[0]
    assert len(set(same_batch)) == STEPS


def repeated() -> list[float]:
    split = Split(with_dropout(zoo.build("gpt2")), 2, zoo.batch("gpt2"), num_microbatches=2)
    data: Any = zoo.batch("gpt2")
    return [float(split.backward(data)["loss"]) for _ in range(STEPS)]


def evaluated(folder: str, evaluates: bool, resumes: bool = False) -> tuple[list[float], list[float]]:
    """The losses of two training steps, and of forward-only calls on one batch before, between and after them. With
    `resumes`, the second step and what follows are those of a model that was loaded before them."""
    data, seen = zoo.batch("gpt2"), list[float]()

    def made() -> Split:
        return Split(with_dropout(zoo.build("gpt2")), dist.get_world_size(), data, num_microbatches=2)

    def evaluate() -> None:
        seen.extend(float(split.evaluate(data)["loss"]) for _ in range(3 if evaluates else 0))

    split, losses = made(), list[float]()
    for step in range(2):
        evaluate()
        if resumes and step:
            save_training_state(folder, 1, split.model, split.optimizer)
            split = made()
            load_training_state(folder, split.model, split.optimizer)
            evaluate()
        losses.append(float(split.backward(data)["loss"]))
        split.step()
    evaluate()
    return losses, seen


@pytest.mark.turns
def test_each_forward_draws_its_own_numbers(pool: Pool, tmp_path: Path) -> None:
    """Forward-only calls between two training steps repeated the same dropout masks, so twenty passes were one. Each
    draws anew, for any number of stages, and what training draws does not depend on them. The first after a step had
    the masks of the next step, so a consistency loss between the two saw no difference."""
    (losses, seen), *_ = pool.run(evaluated, 1, str(tmp_path), True)
    assert len(set(seen)) == 9 and not {*losses} & {*seen}
    for trained, drawn in pool.run(evaluated, 2, str(tmp_path), True):
        assert trained == alike(losses) and drawn == alike(seen)
    for trained, _ in pool.run(evaluated, 2, str(tmp_path), False):
        assert trained == alike(losses)
    ((again, more), *_) = pool.run(evaluated, 2, str(tmp_path), True, True)
    assert again == alike(losses) and len(set(more)) == 12
    assert [*more[:6], *more[9:]] == alike(seen)


def alike(losses: list[float]) -> Any:
    """The same losses, up to the order in which stages sum the gradients of tied weights. Other masks change 1e-3."""
    return pytest.approx(losses, rel=1e-6)


def of_peers() -> list[float]:
    """The losses of two equal models of one plugin, of a training step and of a forward-only call."""
    data = zoo.batch("gpt2")
    booster = Booster(plugin=PipelinePlugin(dist.get_world_size(), num_microbatches=2, dry_run_input=data))
    losses = []
    for _ in range(2):
        model = with_dropout(zoo.build("gpt2"))
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), 0.1))
        for used in (optimizer, None):
            losses.append(float(booster.execute_pipeline(iter([data]), boosted, None, used)["loss"]))
    return losses


@pytest.mark.turns
def test_peers_draw_their_own_numbers(pool: Pool) -> None:
    """Two models that learn from each other had the same dropout masks."""
    losses, *_ = pool.run(of_peers, 1)
    assert len(set(losses)) == 4
    assert pool.run(of_peers, 2) == [losses] * 2


@pytest.mark.turns
def test_dropout_that_is_turned_on_later_is_seen(pool: Pool) -> None:
    expected = pool.run(turned_on_later, 1)[0]
    assert expected[0] != expected[1]
    assert [pool.run(turned_on_later, p)[0] for p in (2, 4)] == [expected] * 2


def turned_on_later() -> list[float]:
    """The loss of one batch without dropout, and with."""
    model = zoo.build("gpt2")
    split = Split(model, dist.get_world_size(), zoo.batch("gpt2"), num_microbatches=2)
    torch.manual_seed(0)
    before = float(split.backward(zoo.batch("gpt2"))["loss"])
    with_dropout(model)
    return [before, float(split.backward(zoo.batch("gpt2"))["loss"])]


@pytest.mark.parametrize(("device", "index"), [("cuda:0", 0), ("cuda", 1)])
def test_the_generators_of_gpus_are_there_before_anything_else_uses_a_gpu(device: str, index: int) -> None:
    """profile_units(..., "cuda:0") ended with IndexError: torch has no generators of GPUs until CUDA is initialized.
    Where the device had no index, GPU 0's generator was taken for that of the current GPU."""
    gpus = [torch.Generator() for _ in range(2)]
    generators: list[torch.Generator] = []
    with (
        mock.patch("torch.cuda.default_generators", generators),
        mock.patch("torch.cuda.init", lambda: generators.extend(gpus)),
        mock.patch("torch.cuda.current_device", lambda: 1),
    ):
        assert Randomness(torch.device(device)).generators == [torch.default_generator, gpus[index]]
