"""Proof: a few steps of all stages in this process, compared with the unsplit model on the same samples."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion
from pipeshard.config import PipelineConfig
from pipeshard.errors import PipeshardError
from pipeshard.ghost import inside_pipeshard
from pipeshard.verify.compare import (
    Comparison,
    Evaluated,
    compare_state,
    compare_trained,
    compare_whole,
    differing,
    evaluated,
    first_unit,
    gradients,
    output_tensors,
)
from pipeshard.verify.reference import Copies, NoLoss, Reference, generators, undisturbed
from pipeshard.verify.untouched import untouched
from pipeshard.verify.virtual import Different, Virtual

logger = logging.getLogger("pipeshard")
EXACT, DIFFERENT, UNPROVEN = "exact", "different", "unproven"
ROWS, PARTS = 5, 2  # samples of a step, and the microbatches that they are cut into: they differ in size
SEED = 20261123
BEGINS = {
    "forward": "All units return the same: it begins in what the model or the criterion does between or after them",
    "backward": "All units return the same: it begins in the backward pass",
}


@dataclass(frozen=True)
class Proof:
    """ "exact", "different" or "unproven", the last two with the reason; what was compared how often, `but` what was
    not, and how long it took. `refused` is whether the reason is an error that training raises, too."""

    kind: str
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    but: tuple[str, ...] = ()
    seconds: float = 0.0
    refused: bool = False


class Unproven(Exception):
    """Nothing can be said of the model; says why."""


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
) -> Proof:
    """Two training steps of a model that is yet to be boosted, split and unsplit, on different samples; nothing of the
    user's changes.

    Compared are loss, gradients (None, too), outputs, buffers, what forwards leave on modules, parameters after the
    optimizer's step, what is saved, and the batch's loss with that of the microbatches. After `seconds` it gives up;
    `note` is called now and then.
    """
    proving = _Proving(config, Copies(model, criterion, optimizer, sample), device, seconds, note)
    kind, reason, refused = EXACT, "", False
    with undisturbed(device):
        try:
            with untouched(proving.given):
                proving.run()
        except Different as difference:
            kind, reason = DIFFERENT, str(difference)
        except Unproven as error:
            kind, reason = UNPROVEN, str(error)
        except PipeshardError as error:  # booster.boost, or the first step, says the same
            kind, reason, refused = UNPROVEN, f"{type(error).__name__}: {error}", True
        except Exception as error:  # whatever the user's code raises, or copying it
            logger.debug("the proof failed", exc_info=True)
            kind, reason = UNPROVEN, f"{type(error).__name__}: {error}"
    return Proof(kind, reason, proving.counts, tuple(proving.but), proving.elapsed, refused)


class _Proving:
    """The state of a proof."""

    def __init__(
        self,
        config: PipelineConfig,
        given: Copies,
        device: torch.device,
        seconds: float | None,
        note: Callable[[], None],
    ) -> None:
        self.start = time.perf_counter()
        self.config, self.given, self.device, self.seconds, self.note = config, given, device, seconds, note
        self.counts: dict[str, int] = {}
        self.but: dict[str, None] = {}
        self.draws, self.fickle = False, frozenset[str]()
        self.m = 1 if config.num_microbatches == 1 else PARTS

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def tick(self) -> None:
        self._refuse_long(self.elapsed)
        self.note()

    def _refuse_long(self, needed: float) -> None:
        if self.seconds is not None and needed > self.seconds:
            raise Unproven(f"it takes longer than {self.seconds:g} s")

    def run(self) -> None:
        """In fp64 once more where it seems to differ: rounding shrinks with the precision, a mistake does not."""
        if any(tensor.is_meta for tensor in self.given.model.parameters()):
            rule = self.config.init_weights
            self.given = self.given.drawn(self.device, rule, torch.initial_seed() % 2**63)
        self._try()
        try:
            self._compare(None)
        except Different as difference:
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

    def rows(self, batch: Batch, step: int) -> Batch:
        """The samples of a step: the first ones, then the last ones, backwards."""
        order = range(batch.rows)
        return batch.take(torch.tensor((order[::-1] if step else order)[:ROWS]))

    def _copy(self, dtype: torch.dtype | None = None) -> Copies:
        self.tick()
        made = self.given.copy(self.device, dtype)
        experts: Any = getattr(made.model, "set_experts_implementation", None)
        if dtype is torch.float64 and experts is not None:
            experts("eager")  # the grouped matrix product has no fp64
        for parameter in made.model.parameters():
            parameter.grad = None
        return made

    def _try(self) -> None:
        """Whether the unsplit model runs, how long that takes, and whether it draws random numbers."""
        torch.manual_seed(SEED)
        before, start = generators(self.device), time.perf_counter()
        model, loss = self._unsplit()
        if not torch.isfinite(loss):
            raise Unproven(f"the unsplit model's loss is {float(loss)}")
        self._refuse_long(5 * (time.perf_counter() - start))
        self.draws = before != generators(self.device)
        if self.draws:  # by torch.seed() or the clock, another number each time
            self.fickle = differing(model, self._unsplit()[0])

    def _unsplit(self) -> tuple[nn.Module, Tensor]:
        """A copy of the unsplit model after a step, and the loss of that."""
        own = self._copy()
        reference = Reference(own, self._criterion(own), self.device)
        torch.manual_seed(SEED)
        try:
            loss, _ = reference.step([self.rows(own.sample, 0)], [1.0], (SEED, 0), self.tick)
        except NoLoss:
            raise Unproven("nothing gives a loss to train on") from None
        except Exception as error:  # whatever the user's model raises
            raise Unproven(f"the unsplit model does not run on its batch: {type(error).__name__}: {error}") from error
        return own.model, loss

    def _criterion(self, own: Copies) -> Criterion | None:
        return self.config.settled(getattr(own.model, "pipeline_hints", None), own.criterion).criterion

    def _sides(self, dtype: torch.dtype | None) -> tuple[Virtual, Reference]:
        own = self._copy(dtype)
        reference = Reference(own, self._criterion(own), self.device)
        seed = torch.initial_seed() % 2**63
        split = Virtual(self.config, lambda: self._copy(dtype), self.device, seed, self.tick)
        read, flow = split.ranks[0].own.sample, split.ranks[0].flow
        own.sample = replace(own.sample, row_dims=read.row_dims, owners=read.owners)
        if self.draws:
            reference.seed_places(split.policy.units, flow.glue_random, flow.python_random)
        return split, reference

    def _compare(self, dtype: torch.dtype | None) -> None:
        comparison = Comparison(fine=dtype is torch.float64)
        split, reference = self._sides(dtype)
        optimizers = self._optimizers(split, reference)
        for step in (0, 1):
            at, during = (SEED, step), f"in step {step + 1}"
            loss, outputs = split.step(lambda batch, step=step: self.rows(batch, step), self.m, step > 0, at)  # type: ignore[misc]
            batches = self.rows(reference.own.sample, step).split(self.m)
            expected, made = reference.step(batches, split.weights, at, self.tick)
            comparison.loss(loss, expected, f"the loss {during}")
            comparison.gradients(*gradients(split, reference), during)
            for mine, theirs in zip(outputs.kept, made, strict=True) if step else ():
                what = f"of the output {during}"
                comparison.tensors(output_tensors(mine), output_tensors(theirs), "outputs", what)
            compare_state(comparison, split, reference, during, self.fickle)
            self._compare_whole(comparison, split, self.rows(reference.own.sample, step), dtype)
            self._step(split, reference, optimizers)
            compare_trained(comparison, split, reference, f"after step {step + 1}")
        self.counts = dict(comparison.counts)

    def _compare_whole(self, comparison: Comparison, split: Virtual, batch: Batch, dtype: torch.dtype | None) -> None:
        def evaluate(some: Batch, times: int) -> list[Evaluated]:
            own = self._copy(dtype)
            criterion = self._criterion(own)
            return [evaluated(own, criterion, some) for _ in range(times)]

        if self.m > 1 and self.config.has_exact_loss:
            try:
                but = compare_whole(comparison, batch, self.m, split, evaluate)
            except (Different, Unproven):
                raise
            except Exception as error:  # whatever a model raises on other samples
                but = f"{type(error).__name__}: {error}"
            if but:
                self.but[f"the loss of the whole batch ({but})"] = None

    def _optimizers(self, split: Virtual, reference: Reference) -> list[Any]:
        """The reference's and the ranks'; plain SGD where there is none, or it is refused."""
        if reference.own.optimizer is not None:
            try:
                for rank in split.ranks:
                    rank.narrow()
                return [reference.own.optimizer, *(rank.optimizer for rank in split.ranks)]
            except Exception as error:  # whatever an optimizer raises when it is narrowed
                self.but[f"the optimizer's step ({type(error).__name__}: {error})"] = None
        trained = [reference.model.parameters(), *(rank.held.values() for rank in split.ranks)]
        own = [[p for p in parameters if p.requires_grad] for parameters in trained]
        return [SGD(parameters or [nn.Parameter(torch.zeros(()))], lr=1e-2) for parameters in own]

    def _step(self, split: Virtual, reference: Reference, optimizers: Sequence[Any]) -> None:
        """Step by the very same gradients, which were compared: Adam makes much of little."""
        for name, parameter in reference.model.named_parameters():
            for rank in split.ranks:
                if name in rank.held:
                    rank.held[name].grad = None if parameter.grad is None else parameter.grad.clone()
        for k, parameter in enumerate(reference.own.foreign()):
            for rank in split.ranks:
                rank.foreign[k].grad = None if parameter.grad is None else parameter.grad.clone()
        for optimizer in optimizers:
            try:
                optimizer.step()
            except TypeError:  # LBFGS and the like want a closure
                optimizer.step(lambda: torch.zeros(()))
        own = [*reference.model.parameters(), *reference.own.foreign()]
        for parameter in [*own, *(p for rank in split.ranks for p in (*rank.held.values(), *rank.foreign))]:
            parameter.grad = None
        self.tick()

    def _located(self, difference: Different) -> Different:
        """The same, with the place where it begins."""
        if not difference.part:
            return difference
        try:
            where = first_unit(*self._sides(None), self.rows, self.m, (SEED, 0), self.tick)
        except Exception as error:  # the difference stands without its place
            logger.debug("the difference was not located: %s: %s", type(error).__name__, error)
            return difference
        return Different(f"{difference}. {where or BEGINS[difference.part]}")
