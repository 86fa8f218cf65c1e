"""Tests of collectives in a model's own code, most of which only some ranks run."""

from __future__ import annotations

import copy
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
from pipeshard.errors import ConfigurationError, TraceError
from pipeshard.split.materialize import is_released
from tests.pool import Pool
from tests.trainers import launched
from tests.unsplit import largest_error, relative_errors


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


def made() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, {"input": torch.randn(8, 8), "criterion.y": torch.randint(4, (8,))}


def step(criterion: Callable[..., Any], **options: Any) -> tuple[float, list[float]]:
    """The loss, and the errors of this rank's gradients beside those of plain torch."""
    (model, batch), (unsplit, _) = made(), made()
    nn.functional.cross_entropy(unsplit(batch["input"]), batch["criterion.y"]).backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = pipeshard.initialize(model, optimizer, criterion, dry_run_input=batch, **options)
    loss = float(engine.execute_pipeline(iter([batch]))["loss"])
    return loss, relative_errors(engine.model.unwrap(), unsplit)


@pytest.mark.parametrize("verify", ["auto", False])
@pytest.mark.turns
def test_a_collective_of_all_ranks_is_refused(pool: Pool, verify: Any) -> None:
    """A detector's criterion summed the number of boxes over all ranks, which only the last stage's rank reached. The
    ranks waited for each other until the watch ended them, and no error named the line."""
    for criterion in (boxes, gathered):
        options = {"pp_size": 2, "num_microbatches": 1, "verify": verify}
        for message in pool.run_expecting(TraceError, step, 2, criterion, timeout=30, **options):
            assert "waits for all ranks (c10d::all" in message and "test_collectives.py" in message
            assert "(sum, count)" in message and "pp_size=1" in message


@pytest.mark.turns
def test_the_remedies_for_a_collective_run(pool: Pool) -> None:
    """Without the collective, or with one stage, the loss is that of one process."""
    model, batch = made()
    expected = float(nn.functional.cross_entropy(model(batch["input"]), batch["criterion.y"]))
    found = pool.run(step, 2, counted, pp_size=2, num_microbatches=2)
    found += pool.run(step, 2, boxes, pp_size=1, num_microbatches=1)
    for loss, errors in found:
        assert loss == pytest.approx(expected) and errors and all(error < 1e-5 for error in errors)


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


@pytest.mark.turns
def test_a_detector_normalizes_by_its_batch(pool: Pool) -> None:
    """A Trainer initializes accelerate, and transformers' detectors then sum the number of boxes over all processes,
    of which only the last stage's computes the loss: the first step waited forever."""
    assert pool.run(detected, 2, 2, True, timeout=30) == pytest.approx([detected(0, False)] * 2)


class SingleDeviceMuon(torch.optim.Optimizer):
    """Muon in one process, without the orthogonalization."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def move(self, p: Tensor) -> None:
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        momentum.lerp_(p.grad, 0.1)  # type: ignore[arg-type]
        p.sub_(self.param_groups[0]["lr"] * momentum / momentum.norm())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.move(p)


class Muon(SingleDeviceMuon):
    """Each rank updates some of the matrices, and all ranks exchange them, as in the file that many projects copy."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for group in self.param_groups:
            params = group["params"]
            padded = params + [torch.empty_like(params[-1])] * (ranks - len(params) % ranks)
            for k in range(0, len(params), ranks):
                if k + rank < len(params):
                    self.move(params[k + rank])
                dist.all_gather(padded[k : k + ranks], padded[k + rank])


def trained(kind: type[SingleDeviceMuon], **options: Any) -> float:
    """The largest difference of a weight that this rank holds from training in one process."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False) for _ in range(4)]
    alone = nn.Sequential(*layers)
    model = copy.deepcopy(alone)
    batch = {"input": torch.randn(8, 8), "criterion.y": torch.randint(8, (8,))}
    options = {"num_microbatches": 1, "dry_run_input": batch, **options}
    engine = pipeshard.initialize(
        model,
        kind(model.parameters()),
        lambda out, batch: nn.functional.cross_entropy(out, batch["criterion.y"]),
        **options,
    )
    other = SingleDeviceMuon(alone.parameters())
    for _ in range(2):
        nn.functional.cross_entropy(alone(batch["input"]), batch["criterion.y"]).backward()
        engine.execute_pipeline(iter([batch]))
        for optimizer in (other, engine.optimizer):
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    return largest_error(float((p - q).abs().max()) for p, q in pairs if not is_released(q))


@pytest.mark.parametrize("options", [{"pp_size": 2}, {"pp_size": 1, "zero_stage": 1}])
def test_an_optimizer_that_exchanges_its_updates_is_refused(pool: Pool, options: dict[str, Any]) -> None:
    """A Muon for data parallelism updated a part of the matrices on each rank, and gathered the others. With stages, it
    wrote matrices of one stage over those of another without a message, or the proof at boost waited forever."""
    for message in pool.run_expecting(ConfigurationError, trained, 2, Muon, verify=False, **options):
        assert "Muon exchanges tensors with all ranks (c10d::allgather_), in " in message, message
        assert "test_collectives.py" in message and "torch.optim.Muon" in message


@pytest.mark.turns
def test_the_remedies_for_an_optimizer_that_exchanges_its_updates_train(pool: Pool) -> None:
    """The variant for one device trains exactly, as does the exchange itself with replicas of the whole model."""
    gaps = pool.run(trained, 2, SingleDeviceMuon, pp_size=2)
    gaps += pool.run(trained, 2, SingleDeviceMuon, pp_size=1, zero_stage=1, verify=False)
    gaps += pool.run(trained, 2, Muon, pp_size=1, verify=False)
    assert largest_error(gaps) < 1e-6
