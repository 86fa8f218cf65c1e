"""Tests of criteria that return a pair: a sum and a count, or a loss and a metric, of which boost warns."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipeshard
from tests.pool import Pool

pytestmark = pytest.mark.local


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": F.cross_entropy(x, labels), "logits": x}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(6, 8, generator=generator), "labels": torch.randint(8, (6,), generator=generator)}


def warnings_of_pairs() -> list[bool]:
    """Whether boost warns of criteria that return two numbers: a loss and a metric, a sum and a count."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipeshard").addHandler(handler)

    def with_accuracy(output: Any, inputs: Any) -> Any:
        logits, labels = output["logits"], inputs["labels"]
        return F.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean()

    def with_count(output: Any, inputs: Any) -> Any:
        return F.cross_entropy(output["logits"], inputs["labels"], reduction="sum"), len(inputs["labels"])

    told = []
    for criterion in (with_accuracy, with_count):
        records.clear()
        model = Classifier()
        options: Any = {"pp_size": 1, "num_microbatches": 1, "dry_run_input": batch()}
        pipeshard.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion, **options)
        told.append(any("second as a count and divides the first by this count" in record for record in records))
    logging.getLogger("pipeshard").removeHandler(handler)
    return told


def test_a_criterion_that_returns_a_metric_too_is_warned_of(pool: Pool) -> None:
    """(loss, accuracy) was taken for (sum, count): the loss was divided by the accuracy, and nothing was said of it."""
    assert pool.run(warnings_of_pairs, 1) == [[True, False]]
