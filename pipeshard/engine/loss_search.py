"""Loss search: finds the rule that a model's loss follows, and proves it by trials.

The model's own loss code runs on a few samples and on parts of them, with random values. A rule is accepted only if it
holds in every trial with finite losses. A loss that follows no rule is rejected.
"""

import itertools
import logging
import math
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion
from pipeshard.engine.loss import SUM, LossRule, ProvenRule, read_by_loss, tolerance_of
from pipeshard.engine.loss_sizes import Sizes, power
from pipeshard.engine.loss_trial import (
    LENGTH,
    NORMAL,
    NOTHING,
    PROBABILITIES,
    ROWS,
    SHORT,
    UNLABELLED,
    FewSamples,
    Losses,
    LossTrial,
    without_valid,
)
from pipeshard.engine.loss_values import SPAN, ranges_of
from pipeshard.errors import ConfigurationError, TraceError
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.shapes import TensorSpec
from pipeshard.hf import IGNORED, MASK, has_known_loss, padding_token, targets

logger = logging.getLogger("pipeshard")
CUTS = 1, 2, 3  # numbers of samples in the first of two parts
HALVES = (2,)  # the same for a model that rejects a single sample (batch norm in training)
TELLING = 3  # number of telling trials (trials that could distinguish rules) in which a rule must hold
FITS = 1.0, 4.0, 16.0  # how far unit results are moved to reduce only the first part's loss
MISFIT = -64.0  # the same, to increase the loss
LEAST_DIFFERENCE = 1e-3  # required difference between the two parts' losses, relative to the larger loss
AT_SIZES = 2  # number of telling trials at the batch's own sizes in which a rule must hold
LOOSER = 5.0  # factor on the tolerated relative error of a sum over many samples
MOST_DRAWN = 2**26  # most random elements in one trial at the batch's own or larger sizes
AUXILIARY = (
    ". If an auxiliary loss of router logits is added to a loss that is divided by num_items_in_batch (in a Trainer), "
    "omit num_microbatches, microbatch_size and microbatch_tokens, so that each batch is one microbatch, or turn off "
    "the auxiliary loss (SFTConfig(router_aux_loss_coef=0.0), or model.config.output_router_logits = False)"
)
LOSS_REMEDY = (
    "average the microbatch losses (PipelinePlugin(loss_reduction='microbatch'), which may give a different loss), "
    "return (sum, count) from the criterion (the batch's loss is then the sum of all sums divided by the sum of all "
    "counts), or use one microbatch. A Trainer refuses the first two: omit num_microbatches, microbatch_size and "
    "microbatch_tokens, so that each batch is one microbatch. If the loss is a sum of several means, you can also "
    "return sums divided by the counts of the whole batch: pass these counts as 0-d tensors in the batch, such as "
    "batch['criterion.tokens'] = torch.tensor(n). If layers process several views of each sample together, keep the "
    "views in the order of the samples: use torch.stack([a, b], 1).flatten(0, 1) and .unflatten(0, (-1, 2)).unbind(1) "
    "instead of torch.cat([a, b]) and .chunk(2)"
)


