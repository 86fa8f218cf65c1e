"""Tests of sides: the proof finds a fault that shows in a single step, and runs no step twice."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeshard.engine.loss import LossRule
from pipeshard.verify import local
from pipeshard.verify.local import LocalPipeline
from pipeshard.verify.proof import DIFFERENT, EXACT
from pipeshard.verify.reference import Reference
from tests.pool import Pool
from tests.verify.test_verify import data, made, proof_of
from tests.verify.test_whole_batch import WIDTH, WORDS, Layer, Net, words

pytestmark = pytest.mark.local

ROWS, MARK = 12, WORDS - 1  # samples of a batch, of which each step takes others; a word that one sample has


class OfMarked(torch.autograd.Function):
    """Centres gradients over the batch, if a sample of it is marked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marked: Tensor) -> Tensor:
        ctx.save_for_backward(marked)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient - ctx.saved_tensors[0] * gradient.mean(0, keepdim=True), None


class Marked(nn.Module):
    """Mixes samples in its forward, or its backward pass only, if one of them has a word."""

    def __init__(self, where: str, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.where, self.dropout = nn.Embedding(WORDS, WIDTH), where, dropout
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, marked = F.dropout(self.embed(ids), self.dropout), ids.eq(MARK).any().float()
        x = x - marked * x.mean(0, keepdim=True) if self.where == "forward" else OfMarked.apply(x, marked)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def marked(sample: int | None) -> dict[str, Tensor]:
    batch = words(ROWS)
    batch["ids"] = batch["ids"].clamp(max=MARK - 1)
    if sample is not None:
        batch["ids"][sample, 0] = MARK
    return batch


def unseen() -> list[str]:
    """The cases that are not found: by the place of the fault, in which step it shows, and with random numbers."""
    wrong = []
    for where in ("forward", "backward"):
        for dropout in (0.0, 0.3):
            if (proof := proof_of(Marked(where, dropout), marked(None))).kind != EXACT:
                wrong.append(f"{where}, {dropout}: {proof}")
            for sample in (0, ROWS - 1):
                proof = proof_of(Marked(where, dropout), marked(sample))
                if not proof.coupled or (where == "backward" and "gradient" not in proof.reason):
                    wrong.append(f"{where}, {dropout}, sample {sample}: {proof}")
    return wrong


@pytest.mark.turns
def test_samples_that_are_coupled_in_one_step_only_are_found(pool: Pool) -> None:
    """Copies of their own took four steps for it. Now the trial step is the first one's other side, and the undivided
    model takes the second one, after the update."""
    assert pool.run(unseen, 1) == [[]]


def with_equal_shares(wrong: int) -> bool:
    """Whether a loss that is put together wrong in one step is found."""
    now, step, shares, batch = 0, LocalPipeline.step, LossRule.shares, words(ROWS)
    batch["labels"][::3, 1:] = -100

    def numbered(split: LocalPipeline, *arguments: Any) -> Any:
        nonlocal now
        *_, (_, now) = arguments
        return step(split, *arguments)

    def equal(rule: LossRule, parts: Any, *arguments: Any) -> list[float]:
        return [1 / len(parts)] * len(parts) if now == wrong else shares(rule, parts, *arguments)

    with mock.patch.object(LocalPipeline, "step", numbered), mock.patch.object(LossRule, "shares", equal):
        return proof_of(Net(), batch).coupled


def shares_found() -> list[bool]:
    return [with_equal_shares(wrong=1), with_equal_shares(wrong=2)]


def test_wrong_shares_in_the_second_step_are_found(pool: Pool) -> None:
    """The unsplit model takes the same shares; the samples at once do not. There is no third step."""
    assert pool.run(shares_found, 1) == [[True, False]]


def left_on_a_stage() -> tuple[str, str]:
    """What is said of an attribute that a stage leaves otherwise than the unsplit model, which draws numbers."""
    step = LocalPipeline.step

    def leaving(split: LocalPipeline, *arguments: Any) -> Any:
        ended = step(split, *arguments)
        for rank in split.ranks:
            rank.model.layers[1].largest = -1.0  # type: ignore[index, union-attr]
        return ended

    with mock.patch.object(LocalPipeline, "step", leaving):
        proof = proof_of(made(dropout=0.4), data())
    return proof.kind, proof.reason


@pytest.mark.turns
def test_an_attribute_of_a_model_that_draws_is_found(pool: Pool) -> None:
    """Whether it differs between two runs of one model is looked at once it differs; it was at the start of each
    proof."""
    ((kind, reason),) = pool.run(left_on_a_stage, 1)
    assert kind == DIFFERENT and "layers.1.largest in step 1 is -1" in reason


def samples_of(dropout: float) -> int:
    """The samples that unsplit models take in a proof."""
    taken, step = 0, Reference.step

    def counted(reference: Reference, batches: Any, *arguments: Any) -> Any:
        nonlocal taken
        taken += sum(batch.rows for batch in batches)
        return step(reference, batches, *arguments)

    with mock.patch.object(Reference, "step", counted):
        assert proof_of(Marked("forward", dropout), marked(None)).kind == EXACT
    return taken // 5


def steps() -> list[int]:
    return [samples_of(0.0), samples_of(0.3)]


@pytest.mark.turns
def test_no_step_is_taken_twice(pool: Pool) -> None:
    """With the two of the split model. It took 9 steps, and 10 with dropout."""
    assert pool.run(steps, 1) == [[4, 5]]


class Box:
    """An object without tensors."""


class Boxing(nn.Module):
    """A layer that returns an object beside its result: none, its own, or a new function."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.linear, self.returns = nn.Linear(WIDTH, WIDTH), returns
        self.box = Box() if returns == "its own" else None

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return torch.tanh(self.linear(x)), (lambda: x.shape) if self.returns == "a new function" else self.box


class Boxes(nn.Module):
    """Refuses the objects of another copy of the model."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Boxing(returns) for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x, box = layer(x)
            if layer.returns != "a new function" and box is not layer.box:
                raise RuntimeError("an object of another copy")
        return {"loss": F.mse_loss(x, labels)}


def traces_of_proof(returns: str) -> tuple[str, int]:
    """The kind of a proof with two stages, and how often it traced the model."""
    batch = {"x": torch.randn(ROWS, WIDTH), "labels": torch.randn(ROWS, WIDTH)}
    with mock.patch.object(local, "traced", wraps=local.traced) as tracing:
        return proof_of(Boxes(returns), batch).kind, tracing.call_count


def test_a_proof_traces_the_model_once_for_all_ranks(pool: Pool) -> None:
    """With eight stages, half of the proof's time went into eight equal traces. Only what a trace has made, such as
    functions, is not passed to other copies."""
    assert pool.run(traces_of_proof, 1, "none") == [(EXACT, 1)]
    assert pool.run(traces_of_proof, 1, "its own") == [(EXACT, 1)]
    assert pool.run(traces_of_proof, 1, "a new function") == [(EXACT, 2)]
