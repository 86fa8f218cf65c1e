"""Microbatches: each with its route through this rank's stages, and its share in the batch's loss.

A trace takes longer than a step of a small model, so traces are cached: a batch of other sizes only needs arithmetic.
The model is traced again if the batch's structure, a flag of the model or an answer that glue gets from the batch
differs.
"""

import zlib
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, key_of
from pipeshard.distributed.collectives import gather, gather_objects
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.loss import EACH, SUM, LossRule, LossRules, ProvenRule, prove_loss_rule
from pipeshard.engine.loss_sizes import Sizes
from pipeshard.engine.loss_state import LossState, of_batch
from pipeshard.engine.loss_trial import Glue
from pipeshard.engine.reader import digest
from pipeshard.engine.sliced import SlicedMicrobatch, SlicedRoutes
from pipeshard.engine.stage import Microbatch
from pipeshard.engine.ways import (
    ROUNDS,
    Lent,
    Said,
    Way,
    compare,
    fingerprint,
    joined,
    lend,
    lines_of,
    number_of,
    plain,
    valued,
)
from pipeshard.errors import BatchError, ConfigurationError, TraceError, summary
from pipeshard.graph.dataflow import Dataflow, Wanted
from pipeshard.graph.kinds import modes
from pipeshard.graph.shapes import is_trainable
from pipeshard.graph.snapshot import Flags
from pipeshard.graph.trace import trace
from pipeshard.hf import is_of_transformers
from pipeshard.slices.cut import sequence_of
from pipeshard.split.partition import boundaries
from pipeshard.split.policy import Policy, refuse_hooks, refuse_unsplittable
from pipeshard.split.route import Recompute, Route

MOST_FLOWS = 128  # that are kept: batches may hold something that differs in each, and that a trace depends on
NUMBERS = 4096  # of ways that are kept: lengths of batches


class FoundWays(NamedTuple):
    """The ways of the microbatches of several batches, in one state of the model and the criterion."""

    state: tuple[int, int]
    ways: list[list[Way]]


