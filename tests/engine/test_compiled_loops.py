"""Tests of loops that torch.compile compiles, and of loops that cache parametrizations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pipeshard.errors import ConfigurationError
from tests.pool import Pool
from tests.unsplit import Split, largest_error, parameter_error

DATA = [{"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))} for seed in range(3)]


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 1.5


class Net(nn.Module):
    """Its layers have parametrized weights. A method may be compiled."""

    def __init__(self, backend: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        for layer in self.layers:
            parametrize.register_parametrization(layer, "weight", Scaled())
        self.squares = torch.compile(squares, backend=backend) if backend else squares

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": self.squares(x)}


def squares(x: Tensor) -> Tensor:
    return x.square().mean()


def trained(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]], cached: bool = False, backend: Any = None
) -> float:
    """The largest error of a parameter after three steps."""
    unsplit = Net()
    split = Split(Net(backend), dist.get_world_size(), DATA[0], num_microbatches=2, verify=False)
    optimizer = torch.optim.AdamW(unsplit.parameters(), lr=1e-3)

    def step(data: dict[str, Tensor]) -> Tensor:
        loss: Tensor = split.backward(data)["loss"]
        split.optimizer.step()
        split.optimizer.zero_grad()
        return loss * 1

    step = wrap(step)
    with parametrize.cached() if cached else nullcontext():
        losses = [step(data) for data in DATA]
    for data, found in zip(DATA, losses, strict=True):
        loss = unsplit(**data)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert largest_error([found - loss.detach()]) < 1e-6
    return parameter_error(split, unsplit)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="eager")


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_compiled_loop_trains(pool: Pool, backend: str | None) -> None:
    """torch.compile of a step compiled pipeshard's own code: an internal error of the compiler in the step's batch.
    Functions of the model that are compiled themselves stay so."""
    assert largest_error(pool.run(trained, 2, compiled, backend=backend)) < 1e-6


def test_a_loop_that_caches_parametrizations_trains(pool: Pool) -> None:
    """The microbatches of a step shared one cached weight: "Trying to backward through the graph a second time"."""
    assert largest_error(pool.run(trained, 2, plain, cached=True)) < 1e-6


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": x.square().mean()}


def tied_late() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.layers[3].weight = model.layers[0].weight
    split = Split(Tied(), dist.get_world_size(), DATA[0], num_microbatches=2, verify=False)
    split.booster.boost(model, optimizer)


def test_an_optimizer_that_was_created_before_a_tie_is_refused(pool: Pool) -> None:
    """The advice was that the parameter belongs to another model."""
    for message in pool.run_expecting(ConfigurationError, tied_late, 2):
        assert "If weights were tied or replaced after the optimizer was created, create the optimizer after" in message
