"""Loss rule: the formula that computes the loss of a batch from the losses of its microbatches.

The mean over a batch is not the mean of the microbatches' means if microbatches have different numbers of samples or
valid labels. A weighted mean divides by a number that only the criterion knows. Most implementations of gradient
accumulation ignore both problems.
"""

import functools
import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeshard.batch.batch import Batch
from pipeshard.engine.loss_sizes import Sizes, Tried
from pipeshard.engine.loss_state import of_entries
from pipeshard.engine.loss_trial import ROUNDING, Losses, Measured
from pipeshard.engine.loss_values import Range, ranges_of, valid_entries
from pipeshard.graph.dataflow import Dataflow
from pipeshard.hf import IGNORED

logger = logging.getLogger("pipeshard")
CLOSE = {torch.float32: ROUNDING, torch.float64: 1e-9}  # tolerated relative error of a sum (see `tolerance_of`)
CLOSE_SLOPES = 2e-2  # the same for a gradient, relative to its largest element: glue may round to 16 bits
MOST_RULES = 128  # LossRules keeps at most this many rules


@dataclass(frozen=True)
class LossRule:
    """A formula for a batch's loss: the sum of the microbatch losses, each multiplied by the microbatch's count and
    divided by the batch's count.

    The count is the number of valid labels: the entries at `path`, from column `shift` on, that are not `ignore`. With
    `masked`, only labels whose attention mask is not 0 are valid: some losses use the mask to omit padding, regardless
    of the padding's labels. With `adds`, the count is the sum of all entries from column `shift` on. If `path` is None,
    the count is the number of samples. With `summed`, the losses are added without weights. With `each`, the count of
    every microbatch is 1. With `counted`, the criterion returns a sum and its count for each microbatch.
    """

    path: str | None = None
    shift: int = 0
    ignore: float = IGNORED
    masked: bool = False
    summed: bool = False
    each: bool = False
    adds: bool = False
    counted: bool = False

    def shares(
        self,
        microbatches: Sequence[Batch],
        total: Callable[[float], float] = lambda count: count,
        counts: Sequence[float] = (),
    ) -> list[float]:
        """The factor of each microbatch's loss. If the rule counts valid labels, the factor of a microbatch without
        valid labels is 0, unless the full batch has no valid labels either.

        If other replicas have parts of the batch, `total` maps the count of this replica's microbatches to the count of
        the full batch. With `counted`, `counts` are the counts that the criterion returned.
        """
        counts = counts if self.counted else self._counts(microbatches)
        whole = total(sum(counts))
        if self.summed:
            return [1.0] * len(microbatches)
        if whole:
            return [(1.0 if self.counted else count) / whole for count in counts]
        # Without a valid label, the batch's loss is the value that the loss code returns for this case, often NaN.
        share = math.nan if self.counted else 1.0 / total(float(len(microbatches)))
        return [share] * len(microbatches)

    def _counts(self, microbatches: Sequence[Batch]) -> list[float]:
        if self.summed or self.each:
            return [1.0] * len(microbatches)
        if self.path is None:
            return [microbatch.rows for microbatch in microbatches]
        valid = functools.partial(valid_entries, path=self.path, ignore=self.ignore, masked=self.masked)
        leaves = [each.by_sample(self.path) if self.adds else valid(each) for each in microbatches]
        leaves = [leaf[..., self.shift :] if leaf.ndim > 1 else leaf for leaf in leaves]
        return [float(count) for count in torch.stack([leaf.double().sum() for leaf in leaves]).tolist()]

    def holds(self, losses: Losses, looser: float = 1.0) -> bool:
        """Whether this rule computes the loss of the whole from the losses of the parts, within `looser` times the
        tolerance for the loss's dtype. With `counted`, the parts' counts must also sum to the count of the whole. If
        the losses have gradients with respect to unit results, the rule must also compute the whole's gradients from
        the parts' gradients. Non-finite gradients are ignored. Rounding errors of gradients that should be 0 are also
        ignored (for example, softmax does not change if the same offset is added to all logits)."""
        whole, parts, batches = losses
        shares = [1.0] * len(parts) if self.counted else self.shares(batches)
        terms = [share * part.value if share else 0.0 for share, part in zip(shares, parts, strict=True)]
        tolerance = looser * tolerance_of(whole.dtype)
        if not abs(sum(terms) - whole.value) <= tolerance * max(abs(whole.value), *map(abs, terms)):
            return False
        if self.counted and not losses.counts_add_up:
            return False
        close = max(CLOSE_SLOPES, 8 * torch.finfo(whole.dtype).eps)
        steepest = [0.0 if slope is None else float(slope.abs().max()) for slope in whole.slopes]
        rounding = tolerance * max(filter(math.isfinite, steepest), default=0.0)
        for k, slope in enumerate(whole.slopes):
            made = _summed(parts, shares, k)
            if slope is None or made is None:
                continue
            difference, bound = float((made - slope).abs().max()), close * max(steepest[k], float(made.abs().max()))
            if math.isfinite(difference) and difference > max(bound, rounding):
                return False
        return True


