"""Weight gradients: computes dW of linear and embedding layers separately from the rest of a backward pass.

Zero-bubble schedules run the backward of a microbatch in two actions: B computes the gradients for which the previous
stage waits, and W computes the weight gradients. autograd computes both in one pass. torch.distributed.pipelining
splits the autograd graph in two and runs it twice. Here, the backward of a layer omits dW and keeps the inputs of dW,
so W is a list of matrix products. If `.grad` already exists in the dtype of dW, a large dW is not materialized: the
product is accumulated directly into `.grad`.
"""

import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from pipeshard.distributed.collectives import laid_out
from pipeshard.engine.coupling import Watching
from pipeshard.engine.grad_sync import grad_dtype, has_hooks
from pipeshard.graph.shapes import is_trainable
from pipeshard.graph.units import Interception
from pipeshard.private import (
    PLAIN_FUNCTIONS,
    DeviceContext,
    function_modes,
    functorch_is_active,
    in_dual_level,
    saved_tensors_hooks,
    will_execute,
)
from pipeshard.replaced import replaced
from pipeshard.split.packed import Packed

LARGE = 2**17  # dW of a weight with at least this many elements is accumulated without materializing it
LEAST_TRAINED = 1 / 8  # a unit that trains a smaller part of its elements, as with adapters, defers no products
# Saved-tensor hooks that do not change the tensors: the hooks of checkpoints, save_on_cpu and offload="activations"
UNCHANGING_HOOKS = "torch.utils.checkpoint.", "torch.autograd.graph.save_on_cpu.", "pipeshard.engine.offload."


@dataclass(frozen=True, slots=True)
class Product:
    """dW of a linear layer: the matrix product left @ right."""

    left: Tensor
    right: Tensor

    def value(self) -> Tensor:
        return self.left.mm(self.right)

    def fits(self, total: Tensor) -> bool:
        """Whether `add_to` can accumulate into this gradient."""
        return _is_plain(total) and total.dtype == self.left.dtype == self.right.dtype

    def add_to(self, total: Tensor) -> None:
        total.addmm_(self.left, self.right)


@dataclass(frozen=True, slots=True)
class Lookup:
    """dW of an embedding: `gradients` (..., width) of the rows at `ids` (...) in a table of `count` rows. Row `padding`
    receives no gradient."""

    gradients: Tensor
    ids: Tensor
    count: int
    padding: int | None

    def value(self) -> Tensor:
        padding = -1 if self.padding is None else self.padding
        return torch.ops.aten.embedding_dense_backward(self.gradients, self.ids, self.count, padding, False)

    def fits(self, total: Tensor) -> bool:
        return _is_plain(total) and _is_plain(self.gradients)

    def add_to(self, total: Tensor) -> None:
        ids, rows = self.ids.reshape(-1), self.gradients.reshape(-1, total.shape[1]).to(total.dtype)
        if self.padding is not None:
            rows = rows.masked_fill((ids == self.padding)[:, None], 0.0)  # removing these rows would wait for the GPU
        if total.device.type == "cpu":
            total.index_add_(0, ids, rows)  # in the order of the rows
        else:
            total.index_put_((ids,), rows, accumulate=True)  # index_add_ is nondeterministic on a GPU


Term: TypeAlias = Product | Lookup  # a deferred summand of a weight's gradient
Gradients = tuple[nn.Parameter, Term]


