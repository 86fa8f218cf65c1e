"""Loss rule: how the loss of a batch is made of the losses of its microbatches, found by trying."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from pipeshard.model.batch import Batch
from pipeshard.model.dataflow import Dataflow
from pipeshard.model.shapes import TensorSpec
from pipeshard.model.tracer import Criterion
from pipeshard.model.units import find_units, handled

logger = logging.getLogger("pipeshard")

ROWS, LENGTH = 4, 8  # a probe's samples and positions


@dataclass(frozen=True)
class LossRule:
    """The batch's loss is the sum of the microbatches' losses, each times its count over the batch's.

    The count is that of valid labels (entries of `path` from column `shift` on that are not `ignore`), or of samples
    where `path` is None. With `summed` the losses add up as they are.
    """

    path: str | None = None
    shift: int = 0
    ignore: int = -100
    summed: bool = False

    def weights(self, microbatches: Sequence[Batch]) -> list[float]:
        """What each microbatch's loss counts in the batch's; 0 for one without a valid label."""
        if self.summed:
            return [1.0] * len(microbatches)
        counts = self.counts(microbatches)
        total = sum(counts)
        return [count / total if total else 0.0 for count in counts]

    def counts(self, microbatches: Sequence[Batch]) -> list[int]:
        if self.path is None:
            return [microbatch.rows for microbatch in microbatches]
        labels = [microbatch.tensors[self.path] for microbatch in microbatches]
        valid = [(label[..., self.shift :] if label.ndim > 1 else label).ne(self.ignore).sum() for label in labels]
        return [int(count) for count in torch.stack(valid).tolist()]


def find_loss_rule(model: nn.Module, flow: Dataflow, batch: Batch, criterion: Criterion | None) -> LossRule:
    """The rule by which the loss of `ROWS` samples follows from the losses of its two halves.

    The glue after the units is run on the whole and on the halves, with random unit results and labels that differ in
    how many are valid; the first rule that gives the whole from the halves is it. Where none does (a loss that is no
    mean or sum over samples), the microbatches' losses are averaged by samples, with a warning.
    """
    for group, size in enumerate(flow.axes.sizes):
        delta = (flow.axes.deltas(batch) or (0,) * len(flow.axes.sizes))[group]
        if group > 0 and size + delta > LENGTH:
            batch = flow.axes.resized(batch, group, LENGTH - size - delta)
    label_paths = _label_paths(batch)
    ignores = [-100] if criterion is None else [-100, *_padding(model), -1, 0]
    for path, ignore in itertools.product(label_paths, dict.fromkeys(ignores)):
        probe = _probe(model, flow, _with_invalid(batch, path, ignore), criterion)
        for shift in (0, 1):
            rule = LossRule(path, shift, ignore)
            if probe is not None and probe.follows(rule):
                return rule
    probe = _probe(model, flow, batch.take(torch.arange(ROWS) % batch.rows), criterion)
    for rule in (LossRule(), LossRule(summed=True)):
        if probe is not None and probe.follows(rule):
            return rule
    logger.warning(
        "the loss of %s is no mean or sum over samples or labels, so that of a batch cannot be made of its "
        "microbatches': it is their mean by number of samples. Use one microbatch to train on the batch's own loss",
        type(model).__name__,
    )
    return LossRule()


@dataclass(frozen=True)
class _Probe:
    halves: tuple[Batch, Batch]
    whole: float
    parts: tuple[float, float]

    def follows(self, rule: LossRule) -> bool:
        expected = sum(w * part for w, part in zip(rule.weights(self.halves), self.parts, strict=True))
        return abs(expected - self.whole) <= 1e-4 * max(abs(self.whole), 1e-3)


def _probe(model: nn.Module, flow: Dataflow, batch: Batch, criterion: Criterion | None) -> _Probe | None:
    try:
        results = _random_results(flow, batch)
        whole = _loss_of(model, criterion, batch, results(0, ROWS))
        halves = batch.split(num_microbatches=2)
        parts = [_loss_of(model, criterion, half, results(k * ROWS // 2, ROWS // 2)) for k, half in enumerate(halves)]
    except Exception as error:  # labels the loss does not take, glue that wants other sizes: not this rule
        logger.debug("a probe of the loss failed: %s: %s", type(error).__name__, error)
        return None
    return _Probe((halves[0], halves[1]), whole, (parts[0], parts[1]))


def _loss_of(model: nn.Module, criterion: Criterion | None, batch: Batch, results: Iterator[Any]) -> float:
    with torch.no_grad(), handled(find_units(model), lambda *call: next(results)):
        output = batch.call(model)
        loss = output.loss if criterion is None else criterion(output, batch.for_criterion())
    return float(loss)


def _random_results(flow: Dataflow, batch: Batch) -> Callable[[int, int], Iterator[Any]]:
    """results(first, rows): what each unit call returns for these samples of one random batch."""
    deltas = flow.axes.deltas(batch)
    if deltas is None or 0 not in range(len(flow.axes.groups)):
        raise ValueError("this batch has other sizes than the trace")
    generator = torch.Generator().manual_seed(0)
    device = next(iter(batch.tensors.values())).device

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        if not leaf.dtype.is_floating_point:
            return torch.zeros(leaf.at(deltas), dtype=leaf.dtype, device=device)
        return torch.randn(leaf.at(deltas), generator=generator).to(device, leaf.dtype)

    wholes = [[whole(leaf) for leaf in call.leaves] for call in flow.calls]

    def results(first: int, rows: int) -> Iterator[Any]:
        for call, leaves in zip(flow.calls, wholes, strict=True):
            parts = [_rows(leaf, spec, first, rows) for leaf, spec in zip(leaves, call.leaves, strict=True)]
            yield tree_unflatten(parts, call.tree)

    return results


def _rows(leaf: Any, spec: Any, first: int, rows: int) -> Any:
    """The part of a unit result that belongs to some samples."""
    if isinstance(spec, TensorSpec):
        for dim, slopes in enumerate(spec.slopes):
            if slopes and slopes[0]:
                leaf = leaf.narrow(dim, first * slopes[0], rows * slopes[0])
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _label_paths(batch: Batch) -> list[str]:
    integers = [
        path
        for path, dim in zip(batch.paths, batch.row_dims, strict=True)
        if dim == 0 and not batch.tensors[path].is_floating_point()
    ]
    named = [path for path in integers if "label" in path or "target" in path]
    return named or integers[::-1]


def _padding(model: nn.Module) -> list[int]:
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    return [padding] if isinstance(padding, int) else []


def _with_invalid(batch: Batch, path: str, ignore: int) -> Batch:
    """`ROWS` samples: all labels valid in the first two, in the others the first two columns (or the first sample)."""
    sample = batch.take(torch.arange(ROWS) % batch.rows)

    def relabel(name: str, leaf: Tensor, dim: int | None) -> Tensor:
        if name != path:
            return leaf
        leaf = torch.where(leaf < 0, 1, leaf) if ignore < 0 else torch.where(leaf == ignore, ignore + 1, leaf)
        if leaf.ndim == 1:
            leaf[ROWS - 1] = ignore
        else:
            leaf[ROWS // 2 :, 2:] = ignore
        return leaf

    return sample.map(relabel)