class RouteCache:
    """The routes of all batches so far, and the rules of their losses."""

    def __init__(
        self,
        policy: Policy,
        recompute: Recompute,
        replicas: dist.ProcessGroup | None = None,
        weight: float | None = None,
    ) -> None:
        self.model, self.policy, self.recompute = policy.model, policy, recompute
        self.replicas = replicas if weight is None else None  # which have a part of one batch each
        self.weight = weight  # or: of this replica's loss in that of all, which have batches of their own
        self.flags, self.rules = Flags(policy.model), LossRules()
        self.flags_of: dict[Hashable, Flags] = {}  # those of criteria
        self.loss_state = LossState(policy.model)
        self._beside: tuple[Hashable, ...] | None = None  # what it has seen last
        self._is_of_transformers = is_of_transformers(policy.model)
        self.is_last = policy.stage == policy.placement[-1]  # the loss is made on this rank
        self._flows: dict[Any, list[Dataflow]] = {}
        self._watched: frozenset[str] = frozenset()
        self._confirmed: dict[int, Dataflow] = {}
        self._seen: dict[int, Dataflow] = {}  # of which outputs were looked at
        self._routes: dict[tuple[int, Wanted], list[Route]] = {}
        self._sliced: dict[tuple[int, Wanted], SlicedRoutes] = {}
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}  # of ways, by the id of the Dataflow and the sizes
        self._prints: dict[int, str] = {}  # of Dataflows, by their ids
        self._lent: Lent = {}  # while ranks trace once more
        self._frozen: dict[frozenset[str], int] = {}  # the sets of frozen parameters so far, numbered
        self.look_at_trained()

    def remember(self, flow: Dataflow, criterion: Criterion | None) -> None:
        """Use an existing Dataflow, with the model in its current mode."""
        self.look(criterion)
        if not flow.watched:
            self._flows.setdefault(self._mode(criterion), []).append(flow)
        self._watched |= flow.watched

    def look_at_trained(self) -> None:
        """Check again which parameters are frozen, on this stage or on another one."""
        frozen = frozenset(name for name, parameter in self.model.named_parameters() if not is_trainable(parameter))
        self._training = self._frozen.setdefault(frozen, len(self._frozen))

    def look(self, criterion: Criterion | None) -> None:
        """Record the current state of the model and the criterion, and the values that the loss depends on."""
        self._state = self.flags.number(), 0
        is_known = criterion is None and self._is_of_transformers
        self._beside = None if is_known else self.loss_state.look()
        if criterion is not None:
            if len(self.flags_of) >= MOST_FLOWS:
                self.flags_of.clear()
            of_criterion = self.flags_of.setdefault(key_of(criterion), Flags(self.model, criterion))
            self._state = self._state[0], of_criterion.number()

    def stepped(self) -> None:
        """A step has run since `plan`."""
        for flags in (self.flags, *self.flags_of.values()):
            flags.stepped()
        self.loss_state.stepped()

    def plan_each(
        self,
        cut: Sequence[Sequence[Batch]],
        found: FoundWays | None,
        criterion: Criterion | None,
        outputs: Wanted,
        exact_loss: bool,
        weight: float = 1.0,
    ) -> list[list[Microbatch]]:
        """`plan` for several batches in a row, whose losses are summed, each times `weight`; `found` is the result of
        `find` for them."""
        weight *= 1.0 if self.weight is None else self.weight
        if found is None:
            self.look(criterion)
        else:
            self._state = found.state  # nothing of the user's has run since
        known = found.ways if found is not None else [None] * len(cut)
        plans = [self.plan(batches, criterion, outputs, exact_loss, ways) for batches, ways in zip(cut, known)]
        stages = [[microbatch for plan in plans for microbatch in plan[k]] for k in range(len(plans[0]))]
        return [[replace(part, share=part.share * weight) for part in parts] for parts in stages]

    def find(self, cut: Sequence[Sequence[Batch]], criterion: Criterion | None, looks: bool = True) -> FoundWays:
        """The ways of microbatches, in the current state of the model and the criterion; or in that of the last `look`,
        if this call does not `look` again."""
        if looks:
            self.look(criterion)
        return FoundWays(self._state, [[self._find(batch, criterion) for batch in batches] for batches in cut])

    def number(self, found: FoundWays) -> int:
        """The same number on all ranks with equal ways."""
        return joined([self._number(way) for ways in found.ways for way in ways])

    def _number(self, way: Way) -> int:
        key = id(way[0]), way[1]
        if key not in self._numbers:
            if len(self._numbers) >= NUMBERS:
                self._numbers.clear()
            if key[0] not in self._prints:
                self._prints[key[0]] = fingerprint(way[0])
            self._numbers[key] = number_of(self._prints[key[0]], way[1])
        return self._numbers[key]

    def find_alike(
        self,
        cut: Sequence[Sequence[Batch]],
        criterion: Criterion | None,
        outputs: Wanted,
        grid: Grid,
        found: FoundWays | None,
    ) -> FoundWays | None:
        """The ways of microbatches for which ranks have found different ones, or none. Call it on all ranks.

        The rank that holds the deciding values sends them, and the batches are traced once more. Raises TraceError on
        all ranks if the values that cross a cut, or a number that a unit returns, still differ.
        """
        size = grid.size // grid.dp_size
        ranks = range(grid.replica * size, grid.replica * size + size)
        failure, asked = "", set[str]()
        for _ in range(ROUNDS):
            new = valued([way for ways in found.ways for way in ways]) if found is not None else set()
            numbers = [self.number(found) if found is not None else -1]
            told = gather_objects((numbers, sorted(new - asked)), grid.world)
            wanted = {unit for _, names in told for unit in names}
            alike = all(told[rank][0] == told[ranks[0]][0] for rank in ranks)
            if not any(gather_objects(not alike, grid.world)) or not wanted:
                break
            asked |= wanted
            self._forget(found)
            self._lent = lend(self.policy.held_units, sorted(asked), grid.world, ranks)
            try:
                found, failure = self.find(cut, criterion), ""
            except Exception as error:  # the model's own
                found, failure = None, summary(error)
            finally:
                self._lent = {}
        said = self._said(found, outputs, failure)
        known = compare(said, grid.world, ranks, grid.named)
        assert found is not None
        for way, number in zip([way for ways in found.ways for way in ways], known, strict=True):
            self._numbers[id(way[0]), way[1]] = number
        return found

    def _said(self, found: FoundWays | None, outputs: Wanted, failure: str) -> Said:
        """The description of these ways that is sent to the other ranks."""
        ways = [] if found is None else [way for of_batch in found.ways for way in of_batch]
        if found is None:
            return Said([], [], failure or "a batch could not be traced")
        try:
            lines = [plain(lines_of(way, self.policy, outputs)) for way in ways]
        except TraceError as error:
            return Said([], [], str(error))
        return Said(list(map(self._number, ways)), lines, "")

    def _forget(self, found: FoundWays | None) -> None:
        """Discard these ways, so that their microbatches are traced again."""
        gone = {id(flow) for ways in found.ways for flow, _ in ways} if found is not None else set()
        for flows in self._flows.values():
            flows[:] = [flow for flow in flows if id(flow) not in gone]
        self._routes = {key: routes for key, routes in self._routes.items() if key[0] not in gone}
        self._sliced = {key: routes for key, routes in self._sliced.items() if key[0] not in gone}
        self._prints = {key: of_flow for key, of_flow in self._prints.items() if key not in gone}
        self._numbers = {key: number for key, number in self._numbers.items() if key[0] not in gone}

    def plan(
        self,
        batches: Sequence[Batch],
        criterion: Criterion | None,
        outputs: Wanted,
        exact_loss: bool,
        ways: Sequence[Way] | None = None,
    ) -> list[list[Microbatch]]:
        """For each stage of this rank, the microbatches with their routes; call `stepped()` when they have
        run.

        With `exact_loss` their shares give the whole batch's loss, of which all `replicas` have a part; call `prove`
        first if it is `unproven`. Without it they give the mean of the microbatches' losses.
        """
        if ways is None:
            self.look(criterion)
            ways = [self._find(batch, criterion) for batch in batches]
        rule = self._rule(batches, criterion) if exact_loss else EACH
        shares = [1.0] * len(batches)  # of no use on other stages than the last one
        if self.is_last:
            counts = self._counts(batches, ways, criterion) if rule.counted else ()
            shares = rule.shares(batches, lambda count: self._total(count, rule), counts)
        routes = [self.routes(flow, outputs) for flow, _ in ways]
        return [
            [
                Microbatch(route.feed(batch, self.policy.replay.device), route, deltas, share, rule.counted)
                for batch, route, (_, deltas), share in zip(batches, of_stage, ways, shares, strict=True)
            ]
            for of_stage in zip(*routes, strict=True)
        ]

    def on_stage(self, batch: Batch, criterion: Criterion | None, outputs: Wanted, place: int) -> Microbatch:
        """`batch` as one microbatch of this rank's stage number `place`, with its own loss."""
        flow, deltas = self._find(batch, criterion)
        route = self.routes(flow, outputs)[place]
        return Microbatch(route.feed(batch, self.policy.replay.device), route, deltas, 1.0)

    def _find(self, batch: Batch, criterion: Criterion | None) -> Way:
        mode = self._mode(criterion, batch)
        for flow in self._flows.get(mode, ()):
            deltas = flow.axes.deltas(batch)
            if deltas is not None and _answers(flow, deltas, batch):
                return flow, deltas
        way = self._trace(batch, criterion)
        if sum(map(len, self._flows.values())) >= MOST_FLOWS:
            self._flows.clear()
            self._routes.clear()
            self._sliced.clear()
            self._numbers.clear()
            self._prints.clear()
        self._flows.setdefault(mode, []).append(way[0])
        self._watched |= way[0].watched
        return way

    def _mode(self, criterion: Criterion | None, batch: Batch | None = None) -> tuple[Any, ...]:
        """What a Dataflow depends on, except the sizes of a batch and the answers that glue gets from it."""
        paths = self._watched.intersection(batch.paths) if batch is not None else ()
        watched = digest(batch, paths) if batch is not None and paths else 0
        entry = batch.entry if batch is not None else ""
        return key_of(criterion), self._state, self._training, modes()[1:], watched, entry

    def _trace(self, batch: Batch, criterion: Criterion | None) -> Way:
        flow = self._traced(batch, criterion, not self._watched.isdisjoint(batch.paths))
        deltas = flow.axes.deltas(batch)
        if deltas is None or not _answers(flow, deltas, batch):  # good for these sizes, or these very values, alone
            flow = self._traced(batch, criterion, True)
            deltas = flow.axes.deltas(batch)
        assert deltas is not None
        return flow, deltas

    def _traced(self, batch: Batch, criterion: Criterion | None, exact: bool) -> Dataflow:
        return trace(self.model, batch, criterion, exact, device=self.policy.replay.device, lent=self._lent)

    def refuse_other_way(
        self, batch: Batch, flow: Dataflow, criterion: Criterion | None, world: dist.ProcessGroup
    ) -> None:
        """A NaN loss may come from results that were not sent. All ranks trace again; raises TraceError on all of them
        if one reads other results than its Dataflow says. Checked once per Dataflow."""
        if id(flow) in self._confirmed:
            return
        now, then = (
            [*((call.unit, call.reads.values) for call in one.calls), one.loss and one.loss.values]
            for one in (self._trace(batch, criterion)[0], flow)
        )
        if any(gather_objects(True if now != then else None, world)):
            raise TraceError(
                f"the forward of {type(self.model).__name__} reads other results of its units than when it was traced, "
                "though nothing was seen to change that it depends on (does it count its forwards, or read an "
                "environment variable?): set what it goes by between steps, in attributes of the model, or in globals"
            )
        for known in (self._confirmed, self._seen):
            if len(known) > MOST_FLOWS:
                known.clear()
        self._confirmed[id(flow)] = flow

    def saw(self, flow: Dataflow) -> None:
        """Outputs of this Dataflow were checked."""
        self._seen[id(flow)] = flow

    def is_seen(self, flow: Dataflow) -> bool:
        return id(flow) in self._seen

    def routes(self, flow: Dataflow, outputs: Wanted) -> list[Route]:
        """The routes of such microbatches through the stages of this rank."""
        key = id(flow), outputs  # a route keeps its flow, so the id stays that one's
        if key not in self._routes:
            stages = self.policy.partition.of_calls(flow)
            refuse_unsplittable(self.model, flow, stages, self.policy.placement)
            self._refuse_released(flow, stages, outputs)
            refuse_hooks(flow, stages, len(self.policy.placement))
            crossing = boundaries(flow, stages, len(self.policy.placement), outputs)
            again = {s: self.recompute.calls(flow, stages, s, self.policy.units) for s in self.policy.chunks}
            self._routes[key] = [Route.of(flow, stages, s, crossing, outputs, again[s]) for s in self.policy.chunks]
        return self._routes[key]

    def sliced_routes(self, flow: Dataflow, outputs: Wanted) -> SlicedRoutes:
        """The routes of such microbatches if their slices pass the stages, and the head is a stage after them."""
        key = id(flow), outputs
        if key not in self._sliced:
            ordinary = self.routes(flow, outputs)  # which refuses what cannot be split
            stages, head = self.policy.partition.of_calls(flow), len(self.policy.placement)
            crossing = boundaries(flow, stages, head + 1, outputs)
            again = [{k for k, step in enumerate(route.steps) if step.again} for route in ordinary]
            chunks = zip(self.policy.chunks, again, strict=True)
            of_chunks = [Route.of(flow, stages, s, crossing, outputs, recomputed) for s, recomputed in chunks]
            self._sliced[key] = SlicedRoutes(of_chunks, Route.of(flow, stages, head, crossing, outputs))
        return self._sliced[key]

    def slice_each(
        self,
        cut: Sequence[Sequence[Batch]],
        slices: Sequence[Sequence[Batch]],
        found: FoundWays | None,
        planned: Sequence[Sequence[Microbatch]],
        criterion: Criterion | None,
        outputs: Wanted,
    ) -> list[list[SlicedMicrobatch]]:
        """For each stage of this rank, the microbatches that `plan_each` has returned, cut into `slices`; `found` is
        the result of `find` for both."""
        known = found.ways[len(cut) :] if found is not None else []
        ways = known or [[self._find(part, criterion) for part in parts] for parts in slices]
        batches = [batch for of_batch in cut for batch in of_batch]
        device = self.policy.replay.device
        made: list[list[SlicedMicrobatch]] = []
        for place, microbatches in enumerate(planned):
            made.append([])
            for whole, batch, parts, of_parts in zip(microbatches, batches, slices, ways, strict=True):
                sizes = [sequence_of(part) for part in parts]
                flows = [*(flow for flow, _ in of_parts), whole.route.flow]
                routes = [self.sliced_routes(flow, outputs) for flow in flows]
                made[-1].append(SlicedMicrobatch.of(whole, batch, sizes, of_parts, routes, place, device))
        return made

    def _refuse_released(self, flow: Dataflow, stages: Sequence[int], outputs: Wanted) -> None:
        """Glue may take a different path with another batch, and read a parameter that its stage has released."""
        uses = [(call.reads, stage) for call, stage in zip(flow.calls, stages, strict=True)]
        for use, stage in [*uses, (flow.needed(outputs), len(self.policy.placement) - 1)]:
            released = sorted(use.parameters - self.policy.ownership.held[self.policy.placement[stage]])
            if released:
                raise TraceError(
                    f"with this batch the model reads {released[0]} outside of its unit, on stage {stage}, which does "
                    "not hold it: pass dry_run_input=<a batch of this kind> to PipelinePlugin"
                )

    def _unproven(self, batch: Batch, parts: Sequence[Batch], criterion: Criterion | None) -> bool:
        """Whether the rule for the loss of this batch is not known yet."""
        if len(parts) == 1 and self.replicas is None:
            return False
        return not self.rules.covers(self._kind(batch, criterion), batch, self._sizes(batch, _largest(parts)))

    def any_unproven(
        self, batches: Sequence[Batch], cut: Sequence[Sequence[Batch]], criterion: Criterion | None
    ) -> bool:
        """Whether the rule is unknown for one of these batches, in the state of the last `look`."""
        return any(self._unproven(batch, parts, criterion) for batch, parts in zip(batches, cut, strict=True))

    def own(self, part: Tensor | None, loss: Tensor | None) -> Tensor | None:
        """The loss of this replica's outputs, with its `part` in the step's loss."""
        return loss if self.weight is None or part is None else part / self.weight

    def prove(
        self,
        batches: Sequence[Batch],
        cut: Sequence[Sequence[Batch]],
        criterion: Criterion | None,
        world: dist.ProcessGroup,
    ) -> None:
        """Find the rule on all ranks at the same time; a rank may know it for its own batches.

        Raises ConfigurationError on all of them if one of them finds none.
        """
        failure: Exception | None = None
        try:
            for batch, parts in zip(batches, cut, strict=True):
                self.learn(batch, batch.split(microbatch_size=_largest(parts))[0], criterion)
        except Exception as error:  # of the model too: the other ranks have to learn of it
            failure = error
        reasons = gather_objects(None if failure is None else summary(failure), world)
        if reason := next(filter(None, reasons), None):
            for batch in batches:
                self.rules.forget(self._kind(batch, criterion))
            raise failure or ConfigurationError(reason.removeprefix("ConfigurationError: "))

    def learn(self, batch: Batch, first: Batch, criterion: Criterion | None) -> None:
        """Find the rule on this rank only."""
        kind, sizes = self._kind(batch, criterion), self._sizes(batch, first.rows)
        if self.rules.covers(kind, batch, sizes):  # another rank, or another batch, is what is new
            return
        (flow, _), proven = self._find(first, criterion), ProvenRule(SUM)
        if self.is_last and flow.loss is not None:
            known = self.rules.known(kind, batch)
            batch = batch.to(self.policy.replay.device)
            proven = prove_loss_rule(self.model, flow, batch, criterion, sizes, known)
        self.rules.add(kind, proven, flow, batch)

    def _sizes(self, batch: Batch, part: int) -> Sizes:
        """Those of the batch and of a microbatch of this many samples."""
        replicas = 1 if self.replicas is None else self.replicas.size()
        return Sizes.of(batch, -(-batch.rows // part), replicas)

    def _rule(self, batches: Sequence[Batch], criterion: Criterion | None) -> LossRule:
        if len(batches) == 1 and self.replicas is None:
            return SUM
        rule = self.rules.get(self._kind(batches[0], criterion))
        if rule is None:
            raise TraceError(
                f"the forward of {type(self.model).__name__} changed the model when it ran on a few samples, so it is "
                "unknown how its loss depends on those of microbatches. Keep what forward changes in Python within the "
                "model or the criterion"
            )
        return rule

    def _kind(self, batch: Batch, criterion: Criterion | None) -> Any:
        """The properties of batches whose losses follow one rule. Numbers in a batch that transformers' own losses read
        only count items."""
        others = tuple(other for other in batch.others if not other[1].startswith(("int ", "float ")))
        beside = () if self._beside is None else (self._beside, of_batch(batch))
        return (key_of(criterion), self._state, batch.paths, others), beside

    def _counts(self, batches: Sequence[Batch], ways: Sequence[Way], criterion: Criterion | None) -> list[float]:
        """The number that the criterion divides its sum by in each microbatch, needed before the first backward."""
        glue = Glue(self.model, criterion, self.policy.replay.device)
        return [glue.count(batch.to(glue.device), *way) for batch, way in zip(batches, ways, strict=True)]

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


def _largest(parts: Sequence[Batch]) -> int:
    return max(part.rows for part in parts)


def _answers(flow: Dataflow, deltas: Sequence[int], batch: Batch) -> bool:
    """Whether glue gets the same answers from this batch, whose sizes differ by `deltas`, as in its trace."""
    return all(question.holds(batch.tensors, deltas) for question in flow.questions)
