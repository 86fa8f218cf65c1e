"""Loss shares: the factor of each microbatch's loss in the batch's loss, computed with proven rules."""

import math
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, key_of
from pipeshard.distributed.collectives import gather, gather_objects
from pipeshard.engine.loss import SUM, LossRule, LossRules, ProvenRule
from pipeshard.engine.loss_search import prove_loss_rule
from pipeshard.engine.loss_sizes import Sizes
from pipeshard.engine.loss_state import LossState, of_batch
from pipeshard.engine.loss_trial import Glue
from pipeshard.engine.ways import Way
from pipeshard.errors import BatchError, ConfigurationError, TraceError, summary
from pipeshard.graph.dataflow import Dataflow
from pipeshard.hf import has_known_loss
from pipeshard.split.policy import Policy


class LossShares:
    """Finds and applies the rules that combine microbatch losses into a batch's loss. `find(batch, criterion)` returns
    the Way of a microbatch. `is_unchanged()` returns whether all Python values of the model and the criterion are the
    same as when their current state was first recorded.

    If `weight` is None, each replica in the process group `replicas` has a part of one batch (`replicas` is None for a
    single replica). Otherwise each replica has its own batch, and `weight` is the factor of this batch's loss in the
    sum over replicas.
    """

    def __init__(
        self,
        policy: Policy,
        find: Callable[[Batch, Criterion | None], Way],
        is_unchanged: Callable[[], bool],
        replicas: dist.ProcessGroup | None,
        weight: float | None,
    ) -> None:
        self.model, self.device, self.find = policy.model, policy.replay.device, find
        self.replicas, self.weight, self.is_unchanged = replicas, weight, is_unchanged
        self.is_last = policy.stage == policy.placement[-1]  # whether this rank computes the loss
        self.rules, self.changing = LossRules(), LossState(policy.model)
        self.state: tuple[int, int] = 0, 0  # the number of the model's state, and of the criterion's state
        self._is_known = has_known_loss(policy.model)
        self._seen: tuple[Hashable, ...] | None = None  # the kinds of values that the loss depends on
        self._counted: WeakKeyDictionary[Dataflow, bool] = WeakKeyDictionary()  # whether a flow's first count was right

    def look(self, criterion: Criterion | None, state: tuple[int, int]) -> None:
        """Record the state of the model and the criterion, and the values that the loss depends on."""
        if state[0] != self.state[0]:
            self._is_known = has_known_loss(self.model)
        self.state = state
        self._seen = None if criterion is None and self._is_known else self.changing.look()

    def stepped(self) -> None:
        """Record that a step has run since `look`."""
        self.changing.stepped()

    def of(
        self, batches: Sequence[Batch], ways: Sequence[Way], criterion: Criterion | None, rule: LossRule
    ) -> list[float]:
        """The share of each microbatch of one batch. On ranks without the last stage, which do not need shares, each
        share is 1.0. If a criterion computes its sum as a mean times the count, the sum of a microbatch without valid
        labels is NaN. The share of such a microbatch is 0."""
        if not self.is_last:
            return [1.0] * len(batches)
        if not rule.counted:
            return rule.shares(batches, lambda count: self._total(count, rule))
        counts = self._counts(batches, ways, criterion)
        shares = rule.shares(batches, lambda count: self._total(count, rule), [count for count, _ in counts])
        return [
            0.0 if is_nan and not math.isnan(share) else share
            for share, (_, is_nan) in zip(shares, counts, strict=True)
        ]

    def any_unproven(
        self, batches: Sequence[Batch], cut: Sequence[Sequence[Batch]], criterion: Criterion | None
    ) -> bool:
        """Whether the loss of one of these batches requires a rule that is not proven yet for the state at the last
        `look`."""
        return not all(
            (len(parts) == 1 and self.replicas is None)
            or self.rules.covers(self._kind(batch, criterion), batch, self._sizes(batch, _largest(parts)))
            for batch, parts in zip(batches, cut, strict=True)
        )

    def own(self, part: Tensor | None, loss: Tensor | None) -> Tensor | None:
        """The loss of this replica's own batch, computed from its `part` of the step's loss. If the replicas share one
        batch, returns the step's `loss`."""
        return loss if self.weight is None or part is None else part / self.weight

    def prove(
        self,
        batches: Sequence[Batch],
        cut: Sequence[Sequence[Batch]],
        criterion: Criterion | None,
        world: dist.ProcessGroup,
    ) -> None:
        """Find the rules for these batches. Call it on all ranks, including ranks that already have the rules for their
        own batches.

        If a rank fails, it raises its own error, and the other ranks raise ConfigurationError.
        """
        failure: Exception | None = None
        try:
            for batch, parts in zip(batches, cut, strict=True):
                self.learn(batch, batch.split(microbatch_size=_largest(parts))[0], criterion)
        except Exception as error:  # of any type: the model may raise it, and every rank must then fail
            failure = error
        reasons = gather_objects(None if failure is None else summary(failure), world)
        if reason := next(filter(None, reasons), None):
            for batch in batches:
                self.rules.forget(self._kind(batch, criterion))
            raise failure or ConfigurationError(reason.removeprefix("ConfigurationError: "))

    def learn(self, batch: Batch, first: Batch, criterion: Criterion | None) -> None:
        """Find the rule for `batch`, unless the rule is already proven. Does not communicate with other ranks. `first`
        is a microbatch of `batch`."""
        kind, sizes = self._kind(batch, criterion), self._sizes(batch, first.rows)
        if self.rules.covers(kind, batch, sizes):  # only another rank or another batch lacks the rule
            return
        (flow, _), proven = self.find(first, criterion), ProvenRule(SUM)
        if self.is_last and flow.loss is not None:
            known = self.rules.known(kind, batch)
            batch = batch.to(self.device)
            proven = prove_loss_rule(self.model, flow, batch, criterion, sizes, known)
        self.rules.add(kind, proven, flow, batch)

    def _sizes(self, batch: Batch, part: int) -> Sizes:
        """The sizes of the batch over all replicas, with microbatches of `part` samples."""
        replicas = 1 if self.replicas is None else self.replicas.size()
        return Sizes.of(batch, -(-batch.rows // part), replicas)

    def rule(self, batches: Sequence[Batch], criterion: Criterion | None) -> LossRule:
        if len(batches) == 1 and self.replicas is None:
            return SUM
        rule = self.rules.get(self._kind(batches[0], criterion))
        if rule is None:
            raise TraceError(
                f"pipeshard ran the forward of {type(self.model).__name__} on a few samples to find how the microbatch "
                "losses combine, but the run changed state that pipeshard cannot restore. If the forward or the "
                "criterion changes Python state, keep this state in attributes of the model or the criterion"
            )
        return rule

    def _kind(self, batch: Batch, criterion: Criterion | None) -> Any:
        """The kind of a batch. The losses of all batches of one kind follow the same rule. The values of Python numbers
        in a batch are ignored for transformers' own losses, which use such numbers only to count items."""
        others = tuple(other for other in batch.others if not other[1].startswith(("int ", "float ")))
        beside = () if self._seen is None else (self._seen, of_batch(batch))
        return key_of(criterion), self.state, batch.paths, others, beside

    def _counts(
        self, batches: Sequence[Batch], ways: Sequence[Way], criterion: Criterion | None
    ) -> list[tuple[float, bool]]:
        """The count that the criterion returns for each microbatch, and whether the count is 0 and the sum is NaN. The
        counts are computed before the first backward, which needs their sum. If the trace recorded how the count
        depends on the batch, and no Python value has changed since, the count is computed from the batch. Otherwise,
        the criterion computes the count from placeholder unit results. The first count of each trace is computed
        both ways, and the results are compared."""
        glue: Glue | None = None
        counts = []
        is_unchanged = any(flow.count is not None for flow, _ in ways) and self.is_unchanged()
        for batch, (flow, deltas) in zip(batches, ways, strict=True):
            found = self._count_of_batch(batch, flow, deltas) if is_unchanged else None
            if found is None or flow not in self._counted:
                glue = glue or Glue(self.model, criterion, self.device)
                count, is_nan = glue.count(batch.to(glue.device), flow, deltas)
                counts.append((count, is_nan))
                if found is not None:
                    self._counted[flow] = found == count
            else:
                counts.append((found, False))
        return counts

    def _count_of_batch(self, batch: Batch, flow: Dataflow, deltas: Sequence[int]) -> float | None:
        """The criterion's count, computed from the batch alone. Returns None if the count is 0, if the trace did not
        record how to compute the count, if the recorded operators cannot run on this batch, or if the first count was
        wrong."""
        if flow.count is None or not self._counted.get(flow, True):
            return None
        can_be_asked, count = flow.count.ask(batch.tensors, deltas)
        return float(count) or None if can_be_asked else None

    def _total(self, count: float, rule: LossRule) -> float:
        """The sum of a count over the replicas. Raises BatchError if the replicas do not all use the same rule."""
        if self.replicas is None:
            return count
        code = zlib.crc32(repr(rule).encode())
        table = gather(torch.tensor([count, code], dtype=torch.float64), self.replicas)
        if len(set(table[:, 1].tolist())) > 1:
            raise BatchError(
                f"this replica combines its microbatch losses with {rule}, but another replica uses a different rule: "
                "pass batches of the same kind to all replicas (for example, all with labels)"
            )
        return float(table[:, 0].sum())


def _largest(parts: Sequence[Batch]) -> int:
    return max(part.rows for part in parts)
