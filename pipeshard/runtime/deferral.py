"""Deferral: the weight gradients of linear and embedding layers, computed apart from the rest of a backward pass."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from pipeshard.model.units import Interception
from pipeshard.runtime.gradients import grad_dtype
from pipeshard.runtime.summand import LARGE, Lookup, Product, RowSum, Summand

Gradients = tuple[tuple[nn.Parameter | None, Summand], ...]


class Deferral:
    """Makes layers of `modules` leave out their weight gradients in a backward pass, and makes up for it on demand.

    While `installed`, a layer whose class computes exactly `nn.Linear`, `nn.Embedding` or transformers' `Conv1D` puts
    what its weight gradient is made of on the list of the backward pass that runs, and `finish` adds it up. All other
    parameters, and weights with hooks of their own, get their gradients in the backward pass itself (the split of Qi
    et al. 2023, arXiv:2401.10241, by layer), as all do in a pass that is not between `begin` and `end`.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers = {module: kind for module in modules if (kind := kind_of(module)) is not None}
        self._pending: list[Gradients] | None = None

    @contextmanager
    def installed(self, lookups: bool = False) -> Iterator[None]:
        """Inside, the layers defer, or large embeddings alone; afterwards their forwards are what they were."""
        undo: list[tuple[Any, str, Any]] = []
        for module, kind in self.layers.items():
            if lookups and not (kind is _Embedding and _is_large(module.weight)):
                continue
            own = module.__dict__.get("forward")
            at: Any = own if isinstance(own, Interception) else module
            attribute = "original" if at is own else "forward"
            plain = getattr(at, attribute)
            if getattr(plain, "__func__", None) is type(module).forward:  # else somebody has put another one there
                undo.append((at, attribute, at.__dict__.get(attribute)))
                setattr(at, attribute, _Deferred(self, module, kind, plain))
        try:
            yield
        finally:
            for at, attribute, before in undo:
                if before is None:
                    del at.__dict__[attribute]
                else:
                    setattr(at, attribute, before)
            self.end()

    def begin(self) -> list[Gradients]:
        """The list that backward passes fill from now on."""
        self._pending = []
        return self._pending

    def end(self) -> None:
        """No list is filled any more."""
        self._pending = None

    def puts_off(self, *gradients: tuple[nn.Parameter | None, Summand]) -> bool:
        """Put them on the list, if there is one."""
        if self._pending is None:
            return False
        self._pending.append(gradients)
        return True

    @staticmethod
    def finish(pending: list[Gradients]) -> None:
        """Compute what is on the list, in its order, and add it up in `.grad`; memory is given back on the way.

        The kernels and their order are autograd's own; but for what is added to the gradient of a weight of 131,072
        elements or more, which is never made by itself: a product adds up into it, a lookup into the rows it has read
        (the sums are the same up to the order of their terms).
        """
        pending.reverse()
        with torch.no_grad():
            while pending:
                for parameter, summand in pending.pop():
                    if parameter is None or not parameter.requires_grad:
                        continue
                    total = parameter.grad
                    if total is None:
                        parameter.grad = summand.made().to(grad_dtype(parameter))
                    elif _is_large(total) and summand.fits(total):
                        summand.add_to(total)
                    else:
                        total += summand.made().to(grad_dtype(parameter))


class _Deferred:
    """The forward of one layer while its weight gradient is put off."""

    def __init__(self, deferral: Deferral, module: nn.Module, kind: Any, plain: Callable[..., Any]) -> None:
        self.deferral, self.module, self.kind, self.plain = deferral, module, kind, plain

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = *args, *kwargs.values()  # its name is the layer's affair
        if torch.compiler.is_compiling():  # what the user has compiled has a backward of its own
            return self.plain(x)
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        bias: Tensor | None = getattr(self.module, "bias", None)
        if not torch.is_grad_enabled() or not (_deferrable(weight) and (bias is None or _deferrable(bias))):
            return self.plain(x)
        if torch.is_autocast_enabled(x.device.type) or x.numel() == 0:  # autocast's casts are autograd's to undo
            return self.plain(x)
        return self.kind.apply(x, weight, bias, self.module, self.deferral)


def _deferrable(parameter: Tensor) -> bool:
    """A plain trainable leaf to whose gradient nobody listens."""
    if not parameter.requires_grad or not parameter.is_leaf:
        return False
    return not (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _is_large(weight: Any) -> bool:
    return bool(weight.numel() >= LARGE)


def _keep(ctx: Any, x: Tensor, weight: Any, bias: Any, deferral: Deferral) -> None:
    ctx.save_for_backward(x)
    ctx.weight, ctx.bias, ctx.deferral = weight, bias, deferral


def _backward(ctx: Any, grad: Tensor, of_weight: Callable[[Tensor, Tensor], Product], matrix: Tensor) -> Any:
    """That of a product: the input's gradient is `grad` times `matrix`; the weight's waits, and is made by
    `of_weight` of the rows that came back and of those that entered."""
    (x,) = ctx.saved_tensors
    rows, entered = _rows(grad), _rows(x)
    weight, bias = of_weight(rows, entered), RowSum(rows)
    returned = rows.mm(matrix).view(x.shape) if ctx.needs_input_grad[0] else None
    if ctx.deferral.puts_off((ctx.weight, weight), (ctx.bias, bias)):
        return returned, None, None, None, None
    return returned, weight.made(), None if ctx.bias is None else bias.made(), None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, module: Any, deferral: Deferral) -> Tensor:
        _keep(ctx, x, weight, bias, deferral)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _backward(ctx, grad, lambda rows, entered: Product(rows.t(), entered), ctx.weight)


class _Conv1D(torch.autograd.Function):
    """y = x W + b, as in GPT-2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, module: Any, deferral: Deferral) -> Tensor:
        _keep(ctx, x, weight, bias, deferral)
        return torch.addmm(bias, _rows(x), weight).view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _backward(ctx, grad, lambda rows, entered: Product(entered.t(), rows), ctx.weight.t())


class _Embedding(torch.autograd.Function):
    """y = W[x]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, module: Any, deferral: Deferral) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.module, ctx.deferral = weight, module, deferral
        return F.embedding(x, weight, module.padding_idx)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        lookup = Lookup(grad, x, ctx.weight.shape[0], ctx.module.padding_idx)
        made = None if ctx.deferral.puts_off((ctx.weight, lookup)) else lookup.made()
        return None, made, None, None, None


_KINDS: dict[Any, Any] = {nn.Linear.forward: _Linear, Conv1D.forward: _Conv1D, nn.Embedding.forward: _Embedding}


def kind_of(module: nn.Module) -> Any:
    """How the weight gradient of this layer is put off; None where it is not."""
    special = [getattr(module, option, None) for option in ("max_norm", "sparse", "scale_grad_by_freq")]
    return None if any(special) else _KINDS.get(type(module).forward)
