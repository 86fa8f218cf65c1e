"""Proof: compares a few steps of all stages (run in this process) with the unsplit model's on the same samples."""

import functools
import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, sum_and_count
from pipeshard.batch.read import RowDims
from pipeshard.config import PipelineConfig
from pipeshard.engine.dependent import dependent_text, failing, is_of_model
from pipeshard.engine.mixed_precision import Precision
from pipeshard.engine.optimizer_trial import never_couples
from pipeshard.errors import NO_LOSS, BatchError, PartitionError, PipeshardError, TraceError, summary
from pipeshard.ghost import inside_pipeshard
from pipeshard.graph.indices import checking_indices
from pipeshard.graph.lone import Lone
from pipeshard.hf import use_eager_kernels
from pipeshard.split.policy import Policy
from pipeshard.verify.compare import Comparison, differing_attributes
from pipeshard.verify.limit import STEPS_LEFT, Limit, TooMuch
from pipeshard.verify.local import Different, LocalPipeline, Unproven
from pipeshard.verify.reference import Copies, NoLoss, Reference, Uncopyable, Weights, generators, undisturbed
from pipeshard.verify.samples import Samples
from pipeshard.verify.sides import ONE_PART, SEED, Sides, StepCut, Undivided
from pipeshard.verify.smaller import smaller
from pipeshard.verify.untouched import untouched
from pipeshard.verify.whole import MOVES, Coupled, WholeBatch, WholeFound, copied_microbatches, moves

logger = logging.getLogger("pipeshard")
EXACT, PARTLY, DIFFERENT, UNPROVEN = "exact", "compared in part", "different", "unproven"
STEPS_OF_PROOF = 6  # duration of a proof after its first step if nothing differs, in steps of the unsplit model
COPY_REMEDY = (
    "To check it, keep the object that cannot be copied outside of the model and the criterion, or define __deepcopy__ "
    "in its class"
)
BEGINS = {
    "forward": "All units return the same results: the difference begins in the model's code between or after units, "
    "or in the criterion",
    "backward": "All units return the same results: the difference begins in the backward pass",
    "update": "All earlier losses and gradients are equal up to rounding. Probably, the optimizer's step couples "
    "parameters (through a norm over several parameters, or its own list of parameters), but each rank updates only a "
    "part of the parameters: use another optimizer, or max_norm to clip. Otherwise, a forward or a hook may write to a "
    "trained parameter",
}


