"""Nets: models that are refused, and the same models with the remedy that the error names."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hunt import values
from tests.hunt.nets import Block, H, ListeningGlue, Logits, Net, V


class Lists(Net):
    """Layers return lists, where they were generators."""

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return [y, y.square().mean()]

    def body(self, x: Tensor) -> Any:
        for layer in self.layers:
            x, aux = layer(x)
            x = x + 0.1 * aux
        return x


class Gains(Net):
    """Layers return the number that was an attribute of their result."""

    class block(Block):
        def forward(self, x: Tensor, gain: Any = 1.0) -> Any:
            return super().forward(x * gain), torch.tensor(1 + 0.1 * self.place)

    def body(self, x: Tensor) -> Any:
        gain: Any = 1.0
        for layer in self.layers:
            x, gain = layer(x, gain)
        return x


class NumbersAsTensors(Net):
    """Layers return the largest activation as a tensor, where it was a number."""

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, y.detach().abs().max()

    def body(self, x: Tensor) -> Any:
        for layer in self.layers:
            x, largest = layer(x)
            x = x / (1 + largest)
        return x


class ByAttribute(Net):
    """A skip connection goes by an attribute that is set between steps, where it was a count of forwards."""

    skips = False

    def body(self, x: Tensor) -> Any:
        first = self.layers[0](x)
        x = super().body(x)
        return x + first if self.skips else x


class ByLength(Net):
    """A skip connection goes by the batch's length."""

    def body(self, x: Tensor) -> Any:
        first = self.layers[0](x)
        x = super().body(x)
        return x + first if x.shape[1] > 100 else x


class Decides(Net):
    """Glue branches in Python on an activation."""

    def body(self, x: Tensor) -> Any:
        x = super().body(x)
        return x * 2 if x.mean() > 0 else x


class Selects(Net):
    """The same by torch.where."""

    def body(self, x: Tensor) -> Any:
        x = super().body(x)
        return torch.where(x.mean() > 0, x * 2, x)


class DecidesInside(Net):
    """The same inside of a layer."""

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y * 2 if y.mean() > 0 else y


class ListensInside(nn.Module):
    """A gradient hook inside of the layer that makes the tensor."""

    class Writer(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda gradient: 0.1 * gradient)
            return y

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, H), nn.Linear(H, V)
        self.layers = nn.ModuleList([Block(), self.Writer()])
        self.readers = nn.ModuleList(ListeningGlue.Reader() for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        memory = self.embed(ids)
        for layer in self.layers:
            memory = layer(memory)
        x = torch.ones_like(memory)
        for reader in self.readers:
            x = reader(x, memory)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class Counted(Net):
    """A scale that follows from a count in an attribute, where it came from an iterator."""

    count = 0

    def body(self, x: Tensor) -> Any:
        self.count += 1
        return super().body(x) * self.count


class Tied(Net):
    """One parameter, where two shared their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Momentum(Net):
    """The forward moves a copy of the head towards the head."""

    moves = True

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.embed).requires_grad_(False)

    def body(self, x: Tensor) -> Any:
        if self.moves:
            with torch.no_grad():
                self.slow.weight.mul_(0.9).add_(0.1 * self.embed.weight)
        return super().body(x)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.body(self.embed(ids) + self.slow(ids))
        return {"loss": self.loss(self.head(x), labels)}


class MomentumAfter(Momentum):
    """The training loop does that, after optimizer.step()."""

    moves = False


class Norms(Net):
    """Each layer has a batch norm of its own, where all shared one."""

    class block(Block):
        def __init__(self, place: int) -> None:
            super().__init__(place)
            self.norm = nn.BatchNorm1d(H)

        def forward(self, x: Tensor) -> Any:
            return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Centred(Net):
    """Layers subtract the mean over the samples."""

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y - y.mean(0)


class TimeFirst(Net):
    """A recurrent layer over (length, samples)."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(H, H)

    def body(self, x: Tensor) -> Any:
        return super().body(self.gru(x)[0])


def time_first() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{name: torch.randint(V, (6, 4), generator=generator) for name in ("ids", "labels")} for _ in range(2)]


class Auxiliary(Net):
    """Layers return how unevenly the batch uses their features, which is a part of the loss not by samples."""

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, self.penalty(y)

        def penalty(self, y: Tensor) -> Tensor:
            return y.square().mean((0, 1)).square().mean()

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, total = self.embed(ids), torch.zeros(())
        for layer in self.layers:
            x, penalty = layer(x)
            total = total + penalty.mean()
        return {"loss": self.loss(self.head(x), labels) + 0.1 * total}


class Margins(nn.Module):
    """A criterion with a trained weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(V))

    def forward(self, outputs: Any, batch: Any) -> Tensor:
        return F.cross_entropy((outputs["logits"] * self.scale).flatten(0, 1), batch["labels"].flatten())


class WithMargins(Logits):
    """The same as a child of the model, which computes the loss in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.margins = Margins()

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.margins(super().forward(ids, labels), {"labels": labels})}


class Masking(Block):
    """Returns all rows, and a mask of those that stand out."""

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x, x * (x.sum(-1, keepdim=True) > 0)


class Masked(values.Selected):
    """Proposals in a tensor of a fixed size, with zeros where there are none."""

    def block(self, place: int) -> nn.Module:
        return Masking(place) if place == 1 else Block(place)

    def body(self, x: Tensor) -> Tensor:
        x, proposals = self.layers[1](self.layers[0](x))
        return self.layers[3](self.layers[2](x) + proposals.sum((0, 1)))


