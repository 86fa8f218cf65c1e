"""Tests of verified loss rules: losses that follow a rule only on some batches, and custom normalizers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, cross_entropy, dropout, normalize

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import key_of
from pipeshard.batch.read import read_batch
from pipeshard.engine import loss as engine_loss
from pipeshard.engine.loss import LossRule, LossRules, ProvenRule
from pipeshard.engine.loss_sizes import Sizes
from pipeshard.engine.refusals import refuse_criterion
from pipeshard.errors import ConfigurationError
from pipeshard.graph import preserve
from pipeshard.graph.trace import trace
from tests.parity.build import batch as make_batch
from tests.parity.build import build
from tests.parity.entries import find
from tests.pool import Pool
from tests.rules import find_loss_rule
from tests.unsplit import Split, gradient_error, largest_error

pytestmark = pytest.mark.local

H, TOKENS, CLASSES = 8, 23, 3
WEIGHTS = torch.tensor([1.0, 5.0, 10.0])
LAST_BITS = itertools.cycle((1.0, 1.0 + 3e-7))
Criterion = Callable[[Any, Any], Any]


class Tagger(nn.Module):
    """A tagger of tokens, or of whole samples; its loss is a criterion's."""

    def __init__(self, of_samples: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, H), nn.Linear(H, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(3))
        self.of_samples = of_samples

    def forward(self, ids: Tensor, **beside: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return {"logits": self.head(x.mean(1) if self.of_samples else x)}


def tokens(rows: int = 4, seed: int = 0, **beside: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(TOKENS, (rows, 6), generator=generator)
    return {"ids": ids, "labels": torch.randint(CLASSES, (rows, 6), generator=generator), **beside}


def samples(*labels: float) -> dict[str, Tensor]:
    return {"ids": tokens(len(labels))["ids"], "labels": torch.tensor(labels)}


def tagging(**options: Any) -> Criterion:
    return lambda out, batch: cross_entropy(out["logits"].flatten(0, -2), batch["labels"].flatten(), **options)


def masked(out: Any, batch: Any) -> Tensor:
    losses = cross_entropy(out["logits"].transpose(1, 2), batch["labels"], reduction="none")
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def weighed(out: Any, batch: Any) -> Tensor:
    return (cross_entropy(out["logits"], batch["labels"], reduction="none") * batch["weight"]).mean()


def hinge(mean: bool) -> Criterion:
    def loss(out: Any, batch: Any) -> Tensor:
        margins = torch.relu(1e-3 - out["logits"][:, 0] * (2 * batch["labels"] - 1))
        return margins.mean() if mean else margins.sum()

    return loss


def contrastive(out: Any, batch: Any) -> Tensor:
    x = normalize(out["logits"], dim=-1)
    return cross_entropy(x @ x.T, torch.arange(len(x)))


def focal(out: Any, batch: Any) -> Tensor:
    losses = cross_entropy(out["logits"], batch["labels"], reduction="none")
    weight = (1 - (-losses).exp()).square()
    return (weight * losses).sum() / weight.sum()


def slightly(out: Any, batch: Any) -> Tensor:
    return tagging()(out, batch) + 1e-2 * contrastive(out, batch)


def paired(out: Any, batch: Any) -> Tensor:
    half = len(out["logits"]) // 2
    assert 2 * half == len(out["logits"])
    first, second = out["logits"].split(half)
    return cross_entropy(first, batch["labels"][:half]) + (first - second).square().mean()


def in_probabilities(out: Any, batch: Any) -> Tensor:
    return binary_cross_entropy(out["logits"][:, 0], batch["labels"].float())


def flooded(level: float) -> Criterion:
    return lambda out, batch: (tagging()(out, batch) - level).abs() + level


def noisy(out: Any, batch: Any) -> Tensor:
    return (dropout(out["logits"], 0.5) - torch.randn_like(out["logits"])).square().mean()


def atomic(out: Any, batch: Any) -> Tensor:
    """As a GPU's kernel that adds in the order in which its blocks end: the last bits differ between two calls."""
    return tagging()(out, batch) * next(LAST_BITS)


def rounding(out: Any, batch: Any) -> Tensor:
    """As a kernel with TF32: samples are rounded differently in batches of other sizes."""
    return tagging()(out, batch) * (1 + 1e-3 * len(batch["ids"]) * torch.backends.cudnn.allow_tf32)


class WarmingUp:
    """A criterion that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, out: Any, batch: Any) -> Tensor:
        self.calls += 1
        return tagging()(out, batch) * (1 + 1e-4 * self.calls)


def rule(criterion: Criterion, batch: Any, of_samples: bool = False, model: Tagger | None = None) -> LossRule:
    model = model or Tagger(of_samples)
    return find_loss_rule(model, trace(model, batch, criterion), read_batch(model, batch), criterion)


MIXED, UNIFORM = samples(0, 1, 2, 2, 1, 0), samples(1, 1)
ONES = torch.ones(4, 6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("criterion", "batch", "expected"),
    [
        (tagging(label_smoothing=0.1), tokens(), LossRule("labels")),
        (tagging(), samples(1, 1), LossRule("labels")),
        (tagging(reduction="sum"), tokens(1), LossRule(summed=True)),
        (masked, tokens(mask=ONES), LossRule("mask", adds=True)),
        (masked, tokens(2, mask=torch.ones(2, 6, dtype=torch.long)), LossRule("mask", adds=True)),
        (weighed, samples(1, 1) | {"weight": torch.ones(2)}, LossRule()),
        (hinge(mean=True), MIXED, LossRule()),
        (hinge(mean=False), MIXED, LossRule(summed=True)),
        (in_probabilities, samples(0, 1, 1), LossRule()),
        (noisy, MIXED, LossRule()),
    ],
    ids=["smoothing", "uniform", "sum", "mask", "integers", "weights", "hinge", "hinge-sum", "probabilities", "noise"],
)
def test_a_rule_that_holds_is_found(criterion: Criterion, batch: dict[str, Tensor], expected: LossRule) -> None:
    assert rule(criterion, batch, batch["labels"].ndim == 1) == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("batch", [MIXED, UNIFORM, samples(0)], ids=["mixed", "uniform", "one"])
@pytest.mark.parametrize("criterion", [tagging(weight=WEIGHTS), contrastive, focal, slightly])
def test_a_guess_is_refused(criterion: Criterion, batch: dict[str, Tensor]) -> None:
    """Class weights passed for a mean over samples where the first microbatch had one class or few samples, and zeros
    of a hinge for anything; the rest was trained on as a mean, with a warning."""
    with pytest.raises(ConfigurationError, match=r"to be a mean or sum over samples .* return .sum, count"):
        rule(criterion, batch, of_samples=True)


class Offset(Tagger):
    """A tagger with an offset of all logits of a sample, as in a dueling head."""

    def __init__(self) -> None:
        super().__init__(of_samples=True)
        self.offset = nn.Linear(H, 1)

    def forward(self, ids: Tensor, **beside: Tensor) -> dict[str, Tensor]:
        offset = self.offset(self.embed(ids).mean(1))
        return {"logits": super().forward(ids)["logits"] + offset, "offset": offset}


def of_offset(out: Any, batch: Any) -> Tensor:
    """A cross entropy plus a small term that is always 1e-4, and whose gradient is divided by a mean over the batch."""
    squares = out["offset"].square().mean()
    return tagging()(out, batch) + 1e-4 * squares / squares.detach()


def test_an_offset_of_all_logits_has_no_gradient() -> None:
    """A cross entropy was "no mean or sum" if the model adds a value per sample to all logits: the value's gradient is
    0 up to rounding, and this rounding was compared with itself. A small gradient of such a value is no rounding."""
    assert rule(tagging(), MIXED, model=Offset()) == LossRule("labels")
    with pytest.raises(ConfigurationError, match="to be a mean or sum over samples"):
        rule(of_offset, MIXED, model=Offset())


def test_a_criterion_whose_last_bits_differ_between_calls_is_no_counter() -> None:
    """A cross entropy of images adds in any order on a GPU, so now and then a step was refused: "the criterion returned
    a different loss for the same input"."""
    assert rule(atomic, tokens()) == LossRule("labels")
    with pytest.raises(ConfigurationError, match="a different loss for the same input"):
        rule(WarmingUp(), tokens())


def test_a_criterion_is_tried_without_tf32() -> None:
    """A perceptual loss with convolutions was "no mean or sum" on a GPU: TF32 rounds other batch sizes differently."""
    assert torch.backends.cudnn.allow_tf32
    assert rule(rounding, tokens()) == LossRule("labels")
    assert torch.backends.cudnn.allow_tf32


def test_a_criterion_of_pairs_of_samples_is_refused_with_the_remedy() -> None:
    """Its trial on one sample failed in a trace, whose error was raised: it named neither what for nor what to do."""
    with pytest.raises(ConfigurationError, match=r"cannot compute the exact loss of a batch .* or use one microbatch"):
        rule(paired, samples(0, 1, 2, 2), of_samples=True)


@pytest.mark.parametrize("level", [2.0, 0.3, 0.02])
def test_a_loss_that_bends_where_it_is_small_is_refused(level: float) -> None:
    """Flooding, |loss - 0.02| + 0.02, is a mean as long as nothing has been learnt, which random results have not:
    later some microbatches were pushed up while others were pushed down, where the whole batch is one or the other."""
    with pytest.raises(ConfigurationError, match="to be a mean or sum over samples"):
        rule(flooded(level), MIXED, of_samples=True)


def quotient(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Cross entropy with class weights: divided by the sum of those of the labels."""
    total = tagging(weight=WEIGHTS, reduction="sum")(out, batch)
    return total, WEIGHTS[batch["labels"].clamp(min=0)].mul(batch["labels"] >= 0).sum()


def boxes(out: Any, batch: Any) -> tuple[Tensor, int]:
    """A sum that is not zero where there is nothing to count, as of a detector's background."""
    return out["logits"].square().sum() + tagging(reduction="sum")(out, batch), int((batch["labels"] > 0).sum())


def counting() -> list[str]:
    """Steps with (sum, count) and with the plain mean that is the same, in one process; and what is refused."""
    found = []
    for criterion, m in ((quotient, 2), (boxes, 4), (boxes, 1)):
        torch.manual_seed(0)
        model = Tagger()
        unsplit = copy.deepcopy(model)
        split = Split(model, dist.get_world_size(), tokens(), num_microbatches=m)
        for seed in range(2):
            batch = tokens(seed=seed)
            batch["labels"][1, 2:], batch["labels"][3] = -100, 0
            for _ in range(2):  # gradients add up
                total, count = criterion(unsplit(**batch), batch)
                (total / count).backward()
                run = split.booster.execute_pipeline
                out = run(iter([batch]), split.model, lambda o, b, c=criterion: c(o, b), split.optimizer)
            error = largest_error([gradient_error(split, unsplit), float(out["loss"] / (total / count).detach()) - 1])
            if not error < 1e-6:
                found.append(f"{criterion.__name__} m={m} step {seed}: {error}")
            split.optimizer.zero_grad()
            unsplit.zero_grad()
        if len(flows := split.model.pipeline.traces._flows) > 2:
            found.append(f"a criterion that is made anew in each step is traced {len(flows)} times")
    return found


@pytest.mark.turns
def test_a_sum_and_a_count_are_exact(pool: Pool) -> None:
    """A weighted mean has a denominator of its own, which no rule knows: the criterion can give it."""
    assert pool.run(counting, 2) == [[], []]


def two_means(out: Any, batch: Any) -> Tensor:
    return tagging()(out, batch) + 0.1 * out["logits"].logsumexp(-1).square().mean()


def two_sums(out: Any, batch: Any) -> Tensor:
    entropies, z = tagging(reduction="sum")(out, batch), out["logits"].logsumexp(-1).square().sum()
    return entropies / batch["criterion.tokens"] + 0.1 * z / batch["criterion.positions"]


def summing_means() -> list[str]:
    """Where a sum of means differs from the unsplit batch's, if its counts are in the batch."""
    torch.manual_seed(0)
    model, found = Tagger(), []
    unsplit = copy.deepcopy(model)
    for seed in range(4):
        batch = tokens(seed=seed)
        batch["labels"][1, seed:], batch["labels"][3] = -100, -100
        counts = {"tokens": (batch["labels"] != -100).sum(), "positions": torch.tensor(batch["labels"].numel())}
        batch |= {f"criterion.{name}": count for name, count in counts.items()}
        if seed == 0:
            split = Split(model, dist.get_world_size(), batch, num_microbatches=4)
            with pytest.raises(ConfigurationError, match="return sums divided by the counts of the whole batch"):
                split.booster.execute_pipeline(iter([batch]), split.model, two_means, split.optimizer)
        expected = two_means(unsplit(batch["ids"]), batch)
        expected.backward()
        loss = split.booster.execute_pipeline(iter([batch]), split.model, two_sums, split.optimizer)["loss"]
        error = largest_error([gradient_error(split, unsplit), float(loss / expected.detach()) - 1])
        if not error < 1e-6:
            found.append(f"step {seed}: {error}")
        split.optimizer.zero_grad()
        unsplit.zero_grad()
    flows = split.model.pipeline.traces._flows
    of_sums = sum(len(of_mode) for mode, of_mode in flows.items() if mode[0] == key_of(two_sums))
    return found if of_sums == 1 else [*found, f"it was traced {of_sums} times"]


@pytest.mark.turns
def test_a_sum_of_means_is_exact_with_the_counts_of_the_batch(pool: Pool) -> None:
    """Distillation and z-losses have two counts, which no pair (sum, count) can express; the refusal named no way."""
    assert pool.run(summing_means, 2) == [[], []]


def refusals() -> list[str]:
    """What is refused in a step, on every rank, before anything is changed; afterwards steps go on."""
    torch.manual_seed(0)
    model, batch = Tagger(of_samples=True), samples(0, 1, 0, 1)
    split = Split(model, dist.get_world_size(), batch, num_microbatches=2)
    run = split.booster.execute_pipeline
    depends = lambda out, batch: (out["logits"].sum(), out["logits"].square().sum())  # noqa: E731
    told = []
    for criterion in (tagging(weight=WEIGHTS), contrastive, depends):
        with pytest.raises(ConfigurationError) as caught:
            run(iter([batch]), split.model, criterion, split.optimizer)
        told.append(str(caught.value)[:39])
        with torch.no_grad(), pytest.raises(ConfigurationError):
            run(iter([batch]), split.model, criterion, split.optimizer)
        with torch.no_grad():
            run(iter([batch]), split.model, criterion, None, return_loss=False, return_outputs="logits")
    if any(p.grad is not None for p in split.held.values()):
        told.append("a gradient")
    uneven = tagging(weight=torch.tensor([1.0, 1.0, 9.0]))
    run(iter([batch]), split.model, uneven, split.optimizer)  # no label of the class that weighs more
    with pytest.raises(ConfigurationError):
        run(iter([samples(0, 2, 0, 1)]), split.model, uneven, split.optimizer)
    run(iter([batch]), split.model, tagging(), split.optimizer)
    return told


@pytest.mark.turns
def test_what_is_no_sum_is_refused_on_every_rank(pool: Pool) -> None:
    """It was found on the last stage, and only for the labels of the first batch."""
    others, counted = "the loss of Tagger could not be verifie", "the loss of Tagger is a pair (sum, coun"
    assert pool.run(refusals, 2) == [[others, others, counted]] * 2


@pytest.mark.turns
def test_a_sum_of_means_is_split_where_all_labels_are_valid() -> None:
    """LUKE's loss is that of words and that of entities, each divided by its own labels: with some that are none the
    average over samples was taken all the same, and 0.2 % off."""
    (entry,) = find("masked-lm/luke")
    model = build(entry)
    data = make_batch(entry, model)
    valid = {name: leaf.clamp(min=0) if "label" in name else leaf for name, leaf in data.items()}
    assert found(model, Batch.of(valid)) == LossRule()
    with pytest.raises(ConfigurationError, match="to be a mean or sum over samples or valid labels"):
        found(model, Batch.of(data))


class Counting(Tagger):
    """Changes itself in each forward: a counter, a list, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards, self.seen = 0, [0]
        self.register_buffer("count", torch.zeros(()))

    def forward(self, ids: Tensor, **beside: Tensor) -> dict[str, Tensor]:
        self.forwards += 1
        self.seen = [*self.seen, self.forwards]
        self.count += 1
        return super().forward(ids, **beside)


def test_trials_of_a_loss_look_at_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 35 trials walked through all modules: the first step of timm's res2net took 9 s instead of 3. Each still
    puts back what its forward has changed."""
    model, batch, looks = Counting(), tokens(), []
    flow = trace(model, batch, tagging())
    look = preserve.Before.__init__

    def counted(before: Any, *args: Any) -> None:
        looks.append(args)
        look(before, *args)

    monkeypatch.setattr(preserve.Before, "__init__", counted)
    assert find_loss_rule(model, flow, Batch.of(batch), tagging()).path == "labels"
    assert 0 < len(looks) < 10
    assert (model.forwards, model.seen, float(model.count)) == (0, [0], 0.0)


def found(model: nn.Module, batch: Batch) -> LossRule:
    return find_loss_rule(model, trace(model, batch), batch, None)


def test_criteria_are_told_apart() -> None:
    """One that cannot be hashed was a TypeError; a lambda in a loop was a new criterion in each step."""

    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    one, other = Unhashable(), Unhashable()
    assert key_of(one) == key_of(one) != key_of(other)
    made = [lambda out, batch, scale=scale: out * scale for scale in (1.0, 1.0, 2.0)]
    assert key_of(made[0]) == key_of(made[1]) != key_of(made[2])
    assert hash(key_of(made[0])) == hash(key_of(made[1]))
    captured = [hinge(mean) for mean in (True, True, False)]
    assert key_of(captured[0]) == key_of(captured[1]) != key_of(captured[2])


class Padded(Tagger):
    """Runs its last layer only if the batch is padded. Each sample must have as many ends (token 1), as in BART."""

    def forward(self, ids: Tensor, mask: Tensor, **beside: Tensor) -> dict[str, Tensor]:
        ends = ids.eq(1).sum(1)
        if bool(ends.ne(ends[0]).any()):
            raise ValueError("all samples must have the same number of ends")
        x = self.embed(ids)
        for layer in self.layers[:2] if bool(mask.all()) else self.layers:
            x = x + torch.tanh(layer(x))
        return {"logits": self.head(x)}


@pytest.mark.parametrize("padded", [1, -1])
def test_samples_of_a_trial_may_take_another_branch(padded: int) -> None:
    """The first step of a model that branches on whether the batch is padded raised a TraceError: the trial ran a few
    samples, none of them padded, along the trace of all samples."""
    batch = tokens(8, mask=torch.ones(8, 6, dtype=torch.long))
    batch["ids"] = batch["ids"].clamp(min=2)
    batch["ids"][:, -1] = 1
    batch["mask"][padded, 3:] = 0
    assert rule(tagging(), batch, model=Padded()) == LossRule("labels")


def scaled(out: Any, batch: Any, *, scale: float = 1.0) -> Any:
    return out * scale


def test_partials_are_told_apart() -> None:
    """A partial that is created in each step, and a function with a default by keyword, were new in each step."""
    made = [partial(scaled, scale=scale) for scale in (1.0, 1.0, 2.0)]
    assert key_of(made[0]) == key_of(made[1]) != key_of(made[2])
    assert hash(key_of(made[0])) == hash(key_of(made[1]))
    assert key_of(partial(scaled, 1)) != key_of(partial(scaled)) != key_of(partial(tagging(), scale=1.0))
    defaults = [lambda out, batch, *, scale=scale: out * scale for scale in (1.0, 1.0, 2.0)]
    assert key_of(defaults[0]) == key_of(defaults[1]) != key_of(defaults[2])


def active(out: Any, batch: Any) -> Tensor:
    """The loss of BERT's taggers, which omits padding by the mask and other positions by their label."""
    is_active = batch["attention_mask"].flatten() == 1
    labels = torch.where(is_active, batch["labels"].flatten(), torch.tensor(-100))
    return cross_entropy(out["logits"].flatten(0, 1), labels)


def twice_masked(out: Any, batch: Any) -> Tensor:
    losses = cross_entropy(out["logits"].transpose(1, 2), batch["labels"], reduction="none")
    counted = batch["attention_mask"] * (batch["labels"] != -100)
    return (losses * counted).sum() / counted.sum()


@pytest.mark.parametrize("criterion", [active, twice_masked])
@pytest.mark.parametrize("lengths", [[6, 6, 6, 6], [6, 2, 3, 6]], ids=["full", "padded"])
def test_labels_of_padding_that_the_mask_omits_are_not_counted(criterion: Criterion, lengths: list[int]) -> None:
    """A tagger's labels were padded with 0 (class "O"), and its loss omitted padding by the mask: the rule counted the
    labels of padding, so short samples weighed too much in each step."""
    found = rule(criterion, tokens(attention_mask=of_lengths(lengths)))
    batch = tokens(seed=1, attention_mask=of_lengths([6, 6, 1, 2]))
    batch["labels"] *= batch["attention_mask"]
    batch["labels"][0, 0] = -100
    assert found.shares(Batch.of(batch).split(num_microbatches=2)) == pytest.approx([11 / 14, 3 / 14])


def test_masks_of_full_samples_are_drawn_although_0_is_a_special_token() -> None:
    """BioGPT's first token is 0, so trials drew no 0 for a mask of ones: a loss that omits padding by its mask had a
    rule that counts padding."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BioGptForTokenClassification(transformers.BioGptConfig(vocab_size=TOKENS, **sizes))
    data = tokens()
    full = {"input_ids": data["ids"], "attention_mask": of_lengths([6, 6, 6, 6]), "labels": data["labels"].clamp(max=1)}
    assert found(model, read_batch(model, full)) == LossRule("labels", masked=True)


def of_lengths(lengths: list[int]) -> Tensor:
    return (torch.arange(6) < torch.tensor(lengths)[:, None]).long()


def test_a_criterion_with_parameters_is_refused() -> None:
    """Uncertainty weighting, ArcFace: nothing trained them, silently."""
    criterion = nn.Module()
    criterion.scale = nn.Parameter(torch.zeros(()))
    with pytest.raises(ConfigurationError, match=r"parameters of its own \(the first is scale\)"):
        refuse_criterion(criterion, Tagger())
    refuse_criterion(criterion.requires_grad_(False), Tagger())


@pytest.mark.turns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_16_bits_do_not_hide_a_part_of_the_loss_that_is_not_a_sum(dtype: torch.dtype) -> None:
    # LUKE's two kinds of labels, in bf16: the loss was 1 % off a mean over one of them, which 16 bits could not tell,
    # and trained with gradients that were 75 % off.
    model, batch = Tagger().to(dtype), tokens()
    mean = tagging()

    def spread(out: Any, batch: Any) -> Tensor:
        return mean(out, batch) * (1 + 0.01 * out["logits"].std().tanh())

    def lowered(out: Any, batch: Any) -> Tensor:
        return mean({"logits": out["logits"].to(torch.bfloat16)}, batch)

    def rule(criterion: Criterion) -> LossRule:
        sample = read_batch(model, batch)
        return find_loss_rule(model, trace(model, sample, criterion), sample, criterion)

    assert rule(mean) == rule(lowered) == LossRule("labels")
    with pytest.raises(ConfigurationError, match="loss_reduction='microbatch'"):
        rule(spread)


def per_object(out: Any, batch: Any) -> Tensor:
    """A detector's loss: all places count, divided by the number of objects."""
    objects = (batch["labels"] > 0).float()
    places = torch.nn.functional.binary_cross_entropy_with_logits(out["logits"][..., 0], objects, reduction="sum")
    return places / objects.sum().clamp(min=1)


def at_least_one(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return tagging(reduction="sum")(out, batch), (batch["labels"] != -100).sum().clamp(min=1)


def test_a_loss_of_places_that_are_not_counted_is_refused() -> None:
    """A loss over all anchors, divided by the number of objects, was taken for a mean over objects: a microbatch
    without an object was left out, silently."""
    with pytest.raises(ConfigurationError, match="could not be verified"):
        rule(per_object, tokens())


def per_sample(out: Any, batch: Any) -> Tensor:
    """The mean loss of each sample, NaN for a sample without a valid label."""
    mask = batch.get("mask", batch["labels"].ne(-100).float())
    losses = cross_entropy(out["logits"].transpose(1, 2), batch["labels"], reduction="none")
    return (losses * mask).sum(1) / mask.sum(1)


def of_labelled(out: Any, batch: Any) -> Tensor:
    return per_sample(out, batch)[batch["labels"].ne(-100).any(1)].mean()


def of_nonempty(out: Any, batch: Any) -> Tensor:
    return per_sample(out, batch).nan_to_num().sum() / batch["mask"].any(1).sum()


def of_present(out: Any, batch: Any) -> Tensor:
    """The mean over the samples with any target: stacking no samples raises an error."""
    pairs = zip(out["logits"].mean(1), batch["criterion.y"], strict=True)
    return torch.stack([(x - y).square().nanmean() for x, y in pairs if not y.isnan().all()]).mean()


def of_all(out: Any, batch: Any) -> Tensor:
    return per_sample(out, batch).nan_to_num().mean()


EMPTY = {"labels": torch.tensor([[0, 1, 2, -100, 1, 1], [-100] * 6, [1, 2, 0, 0, 2, 1], [2, 2, 1, 0, 1, -100]])}
PADDED = {"mask": torch.ones(4, 6) * (torch.arange(6) < 4)}
UNMEASURED = {"criterion.y": torch.tensor([[0.5, torch.nan, 2.0], [1.0, 0.2, 0.4], [torch.nan, 0.7, 1.5], [0.1, 2, 3]])}


@pytest.mark.parametrize(
    ("criterion", "beside"),
    [
        (lambda out, batch: per_sample(out, batch).nanmean(), EMPTY),
        (of_labelled, EMPTY),
        (of_nonempty, PADDED),
        (of_nonempty, {"mask": PADDED["mask"].long()}),
        (of_present, UNMEASURED),
    ],
    ids=["nanmean", "labelled", "mask", "integers", "targets"],
)
def test_a_mean_over_samples_that_have_labels_is_refused(criterion: Criterion, beside: dict[str, Tensor]) -> None:
    """No trial had a sample without a valid label: a mean that omits such samples was taken for one over all, and
    weighted the other samples of their microbatch too little, or was NaN."""
    with pytest.raises(ConfigurationError, match="could not be verified"):
        rule(criterion, tokens() | beside)


@pytest.mark.parametrize("beside", [EMPTY, PADDED], ids=["labels", "mask"])
def test_a_mean_over_samples_may_count_those_without_labels(beside: dict[str, Tensor]) -> None:
    assert rule(of_all, tokens() | beside) == LossRule()


def test_a_count_with_a_lower_bound_is_refused() -> None:
    """Each microbatch without a valid label added 1 to the count, and made the gradients too small, silently."""
    with pytest.raises(
        ConfigurationError, match=r"samples without valid labels the count is 1.*remove the lower bound"
    ):
        rule(at_least_one, tokens())  # type: ignore[arg-type]
    counted = rule(lambda out, batch: (at_least_one(out, batch)[0], (batch["labels"] != -100).sum()), tokens())  # type: ignore[arg-type, return-value]
    assert counted.counted


def masked_at_least_one(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
    losses = cross_entropy(out["logits"].transpose(1, 2), batch["labels"], reduction="none")
    return (losses * batch["mask"]).sum(), batch["mask"].sum().clamp(min=1)


def at_least_one_word(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return tagging(reduction="sum", ignore_index=0)(out, batch), (batch["labels"] != 0).sum().clamp(min=1)


@pytest.mark.parametrize("criterion", [masked_at_least_one, at_least_one_word])
def test_a_lower_bound_of_a_count_by_mask_or_mark_is_refused(criterion: Criterion) -> None:
    """A count of a mask, or of labels that are not padding, had a lower bound: each microbatch without a position to
    count added 1 to the count, since only labels of -100 were tried."""
    with pytest.raises(ConfigurationError, match=r"without valid labels the count is 1.*remove the lower bound"):
        rule(criterion, tokens(mask=ONES[:4]))


class OfIds(Tagger):
    def forward(self, ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(ids)


@pytest.mark.parametrize("key", ["criterion.tags", 1])
def test_a_lower_bound_is_refused_whatever_the_name_of_the_labels(key: Any) -> None:
    """The lower bound was only looked for in leaves with "label" or "target" in their names: for the labels of a tuple,
    or tags, each microbatch without a label added 1 to the count."""

    def at_least_one(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
        total = tagging(reduction="sum", ignore_index=-1)(out, {"labels": batch[key]})
        return total, (batch[key] != -1).sum().clamp(min=1)

    batch = tokens()
    tags = batch.pop("labels").where(torch.arange(24).view(4, 6) % 5 > 0, -1)
    of_tags = (batch["ids"], tags) if key == 1 else batch | {key: tags}
    with pytest.raises(ConfigurationError, match=r"without valid labels the count is 1.*remove the lower bound"):
        rule(at_least_one, of_tags, model=OfIds())


@pytest.mark.parametrize("beside", ["labels", "target_mask"])
def test_labels_of_another_name_are_counted_beside_those_of_this_name(beside: str) -> None:
    """A mean over tags was refused if the batch had labels too, or a target_mask that the loss reads."""

    def of_tags(out: Any, batch: Any) -> Tensor:
        tags, mask = batch["criterion.tags"], batch.get("target_mask")
        return tagging()(out, {"labels": tags if mask is None else tags.where(mask >= 0, -100)})

    batch = tokens()
    tags = batch.pop("labels").where(torch.arange(24).view(4, 6) % 5 > 0, -100)
    batch |= {"criterion.tags": tags, beside: torch.ones_like(tags)}
    assert rule(of_tags, batch) == LossRule("criterion.tags")


def test_marks_that_a_mask_cannot_contain_are_not_tried() -> None:
    """Padding tokens of a large vocabulary raise an error when they are written to a mask of bytes."""

    def masked_sum(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
        losses = cross_entropy(out["logits"].transpose(1, 2), batch["labels"], reduction="none")
        return (losses * batch["mask"]).sum(), batch["mask"].sum()

    model = Tagger()
    model.config = SimpleNamespace(pad_token_id=50256)  # type: ignore[assignment]
    assert rule(masked_sum, tokens(mask=ONES.byte()), model=model).counted


def test_labels_that_are_positions_may_be_out_of_range_in_a_shorter_sample() -> None:
    """A user fine-tuned BERT on SQuAD 2, in which questions without an answer have the positions 0: with two of them
    among the tried samples, the answers of the shortened samples were ignored, and a random step refused the loss."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertForQuestionAnswering(transformers.BertConfig(vocab_size=TOKENS, **sizes))
    ends = torch.tensor([0, 9, 12, 15, 0, 10, 13, 8])
    ids = torch.arange(8 * 16).view(8, 16) % TOKENS
    batch = read_batch(model, {"input_ids": ids, "start_positions": (ends - 1).clamp(0), "end_positions": ends})
    assert find_loss_rule(model, trace(model, batch), batch, None) == LossRule()


def of_signals(out: Any, batch: Any) -> Tensor:
    return (out["logits"] - batch["signal"].abs()[..., None]).square().mean()


@pytest.mark.parametrize(("criterion", "expected"), [(tagging(), LossRule("labels")), (of_signals, LossRule())])
@pytest.mark.parametrize("shape", [(4, 6), (4, 1)])
@pytest.mark.filterwarnings("error:Casting complex values")
def test_a_batch_may_have_complex_tensors(criterion: Criterion, expected: LossRule, shape: tuple[int, int]) -> None:
    """A user trained on Fourier coefficients: trials took them for integers, and raised NotImplementedError."""
    assert rule(criterion, tokens(signal=torch.randn(shape, dtype=torch.complex64))) == expected


def test_a_loss_that_is_verified_again_for_its_values_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Tokens that stood twice at the end of a row were possible padding: steps took longer, without a message."""
    caplog.set_level("INFO", logger="pipeshard")
    model, data, rules = Tagger(), tokens(), LossRules()
    flow, proven = trace(model, data, tagging()), ProvenRule(LossRule("labels"), Sizes.of(Batch.of(data), 2))
    for largest in (70, 70, 90):
        data["labels"][0, 0] = largest
        rules.add("kind", proven, flow, Batch.of(data))
    (record,) = caplog.records
    assert record.getMessage().startswith("the loss was verified again") and record.getMessage().endswith(": labels")


def mean_times_count(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """A mean, turned into a sum."""
    count = (batch["labels"] != -100).sum()
    return tagging()(out, batch) * count, count


def mean_by_mask(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
    mask = (batch["labels"] != -100).float()
    losses = cross_entropy(out["logits"].transpose(1, 2), batch["labels"], reduction="none")
    return (losses * mask).sum() / mask.sum() * mask.sum(), mask.sum()


def with_an_empty_sample() -> None:
    data = tokens(seed=1)
    for criterion in (mean_times_count, mean_by_mask):
        torch.manual_seed(0)
        model = Tagger()
        split = Split(copy.deepcopy(model), dist.get_world_size(), tokens(), microbatch_size=1)
        data["labels"][3] = -100
        expected = tagging()(model(data["ids"]), data)
        expected.backward()
        result = split.booster.execute_pipeline(iter([data]), split.model, criterion, split.optimizer)
        torch.testing.assert_close(result["loss"], expected.detach())
        assert gradient_error(split, model) < 1e-5


@pytest.mark.turns
def test_a_sum_of_nothing_is_zero(pool: Pool) -> None:
    """A mean was turned into a sum by its count, as an error advised: a sample without a valid label made the sum
    NaN * 0, and all weights NaN."""
    pool.run(with_an_empty_sample, 2)


class OfNumbers(nn.Module):
    """Linear layers; its criterion divides by a number of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def summed(out: Tensor, batch: Any) -> Tensor:
    return out.square().sum() / batch["criterion.n"]


def numbered(n: int) -> dict[str, Tensor]:
    return {"x": torch.ones(4, H), "criterion.n": torch.tensor(n)}


def sums_of_many_kinds() -> list[float]:
    """The sum of squares in the losses of steps with two batches, of which one has a new number in each step."""
    torch.manual_seed(0)
    split = Split(OfNumbers(), 1, numbered(60), num_microbatches=2, verify=False)
    sums = []
    with mock.patch.object(engine_loss, "MOST_RULES", 3):
        for n in range(1, 8):
            batches = iter([numbered(60), numbered(n)])
            out = split.plugin.execute_pipeline(batches, split.model, summed, split.optimizer, num_batches=2)
            sums.append(float(out["loss"]) / (1 / 60 + 1 / n))
    return sums


def test_a_new_kind_of_loss_keeps_the_rules_of_the_step_s_other_batches(pool: Pool) -> None:
    """The 129th kind dropped all rules, also that of the other batch of its window: "the run changed state"."""
    ((first, *others),) = pool.run(sums_of_many_kinds, 1)
    assert len(others) == 6 and others == pytest.approx([first] * 6, rel=1e-6)
