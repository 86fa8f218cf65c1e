"""Tests of ragged batches: samples that are grouped by tokens train as the whole batch does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from colossalai.booster import Booster
from torch import Tensor, nn
from transformers import BertConfig, BertForMultipleChoice, GPT2Config, GPT2ForSequenceClassification
from transformers.utils import ModelOutput

from pipeshard import PipelinePlugin
from pipeshard.batch.batch import Batch
from pipeshard.batch.grouping import TokenCost
from pipeshard.config import PipelineConfig
from pipeshard.engine.ragged import Ragged
from pipeshard.errors import PipeshardError, UsageError
from tests import zoo
from tests.pool import Pool
from tests.test_updates import listening
from tests.unsplit import Split, Unsplit, compared, parameter_error, refusal

pytestmark = pytest.mark.local

FINE = 1e-6
LENGTHS = ((5, 31, 12, 7, 7, 20, 3, 9), (40, 2, 2, 13, 6, 5), (17,), (6, 6, 6, 6))
LIMIT = 48


def build(name: str) -> nn.Module:
    if name != "classifier":
        return zoo.build(name, torch.float64)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=zoo.VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=64, pad_token_id=0, num_labels=3
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2ForSequenceClassification(config).double().train()


def data_of(name: str, lengths: tuple[int, ...], seed: int, longest: int = 44) -> dict[str, Tensor]:
    """Samples padded on the right to `longest` tokens, with uneven labels; targets of T5 have other lengths."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(sizes: list[int], longest: int) -> tuple[Tensor, Tensor]:
        mask = (torch.arange(longest) < torch.tensor(sizes)[:, None]).long()
        return torch.randint(3, zoo.VOCABULARY, mask.shape, generator=generator) * mask, mask

    ids, mask = tokens(list(lengths), longest)
    labels = ids.masked_fill(mask == 0, -100)
    if name == "classifier":
        labels = torch.randint(0, 3, (len(lengths),), generator=generator)
    elif name == "t5":
        targets, mask_of_targets = tokens([1 + 3 * n % 8 for n in lengths], 8)
        labels = targets.masked_fill(mask_of_targets == 0, -100)
    else:
        labels[0, :4] = -100  # a prompt
        labels[-1] = -100 if len(lengths) > 1 else labels[-1]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def trained(name: str, **options: Any) -> list[str]:
    """What differs from the unsplit model on whole batches, in steps with other lengths."""
    model = build(name)
    unsplit, replicas = Unsplit(copy.deepcopy(model), max_norm=0.5), options.get("dp_size", 1)
    sample = data_of(name, LENGTHS[0], 9)
    p = dist.get_world_size() // replicas
    split = Split(model, p, sample, microbatch_tokens=LIMIT, max_norm=0.5, **options)
    grid = split.model.pipeline.grid
    found = []
    for step, lengths in enumerate(LENGTHS):
        lengths *= replicas
        data = data_of(name, lengths, step)
        own = zoo.part(data, grid.replica, [len(lengths) // replicas] * replicas)
        out = split.backward(own, return_outputs=lambda _, batch: batch["input_ids"].shape)
        found += compared(split, unsplit, out["loss"], unsplit.backward(data), FINE)
        if any(rows * length > LIMIT for rows, length in out["outputs"] or ()):
            found.append(f"microbatches {out['outputs']} in step {step}")
        unsplit.step()
        split.step()
        if not (error := parameter_error(split, unsplit.model)) < FINE:
            found.append(f"parameters differ by {error:.2e} after step {step}")
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "t5", "classifier", "gpt2", "bert"])
def test_ragged_batches_train_as_whole_ones(pool: Pool, p: int, name: str) -> None:
    assert pool.run(trained, p, name, verify=False) == [[]] * p


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "interleaved", "num_model_chunks": 2},
        {"schedule": "zb-h1"},
        {"schedule": "zbv"},
        {"recompute": True},
    ],
)
def test_schedules_of_ragged_batches(pool: Pool, options: dict[str, Any]) -> None:
    assert pool.run(trained, 2, "llama", verify=False, **options) == [[]] * 2


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["llama", "t5", "classifier"])
def test_ragged_batches_of_replicas(pool: Pool, name: str) -> None:
    assert pool.run(trained, 4, name, dp_size=2, verify=False) == [[]] * 4


@pytest.mark.turns
def test_ragged_batches_are_proven_at_boost(pool: Pool) -> None:
    assert pool.run(trained, 2, "llama", verify=True) == [[]] * 2


def pair_loss(output: Any, batch: Any) -> Tensor:
    """The preference loss of TRL: the first half of the rows was chosen, the second half was rejected."""
    ids = batch["input_ids"]
    scores = output.logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    chosen, rejected = (scores * batch["attention_mask"][:, 1:]).sum(1).chunk(2)
    return -F.logsigmoid(0.01 * (chosen - rejected)).mean()


