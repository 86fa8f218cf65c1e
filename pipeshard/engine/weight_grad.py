"""Weight gradients: those of linear and embedding layers, computed apart from the rest of a backward pass."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from pipeshard.engine.grad_sync import grad_dtype, has_hooks
from pipeshard.graph.units import Interception

LARGE = 2**17  # elements of a weight from which it is worth while not to make a summand by itself


class Summand(Protocol):
    """`fits(total)` tells whether `add_to` can add it to this gradient."""

    def made(self) -> Tensor: ...

    def fits(self, total: Tensor) -> bool: ...

    def add_to(self, total: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Product:
    """left @ right, of two matrices."""

    left: Tensor
    right: Tensor

    def made(self) -> Tensor:
        return self.left.mm(self.right)

    def fits(self, total: Tensor) -> bool:
        return _is_plain(total) and total.dtype == self.left.dtype == self.right.dtype

    def add_to(self, total: Tensor) -> None:
        total.addmm_(self.left, self.right)


@dataclass(frozen=True, slots=True)
class RowSum:
    """The sum of the rows of a matrix."""

    rows: Tensor

    def made(self) -> Tensor:
        return self.rows.sum(0)

    def fits(self, total: Tensor) -> bool:
        return _is_plain(total)

    def add_to(self, total: Tensor) -> None:
        total += self.made()


@dataclass(frozen=True, slots=True)
class Lookup:
    """Gradients (..., width) of what was read at `ids` (...) of a table with `count` rows; row `padding` gets none."""

    gradients: Tensor
    ids: Tensor
    count: int
    padding: int | None

    def made(self) -> Tensor:
        padding = -1 if self.padding is None else self.padding
        return torch.ops.aten.embedding_dense_backward(self.gradients, self.ids, self.count, padding, False)

    def fits(self, total: Tensor) -> bool:
        return _is_plain(total) and _is_plain(self.gradients)

    def add_to(self, total: Tensor) -> None:
        ids, rows = self.ids.reshape(-1), self.gradients.reshape(-1, total.shape[1]).to(total.dtype)
        if self.padding is not None:
            kept = ids != self.padding
            ids, rows = ids[kept], rows[kept]
        if total.device.type == "cpu":
            total.index_add_(0, ids, rows)  # in the order of the rows
        else:
            total.index_put_((ids,), rows, accumulate=True)  # index_add_ is in no certain order on a GPU


def _is_plain(tensor: Tensor) -> bool:
    """No DTensor, and nothing sparse."""
    return type(tensor) is Tensor and tensor.layout is torch.strided


Gradients = tuple[tuple[nn.Parameter, Summand], ...]


class Deferral:
    """Makes layers of `modules` leave out their weight gradients in a backward pass, and makes up for it on demand.

    While `installed`, a layer whose class computes exactly `nn.Linear`, `nn.Embedding` or transformers' `Conv1D` puts
    what its weight gradient is made of on the list of the backward pass that runs, and `finish` adds it up. All other
    parameters, and weights with hooks of their own, get their gradients in the backward pass itself (the split of Qi
    et al. 2023, arXiv:2401.10241, by layer), as all do in a pass that is not between `begin` and `end`, or that runs
    inside of another one (a hook or a custom backward may call autograd, and look at what it gets). What runs forward
    while `whole` is true leaves nothing out but the gradients of large embeddings.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers = {module: kind for module in modules if (kind := kind_of(module)) is not None}
        self.whole = False
        self._pending: list[Gradients] | None = None
        self._within: Node | None = None  # a node of the pass that fills the list, and of no pass inside of it

    @contextmanager
    def installed(self, lookups: bool = False) -> Iterator[None]:
        """Inside, the layers defer, or large embeddings alone; afterwards their forwards are what they were."""
        undo: list[tuple[Any, str, Any]] = []
        for module, kind in self.layers.items():
            if lookups and not _looks_up(kind, module):
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

    def begin(self, roots: Iterable[GradientEdge] = ()) -> list[Gradients]:
        """The list that is filled from now on: by the backward pass from `roots`, or by any."""
        after = (node for root in roots for node, _ in root.node.next_functions if node is not None)
        self._pending, self._within = [], next(after, None)
        return self._pending

    def end(self) -> None:
        """No list is filled any more."""
        self._pending = self._within = None

    def takes(self, parameter: nn.Parameter) -> bool:
        """Whether the pass that runs is to add to `.grad` of this parameter, which then may as well be done later."""
        if self._pending is None or torch.is_grad_enabled():  # or it is to be differentiated again
            return False
        node = get_gradient_edge(parameter).node
        if sys.getrefcount(node) > _references():  # somebody keeps it, and may have put hooks on it
            return False
        try:
            return all(torch._C._will_engine_execute_node(each) for each in (node, self._within) if each is not None)
        except RuntimeError:  # autograd.grad, of this parameter
            return False

    def put_off(self, *gradients: tuple[nn.Parameter, Summand]) -> None:
        assert self._pending is not None
        self._pending.append(gradients)

    @staticmethod
    def finish(pending: list[Gradients]) -> None:
        """Compute what is on the list, in its order, and add it up in `.grad`; memory is given back on the way.

        The kernels and their order are autograd's own, which adds up those of one parameter before it adds them to
        `.grad`; but for what is added to the gradient of a weight of 131,072 elements or more, which is never made by
        itself: a product adds up into it, a lookup into the rows it has read (the sums are the same up to the order of
        their terms).
        """
        pending.reverse()
        left = Counter(id(parameter) for gradients in pending for parameter, _ in gradients)
        sums: dict[int, Tensor] = {}  # of parameters of which there is more to come
        with torch.no_grad():
            while pending:
                for parameter, summand in pending.pop():
                    if not parameter.requires_grad:
                        continue
                    total, key = parameter.grad, id(parameter)
                    left[key] -= 1
                    if total is not None and _is_large(total) and summand.fits(total):
                        summand.add_to(total)
                        continue
                    made = sums.pop(key) + summand.made() if key in sums else summand.made()
                    if left[key]:
                        sums[key] = made
                    elif total is None:
                        parameter.grad = made.to(grad_dtype(parameter))
                    else:
                        total += made.to(grad_dtype(parameter))