@dataclass(frozen=True)
class Proof:
    """The result of a proof: `kind` is "exact", "compared in part", "different" or "unproven" (the last two have a
    `reason`). `counts` contains the number of comparisons of each kind; `but` lists comparisons that were not made.

    `refused`: whether the reason is an error that training may also raise. `coupled`: whether samples depend on each
    other, so that microbatches do not give the result of the batch. `moving`: state that changes with each microbatch,
    as in gradient accumulation. `dependent`: whether a microbatch does not run by itself, because of the error `cause`.
    `smaller`: the reductions of the copy that was proven instead of a large model. `padding`: for padded samples with
    an attention_mask and without one, how slices differ from whole samples or fail, or "". `remedy`: advice for an
    unproven model, or "". `one_sided`: whether the split model raised an error on samples on which the unsplit model
    runs. `in_update`: whether the models differ only after the step of a user's own optimizer.
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
    cause: BaseException | None = None
    smaller: str = ""
    padding: tuple[str, str] = ("", "")
    remedy: str = ""
    one_sided: bool = False
    in_update: bool = False


@dataclass(frozen=True)
class Large:
    """The reason why a model is not proven at its own size. The parameters of a smaller copy may take at most `most`
    bytes in fp32. `fits`: whether there is enough memory to run a few samples through the model itself."""

    reason: str
    most: float
    fits: bool


class Dependent(Exception):
    """A microbatch does not run by itself, although the whole batch does. The exception's cause is the model's
    error."""


class Fails(Unproven):
    """The unsplit model does not run on these samples."""


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
    """Train split and unsplit copies of a model for `steps` steps with different samples, and compare the copies. The
    model itself is not boosted yet. The user's objects do not change. The copies are in evaluation mode with
    microbatch_tokens, or with num_slices if the model uses random numbers. Otherwise, with an optimizer, they are in
    training mode.

    The proof compares loss, gradients (including None), outputs, buffers, state that forwards leave on modules,
    parameters after the optimizer's step, and the state dict. It also compares the unsplit model on the whole batch
    with itself on the microbatches. `note` is called regularly. If `large` is given, or the model takes longer than
    `seconds`, the proof splits a smaller copy instead. If no smaller copy runs, or if the copy also takes too long, the
    proof only compares outputs: the outputs of a few samples in one batch, and of the same samples in microbatches.
    Each of the two fallbacks may take `seconds`, or STEPS_MORE steps if these take longer. After a difference is found,
    the time is not limited.
    """
    precision = Precision(config.precision, config.autocast, device)
    if any(parameter.dtype is precision.dtype for parameter in model.parameters()):
        sample = precision.of_batch(sample)  # as in training
    proving = _Proving(config, Copies(model, criterion, optimizer, sample), device, Limit(seconds, note), steps)
    made = Proof(EXACT)
    with undisturbed(device), checking_indices(device):
        try:
            with untouched(proving.given):
                proving.run(large)
        except (Coupled, Different) as difference:
            is_coupled, is_update = isinstance(difference, Coupled), getattr(difference, "part", "") == "update"
            made = Proof(DIFFERENT, str(difference), coupled=is_coupled, in_update=is_update)
        except Dependent as error:
            made = Proof(UNPROVEN, str(error), dependent=True, cause=error.__cause__)
        except Unproven as error:
            made = Proof(UNPROVEN, str(error))
        except Uncopyable as error:
            made = Proof(UNPROVEN, str(error), remedy=COPY_REMEDY)
        except PipeshardError as error:  # for the model itself, boost or the first step usually raises it, too
            made = Proof(UNPROVEN, summary(error), refused=not proving.smaller, one_sided=True)
        except torch.OutOfMemoryError as error:
            made = Proof(UNPROVEN, summary(error))
        except Exception as error:  # the user's code, or copying it, may raise anything
            logger.debug("the proof failed", exc_info=True)
            made = Proof(UNPROVEN, summary(error), one_sided=True)
    return replace(
        made,
        kind=PARTLY if made.kind == EXACT and proving.but else made.kind,
        counts=proving.counts,
        but=tuple(proving.but),
        seconds=proving.limit.elapsed,
        moving=tuple(proving.moving),
        smaller=proving.smaller,
    )


class _Proving:
    """The state of a proof."""

    def __init__(self, config: PipelineConfig, given: Copies, device: torch.device, limit: Limit, steps: int) -> None:
        self.omits_norm = bool(config.max_norm) and given.trains_in_part
        self.config = replace(config, max_norm=0.0) if self.omits_norm else config
        self.given, self.device, self.limit, self.steps = given, device, limit, steps
        self.counts: dict[str, int] = {}
        self.but: dict[str, None] = {}
        self.moving: dict[str, None] = {}
        self.cut: list[StepCut] = []
        self.draws, self.is_whole, self.smaller = False, False, ""
        self.evaluates = config.is_ragged  # the random numbers of dropout depend on the length
        self.samples = Samples.few(config, given)
        self.undivided: Undivided | None = None

    @property
    def is_divided(self) -> bool:
        """Whether the loss combines several microbatches."""
        return self.samples.m > 1 and self.config.has_exact_loss

    def run(self, large: Large | None) -> None:
        """Prove that the split is exact, then that microbatches give the result of the batch, as far as time allows."""
        if large is not None:
            why_none = self._take_smaller(large.most)
            large = replace(large, reason=f"{large.reason}; {why_none}") if why_none else None
        if large is not None and not large.fits:
            raise Unproven(large.reason)
        self.given = self._drawn(self.given)
        why = large.reason if large is not None else self._too_much()
        if why is None:
            return
        self.limit.step = self.limit.step or self.limit.elapsed
        if large is None and not self.smaller and self._prove_smaller():
            return
        self._compare_outputs()
        raise TooMuch(why)

    def _too_much(self) -> str | None:
        """Make the comparison. If it takes too much time or memory, return the reason, otherwise None. Returns the
        message instead of the error, since the error's traceback would keep the copies in memory."""
        try:
            self._compare_few_or_all()
        except TooMuch as error:
            return str(error)
        return None

    def _prove_smaller(self) -> bool:
        """Prove a smaller copy instead of a model that takes too long. Return False if no copy runs, or if the copy
        also takes too long."""
        whole, step = self.given, self.limit.step
        self.limit.allow_more()
        self.counts, self.is_whole = {}, False
        self.but.clear()
        self.moving.clear()
        try:
            if not self._take_smaller(math.inf):
                self.limit.refuse_long(STEPS_OF_PROOF * self.limit.step)
                self._compare_few_or_all()
                return True
        except TooMuch:
            logger.debug("a smaller copy also takes too long: %s", self.smaller)
        self.given, self.smaller, self.limit.step = whole, "", step
        return False

    def _drawn(self, own: Copies) -> Copies:
        """Return `own`, or a copy of it with initialized values if parameters are on meta."""
        if not any(parameter.is_meta for parameter in own.model.parameters()):
            return own
        return own.drawn(self.device, self.config.init_weights, torch.initial_seed() % 2**63)

    def _take_smaller(self, most: float) -> str:
        """Replace the model with the first smaller copy that runs. Return "", or the reason why no copy was found."""
        given, why = self.given, ""
        for make in smaller(given, self.config.num_stages, most, self.device):
            try:
                made = make()
                self.given = self._drawn(made.own)
                self._try()
            except TooMuch:
                raise
            except Exception as error:  # a model of a different size may raise anything
                logger.debug("no smaller copy: %s: %s", type(error).__name__, error)
                why = why or str(error)
                self.given = given
            else:
                self.smaller = made.what
                return ""
        return f"no smaller copy of the model could be verified instead ({why})"

    def _compare_few_or_all(self) -> None:
        """Compare a few samples or, if these do not run, all samples split as in training. A few samples may not run if
        the batch contains indices that refer to other samples, such as the edges of a graph."""
        try:
            self._compare_both()
        except Exception as error:  # the user's model may raise anything
            is_verdict = isinstance(error, (Unproven, Different, Coupled, PipeshardError))
            is_verdict = is_verdict and not isinstance(error, (Fails, TraceError, BatchError))
            if is_verdict:
                raise
            self._refuse_dependent()
            if self.samples.count >= self.given.sample.rows:
                raise
            self.samples = Samples.all(self.config, self.given.sample)
            self._compare_both()

    def _refuse_dependent(self) -> None:
        """Raise Dependent if the unsplit model runs on the batch, but not on one of the microbatches of training."""
        batch = self._sample()
        parts = batch.split(*self.config.cut)

        def run(part: Batch) -> None:
            own = self._copy()
            with torch.no_grad(), Lone():
                sum_and_count(part.call(own.model), self._criterion(own), part)

        if (found := failing(batch, parts, run)) is not None and is_of_model(found[1]):
            i, error = found
            raise Dependent(dependent_text(batch, parts, i, error)) from error

    def _compare_both(self) -> None:
        self._try()
        self._compare_split()
        self._compare_whole()

    def _compare_split(self) -> None:
        """Compare the split model with the unsplit model. After a difference, repeat the comparison in fp64: a higher
        precision reduces only rounding errors."""
        try:
            self._compare(None)
        except Different as difference:
            self.limit.remove()
            try:
                self._compare(torch.float64)
            except Different:
                pass
            except Unproven:
                raise
            except Exception as error:  # an error of any type proves nothing
                logger.debug("the proof in fp64 failed: %s: %s", type(error).__name__, error)
            else:
                return
            raise self._located(difference) from None

    def _copy(self, dtype: torch.dtype | None = None) -> Copies:
        self.limit.tick()
        made = self.given.copy(self.device, dtype)
        if dtype is torch.float64:
            use_eager_kernels(made.model)
        for parameter in made.model.parameters():
            parameter.grad = None
        if self.evaluates:
            made.model.eval()
        # `from_pretrained` returns models in evaluation mode
        elif made.optimizer is not None and not made.model.training:
            made.model.train()
        return made

    def _try(self) -> None:
        """Run a step of the unsplit model, to measure the step's duration and to find out whether the model uses
        random numbers. Raises Fails if the model does not run, TooMuch if the proof would take too long, and Unproven
        if the model has no loss, or a loss that is not finite."""
        torch.manual_seed(SEED)
        before, start = generators(self.device), self.limit.elapsed
        tried, loss = self._unsplit(is_first=True)
        if not torch.isfinite(loss):
            raise Unproven(f"the unsplit model's loss is {float(loss)}")
        self.limit.step = self.limit.elapsed - start
        self.limit.refuse_long(STEPS_LEFT * self.limit.step)
        self.draws = before != generators(self.device)
        if self.draws and self.config.has_slices and not self.evaluates:  # slices use other random numbers
            self.evaluates = True
            self._try()
            return
        self.undivided = None
        if self.is_divided and self.given.sample.rows > 1:
            self.undivided = Undivided(self._reference(self._copy())) if self.draws else Undivided(tried, loss)

    def _unsplit(self, is_first: bool = False) -> tuple[Reference, Tensor]:
        """Run a step on a copy of the unsplit model, and return the copy and its loss. Raises TooMuch if the time is
        limited and the first layers of the first step already take too long."""
        reference = self._reference(self._copy())
        torch.manual_seed(SEED)
        try:
            batch = self.samples.of_step(reference.own.sample, 0)
            with ExitStack() as stack:
                if is_first:  # a collective would wait for ranks that do not run the proof
                    stack.enter_context(Lone())
                    stack.enter_context(self.limit.measuring(reference.model))
                loss, _ = reference.step([batch], ONE_PART, (SEED, 0), self.limit.tick)
        except NoLoss:
            raise Unproven(NO_LOSS) from None
        except TooMuch:
            raise
        except Exception as error:  # the user's model may raise anything
            raise Fails(f"the unsplit model fails on its batch: {summary(error)}") from error
        return reference, loss

    def _fickle(self) -> frozenset[str]:
        """The attributes that differ between two runs of the unsplit model, such as durations or random seeds."""
        with undisturbed(self.device):
            return differing_attributes(self._unsplit()[0].model, self._unsplit()[0].model)

    def _reference(self, own: Copies) -> Reference:
        return Reference(own, self._criterion(own), self.device)

    def _criterion(self, own: Copies) -> Criterion | None:
        *_, criterion = self.config.settled(own.model, own.criterion)
        return criterion

    def _sides(self, dtype: torch.dtype | None, replicas: int = 1) -> Sides:
        """The split model, and a copy of the unsplit model for each replica."""
        split = self._split(dtype, replicas)
        read, flow = split.ranks[0].own.sample, split.policy.flow
        references = []
        for _ in range(replicas):
            own = self._copy(dtype)
            own.sample = replace(own.sample, row_dims=read.row_dims, owners=read.owners)
            reference = self._reference(own)
            if self.draws:
                reference.seed_places(split.policy.units, flow.glue_random, flow.python_random)
            references.append(reference)
        return Sides(split, references, self.samples, self.limit.tick, functools.cache(self._fickle))

    def _split(self, dtype: torch.dtype | None, replicas: int) -> LocalPipeline:
        """The split model. If the model's policy cannot split a smaller copy, the default policy splits the copy."""

        def made(config: PipelineConfig) -> LocalPipeline:
            make, is_smaller = functools.partial(self._copy, dtype), bool(self.smaller)
            return LocalPipeline(config, make, self.device, self.limit.tick, replicas, is_smaller)

        try:
            return made(self.config)
        except PartitionError:  # the policy names a layer that the copy lacks
            if not self.smaller:
                raise
            return made(replace(self.config, policy=Policy))

    def _compare(self, dtype: torch.dtype | None) -> None:
        comparison = Comparison(fine=dtype is torch.float64)
        self.cut.clear()
        sides = self._sides(dtype, self.samples.replicas)
        sides.undivided, self.undivided = self.undivided if dtype is None else None, None
        if sides.unstepped:
            self.but[f"the optimizer's step ({sides.unstepped})"] = None
        if self.omits_norm:
            self.but["clipping with max_norm (the optimizer trains only some of the model's parameters)"] = None
        for step in range(self.steps):
            asked = step > 0 and not self.config.is_ragged  # outputs at padding are arbitrary
            self.cut.append(sides.step(comparison, step, asked))
            undivided = None if step else sides.undivided
            if undivided is not None and moves(
                self.given, undivided.reference.own, sides.references[0].own, self.samples.m
            ):
                self.moving[MOVES] = None
        self.counts = dict(comparison.counts)

    def _compare_whole(self) -> None:
        """Compare the unsplit model on all samples of a step with itself on the step's microbatches."""
        if not self.is_divided:
            return
        sample = self._sample()
        for now in self.cut if self.samples.vary(sample) else self.cut[:1]:
            batch = self.samples.of_step(sample, now.step)
            self._compare_inputs(batch)
            self._note(now.found or self._found(batch, now), "the batch")

    def _found(self, batch: Batch, cut: StepCut) -> WholeFound:
        """Compare a batch with its microbatches on fresh copies, with the same random numbers for the same samples."""
        whole = WholeBatch(self._made, self.device, self.draws, self.limit.tick, self.limit.remove)
        try:
            return whole.compare(batch, cut.weights, by_outputs=cut.has_auxiliary, units=cut.units)
        except (Coupled, Unproven):
            raise
        except Exception as error:  # a model may raise anything on other samples
            return WholeFound(missing=summary(error))

    def _compare_inputs(self, batch: Batch) -> None:
        parts = self.samples.m * self.samples.replicas
        for i, (part, copied) in enumerate(zip(batch.split(parts), copied_microbatches(batch, parts), strict=True)):
            Comparison().tensors(part.tensors, copied.tensors, "inputs", f"of microbatch {i}")

    def _compare_outputs(self) -> None:
        """Compare only the outputs, if the full proof takes too much time or memory."""
        if not self.is_divided or self.is_whole:
            return
        self.is_whole = True
        self.limit.allow_more()
        whole = WholeBatch(self._made, self.device, False, self.limit.tick, self.limit.remove)
        try:
            batch, weights = self.samples.of_step(self._sample(), 0), Weights([1.0] * self.samples.m)
            self._note(whole.compare(batch, weights, by_loss=False), "the outputs")
        except Coupled:
            raise
        except Exception as error:  # an error of any type proves nothing
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
        """The sample on the device, with settled row dimensions."""
        return RowDims(self.given.model, self.config.batch_dims).settle(self.given.sample.to(self.device))

    def _made(self, dtype: torch.dtype | None) -> tuple[Copies, Criterion | None]:
        own = self._copy(dtype)
        return own, self._criterion(own)

    def _located(self, difference: Different) -> Different:
        """Return the error with a sentence that names the unit or the part of the step where the difference begins, if
        this can be found."""
        is_update, optimizer = difference.part == "update", self.given.optimizer
        if not difference.part or (is_update and (optimizer is None or never_couples(optimizer))):
            return Different(str(difference))
        try:
            where = "" if is_update else self._sides(None).first_unit()
        except Exception as error:  # the difference is then reported without its location
            logger.debug("the difference was not located: %s: %s", type(error).__name__, error)
            return difference
        return Different(f"{difference}. {where or BEGINS[difference.part]}", difference.part)