def pairs_differ() -> list[str]:
    model = zoo.build("llama", torch.float64)
    unsplit, data = Unsplit(copy.deepcopy(model)), data_of("llama", (31, 20, 12, 5), 0)
    plugin = PipelinePlugin(pp_size=dist.get_world_size(), dry_run_input=data, microbatch_tokens=4096, verify=False)
    booster = Booster(plugin=plugin)
    split: Any = Split.__new__(Split)
    split.model, split.optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()), pair_loss)
    out = booster.execute_pipeline(iter([data]), split.model, pair_loss, split.optimizer)
    loss = pair_loss(unsplit.model(**data), data)
    loss.backward()
    return compared(split, unsplit, out["loss"], loss.detach(), FINE)


@pytest.mark.turns
def test_a_microbatch_keeps_the_order_of_its_samples(pool: Pool) -> None:
    """DPOTrainer with microbatch_tokens: its batch has all chosen answers first, then all rejected ones.

    The samples of a microbatch were in the order of their lengths, so the longest half counted as rejected."""
    assert pool.run(pairs_differ, 2) == [[], []]


def outputs_differ(name: str) -> list[str]:
    """Steps whose outputs differ from the unsplit model's where there is no padding."""
    model = build(name)
    reference = copy.deepcopy(model)
    split = Split(model, dist.get_world_size(), data_of(name, LENGTHS[0], 9), microbatch_tokens=LIMIT, verify=False)
    found = []
    for lengths in LENGTHS:
        data = data_of(name, lengths, 1)
        logits = reference(**data).logits
        out = split.evaluate(data, return_outputs=True)
        if out["outputs"] is None:
            continue
        valid = {"llama": data["attention_mask"] > 0, "t5": data["labels"] != -100}.get(name, slice(None))
        same_shape = out["outputs"].logits.shape == logits.shape
        if not same_shape or not torch.allclose(out["outputs"].logits[valid], logits[valid], atol=1e-9):
            found.append(f"logits of {lengths}")
    return found


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["llama", "t5", "classifier"])
def test_outputs_are_in_the_order_of_the_samples(pool: Pool, name: str) -> None:
    assert pool.run(outputs_differ, 2, name) == [[], []]


