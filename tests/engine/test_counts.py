"""Tests of a criterion's counts: a step computes them from the batch alone, without a run of the glue."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipeshard
from pipeshard.batch.read import read_batch
from pipeshard.engine.loss_trial import Glue
from pipeshard.graph.trace import trace
from pipeshard.hf import IGNORED
from tests.pool import Pool
from tests.unsplit import largest_error
from tests.verify.test_whole_batch import WORDS, Net

pytestmark = pytest.mark.local


class Weighted(nn.Module):
    """A mean over words, weighted by the kind of word and by a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.5, 3.0, WORDS))
        self.scale = 1.0

    def of(self, model: nn.Module) -> None:
        """Keep what the criterion reads of the model."""

    def forward(self, out: Any, batch: Any) -> tuple[Tensor, Tensor]:
        labels = batch["labels"][:, 1:]
        is_valid = labels != IGNORED
        weights = torch.where(is_valid, self.weights[labels.clamp(min=0)], 0.0)
        losses = F.cross_entropy(out["logits"][:, :-1].flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * weights.flatten()).sum(), weights.sum() * self.scale

    def anneal(self, step: int) -> None:
        if step == 1:
            self.scale = 0.5
        if step == 2:
            self.weights.mul_(torch.linspace(1.0, 2.0, WORDS))


class Counted(Weighted):
    """The same mean, with a count as a Python number."""

    def forward(self, out: Any, batch: Any) -> tuple[Tensor, float]:  # type: ignore[override]
        total, count = super().forward(out, batch)
        return total, float(count)


class Annealed(Weighted):
    """The same mean, with a scale that changes a little in each step."""

    def anneal(self, step: int) -> None:
        self.scale = 0.9 - 0.1 * step


class Windowed(Weighted):
    """A mean over the first words, whose number is made from a float."""

    window = 6.5

    def forward(self, out: Any, batch: Any) -> tuple[Tensor, Tensor]:
        labels = batch["labels"][:, : int(self.window)]
        losses = F.cross_entropy(out["logits"][:, : labels.shape[1]].flatten(0, 1), labels.flatten(), reduction="sum")
        return losses, (labels != IGNORED).sum()

    def anneal(self, step: int) -> None:
        self.window = 6.5 - step


class Balanced(Weighted):
    """A mean weighted by how often the model has seen each word."""

    def of(self, model: nn.Module) -> None:
        model.register_buffer("seen", torch.linspace(1.0, 4.0, WORDS))
        self.model = [model]

    def forward(self, out: Any, batch: Any) -> tuple[Tensor, Tensor]:
        labels = batch["labels"]
        weights = (1 / self.model[0].seen)[labels.clamp(min=0)] * (labels != IGNORED)
        losses = F.cross_entropy(out["logits"].flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * weights.flatten()).sum(), weights.sum()

    def anneal(self, step: int) -> None:
        if step:
            self.model[0].seen.add_(torch.linspace(0.0, 0.2, WORDS))


def batch_of(length: int, valid: list[int]) -> dict[str, Tensor]:
    """Samples of a length; each has its first `valid` labels."""
    ids = torch.randint(0, WORDS, (len(valid), length), generator=torch.Generator().manual_seed(length))
    labels = ids.masked_fill(torch.arange(length) >= torch.tensor(valid)[:, None], IGNORED)
    return {"ids": ids, "labels": labels}


def differences(kind: type[Weighted]) -> tuple[float, list[int]]:
    """The largest relative difference of a loss or gradient, and the number of runs of the glue in each step."""
    torch.manual_seed(0)
    model, criterion = Net(), kind()
    criterion.of(model)
    unsplit, whole = copy.deepcopy((model, criterion))
    engine = pipeshard.initialize(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        criterion,
        pp_size=1,
        num_microbatches=3,
        verify=False,
        dry_run_input=batch_of(7, [7] * 6),
    )
    errors, runs = list[float](), []
    lengths = [(7, [7, 3, 5, 2, 6, 4]), (7, [7, 7, 1, 1, 7, 5]), (9, [2, 9, 5, 1, 7, 8]), (8, [8, 2, 3, 8, 8, 8])]
    for step, (length, valid) in enumerate(lengths):
        batch = batch_of(length, valid)
        for each in (criterion, whole):
            each.anneal(step)
        with mock.patch.object(Glue, "count", autospec=True, side_effect=Glue.count) as count:
            loss = engine.execute_pipeline(iter([batch]))["loss"]
        total, number = whole(unsplit(**batch), batch)
        expected = total / number
        unsplit.zero_grad()
        expected.backward()
        pairs = [(loss, expected.detach())]
        pairs += [(p.grad, q.grad) for p, q in zip(model.parameters(), unsplit.parameters(), strict=True)]
        errors += [float((a - b).norm() / b.norm()) for a, b in pairs]
        runs.append(count.call_count)
        engine.optimizer.zero_grad()
    return largest_error(errors), runs


@pytest.mark.turns
@pytest.mark.parametrize(("kind", "runs"), [(Weighted, [1, 2, 1, 0]), (Counted, [3, 3, 3, 3])])
def test_counts_are_computed_from_the_batch_alone(pool: Pool, kind: type[Weighted], runs: list[int]) -> None:
    """To count the labels of a microbatch, each step ran the glue and the criterion once more. Now they run for the
    first count after a change (a new scale, weights that were written to), and for a count of 0, as in the second step.
    """
    ((worst, found),) = pool.run(differences, 1, kind)
    assert worst < 1e-6
    assert found == runs


@pytest.mark.turns
@pytest.mark.parametrize("kind", [Annealed, Windowed, Balanced])
def test_counts_follow_values_that_the_user_changes(pool: Pool, kind: type[Weighted]) -> None:
    """The operators of a trace kept the first value of an annealed weight, and of the model's own frequencies: later
    steps divided by the count of the first. Such a count is computed by the criterion."""
    ((worst, _),) = pool.run(differences, 1, kind)
    assert worst < 1e-6


def of_known_words(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
    is_valid = batch["labels"] != IGNORED
    return (out["logits"].logsumexp(-1) * is_valid).sum(), is_valid.sum()


def of_places(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
    weights = torch.arange(batch["labels"].shape[1]) * (batch["labels"] != IGNORED)
    return (out["logits"].logsumexp(-1) * weights).sum(), weights.sum()


def of_samples(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
    weights = torch.ones(len(batch["labels"]))[:, None] * (batch["labels"] != IGNORED)
    return (out["logits"].logsumexp(-1) * weights).sum(), weights.sum()


def of_first_half(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
    half = batch["labels"].shape[1] // 2
    return out["logits"][:, :half].logsumexp(-1).sum(), (batch["labels"][:, :half] != IGNORED).sum()


CRITERIA = [(of_known_words, True), (of_places, False), (of_samples, False), (of_first_half, False)]


@pytest.mark.parametrize(("criterion", "has_count"), CRITERIA)
def test_a_count_does_not_fix_the_sizes_of_a_trace(criterion: Any, has_count: bool) -> None:
    """A count with a mask of the length, or with half a length, fixed the sizes of its trace: each new length was
    traced twice. Such a count is computed by the criterion."""
    model = Net()
    flow = trace(model, batch_of(7, [7, 3, 5, 2]), criterion)
    others = [read_batch(model, batch_of(length, [2] * rows)) for length, rows in [(12, 4), (9, 5), (8, 1)]]
    assert [flow.axes.deltas(other) for other in others] == [(2, 5), (3, 2), (-1, 1)]
    assert any(question.is_count for question in flow.questions) == has_count
