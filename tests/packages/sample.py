"""Sample: plain torch models, each of which gets a different verdict from the runner."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.packages.model import Model, Remedy, sgd

BUILT: dict[str, int] = {}  # how often a model was built in this process: unsplit first, then for the pipeline


def perceptron() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(8, 4))


def batch() -> dict[str, Tensor]:
    return {"input": torch.randn(4, 8), "criterion.labels": torch.randint(4, (4,))}


def turn(name: str) -> int:
    """The count of this build in a check; each check builds three, to see whether microbatches make the batch."""
    BUILT[name] = BUILT.get(name, 0) + 1
    return BUILT[name]


def other_weights() -> nn.Module:
    """Trained by the pipeline with one weight that is not that of the unsplit model."""
    model = perceptron()
    if turn("other") % 4 == 0:
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1e-3
    return model


def dying() -> nn.Module:
    if turn("dying") == 4 and dist.get_rank() == 1:
        os.abort()
    return perceptron()


def stubborn(model: nn.Module) -> Optimizer:
    if turn("stubborn") == 2:
        raise KeyError("no optimizer twice")
    return sgd(model)


class Frozen(nn.Module):
    """Which has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron().requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = self.body(input)
        return found


class Deciding(nn.Module):
    """Which goes by an activation between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = perceptron(), nn.Linear(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        x = self.body(input)
        found: Tensor = self.head(2 * x if x.mean() > 0 else x)
        return found


def contrastive(output: Any, batch: Any) -> Tensor:
    """Each sample among all others."""
    output = functional.normalize(output, dim=1)
    return functional.cross_entropy(output @ output.T / 0.1, torch.arange(len(output)))


def of(name: str, build: Callable[[], nn.Module] = perceptron, **given: Any) -> Model:
    return Model("sample", name, build, batch, **given)


MODELS = [
    of("exact"),
    of("other weights", other_weights),
    of("dying", dying),
    of("stubborn", optimizer=stubborn),
    of("frozen", Frozen),
    of("contrastive", loss=contrastive),
    of("deciding", Deciding, remedies=[Remedy("pp_size=1", "pp_size=1", stages=1)]),
    of("deciding on", Deciding, remedies=[Remedy("pp_size=1", "nothing")]),
    of("deciding otherwise", Deciding, remedies=[Remedy("pp_size=7", "nothing")]),
]