class Shifted(nn.Module):
    """A model whose outputs have one entry fewer than positions, or one more: a summary at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.VOCABULARY, 8)
        self.summary = nn.Parameter(torch.ones(1, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, zoo.VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.cat([self.embed(input_ids), self.summary.expand(len(input_ids), 1, 8)], 1)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        losses = F.cross_entropy(logits[:, :-2].transpose(1, 2), labels[:, 1:], reduction="none")
        return {"loss": losses.sum() / (labels[:, 1:] != -100).sum(), "losses": losses, "logits": logits}


def shifted_outputs_differ() -> list[str]:
    torch.manual_seed(0)
    model = Shifted().double()
    reference = copy.deepcopy(model)
    data = data_of("llama", LENGTHS[0], 9)
    split = Split(model, dist.get_world_size(), data, microbatch_tokens=LIMIT, verify=False)
    found = []
    for lengths in LENGTHS:
        data = data_of("llama", lengths, 1)
        expected, out = reference(**data), split.evaluate(data, return_outputs=["losses"])["outputs"]
        if out is not None and not torch.allclose(out["losses"], expected["losses"], atol=1e-9):
            found.append(f"losses of {lengths}")
    with pytest.raises(UsageError, match="depends on how much padding a microbatch has"):
        split.evaluate(data, return_outputs=["logits"])
    return found


@pytest.mark.turns
def test_outputs_with_fewer_entries_than_positions_are_merged(pool: Pool) -> None:
    """SFTTrainer with microbatch_tokens trained, but each evaluation raised UsageError: TRL's evaluation requests the
    log-probabilities of the next tokens, with one entry fewer than the sample has positions. Of more entries, nobody
    knows where they are."""
    assert pool.run(shifted_outputs_differ, 2) == [[], []]


def raised(name: str, data: dict[str, Tensor], limit: int) -> str:
    sample = zoo.batch(name, dtype=torch.float64)
    split = Split(zoo.build(name, torch.float64), dist.get_world_size(), sample, microbatch_tokens=limit, verify=False)
    try:
        split.backward(data)
    except PipeshardError as error:
        return str(error)
    return ""


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        (
            "llama",
            data_of("llama", (3, 30, 41), 0),
            "sample 2 of the batch has 41 tokens, more than microbatch_tokens=40",
        ),
        (
            "t5",
            data_of("t5", (3, 38), 0),
            "sample 1 of the batch has 41 tokens (38 of the encoder and 3 of the decoder)",
        ),
        ("vit", zoo.batch("vit", dtype=torch.float64), "the batch has neither input_ids nor inputs_embeds"),
    ],
)
def test_batches_that_cannot_be_grouped(pool: Pool, name: str, data: dict[str, Tensor], reason: str) -> None:
    for found in pool.run(raised, 2, name, data, 40):
        assert reason in found


def of_embeddings() -> list[str]:
    """What differs from the unsplit model in a batch of embeddings whose width is the length of the longest sample."""
    model = build("llama")
    width = model.config.hidden_size
    data = data_of("llama", (width, 3, 5, width // 2), 0)
    data["inputs_embeds"] = model.get_input_embeddings()(data.pop("input_ids")).detach()
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), data, microbatch_tokens=width, verify=True)
    return compared(split, unsplit, split.backward(data)["loss"], unsplit.backward(data), FINE)


@pytest.mark.turns
def test_the_width_of_embeddings_counts_no_positions(pool: Pool) -> None:
    """A batch of embeddings as wide as long was trimmed in both dimensions: the forward failed on its microbatches."""
    assert pool.run(of_embeddings, 2) == [[]] * 2


def of_left_padded(with_positions: bool, with_labels: bool) -> tuple[list[int], list[str]]:
    """The lengths of the microbatches, and what differs from the unsplit model."""
    model, data = build("gpt2"), zoo.left_padded(zoo.batch("llama"))
    if with_positions:
        data["position_ids"] = (data["attention_mask"].cumsum(1) - 1).clamp(min=0)
    if not with_labels:
        data["labels"][torch.arange(8), data["attention_mask"].argmax(1)] = -100
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), data, microbatch_tokens=24)
    out = split.backward(data, return_outputs=lambda _, batch: batch["input_ids"].shape[1])
    return out["outputs"] or [], compared(split, unsplit, out["loss"], unsplit.backward(data), FINE)


@pytest.mark.turns
@pytest.mark.parametrize("with_labels", [False, True])
@pytest.mark.parametrize("with_positions", [False, True])
def test_padding_on_the_left_is_kept(pool: Pool, with_positions: bool, with_labels: bool) -> None:
    """The positions of the model count it, and the model predicts the label of the first token from it."""
    expected = [([], []), ([12] * 4, [])]
    assert sorted(pool.run(of_left_padded, 2, with_positions, with_labels)) == expected


@pytest.mark.parametrize(("schedule", "expected"), [("1f1b", [3, 12, 20, 31, 40]), ("zbv", [3, 20, 40, 31, 12])])
def test_the_order_of_the_microbatches(schedule: str, expected: list[int]) -> None:
    config = PipelineConfig(pp_size=2, num_microbatches=None, schedule=schedule, microbatch_tokens=40)
    ragged = Ragged(zoo.build("llama"))
    ragged.cost, ragged.idle = TokenCost(), 1.0
    ragged.has_short_cooldown = schedule == "1f1b"
    parts = ragged.split(Batch.of(data_of("llama", (20, 3, 40, 31, 12), 0)), config)
    assert [part.tensors["input_ids"].shape[1] for part in parts] == expected


class PairScorer(nn.Module):
    """A model that compares the means of two texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.VOCABULARY, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        positive_input_ids: Tensor,
        positive_attention_mask: Tensor,
        labels: Tensor,
    ) -> ModelOutput:
        ids = torch.stack([input_ids, positive_input_ids], 1).flatten(0, 1)
        mask = torch.stack([attention_mask, positive_attention_mask], 1).flatten(0, 1)[..., None]
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        first, second = ((hidden * mask).sum(1) / mask.sum(1)).unflatten(0, (-1, 2)).unbind(1)
        return ModelOutput(loss=F.mse_loss((first * second).sum(1), labels))


def pairs_of_texts_differ() -> list[str]:
    first, second = data_of("llama", (3, 30, 5, 12), 0), data_of("llama", (40, 2, 9, 12), 1)
    data = {"input_ids": first["input_ids"], "attention_mask": first["attention_mask"]}
    data |= {f"positive_{name}": second[name] for name in data}
    data["labels"] = torch.arange(4.0, dtype=torch.float64)
    torch.manual_seed(0)
    model = PairScorer().double()
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), data, microbatch_tokens=LIMIT, verify=False)
    out = split.backward(data)
    return compared(split, unsplit, out["loss"], unsplit.backward(data), FINE)


def test_a_second_text_is_not_trimmed_by_the_padding_of_the_first(pool: Pool) -> None:
    """Pairs of a passage and a question, both padded to 256 tokens. Where the question was longer than the passage, its
    end was removed with the padding of the passage, silently."""
    assert pool.run(pairs_of_texts_differ, 2) == [[], []]