class ZerosOver(values.NoneOver):
    """The backward between two layers returns zeros."""

    def body(self, x: Tensor) -> Tensor:
        first, second = self.layers[1](self.layers[0](x))
        return self.layers[3](self.layers[2](ZeroGradient.apply(first, second)))


class ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Any:  # type: ignore[override]
        return first + second

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, torch.zeros_like(gradient)


class WritesAlways(Net):
    class block(Block):
        def forward(self, x: Tensor) -> Any:
            x.add_(1.0)
            return super().forward(x)


class WritesToACopy(Net):
    class block(Block):
        def forward(self, x: Tensor) -> Any:
            x = x.clone()
            x.add_(1.0) if float(x.detach().abs().sum()) > 0 else None
            return super().forward(x)


class Table(Net):
    """Looks values up in an input that has as many rows as the batch by chance."""

    def forward(self, ids: Tensor, table: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.head(self.body(self.embed(ids) + F.embedding(ids % 4, table)))
        return {"loss": self.loss(logits, labels)}


class GraphLayer(nn.Module):
    """Adds to each node what its neighbours, which edges name by index, send."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return x + torch.zeros_like(x).index_add(0, edges[1], self.inner(x).tanh()[edges[0]])


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GraphLayer() for _ in range(4))

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x, edges)
        return {"loss": F.cross_entropy(x, labels)}


class Bags(nn.Module):
    """Bags of tokens, which begin at the offsets, as many as there are tokens by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(V, H), nn.Linear(H, V)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids: Tensor, offsets: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.bag(ids, offsets)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x), labels)}


def tables() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = [{name: torch.randint(V, (4, 6), generator=generator) for name in ("ids", "labels")} for _ in range(2)]
    return [{**batch, "table": torch.randn(4, H, generator=generator)} for batch in tokens]


def nodes(highest: int = 7) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor([[0, highest, 1], [highest, 1, 0]])
    return [{"x": torch.randn(8, 4, generator=generator), "edges": edges, "labels": torch.arange(8) % 4}] * 2


def later_nodes() -> list[dict[str, Tensor]]:
    return [*nodes(3)[:1], *nodes(7)]


def bags() -> list[dict[str, Tensor]]:
    ids = torch.randint(V, (6,), generator=torch.Generator().manual_seed(0))
    return [{"ids": ids, "offsets": torch.tensor([0, 0, 2, 3, 5, 5]), "labels": torch.arange(6)}] * 2


def masked() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(2):
        tokens = {name: torch.randint(V, (4, 6), generator=generator) for name in ("ids", "labels")}
        mask = (torch.rand(4, 6, generator=generator) > 0.4).float()
        mask[:, 0] = 1
        batches.append({**tokens, "mask": mask})
    return batches


class ByMask(Net):
    """A loss over the positions at which a float mask is not 0."""

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.head(self.body(self.embed(ids)))
        return {"loss": F.cross_entropy(logits[mask.bool()], labels[mask.bool()])}


class NestedBetween(Net):
    """A nested tensor goes from layer to layer."""

    def body(self, x: Tensor) -> Any:
        rows = torch.nested.as_nested_tensor(list(x), layout=torch.jagged)
        for layer in self.layers:
            rows = layer(rows)
        return rows.to_padded_tensor(0.0)


class NestedInside(Net):
    """Each layer makes one."""

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            rows = torch.nested.as_nested_tensor(list(x), layout=torch.jagged)
            return super().forward(rows).to_padded_tensor(0.0)


class Skips(Net):
    """Layers are skipped by chance."""

    share = 0.5

    def body(self, x: Tensor) -> Any:
        for layer in self.layers:
            if random.random() >= self.share:
                x = layer(x)
        return x


class SkipsNone(Skips):
    share = 0.0


class Drops(Net):
    """What the first layer returns is dropped at random, as classifier-free guidance drops a condition."""

    share = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.null = nn.Parameter(torch.ones(H))

    def body(self, x: Tensor) -> Any:
        first = self.layers[0](x)
        condition = self.drop(first)
        for layer in self.layers[1:]:
            x = layer(x + first + condition)
        return x

    def drop(self, condition: Tensor) -> Tensor:
        return self.null.expand_as(condition) if random.random() < self.share else condition


class DropsParameter(Drops):
    """Another parameter is read at random."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.ones(H))

    def drop(self, condition: Tensor) -> Tensor:
        return condition + (self.null if torch.rand(()) < self.share else self.other)


class Selected(Drops):
    """It is selected. Every sample is dropped, so that the unsplit model drops the same ones."""

    share = 1.0

    def drop(self, condition: Tensor) -> Tensor:
        return torch.where(torch.rand(()) < self.share, self.null, condition)


class Outside(Net):
    """Each layer's result is scaled by a trained tensor in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: Any = [torch.ones(H, requires_grad=True)]

    def body(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x) * self.scales[0]
        return x


class OutsideFrozen(Outside):
    def __init__(self) -> None:
        super().__init__()
        self.scales[0].requires_grad_(False)


class Registered(Outside):
    """By a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(self.scales)


class Embedded(Net):
    """Takes what another module has embedded."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": self.loss(self.head(self.body(x)), labels)}
