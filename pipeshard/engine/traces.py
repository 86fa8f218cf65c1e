"""Traces: caches the traces of all batches so far, and plans the microbatches of a step.

A trace takes longer than a step of a small model, so traces are cached. For a batch whose sizes differ from the traced
sizes, shapes are computed from a cached trace. The model is traced again if the batch has a new structure, if a flag of
the model has changed, or if a glue branch that depends on values of the batch has a new outcome.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch import Tensor

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, key_of
from pipeshard.distributed.agreement import hash_of
from pipeshard.distributed.collectives import gather_objects
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.loss import EACH
from pipeshard.engine.loss_shares import LossShares
from pipeshard.engine.reader import digest
from pipeshard.engine.routes import Routes
from pipeshard.engine.sliced import SlicedMicrobatch
from pipeshard.engine.stage import Microbatch
from pipeshard.engine.ways import ROUNDS, Lent, Said, Way, compare, fingerprint, lend, lines_of
from pipeshard.errors import TraceError, summary
from pipeshard.graph.dataflow import Dataflow, Reads, Wanted
from pipeshard.graph.flags import Flags
from pipeshard.graph.kinds import modes
from pipeshard.graph.lone import Lone
from pipeshard.graph.places import HOOKS, format_path
from pipeshard.graph.rng import no_draw
from pipeshard.graph.shapes import is_trainable
from pipeshard.graph.trace import trace
from pipeshard.hf import is_of_transformers
from pipeshard.slices.cut import sequence_of
from pipeshard.split.policy import Policy
from pipeshard.split.route import Recompute

logger = logging.getLogger("pipeshard")

MOST_CRITERIA = 32  # at most this many are cached, since a loop may create one in each step
MOST_FLOWS = 128  # at most this many are cached, since traces may depend on values that differ in each batch
MOST_DOUBTS = 64  # at most this many microbatches with a NaN loss confirm a Dataflow whose glue uses random numbers
NUMBERS = 4096  # at most this many numbers of ways (one for each size of a batch) are cached for a Dataflow

CHANGED = (
    "%s changes in each step (most recently, %s). A change may decide which operations run, so after each change, "
    "pipeshard traces the model and verifies the loss, which may take longer than a step. If a number that changes "
    "in each step is a factor, store it %s. If it selects a branch, store it as a bool"
)
HOOKED = (
    "%s has a different hook in each step (most recently, in %s), so pipeshard traces the model and verifies the loss "
    "in each step, which may take longer than a step. Register the hook once, or the same function in each step: a new "
    "function is the same hook only if the values in its closure are the same objects"
)
NEW = (
    "the loop has used more than %s criteria. For each new criterion, pipeshard traces the model and verifies the "
    "loss, which may take longer than a step. Create one criterion for all steps: an object with a method "
    "__call__. Store a changing number as a float attribute of this object, and pass tensors in the batch, under keys "
    "with the prefix 'criterion.'"
)


class FoundWays(NamedTuple):
    """The ways of the microbatches of several batches, in one state of the model and the criterion."""

    state: tuple[int, int]
    ways: list[list[Way]]

    @property
    def all(self) -> list[Way]:
        return [way for of_batch in self.ways for way in of_batch]


class Doubt(NamedTuple):
    """A microbatch whose forward may not have taken the way of `flow`. `draw` seeds the random numbers of the
    microbatch's glue, as for a trace."""

    batch: Batch
    flow: Dataflow
    draw: Callable[[int], object]


