"""Loss rule: how the loss of a batch is made of the losses of its microbatches, proven by trying."""

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion
from pipeshard.engine.loss_probe import LENGTH, NOTHING, Probe, spread_out
from pipeshard.engine.loss_trial import NORMAL, PROBABILITIES, Measured, Trial
from pipeshard.errors import ConfigurationError, TraceError
from pipeshard.graph.dataflow import Dataflow
from pipeshard.hf import IGNORED, is_of_transformers, padding_token, targets

logger = logging.getLogger("pipeshard")
SPLITS = 1, 2, 3  # after which of a probe's samples it is cut
TELLING = 3  # trials that a rule has to hold in, at least
CLOSE = {torch.float32: 4e-6, torch.float64: 1e-9}  # how far sums may be off, relatively; of others their precision
FAR = 1e-3  # how much a trial's losses have to differ, relative to the larger one


@dataclass(frozen=True)
class LossRule:
    """The batch's loss is the sum of the microbatches' losses, each times its count over the batch's.

    The count is that of valid labels (entries of `path` from column `shift` on that are not `ignore`), with `adds` the
    sum of these entries, or the number of samples where `path` is None. With `summed` the losses add up as they are,
    with `each` every microbatch counts one. With `counted` the criterion gives sums, and what they are divided by.
    """

    path: str | None = None
    shift: int = 0
    ignore: int = IGNORED
    summed: bool = False
    each: bool = False
    adds: bool = False
    counted: bool = False

    def weights(
        self,
        microbatches: Sequence[Batch],
        total: Callable[[float], float] = lambda count: count,
        counts: Sequence[float] = (),
    ) -> list[float]:
        """What each microbatch's loss counts in the batch's; 0 for one without a valid label.

        `total` makes of the count of these microbatches that of the whole batch, of which others may have a part.
        `counts` are those of the criterion, where it has some.
        """
        ones = [1.0] * len(microbatches)
        counts = ones if self.summed or self.each else counts if self.counted else self.counts(microbatches)
        whole = total(sum(counts))
        parts = ones if self.counted else counts
        return [1.0 if self.summed else part / whole if whole else 0.0 for part in parts]

    def counts(self, microbatches: Sequence[Batch]) -> list[float]:
        if self.path is None:
            return [microbatch.rows for microbatch in microbatches]
        leaves = [microbatch.by_sample(self.path) for microbatch in microbatches]
        leaves = [leaf[..., self.shift :] if leaf.ndim > 1 else leaf for leaf in leaves]
        found = [leaf.double().sum() if self.adds else leaf.ne(self.ignore).sum() for leaf in leaves]
        return [float(count) for count in torch.stack(found).tolist()]

    def gives(self, whole: Measured, parts: Sequence[Measured], microbatches: Sequence[Batch]) -> bool:
        """Whether the parts' losses make the whole's by this rule, as far as their dtype can tell."""
        weights = [1.0] * len(parts) if self.counted else self.weights(microbatches)
        pairs = list(zip(weights, parts, strict=True))
        same = _same(whole, sum(weight * part.value for weight, part in pairs), [w * p.value for w, p in pairs])
        counts = [part.divisor for part in (whole, *parts) if part.divisor is not None]
        return same and (not self.counted or abs(counts[0] - sum(counts[1:])) <= 1e-5 * max(map(abs, counts)))


EACH = LossRule(each=True)
REMEDY = (
    "average the microbatches' own losses (PipelinePlugin(loss_reduction='microbatch')), return (sum, count) from the "
    "criterion, where the batch's loss is the sum of the sums over that of the counts, or use one microbatch"
)


def find_loss_rule(model: nn.Module, flow: Dataflow, batch: Batch, criterion: Criterion | None) -> LossRule:
    """The rule by which the loss of a batch like this follows from those of its parts.

    The glue after the units is run on a few samples and on parts of them, cut in different places, with random unit
    results, and with labels, weights and masks that are drawn anew; a rule has to hold each time. A part of the loss
    that is made of what leaves units aside (router logits) may follow none, which is warned of.

    Raises ConfigurationError where there is no such rule.
    """
    auxiliary = flow.loss is not None and bool(flow.loss.hidden or any(map(flow.is_aside, flow.loss.values)))
    search = _Search(model, flow, batch, criterion)
    rule = search.rule(asides=False)
    if rule is None and auxiliary:
        rule, auxiliary = search.rule(asides=True), False
    provable = criterion is None and is_of_transformers(model) and not _ignores_some(batch, search.read)
    if rule is None and provable and search.rule(asides=False, valid=True):
        rule, auxiliary = LossRule(), True  # a sum of means over labels of several kinds, of which all are valid
    if rule is None:
        if search.failure is not None:
            raise ConfigurationError(
                f"how a batch's loss is made of its microbatches' could not be found: {type(model).__name__} on "
                f"a few samples ended in {type(search.failure).__name__}: {search.failure}. If that is not the model's "
                f"own error, {REMEDY}"
            ) from search.failure
        raise ConfigurationError(
            f"the loss of {type(model).__name__} is no mean or sum over samples or valid labels that could be proven "
            "on random values (does it weigh classes, compare samples with each other, or divide by something of its "
            f"own?), so that of a batch cannot be made of its microbatches': {REMEDY}"
        )
    if auxiliary:
        logger.warning(
            "the loss of %s has an auxiliary part (router logits, or a second kind of labels?), which is no sum over "
            "samples: it is computed for each microbatch, as in gradient accumulation, and averaged like the rest",
            type(model).__name__,
        )
    return rule


