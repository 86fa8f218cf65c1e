"""Indices: a check that indices are in range, before a kernel runs on a GPU.

On a CPU, an operator raises an error for an index out of range. On a GPU, such an index leaves the CUDA context
unusable. Traces and trials run the model's code with sizes or values that differ from the batch's, so indices may be
out of range. Therefore, every indexing operator that runs on a GPU in a trace or trial first runs on the CPU. Binary
cross entropy is also checked in this way, since it accepts only probabilities.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from pipeshard.private import DispatchMode, tree_map_only, tree_tensors

aten = torch.ops.aten
WRITING = (
    "index_put",
    "index_add",
    "index_copy",
    "index_fill",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "masked_scatter",
)
INDEXING = {aten.index, aten.index_select, aten.gather, aten.take, aten.embedding}
INDEXING |= {aten.nll_loss_forward, aten.nll_loss2d_forward, aten.multi_margin_loss}
INDEXING.add(aten.multilabel_margin_loss_forward)
INDEXING |= {getattr(aten, name + end) for name in WRITING for end in ("", "_")}
OF_PROBABILITIES = {aten.binary_cross_entropy}  # operators that only accept probabilities


def check_indices(func: Any, args: Any, kwargs: Any, inputs: Sequence[Any]) -> None:
    """Check an indexing operator, or an operator that accepts only probabilities, by running it on the CPU if one of
    its `inputs` is on a GPU. An index out of range, or a value that is not a probability, then raises an error. For an
    indexing operator, only indices and masks are copied to the CPU."""
    of_probabilities = func._overloadpacket in OF_PROBABILITIES

    def on_cpu(tensor: Tensor) -> Tensor:
        needs_values = of_probabilities or not tensor.is_floating_point()
        return tensor.cpu() if needs_values else torch.empty_like(tensor, device="cpu")

    is_checked = of_probabilities or func._overloadpacket in INDEXING
    if is_checked and any(tensor.device.type == "cuda" for tensor in inputs):
        with suppress(NotImplementedError):  # no CPU kernel, or an index on meta
            args, kwargs = tree_map_only(Tensor, on_cpu, (args, kwargs))
            func(*args, **kwargs)


class Checking(DispatchMode):
    """Mode that checks the indices of every operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        check_indices(func, args, kwargs, tree_tensors((args, kwargs)))
        return func(*args, **kwargs)


def checking_indices(device: torch.device) -> AbstractContextManager[Any]:
    """Context manager in which an operator raises an error for an index out of range, even if `device` is a GPU."""
    return Checking() if device.type == "cuda" else nullcontext()
