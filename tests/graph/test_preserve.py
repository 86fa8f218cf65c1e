"""Tests that a trace or a trial leaves the user's objects unchanged."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeshard.engine.mixed_precision import Precision
from pipeshard.graph.preserve import without_tf32
from pipeshard.graph.trace import trace

CACHE: dict[Any, Any] = {}
CALLS = 0


class Busy(nn.Module):
    """Changes in each forward all that it can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.steps, self.seen, self.last = 0, [torch.zeros(1)], None
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.python = random.Random(1)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        global CALLS
        CALLS += 1
        CACHE[CALLS] = x = self.embed(ids)
        self.steps += 1
        self.seen.append(x)
        self.seen[0].add_(1)
        labels -= 1
        noise = torch.rand(1, generator=self.torch) + self.numpy.random() + self.python.random()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)))
            self.scale.data = self.scale.data * 0.5
            self.layers[1].weight.data.mul_(0.9).add_(self.layers[0].weight)
        for layer in self.layers:
            x = layer(x * self.scale + noise)
        self.last = x
        return {"loss": x.square().mean() + labels.float().mean()}


class Counting:
    """A criterion that counts its calls."""

    def __init__(self) -> None:
        self.calls, self.mean = 0, torch.zeros(())

    def __call__(self, outputs: Any, inputs: Any) -> Tensor:
        self.calls += 1
        self.mean += 1
        return outputs["loss"] * self.calls  # type: ignore[no-any-return]


def test_a_trace_changes_nothing() -> None:
    """Boost alone moved MoCo's key encoder, a criterion's counter and the batch it was given, drew from generators of
    the model's own, and left tensors without values in caches outside of modules."""
    model, criterion = Busy(), Counting()
    batch = {"ids": torch.arange(6).view(2, 3), "labels": torch.ones(2, 3, dtype=torch.long)}
    kept = {name: (tensor, tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    versions = [parameter._version for parameter in model.parameters()]
    drawn = model.torch.get_state(), str(model.numpy.bit_generator.state), model.python.getstate()
    for exact in (False, True):
        trace(model, batch, criterion, exact=exact)
        assert [parameter._version for parameter in model.parameters()] == versions
        for name, tensor in model.state_dict().items():
            assert tensor.data_ptr() == kept[name][1]
            assert torch.equal(tensor, kept[name][2]), name
        assert batch["labels"].eq(1).all()
        assert batch["labels"]._version == 0
        assert (model.steps, model.last, len(model.seen), model.seen[0].item()) == (0, None, 1, 0)
        assert (CALLS, CACHE, criterion.calls, criterion.mean.item()) == (0, {}, 0, 0)
        assert torch.equal(drawn[0], model.torch.get_state())
        assert drawn[1:] == (str(model.numpy.bit_generator.state), model.python.getstate())


def test_in_sixteen_bits() -> None:
    """While a model in 16 bits is traced it seems to have no values: nothing could be put back into its buffers."""
    model, batch = Busy(), {"ids": torch.zeros(2, 3, dtype=torch.long), "labels": torch.ones(2, 3, dtype=torch.long)}
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Precision("bf16", False, torch.device("cpu")).seeming(model):
        trace(model, batch)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    assert model.mean.dtype is torch.float32


@pytest.mark.parametrize("products", ["highest", "high", "medium"])
def test_tf32_is_as_before_after_a_block_without_it(products: str) -> None:
    """The options of torch have old and new names, and the old ones raise an error if they do not fit together."""

    def options() -> list[Any]:
        backends = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul
        precisions = [backend.fp32_precision for backend in backends]
        return [*precisions, torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32]

    torch.set_float32_matmul_precision(products)
    try:
        before = options()
        with without_tf32(), without_tf32():
            assert "tf32" not in options() and options()[3:] == ["highest", False]
        assert options() == before
    finally:
        torch.set_float32_matmul_precision("highest")