def prove_loss_rule(
    model: nn.Module,
    flow: Dataflow,
    batch: Batch,
    criterion: Criterion | None,
    sizes: Sizes,
    known: LossRule | None = None,
) -> ProvenRule:
    """Find the rule that computes the loss of a batch like `batch` from the losses of its parts.

    Runs the glue on a few samples and on parts of them, split at different positions, with random unit results and new
    random labels, weights and masks. The rule that was found (or the rule `known` for other sizes) must then also hold
    at `sizes`. This test is skipped for transformers' own losses, which do not depend on sizes. Logs a warning if the
    test was inconclusive. Also logs a warning if the rule does not cover an auxiliary part of the loss that is computed
    from side outputs of units (router logits) or from a second kind of labels.

    Raises ConfigurationError if no rule can be proven, if the criterion returns different losses for the same input, or
    if the criterion's count has a lower bound. Raises TraceError if glue takes a different path than in its trace.
    """
    asked = None if criterion is None and has_known_loss(model) else sizes
    search = _Search(model, flow, batch, criterion, asked)
    if known is not None:
        for side_outputs in (False, True) if search.has_side_outputs else (False,):
            if search.rule(side_outputs, known=known) is not None:
                search.warn_of_untried()
                return ProvenRule(known, search.until)
        search.is_of_few = False  # the known rule held on a few samples of another batch
    rule, is_approximate = search.rule(), search.has_side_outputs
    if rule is None and search.has_side_outputs:
        rule, is_approximate = search.rule(side_outputs=True), False
    if rule is None and search.is_sum_of_means():
        rule, is_approximate = LossRule(), True
    if rule is None and search.is_of_shorter():
        rule, is_approximate = search.rule(shortens=False), search.has_side_outputs
    if rule is None and search.strayed is not None:
        raise search.strayed
    if rule is None:
        why = (
            "could not be verified, in trials with random values, to be a mean or sum over samples or valid labels "
            "(does it weight classes, compare samples with each other, or use its own normalizer?)"
        )
        if flow.counts_results:
            why = (
                "is a pair (sum, count), but its count depends on the model's output (is the second value an accuracy "
                "or another metric? Then return only the loss, and compute metrics with return_outputs=fn)"
            )
        elif search.failure is not None:
            why = f"failed on a few samples with {type(search.failure).__name__}: {search.failure}"
        elif search.is_of_few:
            why = (
                f"on {sizes.rows} samples{_of_lengths(sizes)} is not the same mean or "
                "sum as on fewer and shorter samples (does it split the positions, or depend on the number of samples?)"
            )
        what = f"the loss of {type(model).__name__} {why}"
        raise ConfigurationError(
            f"{what}. pipeshard therefore cannot compute the exact loss of a batch from the microbatch losses: "
            f"{LOSS_REMEDY}" + AUXILIARY * search.has_side_outputs
        ) from search.failure
    if is_approximate:
        logger.warning(
            "an auxiliary part of the loss of %s (from router logits, or a second kind of labels?) is not a sum over "
            "samples. This part is computed for each microbatch, as in gradient accumulation, and weighted like the "
            "rest of the loss",
            type(model).__name__,
        )
    search.warn_of_untried()
    return ProvenRule(rule, search.until)


