"""Step plans: for each kind of batch and criterion, the routes of its microbatches through this rank's stages."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, key_of
from pipeshard.distributed.collectives import gather, gather_objects
from pipeshard.engine.loss import EACH, LossRule, find_loss_rule, read_by_loss
from pipeshard.engine.loss_probe import ranges
from pipeshard.engine.loss_trial import Glue
from pipeshard.engine.reader import digests
from pipeshard.engine.stage import Microbatch
from pipeshard.errors import BatchError, ConfigurationError, TraceError
from pipeshard.graph.dataflow import Dataflow, Wanted
from pipeshard.graph.flags import Flags
from pipeshard.graph.kinds import modes
from pipeshard.graph.trace import trace
from pipeshard.split.partition import boundaries
from pipeshard.split.policy import Policy
from pipeshard.split.recompute import Recompute
from pipeshard.split.refusals import refuse_hooks, refuse_unsplittable
from pipeshard.split.route import LENGTHS, Route

Ranges = dict[str, tuple[float, float]]  # of the labels and the like that a rule was proven for
FLOWS = 128  # Dataflows that are kept: batches may hold something that differs in each, and that a trace depends on


class StepPlanner:
    """Knows the way of every batch it has seen; a new sequence length is arithmetic, a new structure is a trace."""

    def __init__(
        self, model: nn.Module, policy: Policy, recompute: Recompute, replicas: dist.ProcessGroup | None = None
    ) -> None:
        self.model, self.policy, self.recompute, self.replicas = model, policy, recompute, replicas
        self.flags = Flags({"": model})
        self._flows: dict[Any, list[Dataflow]] = {}
        self._watched: frozenset[str] = frozenset()
        self._found: dict[Any, tuple[Dataflow, tuple[int, ...]]] = {}
        self._routes: dict[tuple[int, Wanted], list[Route]] = {}
        self._rules: dict[Any, tuple[LossRule, Ranges]] = {}

    def remember(self, flow: Dataflow, criterion: Criterion | None) -> None:
        """Use a Dataflow that was traced already, with the model in the mode it is in."""
        self._state = self.flags.number()
        if not flow.watched:
            self._flows.setdefault(self._mode(criterion, ()), []).append(flow)
        self._watched |= flow.watched

    def plan(
        self, batches: Sequence[Batch], criterion: Criterion | None, outputs: Wanted, exact_loss: bool
    ) -> list[list[Microbatch]]:
        """For each stage of this rank, the microbatches with their routes; `flags.stepped()` is to be called when they
        are through.

        `exact_loss` weighs them so that the loss is the whole batch's, to which all replicas have a part; what is
        `unproven` has to be proven before.
        """
        self._state = self.flags.number()
        found = [self._find(batch, criterion) for batch in batches]
        weights = [1.0] * len(batches)  # only the last stage has a loss to weigh
        rule = self._rule(batches, criterion) if exact_loss else EACH
        if self.is_last:
            counts = self._counts(batches, found, criterion) if rule.counted else ()
            weights = rule.weights(batches, lambda count: self._total(count, rule), counts)
        routes = [self._route(flow, outputs) for flow, _ in found]
        return [
            [
                Microbatch(route.feed(batch, self.policy.replay.device), route, deltas, weight, rule.counted)
                for batch, route, (_, deltas), weight in zip(batches, of_stage, found, weights, strict=True)
            ]
            for of_stage in zip(*routes, strict=True)
        ]

    def _find(self, batch: Batch, criterion: Criterion | None) -> tuple[Dataflow, tuple[int, ...]]:
        mode = self._mode(criterion, digests(batch, self._watched))
        shapes = tuple((path, tensor.shape, tensor.dtype) for path, tensor in batch.tensors.items())
        key = (*mode, shapes, batch.others)
        if key not in self._found or not _answers(*self._found[key], batch):
            known = ((flow, flow.axes.deltas(batch)) for flow in self._flows.get(mode, []))
            fitting = ((flow, deltas) for flow, deltas in known if deltas is not None and _answers(flow, deltas, batch))
            match = next(fitting, None)
            if match is None:
                match = self._trace(batch, criterion)
                self._keep(match[0], mode)
            if len(self._found) >= LENGTHS:
                del self._found[next(iter(self._found))]
            self._found[key] = match
        return self._found[key]

    def _keep(self, flow: Dataflow, mode: tuple[Any, ...]) -> None:
        if sum(map(len, self._flows.values())) >= FLOWS:
            for kept in (self._flows, self._found, self._routes):
                kept.clear()
        self._flows.setdefault(mode, []).append(flow)
        self._watched |= flow.watched

    def _mode(self, criterion: Criterion | None, watched: Any) -> tuple[Any, ...]:
        """What a Dataflow depends on beside the sizes of a batch and the answers that it gives."""
        return key_of(criterion), self._state, modes()[1:], watched

    def _trace(self, batch: Batch, criterion: Criterion | None) -> tuple[Dataflow, tuple[int, ...]]:
        flow = trace(self.model, batch, criterion, exact=not self._watched.isdisjoint(batch.paths))
        deltas = flow.axes.deltas(batch)
        if deltas is None or not _answers(flow, deltas, batch):  # good for these sizes, or these very values, alone
            flow = trace(self.model, batch, criterion, exact=True)
            deltas = flow.axes.deltas(batch)
        assert deltas is not None
        return flow, deltas

    def _route(self, flow: Dataflow, outputs: Wanted) -> list[Route]:
        """One for each stage of this rank."""
        key = id(flow), outputs  # a route keeps its flow, so the id stays that one's
        if key not in self._routes:
            stages = self.policy.partition.of_calls(flow)
            refuse_unsplittable(self.model, flow, stages, self.policy.placement)
            self._refuse_released(flow, stages, outputs)
            refuse_hooks(flow, stages, len(self.policy.placement))
            crossing = boundaries(flow, stages, len(self.policy.placement), outputs)
            routes = []
            for stage in self.policy.chunks:
                again = self.recompute.calls(flow, stages, stage, self.policy.units)
                routes.append(Route.of(flow, stages, stage, crossing, outputs, again))
            self._routes[key] = routes
        return self._routes[key]

    def _refuse_released(self, flow: Dataflow, stages: Sequence[int], outputs: Wanted) -> None:
        """Glue may take another way with another batch, and read a parameter that its stage has released."""
        uses = [(call.reads, stage) for call, stage in zip(flow.calls, stages, strict=True)]
        for use, stage in [*uses, (flow.needed(outputs), len(self.policy.placement) - 1)]:
            released = sorted(use.parameters - self.policy.ownership.held[self.policy.placement[stage]])
            if released:
                raise TraceError(
                    f"with this batch the model reads {released[0]} outside of its unit, on stage {stage}, which does "
                    "not hold it: pass dry_run_input=<a batch of this kind> to PipelinePlugin"
                )

    def _total(self, count: float, rule: LossRule) -> float:
        """The sum of a count over the replicas."""
        if self.replicas is None:
            return count
        code = zlib.crc32(repr(rule).encode())
        table = gather(torch.tensor([count, code], dtype=torch.float64), self.replicas)
        if len(set(table[:, 1].tolist())) > 1:
            raise BatchError(
                f"this replica's loss is made of its microbatches' by {rule}, that of others by another rule: give all "
                "replicas batches of one kind, with labels or without"
            )
        return float(table[:, 0].sum())

    @property
    def is_last(self) -> bool:
        """Whether the loss is made on this rank."""
        return self.policy.stage == self.policy.placement[-1]

    def unproven(self, batch: Batch, cut: int, criterion: Criterion | None) -> bool:
        """Whether it is still to be found how the loss of this batch is made of those of its `cut` microbatches: there
        was none like it so far, or none with such labels."""
        if cut == 1 and self.replicas is None:
            return False
        self._state = self.flags.number()
        known = self._rules.get(self._rule_key(batch, criterion))
        if known is None:
            return True
        there = ranges(batch, known[1])
        return any(known[1][path][0] > low or known[1][path][1] < high for path, (low, high) in there.items())

    def prove(self, batch: Batch, first: Batch, criterion: Criterion | None, world: dist.ProcessGroup) -> None:
        """Find that out, on all ranks at the same time; `first` is the batch's first microbatch.

        Raises ConfigurationError on all of them where one of them finds nothing.
        """
        failure: Exception | None = None
        try:
            self.learn(batch, first, criterion)
        except Exception as error:
            failure = error
        reasons = gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}", world)
        if failure is not None:
            raise failure
        if reason := next(filter(None, reasons), None):
            self._rules.pop(self._rule_key(batch, criterion), None)
            raise ConfigurationError(reason.removeprefix("ConfigurationError: "))

    def learn(self, batch: Batch, first: Batch, criterion: Criterion | None) -> None:
        """Find it out on this rank alone."""
        flow, _ = self._find(first, criterion)
        self._prove(flow, batch, criterion)

    def _prove(self, flow: Dataflow, batch: Batch, criterion: Criterion | None) -> None:
        key, rule = self._rule_key(batch, criterion), LossRule(summed=True)
        if self.is_last and flow.loss is not None:
            rule = find_loss_rule(self.model, flow, batch.to(self.policy.replay.device), criterion)
        before, seen = self._rules.get(key, (rule, {}))
        now = ranges(batch, read_by_loss(flow))
        if before == rule:  # what was proven for other labels holds still
            now |= {path: (min(low, now[path][0]), max(high, now[path][1])) for path, (low, high) in seen.items()}
        if len(self._rules) >= FLOWS:
            self._rules.clear()
        self._rules[key] = rule, now

    def _rule(self, batches: Sequence[Batch], criterion: Criterion | None) -> LossRule:
        if len(batches) == 1 and self.replicas is None:
            return LossRule(summed=True)
        known = self._rules.get(self._rule_key(batches[0], criterion))
        if known is None:
            raise TraceError(
                f"{type(self.model).__name__} was left as another one by a run of its forward on a few samples, so "
                "that it is not known how its loss is made of those of microbatches. What it changes in Python has to "
                "be within the model, or the criterion"
            )
        return known[0]

    def _rule_key(self, batch: Batch, criterion: Criterion | None) -> Any:
        others = (other for other in batch.others if not other[1].startswith(("int ", "float ")))  # numbers of items
        return key_of(criterion), self._state, batch.paths, tuple(others)

    def _counts(
        self, batches: Sequence[Batch], found: Sequence[tuple[Dataflow, tuple[int, ...]]], criterion: Criterion | None
    ) -> list[float]:
        """What the criterion divides its sum by in each microbatch, which has to be known before the first backward."""
        glue = Glue(self.model, criterion, self.policy.replay.device)
        return [glue.count(batch.to(glue.device), *way) for batch, way in zip(batches, found, strict=True)]


def _answers(flow: Dataflow, deltas: Sequence[int], batch: Batch) -> bool:
    """Whether glue gets the answers of this batch, of sizes that differ by `deltas`, that it got when it was traced."""
    return all(question.holds(batch.tensors, deltas) for question in flow.questions)
