"""Tests of collectives in a model's own code, most of which only some ranks run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed import nn as differentiable
from transformers import YolosConfig, YolosForObjectDetection
from transformers.loss import loss_for_object_detection

import pipeshard
from pipeshard.errors import TraceError
from tests.pool import Pool
from tests.trainers import launched


def boxes(out: Tensor, batch: Any) -> Tensor:
    """A count over all ranks, as in SetCriterion of DETR."""
    count = torch.tensor(float(len(batch["criterion.y"])))
    if dist.is_initialized():
        dist.all_reduce(count)
    return nn.functional.cross_entropy(out, batch["criterion.y"], reduction="sum") / (count / dist.get_world_size())


def gathered(out: Tensor, batch: Any) -> Tensor:
    """The features of all ranks, as in open_clip's ClipLoss."""
    return nn.functional.cross_entropy(torch.cat(differentiable.all_gather(out)), batch["criterion.y"].repeat(2))


def counted(out: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """The remedy: a sum, and a count, which pipeshard adds up."""
    return nn.functional.cross_entropy(out, batch["criterion.y"], reduction="sum"), torch.tensor(len(out))


def step(criterion: Callable[..., Any], **options: Any) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    batch = {"input": torch.randn(8, 8), "criterion.y": torch.randint(4, (8,))}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = pipeshard.initialize(model, optimizer, criterion, dry_run_input=batch, **options)
    return float(engine.execute_pipeline(iter([batch]))["loss"])


@pytest.mark.parametrize("verify", ["auto", False])
def test_a_collective_of_all_ranks_is_refused(pool: Pool, verify: Any) -> None:
    """A detector's criterion summed the number of boxes over all ranks, which only the last stage's rank reached. The
    ranks waited for each other until the watch ended them, and no error named the line."""
    for criterion in (boxes, gathered):
        options = {"pp_size": 2, "num_microbatches": 1, "verify": verify}
        for message in pool.run_expecting(TraceError, step, 2, criterion, timeout=30, **options):
            assert "waits for all ranks (c10d::all" in message and "test_collectives.py" in message
            assert "(sum, count)" in message and "pp_size=1" in message


def test_the_remedies_for_a_collective_run(pool: Pool) -> None:
    """Without the collective, or with one stage, the loss is that of one process."""
    losses = pool.run(step, 2, counted, pp_size=2, num_microbatches=2)
    losses += pool.run(step, 2, boxes, pp_size=1, num_microbatches=1)
    assert losses == pytest.approx([losses[0]] * 4)


def assigned(costs: Tensor) -> tuple[Tensor, Tensor]:
    """Boxes in the order of their numbers, instead of scipy's best assignment."""
    return torch.arange(costs.shape[1]), torch.arange(costs.shape[1])


def detected(pp_size: int, is_launched: bool) -> float:
    """The loss of a detector, with accelerate's state as a Trainer initializes it after torchrun."""
    torch.manual_seed(0)
    sizes = {"image_size": [16, 16], "patch_size": 8, "num_detection_tokens": 4, "num_labels": 3}
    widths = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    with (
        launched() if is_launched else nullcontext(),
        mock.patch.object(loss_for_object_detection, "linear_sum_assignment", assigned, create=True),
        mock.patch.object(loss_for_object_detection, "requires_backends"),
    ):
        if is_launched:
            assert PartialState(cpu=True).num_processes == 2
        model = YolosForObjectDetection(YolosConfig(**sizes, **widths)).eval()
        labels = [{"class_labels": torch.arange(n), "boxes": torch.rand(n, 4) / 4 + 0.3} for n in (1, 3)]
        batch = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": labels}
        if not pp_size:
            return float(model(**batch).loss)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options = {"pp_size": pp_size, "num_microbatches": 1, "verify": False}
        engine = pipeshard.initialize(model, optimizer, dry_run_input=batch, **options)
        return float(engine.execute_pipeline(iter([batch]))["loss"])


def test_a_detector_normalizes_by_its_batch(pool: Pool) -> None:
    """A Trainer initializes accelerate, and transformers' detectors then sum the number of boxes over all processes,
    of which only the last stage's computes the loss: the first step waited forever."""
    assert pool.run(detected, 2, 2, True, timeout=30) == pytest.approx([detected(0, False)] * 2)
