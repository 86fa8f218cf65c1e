"""Loss rule: how the loss of a batch is made of the losses of its microbatches, found by trying."""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.errors import ConfigurationError, TraceError
from pipeshard.model.batch import Batch
from pipeshard.model.criterion import Criterion, loss_of
from pipeshard.model.dataflow import Dataflow
from pipeshard.model.exits import answer
from pipeshard.model.shapes import TensorSpec
from pipeshard.model.taint import Value
from pipeshard.model.trace import trace
from pipeshard.model.units import find_units, handled
from pipeshard.model.untouched import untouched

logger = logging.getLogger("pipeshard")

ROWS, LENGTH = 4, 8  # a probe's samples and positions


@dataclass(frozen=True)
class LossRule:
    """The batch's loss is the sum of the microbatches' losses, each times its count over the batch's.

    The count is that of valid labels (entries of `path` from column `shift` on that are not `ignore`), or of samples
    where `path` is None. With `summed` the losses add up as they are, with `each` every microbatch counts one.
    """

    path: str | None = None
    shift: int = 0
    ignore: int = -100
    summed: bool = False
    each: bool = False

    def weights(self, microbatches: Sequence[Batch], total: Callable[[int], int] = lambda count: count) -> list[float]:
        """What each microbatch's loss counts in the batch's; 0 for one without a valid label.

        `total` makes of the count of these microbatches that of the whole batch, of which others may have a part.
        """
        counts = [1] * len(microbatches) if self.summed or self.each else self.counts(microbatches)
        whole = total(sum(counts))
        return [1.0 if self.summed else count / whole if whole else 0.0 for count in counts]

    def gives(self, whole: Tensor, parts: Sequence[Tensor], microbatches: Sequence[Batch]) -> bool:
        """Whether the parts' losses make the whole's by this rule, as far as their dtype can tell."""
        expected = sum(weight * float(part) for weight, part in zip(self.weights(microbatches), parts))
        tolerance = max(1e-5, 2 * torch.finfo(whole.dtype).eps)
        return abs(expected - float(whole)) <= tolerance * max(abs(float(whole)), 1e-3)

    def counts(self, microbatches: Sequence[Batch]) -> list[int]:
        if self.path is None:
            return [microbatch.rows for microbatch in microbatches]
        labels = [microbatch.by_sample(self.path) for microbatch in microbatches]
        valid = [(label[..., self.shift :] if label.ndim > 1 else label).ne(self.ignore).sum() for label in labels]
        return [int(count) for count in torch.stack(valid).tolist()]


EACH = LossRule(each=True)


def find_loss_rule(model: nn.Module, flow: Dataflow, batch: Batch, criterion: Criterion | None) -> LossRule:
    """The rule by which the loss of `ROWS` samples follows from the losses of its two halves.

    The glue after the units is run on the whole and on the halves, with random unit results and labels that differ in
    how many are valid; the first rule that gives the whole from the halves is it. Where none does (a loss that is no
    mean or sum over samples), the microbatches' losses are averaged by samples, with a warning.
    """
    if flow.loss is not None and (flow.loss.hidden or any(flow.is_aside(value) for value in flow.loss.values)):
        logger.warning(
            "the loss of %s has an auxiliary part (router logits?), which is no sum over samples: it is computed for "
            "each microbatch, as in gradient accumulation, and averaged like the rest",
            type(model).__name__,
        )
    sample, trial = _trial(model, flow, batch, criterion)
    ignores = [-100] if criterion is None else [-100, *_padding(model), -1, 0]
    for path, ignore in itertools.product(_label_paths(batch), dict.fromkeys(ignores)):
        labelled = _with_invalid(sample, path, ignore)
        losses = trial.losses(labelled) if trial else None
        for shift in (0, 1):
            rule = LossRule(path, shift, ignore)
            if losses is not None and rule.gives(*losses, labelled.split(2)):
                return rule
    losses = trial.losses(sample) if trial else None
    for rule in (LossRule(), LossRule(summed=True)):
        if losses is not None and rule.gives(*losses, sample.split(2)):
            return rule
    logger.warning(
        "the loss of %s is no mean or sum over samples or labels, so that of a batch cannot be made of its "
        "microbatches': it is their mean by number of samples. Use one microbatch to train on the batch's own loss",
        type(model).__name__,
    )
    return LossRule()


