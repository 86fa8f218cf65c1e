"""Sides: trains the split model and copies of the unsplit model for the same steps, and compares them in each step."""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD

from pipeshard.distributed.local import in_thread
from pipeshard.errors import summary
from pipeshard.verify.compare import (
    Comparison,
    compare_parameters,
    compare_state,
    first_unit,
    gradients,
    output_tensors,
)
from pipeshard.verify.joined import JoinedDraws
from pipeshard.verify.local import LocalPipeline, Unproven, stepped
from pipeshard.verify.reference import Reference, Weights
from pipeshard.verify.samples import Samples
from pipeshard.verify.whole import RunMode, Side, WholeFound, unlike

T = TypeVar("T")
SEED = 20261123
ONE_PART = Weights([1.0])


@dataclass(frozen=True)
class StepCut:
    """How a step was split: the weights of its microbatches' losses, whether a part of the loss comes from side outputs
    of units, and the names of all units. `found` is set if the whole batch gave the same result as the microbatches."""

    step: int
    weights: Weights
    has_auxiliary: bool
    units: tuple[str, ...]
    found: WholeFound | None


@dataclass
class Undivided:
    """A copy of the unsplit model that trains on all samples of a step in one batch. `loss` is set if the copy has
    already run the first step."""

    reference: Reference
    loss: Tensor | None = None


class Sides:
    """The split model, and a copy of the unsplit model for each replica. `undivided` may be a further copy, which is
    removed once its result differs. `fickle()` returns the attributes that differ between two runs of one model."""

    def __init__(
        self,
        split: LocalPipeline,
        references: list[Reference],
        samples: Samples,
        tick: Callable[[], None],
        fickle: Callable[[], Collection[str]],
    ) -> None:
        self.split, self.references, self.samples = split, references, samples
        self.tick, self.fickle = tick, fickle
        self.undivided: Undivided | None = None
        self.draws = JoinedDraws()
        self.unstepped = ""  # why the user's optimizer does not step
        self.first, *self.others = self._optimizers()

    def step(self, comparison: Comparison, step: int, asked: bool) -> StepCut:
        """Train both sides for a step. Compare loss, gradients, state, parameters and, if `asked`, outputs."""
        split, reference, during = self.split, self.references[0], f"in step {step + 1}"
        loss, outputs = split.step(partial(self.samples.of_replica, step), self.samples.m, asked, (SEED, step))
        expected, made = self._unsplit_step(step)
        comparison.loss(loss, expected, f"the loss {during}")
        comparison.gradients(*gradients(split, reference), during)
        for output, of_unsplit in zip(outputs, made, strict=True) if asked else ():
            what = f"of the output {during}"
            comparison.tensors(output_tensors(output), output_tensors(of_unsplit), "outputs", what)
        for replica, each in enumerate(self.references):
            compare_state(comparison, split, each, during, self.fickle, replica)
        weights = split.weights(*range(self.samples.replicas))
        found = self._compare_undivided(step, expected, weights)
        self._update(comparison)
        compare_parameters(comparison, split, reference, f"after step {step + 1}")
        return StepCut(step, weights, self.split.flow.has_side_loss, tuple(split.policy.units), found)

    def first_unit(self) -> str:
        """A sentence that names the first unit whose results differ in the first step, or "" if there is none."""
        samples = self.samples
        return first_unit(self.split, self.references[0], samples.of_step, samples.m, (SEED, 0), self.tick)

    def _unsplit_step(self, step: int) -> tuple[Tensor, list[Any]]:
        """Run the step of each replica on the replica's own copy of the unsplit model. Sum the gradients into the first
        copy, and return the total loss and all outputs."""
        losses, outputs, m, self.draws = [], list[Any](), self.samples.m, JoinedDraws()
        for replica, reference in enumerate(self.references):
            batches = self.samples.of_replica(step, reference.own.sample, replica).split(m)
            weights, at, first = self.split.weights(replica), (SEED, step), replica * m
            run = partial(reference.step, batches, weights, at, self.tick, first)
            loss, made = in_thread(partial(self._recorded, run))
            losses.append(loss)
            outputs += made
        total = self.references[0]
        for reference in self.references[1:]:
            for into, parameter in zip(total.model.parameters(), reference.model.parameters(), strict=True):
                if parameter.grad is not None:
                    into.grad = parameter.grad if into.grad is None else into.grad + parameter.grad
                    parameter.grad = None
        return sum(losses[1:], losses[0]), outputs

    def _recorded(self, run: Callable[[], T]) -> T:
        """Call `run`, and record its random numbers for the undivided model."""
        with self.draws if self.undivided is not None else nullcontext():
            return run()

    def _compare_undivided(self, step: int, expected: Tensor, weights: Weights) -> WholeFound | None:
        """Compare the unsplit model's loss and gradients on the whole batch with its loss and gradients on the
        microbatches. (`step` has already compared the latter with the split model's.) Return None if the two differ, if
        an undivided model does not exist, or if this is a later step with the same samples as the first step."""
        undivided = self.undivided
        if undivided is None or (step and not self.samples.vary(undivided.reference.own.sample)):
            return None
        batch = self.samples.of_step(undivided.reference.own.sample, step)
        loss, undivided.loss = undivided.loss, None
        try:
            if loss is None:
                with self.draws.joining(len(weights.shares)):
                    loss, _ = undivided.reference.step([batch], ONE_PART, (SEED, step), self.tick)
            whole = Side.of(undivided.reference, loss, batch.rows, ONE_PART)
            is_alike = not unlike(whole, Side.of(self.references[0], expected, batch.rows, weights), RunMode())
        except Unproven:
            raise
        except Exception:  # a model may raise anything on other samples
            is_alike = False
        if not is_alike:
            self.undivided = None
            return None
        for parameter in undivided.reference.own.trained().values():
            parameter.grad = None
        return WholeFound(losses=1, gradients=len(whole.gradients))

    def _optimizers(self) -> list[Any]:
        """The optimizers of the first reference and of the ranks. If the user has no optimizer, or an unsupported one,
        all are SGD."""
        split, reference = self.split, self.references[0]
        if reference.own.optimizer is not None:
            try:
                split.boost()
                return [reference.own.optimizer, *(rank.optimizer for rank in split.ranks)]
            except Exception as error:  # an optimizer may raise anything when it is wrapped
                self.unstepped = summary(error)
        trained = [reference.model.parameters(), *(rank.held.values() for rank in split.ranks)]
        own = [[p for p in parameters if p.requires_grad] for parameters in trained]
        return [SGD(parameters or [nn.Parameter(torch.zeros(()))], lr=1e-2) for parameters in own]

    def _update(self, comparison: Comparison) -> None:
        """Step all optimizers with the first reference's gradients, since Adam would amplify small differences. Copy
        the updated parameters to the other unsplit models."""
        reference, max_norm = self.references[0], self.split.ranks[0].pipeline.config.max_norm
        trained = reference.own.trained()
        norms = self.split.optimize({name: parameter.grad for name, parameter in trained.items()}, self.others)
        if norms:
            norm = nn.utils.clip_grad_norm_(reference.model.parameters(), max_norm or 0.0)
            for each in norms:
                comparison.norm(each, float(norm))
        stepped(self.first)
        undivided = [self.undivided.reference] if self.undivided is not None else []
        for other in (*self.references[1:], *undivided):
            for name, parameter in other.own.trained().items():
                parameter.data.copy_(trained[name].data)
        for parameter in trained.values():
            parameter.grad = None
        self.tick()
