"""Pipeline: one rank's stages of a boosted model, ready to run steps."""

import math
import traceback
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion
from pipeshard.batch.read import RowDims
from pipeshard.config import PipelineConfig
from pipeshard.distributed.agreement import compare_ranks, compare_trained
from pipeshard.distributed.collectives import first_seed, gather, gather_objects, share_scalar, sum_scalar, together_in
from pipeshard.distributed.failures import is_lost
from pipeshard.distributed.mesh import Grid
from pipeshard.distributed.p2p import with_messages
from pipeshard.distributed.progress import own_progress
from pipeshard.engine.clipping import ModelGradients
from pipeshard.engine.dependent import dependent_error, failing, is_of_model
from pipeshard.engine.interpreter import Interpreter
from pipeshard.engine.microbatches import FoundWays, RouteCache
from pipeshard.engine.mixed_precision import LossScale, Precision
from pipeshard.engine.offload import Offload, transfer_of
from pipeshard.engine.outputs import Outputs, ReturnOutputs, StepLoss
from pipeshard.engine.parameters import HeldParameters
from pipeshard.engine.ragged import Ragged
from pipeshard.engine.reader import News, Reader
from pipeshard.engine.recording import Recording
from pipeshard.engine.refusals import Places, refuse_compiled, refuse_criterion, refuse_recomputed
from pipeshard.engine.running_state import Carry, deferred
from pipeshard.engine.sliced import SlicedMicrobatch, SlicedStage
from pipeshard.engine.stage import NaNCheck, Stage
from pipeshard.engine.weight_grad import Deferral
from pipeshard.errors import BatchError, TraceError, UsageError
from pipeshard.ghost import Ghost
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.trace import trace
from pipeshard.graph.units import containers, find_units, paths_of
from pipeshard.hf import disable_caches
from pipeshard.schedule.program import Action, Kind, Program, forward_only
from pipeshard.slices.cut import cut as cut_sequence
from pipeshard.slices.cut import lengths, sequence_of
from pipeshard.slices.refusals import attention_slope, refuse_cacheless, refuse_padding
from pipeshard.split.initialize import InitWeights
from pipeshard.split.materialize import compile_units, shard
from pipeshard.split.partition import Cuts, is_profile, named_modules_of
from pipeshard.split.policy import Policy, find_policy, refuse_backward_hooks
from pipeshard.split.tensor_parallel import plan_of

S = TypeVar("S", bound=Stage)
# News: bits of what ranks tell each other at the beginning of a step.
TRAINED, UNPROVEN, UNSEEN, TRAINS, WRITTEN = 1, 2, 4, 8, 16


class Unseen(NamedTuple):
    """A training step whose loss has not been checked yet: on the last rank, whether it is NaN, and what it was
    computed from."""

    is_nan: Tensor | None
    batch: Batch
    flow: Dataflow
    criterion: Criterion | None


class Ran(NamedTuple):
    """A microbatch of the last step: the `share` of its loss (or of its criterion's sum, if `summed`) in the
    loss of the step. The loss is on the last stage's rank."""

    share: float
    summed: bool
    flow: Dataflow