def _trial(
    model: nn.Module, flow: Dataflow, batch: Batch, criterion: Criterion | None
) -> tuple[Batch, "_Trial | None"]:
    """A trial on `ROWS` samples, of no more than `LENGTH` positions if the model takes them so short."""
    for candidate in (flow.axes.shortened(batch, LENGTH), batch):
        sample = candidate.take(torch.arange(ROWS) % candidate.rows)
        try:
            return sample, _Trial(model, sample, criterion)
        except (TraceError, ConfigurationError) as error:  # on this stage alone, so it must not end the step
            logger.debug("a trial of the loss failed: %s", error)
    return sample, None


class _Trial:
    """The model's glue on one batch and on its halves. The results that the loss depends on are random, and have the
    samples of the halves in common; all others are zeros."""

    def __init__(self, model: nn.Module, batch: Batch, criterion: Criterion | None) -> None:
        self.model, self.criterion, self.units = model, criterion, find_units(model)
        self.device = next(iter(batch.tensors.values())).device
        self.flows = [trace(model, part, criterion, exact=True) for part in (batch, *batch.split(2))]
        generator = torch.Generator().manual_seed(0)
        whole = self.flows[0]
        self.random = {
            (*whole.occurrences[call], leaf): _random(whole.spec(Value(call, leaf)), generator, self.device)
            for call, leaf in sorted(whole.loss.values if whole.loss else ())
            if not whole.is_aside(Value(call, leaf))  # auxiliary losses take those: with zeros they are constant
        }

    def losses(self, batch: Batch) -> tuple[Tensor, list[Tensor]] | None:
        """The loss of the batch and those of its halves; None if the loss does not take its labels."""
        try:
            whole, first, second = (
                self._loss(flow, part, k) for k, (flow, part) in enumerate(zip(self.flows, (batch, *batch.split(2))))
            )
        except Exception as error:
            logger.debug("a trial of the loss failed: %s: %s", type(error).__name__, error)
            return None
        return whole, [first, second]

    def _loss(self, flow: Dataflow, batch: Batch, part: int) -> Tensor:
        """The loss of the whole (part 0) or of one half (1, 2)."""
        calls = enumerate(flow.calls)

        def give(unit: str, original: Any, *arguments: Any) -> Any:
            index, call = next(calls)
            leaves = [
                self._leaf(leaf, (*flow.occurrences[index], k), part) if isinstance(leaf, TensorSpec) else leaf
                for k, leaf in enumerate(call.leaves)
            ]
            return answer(self.units[unit], call.parts, leaves, arguments)

        with untouched(self.model), torch.no_grad(), handled(self.units, give):
            loss = loss_of(batch.call(self.model), self.criterion, batch)
        return torch.tensor(float("nan")) if loss is None else loss

    def _leaf(self, spec: TensorSpec, key: tuple[str, int, int], part: int) -> Tensor:
        """What of a unit's result belongs to this part: a half of each dimension that grows with the samples."""
        leaf = self.random.get(key)
        if leaf is None or leaf.ndim != len(spec.shape):
            return torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)
        for dim, size in enumerate(spec.shape):
            if size != leaf.shape[dim]:
                leaf = leaf.narrow(dim, 0 if part == 1 else leaf.shape[dim] - size, size)
        return leaf.clone()


def _random(spec: TensorSpec, generator: torch.Generator, device: torch.device) -> Tensor:
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    return (4 * torch.randn(spec.shape, generator=generator)).to(device, spec.dtype)  # samples' losses differ much


def _label_paths(batch: Batch) -> list[str]:
    integers = [
        path
        for path, dim in zip(batch.paths, batch.row_dims, strict=True)
        if (dim is not None or path in batch.owners) and path in batch.tensors
        if not batch.tensors[path].is_floating_point()
    ]
    named = [path for path in integers if "label" in path or "target" in path]
    return named or integers[::-1]


def _padding(model: nn.Module) -> list[int]:
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    return [padding] if isinstance(padding, int) else []


def _with_invalid(batch: Batch, path: str, ignore: int) -> Batch:
    """All labels valid in the first half; in the second the first two columns, or all but the last sample's."""
    mask = batch.by_sample("attention_mask") if "attention_mask" in batch.tensors else None

    def relabel(name: str, leaf: Tensor, dim: int | None) -> Tensor:
        if name != path:
            return leaf
        leaf = leaf.movedim(dim or 0, 0)
        leaf = torch.where(leaf < 0, 1, leaf) if ignore < 0 else torch.where(leaf == ignore, ignore + 1, leaf)
        if mask is not None and mask.shape == leaf.shape:
            leaf = leaf.masked_fill(mask == 0, ignore)  # some losses leave padding out by the mask
        if leaf.ndim == 1:
            leaf[ROWS - 1] = ignore
        else:
            leaf[len(leaf) // 2 :, 2:] = ignore
        return leaf.movedim(0, dim or 0)

    return batch.map(relabel)