class Deferral:
    """Makes the layers of `units` omit dW in a backward pass, and computes dW on demand.

    While `installed`, a layer whose class has the forward of `nn.Linear`, `nn.Embedding` or transformers' `Conv1D`
    appends the inputs of dW to the list of the current backward pass. `finish` computes and accumulates dW. The
    gradients of all other parameters, and of weights with hooks, are computed in the backward pass itself (the split of
    Qi et al. 2023, arXiv:2401.10241, by layer). A backward pass defers no gradients if it does not run between `begin`
    and `end`. A pass inside another pass also defers none, since a hook or a custom backward may call autograd and read
    the result. If a forward runs while `whole` is true, or if the layer's unit trains few parameters (see `defers`),
    only the gradients of large embeddings are deferred.
    """

    def __init__(self, units: Iterable[nn.Module]) -> None:
        self.layers = {
            layer: (unit, kind) for unit in units for layer in unit.modules() if (kind := deferring_function(layer))
        }
        self.whole = False
        self._pending: list[Gradients] | None = None
        self._within: Node | None = None  # a node executed only by the backward pass that fills the list

    @contextmanager
    def installed(self, lookups: bool = False) -> Iterator[None]:
        """Context manager that replaces the forwards of the layers (with `lookups`, of large embeddings only), so that
        they defer dW, and restores the forwards on exit."""
        with ExitStack() as stack:
            stack.callback(self.end)
            units = () if lookups else {unit for unit, _ in self.layers.values()}
            deferring = {unit for unit in units if defers(unit)}
            for module, (unit, kind) in self.layers.items():
                if unit not in deferring and not _is_large_lookup(kind, module):
                    continue
                forward = module.__dict__.get("forward")
                owner: Any = forward if isinstance(forward, Interception) else module
                attribute = "original" if owner is forward else "forward"
                plain = getattr(owner, attribute)
                if getattr(plain, "__func__", None) is type(module).forward:  # otherwise the user has replaced forward
                    stack.enter_context(replaced(owner, **{attribute: _Deferred(self, module, kind, plain)}))
            yield

    def begin(self, roots: Iterable[GradientEdge] = ()) -> list[Gradients]:
        """Start a new list and return it. The backward pass from `roots` (without `roots`, any pass) fills the list."""
        after = (node for root in roots for node, _ in root.node.next_functions if node is not None)
        self._pending, self._within = [], next(after, None)
        return self._pending

    def end(self) -> None:
        """Stop filling the list."""
        self._pending = self._within = None

    def defer(self, parameter: nn.Parameter, term: Term) -> bool:
        """If the current pass would add a term to `.grad`, append the term to the list instead, to be added later.
        Returns whether the term was appended."""
        if self._pending is None or torch.is_grad_enabled():  # grad is enabled with create_graph=True
            return False
        node = get_gradient_edge(parameter).node
        if sys.getrefcount(node) > _references():  # other code references the node, and may have added hooks
            return False
        try:
            if not all(will_execute(n) for n in (node, self._within) if n is not None):
                return False
        except RuntimeError:  # autograd.grad with respect to this parameter
            return False
        self._pending.append((parameter, term))
        return True

    @staticmethod
    def finish(pending: list[Gradients]) -> None:
        """Accumulate the terms of the list into `.grad`, in order, and free each term after it is used.

        The kernels and their order are the same as in autograd, which sums the terms of one parameter before it adds
        the sum to `.grad`. The exception is an existing gradient of a weight with at least 131,072 elements: a product
        is accumulated directly into this gradient, and a lookup into the rows that were read. The sums then differ from
        autograd's only in the order of their terms.
        """
        pending.reverse()
        remaining = Counter(id(parameter) for parameter, _ in pending)
        sums: dict[int, Tensor] = {}  # of parameters with additional terms
        with torch.no_grad():
            while pending:
                parameter, term = pending.pop()
                total, key = parameter.grad, id(parameter)
                remaining[key] -= 1
                if total is not None and _is_large(total) and term.fits(total):
                    term.add_to(total)
                    continue
                value = sums.pop(key) + term.value() if key in sums else term.value()
                if remaining[key]:
                    sums[key] = value
                elif total is None:
                    parameter.grad = laid_out(value.to(grad_dtype(parameter)), parameter)
                else:
                    total += value.to(grad_dtype(parameter))


