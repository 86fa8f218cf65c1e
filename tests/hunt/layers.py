"""Layers: kinds of layers as users write them; each trains exactly, or is refused, with every schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.hunt.cases import Case, ordinary
from tests.hunt.nets import Block, H, Net, V, data


@dataclass(frozen=True)
class Kind:
    """A block with two linear layers `a` and `b`: what is done to it once it is made, and its forward."""

    prepare: Callable[[Any], object] = lambda block: None
    forward: Callable[[Any, Tensor], Any] = Block.forward
    refused: str = ""


def net(kind: Kind) -> Callable[[], nn.Module]:
    class OfKind(Block):
        def __init__(self, place: int) -> None:
            super().__init__(place)
            kind.prepare(self)

        def forward(self, x: Tensor) -> Any:
            return kind.forward(self, x)

    class NetOfKind(Net):
        block = OfKind

    return NetOfKind


def plus(block: Any, x: Tensor, inner: Any) -> Any:
    return x + block.b(torch.tanh(inner))


def adds(**modules: Callable[[], Any]) -> Callable[[Any], object]:
    def prepare(block: Any) -> None:
        for name, make in modules.items():
            setattr(block, name, make())

    return prepare


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2, self.bias)


def patched(block: Any) -> None:
    forward = block.a.forward
    block.a.forward = lambda x: forward(x) * 3


def tied(block: Any) -> None:
    block.b.weight = block.a.weight


def digits(x: Tensor) -> Tensor:
    return (x[..., 0] > 0).long() + (x[..., 1] > 0).long() * 2


def with_embedding(block: Any, x: Tensor) -> Any:
    return Block.forward(block, x) + block.e(digits(x))


def in_place_in_a_copy(block: Any, x: Tensor) -> Any:
    y = x.clone()
    y[:, 0] = block.b(x[:, 0])
    y[:, 1:].mul_(0.5).add_(block.a(x[:, :-1]))
    return y


def without_gradients(block: Any, x: Tensor) -> Any:
    with torch.no_grad():
        gate = block.a(x)
    return x + block.b(torch.tanh(block.a(x))) * gate


def of_an_energy(block: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        at = x if x.requires_grad else x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(block.a(at).tanh().sum(), at, create_graph=True)
    return x + block.b(slope)


def unused(block: Any, x: Tensor) -> Any:
    block.a(x)
    return x + block.b(torch.tanh(x))


def hooked_inside(block: Any, x: Tensor) -> Any:
    y = block.a(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return plus(block, x, y)


def nested_checkpoints(block: Any, x: Tensor) -> Any:
    outer = checkpoint(lambda t: block.b(torch.tanh(block.a(t))), x, use_reentrant=False)
    inner = checkpoint(lambda t: checkpoint(block.a, t, use_reentrant=False).tanh(), x, use_reentrant=False)
    return x + outer + 0.1 * inner


def saved_on_the_cpu(block: Any, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return Block.forward(block, x)


KINDS: Mapping[str, Kind] = {
    "a subclass of Linear": Kind(adds(a=lambda: Doubling(H, H))),
    "a frozen weight": Kind(lambda block: block.a.weight.requires_grad_(False)),
    "a frozen bias": Kind(lambda block: block.a.bias.requires_grad_(False)),
    "a forward pre-hook": Kind(lambda block: block.a.register_forward_pre_hook(lambda m, args: (args[0] * 2,))),
    "a forward hook": Kind(
        lambda block: block.a.register_forward_hook(lambda m, args, y: y.relu() + m.weight.sum()),
        refused="the forward hook on a .Linear. returns a new output",
    ),
    "weight norm": Kind(lambda block: parametrizations.weight_norm(block.a)),
    "a patched forward": Kind(patched),
    "tied weights": Kind(tied),
    "bilinear": Kind(adds(c=lambda: nn.Bilinear(H, H, H)), lambda b, x: x + 0.1 * b.c(x, b.a(x))),
    "attention": Kind(
        adds(c=lambda: nn.MultiheadAttention(H, 2, batch_first=True)),
        lambda b, x: x + b.c(x, x, x, need_weights=False)[0],
    ),
    "a convolution": Kind(adds(c=lambda: nn.Conv1d(H, H, 1)), lambda b, x: x + b.c(x.transpose(1, 2)).transpose(1, 2)),
    "a GRU": Kind(adds(c=lambda: nn.GRU(H, H, batch_first=True)), lambda b, x: x + b.c(x)[0]),
    "an embedding": Kind(adds(e=lambda: nn.Embedding(5, H, padding_idx=0)), with_embedding),
    "a sparse embedding": Kind(adds(e=lambda: nn.Embedding(5, H, sparse=True)), with_embedding),
    "an embedding bag": Kind(
        adds(e=lambda: nn.EmbeddingBag(5, H)),
        lambda b, x: Block.forward(b, x) + b.e((x[..., :3] > 0).long().flatten(0, 1)).view_as(x),
    ),
    "called twice": Kind(forward=lambda b, x: plus(b, x, b.a(torch.tanh(b.a(x))))),
    "its weight, functionally": Kind(forward=lambda b, x: Block.forward(b, x) + F.linear(x, b.a.weight)),
    "its weight's norm": Kind(forward=lambda b, x: x + b.b(torch.tanh(b.a(x))) * b.a.weight.norm()),
    "in place": Kind(forward=lambda b, x: x + b.b(b.a(x).add_(1).relu_())),
    "in place in a copy": Kind(forward=in_place_in_a_copy),
    "without gradients": Kind(forward=without_gradients),
    "detached": Kind(forward=lambda b, x: plus(b, x, b.a(x.detach()))),
    "the gradient of an energy": Kind(forward=of_an_energy),
    "unused": Kind(forward=unused),
    "expanded": Kind(forward=lambda b, x: plus(b, x, b.a(x.mean(1, keepdim=True).expand_as(x)))),
    "transposed": Kind(forward=lambda b, x: x + b.b(torch.tanh(b.a(x.transpose(1, 2).transpose(1, 2))))),
    "matrix products": Kind(forward=lambda b, x: x + torch.tanh(x @ b.a.weight.t()) @ b.b.weight),
    "a checkpoint": Kind(
        forward=lambda b, x: x + checkpoint(lambda y: b.b(torch.tanh(b.a(y))), x, use_reentrant=False)
    ),
    "nested checkpoints": Kind(forward=nested_checkpoints),
    "vmap": Kind(forward=lambda b, x: x + b.b(torch.vmap(b.a)(x))),
    "double precision": Kind(forward=lambda b, x: x + b.b(torch.tanh(b.a(x).double()).float())),
    "saved on the CPU": Kind(forward=saved_on_the_cpu),
    "a tensor hook": Kind(forward=hooked_inside),
    "by gradient mode": Kind(forward=lambda b, x: Block.forward(b, x) * (2.0 if torch.is_grad_enabled() else 1.0)),
    "by what the input requires": Kind(forward=lambda b, x: Block.forward(b, x) * (2.0 if x.requires_grad else 1.0)),
}

SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved", "num_model_chunks": 2},
    "zbv": {"schedule": "zbv"},
    "recompute": {"recompute": True},
    "zbv, recompute": {"schedule": "zbv", "recompute": True},
}

WORDS = 9000  # rows of an embedding: with H columns it is one whose gradient is added row by row


class Wide(Net):
    """A net whose embedding is so large that microbatches add to some rows of its gradient only."""

    def __init__(self) -> None:
        super().__init__(3)
        self.embed = nn.Embedding(WORDS, H)
        self.prepare()

    def prepare(self) -> None: ...

    def embedded(self, ids: Tensor) -> Tensor:
        result: Tensor = self.embed(ids)
        return result

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(self.embedded(ids)))
        return {"loss": self.loss(logits, labels), "logits": logits}


class Padded(Wide):
    def prepare(self) -> None:
        self.embed = nn.Embedding(WORDS, H, padding_idx=3)


class TiedWide(Wide):
    def prepare(self) -> None:
        self.head = nn.Linear(H, WORDS)
        self.head.weight = self.embed.weight


class Sparse(Wide):
    def prepare(self) -> None:
        self.embed = nn.Embedding(WORDS, H, sparse=True)


class Watched(Wide):
    def prepare(self) -> None:
        self.embed.register_forward_hook(lambda module, args, result: None)


class LookedUpTwice(Wide):
    def embedded(self, ids: Tensor) -> Tensor:
        result: Tensor = self.embed(ids) + self.embed((ids + 1) % WORDS)
        return result + F.embedding((ids * 7) % WORDS, self.embed.weight)


class Regularized(Wide):
    def embedded(self, ids: Tensor) -> Tensor:
        result: Tensor = self.embed(ids) + self.embed.weight.mean(0)
        return result * self.embed.weight.norm().clamp(max=1)


class Checkpointed(Wide):
    def embedded(self, ids: Tensor) -> Any:
        return checkpoint(self.embed, ids, use_reentrant=False)


EMBEDDINGS = {
    "plain": Wide,
    "padded": Padded,
    "tied": TiedWide,
    "sparse": Sparse,
    "watched": Watched,
    "looked up twice": LookedUpTwice,
    "regularized": Regularized,
    "checkpointed": Checkpointed,
}


class Remembering(Block):
    """Keeps its last output, of the step before, and how many there were."""

    memory: Tensor | None = None

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.history: list[float] = []

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        if self.memory is not None:
            y = y + 0.1 * self.memory
        self.memory = y.detach().mean((0, 1), keepdim=True)
        self.history.append(float(len(x)))
        return y * (1 + 0.1 * (len(self.history) % 3))


class WithMemory(Net):
    block = Remembering


def products() -> dict[str, Case]:
    """Each kind with each schedule."""
    story = "It was exact with every schedule, and is to stay so."
    cases: dict[str, Case] = {}
    for schedule, options in SCHEDULES.items():
        common = {"verify": False, "num_microbatches": 4, **options}
        for name, kind in KINDS.items():
            cases[f"{name}; {schedule}"] = Case(net(kind), story, ordinary(3), common, refused=kind.refused)
        for name, make in EMBEDDINGS.items():
            batches = [wide(seed) for seed in range(3)]
            cases[f"embedding, {name}; {schedule}"] = Case(make, story, batches, {**common, "num_microbatches": 3})
        once = {**common, "num_microbatches": 1}
        cases[f"memory; {schedule}"] = Case(WithMemory, story, ordinary(3), once)
    return cases


def wide(seed: int) -> dict[str, Tensor]:
    batch = data(seed, rows=6)
    generator = torch.Generator().manual_seed(seed)
    batch["ids"] = torch.randint(0, WORDS, batch["ids"].shape, generator=generator)
    assert int(batch["labels"].max()) < V
    return batch
