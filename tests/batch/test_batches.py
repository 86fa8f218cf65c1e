"""Tests of batches that are not plain mappings of (b, ...) tensors, on two stages, compared with the unsplit model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.engine import traces as steps
from pipeshard.errors import BatchError, ConfigurationError
from tests.messages import assert_told
from tests.pool import Pool
from tests.unsplit import Split, gradient_error

pytestmark = pytest.mark.local

H, CLASSES, ROWS = 8, 7, 6


@dataclass
class Speech:
    """Frames (s, b, h), and beside them a mapping, whose `bias` is (s, b, h) and whose `scale` every sample needs."""

    frames: Tensor
    beside: dict[str, Any]
    labels: Tensor
    names: list[str]
    table: Tensor


class TimeMajor(nn.Module):
    """A plain module that takes one Speech; one that `listens` looks at its names too."""

    def __init__(self, listens: bool = True) -> None:
        super().__init__()
        self.listens = listens
        self.enter = nn.Linear(H, H)
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(3))
        self.head = nn.Linear(H, CLASSES)

    def forward(self, speech: Speech) -> dict[str, Tensor]:
        if type(speech) is not Speech:
            raise TypeError(f"not the class that was given, but {type(speech)}")
        x = self.enter(speech.frames)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * speech.beside["scale"] + speech.beside["bias"]
        x = x + speech.table.mean(0)
        if self.listens:
            x = x * torch.tensor([float(len(name)) for name in speech.names])[:, None]
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.reshape(-1, CLASSES), speech.labels.reshape(-1))
        return {"loss": loss, "logits": logits}


def speech(length: int, rows: int = ROWS, seed: int = 0) -> Speech:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (length, rows), generator=generator)
    for row in range(rows):
        labels[1 + (2 * row) % length :, row] = -100  # uneven
    return Speech(
        torch.randn(length, rows, H, generator=generator),
        {"bias": torch.randn(length, rows, H, generator=generator), "scale": 0.5, "kind": None},
        labels,
        ["a" * (1 + (row + seed) % 3) for row in range(rows)],
        torch.randn(ROWS, H, generator=generator),  # its size is that of the samples only by chance
    )


DECLARED = {"frames": 1, ".beside['bias']": 1, "labels": 1, "table": None}


def time_major(listens: bool) -> None:
    torch.manual_seed(0)
    model = TimeMajor(listens)
    unsplit = copy.deepcopy(model)
    split = Split(model, dist.get_world_size(), speech(5), num_microbatches=4, batch_dims=DECLARED)
    for step, (length, rows) in enumerate(((5, ROWS), (9, ROWS), (ROWS, ROWS), (5, 5), (4, 1))):
        data = speech(length, rows, step)
        reference = unsplit(data)
        reference["loss"].backward()
        out = split.backward(data, return_outputs=True)
        assert float(out["loss"]) == pytest.approx(float(reference["loss"].detach()), rel=1e-6), step
        error = gradient_error(split, unsplit)
        assert error < 1e-5, (step, error)
        if out["outputs"] is not None:
            torch.testing.assert_close(out["outputs"]["logits"], reference["logits"])
        unsplit.zero_grad()
        split.optimizer.zero_grad()
    flows = [flow for flows in split.model.pipeline.traces._flows.values() for flow in flows]
    assert all("names" in flow.watched for flow in flows)


@pytest.mark.turns
@pytest.mark.parametrize("listens", [True, False])
def test_a_time_major_dataclass_is_exact(pool: Pool, listens: bool) -> None:
    pool.run(time_major, 2, listens)


def many_kinds(flows: int) -> None:
    """Glue that reads what differs in each batch is traced anew for each; what is kept of that is bounded."""
    torch.manual_seed(0)
    model = TimeMajor()
    unsplit = copy.deepcopy(model)
    with mock.patch.object(steps, "MOST_FLOWS", flows):
        split = Split(model, dist.get_world_size(), speech(5), num_microbatches=2, batch_dims=DECLARED)
        traces = split.model.pipeline.traces
        for seed in range(4 * flows):
            data = speech(3 + seed % 7, seed=seed)
            data.names = [name * (1 + seed) for name in data.names]
            reference = unsplit(data)["loss"]
            reference.backward()
            assert float(split.backward(data)["loss"]) == pytest.approx(float(reference.detach()), rel=1e-6), seed
            assert sum(map(len, traces._flows.values())) <= flows
            assert len(traces.routes._routes) <= flows + 2  # those of the microbatches before the one that made room
    assert gradient_error(split, unsplit) < 1e-5


@pytest.mark.turns
@pytest.mark.processes
def test_what_is_kept_of_batches_is_bounded(pool: Pool) -> None:
    pool.run(many_kinds, 2, 3)


def wrong() -> list[str]:
    """What is declared wrongly, left open or read differently by the ranks; and after all of it an exact step."""
    torch.manual_seed(0)
    data, p = speech(5), dist.get_world_size()
    arguments: list[dict[str, Any]] = [
        {"batch_dims": {"frames": 1, "lables": 1}},
        {"batch_dims": {"frames": 0, "labels": 1}},
        {"batch_dims": {"frames": 3}},
        {"batch_dims": 1},
    ]
    messages = []
    for given in arguments:
        with pytest.raises((BatchError, ConfigurationError)) as caught:
            Split(TimeMajor(), p, data, num_microbatches=2, **given)
        messages.append(str(caught.value))
    model = TimeMajor()
    unsplit = copy.deepcopy(model)
    split = Split(model, p, data, num_microbatches=2, batch_dims=DECLARED)
    if dist.get_rank() == 1:
        data.names[0] += "b"
    with pytest.raises(BatchError) as caught:
        split.backward(data)
    messages.append(str(caught.value))
    loss = split.backward(speech(5))["loss"]
    assert float(loss) == pytest.approx(float(unsplit(speech(5))["loss"].detach()), rel=1e-6)
    return messages


@pytest.mark.turns
def test_a_declaration_that_does_not_fit_is_told_on_every_rank(pool: Pool) -> None:
    expected = [
        r"batch_dims names \['lables'\], but the paths of the batch are \['frames', \".beside\['bias'\]\"",
        "dimension 1 of labels as the batch dimension, but this dimension has size 6, and the batch has 5 samples "
        r"\(dimension 0 of frames\)",
        r"dimension 3 of frames as the batch dimension, but frames has shape \(5, 6, 8\)",
        "batch_dims must map the paths of leaves to a dimension or None.*got 1",
        "the stages of one pipeline must read the same batch",
    ]
    for messages in pool.run(wrong, 2):
        assert_told(messages, expected)