class _Search:
    """Tries the rules that a loss may follow."""

    def __init__(
        self, model: nn.Module, flow: Dataflow, batch: Batch, criterion: Criterion | None, sizes: Sizes | None
    ) -> None:
        self.model, self.flow, self.batch, self.criterion = model, flow, batch, criterion
        self.read = read_by_loss(flow)
        self.sizes = sizes  # the rule must hold at these sizes; None for one of transformers' own losses
        self.until = sizes  # sizes up to which the found rule holds
        self.is_of_few = False  # whether a rule held on a few samples, but not at the batch's sizes
        self.is_untried = False  # whether the found rule could not be tried at the batch's sizes
        self.failure: Exception | None = None  # the error that prevented all trials
        self.strayed: TraceError | None = None  # `failure`, if glue took a different path than in its trace
        self.has_side_outputs = flow.has_side_loss

    def rule(
        self, side_outputs: bool = False, valid: bool = False, known: LossRule | None = None, shortens: bool = True
    ) -> LossRule | None:
        """Find the rule, or return None. With `side_outputs`, side outputs of units are also random instead of zeros.
        With `valid`, all labels are valid, and only the rule that counts samples is tried. If you pass the rule
        `known`, only this rule is tried, and only at the batch's sizes. With `shortens=False`, samples keep all
        positions of the batch's samples."""
        self.valid, self.side_outputs = valid, side_outputs
        self._sized: dict[tuple[int, int], tuple[Batch, LossTrial]] = {}
        sources = (self.flow.axes.shortened(self.batch, LENGTH), self.batch)[not shortens :]
        for self.cuts in (CUTS, HALVES):
            if any(map(self._can_try, sources)):
                break
        else:
            return None
        if self.criterion is not None and not self.trial.is_steady(self.samples.draw(self.level, 0)):
            raise ConfigurationError(
                "the criterion returned a different loss for the same input when it was called again (does it count "
                "its calls, or keep statistics?). A pipeline calls the criterion once per microbatch. Change the "
                "criterion's state only between steps, pass PipelinePlugin(loss_reduction='microbatch') (not in a "
                "Trainer), or use one microbatch"
            )
        if self.level == NOTHING and self.batch.rows == 1:
            return None  # all samples of a trial are equal
        if known is not None:
            return known if known.counted == self.counted and self._holds_at_sizes(known) else None
        if self.counted:
            rule = LossRule(counted=True)
            if not (self._counts_alike() and self._is_proven(rule)):
                return None
            self._refuse_least_count()
            return rule
        return next(filter(self._is_proven, [LossRule()] if valid else self._candidates()), None)

    def is_sum_of_means(self) -> bool:
        """Whether the loss is one of transformers' own, all labels in the batch are valid, and, in trials whose labels
        are all valid, the loss is a mean over samples. A sum of such means over several kinds of labels also counts."""
        labels = [self.batch.tensors[path] for path in targets(self.batch.tensors) if path in self.read]
        ignored = any(bool((leaf < 0).any()) for leaf in labels if not leaf.is_floating_point())
        return self.sizes is None and not ignored and self.rule(valid=True) is not None

    def is_of_shorter(self) -> bool:
        """Whether the latest trials had shortened samples, although MOST_DRAWN also allows samples with all positions.
        Labels that are positions (the ends of an answer) may be out of range in a shortened sample."""
        is_shorter = self.flow.axes.shortened(self.batch, LENGTH) is not self.batch
        return is_shorter and self.failure is None and self._needs(self.batch, ROWS) <= MOST_DRAWN

    def _can_try(self, source: Batch) -> bool:
        """Whether samples of `source` give a finite loss. Also sets `samples`, `trial` and `level` (how much of the
        batch is random)."""
        kinds = {leaf.dtype for call in self.flow.calls for leaf in call.leaves if isinstance(leaf, TensorSpec)}
        ways = (False,) if kinds.isdisjoint(SHORT) else (True, False)
        return any(self._can_try_in(precise, source) for precise in ways)

    def _trial(self, source: Batch, precise: bool, count: int = ROWS) -> LossTrial:
        reads = self.read, self.flow.consulted
        samples = FewSamples(self.model, self.batch, source, *reads, count=count, is_known=self.sizes is None)
        return LossTrial(self.model, self.flow, samples, self.criterion, self.side_outputs, precise)

    def _can_try_in(self, precise: bool, source: Batch) -> bool:
        """As `_can_try`, but in fp32 if `precise`, and otherwise in the dtypes of the trace. Some glue accepts only
        16-bit dtypes, or itself rounds to 16 bits."""
        try:
            self.trial = self._trial(source, precise)
        except (TraceError, ConfigurationError) as error:
            logger.debug("a trial of the loss failed: %s", error)
            self.failure = error
            return False
        self.samples = self.trial.samples
        for self.trial.kind, self.level in itertools.product((NORMAL, PROBABILITIES), range(NOTHING + 1)):
            if (losses := self._losses(LossRule(), 0)) is not None and losses.is_finite:
                if precise and self.trial.rounds(self._drawn(LossRule(), 0)):
                    return False
                self.counted, self.failure = losses.whole.denominator is not None, None
                return True
        self.failure = failure = self.trial.failure
        if isinstance(failure, TraceError) and isinstance(failure.__cause__, Exception):
            self.failure = failure.__cause__  # raised by the model or the criterion in a trace of fewer samples
        self.strayed = self.failure if isinstance(self.failure, TraceError) else None
        return False

    def _candidates(self) -> Iterator[LossRule]:
        integers, floats = self.samples.integers, self.samples.floats
        labels = self._labels()
        for path in labels:
            masks = (True, False) if self._reads_mask_of(path) else (False,)  # masked first: a mask without 0 fits both
            for ignore, masked in itertools.product(self._ignored(path), masks):
                yield from (LossRule(path, shift, ignore, masked) for shift in (0, 1))
        yield from (LossRule(), SUM)
        for path in (*floats, *integers):  # masks, and weights
            if path in self.read:
                yield from (LossRule(path, shift, adds=True) for shift in (0, 1))
        if self.sizes is None:
            return
        for path in floats:  # positions that are omitted because a mask is 0 or a target is missing
            if path in self.read:
                ignored = dict.fromkeys([0, *self.samples.marks(path)])
                yield from (LossRule(path, shift, ignore) for ignore in ignored for shift in (0, 1))
        for path in integers:  # positions that are omitted because of their input token, or labels under another name
            if path in self.read and path not in labels:
                ignored = dict.fromkeys([padding_token(self.model) or 0, 0, *self._ignored(path)])
                yield from (LossRule(path, shift, ignore) for ignore in ignored for shift in (0, 1))
        for path in labels:  # any other class
            classes = sorted({*self.samples.pools[path].tolist()} - {*self._ignored(path)})
            if classes and classes[-1] < SPAN:
                yield from (LossRule(path, shift, ignore) for ignore in classes for shift in (0, 1))

    def _labels(self) -> list[str]:
        """The paths of the labels that the loss reads. If no leaf has a label's name, returns all integer leaves that
        the loss reads, in reverse order."""
        read = [path for path in self.samples.integers if path in self.read]
        return targets(read) or read[::-1]

    def _reads_mask_of(self, path: str) -> bool:
        """Whether the loss reads an attention mask with an entry for each label."""
        mask, labels = self.batch.tensors.get(MASK), self.batch.tensors[path]
        return path != MASK and MASK in self.read and mask is not None and mask.shape == labels.shape

    def _ignored(self, path: str) -> list[int]:
        """The labels that may mean "no label". GPU kernels abort if a label is out of range. So on a GPU, a negative
        label is tried only if the batch contains it, unless the loss is one of transformers' own."""
        observed = set(self.samples.pools[path].tolist())
        if self.sizes is None:
            return [IGNORED, *(mark for mark in (-1, UNLABELLED) if mark in observed)]
        padding = padding_token(self.model)
        largest = int(self.samples.pools[path].max())
        fillers = [*self.samples.fillers[path], *([largest] if largest >= SPAN else [])]
        tried = dict.fromkeys([IGNORED, *([] if padding is None else [padding]), -1, 0, *fillers])
        if UNLABELLED in observed:
            tried[UNLABELLED] = None
        on_cpu, dtype = self.batch.device.type == "cpu", self.batch.tensors[path].dtype
        marks = [mark for mark in tried if int(torch.tensor(mark).to(dtype)) == mark]  # marks that the dtype can hold
        return [ignore for ignore in marks if on_cpu or ignore >= 0 or ignore in observed]

    def _is_proven(self, rule: LossRule) -> bool:
        """Whether a rule holds in every trial (of losses, of gradients, and at the batch's sizes), and whether enough
        of the trials could have distinguished this rule from other rules."""
        draws = self.samples.draws
        telling = _telling(rule, (self._losses(rule, number) for number in range(2 * draws)), draws)
        if telling is None or telling < TELLING:
            return False
        fits = FITS if self.sizes is None else (*FITS, MISFIT)
        if self.trial.kind == NORMAL and not all(self._holds(rule, 0, fit) for fit in fits):
            return False
        return self._slopes_hold(rule) and self._holds_without_valid(rule) and self._holds_at_sizes(rule)

    def _holds_without_valid(self, rule: LossRule) -> bool:
        """Whether a rule also holds if the second part, or only the last sample, has no valid entry. A rule that counts
        entries gives such samples no weight, but a focal loss divided by the number of objects also sums over the
        background. A rule that counts samples gives such samples full weight, but a loss may omit them. Such a rule is
        therefore tried with each mark in the ranges of the batch's values: later batches in these ranges are not
        tried."""
        if self.sizes is None or rule.counted:
            return True
        if rule.path is not None:
            marks = [(rule.path, 0 if rule.adds else rule.ignore)]
        else:
            ranges = ranges_of(self.batch, self.read, is_known=False)
            marks = [(path, mark) for path, mark in self._marks() if path in ranges and ranges[path].contains(mark)]
        batch = self._drawn(rule, 0)
        starts = self.cuts[0], batch.rows - 1
        trials = (self._without_valid(batch, *each, start) for each, start in itertools.product(marks, starts))
        return all(each is None or not math.isfinite(each.whole.value) or rule.holds(each) for each in trials)

    def _marks(self) -> list[tuple[str, float]]:
        """Pairs (path, value): the path of a leaf that the loss reads, and a value that may mark a missing entry, or
        0."""
        samples = self.samples
        labels = [(path, mark) for path in samples.integers if path in self.read for mark in (*self._ignored(path), 0)]
        others = [(path, mark) for path in samples.floats if path in self.read for mark in (0, *samples.marks(path))]
        return [*dict.fromkeys([*labels, *others])]

    def _refuse_least_count(self) -> None:
        """Raise ConfigurationError if the parts' counts do not sum to the count of the whole when the second part has
        no labels, or a mask of zeros: the criterion's count then has a lower bound."""
        for path, mark in self._marks() if self.sizes is not None else ():
            losses = self._without_valid(self.samples.draw(self.level, 0), path, mark, self.cuts[0])
            if losses is not None and losses.whole.denominator and not losses.counts_add_up:
                count = losses.parts[-1].denominator
                raise ConfigurationError(
                    "the criterion returns a pair (sum, count), but for samples without valid labels the count is "
                    f"{count:g}, not 0. pipeshard divides the total of the sums by the total of the counts, so such "
                    "samples would change the loss: remove the lower bound of the count, such as clamp(min=1)"
                )

    def _without_valid(self, batch: Batch, path: str, ignore: float, start: int) -> Losses | None:
        """The losses of `batch` and of its two parts, with no valid entry in `path` in the samples from `start` on."""
        return self.trial.measure(without_valid(batch, path, ignore, start), self.cuts[0], 0)

    def _slopes_hold(self, rule: LossRule) -> bool:
        """Whether the rule also holds for gradients. A rule that holds for losses may not hold for gradients: a loss
        divided by its own detached value is always 1, but its gradient is divided by a mean over the whole batch."""
        return self.sizes is None or all(self._holds(rule, k, sloping=True) for k in range(len(self.cuts)))

    def _holds_at_sizes(self, rule: LossRule) -> bool:
        """Whether a rule that holds on a few samples also holds at the batch's sizes. First tries the sizes rounded up
        to powers of two, the upper ends of their ranges (see engine/loss_sizes.py). If the rule is not shown to hold
        there, tries the sizes themselves or, if samples of these sizes are too large, fewer and shorter samples. Sets
        `is_untried` if no trial at the batch's sizes was conclusive. Inconclusive trials do not reject a rule."""
        if self.sizes is None:
            return True
        source, larger = self._larger(), self.sizes.larger
        self.until, self.is_untried = self.sizes, False
        if self._needs(source, larger.rows) <= MOST_DRAWN and self._holds_in(rule, source, larger, MOST_DRAWN):
            self.until = larger.of_batch(source)
            return True
        holds = self._holds_in(rule, self.batch, self.sizes, MOST_DRAWN)
        self.is_untried = holds is None or self._needs(self.batch, self.sizes.rows) > MOST_DRAWN
        self.is_of_few |= holds is False
        return holds is not False

    def warn_of_untried(self) -> None:
        """Warn if the rule was not tried at the batch's sizes."""
        if self.is_untried and self.sizes is not None:
            logger.warning(
                "the loss of %s could not be tested on %d samples%s, because the samples have too many values, or the "
                "results were inconclusive. Fewer or shorter samples were tested instead. Training is exact unless "
                "this loss depends on the number or length of the samples (as a mean of chunk means does). To rule "
                "this out, return (sum, count) from the criterion",
                type(self.model).__name__,
                self.sizes.rows,
                _of_lengths(self.sizes),
            )

    def _larger(self) -> Batch:
        """The batch, with each length rounded up to a power of two, the upper end of its range (see
        engine/loss_sizes.py)."""
        batch, axes = self.batch, self.flow.axes
        for group in range(1, len(axes.sizes)):
            deltas = axes.deltas(batch)
            if deltas is not None:
                size = axes.sizes[group] + deltas[group]
                batch = axes.resized(batch, group, power(size) - size)
        return batch

    def _holds_in(self, rule: LossRule, source: Batch, sizes: Sizes, most: int) -> bool | None:
        """Whether a rule holds for `sizes.rows` samples with the lengths of `source`. If these samples need more than
        `most` random elements, fewer and shorter samples are tried instead. Returns None if a trial failed or was
        inconclusive."""
        held: list[bool | None] = []
        for longest, rows in self._plans(source, sizes.rows, most):
            held.append(self._holds_on(rule, longest, rows, min(sizes.part, rows - 1)))
            if held[-1] is False:
                return False
        return True if held and all(held) else None

    def _plans(self, source: Batch, rows: int, most: int) -> list[tuple[Batch, int]]:
        """The trials to run, as pairs (batch from which to take samples, number of samples)."""
        if self._needs(source, rows) <= most:
            return [(source, rows)]
        axes = self.flow.axes
        short = axes.shortened(source, LENGTH)
        longest = max(_longest(source), LENGTH)
        while self._needs(source, 2) > most and longest > LENGTH:
            longest //= 2
            source = axes.shortened(source, longest)
        plans = [(each, min(rows, int(most / self._needs(each, 1)))) for each in (source, short)]
        return [(each, count) for each, count in plans if count > 1]

    def _needs(self, source: Batch, rows: int) -> float:
        """The approximate number of random elements for `rows` samples like those of `source`."""
        few = self.samples.few
        pairs = ((leaf.numel(), few.tensors[path].numel()) for path, leaf in source.tensors.items() if leaf.numel())
        longer = max((count / max(1, of_few) for count, of_few in pairs), default=1.0) * few.rows / source.rows
        return max(1.0, self.trial.elements * longer) * rows / few.rows

    def _holds_on(self, rule: LossRule, source: Batch, rows: int, part: int) -> bool | None:
        """Whether a rule holds on `rows` samples like those of `source`, split after the first `part` samples, or
        before the last `part` samples. Returns None if no trial was conclusive."""
        key = id(source), rows
        try:
            if key not in self._sized:
                self._sized[key] = source, self._trial(source, self.trial.precise, rows)
        except Exception as error:  # raised by the model, which may reject longer samples
            logger.debug("the loss could not be tried on %d samples: %s", rows, error)
            return None
        _, trial = self._sized[key]
        trial.kind = self.trial.kind
        cuts = enumerate((part, rows - part) * AT_SIZES)
        trials = (trial.measure(self._drawn(rule, number, trial.samples), at, number) for number, at in cuts)
        telling = _telling(rule, trials, AT_SIZES, LOOSER, gives_up=False)
        return None if telling == 0 else telling is not None

    def _holds(self, rule: LossRule, number: int, fit: float = 0.0, sloping: bool = False) -> bool:
        """Whether a rule holds in one trial. Returns True if the trial has no finite losses."""
        losses = self._losses(rule, number, fit, sloping)
        return losses is None or not losses.is_finite or rule.holds(losses)

    def _losses(self, rule: LossRule, number: int, fit: float = 0.0, sloping: bool = False) -> Losses | None:
        at = self.cuts[number % len(self.cuts)]
        return self.trial.measure(self._drawn(rule, number), at, number, fit, sloping)

    def _drawn(self, rule: LossRule, number: int, samples: FewSamples | None = None) -> Batch:
        samples = samples or self.samples
        batch = samples.draw(self.level, number, self.valid)
        has_labels = rule.path is not None and not rule.adds
        return samples.with_invalid(batch, str(rule.path), rule.ignore, number) if has_labels else batch

    def _counts_alike(self) -> bool:
        """Whether the criterion returns the same count for different unit results."""
        batch = self.samples.draw(self.level, 0)
        losses = [self.trial.measure(batch, self.cuts[0], seed) for seed in range(TELLING)]
        return len({None if loss is None else loss.whole.denominator for loss in losses}) == 1


