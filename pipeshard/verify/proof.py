"""Proof: a few steps of all stages in this process, compared with the unsplit model on the same samples."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, sum_and_count
from pipeshard.batch.read import RowDims
from pipeshard.config import PipelineConfig
from pipeshard.distributed.local import in_thread
from pipeshard.engine.dependent import dependent_text, failing, is_of_model
from pipeshard.errors import BatchError, PipeshardError, TraceError, summary
from pipeshard.ghost import inside_pipeshard
from pipeshard.verify.compare import (
    Comparison,
    compare_parameters,
    compare_state,
    differing,
    first_unit,
    gradients,
    output_tensors,
)
from pipeshard.verify.local import Different, LocalPipeline, Unproven, stepped
from pipeshard.verify.reference import Copies, NoLoss, Reference, Weights, generators, undisturbed
from pipeshard.verify.smaller import smaller
from pipeshard.verify.untouched import untouched
from pipeshard.verify.whole import Coupled, WholeBatch, WholeFound, copied_microbatches, is_batch_norm

logger = logging.getLogger("pipeshard")
EXACT, PARTLY, DIFFERENT, UNPROVEN = "exact", "compared in part", "different", "unproven"
ROWS, PARTS = 5, 2  # samples of a step, and the microbatches that they are cut into: they differ in size
STEPS_OF_PROOF = 9  # of the unsplit model, which a proof takes after the first one
STEPS_MORE = 5  # of the unsplit model, which what stands for a proof that takes too long may take
SEED = 20261123
BEGINS = {
    "forward": "All units return the same: it begins in what the model or the criterion does between or after them",
    "backward": "All units return the same: it begins in the backward pass",
}


@dataclass(frozen=True)
class Proof:
    """ "exact", "compared in part", "different" or "unproven", the last two with the reason; the number of comparisons
    of each kind, `but` what was not compared, and the time.

    `refused` is whether the reason is an error that training raises, too; `coupled` whether samples depend on each
    other, so that microbatches do not give the batch. `moving` is state that changes with each microbatch, as in
    gradient accumulation. `dependent`: a microbatch does not run by itself, for the given reason and `cause`.
    `smaller` is what is smaller in the copy that was proven instead of a large model, `padding` how slices of samples
    with padding differ.
    """

    kind: str
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    but: tuple[str, ...] = ()
    seconds: float = 0.0
    refused: bool = False
    coupled: bool = False
    moving: tuple[str, ...] = ()
    dependent: bool = False
    cause: Exception | None = None
    smaller: str = ""
    padding: str = ""


@dataclass(frozen=True)
class Large:
    """Why a model is not split in its own size. The parameters of a smaller copy take at most `most` bytes of fp32;
    `fits` is whether a few samples may run through the model itself."""

    reason: str
    most: float
    fits: bool


class Dependent(Exception):
    """A microbatch does not run by itself, although the whole batch does; its cause is the model's error."""


class Fails(Unproven):
    """The unsplit model does not run on these samples."""


class TooMuch(Unproven):
    """The proof takes more time or memory than it may."""


@inside_pipeshard()
def prove(
    config: PipelineConfig,
    device: torch.device,
    model: nn.Module,
    optimizer: Optimizer | None,
    criterion: Criterion | None,
    sample: Batch,
    seconds: float | None = None,
    note: Callable[[], None] = lambda: None,
    large: Large | None = None,
    steps: int = 2,
) -> Proof:
    """Train some `steps` of a model before it is boosted, split and unsplit, on different samples; the user's objects
    do not change.

    It compares loss, gradients (including None), outputs, buffers, state that forwards leave on modules, parameters
    after the optimizer's step, the saved state, and the unsplit model on the whole batch with itself on the
    microbatches. `note` is called regularly. Instead of a `large` model, or one that takes longer than `seconds`, a
    smaller copy is split. If there is none, or it takes too long as well, only the outputs of a few samples are
    compared with those of the same samples in microbatches. Each of the two may take `seconds`, or STEPS_MORE steps if
    these take longer. Once something differs, the time is not limited.
    """
    proving = _Proving(config, Copies(model, criterion, optimizer, sample), device, seconds, note, steps)
    kind, reason, refused, coupled = EXACT, "", False, False
    cause: BaseException | None = None
    with undisturbed(device):
        try:
            with untouched(proving.given):
                proving.run(large)
        except Coupled as difference:
            kind, reason, coupled = DIFFERENT, str(difference), True
        except Different as difference:
            kind, reason = DIFFERENT, str(difference)
        except Dependent as error:
            kind, reason, cause = UNPROVEN, str(error), error.__cause__
        except Unproven as error:
            kind, reason = UNPROVEN, str(error)
        except PipeshardError as error:  # booster.boost, or the first step, says the same
            kind, reason, refused = UNPROVEN, summary(error), True
        except Exception as error:  # whatever the user's code raises, or copying it
            logger.debug("the proof failed", exc_info=True)
            kind, reason = UNPROVEN, summary(error)
    but, moving = tuple(proving.but), tuple(proving.moving)
    if kind == EXACT and but:
        kind = PARTLY
    made = Proof(kind, reason, proving.counts, but, proving.elapsed, refused, coupled, moving, smaller=proving.smaller)
    return replace(made, dependent=True, cause=cause) if isinstance(cause, Exception) else made


