"""Reading: what glue does past torch's operators, told to a Taint.

A dispatch mode sees operators. What Python reads of a tensor without one, who listens to a gradient, and which part of
the graph has a backward of its own, is seen where torch's functions are called.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeshard.graph.taint import Hidden, Taint, Value, casting, tensors_in


class Reading(TorchFunctionMode):
    """Tells a Taint when a tensor is read past all operators: by `tolist`, `numpy`, `np.asarray`, or as a number in a
    sequence that becomes a tensor or an index; when one is only checked, which decides nothing; and when somebody
    listens to its gradient. Inside a unit on meta it ends what torch would cast, which on meta it does not, and what
    takes the address of a tensor, which is 0 there: a kernel that is given it (Triton's) would read and write there."""

    READERS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr)
    BUILDERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
    INDEXERS = (Tensor.__getitem__, Tensor.__setitem__)
    LISTENERS = (Tensor.register_hook, Tensor.retain_grad)

    def __init__(self, taint: Taint) -> None:
        super().__init__()
        self.taint = taint

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.LISTENERS:
            self.taint.hook(args[0])
        elif func is Tensor.data_ptr and args[0].is_meta:
            raise RuntimeError("a tensor on meta has no address")
        elif func in self.READERS:
            self.taint.decide(self.taint.of(args[:1]))
        elif func in self.BUILDERS or func in self.INDEXERS:
            outer = args[1] if func in self.INDEXERS else args
            items = outer if isinstance(outer, tuple) else [outer]
            nested = [item for item in items if isinstance(item, list | tuple)]
            self.taint.decide(self.taint.of(tensors_in(nested)), shaping=True)
        elif self.taint.inside is not None and casting() and any(t.is_meta for t in tensors_in(args)):
            raise RuntimeError("by shape alone torch.autocast casts nothing")
        classes = (*args, *(kwargs or {}).values())[1:] if func is nn.functional.one_hot else ()
        self.taint.is_checking = classes > (0,)  # else their number is the largest value
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.taint.is_checking = False


@contextmanager
def noting_functions(taint: Taint) -> Iterator[list[int]]:
    """Yields the unit calls inside a custom autograd function (reformer's reversible layers), whose backward calls them
    again in a way of its own."""
    sealed: list[int] = []
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        first = taint.calls
        result = original.__get__(None, cls)(*args, **kwargs)
        sealed.extend(range(first, taint.calls))
        return result

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield sealed
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


@contextmanager
def noting_backward(taint: Taint) -> Iterator[None]:
    """Notes gradients that glue computes by itself as a decision: of the graph through units each stage has only a
    part. Inside, such gradients are zeros; what is computed inside one unit is that unit's own affair."""
    grad, backward = torch.autograd.grad, torch.autograd.backward

    def is_of_units(tensors: Sequence[Any]) -> bool:
        tags = frozenset(tag for tag in taint.of(tensors) if isinstance(tag, Value | Hidden))
        taint.decide(tags)
        return bool(tags) and taint.inside is None

    def grad_instead(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_of_units(_listed(outputs)):
            return grad(outputs, inputs, *args, **kwargs)
        gradients = [torch.zeros_like(t, requires_grad=bool(kwargs.get("create_graph"))) for t in _listed(inputs)]
        for gradient in gradients:
            taint.mark(gradient, taint.of([*_listed(outputs), *_listed(inputs)]))
        return tuple(gradients)

    def backward_instead(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not is_of_units(_listed(tensors)):
            backward(tensors, *args, **kwargs)

    torch.autograd.grad, torch.autograd.backward = grad_instead, backward_instead
    try:
        yield
    finally:
        torch.autograd.grad, torch.autograd.backward = grad, backward


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
