"""Mutations: the proof at boost detects faults in the engine itself, since the proof runs the engine.

The proof did not cover ties, norms, replicas, ZeRO-1 and messages while it had a separate engine.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeshard.batch.read import read_batch
from pipeshard.config import PipelineConfig
from pipeshard.engine.clipping import grad_norm
from pipeshard.engine.grad_sync import Bucket, GradientSync
from pipeshard.engine.interpreter import Interpreter
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.schedule.program import Action, Kind
from pipeshard.split.replay import Again
from pipeshard.verify.proof import DIFFERENT, EXACT, Proof, prove
from tests import zoo


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(8, 8), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.inner(x)))


class Dropping(nn.Module):
    """Layers with dropout, and a criterion outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def weighted(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    weights = batch["criterion.w"]
    losses = F.mse_loss(output, batch["criterion.y"], reduction="none").mean(1)
    return (losses * weights).sum(), weights.sum()


def proof(kind: str, **arguments: Any) -> Proof:
    torch.manual_seed(0)
    model: nn.Module
    if kind == "tied":
        model, data, criterion = zoo.build("llama-tied", layers=2), zoo.batch("llama-tied"), None
    else:
        model, data = Dropping(), {"x": torch.randn(10, 8)}
        data |= {"criterion.y": torch.randn(10, 8), "criterion.w": torch.rand(10)}
        criterion = weighted
    config = PipelineConfig(pp_size=2, num_microbatches=2, **arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return prove(config, torch.device("cpu"), model, optimizer, criterion, read_batch(model, data))


summed, reduce = Bucket.summed, GradientSync._reduce
take, step, enter = Interpreter._take, PipelineOptimizer._step, Again.__enter__


def summed_twice(bucket: Bucket, counts: Any) -> Any:
    for parameter, total in summed(bucket, counts):
        yield parameter, total if total is None or not bucket.tie else 2 * total


def of_this_rank(holders: Any, group: Any, norm_type: float = 2.0) -> Tensor:
    grad_norm(holders, group, norm_type)
    return torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in holders if p.grad is not None]))


def clipped_before(sync: GradientSync) -> None:
    nn.utils.clip_grad_norm_([parameter for _, parameter in sync.shared], 0.01)
    reduce(sync)


def of_another(interpreter: Interpreter, action: Action) -> list[Tensor]:
    """The forward of microbatch 1 takes what microbatch 0 was sent."""
    taken = take(interpreter, action)
    kept = interpreter.__dict__.setdefault("kept", {})
    if action.kind is Kind.F and taken:
        kept.setdefault(action.stage, [tensor.clone() for tensor in taken])
        return [tensor[: len(own)].clone() for tensor, own in zip(kept[action.stage], taken, strict=True)]
    return taken


def by_another_rate(optimizer: PipelineOptimizer, *args: Any, **kwargs: Any) -> Any:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 if optimizer.grid.stage == 0 else 0.02
    return step(optimizer, *args, **kwargs)


def with_other_draws(again: Again) -> None:
    enter(again)
    torch.manual_seed(7)


def nothing(*args: Any, **kwargs: Any) -> None:
    pass


Case = tuple[str, dict[str, Any], str, Callable[..., Any]]
ENGINE = "pipeshard.engine."
CASES: dict[str, Case] = {
    "a tie's gradients are summed twice": ("tied", {}, f"{ENGINE}grad_sync.Bucket.summed", summed_twice),
    "a tie's gradients are not summed": ("tied", {}, f"{ENGINE}grad_sync.GradientSync._reduce", nothing),
    "the norm is that of one stage": ("tied", {"max_norm": 0.01}, f"{ENGINE}clipping.grad_norm", of_this_rank),
    "gradients are clipped before the sum": ("tied", {}, f"{ENGINE}grad_sync.GradientSync._reduce", clipped_before),
    "a replica does not get what another has updated": (
        "tied",
        {"dp_size": 2, "zero_stage": 1},
        f"{ENGINE}copies.share_updates",
        nothing,
    ),
    "a replica counts its own labels alone": (
        "tied",
        {"dp_size": 2},
        f"{ENGINE}loss_shares.LossShares._total",
        lambda cache, count, rule: count,
    ),
    "a message is that of another microbatch": ("plain", {}, f"{ENGINE}interpreter.Interpreter._take", of_another),
    "a stage has another learning rate": ("plain", {}, f"{ENGINE}optimizer.PipelineOptimizer._step", by_another_rate),
    "a criterion's count is lost": (
        "plain",
        {},
        f"{ENGINE}loss_shares.LossShares._counts",
        lambda cache, batches, *_: [(1.0, False)] * len(batches),
    ),
    "a layer is computed again with another mask": (
        "plain",
        {"recompute": True},
        "pipeshard.split.replay.Again.__enter__",
        with_other_draws,
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_a_fault_of_the_engine_is_seen(name: str) -> None:
    kind, arguments, place, stand_in = CASES[name]
    well = proof(kind, **arguments)
    assert well.kind == EXACT, well.reason
    with mock.patch(place, stand_in):
        broken = proof(kind, **arguments)
    assert broken.kind == DIFFERENT or broken.refused, broken
