"""Regions: which unit calls may be compiled as one, of made-up models that do something between their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeshard import trace
from pipeshard.model.region import in_turn, is_hooked, regions
from tests import zoo

H, LAYERS = 8, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        x = x + self.dropout(torch.tanh(self.linear(x)))
        return x if mask is None else x * mask


Glue = Callable[["Stack", Tensor, Tensor], Tensor]


class Stack(nn.Module):
    """An embedding, layers, and a head; `glue` is what calls the layers."""

    def __init__(self, glue: Glue) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, H)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(H, 11)
        self.glue = glue
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        mask = (input_ids > 3)[..., None].float()
        logits = self.head(self.glue(self, self.embed(input_ids), mask))
        return {"loss": nn.functional.cross_entropy(logits.view(-1, 11), labels.view(-1)), "logits": logits}


def plain(model: Stack, x: Tensor, mask: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x, mask, flag=True)
    return x


def in_halves(model: Stack, x: Tensor, mask: Tensor, between: Callable[[Tensor, Tensor], Any]) -> Tensor:
    """`between(x, mask)` after half of the layers; if it returns a pair, the others get that."""
    for k, layer in enumerate(model.layers):
        if k == LAYERS // 2:
            x, mask = between(x, mask) or (x, mask)
        x = layer(x, mask)
    return x


def halves(between: Callable[[Tensor, Tensor], Any]) -> Glue:
    return lambda model, x, mask: in_halves(model, x, mask, between)


def watching(model: Stack, x: Tensor, mask: Tensor) -> Tensor:
    """Statistics of an activation, which nothing that is returned depends on."""
    return in_halves(model, x, mask, lambda x, mask: (model.seen.copy_(x.detach().mean()), None)[1])


def without_gradient(model: Stack, x: Tensor, mask: Tensor) -> Tensor:
    for k, layer in enumerate(model.layers):
        with torch.set_grad_enabled(k >= LAYERS // 2):
            x = layer(x, mask)
    return x


def half_in_16_bits(model: Stack, x: Tensor, mask: Tensor) -> Tensor:
    for k, layer in enumerate(model.layers):
        with torch.autocast("cpu", enabled=k < LAYERS // 2):
            x = layer(x, mask)
    return x


def checkpointed(model: Stack, x: Tensor, mask: Tensor) -> Tensor:
    for layer in model.layers:
        x = checkpoint(layer, x, mask, use_reentrant=False)
    return x


def opening_written(model: Stack, x: Tensor, mask: Tensor) -> Tensor:
    """What the first layer was given is changed in place while the third one's result is on its way."""
    first = x * 2
    x = first
    for k, layer in enumerate(model.layers):
        if k == LAYERS // 2:
            first.zero_()
        x = layer(x, mask)
    return x


def skipping(model: Stack, x: Tensor, mask: Tensor) -> Tensor:
    """The fourth layer is given what the first one has returned."""
    first = x = model.layers[0](x, mask)
    for k, layer in enumerate(model.layers[1:]):
        x = layer(x, first if k == 2 else mask)
    return x


def add_(x: Tensor, mask: Tensor) -> None:
    mask.add_(1)


BATCH = {"input_ids": torch.arange(12).view(2, 6) % 11, "labels": torch.arange(12).view(2, 6) % 11}
WHOLE, HALVES = [range(1, 7)], [range(1, 4), range(4, 7)]


def found(model: nn.Module, longest: int = 8, outputs: bool = False, batch: Any = BATCH) -> list[range]:
    flow = trace(model, batch)
    return regions(flow, range(len(flow.calls)), longest, outputs)


@pytest.mark.parametrize(
    ("glue", "expected"),
    [
        (plain, WHOLE),
        (halves(lambda x, mask: None), WHOLE),
        (halves(lambda x, mask: (x + 1, mask)), HALVES),
        (halves(lambda x, mask: (x, mask + 1)), HALVES),
        (halves(lambda x, mask: (x, None)), HALVES),
        (halves(add_), HALVES),
        (watching, HALVES),
        (without_gradient, HALVES),
        (half_in_16_bits, HALVES),
        (opening_written, HALVES),
        (skipping, [range(2, 4), range(5, 7)]),
        (checkpointed, []),
    ],
)
def test_layers_are_joined_where_the_model_does_nothing_between_them(glue: Glue, expected: list[range]) -> None:
    assert found(Stack(glue)) == expected


def test_a_region_has_so_many_units_at_most() -> None:
    model = Stack(plain)
    assert found(model, 4) == [range(1, 5), range(5, 7)]
    assert found(model, 5) == [range(1, 6)]  # one alone is none
    assert found(model, 1) == []
    flow = trace(model, BATCH)
    assert regions(flow, [1, 2, 4, 5, 6], 8) == [range(1, 3), range(4, 7)]


def test_layers_that_draw_random_numbers_stay_apart() -> None:
    model = Stack(plain)
    for layer in model.layers[2:4]:
        layer.dropout.p = 0.1
    assert found(model) == [range(1, 3), range(5, 7)]
    assert found(model.eval()) == WHOLE


def test_what_is_asked_for_comes_out_of_its_unit() -> None:
    class Told(Stack):
        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            middle: list[Tensor] = []
            self.glue = halves(lambda x, mask: middle.append(x))
            return {**super().forward(input_ids, labels), "middle": middle[0]}

    model = Told(plain)
    assert found(model) == WHOLE and found(model, outputs=True) == HALVES


def test_those_of_transformers() -> None:
    expected = {"llama": [range(1, 5)], "gpt2": [range(2, 6)], "vit": [range(1, 5)], "t5": []}
    assert {name: found(zoo.build(name), batch=zoo.batch(name)) for name in expected} == expected


def test_a_hook_is_seen() -> None:
    layer = Layer()
    assert not is_hooked(layer)
    handle = layer.register_forward_hook(lambda *_: None)
    assert is_hooked(layer)
    handle.remove()
    assert not is_hooked(layer)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert is_hooked(layer)
    handle.remove()


def test_units_run_in_turn() -> None:
    model = Stack(plain)
    x, mask = torch.randn(2, 6, H), torch.rand(2, 6, 1)
    assert in_turn(list(model.layers))(x, mask, flag=True).equal(plain(model, x, mask))
