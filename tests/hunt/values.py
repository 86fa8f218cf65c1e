"""Values: models whose sizes, numbers, writes or missing gradients depend on values that only one stage has."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hunt.nets import Block, H, Net, data

LENGTHS = [data(0, length=6), data(1, length=8), data(2, length=6)]


class Pruning(Block):
    """Leaves out the last tokens; how many is a share in a frozen parameter."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.share = nn.Parameter(torch.tensor(0.25 * (place + 1)), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x[:, : x.shape[1] - int(self.share * x.shape[1])]


class Pruned(Net):
    """The loss is of the tokens that are left."""

    def block(self, place: int) -> nn.Module:
        return Pruning(place) if place < 2 else Block(place)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels[:, : logits.shape[1]].flatten())


class Counted(Block):
    """Also returns a number that it reads off a frozen parameter."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.count = nn.Parameter(torch.tensor(3.0), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), int(self.count)


class ByNumber(Net):
    """Glue after a later layer scales by the number."""

    def block(self, place: int) -> nn.Module:
        return Counted(place) if place == 0 else Block(place)

    def body(self, x: Tensor) -> Tensor:
        x, count = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return x * count


class Selecting(Block):
    """Returns the rows that stand out."""

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x, x[x.sum(-1) > 0]


class Selected(Net):
    """Proposals: how many there are, the activations say."""

    def block(self, place: int) -> nn.Module:
        return Selecting(place) if place == 1 else Block(place)

    def body(self, x: Tensor) -> Tensor:
        x, proposals = self.layers[1](self.layers[0](x))
        return self.layers[3](self.layers[2](x) + proposals.sum(0))


class First(torch.autograd.Function):
    """A sum of which the backward gives the first summand a gradient, and the second none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class NoneInside(Net):
    class block(Block):
        def forward(self, x: Tensor) -> Any:
            return First.apply(x, self.b(torch.tanh(self.a(x))))


class Twofold(Block):
    def forward(self, x: Tensor) -> Any:
        return x + self.a(x), self.b(x)


class NoneOver(Net):
    """The backward that returns none is in the glue after a layer with two results."""

    def block(self, place: int) -> nn.Module:
        return Twofold(place) if place == 1 else Block(place)

    def body(self, x: Tensor) -> Tensor:
        x = First.apply(*self.layers[1](self.layers[0](x)))
        return self.layers[3](self.layers[2](x))


class Passing(Block):
    """Returns what it was given."""

    def forward(self, x: Tensor) -> Any:
        return x


class Writing(Block):
    """Writes to what it was given, and then reads it."""

    def forward(self, x: Tensor) -> Any:
        x.add_(1.0)
        return super().forward(x)


class HandedOn(Net):
    """The last layer writes to a tensor that three layers have handed on, the first of them on another stage."""

    def block(self, place: int) -> nn.Module:
        return Writing(place) if place == 3 else Passing(place)


class WritesByValues(Net):
    class block(Block):
        def forward(self, x: Tensor) -> Any:
            if float(x.detach().abs().sum()) > 0:
                x.add_(1.0)
            return super().forward(x)


class Codes(Block):
    """Also returns a code for each token, and which tokens stand out."""

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x, x.detach().sum(-1).mul(7).long().abs() % 5, x.detach().mean(-1) > 0


class ByCodes(Net):
    """Glue looks up the codes, which the last layer reads."""

    def block(self, place: int) -> nn.Module:
        return Codes(place) if place == 0 else Block(place)

    def extra(self, codes: Tensor, mask: Tensor) -> Tensor:
        return F.embedding(codes, torch.eye(5, H))

    def body(self, x: Tensor) -> Tensor:
        x, codes, mask = self.layers[0](x)
        extra = self.extra(codes, mask)
        for layer in self.layers[1:3]:
            x = layer(x)
        return self.layers[3](x + extra)


class ByMask(ByCodes):
    def extra(self, codes: Tensor, mask: Tensor) -> Tensor:
        return mask.unsqueeze(-1) * 1.0


class ByLanguage(Net):
    """Each sample has the adapters of its language."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.ModuleDict({k: nn.Linear(H, H) for k in ("de", "en", "fr")}) for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor, languages: list[str]) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer, adapters in zip(self.layers, self.adapters, strict=True):
            x, before = torch.zeros_like(x), layer(x)
            for name in sorted(set(languages)):
                rows = torch.tensor([k for k, language in enumerate(languages) if language == name])
                x[rows] = before[rows] + adapters[name](before[rows])
        logits = self.head(x)
        return {"loss": self.loss(logits, labels), "logits": logits}


class Backwards(Net):
    """Runs its layers in the reverse order while `use` is set, as some do in evaluation."""

    use = False

    def body(self, x: Tensor) -> Any:
        for layer in reversed(self.layers) if self.use else self.layers:
            x = layer(x)
        return x