def _of_lengths(sizes: Sizes) -> str:
    return f" with axes of lengths {sorted(set(sizes.lengths))}" if sizes.lengths else ""


def _longest(batch: Batch) -> int:
    return max((size for leaf in batch.tensors.values() for size in leaf.shape), default=1)


def _telling(
    rule: LossRule, trials: Iterable[Losses | None], enough: int, looser: float = 1.0, gives_up: bool = True
) -> int | None:
    """Count up to `enough` trials that could have distinguished this rule from other rules. Returns None as soon as the
    rule does not hold in a trial. With `gives_up`, returns 0 if the second or a later trial has no finite losses and no
    trial has counted so far: the loss rejects such labels."""
    telling = 0
    for number, losses in enumerate(trials):
        if losses is not None and losses.is_finite:
            if not rule.holds(losses, looser):
                return None
            telling += _tells(losses)
        elif gives_up and number and not telling:
            return 0
        if telling >= enough:
            break
    return telling


def _tells(losses: Losses) -> bool:
    """Whether these losses can distinguish one rule from another. Zeros and equal losses fit too many rules."""
    one, other = (part.value for part in losses.parts)
    scale = max(abs(one), abs(other))
    far = max(LEAST_DIFFERENCE, 4 * tolerance_of(losses.whole.dtype))
    return min(abs(losses.whole.value), scale) > 1e-6 and abs(one - other) > far * scale
