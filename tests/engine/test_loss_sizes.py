"""Tests of losses that depend on the number of samples or on the length. Once, a rule was tried on 4 samples of 8
positions, and used for all batches."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeshard.batch.batch import Batch
from pipeshard.engine import loss_search as loss_module
from pipeshard.engine.loss import LossRule, ProvenRule
from pipeshard.engine.loss_search import prove_loss_rule
from pipeshard.engine.loss_sizes import Sizes, Tried
from pipeshard.errors import ConfigurationError
from pipeshard.graph.trace import trace
from tests.engine.test_loss_proof import CLASSES, TOKENS, Tagger
from tests.hunt import nets
from tests.hunt.cases import Case
from tests.hunt.run import run
from tests.pool import Pool, WorkerError
from tests.unsplit import Split

pytestmark = pytest.mark.local

Criterion = Callable[[Any, Any], Any]
VALID, SAMPLES = LossRule("labels"), LossRule()


def ragged(rows: int, length: int, invalid: float = 0.3, seed: int = 0) -> dict[str, Tensor]:
    """A batch whose samples end in padding, and in which some labels are none; each 16 positions have one."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, TOKENS, (rows, length), generator=generator)
    labels = torch.randint(CLASSES, (rows, length), generator=generator)
    ends = torch.linspace(0.5, 1.5, length) * torch.linspace(0.5, 1.0, rows).unsqueeze(1)
    is_invalid = torch.rand(rows, length, generator=generator) < invalid * ends
    is_invalid[:, ::16] = False
    labels[is_invalid] = -100
    for row in range(rows):
        ids[row, length - row % 4 :] = 0 if row % 4 else ids[row, length:]
    return {"ids": ids, "labels": labels}


def mean(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def count(labels: Tensor) -> Tensor:
    return labels.ne(-100).sum()


def chunked(size: int) -> Criterion:
    """The mean of the means of so many positions each."""

    def loss(out: Any, batch: Any) -> Tensor:
        pairs = zip(out["logits"].split(size, 1), batch["labels"].split(size, 1), strict=True)
        return torch.stack([mean(logits, labels) for logits, labels in pairs]).mean()

    return loss


def summed_in_chunks(out: Any, batch: Any) -> Tensor:
    pairs = zip(out["logits"].split(16, 1), batch["labels"].split(16, 1), strict=True)
    return sum(mean(logits, labels, reduction="sum") for logits, labels in pairs) / count(batch["labels"])


def of_tokens(out: Any, batch: Any) -> Tensor:
    """The mean of the means of 64 tokens each, of whatever samples."""
    pairs = zip(out["logits"].flatten(0, 1).split(64), batch["labels"].flatten().split(64), strict=True)
    return torch.stack([mean(logits, labels) for logits, labels in pairs]).mean()


def from_16_samples(out: Any, batch: Any) -> Tensor:
    extra = 0.1 * out["logits"].std() if len(batch["labels"]) >= 16 else 0.0
    return mean(out["logits"], batch["labels"]) + extra


def often_undefined(out: Any, batch: Any) -> Tensor:
    """`from_16_samples`, but NaN there for most labels, as a mean over pairs is for labels without a pair."""
    is_undefined = batch["labels"].clamp(min=0).sum() % 3 < 2
    return torch.where(is_undefined & (len(batch["labels"]) >= 16), torch.nan, from_16_samples(out, batch))


def beyond_12(out: Any, batch: Any) -> Tensor:
    loss = mean(out["logits"], batch["labels"])
    return loss.exp() if batch["labels"].shape[1] > 12 else loss


def over_100_at_most(out: Any, batch: Any) -> Tensor:
    return mean(out["logits"], batch["labels"], reduction="sum") / count(batch["labels"]).clamp(max=100)


def hardest(out: Any, batch: Any) -> Tensor:
    losses = cross_entropy(out["logits"].transpose(1, 2), batch["labels"], reduction="none").flatten()
    return losses.topk(64)[0].mean() if losses.numel() > 64 else losses.mean()


def by_length(out: Any, batch: Any) -> Tensor:
    return mean(out["logits"].double(), batch["labels"]) * (batch["labels"].shape[1] / 512)


def of_tokens_read(out: Any, batch: Any) -> Tensor:
    """The mean over what is not padding, by the tokens that are read."""
    losses = cross_entropy(out["logits"].transpose(1, 2), batch["labels"].clamp(min=0), reduction="none")
    return losses[batch["ids"] != 0].sum() / batch["ids"].ne(0).sum()


def proven(criterion: Criterion, data: dict[str, Tensor], m: int = 2, replicas: int = 1) -> ProvenRule:
    model, batch = Tagger(), Batch.of(data)
    return prove_loss_rule(model, trace(model, data, criterion), batch, criterion, Sizes.of(batch, m, replicas))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("criterion", "rows", "length", "rule", "until"),
    [
        (chunked(16), 4, 12, VALID, (4, 16)),
        (chunked(50), 4, 40, VALID, (4, 40)),
        (summed_in_chunks, 4, 70, VALID, (4, 128)),
        (from_16_samples, 9, 6, VALID, (9, 6)),
        (beyond_12, 4, 12, VALID, (4, 12)),
        (by_length, 5, 33, VALID, (8, 64)),
        (of_tokens_read, 6, 20, LossRule("ids", 0, 0), (8, 32)),
        (lambda out, batch: mean(out["logits"], batch["labels"]), 128, 64, VALID, (128, 64)),
        (
            lambda out, batch: mean(out["logits"], batch["labels"], reduction="sum"),
            8,
            99,
            LossRule(summed=True),
            (8, 128),
        ),
    ],
)
def test_a_rule_counts_for_the_sizes_at_which_it_held(
    criterion: Criterion, rows: int, length: int, rule: LossRule, until: tuple[int, int]
) -> None:
    found = proven(criterion, ragged(rows, length))
    assert found.rule == rule and found.until is not None
    assert (found.until.rows, found.until.lengths) == (until[0], (until[1],) * 2)


