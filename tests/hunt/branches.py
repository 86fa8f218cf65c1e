"""Branches: models and criteria that branch in Python on activations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from tests.hunt.cases import Case
from tests.hunt.nets import H, Net


class Logits(Net):
    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return self.head(self.body(self.embed(ids)))


def hardest(logits: Tensor, batch: Any) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return losses[losses > losses.mean()].mean()


class InTail(Net):
    """Chooses tokens by their losses, and doubles the loss by what the first stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, 1)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        gate = self.gate(x)
        logits = self.head(self.body(x))
        loss = hardest(logits, {"labels": labels})
        return {"loss": loss * 2 if gate.max() > 0 else loss, "logits": logits}


class Anchored(InTail):
    """Makes a list anew in each forward, of the tensors that it had, as torchvision's detectors do with anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors = [torch.ones(1), torch.full((1,), 0.5)]

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = super().forward(ids, labels)
        self.anchors = [anchor.to(out["loss"].dtype) for anchor in self.anchors]
        return {"loss": out["loss"] * sum(self.anchors).mean(), "logits": out["logits"]}


class Variational(Net):
    """Has a distribution in its middle, whose arguments torch validates unless told not to."""

    validate = True  # ColossalAI changes the default

    def body(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        latent = torch.distributions.Normal(x, F.softplus(x), validate_args=self.validate)
        return self.layers[3](self.layers[2](latent.mean + latent.stddev))


class Unvalidated(Variational):
    validate = False


class Dual(Net):
    """Adds the square of a forward derivative through all layers."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        with forward_ad.dual_level():
            hidden, tangent = forward_ad.unpack_dual(self.body(forward_ad.make_dual(x, torch.ones_like(x))))
        logits = self.head(hidden)
        return {"loss": self.loss(logits, labels) + 0.1 * tangent.square().mean(), "logits": logits}


class Otherwise(Net):
    """Reads the embedding if the logits are not zero, as they are in a trace."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        logits = self.head(self.body(x))
        loss = self.loss(logits, labels)
        return {"loss": loss + x.pow(2).mean() if logits.abs().max() > 0 else loss, "logits": logits}


class Early(Net):
    """Ends before its other layers where the first one returns zeros, as in a trace."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.layers[0](self.embed(ids))
        return {"loss": (self.body(x) if x.abs().max() > 0 else x).pow(2).mean()}


class Sign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.mean() > 0 else x * 3


class Between(Net):
    """A module without parameters decides between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.sign = Sign()

    def body(self, x: Tensor) -> Any:
        for k, layer in enumerate(self.layers):
            x = layer(x if k != 2 else self.sign(x))
        return x


CASES = {
    "a distribution": Case(
        Variational,
        "torch.distributions validates values that only one stage has: the error named torch.where, not the option.",
        options={"verify": False, "partition": [2, 4]},
        refused=r"torch\.distributions validates these values: pass validate_args=False",
    ),
    "a distribution, not validated": Case(
        Unvalidated, "The same with the option that the error names.", options={"verify": False, "partition": [2, 4]}
    ),
    "forward derivatives": Case(
        Dual,
        "The results of units on other stages had no tangents: silently wrong without the proof.",
        options={"verify": False},
        refused="result, or differentiates it, but only the stage of the unit has this result: .*nets.py",
    ),
    "the hardest by a criterion": Case(
        Logits,
        "A criterion selects tokens by their losses, on the last stage, which has all that it reads: it was refused "
        "as if no stage could.",
        criterion=lambda: hardest,
    ),
    "the hardest in the forward": Case(
        InTail, "The same after the last layer; what it only decides on gets no gradient, which was one of zeros."
    ),
    "the hardest, beside a list that is made anew": Case(
        Anchored,
        "FCOS was refused: the list of its anchors, a new one of the same tensors after each forward, counted as "
        "something that every stage has to keep, so that the last one could not decide alone.",
    ),
    "a branch that a trace does not see": Case(
        Otherwise,
        "The last stage reads what nobody sent, since the trace went the other way: its loss would be nan, and the "
        "gradients on the other stages wrong.",
        options={"verify": False},
        refused="reads a result of unit embed.*torch.where",
    ),
    "layers that a trace does not call": Case(
        Early,
        "A trace ends after one layer: which stage has the others cannot be known.",
        options={"verify": False},
        refused="branches in Python on a unit.s result, or differentiates it, but only the stage of the unit",
    ),
    "a module without parameters decides": Case(
        Between,
        "The advice was to decide inside of a unit, but a module without parameters was none, so that it was refused "
        "again.",
    ),
}