@dataclass(frozen=True)
class StepCut:
    """How a step was cut: the weights of its microbatches' losses, whether a part of the loss comes from side outputs
    of units, and the units."""

    step: int
    weights: Weights
    has_auxiliary: bool
    units: tuple[str, ...]


def _has_auxiliary(split: LocalPipeline) -> bool:
    flow = split.flow
    return flow.loss is not None and bool(flow.loss.hidden or any(map(flow.is_aside, flow.loss.values)))


class _Proving:
    """The state of a proof."""

    def __init__(
        self,
        config: PipelineConfig,
        given: Copies,
        device: torch.device,
        seconds: float | None,
        note: Callable[[], None],
        steps: int,
    ) -> None:
        self.start, self.steps = time.perf_counter(), steps
        self.config, self.given, self.device, self.seconds, self.note = config, given, device, seconds, note
        self.until = seconds
        self.step = 0.0  # seconds that a step of the unsplit model takes
        self.counts: dict[str, int] = {}
        self.but: dict[str, None] = {}
        self.moving: dict[str, None] = {}
        self.cut: list[StepCut] = []
        self.draws, self.fickle, self.is_whole = False, frozenset[str](), False
        self.smaller = ""
        self.count, self.m = ROWS, 1 if config.num_microbatches == 1 else PARTS
        self.replicas = self._replicas()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def tick(self) -> None:
        self._refuse_long()
        self.note()

    def _refuse_long(self, more: float = 0.0) -> None:
        """Raise TooMuch if this many more seconds exceed the limit."""
        if self.until is not None and self.elapsed + more > self.until:
            raise TooMuch(f"it takes longer than {self.seconds:g} s")

    def _allow_more(self) -> None:
        """Give the next part its own time, longer for a model with long steps."""
        if self.seconds is not None:
            self.until = self.elapsed + max(self.seconds, STEPS_MORE * self.step)

    def _see_through(self) -> None:
        """Remove the time limit: something differs, and the proof must find out whether by rounding."""
        self.until = None

    def run(self, large: Large | None) -> None:
        """Prove the split, then that microbatches give the batch, as far as time allows."""
        if large is not None:
            why_none = self._take_smaller(large.most)
            large = replace(large, reason=f"{large.reason}; {why_none}") if why_none else None
        if large is not None and not large.fits:
            raise Unproven(large.reason)
        self.given = self._drawn(self.given)
        try:
            if large is not None:
                raise TooMuch(large.reason)
            self._compare_few_or_all()
        except TooMuch:
            self.step = self.step or self.elapsed
            if large is None and not self.smaller and self._prove_smaller():
                return
            self._compare_outputs()
            raise

    def _prove_smaller(self) -> bool:
        """Prove a smaller copy instead of a model that takes too long; returns whether there is a fast enough one."""
        whole, step = self.given, self.step
        self._allow_more()
        self.counts, self.is_whole = {}, False
        self.but.clear()
        self.moving.clear()
        try:
            if not self._take_smaller(math.inf):
                self._refuse_long(STEPS_OF_PROOF * self.step)
                self._compare_few_or_all()
                return True
        except TooMuch:
            logger.debug("a smaller copy takes too long, too: %s", self.smaller)
        self.given, self.smaller, self.step = whole, "", step
        return False

    def _drawn(self, own: Copies) -> Copies:
        """The same, with initialized values for meta tensors."""
        if not any(parameter.is_meta for parameter in own.model.parameters()):
            return own
        return own.drawn(self.device, self.config.init_weights, torch.initial_seed() % 2**63)

    def _take_smaller(self, most: float) -> str:
        """Use the first smaller copy that runs instead of the model; returns why there is none, or ""."""
        given, why = self.given, ""
        for make in smaller(given, self.config.num_stages, most, self.device):
            try:
                made = make()
                self.given = self._drawn(made.own)
                self._try()
            except TooMuch:
                raise
            except Exception as error:  # whatever a model raises that is made in another size
                logger.debug("no smaller copy: %s: %s", type(error).__name__, error)
                why = why or str(error)
                self.given = given
            else:
                self.smaller = made.what
                return ""
        return f"no smaller copy stands for it ({why})"

    def _compare_few_or_all(self) -> None:
        """Compare all samples, cut as in training, if a few do not run: the batch may contain indices of its samples,
        such as the edges of a graph."""
        try:
            self._compare_both()
        except Exception as error:  # whatever the user's model raises
            is_verdict = isinstance(error, (Unproven, Different, Coupled, PipeshardError))
            is_verdict = is_verdict and not isinstance(error, (Fails, TraceError, BatchError))
            if is_verdict:
                raise
            self._refuse_dependent()
            if self.count >= self.given.sample.rows:
                raise
            self.count, self.replicas = self.given.sample.rows, 1
            self.m = len(self.given.sample.split(*self.config.cut))
            self._compare_both()

    def _refuse_dependent(self) -> None:
        """Raise Dependent if the unsplit model runs on the batch, but not on one of the microbatches of training."""
        batch = self._sample()
        parts = batch.split(*self.config.cut)

        def run(part: Batch) -> None:
            own = self._copy()
            with torch.no_grad():
                sum_and_count(part.call(own.model), self._criterion(own), part)

        if (found := failing(batch, parts, run)) is not None and is_of_model(found[1]):
            i, error = found
            raise Dependent(dependent_text(batch, parts, i, error)) from error

    def _compare_both(self) -> None:
        self._try()
        self._compare_split()
        self._compare_whole()

    def _compare_split(self) -> None:
        """Compare once more in fp64 if it seems to differ: rounding shrinks with the precision, a mistake does not."""
        try:
            self._compare(None)
        except Different as difference:
            self._see_through()
            try:
                self._compare(torch.float64)
            except Different:
                pass
            except Unproven:
                raise
            except Exception as error:  # of whatever kind: it proves nothing
                logger.debug("the proof in fp64 failed: %s: %s", type(error).__name__, error)
            else:
                return
            raise self._located(difference) from None

    def _replicas(self) -> int:
        """Two if there are several and the samples suffice; batch norm needs two samples in each microbatch. The
        optimizer must only have the model's parameters, and the loss must be that of all replicas' samples."""
        parts, rows = 2 * self.m, self.given.sample.rows
        several = (self.config.dp_size or 1) > 1 and self.config.loss_reduction == "token"
        if not several or self.given.foreign():
            return 1
        if rows >= 2 * parts:
            self.count = 2 * parts + 1
            return 2
        return 2 if rows >= parts and not any(map(is_batch_norm, self.given.model.modules())) else 1

    def rows(self, batch: Batch, step: int) -> Batch:
        """The samples of a step: the first ones, then the last ones, backwards."""
        order = range(batch.rows)
        return batch.take(torch.tensor((order[::-1] if step % 2 else order)[: self.count]))

    def part(self, step: int, batch: Batch, replica: int) -> Batch:
        """The samples of one replica, which has m of the step's microbatches."""
        rows = self.rows(batch, step)
        sizes = [part.rows for part in rows.split(self.m * self.replicas)]
        before = sum(sizes[: replica * self.m])
        return rows.take(torch.arange(before, before + sum(sizes[replica * self.m : (replica + 1) * self.m])))

    def _copy(self, dtype: torch.dtype | None = None) -> Copies:
        self.tick()
        made = self.given.copy(self.device, dtype)
        experts: Any = getattr(made.model, "set_experts_implementation", None)
        if dtype is torch.float64 and experts is not None:
            experts("eager")  # the grouped matrix product has no fp64
        for parameter in made.model.parameters():
            parameter.grad = None
        if self.config.has_slices or self.config.is_ragged:  # dropout draws other numbers for other lengths
            made.model.eval()
        return made

    def _try(self) -> None:
        """Whether the unsplit model runs, how long it takes, and whether it draws random numbers."""
        torch.manual_seed(SEED)
        before, start = generators(self.device), time.perf_counter()
        model, loss = self._unsplit()
        if not torch.isfinite(loss):
            raise Unproven(f"the unsplit model's loss is {float(loss)}")
        self.step = time.perf_counter() - start
        self._refuse_long(4 * self.step)
        self.draws = before != generators(self.device)
        if self.draws:  # by torch.seed() or the clock, another number each time
            self.fickle = differing(model, self._unsplit()[0])

    def _unsplit(self) -> tuple[nn.Module, Tensor]:
        """A copy of the unsplit model after a step, and its loss."""
        own = self._copy()
        reference = Reference(own, self._criterion(own), self.device)
        torch.manual_seed(SEED)
        try:
            loss, _ = reference.step([self.rows(own.sample, 0)], Weights([1.0]), (SEED, 0), self.tick)
        except NoLoss:
            raise Unproven("nothing gives a loss to train on") from None
        except TooMuch:
            raise
        except Exception as error:  # whatever the user's model raises
            raise Fails(f"the unsplit model does not run on its batch: {summary(error)}") from error
        return own.model, loss

    def _criterion(self, own: Copies) -> Criterion | None:
        return self.config.settled(getattr(own.model, "pipeline_hints", None), own.criterion).criterion

    def _sides(self, dtype: torch.dtype | None, replicas: int = 1) -> tuple[LocalPipeline, list[Reference]]:
        """The split model, and an unsplit one for each of its replicas."""
        split = LocalPipeline(self.config, lambda: self._copy(dtype), self.device, self.tick, replicas)
        read, flow = split.ranks[0].own.sample, split.policy.flow
        references = []
        for _ in range(replicas):
            own = self._copy(dtype)
            own.sample = replace(own.sample, row_dims=read.row_dims, owners=read.owners)
            reference = Reference(own, self._criterion(own), self.device)
            if self.draws:
                reference.seed_places(split.policy.units, flow.glue_random, flow.python_random)
            references.append(reference)
        return split, references

    def _compare(self, dtype: torch.dtype | None) -> None:
        comparison = Comparison(fine=dtype is torch.float64)
        self.cut.clear()
        split, references = self._sides(dtype, self.replicas)
        optimizers = self._optimizers(split, references[0])
        for step in range(self.steps):
            at, during = (SEED, step), f"in step {step + 1}"
            asked = step > 0 and not self.config.is_ragged  # outputs of padding are any numbers
            loss, outputs = split.step(partial(self.part, step), self.m, asked, at)
            expected, made = self._unsplit_step(split, references, step)
            comparison.loss(loss, expected, f"the loss {during}")
            comparison.gradients(*gradients(split, references[0]), during)
            for output, of_unsplit in zip(outputs, made, strict=True) if asked else ():
                what = f"of the output {during}"
                comparison.tensors(output_tensors(output), output_tensors(of_unsplit), "outputs", what)
            for replica, reference in enumerate(references):
                compare_state(comparison, split, reference, during, self.fickle, replica)
            self.cut.append(
                StepCut(step, split.weights(*range(self.replicas)), _has_auxiliary(split), tuple(split.policy.units))
            )
            self._step(comparison, split, references, optimizers)
            compare_parameters(comparison, split, references[0], f"after step {step + 1}")
        self.counts = dict(comparison.counts)

    def _unsplit_step(
        self, split: LocalPipeline, references: Sequence[Reference], step: int
    ) -> tuple[Tensor, list[Any]]:
        """The step of each replica on its own copy of the unsplit model: the loss and the outputs of all. The first
        copy gets the sums of the gradients."""
        losses, outputs = [], list[Any]()
        for replica, reference in enumerate(references):
            batches, first = self.part(step, reference.own.sample, replica).split(self.m), replica * self.m
            weights, at = split.weights(replica), (SEED, step)
            loss, made = in_thread(partial(reference.step, batches, weights, at, self.tick, first))
            losses.append(loss)
            outputs += made
        for reference in references[1:]:
            for into, parameter in zip(references[0].model.parameters(), reference.model.parameters(), strict=True):
                if parameter.grad is not None:
                    into.grad = parameter.grad if into.grad is None else into.grad + parameter.grad
                    parameter.grad = None
        return sum(losses[1:], losses[0]), outputs

    def _compare_whole(self) -> None:
        """Compare the unsplit model on all samples of a step with itself on the step's microbatches."""
        if self.m == 1 or not self.config.has_exact_loss:
            return
        sample = self._sample()
        steps = (
            self.cut if sample.rows > self.count else self.cut[:1]
        )  # the second step has other samples, if there are any
        for now in steps:
            batch = self.rows(sample, now.step)
            self._compare_inputs(batch)
            whole = WholeBatch(self._made, self.device, self.draws, self.tick, self._see_through)
            try:
                found = whole.compare(batch, now.weights, now.has_auxiliary, now.units)
            except (Coupled, Unproven):
                raise
            except Exception as error:  # whatever a model raises on other samples
                found = WholeFound(missing=summary(error))
            self._note(found, "the batch")

    def _compare_inputs(self, batch: Batch) -> None:
        comparison = Comparison()
        parts = self.m * self.replicas
        for i, (part, copied) in enumerate(zip(batch.split(parts), copied_microbatches(batch, parts), strict=True)):
            comparison.tensors(part.tensors, copied.tensors, "inputs", f"of microbatch {i}")

    def _compare_outputs(self) -> None:
        """Compare only the outputs, if the whole proof takes too much time or memory."""
        if self.m == 1 or not self.config.has_exact_loss or self.is_whole:
            return
        self.is_whole = True
        self._allow_more()
        whole = WholeBatch(self._made, self.device, False, self.tick, self._see_through)
        try:
            self._note(whole.compare_outputs(self.rows(self._sample(), 0), self.m), "the outputs")
        except Coupled:
            raise
        except Exception as error:  # of whatever kind: it proves nothing
            logger.debug("the outputs were not compared: %s: %s", type(error).__name__, error)

    def _note(self, found: WholeFound, what: str) -> None:
        self.is_whole = self.is_whole or not found.missing
        if found.missing:
            self.but[f"the whole batch with its microbatches ({found.missing})"] = None
        self.moving.update(dict.fromkeys(found.moving))
        for kind, count in ((f"losses of {what}", found.losses), (f"gradients of {what}", found.gradients)):
            if count:
                self.counts[kind] = self.counts.get(kind, 0) + count

    def _sample(self) -> Batch:
        """The sample, cut."""
        return RowDims(self.given.model, self.config.batch_dims).settle(self.given.sample.to(self.device))

    def _made(self, dtype: torch.dtype | None) -> tuple[Copies, Criterion | None]:
        own = self._copy(dtype)
        return own, self._criterion(own)

    def _optimizers(self, split: LocalPipeline, reference: Reference) -> list[Any]:
        """Those of the reference and of the ranks; plain SGD if there is none, or if it is refused."""
        if reference.own.optimizer is not None:
            try:
                split.boost()
                return [reference.own.optimizer, *(rank.optimizer for rank in split.ranks)]
            except Exception as error:  # whatever an optimizer raises when it is narrowed
                self.but[f"the optimizer's step ({summary(error)})"] = None
        trained = [reference.model.parameters(), *(rank.held.values() for rank in split.ranks)]
        own = [[p for p in parameters if p.requires_grad] for parameters in trained]
        return [SGD(parameters or [nn.Parameter(torch.zeros(()))], lr=1e-2) for parameters in own]

    def _step(
        self, comparison: Comparison, split: LocalPipeline, references: Sequence[Reference], optimizers: Sequence[Any]
    ) -> None:
        """Step with identical gradients, which were compared: Adam amplifies small differences."""
        reference = references[0]
        parameters = list(reference.model.parameters())
        gradients = {name: parameter.grad for name, parameter in reference.model.named_parameters()}
        foreign = [parameter.grad for parameter in reference.own.foreign()]
        first, *others = optimizers
        norms = split.optimize(gradients, foreign, others)
        if norms:
            norm = nn.utils.clip_grad_norm_(parameters, self.config.max_norm or 0.0)
            for each in norms:
                comparison.norm(each, float(norm))
        stepped(first)
        for parameter in [*parameters, *reference.own.foreign()]:
            parameter.grad = None
        for other in references[1:]:
            for parameter, trained in zip(other.model.parameters(), parameters, strict=True):
                parameter.data.copy_(trained.data)
        self.tick()

    def _located(self, difference: Different) -> Different:
        """The same error, with the place where the difference begins."""
        if not difference.part:
            return difference
        try:
            split, (reference,) = self._sides(None)
            where = first_unit(split, reference, self.rows, self.m, (SEED, 0), self.tick)
        except Exception as error:  # the difference stands without its place
            logger.debug("the difference was not located: %s: %s", type(error).__name__, error)
            return difference
        return Different(f"{difference}. {where or BEGINS[difference.part]}")