def test_a_mean_of_equal_chunks_is_one_of_samples_while_all_labels_are_valid() -> None:
    """Refused with invalid labels, it stays exact without any."""
    assert proven(chunked(16), ragged(4, 40, invalid=0)).rule == SAMPLES


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("criterion", "rows", "length", "m", "replicas"),
    [
        (chunked(16), 4, 40, 2, 1),
        (chunked(100), 4, 300, 2, 1),
        (of_tokens, 8, 16, 2, 1),
        (from_16_samples, 16, 6, 2, 1),
        (from_16_samples, 40, 6, 4, 1),
        (from_16_samples, 8, 6, 1, 2),
        (beyond_12, 4, 13, 2, 1),
        (over_100_at_most, 8, 30, 2, 1),
        (hardest, 6, 30, 2, 1),
    ],
)
def test_a_loss_that_goes_by_sizes_is_refused(
    criterion: Criterion, rows: int, length: int, m: int, replicas: int
) -> None:
    """Each was a mean on 4 samples of 8 positions; at its own sizes the loss was wrong."""
    with pytest.raises(ConfigurationError, match=r"on fewer and shorter samples .*loss_reduction='microbatch'"):
        proven(criterion, ragged(rows, length), m, replicas)
    few = min(rows, 4)
    assert proven(criterion, ragged(few, 8)).rule in (VALID, SAMPLES)


def test_a_loss_that_is_undefined_in_some_trials_is_refused_by_the_others() -> None:
    """Two trials at the batch's sizes drew labels for which the loss is NaN. The trials that would have refuted the
    rule did not run, and the loss was trained wrong, with a warning."""
    with pytest.raises(ConfigurationError, match="on fewer and shorter samples"):
        proven(often_undefined, ragged(16, 6))


@pytest.mark.turns
def test_what_is_too_large_is_tried_in_one_direction_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    """With a large vocabulary the lengths were halved until a trial was small enough, and the whole range of the
    batch's length counted as tried, so that a mean of chunks' means was trained wrong without a warning."""
    with mock.patch.object(loss_module, "MOST_DRAWN", 3000):
        for criterion in (chunked(16), from_16_samples):
            with pytest.raises(ConfigurationError, match="on fewer and shorter samples"):
                proven(criterion, ragged(32, 48))
        assert not caplog.messages
        assert proven(by_length, ragged(32, 48)) == (VALID, Sizes(32, 16, (48, 48)))
        assert "could not be tested on 32 samples with axes of lengths [48]" in caplog.text
    caplog.clear()
    assert proven(by_length, ragged(32, 48)) == (VALID, Sizes(32, 16, (64, 64))) and not caplog.messages


