"""Backward in glue: gradients that a model's glue asks for in its own forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeshard.model.taint import Hidden, Taint, Value


@contextmanager
def backward_noted(taint: Taint) -> Iterator[None]:
    """Notes as a decision, in a trace, what no stage can do alone: of the graph that leads through units each stage has
    a part. Such gradients are zeros inside; what is computed inside one unit is that unit's own affair."""
    grad, backward = torch.autograd.grad, torch.autograd.backward

    def noted(*tensors: Any) -> bool:
        tags = frozenset(tag for tag in taint.of(tensors) if isinstance(tag, Value | Hidden))
        taint.decide(tags)
        return bool(tags) and taint.inside is None

    def grad_instead(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not noted(*_listed(outputs)):
            return grad(outputs, inputs, *args, **kwargs)
        made = [torch.zeros_like(t, requires_grad=bool(kwargs.get("create_graph"))) for t in _listed(inputs)]
        for tensor in made:
            taint.mark(tensor, taint.of([*_listed(outputs), *_listed(inputs)]))
        return tuple(made)

    def backward_instead(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not noted(*_listed(tensors)):
            backward(tensors, *args, **kwargs)

    torch.autograd.grad, torch.autograd.backward = grad_instead, backward_instead
    try:
        yield
    finally:
        torch.autograd.grad, torch.autograd.backward = grad, backward


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