class _Deferred:
    """The forward of one layer while its weight gradient is put off."""

    def __init__(self, deferral: Deferral, module: nn.Module, kind: Any, plain: Callable[..., Any]) -> None:
        self.deferral, self.module, self.kind, self.plain = deferral, module, kind, plain
        self.looks_up = _looks_up(kind, module)

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        if self.deferral.whole and not self.looks_up:
            return self.plain(*args, **kwargs)
        (x,) = *args, *kwargs.values()  # its name is the layer's affair
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return self.plain(x)  # they make a backward of their own
        weight, bias = map(self.module._parameters.get, ("weight", "bias"))
        if weight is None or hasattr(type(self.module), "bias"):  # it is computed: once, by the layer
            return self.plain(x)
        if not torch.is_grad_enabled() or not (_deferrable(weight) and (bias is None or _deferrable(bias))):
            return self.plain(x)
        # Autocast's casts are autograd's to undo.
        if torch.is_autocast_enabled(x.device.type) or x.numel() == 0 or not _is_ordinary(x):
            return self.plain(x)
        if self.kind is not _Embedding and not x.is_contiguous():  # torch adds up in another order then
            return self.plain(x)
        return self.kind.apply(x, weight, bias, self.module, self.deferral)


def _deferrable(parameter: Tensor) -> bool:
    """A plain trainable leaf to whose gradient nobody listens."""
    if not parameter.requires_grad or not parameter.is_leaf or not _is_ordinary(parameter):
        return False
    return not has_hooks(parameter)


