"""Whole: the loss of a batch, beside what its microbatches' losses are said to make."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeshard.model.batch import Batch
from pipeshard.model.criterion import Criterion, loss_of
from pipeshard.verify.compare import LOSS, Comparison, Different
from pipeshard.verify.copies import Copies
from pipeshard.verify.virtual import Virtual

Evaluated = tuple[Tensor, list[Tensor]] | None


def evaluated(own: Copies, criterion: Criterion | None, batch: Batch) -> Evaluated:
    """The loss and the output's tensors in evaluation mode, where nothing is drawn; None where there is no loss."""
    own.model.eval()
    with torch.no_grad():
        output = batch.call(own.model)
        loss = loss_of(output, criterion, batch)
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.ndim]
    return None if loss is None else (loss, leaves)


def compare_whole(
    comparison: Comparison, batch: Batch, m: int, split: Virtual, evaluate: Callable[[Batch, int], list[Evaluated]]
) -> str:
    """Compare the loss of `batch` with that which the weights of the last step make of m microbatches; returns why that
    cannot be, "" otherwise.

    `evaluate(batch, n)` evaluates a fresh copy of the unsplit model n times.
    """
    flow = split.microbatches[0].route.flow
    if flow.loss is not None and (flow.loss.hidden or any(flow.is_aside(value) for value in flow.loss.values)):
        return "it has an auxiliary part"
    parts, end = [], 0
    for i, part in enumerate(batch.split(m)):
        start, end = end, end + part.rows
        parts.append(batch.take(torch.arange(start, end)))
        comparison.tensors(part.tensors, parts[-1].tensors, "inputs", f"of microbatch {i}")
    (whole,), each = evaluate(batch, 1), [evaluate(part, 1)[0] for part in parts]
    if whole is None or None in each:
        return "there is none in evaluation mode"
    weights = [microbatch.weight for microbatch in split.microbatches]
    loss, losses = float(whole[0]), [float(one[0]) for one in each if one is not None]
    made = sum(weight * one for weight, one in zip(weights, losses, strict=True) if weight)
    if abs(made - loss) <= max(LOSS, 8 * torch.finfo(whole[0].dtype).eps) * max(abs(loss), 1e-3):
        comparison.count("batch losses")
        return ""
    columns = list(zip(whole[1], *(one[1] for one in each if one is not None)))
    if any(not _alike_apart(leaf, leaves) for leaf, *leaves in columns):
        return "its samples have to do with each other"
    first, again = evaluate(parts[-1], 2)
    if not columns and (first is None or again is None or not torch.equal(first[0], again[0])):
        return "it depends on state or chance"
    raise Different(
        f"the loss of {batch.rows} samples is {loss:.7g}, but {made:.7g} made of those of {m} microbatches, which "
        f"count {', '.join(f'{weight:.3g}' for weight in weights)}: pass loss_reduction='microbatch' if the mean of "
        "the microbatches' losses is meant, or use one microbatch"
    )


def _alike_apart(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether the samples of an output, counted by its first dimension, are what they are in a smaller batch."""
    if any(part.shape[1:] != whole.shape[1:] for part in parts) or sum(map(len, parts)) != len(whole):
        return False
    return Comparison().same(torch.cat(list(parts)), whole)
