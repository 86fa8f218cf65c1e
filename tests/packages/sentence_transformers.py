"""sentence-transformers: its losses, each with its own model, and cross-encoders."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

from tests.packages.model import Model, returned

VOCABULARY, WIDTH, LENGTH = 60, 32, 8


def config(**given: Any) -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **given,
    )


def saved() -> tempfile.TemporaryDirectory[str]:
    """A tiny BERT with a tokenizer, for which nothing is downloaded."""
    made = tempfile.TemporaryDirectory(prefix="bert-")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{k}" for k in range(VOCABULARY - 5))]
    vocabulary = Path(made.name) / "vocab.txt"
    vocabulary.write_text("\n".join(words))
    BertTokenizerFast(vocab_file=str(vocabulary)).save_pretrained(made.name)
    BertModel(config()).save_pretrained(made.name)
    return made


FOLDER = saved()  # before there are ranks, of which only the first would save; it lives as long as the process


def encoder() -> SentenceTransformer:
    words = Transformer(FOLDER.name)
    return SentenceTransformer(modules=[words, Pooling(WIDTH, pooling_mode="mean")], device="cpu")


class WithLoss(nn.Module):
    """A loss of sentence-transformers, called as its trainer calls it."""

    def __init__(self, make: Callable[[SentenceTransformer], nn.Module]) -> None:
        super().__init__()
        self.loss = make(encoder())

    def forward(self, labels: Tensor | None = None, **texts: dict[str, Tensor]) -> Tensor:
        found = self.loss([texts[name] for name in sorted(texts)], labels)
        return torch.stack(list(found.values())).sum() if isinstance(found, dict) else found


def text() -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(5, VOCABULARY, (4, LENGTH)),
        "attention_mask": torch.ones(4, LENGTH, dtype=torch.int64),
        "token_type_ids": torch.zeros(4, LENGTH, dtype=torch.int64),
    }


def texts(count: int, label: Callable[[], Tensor] | None = None) -> Callable[[], dict[str, Any]]:
    def batch() -> dict[str, Any]:
        named: dict[str, Any] = {name: text() for name in ("anchor", "b", "c")[:count]}
        return named | {"labels": label()} if label else named

    return batch


def with_loss(name: str, count: int, label: Callable[[], Tensor] | None = None, **given: Any) -> Model:
    def build() -> nn.Module:
        return WithLoss(lambda model: getattr(losses, name)(model, **given))

    return Model("sentence-transformers", name, build, texts(count, label), returned)


def classes() -> Tensor:
    return torch.tensor([0, 1, 0, 1])


def matryoshka() -> nn.Module:
    def make(model: SentenceTransformer) -> nn.Module:
        return losses.MatryoshkaLoss(model, losses.CosineSimilarityLoss(model), matryoshka_dims=[32, 16])

    return WithLoss(make)


class CrossEncoder(nn.Module):
    """What sentence-transformers' CrossEncoder trains: a classifier of pairs with one label."""

    def __init__(self) -> None:
        super().__init__()
        self.model = BertForSequenceClassification(config(num_labels=1))

    def forward(self, **text: Tensor) -> Tensor:
        return self.model(**text).logits.squeeze(-1)


def scored(output: Any, batch: Any) -> Tensor:
    return functional.binary_cross_entropy_with_logits(output, batch["criterion.score"])


MODELS: Sequence[Model] = [
    with_loss("CosineSimilarityLoss", 2, lambda: torch.rand(4)),
    with_loss("MSELoss", 1, lambda: torch.randn(4, WIDTH)),
    with_loss("ContrastiveLoss", 2, classes),
    with_loss("OnlineContrastiveLoss", 2, classes),
    with_loss("TripletLoss", 3),
    with_loss("MultipleNegativesRankingLoss", 2),
    with_loss("MultipleNegativesSymmetricRankingLoss", 2),
    with_loss("CoSENTLoss", 2, lambda: torch.rand(4)),
    with_loss("AnglELoss", 2, lambda: torch.rand(4)),
    with_loss("BatchAllTripletLoss", 1, classes),
    with_loss("BatchHardTripletLoss", 1, classes),
    with_loss("BatchHardSoftMarginTripletLoss", 1, classes),
    with_loss("BatchSemiHardTripletLoss", 1, classes),
    with_loss("SoftmaxLoss", 2, classes, embedding_dimension=WIDTH, num_labels=2),
    Model("sentence-transformers", "MatryoshkaLoss", matryoshka, texts(2, lambda: torch.rand(4)), returned),
    Model(
        "sentence-transformers",
        "CrossEncoder",
        CrossEncoder,
        lambda: text() | {"criterion.score": torch.rand(4)},
        scored,
    ),
]