class _Deferred:
    """The forward of one layer while its dW is deferred."""

    def __init__(self, deferral: Deferral, module: nn.Module, kind: Any, plain: Callable[..., Any]) -> None:
        self.deferral, self.module, self.kind, self.plain = deferral, module, kind, plain
        self.is_large_lookup = _is_large_lookup(kind, module)
        self.is_plain = False  # once True, kept: a checkpoint's second pass does not run in the modes of the first

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the layer's own forward, for callers that check which arguments it accepts."""
        return inspect.signature(self.plain)

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        if (self.deferral.whole and not self.is_large_lookup) or len(args) + len(kwargs) != 1:  # not one: TypeError
            return self.plain(*args, **kwargs)
        (x,) = *args, *kwargs.values()  # layers name this argument differently
        weight, bias = map(self.module._parameters.get, ("weight", "bias"))
        if torch.compiler.is_compiling() or functorch_is_active() or not self._may_defer(x, weight, bias):
            return self.plain(x)
        return self.kind.apply(x, weight, bias, self.module, self.deferral)

    def _may_defer(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
        if weight is None or hasattr(type(self.module), "bias"):  # parametrized: compute it only once
            return False
        if getattr(self.module, "bias", None) is not bias:  # a buffer, or another attribute
            return False
        if not torch.is_grad_enabled() or not (_is_deferrable(weight) and (bias is None or _is_ordinary(bias))):
            return False
        if torch.is_autocast_enabled(x.device.type):  # autograd must differentiate autocast's casts
            return False
        self.is_plain = self.is_plain or in_dual_level() or _functions_are_replaced()
        if self.is_plain or _is_saved_by_user():
            return False
        # torch sums in a different order if the input of a linear layer is not contiguous
        return x.numel() > 0 and _is_ordinary(x) and (self.kind is _Embedding or x.is_contiguous())


def _functions_are_replaced() -> bool:
    """Whether the user has replaced functions that these layers call (for example, F.linear, to quantize weights), or
    intercepts functions in a mode. The gradients may then differ from the gradients of torch's own functions."""
    if (F.linear, torch.addmm, torch.embedding) != PLAIN_FUNCTIONS or not _is_defined_in(F, F.embedding):
        return True
    return not all(isinstance(mode, Watching | DeviceContext) for mode in function_modes())


def _is_saved_by_user() -> bool:
    """Whether the user's hooks receive the tensors that autograd saves. Layers that defer dW save different tensors
    than torch's own layers do, such as the parameter itself instead of a view."""
    hooks = saved_tensors_hooks(False)
    if hooks is None:
        return False
    unpack: Any = hooks[1]
    return not f"{unpack.__module__}.{getattr(unpack, '__qualname__', '')}".startswith(UNCHANGING_HOOKS)


def _is_defined_in(module: Any, function: Any) -> bool:
    return getattr(function, "__globals__", None) is vars(module)


def _is_deferrable(parameter: Tensor) -> bool:
    """Whether a parameter is an ordinary trainable leaf without gradient hooks."""
    trainable = parameter.requires_grad and parameter.is_leaf
    return trainable and _is_ordinary(parameter) and not has_hooks(parameter)


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether this tensor is dense, and not of a class with its own matrix product (a quantized weight)."""
    known = type(tensor) in (Tensor, nn.Parameter, DTensor)
    return known and tensor.layout is torch.strided and not tensor.is_nested


def _is_plain(tensor: Tensor) -> bool:
    """Whether this is a dense tensor of the class torch.Tensor itself (not of a subclass such as DTensor)."""
    return type(tensor) is Tensor and tensor.layout is torch.strided


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() >= LARGE


def _is_large_lookup(kind: Any, module: nn.Module) -> bool:
    weight: Any = module._parameters.get("weight")
    return kind is _Embedding and weight is not None and _is_large(weight)


@cache
@torch.enable_grad()
def _references() -> int:
    """The reference count of an AccumulateGrad node that is referenced only by an autograd graph."""
    leaf = torch.zeros(1, requires_grad=True)
    graph = leaf.view_as(leaf)
    node = get_gradient_edge(leaf).node
    return sys.getrefcount(node) if graph.grad_fn is not None else 0


def _weight_grad(ctx: Any, term: Term) -> Tensor | None:
    """Return the weight's gradient for a backward, or None if this gradient is deferred or not needed."""
    if not ctx.needs_input_grad[1] or ctx.deferral.defer(ctx.weight, term):
        return None
    return term.value()


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _no_view(x: Tensor) -> Tensor:
    """Return a tensor that shares the memory of `x` but is not a view, since an in-place ReLU cannot write to a view
    that a Function returned."""
    return torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b, or x W + b for transformers' Conv1D, as in GPT-2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, module: nn.Module, deferral: Deferral) -> Tensor:
        ctx.set_materialize_grads(False)  # without an incoming gradient, return None as torch's own layer does
        ctx.save_for_backward(x, weight)  # also the weight, so that autograd detects in-place writes to it
        ctx.weight, ctx.deferral, ctx.is_conv = weight, deferral, type(module).forward is Conv1D.forward
        if ctx.is_conv:
            return _no_view(torch.addmm(bias, _rows(x), weight).view(*x.shape[:-1], weight.shape[1]))
        return _no_view(F.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        inputs, outputs = _rows(x).conj(), _rows(grad)  # conj() of real numbers is the tensor itself
        term = Product(inputs.t(), outputs) if ctx.is_conv else Product(outputs.t(), inputs)
        factor = (weight.t() if ctx.is_conv else weight).conj()
        dx = outputs.mm(factor).view(x.shape) if ctx.needs_input_grad[0] else None
        db = outputs.sum(0) if ctx.needs_input_grad[2] else None
        return dx, _weight_grad(ctx, term), db, None, None


class _Embedding(torch.autograd.Function):
    """y = W[x]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, module: Any, deferral: Deferral) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.weight, ctx.deferral, ctx.padding = weight, deferral, module.padding_idx
        return _no_view(F.embedding(x, weight, module.padding_idx))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None, None
        (x,) = ctx.saved_tensors
        return None, _weight_grad(ctx, Lookup(grad, x, ctx.weight.shape[0], ctx.padding)), None, None, None


_KINDS: dict[Any, Any] = {
    layer.forward: kind
    for layer, kind in ((nn.Linear, _Linear), (Conv1D, _Linear), (nn.Embedding, _Embedding))
    if _is_defined_in(sys.modules[layer.__module__], layer.forward)  # otherwise the user has already replaced forward
}


def deferring_function(module: nn.Module) -> Any:
    """The autograd Function that defers dW of this layer, or None if the layer cannot defer dW."""
    special = [getattr(module, option, None) for option in ("max_norm", "sparse", "scale_grad_by_freq")]
    return None if any(special) else _KINDS.get(type(module).forward)


def defers(unit: nn.Module) -> bool:
    """Whether this unit defers dW of its linear layers. dW of few parameters takes little time, but its inputs (in each
    adapted layer, the input and the gradient of the result) would take memory until W."""
    parameters = set(unit.parameters())
    unquantized = {m.weight: math.prod(m.whole_shape) for m in unit.modules() if isinstance(m, Packed)}
    trained = sum(parameter.numel() for parameter in parameters if is_trainable(parameter))
    count = sum(unquantized.get(parameter, parameter.numel()) for parameter in parameters)
    return trained > 0 and trained >= LEAST_TRAINED * count