class Pipeline:
    """Shards `model` into this rank's stages and runs their steps. Create it on all ranks at the same time.

    `costs(partition, flow, sample)` measures the unit calls, if the partition uses measured times.
    """

    def __init__(
        self,
        config: PipelineConfig,
        grid: Grid,
        model: nn.Module,
        sample: Batch,
        criterion: Criterion | None,
        costs: Callable[[str, Dataflow, Batch], Sequence[float]],
    ) -> None:
        self.config, self.grid, self.model, self.device = config, grid, model, grid.device
        self.rank, self.num_stages, self.group = grid.stage, grid.pp_size, grid.stages
        self.ranks: list[int] = grid.mesh.get_ranks_in_group(self.group)
        self.precision = Precision(config.precision, config.autocast, self.device)
        self.scaling = LossScale(config.initial_scale) if self.precision.scales else None
        self.program = lru_cache(self._program)
        self.steps = 0  # training steps so far
        self.synchronizes = True  # not under no_sync
        # On a GPU nobody waits for a loss that was not asked for: the next step looks whether it was a number.
        self.looks_at_once = self.device.type == "cpu"
        self.padding = ""  # how slices of samples with padding differ from whole ones
        self._unseen: Unseen | None = None
        self._parts: tuple[list[Batch], list[list[Batch]]] = [], []  # batches, and the microbatches of each
        self._slices: tuple[list[list[Batch]], list[list[Batch]]] = [], []  # those, and the slices of each microbatch
        self.last: Program | None = None  # what ran last
        self.read = 0, 0  # the samples and tokens that it read
        self.ran: list[Ran] = []  # its microbatches
        self.trainable = any(parameter.requires_grad for parameter in model.parameters())  # of the whole model

        partition, recompute, self.criterion = config.settled(getattr(model, "pipeline_hints", None), criterion)
        refuse_criterion(self.criterion, model)
        refuse_compiled(model, find_units(model, paths_of(model, named_modules_of(partition))))
        if config.has_slices:
            self.slope = attention_slope(model)
        self.cached = disable_caches(model)  # configs to be given their cache back
        self.reader = Reader(RowDims(model, config.batch_dims), self._cut, self._may_cut, grid, self.precision)
        sample, flow = self._trace(sample, named_modules_of(partition))
        with self.precision.seeming(model), self.precision.running():
            measured = costs(partition, flow, sample) if is_profile(partition) else None
        self.policy = self._partition(flow, sample, partition, measured)
        self.ragged: Ragged | None = None
        if config.is_ragged:
            self.ragged = Ragged(model).plan_for(config, flow, self.policy.units, self.device)
        self.containers = containers(model, self.policy.units)
        self.called = [*self.containers, *self.policy.units.values()]
        replicas = grid.replicas if grid.dp_size > 1 else None
        weight = 1.0 / grid.dp_size if config.loss_reduction == "batch" else None
        self.planner = RouteCache(self.policy, recompute, replicas, weight)
        self._shard()
        if config.compile:
            compile_units(self.policy.held_units, **config.compile_options)
        self._make_stages()
        self.policy.replace_forward()
        with self.precision.running():
            self.planner.remember(flow, self.criterion)

    def _trace(self, sample: Batch, cuts: Sequence[str]) -> tuple[Batch, Dataflow]:
        """The Dataflow of the whole model, and the samples that it was traced with."""
        sample = self.reader.settle(sample)
        with self.precision.seeming(self.model), self.precision.running():
            try:
                return sample, trace(self.model, sample, self.criterion, cuts=cuts, device=self.device)
            except TraceError as error:  # a model may take no more samples than a microbatch has: one, without padding
                sample = sample.split(*self.config.cut)[0]
                with suppress(TraceError):
                    return sample, trace(self.model, sample, self.criterion, cuts=cuts, device=self.device)
                raise error from None

    def _partition(self, flow: Dataflow, sample: Batch, by: Cuts, costs: Sequence[float] | None) -> Policy:
        """The part that this rank holds and runs, by a partition that is the same on every rank."""
        config = self.config
        size = config.microbatch_size or max(1, sample.rows // (config.num_microbatches or 1))
        policy = (config.policy or find_policy(self.model))(
            self.model,
            flow,
            self.rank,
            self.num_stages,
            partition=by,
            scale=_scale(flow, sample, size),
            device=self.device,
            placement=config.placement,
            costs=costs,
        )
        cuts = [f"{call.unit} in stage {stage}" for call, stage in zip(flow.calls, policy.stages, strict=True)]
        compare_ranks({"where the model is cut": cuts}, self.grid.world, self.grid.named)
        return policy

    def _shard(self) -> None:
        """Keep the parameters of this rank, in the form in which they are trained, and set up their gradients."""
        model, config, grid = self.model, self.config, self.grid
        plan: dict[str, str] = {}
        if grid.tp_size > 1:
            of_policy = self.policy.tp_plan
            plan = plan_of(model, config.tp_size, config.tp_plan, of_policy, config.ep_size, config.ep_plan)
        self.seed = first_seed(self.grid.world)  # what is drawn must not depend on the rank
        before = dict(model.named_parameters())
        # What Booster loads right after `configure` is not drawn before.
        init_weights: InitWeights = False if getattr(model, "_pretrained", None) else config.init_weights
        on_meta = shard(model, self.policy, self.device, init_weights, self.seed)
        self.blank = set() if init_weights else on_meta  # on all stages: names without values so far
        self.holdings = HeldParameters(self.policy, grid, self.precision, config.fsdp, plan)
        self.places = Places(model, parameters=self.holdings.sharded is None)
        self.sync = self.holdings.sync
        names = {parameter: name for name, parameter in model.named_parameters()}
        # Optimizers made before this still have what was released or replaced, which is nobody else's to keep alive.
        replaced = WeakTensorKeyDictionary({p: name for name, p in before.items() if p not in names})
        known = ChainMap(names, replaced)
        self.gradients = ModelGradients(self.holdings, known, grid, config.max_norm or 0.0, self.scaling)
        self.trained = self.holdings.trained()

    def _make_stages(self) -> None:
        """This rank's stages, the interpreter of their actions and the P2P of their messages."""
        self.deferral = Deferral(module for unit in self.policy.get_held_layers() for module in unit.modules())
        self.carry = Carry(self.model)
        transfer = transfer_of(self.device) if self.config.offload else None
        self.offload = None if transfer is None else Offload(transfer, self.device)
        head = len(self.policy.placement)  # the number of a stage behind the last one
        self.stages = [self._stage(Stage, index, index == head - 1) for index in self.policy.chunks]
        self.sliced = self._sliced_stages() if self.config.has_slices else []
        placement = self.policy.placement
        p2p = self.grid.p2p(self.config.p2p, placement)
        self.interpreter = Interpreter({stage.index: stage for stage in self.stages}, placement, p2p, self.device)

    def _stage(self, kind: type[S], index: int, is_last: bool) -> S:
        of_stage = self.policy.ownership.held_by_parts
        stage = kind(
            self.policy.replay,
            index,
            is_last,
            self.deferral,
            around=self.precision.running,
            finite=self.finite(index, of_stage[index] if index < len(of_stage) else ()),
            carry=self.carry.around,
        )
        stage.offload = self.offload
        return stage

    def _sliced_stages(self) -> list[SlicedStage]:
        """This rank's stages for slices, with the head after the last one."""
        stages = [self._stage(SlicedStage, index, False) for index in self.policy.chunks]
        if self.stages[-1].is_last:
            stages[-1].head = self._stage(Stage, len(self.policy.placement), True)
        return stages

    @property
    def last_rank(self) -> int:
        """The global rank that has the last stage, and therefore the outputs."""
        return self.ranks[self.policy.placement[-1]]

    def held_parameters(self) -> dict[nn.Parameter, str]:
        """The parameters this rank holds, and their first names."""
        return {parameter: name for name, parameter in self.holdings.held.items()}

    def step(
        self,
        data_iter: Iterator[Any],
        criterion: Criterion | None,
        train: bool,
        return_loss: bool,
        return_outputs: ReturnOutputs,
        num_batches: int = 1,
        weight: float = 1.0,
    ) -> dict[str, Any]:
        """One step, forward and (if `train`) backward; see PipelinePlugin.execute_pipeline."""
        own_progress().begin(self.model, self.policy.chunks)
        criterion = criterion if criterion is not None else self.criterion
        refuse_criterion(criterion, self.model)
        self.refuse_blank()
        refuse_recomputed(self.model, self.containers)
        self.places.check()
        if any(module._compiled_call_impl is not None for module in self.called):
            refuse_compiled(self.model, self.policy.units)
        self.policy.replace_forward()  # again: checkpointing may have been enabled since
        outputs = Outputs(return_outputs, num_batches)
        problems = self.holdings.problems(self.config.num_microbatches) if train else []
        trained = self.holdings.trained()
        exact = self.config.has_exact_loss and (train or return_loss or outputs.with_loss)

        found: FoundWays | None = None

        def news(batches: Sequence[Batch]) -> News:
            nonlocal found
            self.planner.look(criterion)
            unproven = exact and self.planner.any_unproven(batches, self._cut(batches), criterion)
            trains = any(parameter.requires_grad for parameter in self.holdings.held.values())
            bits = TRAINED * (trained != self.trained or bool(problems)) + UNPROVEN * unproven + TRAINS * trains
            if self._unseen is not None and self._unseen.is_nan is not None and bool(self._unseen.is_nan):
                bits |= UNSEEN
            bits |= WRITTEN * self.gradients.follow(adopts=train)
            with suppress(Exception), self.precision.running():  # the step itself raises it, once ranks have agreed
                found = self.planner.find(self._to_find(batches, train), criterion, looks=False)
            ways = -1 if found is None else self.planner.number(found)
            return News(bits, ways, *self.gradients.updates.numbers)

        training = "train" if self.model.training else "eval"
        mode = f"{'training step' if train else 'forward only'}, return_outputs={outputs}, model.{training}()"
        batches, agreed = self.reader.next(data_iter, mode, news, num_batches)
        if not agreed.updated_alike:
            self.gradients.updates.compare()
        if agreed.news & WRITTEN:
            self.gradients.share()
        if agreed.news & TRAINED:
            if wrong := [problem for said in gather_objects(problems, self.grid.world) for problem in said]:
                raise UsageError(wrong[0])
            of_all = compare_trained(trained, self.grid.world, self.grid.named)
            self.trained = trained
            self._tell_ghosts(of_all)
        if train and self.trainable and not agreed.news & TRAINS:
            raise UsageError(
                "there is nothing to train: every parameter was frozen (requires_grad=False) after the model was "
                "boosted. Unfreeze the ones to train, or evaluate under torch.no_grad()"
            )
        unseen, self._unseen = self._unseen, None
        if agreed.news & UNSEEN and unseen is not None:
            self._refuse_other_way(*unseen[1:])
        if agreed.news & TRAINED:
            found = None
            with suppress(Exception), self.precision.running():  # the step itself raises it, once ranks have agreed
                found = self.planner.find(self._to_find(batches, train), criterion)
        if not agreed.alike or agreed.news & TRAINED:
            with self.precision.running():
                cut = self._to_find(batches, train)
                found = self.planner.find_alike(cut, criterion, outputs.needed, self.grid, found)
        if agreed.news & UNPROVEN:
            with self.precision.running(), self._tracing(batches, criterion, outputs):
                self.planner.prove(batches, self._cut(batches), criterion, self.grid.world)
        with self.policy.replay.randomness.step(agreed.seed, self.steps, self.reader.first(agreed)):
            out = self._run(batches, found, criterion, train, return_loss, outputs, exact, weight)
        if train:
            self.gradients.added()
        return out

    def _tell_ghosts(self, trained: Mapping[str, bool]) -> None:
        """Record by name which parameters other stages train now, and trace later batches for these."""
        for parameter, name in self.gradients.names.items():
            if isinstance(parameter, Ghost):
                parameter.pipeshard_trainable = trained.get(name, parameter.pipeshard_trainable)
        self.planner.look_at_trained()

    @together_in("plugin.sync_grads")
    def sync_grads(self) -> None:
        """Sum the gradients accumulated under `no_sync`."""
        with self.gradients.coupling.paused():
            self.sync.begin()
            self.sync.finish(True)
            self.gradients.added()

    def _cut(self, batches: Sequence[Batch]) -> list[list[Batch]]:
        """The microbatches of each batch; cached for the same batches."""
        if [*map(id, self._parts[0])] != [*map(id, batches)]:
            self._parts = list(batches), [self._split(batch) for batch in batches]
        return self._parts[1]

    def _may_cut(self) -> bool:
        """Whether a batch may have several microbatches."""
        return self.config.num_microbatches != 1

    def _split(self, batch: Batch) -> list[Batch]:
        return batch.split(*self.config.cut) if self.ragged is None else self.ragged.split(batch, self.config)

    def _to_find(self, batches: Sequence[Batch], train: bool) -> list[list[Batch]]:
        """The batches that need a way through the stages: the microbatches, followed by their slices, if there are
        any."""
        microbatches = self._cut(batches)
        return microbatches + self._cut_slices(microbatches) if train else microbatches

    def _cut_slices(self, cut: list[list[Batch]]) -> list[list[Batch]]:
        """The slices of each microbatch, equally many each; none if one slice is the whole. Cached for the same
        microbatches."""
        if self.config.has_slices and self._slices[0] is not cut:
            self._slices = cut, self._sliced_alike([batch for of_batch in cut for batch in of_batch])
        return self._slices[1]

    def _sliced_alike(self, microbatches: Sequence[Batch]) -> list[list[Batch]]:
        totals = [sequence_of(batch) for batch in microbatches]
        wanted = self.config.slices_of(totals)
        n = min(len(lengths(total, wanted, self.slope)) for total in totals)
        if n == 1:
            return []
        return [
            cut_sequence(batch, lengths(total, n, self.slope))
            for batch, total in zip(microbatches, totals, strict=True)
        ]

    def _run(
        self,
        read: list[Batch],
        found: FoundWays | None,
        criterion: Criterion | None,
        train: bool,
        wanted: bool,
        outputs: Outputs,
        *how: Any,
    ) -> dict[str, Any]:
        with self.precision.running():
            cut = self._cut(read)
            with self._tracing(read, criterion, outputs):
                planned = self.planner.plan_each(cut, found, criterion, outputs.needed, *how)
                sliced: list[list[SlicedMicrobatch]] = []
                slices = self._cut_slices(cut) if train else []
                if slices:
                    refuse_cacheless(self.model)
                    refuse_padding(self.model, read, self.padding)
                    sliced = self.planner.slice_each(cut, slices, found, planned, criterion, outputs.needed)
        self._parts, self._slices = ([], []), ([], [])
        flow = planned[-1][0].route.flow
        for microbatch in planned[-1]:
            outputs.check(microbatch.route.flow, len(planned[-1]) > 1)
        if train and flow.loss is None:
            raise UsageError("nothing gives a loss to train on: give the batch labels, or pass a criterion")
        if train and not self.trainable:
            raise UsageError(
                "there is nothing to train: every parameter was frozen when the model was boosted (a PeftModel that "
                "was loaded without is_trainable=True?). Evaluate under torch.no_grad()"
            )
        if train:
            units, partition = self.policy.units, self.policy.partition
            refuse_backward_hooks(self.model, units, self.containers, flow, partition, outputs.needed)
        num_slices = len(sliced[-1][0].slices) if sliced else 1
        self.last = program = self.program(len(planned[-1]), num_slices, train)
        self.read = sum(batch.rows for batch in read), sum(batch.num_tokens for batch in read)
        self.ran = [Ran(microbatch.share, microbatch.summed, microbatch.route.flow) for microbatch in planned[-1]]
        stages: Sequence[Stage] = self.sliced if sliced else self.stages
        if sliced:
            for slicing, of_stage in zip(self.sliced, sliced, strict=True):
                slicing.begin_sliced(of_stage, criterion, outputs, self.scale, program.splits(slicing.index))
        else:
            for stage, microbatches in zip(self.stages, planned, strict=True):
                stage.begin(microbatches, criterion, train, outputs, self.scale, program.splits(stage.index))
        routes = [microbatch.route for stage in stages for microbatch in stage.microbatches]
        self.carry.begin(routes)
        own_progress().in_flight = self.grid.size > 1
        if train:
            self.gradients.add_to()
            if self.offload is not None:
                self.offload.begin(program.ranks[self.rank], [*self.holdings.held.values(), *self.model.buffers()])
        if train or self.holdings.sharded is not None:
            self.sync.begin()
        try:
            self.interpreter.stages = {stage.index: stage for stage in stages}
            with self._deferring(stages), self._norms(), self.precision.sharing_casts([r.flow for r in routes]):
                reduces = train and self.synchronizes and self.sync.is_early
                self.interpreter.run(program.ranks[self.rank], self.sync.stage_done if reduces else None)
        except Exception as error:
            if (dependent := self._dependent(error, read, cut, criterion, outputs)) is not None:
                raise dependent from error
            raise
        finally:
            for stage in stages:
                stage.end()
            self.carry.end()
            if self.offload is not None:
                self.offload.end()
        self.steps += train
        self.planner.stepped()
        own_progress().start("the sums of gradients and losses")
        if train or self.holdings.sharded is not None:
            self.sync.finish(train and self.synchronizes)
        own_progress().in_flight = False
        end, source = stages[-1].end_of_loss, self.last_rank  # the last stage is the last of its rank
        loss = self._of_replicas(end)
        is_looked_at = wanted or (train and self.looks_at_once)
        total = share_scalar(loss, source, self.group, torch.device("cpu")) if is_looked_at else None
        is_nan = total is not None and bool(total.isnan())
        merged = outputs.merged(flow, self.planner.own(end.loss, loss)) if end.is_last else None
        is_doubtful = end.is_last and not self.planner.is_seen(flow) and outputs.has_nan
        is_nan |= outputs.raise_failure(self.grid.world, is_doubtful)
        if outputs.needed:
            self.planner.saw(flow)
        if is_nan:
            self._refuse_other_way(cut[-1][0], flow, criterion)
        if train and not is_looked_at:
            is_unknown = None if loss is None else loss.detach().isnan()
            self._unseen = Unseen(is_unknown, cut[-1][0], flow, criterion)
        shown = total.to(self.device).as_subclass(StepLoss) if wanted and total is not None else None
        return {"loss": shown, "outputs": merged}

    def _dependent(
        self,
        error: Exception,
        read: Sequence[Batch],
        cut: Sequence[Sequence[Batch]],
        criterion: Criterion | None,
        outputs: Outputs,
    ) -> BatchError | None:
        """The error to raise for a failed forward of a microbatch, if the stage runs on the whole batch."""
        action = own_progress().action
        if not isinstance(action, Action) or action.kind is not Kind.F or not is_of_model(error) or is_lost(error):
            return None
        owners = [(k, i) for k, parts in enumerate(cut) for i in range(len(parts))]
        program_size = self.last.num_microbatches if self.last is not None else len(owners)
        k, i = owners[action.microbatch // (program_size // len(owners))]
        batch, parts = read[k], cut[k]
        place = [stage.index for stage in self.stages].index(action.stage)

        def run(part: Batch) -> None:
            microbatch = self.planner.on_stage(part, criterion, outputs.needed, place)
            self.stages[place].try_zeros(microbatch, criterion)

        with self.precision.running():
            found = failing(batch, parts[i : i + 1], run)
        if found is None or type(found[1]) is not type(error):
            return None
        module = own_progress().module([frame for frame, _ in traceback.walk_tb(error.__traceback__)])
        return dependent_error(batch, parts, i, error, module)

    @contextmanager
    def _tracing(self, read: Sequence[Batch], criterion: Criterion | None, outputs: Outputs) -> Iterator[None]:
        """Around traces of microbatches. Raises BatchError on every rank if the model's code between units fails for a
        microbatch, but not for its batch."""
        try:
            yield
        except TraceError as error:
            why = error.__cause__
            if not isinstance(why, Exception):
                raise
            for batch, parts in zip(read, self._cut(read), strict=True):
                found = failing(batch, parts, lambda part: self.planner.on_stage(part, criterion, outputs.needed, 0))
                if found is not None:
                    raise dependent_error(batch, parts, found[0], why) from why
            raise

    def _refuse_other_way(self, batch: Batch, flow: Dataflow, criterion: Criterion | None) -> None:
        with self.precision.running():
            self.planner.refuse_other_way(batch, flow, criterion, self.grid.world)

    @together_in("plugin.recording")
    def recording(self) -> Recording:
        """The recording of the last step on every rank. Call it on all ranks."""
        if self.last is None:
            raise UsageError("there is nothing recorded before a step: call booster.execute_pipeline first")
        timeline = self.interpreter.timeline
        read = gather(torch.tensor(self.read), self.grid.world).sum(0) * self.grid.dp_size // self.grid.size
        return Recording.collect(self.last, timeline, self.steps - 1, self.group, self.device, read.tolist())

    def _deferring(self, stages: Sequence[Stage]) -> AbstractContextManager[None]:
        """Around a step's actions: layers defer their weight gradients to W. In a step without W, embeddings defer
        theirs to the end of each B."""
        if any(stage.splits for stage in stages):
            return self.deferral.installed()
        lookups = self.config.defers and torch.is_grad_enabled()
        return self.deferral.installed(lookups=True) if lookups else nullcontext()

    def _norms(self) -> AbstractContextManager[None]:
        """Around a step's actions: running statistics are updated at its end."""
        return deferred(self.policy.held_units.values()) if self.config.deferred_batch_norm else nullcontext()

    def finite(self, stage: int, names: Collection[str]) -> NaNCheck | None:
        """The check of these held parameters for finite values, if the plugin requests it."""
        held = {name: parameter for name, parameter in self.holdings.held.items() if name in names}
        return NaNCheck(stage, held, gradients=self.scaling is None) if self.config.check_finite else None

    def _program(self, num_microbatches: int, num_slices: int, train: bool) -> Program:
        program = self.config.program(num_microbatches, num_slices)
        return with_messages(program if train else forward_only(program), self.interpreter.p2p)

    def draw(self, names: Sequence[str]) -> None:
        """Initialize the parameters with these names by `init_weights`; pass the same names on every rank."""
        if self.config.init_weights:
            self.holdings.draw(names, self.config.init_weights, self.seed)
            self.blank -= set(names)

    def refuse_blank(self) -> None:
        if self.blank:
            raise UsageError(
                f"{len(self.blank)} parameters, {min(self.blank)} the first, have no values yet: init_weights=False "
                "leaves them to booster.load_model(model, <folder>), to be called before the first step"
            )

    @property
    def scale(self) -> float:
        return self.scaling.value if self.scaling is not None else 1.0

    def _of_replicas(self, end: Stage) -> Tensor | None:
        """The loss over the batches of all replicas, on the last stage."""
        if end.is_last and end.loss is not None and self.grid.dp_size > 1:
            return sum_scalar(end.loss, self.grid.replicas)
        return end.loss


def _scale(flow: Dataflow, sample: Batch, size: int) -> float:
    """The size of a microbatch of `size` samples relative to the traced batch."""
    if not flow.axes.tensors:  # only lists of one entry a sample
        traced_rows, *_ = *flow.axes.sizes, sample.rows
        return size / traced_rows
    traced = next(iter(sample.tensors.values()))
    return traced.numel() / sample.rows * size / math.prod(flow.axes.tensors[0][1])