def _summed(parts: Sequence[Measured], shares: Sequence[float], leaf: int) -> Tensor | None:
    """The gradient of the sum of the parts' losses, each multiplied by its share, with respect to the unit result at
    index `leaf`. Returns None if no part has a gradient."""
    pairs = [(part.slopes[leaf], share) for part, share in zip(parts, shares, strict=True)]
    slopes = [slope * share for slope, share in pairs if slope is not None]
    return torch.stack(slopes).sum(0) if slopes else None


def tolerance_of(dtype: torch.dtype) -> float:
    """The tolerated error of a sum in this dtype, relative to the largest absolute value among the sum and
    its terms."""
    return CLOSE.get(dtype, 2 * torch.finfo(dtype).eps)


EACH, SUM = LossRule(each=True), LossRule(summed=True)


class ProvenRule(NamedTuple):
    """A rule, and `until`: the sizes up to which the rule was tried, or None if the rule does not depend on sizes."""

    rule: LossRule
    until: Sizes | None = None


class _Known(NamedTuple):
    """A rule, and the inputs for which it was proven: the ranges of values (labels, masks), the kinds of lists with one
    entry per sample (`entries`), and the sizes (`tried`; None if the rule holds at all sizes)."""

    rule: LossRule
    ranges: dict[str, Range]
    entries: frozenset[Hashable]
    tried: Tried | None

    def covers_values(self, batch: Batch) -> bool:
        return of_entries(batch) in self.entries and not self.outside(batch)

    def outside(self, batch: Batch) -> list[str]:
        """The paths of the leaves with values for which the rule was not proven."""
        now = ranges_of(batch, self.ranges, is_known=self.tried is None)
        return [path for path, of_batch in now.items() if not self.ranges[path].covers(of_batch)]


class LossRules:
    """The rules for one model's losses, each with the values and sizes for which the rule was proven."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}

    def get(self, kind: Any) -> LossRule | None:
        """The rule for batches of this kind, or None."""
        return self._known[kind].rule if kind in self._known else None

    def covers(self, kind: Any, batch: Batch, sizes: Sizes) -> bool:
        """Whether the rule for this kind was proven for the values of this batch, and for `sizes`."""
        if kind not in self._known:
            return False
        known = self._known[kind] = self._known.pop(kind)  # moved to the end: dropped last
        return (known.tried is None or known.tried.covers(sizes)) and known.covers_values(batch)

    def known(self, kind: Any, batch: Batch) -> LossRule | None:
        """The rule for this kind if it was proven for values like those of this batch (at any sizes), otherwise
        None."""
        known = self._known.get(kind)
        return known.rule if known is not None and known.covers_values(batch) else None

    def add(self, kind: Any, proven: ProvenRule, flow: Dataflow, batch: Batch) -> None:
        """Add a proven rule. If this kind already has the same rule, earlier proofs for other values and sizes remain
        valid."""
        now = ranges_of(batch, read_by_loss(flow), is_known=proven.until is None)
        entries: frozenset[Hashable] = frozenset([of_entries(batch)])
        tried = None if proven.until is None else Tried()
        before = self._known.get(kind)
        if before is not None and before.rule == proven.rule:
            if outside := before.outside(batch):
                logger.info(
                    "the loss was verified again, since leaves of the batch have values that may change how microbatch "
                    "losses combine (a new largest or smallest value, or possible padding): %s",
                    ", ".join(outside),
                )
            for path in now.keys() & before.ranges.keys():
                now[path] = now[path].joined(before.ranges[path])
            entries |= before.entries
            tried = before.tried if tried is not None and before.tried is not None else tried
        if tried is not None and proven.until is not None:
            tried.add(proven.until)
        self._known.pop(kind, None)
        if len(self._known) >= MOST_RULES:  # drop only the least recently used rule: the step may need the others
            del self._known[next(iter(self._known))]
        self._known[kind] = _Known(proven.rule, now, entries, tried)

    def forget(self, kind: Any) -> None:
        self._known.pop(kind, None)

    def clear(self) -> None:
        self._known.clear()


def read_by_loss(flow: Dataflow) -> frozenset[str]:
    """The paths of the batch's leaves that the loss reads, in glue or in a unit that computes the loss."""
    if flow.loss is None:
        return frozenset()
    makers = (flow.calls[value.call].reads for value in flow.loss.values if not flow.spec(value).shape)
    return flow.loss.inputs.union(*(reads.inputs for reads in makers))