class _Search:
    """Looks for the rule of one loss."""

    def __init__(self, model: nn.Module, flow: Dataflow, batch: Batch, criterion: Criterion | None) -> None:
        self.model, self.flow, self.batch, self.criterion = model, flow, batch, criterion
        self.read = read_by_loss(flow)
        self.failure: Exception | None = None  # why nothing could be tried

    def rule(self, asides: bool, valid: bool = False) -> LossRule | None:
        """It, or None; `asides` says whether what leaves units aside is random too. Where it has to hold for `valid`
        labels only, one by samples."""
        self.valid = valid
        for candidate in (self.flow.axes.shortened(self.batch, LENGTH), self.batch):
            if self._tries(candidate.take(spread_out(candidate.rows)), asides):
                break
        else:
            return None
        if self.level == NOTHING and self.batch.rows == 1:
            return None  # all samples are the same one
        if self.counted:
            return LossRule(counted=True) if self._counts() and self._holds(LossRule(counted=True)) else None
        return next(filter(self._holds, [LossRule()] if valid else self._candidates()), None)

    def _tries(self, sample: Batch, asides: bool) -> bool:
        """Whether the loss of this sample is a number, and of how much of the batch drawn and of what unit results."""
        try:
            self.trial = Trial(self.model, self.flow, sample, self.criterion, asides)
        except (TraceError, ConfigurationError) as error:
            logger.debug("a trial of the loss failed: %s", error)
            self.failure = error
            return False
        self.probe = Probe(self.model, self.batch, sample, self.read, self.flow.consulted)
        for self.kind, self.level in itertools.product((NORMAL, PROBABILITIES), range(NOTHING + 1)):
            found = self._measure(LossRule(), 0)
            if found is not None:
                self.counted, self.failure = found[0].divisor is not None, None
                return True
        self.failure = self.trial.failure
        return False

    def _candidates(self) -> Iterator[LossRule]:
        labels = targets(self.probe.integers) or [p for p in self.probe.integers[::-1] if p in self.read]
        for path in labels:
            observed = set(self.probe.pools[path].tolist())
            for ignore in self._ignores(observed):
                yield from (LossRule(path, shift, ignore) for shift in (0, 1))
        yield from (LossRule(), LossRule(summed=True))
        for path in (*self.probe.floats, *self.probe.integers):  # masks, and weights
            if path in self.read:
                yield from (LossRule(path, shift, adds=True) for shift in (0, 1))

    def _ignores(self, observed: Collection[int]) -> list[int]:
        """What labels may say that they are none; a GPU does not survive one that is out of range."""
        if self.criterion is None:
            return [IGNORED]
        padding = padding_token(self.model)
        tried = dict.fromkeys([IGNORED, *([] if padding is None else [padding]), -1, 0])
        on_cpu = next(iter(self.batch.tensors.values())).device.type == "cpu"
        return [ignore for ignore in tried if on_cpu or ignore >= 0 or ignore in observed]

    def _holds(self, rule: LossRule) -> bool:
        """Whether it does in every trial that tells anything, and some do."""
        telling = 0
        for number in range(2 * self.probe.draws):
            found = self._measure(rule, number)
            if found is None and number and not telling:
                return False  # it does not take such labels
            if found is None:
                continue
            whole, parts = found
            batch, at = self._drawn(rule, number), SPLITS[number % len(SPLITS)]
            microbatches = [batch.take(torch.arange(at)), batch.take(torch.arange(at, batch.rows))]
            if not rule.gives(whole, parts, microbatches):
                return False
            telling += _tells(whole, parts)
            if telling >= self.probe.draws:
                break
        return telling >= TELLING

    def _measure(self, rule: LossRule, number: int) -> tuple[Measured, list[Measured]] | None:
        found = self.trial.measure(self._drawn(rule, number), SPLITS[number % len(SPLITS)], number, self.kind)
        is_finite = found is not None and all(math.isfinite(one.value) for one in (found[0], *found[1]))
        return found if is_finite else None

    def _drawn(self, rule: LossRule, number: int) -> Batch:
        batch = self.probe.draw(self.level, number, self.valid)
        labelled = rule.path is not None and not rule.adds
        return self.probe.with_invalid(batch, str(rule.path), rule.ignore, number) if labelled else batch

    def _counts(self) -> bool:
        """Whether what the criterion divides by does not depend on unit results."""
        batch = self.probe.draw(self.level, 0)
        found = [self.trial.measure(batch, SPLITS[0], seed, self.kind) for seed in range(TELLING)]
        return len({None if measured is None else measured[0].divisor for measured in found}) == 1


def read_by_loss(flow: Dataflow) -> frozenset[str]:
    """The leaves of the batch that the loss is made of, in glue or inside of a unit that makes it."""
    if flow.loss is None:
        return frozenset()
    makers = (flow.calls[value.call].reads for value in flow.loss.values if not flow.spec(value).shape)
    return flow.loss.inputs.union(*(reads.inputs for reads in makers))


def _ignores_some(batch: Batch, paths: Collection[str]) -> bool:
    """Whether some label is none, so that another batch may have more of them."""
    leaves = (batch.tensors[path] for path in targets(sorted(paths)) if path in batch.tensors)
    return any(bool((leaf < 0).any()) for leaf in leaves if not leaf.is_floating_point())


def _same(whole: Measured, made: float, terms: Sequence[float]) -> bool:
    tolerance = CLOSE.get(whole.dtype, 2 * torch.finfo(whole.dtype).eps)
    return abs(made - whole.value) <= tolerance * max(abs(whole.value), *map(abs, terms))


def _tells(whole: Measured, parts: Sequence[Measured]) -> bool:
    """Whether losses can tell one rule from another: zeros, and equal ones, fit too many."""
    values = [part.value for part in parts]
    scale = max(map(abs, values))
    return min(abs(whole.value), scale) > 1e-6 and abs(values[0] - values[1]) > FAR * scale
