"""Step plans: for each kind of batch and criterion, the routes of its microbatches through this rank's stages."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from pipeshard.errors import BatchError, TraceError
from pipeshard.model.batch import Batch
from pipeshard.model.criterion import Criterion
from pipeshard.model.dataflow import Dataflow, Wanted
from pipeshard.model.partition import boundaries
from pipeshard.model.policy import Policy
from pipeshard.model.recompute import Recompute
from pipeshard.model.region import regions
from pipeshard.model.route import LENGTHS, Route
from pipeshard.model.trace import trace
from pipeshard.model.units import containers
from pipeshard.runtime.agreement import digests, gather
from pipeshard.runtime.loss import EACH, LossRule, find_loss_rule
from pipeshard.runtime.stage import Microbatch

FLOWS = 128  # Dataflows that are kept: batches may hold something that differs in each, and that a trace depends on


class StepPlanner:
    """Knows the way of every batch it has seen; a new sequence length is arithmetic, a new structure is a trace."""

    def __init__(
        self, model: nn.Module, policy: Policy, recompute: Recompute, replicas: dist.ProcessGroup | None = None
    ) -> None:
        self.model, self.policy, self.recompute, self.replicas = model, policy, recompute, replicas
        self._dropouts = [module for module in containers(model, policy.units) if isinstance(module, _DropoutNd)]
        self._flows: dict[Any, list[Dataflow]] = {}
        self._watched: frozenset[str] = frozenset()
        self._found: dict[Any, tuple[Dataflow, tuple[int, ...]]] = {}
        self._routes: dict[tuple[int, Wanted, frozenset[str]], list[Route]] = {}
        self._rules: dict[Any, LossRule] = {}

    def remember(self, flow: Dataflow, criterion: Criterion | None) -> None:
        """Use a Dataflow that was traced already, with the model in the mode it is in."""
        if not flow.watched:
            self._flows.setdefault(self._mode(criterion, ()), []).append(flow)
        self._watched |= flow.watched

    def plan(
        self, batches: Sequence[Batch], criterion: Criterion | None, outputs: Wanted, exact_loss: bool
    ) -> list[list[Microbatch]]:
        """For each stage of this rank, the microbatches with their routes.

        `exact_loss` weighs them so that the loss is the whole batch's, to which all replicas have a part.
        """
        found = [self._find(batch, criterion) for batch in batches]
        weights = [1.0] * len(batches)  # only the last stage has a loss to weigh
        if self.policy.stage == self.policy.placement[-1]:
            rule = self._rule(found[0][0], batches, criterion) if exact_loss else EACH
            weights = rule.weights(batches, lambda count: self._total(count, rule))
        joinable = self.policy.joinable
        routes = [self._route(flow, outputs, joinable) for flow, _ in found]
        return [
            [
                Microbatch(route.feed(batch, self.policy.replay.device), route, deltas, weight)
                for batch, route, (_, deltas), weight in zip(batches, of_stage, found, weights, strict=True)
            ]
            for of_stage in zip(*routes, strict=True)
        ]

    def _find(self, batch: Batch, criterion: Criterion | None) -> tuple[Dataflow, tuple[int, ...]]:
        mode = self._mode(criterion, digests(batch, self._watched))
        shapes = tuple((path, tensor.shape, tensor.dtype) for path, tensor in batch.tensors.items())
        key = (*mode, shapes, batch.others)
        if key not in self._found:
            known = ((flow, flow.axes.deltas(batch)) for flow in self._flows.get(mode, []))
            match = next(((flow, deltas) for flow, deltas in known if deltas is not None), None)
            if match is None:
                match = self._trace(batch, criterion)
                self._keep(match[0], mode)
            if len(self._found) >= LENGTHS:
                del self._found[next(iter(self._found))]
            self._found[key] = match
        return self._found[key]

    def _keep(self, flow: Dataflow, mode: tuple[Any, ...]) -> None:
        if sum(map(len, self._flows.values())) >= FLOWS:
            for kept in (self._flows, self._found, self._routes, self._rules):
                kept.clear()
        self._flows.setdefault(mode, []).append(flow)
        self._watched |= flow.watched

    def _mode(self, criterion: Criterion | None, watched: Any) -> tuple[Any, ...]:
        """What a Dataflow depends on beside the sizes of a batch; glue with dropout draws random numbers."""
        dropouts = tuple((dropout.p, dropout.training) for dropout in self._dropouts)
        return criterion, self.model.training, dropouts, watched

    def _trace(self, batch: Batch, criterion: Criterion | None) -> tuple[Dataflow, tuple[int, ...]]:
        flow = trace(self.model, batch, criterion, exact=not self._watched.isdisjoint(batch.paths))
        deltas = flow.axes.deltas(batch)
        if deltas is None:  # its shapes are no affine function of the batch's: good for these sizes alone
            flow = trace(self.model, batch, criterion, exact=True)
            deltas = flow.axes.deltas(batch)
        assert deltas is not None
        return flow, deltas

    def _route(self, flow: Dataflow, outputs: Wanted, joinable: frozenset[str]) -> list[Route]:
        """One for each stage of this rank."""
        key = id(flow), outputs, joinable  # a route keeps its flow, so the id stays that one's
        if key not in self._routes:
            stages = self.policy.partition.of_calls(flow)
            self.policy.refuse_decisions(flow)
            self._refuse_released(flow, stages, outputs)
            crossing = boundaries(flow, stages, len(self.policy.placement), outputs)
            routes = []
            for stage in self.policy.chunks:
                again = self.recompute.calls(flow, stages, stage, self.policy.units)
                here = (k for k, s in enumerate(stages) if s == stage)
                free = {k for k in here if k not in again and flow.calls[k].unit in joinable}
                joined = regions(flow, free, self.policy.longest, outputs)
                routes.append(Route.of(flow, stages, stage, crossing, outputs, again, joined))
            self._routes[key] = routes
        return self._routes[key]

    def _refuse_released(self, flow: Dataflow, stages: Sequence[int], outputs: Wanted) -> None:
        """Glue may take another way with another batch, and read a parameter that its stage has released."""
        uses = [(call.reads, stage) for call, stage in zip(flow.calls, stages, strict=True)]
        for use, stage in [*uses, (flow.needed(outputs), len(self.policy.placement) - 1)]:
            released = sorted(use.parameters - self.policy.held[self.policy.placement[stage]])
            if released:
                raise TraceError(
                    f"with this batch the model reads {released[0]} outside of its unit, on stage {stage}, which does "
                    "not hold it: pass dry_run_input=<a batch of this kind> to PipelinePlugin"
                )

    def _total(self, count: int, rule: LossRule) -> int:
        """The sum of a count over the replicas."""
        if self.replicas is None:
            return count
        table = gather(torch.tensor([count, zlib.crc32(repr(rule).encode())]), self.replicas)
        if len(set(table[:, 1].tolist())) > 1:
            raise BatchError(
                f"this replica's loss is made of its microbatches' by {rule}, that of others by another rule: give all "
                "replicas batches of one kind, with labels or without"
            )
        return int(table[:, 0].sum())

    def _rule(self, flow: Dataflow, batches: Sequence[Batch], criterion: Criterion | None) -> LossRule:
        alone = len(batches) == 1 and self.replicas is None
        if alone or flow.loss is None:
            return LossRule(summed=alone)
        key = criterion, self.model.training, batches[0].paths, batches[0].others
        if key not in self._rules:
            sample = batches[0].to(self.policy.replay.device)
            self._rules[key] = find_loss_rule(self.model, flow, sample, criterion)
        return self._rules[key]
