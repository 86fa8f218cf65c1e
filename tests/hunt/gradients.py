"""Gradients: models whose code between the layers detaches, compares or rounds the results of layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.hunt.cases import Case, adamw, ordinary
from tests.hunt.nets import Block, Net, data
from tests.hunt.values import First, NoneOver, Twofold

ALONE = {"verify": False}


class Two(Net):
    """The first layer has a second result, made by parameters of its own, which is read between the last layers."""

    def block(self, place: int) -> nn.Module:
        return Twofold(place) if place == 0 else Block(place)

    def body(self, x: Tensor) -> Tensor:
        x, second = self.layers[0](x)
        x = self.layers[2](self.layers[1](x))
        return self.layers[3](self.join(x, second))

    def join(self, x: Tensor, second: Tensor) -> Tensor:
        return x + second.detach()


class Compares(Two):
    def join(self, x: Tensor, second: Tensor) -> Tensor:
        return torch.where(second > 0, x, 2 * x)


class Rounds(Two):
    """The straight-through estimator."""

    def join(self, x: Tensor, second: Tensor) -> Tensor:
        return x + (second.round() - x).detach()


class WithoutGrad(Two):
    def join(self, x: Tensor, second: Tensor) -> Tensor:
        with torch.no_grad():
            scale = second.sigmoid()
        return x * scale


class ByFunction(Two):
    def join(self, x: Tensor, second: Tensor) -> Tensor:
        return First.apply(x, second.detach())


class Both(Two):
    """Is also read with its gradient."""

    def join(self, x: Tensor, second: Tensor) -> Tensor:
        return First.apply(x, second.detach()) + second


class OnOneSide(Two):
    """Gets a gradient before the cut, and none after it."""

    def body(self, x: Tensor) -> Tensor:
        x, second = self.layers[0](x)
        x = self.layers[2](self.layers[1](x + second))
        return self.layers[3](x + second.detach())


class InLoss(Two):
    def join(self, x: Tensor, second: Tensor) -> Tensor:
        self.second = second
        return x

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = super().forward(ids, labels)
        return out | {"loss": out["loss"] * self.second.detach().sigmoid().mean()}


class Keeping(Block):
    """Puts its second result into a dict that later layers have, too."""

    def forward(self, x: Tensor) -> Any:
        x, self.shared["second"] = x + self.a(x), self.b(x)  # type: ignore[operator, index]
        return x


class Looking(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.shared["second"].detach()  # type: ignore[index]


class Shares(Net):
    def __init__(self) -> None:
        super().__init__()
        shared: dict[str, Tensor] = {}
        for layer in self.layers:
            layer.__dict__["shared"] = shared

    def block(self, place: int) -> nn.Module:
        return Keeping(place) if place == 0 else Looking(place) if place > 1 else Block(place)


class Handed(Net):
    """Layers are given a dict with the second result, which they detach."""

    class Reading(Block):
        def forward(self, x: Tensor, given: dict[str, Tensor]) -> Any:
            return super().forward(x) + given["second"].detach()

    def block(self, place: int) -> nn.Module:
        return Twofold(place) if place == 0 else self.Reading(place)

    def body(self, x: Tensor) -> Tensor:
        x, second = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x, {"second": second})
        return x


def half_labelled(count: int = 2) -> list[dict[str, Tensor]]:
    """The second microbatch has no label."""
    batches = [data(seed) for seed in range(count)]
    for batch in batches:
        batch["labels"][2:] = -100
    return batches


def detached(make: type[Net], story: str, **options: Any) -> Case:
    return Case(make, story, ordinary(3), ALONE | options, optimizer=adamw)


CASES: dict[str, Case] = {
    "detached after a cut": detached(
        Two,
        "Code between the layers detaches what another stage has sent: the parameters that made it got zeros, and "
        "AdamW decayed them.",
    ),
    "detached in two microbatches": detached(Two, "The same in microbatches.", num_microbatches=2, schedule="gpipe"),
    "compared after a cut": detached(Compares, "The same where it is only compared."),
    "rounded after a cut": detached(Rounds, "The same in a straight-through estimator."),
    "read under no_grad": detached(WithoutGrad, "The same under torch.no_grad."),
    "detached for a function": detached(ByFunction, "The same as an argument of a torch.autograd.Function."),
    "detached, and not": detached(Both, "Where another reader gives it a gradient, that is sent back."),
    "detached on one side": detached(
        OnOneSide, "What gets a gradient on its own stage, and is only read by the next one, was refused."
    ),
    "detached in the loss": detached(InLoss, "The same by the loss."),
    "detached by layers that share a dict": detached(
        Shares, "The same by a layer that reads it in a dict which all layers share."
    ),
    "detached by layers that are given a dict": detached(Handed, "The same by layers that get it in a dict."),
    "none over a cut, half labelled": Case(
        NoneOver,
        "The last microbatch has no label and so no backward pass: a backward that returns None was not looked for.",
        half_labelled(),
        ALONE | {"partition": [3, 3], "num_microbatches": 2},
        optimizer=adamw,
        refused="returns None",
    ),
}