def sizes_of_choices() -> tuple[list[int], list[str]]:
    """The tokens of each microbatch, and what differs from the unsplit model."""
    torch.manual_seed(0)
    model = BertForMultipleChoice(BertConfig(**zoo.ENCODER, vocab_size=zoo.VOCABULARY)).double().eval()
    ids = torch.randint(3, zoo.VOCABULARY, (8, 3, 8), generator=torch.Generator().manual_seed(0))
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(8) % 3}
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), data, microbatch_tokens=LIMIT, verify=False)
    out = split.backward(data, return_outputs=lambda _, batch: batch["input_ids"].numel())
    return out["outputs"] or [], compared(split, unsplit, out["loss"], unsplit.backward(data), FINE)


@pytest.mark.turns
def test_the_tokens_of_all_choices_count_for_the_limit(pool: Pool) -> None:
    """DataCollatorForMultipleChoice: ids of samples, choices and tokens. Choices were counted instead of tokens, so
    that the whole batch was one microbatch, far above microbatch_tokens."""
    assert sorted(pool.run(sizes_of_choices, 2)) == [([], []), ([48] * 4, [])]


class CountsPadding(nn.Module):
    """A model of tokens that ignores its attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.VOCABULARY, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return {"loss": nn.functional.cross_entropy(self.head(hidden.mean(1)), labels)}


def boosted(model: nn.Module, data: dict[str, Tensor], **options: Any) -> str:
    try:
        Split(model, dist.get_world_size(), data, microbatch_tokens=LIMIT, **options)
    except PipeshardError as error:
        return str(error)
    return ""


def proven(model: nn.Module, data: dict[str, Tensor]) -> list[str]:
    """What was logged as a warning."""
    lines = listening()
    assert boosted(model, data) == ""
    return lines


@pytest.mark.turns
def test_a_model_that_reads_its_padding_is_refused_at_boost(pool: Pool) -> None:
    data = data_of("classifier", LENGTHS[0], 0)
    for found in pool.run(boosted, 2, CountsPadding(), data):
        assert "in microbatches with less padding does not match the unsplit model" in found


class Featured(nn.Module):
    """A tagger that also reads sixteen features of each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(zoo.VOCABULARY, 8), nn.Linear(8, zoo.VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, features: Tensor, labels: Tensor) -> ModelOutput:
        hidden = self.embed(input_ids) + features.mean(1)[:, None, None]
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return ModelOutput(loss=F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))


def featured_differ() -> list[str]:
    """What differs in a step whose batch has as many positions as features; the batch of boost has more."""
    model = Featured()
    unsplit = Unsplit(copy.deepcopy(model))
    first, data = data_of("llama", LENGTHS[0], 0), data_of("llama", (16, 9, 4, 11, 2), 1, longest=16)
    for batch in (first, data):
        batch["features"] = torch.rand(len(batch["labels"]), 16, generator=torch.Generator().manual_seed(0))
    split = Split(model, 1, first, microbatch_tokens=LIMIT)
    return compared(split, unsplit, split.backward(data)["loss"], unsplit.backward(data))


def test_features_with_as_many_entries_as_positions_are_not_trimmed(pool: Pool) -> None:
    """They were in the first batch with sixteen positions, silently: the batch of boost, with 44, did not count."""
    assert pool.run(featured_differ, 1) == [[]]


class Learned(CountsPadding):
    """One that has an embedding for each of 44 positions."""

    def __init__(self, reads_mask: bool) -> None:
        super().__init__()
        self.positions = nn.Embedding(44, 8)
        self.reads_mask = reads_mask

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden)
        mask = attention_mask if self.reads_mask else torch.ones_like(attention_mask)
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1)[:, None]
        return {"loss": nn.functional.cross_entropy(self.head(mean), labels)}


@pytest.mark.turns
def test_the_longest_samples_of_a_model_are_proven_too(pool: Pool) -> None:
    """A BERT with a head that averages over all positions, padding included, and samples of 512 tokens.

    The proof added padding, for which the model has no positions: a warning said that the model fails on its batch,
    and training silently continued with other losses."""
    data = data_of("classifier", (44, 31, 12, 7, 44, 20, 3, 9), 0)
    for found in pool.run(boosted, 2, Learned(reads_mask=False), data):
        assert "in microbatches with less padding does not match the unsplit model" in found
    assert pool.run(proven, 2, Learned(reads_mask=True), data) == [[], []]


def test_arguments_that_do_not_go_with_it() -> None:
    assert "num_microbatches=2 and microbatch_tokens=48: pass exactly one of" in refusal(microbatch_tokens=48)
    assert "microbatch_tokens must be a positive integer" in refusal(num_microbatches=None, microbatch_tokens=0)
    slices = {"num_microbatches": None, "microbatch_tokens": 48, "num_slices": 2, "pp_size": 2}
    assert "num_slices=2 is not supported with microbatch_tokens=48" in refusal(**slices)
