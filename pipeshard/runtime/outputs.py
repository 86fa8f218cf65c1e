"""Outputs: the model's output for a whole batch, of its microbatches'."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from pipeshard.model.names import flatten_with_names
from pipeshard.runtime.stage import Microbatch


def merge(outputs: list[Any], microbatches: Sequence[Microbatch], loss: Tensor | None) -> Any:
    """One output, of the class the model returns, for the whole batch: microbatches are put together along the
    dimension that grows with the number of samples, the loss is the batch's."""
    flow = microbatches[0].route.flow
    specs = {path: spec for path, _, spec in flow.outputs}
    named, tree = flatten_with_names(outputs[0])
    columns = zip(*(tree_flatten(output)[0] for output in outputs), strict=True)
    merged = []
    for (name, first), column in zip(named, columns, strict=True):
        spec = specs.get(name)
        dim = next((d for d, slopes in enumerate(spec.slopes) if slopes and slopes[0]), None) if spec else None
        if name == "['loss']" and loss is not None:
            merged.append(loss)
        elif not isinstance(first, Tensor) or len(column) == 1 or first.ndim == 0:
            merged.append(first)
        else:
            merged.append(torch.cat(column, dim=_counting(column, microbatches) if dim is None else dim))
    return tree_unflatten(merged, tree)


def _counting(column: Sequence[Tensor], microbatches: Sequence[Microbatch]) -> int:
    """The dimension that counts the samples in what was traced at one size alone: one that does in the batch, too."""
    rows = [microbatch.batch.rows for microbatch in microbatches]
    of_batch = [dim for dim in microbatches[0].batch.row_dims if dim is not None and dim < column[0].ndim]
    dims = [*dict.fromkeys(of_batch), *range(column[0].ndim)]
    return next((dim for dim in dims if [tensor.shape[dim] for tensor in column] == rows), 0)
