"""Tests of shared casts: under autocast, the microbatches of a step share one 16-bit copy of each parameter."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipeshard.engine import mixed_precision
from pipeshard.engine.mixed_precision import Precision, casts_have_graphs
from tests.pool import Pool
from tests.unsplit import Split, gradient_error

M, WIDTH = 4, 24


class Layer(nn.Module):
    """Two linear layers; `how` is what is peculiar about it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "reentrant":
            return checkpoint(self._run, x, use_reentrant=True)
        if self.how == "checkpoint":
            return checkpoint(self._run, x, use_reentrant=False)
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(how) for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = x * torch.ones(1, requires_grad=True)  # as reentrant checkpoints need it
        for layer in self.layers:
            x = layer(x)
        return {"loss": (x.float() - labels).square().mean()}


class Casts(TorchDispatchMode):
    """Counts those of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = func is torch.ops.aten._to_copy.default and args[0].shape in ((2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH))
        self.count += is_cast and (kwargs or {}).get("dtype") is torch.bfloat16
        return func(*args, **(kwargs or {}))


def trained(how: str, graphs: bool = True) -> tuple[float, int, int]:
    """How far the gradients of two steps are from those of one process, and how many weights were cast in the second,
    of how many that this rank has; without `graphs`, with a torch that does not give each cast one."""
    torch.manual_seed(0)
    model = Stack(how)
    data = {"x": torch.randn(2 * M, 5, WIDTH), "labels": torch.randn(2 * M, 5, WIDTH)}
    whole = copy.deepcopy(model)
    options: dict[str, Any] = {"precision": "bf16", "autocast": True, "verify": False}
    split, worst = Split(model, dist.get_world_size(), data, num_microbatches=M, **options), 0.0
    with mock.patch.object(mixed_precision, "casts_have_graphs", lambda: graphs):
        for _ in range(2):
            split.optimizer.zero_grad()
            whole.zero_grad()
            for part in zip(*(data[name].chunk(M) for name in ("x", "labels")), strict=True):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = whole(*part)["loss"]
                (loss / M).backward()
            with Casts() as casts:
                split.backward(data)
            worst = max(worst, gradient_error(split, whole))
    return worst, casts.count, sum(name.endswith("weight") for name in split.held)


@pytest.mark.turns
@pytest.mark.parametrize(("how", "times"), [("", 1), ("checkpoint", 1), ("reentrant", 1)])
def test_weights_are_cast_once_a_step_where_that_is_right(pool: Pool, how: str, times: int) -> None:
    """Every microbatch in flight kept a copy of all weights."""
    for error, casts, weights in pool.run(trained, 2, how):
        assert error < 1e-6
        assert casts == times * weights


@pytest.mark.parametrize(("kind", "kept"), [("parameter", False), ("settled", False), ("tensor", True)])
def test_where_forwards_write_to_parameters_each_has_its_own_casts(kind: str, kept: bool) -> None:
    flows: Any = [SimpleNamespace(carried=()), SimpleNamespace(carried=[SimpleNamespace(kind=kind)])]
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(1, 2)
    precision = Precision("bf16", True, torch.device("cpu"))
    with precision.sharing_casts(flows):
        for value in (2.0, 2.0 if kept else 6.0):
            with precision.running():
                assert float((x @ weight).sum()) == 2 * value
            weight.data.mul_(3.0)
    with precision.running():
        assert float((x @ weight).sum()) == 36.0


def test_casts_end_with_their_step_inside_a_loop_under_autocast() -> None:
    """A training loop inside torch.autocast used the casts of its first step in all later steps: no weight of a linear
    layer seemed to change."""
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(1, 2)
    precision = Precision("bf16", True, torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        for value in (1.0, 3.0):
            with precision.sharing_casts([]), precision.running():
                assert float((x @ weight).sum()) == 4 * value
            weight.data.mul_(3.0)


@pytest.mark.turns
def test_casts_without_a_graph_are_not_shared(pool: Pool) -> None:
    """An older torch hands out what it has cast in a reentrant checkpoint: later microbatches would lose gradients."""
    assert casts_have_graphs()
    for error, casts, weights in pool.run(trained, 2, "reentrant", False):
        assert error < 1e-6 and casts == 2 * M * weights