def _is_ordinary(tensor: Tensor) -> bool:
    """Nothing whose products are another class's affair, as a quantized weight's are."""
    known = type(tensor) in (Tensor, nn.Parameter, DTensor)
    return known and tensor.layout is torch.strided and not tensor.is_nested


def _looks_up(kind: Any, module: Any) -> bool:
    """Whether it is a large embedding."""
    weight = module._parameters.get("weight")
    return kind is _Embedding and weight is not None and _is_large(weight)


def _is_large(weight: Any) -> bool:
    return bool(weight.numel() >= LARGE)


def _keep(ctx: Any, x: Tensor, weight: Any, bias: Any, deferral: Deferral) -> None:
    ctx.save_for_backward(x, weight)  # the weight too: autograd refuses one that was written to since
    ctx.weight, ctx.bias, ctx.deferral = weight, bias, deferral


def _backward(ctx: Any, grad: Tensor, transposed: bool) -> Any:
    """That of a product with the weight, or with its transpose."""
    x, matrix = ctx.saved_tensors
    rows, entered = _rows(grad), _rows(x)
    weight = Product(rows.t(), entered) if transposed else Product(entered.t(), rows)
    returned = rows.mm(matrix if transposed else matrix.t()).view(x.shape) if ctx.needs_input_grad[0] else None
    return returned, *_made(ctx, weight, RowSum(rows)), None, None


def _made(ctx: Any, *summands: Summand) -> list[Tensor | None]:
    """The gradients of weight and bias; None for what is put off, and for what nobody asks for."""
    made: list[Tensor | None] = []
    later: list[tuple[nn.Parameter, Summand]] = []
    for parameter, summand, needed in zip((ctx.weight, ctx.bias), summands, ctx.needs_input_grad[1:]):
        takes = parameter is not None and ctx.deferral.takes(parameter)
        made.append(summand.made() if needed and not takes else None)
        if takes:
            later.append((parameter, summand))
    if later:
        ctx.deferral.put_off(*later)
    return made


@cache
@torch.enable_grad()
def _references() -> int:
    """How many there are to a node that autograd alone keeps, since a graph leads to it."""
    leaf = torch.zeros(1, requires_grad=True)
    graph = leaf.view_as(leaf)
    node = get_gradient_edge(leaf).node
    return sys.getrefcount(node) if graph.grad_fn is not None else 0


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _no_view(made: Tensor) -> Tensor:
    """The same memory as a tensor of its own: an in-place ReLU may not write to a view that came out of a Function."""
    return torch.ops.aten._unsafe_view(made, made.shape) if made._is_view() else made


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, module: Any, deferral: Deferral) -> Tensor:
        _keep(ctx, x, weight, bias, deferral)
        return _no_view(F.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _backward(ctx, grad, transposed=True)


class _Conv1D(torch.autograd.Function):
    """y = x W + b, as in GPT-2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, module: Any, deferral: Deferral) -> Tensor:
        _keep(ctx, x, weight, bias, deferral)
        return _no_view(torch.addmm(bias, _rows(x), weight).view(*x.shape[:-1], weight.shape[1]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _backward(ctx, grad, transposed=False)


class _Embedding(torch.autograd.Function):
    """y = W[x]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, module: Any, deferral: Deferral) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.module, ctx.deferral = weight, bias, module, deferral
        return _no_view(F.embedding(x, weight, module.padding_idx))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        lookup = Lookup(grad, x, ctx.weight.shape[0], ctx.module.padding_idx)
        return None, *_made(ctx, lookup), None, None, None


_KINDS: dict[Any, Any] = {nn.Linear.forward: _Linear, Conv1D.forward: _Conv1D, nn.Embedding.forward: _Embedding}


def kind_of(module: nn.Module) -> Any:
    """How the weight gradient of this layer is put off; None where it is not."""
    special = [getattr(module, option, None) for option in ("max_norm", "sparse", "scale_grad_by_freq")]
    return None if any(special) else _KINDS.get(type(module).forward)
