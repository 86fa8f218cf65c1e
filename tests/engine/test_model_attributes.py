"""Tests of attributes that a user sets on a boosted model between steps: they are set on the model itself."""

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


class Annealed(nn.Module):
    """A regularized classifier whose user sets the weight of the second term in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.beta = 0.0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": F.cross_entropy(x, labels) + self.beta * x.square().mean(), "logits": x}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(6, 8, generator=generator), "labels": torch.randint(8, (6,), generator=generator)}


def annealing() -> tuple[list[float], list[float], bool]:
    """The losses of three steps, and those of the unsplit model, whose user does the same."""
    losses = []
    for is_split in (True, False):
        torch.manual_seed(0)
        model: Any = Annealed()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = None
        if is_split:
            options: Any = {"pp_size": 2, "num_microbatches": 2, "dry_run_input": batch()}
            engine = pipeshard.initialize(model, optimizer, **options)
            model, optimizer = engine.model, engine.optimizer
        told = []
        for step in range(3):
            model.beta = 2.0 * step
            loss = model(**batch())["loss"] if engine is None else engine.execute_pipeline(iter([batch()]))["loss"]
            if engine is None:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(round(float(loss.detach()), 5))
        losses.append(told)
        if is_split:
            model.extra = 1
            is_set = model.unwrap().extra == 1 and "extra" not in vars(model)
            del model.extra
            is_set &= not hasattr(model, "extra")
    return losses[0], losses[1], is_set


@pytest.mark.turns
def test_what_is_set_on_a_boosted_model_is_set_on_the_model(pool: Pool) -> None:
    """`model.beta = 0.1 * step` stayed on the wrapper, which its user calls the model: its forward went on with the
    first weight, and trained another model than one process."""
    for split, unsplit, is_set in pool.run(annealing, 2):
        assert (split, is_set) == (unsplit, True)


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
        model = Annealed()
        options: Any = {"pp_size": 1, "num_microbatches": 1, "dry_run_input": batch()}
        pipeshard.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion, **options)
        told.append(any("second as a count and divides the first by this count" in record for record in records))
    logging.getLogger("pipeshard").removeHandler(handler)
    return told


def test_a_criterion_that_returns_a_metric_too_is_warned_of(pool: Pool) -> None:
    """(loss, accuracy) was taken for (sum, count): the loss was divided by the accuracy, and nothing was said of it."""
    assert pool.run(warnings_of_pairs, 1) == [[True, False]]
