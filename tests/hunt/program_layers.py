"""Layers: the layers of random programs, each with one way in which values enter or leave a layer."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

H = 8


class Layer(nn.Module):
    """A linear layer; subclasses differ in what they accept and return."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(H, H)

    def change(self, h: Tensor) -> Tensor:
        return torch.tanh(self.f(h))


class Plain(Layer):
    def forward(self, h: Tensor) -> Tensor:
        return h + self.change(h)


class Gated(Layer):
    def forward(self, h: Tensor, other: Tensor | None = None, scale: float = 1.0) -> Tensor:
        return h + scale * self.change(h) * torch.sigmoid(h if other is None else other)


class Attention(Layer):
    def forward(self, h: Tensor, mask: Tensor | None = None, *, bias: Tensor | None = None) -> Tensor:
        scores = self.f(h) @ h.mT
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -1e4)
        return h + scores.softmax(-1) @ h


class Pair(Layer):
    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.f(h)[..., :2].softmax(-1)
        return h + self.change(h) * weights[..., :1], weights


class Listing(Layer):
    def forward(self, h: Tensor) -> list[Any]:
        z = self.change(h)
        return [h + z, z, None, h.shape[1]]


class Nested(Layer):
    def forward(self, h: Tensor) -> tuple[Tensor, Any]:
        z = self.change(h)
        return h + z, {"z": z, "pairs": [(z * 2, h)]}


@dataclass
class Output:
    hidden: Tensor
    extra: Any = None


class Returning(Layer):
    def forward(self, h: Tensor) -> Output:
        z = self.change(h)
        return Output(h + z, z)


class Appending(Layer):
    def forward(self, h: Tensor, store: list[Tensor]) -> Tensor:
        store.append(self.change(h))
        return h + store[-1]


class Caching(Layer):
    def forward(self, h: Tensor, cache: dict[int, Tensor]) -> Tensor:
        z = self.change(h) + (0.5 * cache[len(cache) - 1] if cache else 0.0)
        cache[len(cache)] = z
        return h + z


class Carrying(Layer):
    def forward(self, carried: SimpleNamespace) -> SimpleNamespace:
        carried.h = carried.h + self.change(carried.h)
        carried.count += 1
        return carried


class Keeping(Layer):
    last: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        self.last = self.change(h)
        return h + self.last


class Sharing(Layer):
    """Layers of this class share one object, which the first of them fills."""

    def __init__(self, shared: SimpleNamespace) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, h: Tensor, begins: bool = False) -> Tensor:
        z = self.change(h)
        if not begins:
            z = z + 0.3 * self.shared.last
        self.shared.last = z
        return h + z


class Writing(Layer):
    def forward(self, h: Tensor) -> Tensor:
        z = self.f(h) * 1.0
        z += h
        z[:, 0] = z[:, 0] * 0.5
        return z


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.GRU(H, H, batch_first=True)

    def forward(self, h: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, state = self.f(h, state)
        return h + out, state


class Twin(Layer):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a + self.change(b), b + self.change(a)


class Experts(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(H, H) for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        flat = h.reshape(-1, H)
        weights, chosen = self.f(flat)[:, :3].softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for k, expert in enumerate(self.experts):
            token, place = torch.where(chosen == k)
            out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return h + out.view_as(h)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Plain() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(H))

    def forward(self, h: Tensor) -> tuple[Tensor, list[Tensor]]:
        kept = []
        for layer in self.layers:
            h = layer(h * self.scale)
            kept.append(h)
        return h, kept


class Reverse(torch.autograd.Function):
    """Reverses gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -0.5 * gradient