class Traces:
    """For each kind of batch, caches a Dataflow, the `routes` of the Dataflow through this rank's stages, and the loss
    shares of the microbatches (`losses`). `seen` contains the Dataflows whose outputs were checked."""

    def __init__(
        self,
        policy: Policy,
        recompute: Recompute,
        replicas: dist.ProcessGroup | None = None,
        weight: float | None = None,
    ) -> None:
        self.model, self.policy = policy.model, policy
        self.routes = Routes(policy, recompute)
        self.losses = LossShares(policy, self._find, self._is_unchanged, replicas if weight is None else None, weight)
        self.flags = Flags(policy.model)
        self.flags_of: dict[Hashable, Flags] = {}  # the Flags of criteria, by key
        self._flows: dict[Any, list[Dataflow]] = {}
        self._watched: frozenset[str] = frozenset()
        # The number of microbatches that have confirmed a Dataflow, by training (True or False) and by size.
        self._confirmed: WeakKeyDictionary[Dataflow, Counter[tuple[bool, tuple[int, ...]]]] = WeakKeyDictionary()
        self._has_warned = False
        self.seen: WeakSet[Dataflow] = WeakSet()
        self._numbers: WeakKeyDictionary[Dataflow, dict[tuple[int, ...], int]] = WeakKeyDictionary()  # by deltas
        self._prints: WeakKeyDictionary[Dataflow, str] = WeakKeyDictionary()  # fingerprints
        self._lent: Lent = {}  # tensors of other ranks, while ranks trace again
        self._is_of_transformers = is_of_transformers(policy.model)
        self.look_at_trained()

    def remember(self, flow: Dataflow, criterion: Criterion | None, batch: Batch) -> None:
        """Cache an existing Dataflow of `batch` for the current state of the model and the criterion, unless the
        Dataflow also depends on values of the batch."""
        self.look(criterion)
        if not flow.watched:
            self._flows.setdefault(self._mode(criterion, batch), []).append(flow)
        self._watched |= flow.watched

    def look_at_trained(self) -> None:
        """Record which parameters are frozen now, on this stage and on other stages."""
        frozen = (name for name, parameter in self.model.named_parameters() if not is_trainable(parameter))
        self._training = hash_of(repr(sorted(frozen)))

    def look(self, criterion: Criterion | None) -> None:
        """Record the current state of the model and the criterion, and the values that the loss depends on."""
        self._state, self._looked = (self.flags.number(), 0), [self.flags]
        if criterion is not None:
            of_criterion = self._flags_of(criterion)
            self._state = self._state[0], of_criterion.number()
            self._looked.append(of_criterion)
            self._warn_of_states(of_criterion, "the criterion", "as a float")
        self._warn_of_states(self.flags, "the model", "in a buffer")
        self.losses.look(criterion, self._state)

    def _is_unchanged(self) -> bool:
        """Whether all Python values are unchanged since `look` recorded the state. Recipes of counts may contain
        such values."""
        return all(flags.is_unchanged for flags in self._looked)

    def _flags_of(self, criterion: Criterion) -> Flags:
        """Return the Flags of a criterion. If MOST_CRITERIA other criteria are cached, warn, and discard everything
        that is cached for these criteria."""
        key = key_of(criterion)
        if key not in self.flags_of:
            if len(self.flags_of) >= MOST_CRITERIA:
                self._warn(NEW, str(MOST_CRITERIA))
                self.flags_of.clear()
                self.losses.rules.clear()
                self._forget_flows()
            self.flags_of[key] = Flags(self.model, criterion)
        return self.flags_of[key]

    def _warn(self, text: str, *values: str) -> None:
        """Warn once, on the first rank."""
        if not self._has_warned and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning(text, *values)
        self._has_warned = True

    def _warn_of_states(self, flags: Flags, owner: str, remedy: str) -> None:
        """Warn if the model or the criterion changes in each step."""
        if not self._has_warned and flags.looks.is_restless and (place := flags.newest_change()):
            is_hook = place[-1].key in HOOKS
            self._warn(HOOKED if is_hook else CHANGED, owner, format_path(place), *(() if is_hook else (remedy,)))

    @property
    def foreign(self) -> dict[str, Tensor]:
        """The trainable tensors that the model's code reaches but that are not parameters of the model, by place."""
        return self.flags.foreign(self._state[0])

    def stepped(self) -> None:
        """Record that a step has run since `plan_each`."""
        for flags in (self.flags, *self.flags_of.values()):
            flags.stepped()
        self.losses.stepped()

    def plan_each(
        self,
        cut: Sequence[Sequence[Batch]],
        found: FoundWays | None,
        criterion: Criterion | None,
        outputs: Wanted,
        exact_loss: bool,
        weight: float = 1.0,
    ) -> list[list[Microbatch]]:
        """For each stage of this rank, plan the microbatches of several consecutive batches: their routes and loss
        shares. The batches' losses are multiplied by `weight` and summed. `found` is the result of `find` for these
        batches, or None to call `find` here. Call `stepped` after the microbatches have run."""
        weight *= self.losses.weight or 1.0
        found = found or self.find(cut, criterion)
        self._state = self.losses.state = found.state  # no user code has run since
        pairs = zip(cut, found.ways)  # ways of slices may follow
        plans = [self._plan(batches, criterion, outputs, exact_loss, ways) for batches, ways in pairs]
        stages = [[microbatch for plan in plans for microbatch in plan[k]] for k in range(len(plans[0]))]
        return [[replace(part, share=part.share * weight) for part in parts] for parts in stages]

    def find(self, cut: Sequence[Sequence[Batch]], criterion: Criterion | None, looks: bool = True) -> FoundWays:
        """Find the ways of microbatches in the current state of the model and the criterion. Without `looks`, use the
        state that the last `look` recorded."""
        if looks:
            self.look(criterion)
        return FoundWays(self._state, [[self._find(batch, criterion) for batch in batches] for batches in cut])

    def number(self, found: FoundWays) -> int:
        """Return a number that identifies these ways. Ranks with equal ways have the same number."""
        return hash_of(repr([*map(self._number, found.all)]))

    def _number(self, way: Way) -> int:
        flow, deltas = way
        known = self._numbers.setdefault(flow, {})
        if deltas not in known:
            if len(known) >= NUMBERS:
                known.clear()
            if flow not in self._prints:
                self._prints[flow] = fingerprint(flow)
            known[deltas] = hash_of(f"{self._prints[flow]} {deltas}")
        return known[deltas]

    def find_alike(
        self,
        cut: Sequence[Sequence[Batch]],
        criterion: Criterion | None,
        outputs: Wanted,
        grid: Grid,
        found: FoundWays | None,
    ) -> FoundWays | None:
        """Find the same ways on all ranks of a pipeline if the ranks have found different ways, or if a rank has found
        no ways (`found` is None). Call it on all ranks.

        Ranks send each other the values on which ways depend, and trace the batches again. Raises TraceError on all
        ranks if a trace fails on a rank, or if the values that cross a cut, or a number that a unit returns or stores
        in an attribute, still differ.
        """
        size = grid.size // grid.dp_size
        ranks = range(grid.replica * size, grid.replica * size + size)
        failure, asked = "", set[str]()
        if found is None:
            found, failure = self._tried(cut, criterion)
        for _ in range(ROUNDS):
            new = {unit for flow, _ in found.all for unit in flow.valued} if found is not None else set()
            number = self.number(found) if found is not None else -1
            told = gather_objects((number, sorted(new - asked)), grid.world)
            wanted = {unit for _, names in told for unit in names}
            alike = all(told[rank][0] == told[ranks[0]][0] for rank in ranks)
            if not any(gather_objects(not alike, grid.world)) or not wanted:
                break
            asked |= wanted
            self._forget(found)
            self._lent = lend(self.policy.held_units, sorted(asked), grid.world, ranks)
            found, failure = self._tried(cut, criterion)
        said = self._said(found, outputs, failure)
        known = compare(said, grid.world, ranks, grid.named)
        assert found is not None
        for (flow, deltas), number in zip(found.all, known, strict=True):
            self._numbers.setdefault(flow, {})[deltas] = number
        return found

    def _tried(self, cut: Sequence[Sequence[Batch]], criterion: Criterion | None) -> tuple[FoundWays | None, str]:
        """Return the ways of these batches and "", or None and the message of the error that the trace raised."""
        try:
            return self.find(cut, criterion), ""
        except Exception as error:  # of any type, since the user's model raises it
            return None, str(error) if isinstance(error, TraceError) else summary(error)
        finally:
            self._lent = {}

    def _said(self, found: FoundWays | None, outputs: Wanted, failure: str) -> Said:
        """Return this rank's report on these ways for the other ranks."""
        if found is None:
            return Said([], [], failure)
        try:
            lines = [lines_of(way, self.policy, outputs) for way in found.all]
        except TraceError as error:
            return Said([], [], str(error))
        return Said(list(map(self._number, found.all)), lines, "")

    def _forget(self, found: FoundWays | None) -> None:
        """Discard these ways, so that their microbatches are traced again."""
        gone = {id(flow) for flow, _ in found.all} if found is not None else set()
        for flows in self._flows.values():
            flows[:] = [flow for flow in flows if id(flow) not in gone]
        self.routes.forget(gone)

    def _plan(
        self,
        batches: Sequence[Batch],
        criterion: Criterion | None,
        outputs: Wanted,
        exact_loss: bool,
        ways: Sequence[Way],
    ) -> list[list[Microbatch]]:
        """Return the microbatches of one batch for each stage of this rank. With `exact_loss`, the sum of the
        microbatches' losses, each times its share, is the whole batch's loss over all replicas. Call `losses.prove`
        first if this loss is unproven. Without `exact_loss`, the sum is the mean of the microbatches' losses."""
        rule = self.losses.rule(batches, criterion) if exact_loss else EACH
        shares = self.losses.of(batches, ways, criterion, rule)
        routes = [self.routes.of(flow, outputs) for flow, _ in ways]
        return [
            [
                Microbatch(route.feed(batch, self.policy.replay.device), route, deltas, share, rule.counted)
                for batch, route, (_, deltas), share in zip(batches, of_stage, ways, shares, strict=True)
            ]
            for of_stage in zip(*routes, strict=True)
        ]

    def on_stage(self, batch: Batch, criterion: Criterion | None, outputs: Wanted, place: int) -> Microbatch:
        """Return `batch` as one microbatch, with a loss share of 1, on the stage at index `place` among this rank's
        stages."""
        flow, deltas = self._find(batch, criterion)
        route = self.routes.of(flow, outputs)[place]
        return Microbatch(route.feed(batch, self.policy.replay.device), route, deltas, 1.0)

    def _find(self, batch: Batch, criterion: Criterion | None) -> Way:
        mode = self._mode(criterion, batch)
        for flow in self._flows.get(mode, ()):
            if (deltas := flow.deltas(batch)) is not None:
                return flow, deltas
        way = self._trace(batch, criterion)
        self.routes.refuse_released(way[0])  # before a trial of the loss fails without these parameters' values
        if sum(map(len, self._flows.values())) >= MOST_FLOWS:
            self._forget_flows()
        self._flows.setdefault(mode, []).append(way[0])
        self._watched |= way[0].watched
        return way

    def _forget_flows(self) -> None:
        self._flows.clear()
        self.routes.clear()

    def _mode(self, criterion: Criterion | None, batch: Batch) -> tuple[Any, ...]:
        """The state on which a Dataflow depends, except the outcomes of glue branches that depend on the batch, and the
        sizes of the batch. Of lengths, it contains only the powers of two that they exceed: a model that is not
        transformers' own may depend on lengths far from those of an earlier trace."""
        paths = self._watched.intersection(batch.paths)
        watched = digest(batch, paths) if paths else 0
        lengths = () if self._is_of_transformers else _magnitudes(batch)
        return key_of(criterion), self._state, self._training, modes()[1:], watched, batch.entry, lengths

    def _trace(self, batch: Batch, criterion: Criterion | None) -> Way:
        flow = self._traced(batch, criterion, not self._watched.isdisjoint(batch.paths))
        deltas = flow.deltas(batch)
        if deltas is None:  # the trace is valid only for its own sizes or values
            flow = self._traced(batch, criterion, True)
            deltas = flow.axes.deltas(batch)
        assert deltas is not None
        return flow, deltas

    def _traced(
        self,
        batch: Batch,
        criterion: Criterion | None,
        exact: bool,
        grad: bool = True,
        draw: Callable[[int], object] = no_draw,
    ) -> Dataflow:
        device, lent = self.policy.replay.device, self._lent
        with Lone.of(len(set(self.policy.placement))):
            flow = trace(self.model, batch, criterion, exact, device=device, lent=lent, grad=grad, draw=draw)
        return flow if flow.count is None or self._is_unchanged() else flow.without_count()

    def refuse_other_way(
        self, doubts: Iterable[Doubt], criterion: Criterion | None, world: dist.ProcessGroup, train: bool
    ) -> None:
        """Trace microbatches again after a NaN loss, since results that were not sent may have caused the NaN. Without
        `train`, the traces run as under no_grad. Raises TraceError on all ranks if a new trace on any rank reads other
        unit results or parameters than before. The new traces run on whole microbatches, since the path may depend on
        their sizes. A Dataflow that was already confirmed, by a microbatch whose sizes are between the same powers of
        two, is not traced again, unless its glue uses random numbers, which differ in each microbatch. Call it on all
        ranks: replicas may have different Dataflows, and only some of them may be confirmed."""
        differs = False
        for batch, flow, draw in doubts:
            confirmed, key = self._confirmed.setdefault(flow, Counter()), (train, _magnitudes(batch))
            if differs or confirmed[key] >= (MOST_DOUBTS if flow.glue_random else 1):
                continue
            now = self._traced(batch, criterion, True, train, draw if flow.glue_random else no_draw)
            differs = _reads_more(now, flow)
            confirmed[key] += not differs
        if any(gather_objects(differs, world)):
            raise TraceError(
                f"the forward of {type(self.model).__name__} uses different unit outputs or parameters than in its "
                "trace, although pipeshard detected no change in the state that the forward depends on. Does the "
                "model branch at random (random.random() < p, torch.rand(()) < p) or on the batch's sizes "
                "(x.shape[1] > 512), count its forwards, read an environment variable, or branch on "
                "torch.is_grad_enabled()? Compute both results of a random branch, and select one with torch.where. "
                "Keep other state in attributes of the model (such as self.training) or in globals, and set it between "
                "steps. For a branch on sizes, set such an attribute before each step"
            )

    def slice_each(
        self,
        cut: Sequence[Sequence[Batch]],
        slices: Sequence[Sequence[Batch]],
        found: FoundWays | None,
        planned: Sequence[Sequence[Microbatch]],
        criterion: Criterion | None,
        outputs: Wanted,
    ) -> list[list[SlicedMicrobatch]]:
        """Split the `planned` microbatches of each stage of this rank into `slices`. `found` is the result of `find`
        for `cut` followed by `slices`, or None."""
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
                routes = [self.routes.sliced(flow, outputs) for flow in flows]
                made[-1].append(SlicedMicrobatch.of(whole, batch, sizes, of_parts, routes, place, device))
        return made


def _magnitudes(batch: Batch) -> tuple[int, ...]:
    """For each size of a batch's tensors, except the number of samples: the number of its bits."""
    leaves = zip(batch.leaves, batch.row_dims, strict=True)
    shapes = ((leaf.shape, dim) for leaf, dim in leaves if isinstance(leaf, Tensor))
    return tuple(size.bit_length() for shape, dim in shapes for k, size in enumerate(shape) if k != dim)


def _reads_more(now: Dataflow, then: Dataflow) -> bool:
    """Whether a call or the loss reads other unit results in `now` than in `then`, or reads additional parameters. Also
    True if `now` calls other units."""
    reads, before = ([*(call.reads for call in flow.calls), flow.loss or Reads()] for flow in (now, then))
    if [call.unit for call in now.calls] != [call.unit for call in then.calls]:
        return True
    return any(a.values != b.values or not a.parameters <= b.parameters for a, b in zip(reads, before, strict=True))
