"""Chain: what layers read, as declared and as traced."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeshard import trace
from pipeshard.graph.dataflow import Chain, Dataflow, layers
from tests import zoo


class Ladder(nn.Module):
    """Each layer reads the embeddings too, if `rungs`; the last reads all results before it, if `dense`."""

    def __init__(self, rungs: bool = False, dense: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="llama")
        self.rungs, self.dense = rungs, dense
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = embedded = self.embed(input_ids)
        results = []
        for layer in self.layers:
            read = x + embedded if self.rungs else x
            x = layer(sum(results, read) if self.dense and layer is self.layers[3] else read)
            results.append(x)
        return self.head(sum((head(x) for head in self.heads), x))


def traced(model: nn.Module) -> Dataflow:
    return trace(model, {"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, exact=True)


def test_heads_side_by_side_are_no_chain() -> None:
    flow = traced(Ladder())
    names = [(flow.calls[k].unit, flow.calls[n].unit) for k, n in layers(flow)]
    assert names == [(f"layers.{k}", f"layers.{k + 1}") for k in range(3)]
    assert not Chain(("hidden states",)).mismatch(flow)


@pytest.mark.parametrize(
    ("rungs", "dense", "beside", "found"),
    [
        (True, False, (), r"layers\.1 reads layers\.0\[0\] where it comes after layers\.0, and also embed\[0\]"),
        (True, False, ("embeddings",), ""),
        (False, True, (), r"layers\.3 reads layers\.2\[0\] .* and also layers\.0\[0\], layers\.1\[0\]"),
        (True, True, ("embeddings",), r"layers\.3 reads layers\.2\[0\]"),
        (True, True, ("embeddings", ...), ""),
    ],
)
def test_what_is_read_beside_the_layer_before(rungs: bool, dense: bool, beside: Any, found: str) -> None:
    mismatch = Chain(("hidden states",), beside).mismatch(traced(Ladder(rungs, dense)))
    assert re.search(found, mismatch) if found else not mismatch


def test_what_is_handed_on() -> None:
    flow = trace(zoo.build("t5"), zoo.batch("t5"), exact=True)
    assert not Chain(("hidden states", "bias", "bias"), ("encoder output",)).mismatch(flow)
    assert "encoder.block.1 reads encoder.block.0[0], encoder.block.0[1] where" in (
        Chain(("hidden states",), ("encoder output",)).mismatch(flow)
    )
    assert "and also encoder.final_layer_norm[0]" in Chain(("hidden states", "bias", "bias")).mismatch(flow)


def test_a_layer_that_does_not_read_the_one_before_is_a_mismatch() -> None:
    class Skipping(Ladder):
        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            first, second = self.layers[0](x), self.layers[1](x)
            return self.head(self.layers[2](second) + first)

    mismatch = Chain(("hidden states",), ("embeddings",)).mismatch(traced(Skipping()))
    assert "layers.1 reads nothing where it comes after layers.0, and also embed[0]" in mismatch


class Cache:
    """Of one forward: what each layer keeps."""

    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}


class Chunked(Ladder):
    """Runs its layers on one half of the sequence after the other; each adds what it made of the first one."""

    class Layer(nn.Linear):
        place: int

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            y = super().forward(x) + cache.of.get(self.place, 0)
            cache.of[self.place] = y / 2
            return y

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(4, 4) for _ in range(2))
        for place, layer in enumerate(self.layers):
            layer.place = place

    def forward(self, input_ids: Tensor) -> Tensor:
        cache = Cache()
        for x in self.embed(input_ids).chunk(2, 1):
            for layer in self.layers:
                x = layer(x, cache)
        return self.head(x)


def test_what_a_layer_keeps_for_itself_is_free() -> None:
    """VibeVoice's convolutions pad a chunk with the end of the one before: it was refused once that was seen."""
    flow = traced(Chunked())
    assert any(value.call == 1 for value in flow.calls[3].reads.values)
    assert not Chain(("hidden states",)).mismatch(flow)
