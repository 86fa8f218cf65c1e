"""Attempts: models that call a layer with an argument, and without it if the layer does not accept it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.hunt.cases import Case
from tests.hunt.nets import H, Net


class Scaled(nn.Module):
    """A layer that takes a length."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(H, H)

    def forward(self, x: Tensor, lengths: float) -> Tensor:
        return self.body(x) * lengths


class Attempts(Net):
    """Gives every layer the lengths that some of them take, as speechbrain's containers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(H, H), Scaled(), nn.Linear(H, H), Scaled()])

    def body(self, x: Tensor) -> Any:
        for layer in self.layers:
            try:
                x = x + layer(x, lengths=0.5)
            except TypeError:
                x = x + layer(x)
        return x


CASES = {
    "layers that do not take an argument": Case(
        Attempts,
        "A model catches the TypeError of a layer that does not take an argument, and calls it without: it was refused "
        "as a layer that does not run.",
        options={"partition": [3, 3]},
    )
}
