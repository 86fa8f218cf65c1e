"""Tests of the warning at boost for a split that saves little memory, and of the advice in it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from pipeshard import CutPoint, boost, trace
from pipeshard.split.policy import Policy
from tests.hunt.nets import H, Net, data


class Pair(Net):
    """Two sentences through one encoder, one after the other."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        first, second = (self.body(self.embed(part)) for part in (ids, labels))
        return {"loss": (first - second).pow(2).mean()}


class Funnel(nn.Module):
    """Like a convolutional network: the first layers take the time, the last two have the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(H, H) for _ in range(6)] + [nn.Linear(H * 36, 60), nn.Linear(60, H * 36)]
        )

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = nn.functional.one_hot(ids, H * 2)[..., :H].float().repeat(1, 6, 1)
        for layer in self.layers[:6]:
            x = layer(x)
        return {"loss": self.layers[7](self.layers[6](x.flatten(1))).pow(2).mean()}


class Narrow(Funnel):
    """A funnel whose last layer but one has most of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[7] = nn.Linear(60, 1)


class AfterCuts(Funnel):
    """A funnel with CutPoints, of which the last ends the model."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts = nn.ModuleList(CutPoint() for _ in range(3))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = nn.functional.one_hot(ids, H * 2)[..., :H].float().repeat(1, 6, 1)
        for cut, layers in zip(self.cuts[:2], (self.layers[:3], self.layers[3:6]), strict=True):
            for layer in layers:
                x = layer(x)
            x = cut(x)
        return {"loss": self.cuts[2](self.layers[7](self.layers[6](x.flatten(1)))).pow(2).mean()}


@pytest.mark.parametrize(
    ("make", "partition", "remedy"),
    [
        (Funnel, [1, 7], "pass PipelinePlugin(partition='parameters')"),
        (Narrow, "parameters", "Use fewer stages, or mark cuts inside the largest unit"),
        (Pair, "auto", "data-parallel replicas"),
        (AfterCuts, "auto", "only at its CutPoints"),  # it said that one unit is this large
        (Net, "auto", ""),
    ],
)
def test_a_stage_that_holds_most_of_the_model_is_said(
    make: type[nn.Module],
    partition: str | list[int],
    remedy: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A vgg cut by time had 92 % of its parameters on one stage, and a bi-encoder all of them on each, and nobody was
    told that the split saves no memory. A PipelineModule, which is cut by parameters, was advised to be cut so."""
    monkeypatch.setattr(boost, "LARGE", 0)
    torch.manual_seed(0)
    model = make()
    policy = Policy(model, trace(model, data()), 0, 2, partition=partition)
    with caplog.at_level(logging.WARNING, "pipeshard"):
        boost._warn_of_uneven(policy)
    assert remedy in caplog.text and bool(caplog.text) == bool(remedy), caplog.text
    assert partition != "parameters" or "partition=" not in caplog.text, caplog.text


def test_a_small_model_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Of a small model no stage is too large."""
    model = Pair()
    with caplog.at_level(logging.WARNING, "pipeshard"):
        boost._warn_of_uneven(Policy(model, trace(model, data()), 0, 2))
    assert not caplog.text
