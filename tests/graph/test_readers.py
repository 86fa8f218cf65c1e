"""Tests of readers: which code reads what a unit leaves, and what the search for it costs."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pipeshard.graph import mentions, readers
from pipeshard.graph.trace import trace

H = 4


class Layer(nn.Module):
    """Has its options in an object that all layers share, and a method that could set them."""

    def __init__(self, options: SimpleNamespace) -> None:
        super().__init__()
        self.linear, self.options = nn.Linear(H, H), options

    def reset(self) -> None:
        self.options.depth = self.options.width = self.options.heads = self.options.rate = 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.options.rate
        return y


class Model(nn.Module):
    def __init__(self, depth: int, names: list[str]) -> None:
        super().__init__()
        options = SimpleNamespace(**dict.fromkeys(names, 1))
        self.layers = nn.ModuleList(Layer(options) for _ in range(depth))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


@pytest.mark.parametrize(("depth", "names"), [(3, ["rate"]), (6, ["rate", "depth", "width", "heads"])])
def test_a_models_code_is_searched_once_in_a_trace(depth: int, names: list[str]) -> None:
    """It was searched again for every option of every layer. A MaxxVit of timm, whose 34 layers share theirs, took 75 s
    to trace, and its proof ended without a result."""
    model = Model(depth, names)
    with (
        mock.patch.object(mentions, "_code_held", wraps=mentions._code_held) as searched,
        mock.patch.object(readers.Readers, "observed", autospec=True, side_effect=readers.Readers.observed) as traced,
    ):
        trace(model, {"x": torch.randn(2, H)})
    assert searched.call_count == 2 * traced.call_count > 0  # in the model, and in its layers
