"""Tests of the deferral with nested backward passes and with computed weights: the same gradients as with autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipeshard.engine.weight_grad import Deferral


class Implicit(nn.Module):
    """A deep-equilibrium layer: a tensor hook solves for the gradient by `autograd.grad`, again and again. The weight
    gradients that this passes by were added, though nobody had asked for them."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        z, z0 = torch.tanh(self.f(x)), x.detach().requires_grad_()
        f0 = torch.tanh(self.f(z0))

        def solved(gradient: Tensor) -> Tensor:
            total = gradient
            for _ in range(3):
                total = torch.autograd.grad(f0, z0, total, retain_graph=True)[0] + gradient
            return total

        z.register_hook(solved)
        return z


class Explicit(torch.autograd.Function):
    """Checkpointing by hand: the backward asks autograd for the gradients of inputs and parameters, and for no more
    than there are, which ended in an error of autograd's ("appears to not have been used")."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], how: str, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.how, ctx.x, ctx.parameters = run, how, x, parameters
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        if ctx.how == "grad":
            return None, None, *torch.autograd.grad(out, [x, *ctx.parameters], gradient)
        kept = [parameter.grad for parameter in ctx.parameters]  # by .grad, read right after
        for parameter in ctx.parameters:
            parameter.grad = None
        out.backward(gradient)
        made = [2 * parameter.grad for parameter in ctx.parameters]
        for parameter, before in zip(ctx.parameters, kept, strict=True):
            parameter.grad = before
        return None, None, x.grad, *made


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(6, 8), nn.Linear(8, 6)

    def run(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        return Explicit.apply(self.run, self.how, x, *self.parameters())


def assert_exact(inner: nn.Module, put_off: int, prepare: Callable[[nn.Module], Any] = lambda model: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 4))
    plain = copy.deepcopy(model)
    kept = [prepare(each) for each in (model, plain)]
    deferral = Deferral([model])
    for _ in range(2):
        x = torch.randn(5, 6)
        with deferral.installed():
            loss = model(x).square().sum()
            pending = deferral.begin([get_gradient_edge(loss)])
            loss.backward()
            assert len(pending) == put_off
            deferral.finish(pending)
        plain(x).square().sum().backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None
        assert torch.allclose(found.grad, expected.grad, rtol=1e-6, atol=1e-6), name
    del kept


@pytest.mark.parametrize(("inner", "put_off"), [(Implicit, 3), (lambda: Checkpointed("grad"), 2)])
def test_what_autograd_grad_asks_for_is_made_at_once(inner: Callable[[], nn.Module], put_off: int) -> None:
    assert_exact(inner(), put_off)


def test_a_backward_inside_of_another_puts_nothing_off() -> None:
    assert_exact(Checkpointed("backward"), 2)


def test_a_computed_weight_is_computed_once() -> None:
    """Spectral norm moves its vectors whenever the weight is read: to look whether it can be put off moved them too."""
    reads = []

    class Counted(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            reads.append(1)
            return 2 * weight

    layer = nn.Linear(6, 6)
    nn.utils.parametrize.register_parametrization(layer, "weight", Counted())
    table = nn.Embedding(600, 300)
    nn.utils.parametrize.register_parametrization(table, "weight", Counted())
    reads.clear()
    with Deferral([layer, table]).installed():
        layer(torch.randn(2, 6)), table(torch.tensor([1]))
    assert len(reads) == 2
    for name in ("weight", "bias"):
        inner = nn.Linear(6, 6)
        nn.utils.parametrize.register_parametrization(inner, name, nn.Tanh())
        assert_exact(inner, 2)


def test_hooks_on_the_node_that_adds_up_a_gradient_are_called() -> None:
    """As old distributed optimizers put them there: with the gradient put off, they saw none."""
    norms: list[list[float]] = []

    def listen(model: Any) -> Any:
        node, seen = get_gradient_edge(model[1].weight).node, []
        norms.append(seen)
        node.register_prehook(lambda gradients: seen.append(float(gradients[0].norm())))
        return node

    assert_exact(nn.Linear(6, 6), 2, listen)
    assert norms[0] == pytest.approx(norms[1]) and len(norms[0]) == 2