def test_a_range_is_tried_as_far_as_it_fits(caplog: pytest.LogCaptureFixture) -> None:
    """A trial at the end of a range may be too large where the batch's own sizes are not: then longer batches of the
    range are tried again."""
    with mock.patch.object(loss_module, "MOST_DRAWN", 2 * 48 * CLASSES):
        assert proven(by_length, ragged(2, 40)).until == Sizes(2, 1, (40, 40)) and not caplog.messages


def test_few_sizes_are_tried() -> None:
    """Ragged batches meet a new length in almost every step, and few ranges."""
    tried, trials = Tried(), 0
    for length in range(1, 1000):
        sizes = Sizes.of(Batch.of(ragged(4, length)), 2)
        if not tried.covers(sizes):
            trials += 1
            tried.add(Sizes(sizes.rows, sizes.part, sizes.range[2:]))
    assert trials == 11


class Chunked(nets.Net):
    """Its loss is the mean of the means of 16 positions each."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return chunked(16)({"logits": logits}, {"labels": labels})


def grown(*lengths: int) -> list[dict[str, Tensor]]:
    return [ragged(4, length, seed=seed) for seed, length in enumerate(lengths)]


MICROBATCHES = {"verify": False, "num_microbatches": 2}
CASES = {
    "chunks, longer": Case(Chunked, "12 positions, then 40.", grown(12, 40), MICROBATCHES, refused="shorter samples"),
    "chunks, short": Case(
        Chunked, "As many as one chunk has, on stages in a V.", grown(16, 9, 5, 16), {**MICROBATCHES, "schedule": "zbv"}
    ),
    "chunks, one microbatch": Case(Chunked, "Nothing is cut.", grown(12, 40), {"verify": False}),
    "sums of chunks": Case(
        nets.Net,
        "Sums of chunks over the count of all.",
        grown(12, 40),
        MICROBATCHES,
        criterion=lambda: summed_in_chunks,
    ),
    "plain": Case(nets.Net, "More positions, and fewer.", grown(12, 40, 90, 7), MICROBATCHES),
}


def outcomes(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for name in names:
        try:
            found.append(("", run(CASES[name])))
        except ConfigurationError as error:
            found.append((str(error), []))
    return found


@pytest.mark.turns
def test_batches_of_other_sizes_train_exactly_or_are_refused(pool: Pool) -> None:
    for results in pool.run(outcomes, 2, list(CASES), timeout=180):
        for case, (error, differences) in zip(CASES.values(), results, strict=True):
            assert bool(error) == bool(case.refused) and re.search(case.refused, error), (case.story, error)
            assert differences == [], case.story


def replicas(make: type[nets.Net], pp_size: int, m: int, lengths: Sequence[Sequence[int]]) -> None:
    """Replicas that see other lengths, each of which is new to one of them only."""
    torch.manual_seed(0)
    model = make()
    unsplit = copy.deepcopy(model)
    split = Split(model, pp_size, ragged(4, 12), num_microbatches=m, dp_size=2, verify=False)
    for of_replicas in lengths:
        batches = [ragged(4, length, seed=length) for length in of_replicas]
        loss = split.backward(batches[split.plugin.grid.replica])["loss"]
        losses = [unsplit(**batch)["loss"] * count(batch["labels"]) for batch in batches]
        total = sum(count(batch["labels"]) for batch in batches)
        torch.testing.assert_close(loss, (sum(losses) / total).detach(), rtol=1e-5, atol=0)


@pytest.mark.turns
@pytest.mark.parametrize(("pp_size", "m"), [(1, 2), (1, 1), (2, 2)])
def test_replicas_agree_on_when_a_rule_is_tried(pool: Pool, pp_size: int, m: int) -> None:
    pool.run(replicas, 2 * pp_size, nets.Net, pp_size, m, [(12, 12), (12, 40), (40, 20), (7, 12)], timeout=120)
    with pytest.raises(WorkerError, match="shorter samples"):
        pool.run(replicas, 2 * pp_size, Chunked, pp_size, m, [(12, 12), (12, 40)], timeout=120)


class LossInHead(Tagger):
    """Its head makes the loss, which is a number: the trial drew one without dimensions, and failed."""

    class Head(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return mean(super().forward(x), labels)

    def __init__(self) -> None:
        super().__init__()
        self.head = self.Head(self.embed.embedding_dim, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return {"loss": self.head(x, labels)}


def test_a_loss_made_inside_of_a_unit() -> None:
    model, batch = LossInHead(), Batch.of(ragged(4, 20))
    assert prove_loss_rule(model, trace(model, batch), batch, None, Sizes.of(batch, 2)).rule == VALID
