"""Marks: losses that ignore entries of certain values, or depend on numbers, modes and weights in the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.hunt.cases import Batch, Case
from tests.hunt.nets import H

WEIGHTS = torch.tensor([1.0, 3.0, 9.0])
NAN = float("nan")
UNPROVEN = "to be a mean or sum over samples"


class Body(nn.Module):
    """Four layers and a head of three numbers; `beside` is what the criterion reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(H, H), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(H, 3)

    def forward(self, x: Tensor, **beside: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def inputs(seed: int, **beside: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(7, H, generator=generator), **beside}


def targets(mark: float, first: int = 0, count: int = 3, wide: bool = False) -> Callable[[], list[Batch]]:
    """Batches of which those from `first` on have a mark in the place of some targets, more of them in front."""

    def of(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (7, 3) if wide else (7,)
        values = torch.rand(shape, generator=generator) + 0.1 if mark == 0 else torch.randn(shape, generator=generator)
        if seed >= first:
            values[[0, 1, 3]] = mark
        if wide:
            values[0, 1] = 1.5
        return inputs(seed, targets=values)

    return lambda: [of(seed) for seed in range(count)]


def masked(mark: float) -> Callable[[Any, Any], Tensor]:
    """The mean squared error of the targets that are not marked."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        wanted = batch["targets"]
        is_valid = wanted.isnan().logical_not() if mark != mark else wanted.ne(mark)
        made = output if wanted.ndim > 1 else output[:, 0]
        return F.mse_loss(made[is_valid], wanted[is_valid])

    return loss


def confident(output: Tensor, batch: Any) -> Tensor:
    """FixMatch's: the mean over the samples whose pseudo-label is sure."""
    is_sure = (batch["confidence"] > 0.5).float()
    losses = F.cross_entropy(output, batch["labels"], reduction="none")
    return (losses * is_sure).sum() / is_sure.sum().clamp(min=1)


def labelled(count: int = 3, **beside: Callable[[int], Tensor]) -> list[Batch]:
    batches = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 3, (7,), generator=generator)
        batches.append(inputs(seed, labels=labels, **{name: make(seed) for name, make in beside.items()}))
    return batches


def by_mode(output: Tensor, batch: Any) -> Tensor:
    weight = torch.where(batch["mode"] > 0, WEIGHTS, torch.ones(3))
    return F.cross_entropy(output, batch["labels"], weight=weight)


def balanced(output: Tensor, batch: Any) -> Tensor:
    """Two losses, of which the second is scaled to the size of the first."""
    first, second = F.cross_entropy(output, batch["labels"]), output.pow(2).mean()
    return first + second * (first.detach() / second.detach())


def of_one(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch["labels"]).view(1)


class Reweighted(Body):
    """Weighs its classes alike, until its user says otherwise (LDAM's deferred weights)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(3))

    def forward(self, x: Tensor, **beside: Tensor) -> Any:
        return {"loss": F.cross_entropy(super().forward(x), beside["labels"], weight=self.weight)}


def reweigh(step: int, model: Any) -> None:
    if step == 1:
        model.weight.copy_(WEIGHTS)


class Repeating(Body):
    """Recomputes each pair of a layer and its activation, between which a cut may be."""

    def forward(self, x: Tensor, **beside: Tensor) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H, dtype=torch.complex64) for _ in range(3))
        self.head = nn.Linear(H, 3)

    def forward(self, x: Tensor, **beside: Tensor) -> Any:
        z = torch.complex(x, x.flip(-1))
        for layer in self.layers:
            z = layer(z) / 2
        return self.head(z.abs())


def mean(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch["labels"])


TWO, THREE = {"num_microbatches": 2}, {"num_microbatches": 3}

CASES = {
    "targets that are NaN": Case(
        Body,
        "Missing targets are NaN, and the loss leaves them out: a trial of the loss kept them where they were, and "
        "took it for a mean over samples where both halves had as many.",
        batches=targets(NAN)(),
        options=THREE,
        criterion=lambda: masked(NAN),
    ),
    "targets that are -1 later": Case(
        Body,
        "The first batch has no missing target: the loss was proven to be a mean over samples, and the next batches "
        "were trained with wrong shares.",
        batches=targets(-1.0, first=1)(),
        options=THREE,
        criterion=lambda: masked(-1.0),
    ),
    "targets that are 9999 later": Case(
        Body,
        "The same with a mark that is far from all values, which no trial had drawn.",
        batches=targets(9999.0, first=1, wide=True)(),
        options=TWO,
        criterion=lambda: masked(9999.0),
    ),
    "a depth of 0 later": Case(
        Body,
        "Pixels without a depth are 0, and the first batch has none of them: the loss was a mean over samples.",
        batches=targets(0.0, first=1, wide=True)(),
        options=TWO,
        criterion=lambda: masked(0.0),
    ),
    "sure pseudo-labels": Case(
        Body,
        "A mean over confidences above a threshold: trials scaled them below it, and with one sample left the loss "
        "passed for a sum. Its size was three times the right one.",
        batches=labelled(confidence=lambda seed: torch.rand(7, generator=torch.Generator().manual_seed(seed))),
        options=THREE,
        criterion=lambda: confident,
        refused=UNPROVEN,
    ),
    "a mode in the batch": Case(
        Body,
        "A number in the batch switches class weights on: the rule of the loss without them went on to be used.",
        batches=labelled(mode=lambda seed: torch.tensor(seed // 2)),
        options=TWO,
        criterion=lambda: by_mode,
        refused=UNPROVEN,
    ),
    "class weights set later": Case(
        Reweighted,
        "Class weights of the model are 1 at first, and others from a step on: the loss was still taken for a mean "
        "over samples.",
        batches=labelled(),
        options=TWO,
        between=reweigh,
        refused=UNPROVEN,
    ),
    "a detached ratio": Case(
        Body,
        "A loss is scaled to the size of another one, detached: its value is a mean, and its gradient is not.",
        batches=labelled(),
        options={**TWO, "verify": False},
        criterion=lambda: balanced,
        refused=UNPROVEN,
    ),
    "a loss of shape (1,)": Case(
        Body,
        "torch takes a loss of one number: the proof found it to differ from a scalar of the same value.",
        batches=labelled(),
        options=TWO,
        criterion=lambda: of_one,
    ),
    "a checkpoint and two stages a rank": Case(
        Repeating,
        "The backward pass repeated a call as another stage of the same rank had made it: torch's CheckpointError.",
        batches=labelled(),
        options={**THREE, "schedule": "zbv"},
        criterion=lambda: mean,
    ),
    "complex layers": Case(
        Complex,
        "The deferred weight gradient of a complex linear layer lacked the conjugate, as did that of its input.",
        batches=labelled(),
        options={**TWO, "verify": False},
        criterion=lambda: mean,
    ),
}
