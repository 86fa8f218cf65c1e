"""Pipeline: runs steps on one rank's stages of a boosted model."""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion
from pipeshard.batch.read import RowDims
from pipeshard.config import PipelineConfig
from pipeshard.distributed.agreement import compare_trained
from pipeshard.distributed.collectives import first_seed, gather, gather_lists, share_scalar, sum_scalar, together_in
from pipeshard.distributed.mesh import Grid
from pipeshard.distributed.p2p import with_messages
from pipeshard.distributed.progress import own_progress
from pipeshard.distributed.watch import NOTE
from pipeshard.engine.clipping import ModelGradients
from pipeshard.engine.cuts import BatchSplitter
from pipeshard.engine.dependent import BATCH_ADVICE, is_of_model, tracing
from pipeshard.engine.division import divided, traced
from pipeshard.engine.hosted import HostedWeight
from pipeshard.engine.interpreter import Interpreter
from pipeshard.engine.mixed_precision import LossScale, MasterWeight, Precision
from pipeshard.engine.offload import has_own_memory
from pipeshard.engine.outputs import Outputs, ReturnOutputs, StepLoss
from pipeshard.engine.parameters import HeldParameters
from pipeshard.engine.places import Places
from pipeshard.engine.ragged import Ragged
from pipeshard.engine.reader import Agreement, News, Reader
from pipeshard.engine.recording import Recording
from pipeshard.engine.refusals import (
    refuse_compiled,
    refuse_criterion,
    refuse_differentiable,
    refuse_recomputed,
    refuse_shorter,
)
from pipeshard.engine.sliced import SlicedMicrobatch
from pipeshard.engine.stage import Stage
from pipeshard.engine.stages import Stages
from pipeshard.engine.traces import Doubt, FoundWays, Traces
from pipeshard.engine.updates import is_sampled
from pipeshard.errors import NO_LOSS, UsageError, listed
from pipeshard.ghost import Ghost, without_values
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.foreign import without_gradients
from pipeshard.graph.units import containers, find_units, paths_of
from pipeshard.hf import lone_losses, withhold_caches
from pipeshard.schedule.program import Program, forward_only
from pipeshard.slices.refusals import refuse_cacheless, refuse_padding
from pipeshard.split.initialize import InitWeights
from pipeshard.split.materialize import compile_units, shard
from pipeshard.split.partition import is_profile, named_modules_of
from pipeshard.split.policy import refuse_backward_hooks
from pipeshard.split.tensor_parallel import plan_of

# Bits of News, which the ranks exchange at the beginning of a step.
TRAINED, UNPROVEN, UNSEEN, TRAINS, WRITTEN, UNMERGED = 1, 2, 4, 8, 16, 32


class Unseen(NamedTuple):
    """A training step whose loss has not been checked for NaN yet. `is_nan` is a tensor on the last stage's rank and
    None on other ranks. The other fields are needed to trace the step again if the loss is NaN."""

    is_nan: Tensor | None
    doubts: Sequence[Doubt]
    criterion: Criterion | None


class Asked(NamedTuple):
    """The arguments of a step. `loss`: whether the step returns its loss. `is_exact`: whether a proven rule gives the
    shares of the microbatch losses. `weight`: the factor by which the step's loss is multiplied."""

    criterion: Criterion | None
    train: bool
    loss: bool
    outputs: Outputs
    is_exact: bool
    weight: float


class Ran(NamedTuple):
    """A microbatch of the last step. On the last stage's rank, the step's loss contains `share` times the microbatch's
    loss or, if `summed`, `share` times the sum that the criterion returned."""

    share: float
    summed: bool
    flow: Dataflow


def _merges(outputs: Outputs, found: FoundWays, batches: Sequence[Batch]) -> bool:
    """Whether the requested outputs of each batch's microbatches can be merged."""
    pairs = zip(found.ways, batches, strict=True)
    return all(outputs.merges([flow for flow, _ in ways], batch) for ways, batch in pairs)


class Pipeline:
    """Reduces `model` to this rank's stages, and runs steps on these stages. Create a Pipeline on all ranks at the same
    time.

    `costs(partition, flow, sample)` returns the cost of each unit call. Pipeline calls `costs` only with
    `partition="profile"` or `"profile:PATH"`. If `config` is the result of a schedule search, `asked` is the config
    that the user passed. `trace` takes the same arguments as `traced`.
    """

    def __init__(
        self,
        config: PipelineConfig,
        grid: Grid,
        model: nn.Module,
        sample: Batch,
        criterion: Criterion | None,
        costs: Callable[[str, Dataflow, Batch], Sequence[float]],
        asked: PipelineConfig | None = None,
        trace: Callable[..., tuple[Batch, Dataflow]] = traced,
    ) -> None:
        self.config, self.grid, self.model, self.device = config, grid, model, grid.device
        self.asked = asked or config
        self.rank, self.num_stages, self.group = grid.stage, grid.pp_size, grid.stages
        self.ranks: list[int] = grid.mesh.get_ranks_in_group(self.group)
        self.precision = Precision(config.precision, config.autocast, self.device)
        self.scaling = LossScale(config.initial_scale) if self.precision.scales else None
        self.program = lru_cache(self._program)
        self.steps = 0  # training steps so far
        self.forwards = 0  # forward-only calls since the last training step
        self.synchronizes = True  # False under no_sync
        self.uncuts = False  # whether a forward whose outputs cannot be merged runs each batch as one microbatch
        # On a GPU, gradient reductions may still run when a step ends. So if the loss was not requested, the next step
        # checks this loss for NaN, and reports a NaN in the message that it sends anyway.
        self.looks_at_once = self.device.type == "cpu"
        self.padding = "", ""  # how slices of padded batches differ or fail: with a mask, and without
        self._unseen: Unseen | None = None
        self.last: Program | None = None  # the Program that ran last
        self.read = 0, 0  # the number of samples and the number of tokens in the last step
        self.ran: list[Ran] = []  # the microbatches of the last step
        self.trainable = any(parameter.requires_grad for parameter in model.parameters())  # in the full model

        partition, recompute, self.criterion = config.settled(model, criterion)
        refuse_criterion(self.criterion, model)
        units = find_units(model, paths_of(model, named_modules_of(partition)))
        refuse_compiled(model, units)
        refuse_recomputed(model, containers(model, units), is_boosted=False)
        self.cuts = BatchSplitter(config, model)
        self.cached = withhold_caches(model)  # configs whose use_cache is restored later
        row_dims = RowDims(model, config.batch_dims)
        self.reader = Reader(row_dims, self.cuts.microbatches, self.cuts.is_several, grid, self.precision)
        sample = self.reader.settle(sample)
        with self.precision.seeming(model), self.precision.running():
            sample, flow = trace(config, model, sample, self.criterion, named_modules_of(partition), self.device)
            measured = costs(partition, flow, sample) if is_profile(partition) else None
        self.policy = divided(config, grid, model, flow, sample, partition, measured)
        if config.is_ragged:
            self.cuts.ragged = Ragged(model).plan_for(config, flow, self.policy.units, sample, self.device)
        self.containers = containers(model, self.policy.units)
        self.called = [*self.containers, *self.policy.units.values()]
        replicas = grid.replicas if grid.dp_size > 1 else None
        weight = 1.0 / grid.dp_size if config.loss_reduction == "batch" else None
        self.traces = Traces(self.policy, recompute, replicas, weight)
        self._shard()
        if config.compile:
            compile_units(self.policy.held_units, **config.compile_options)
        self.stages = Stages(config, self.policy, self.precision, self.holdings.held, self.device)
        placement = self.policy.placement
        self.interpreter = Interpreter(placement, grid.p2p(config.p2p, placement), self.device)
        self.policy.replace_forward()
        with self.precision.running():
            self.traces.remember(flow, self.criterion, sample)

    def _shard(self) -> None:
        """Release the parameters that only other ranks hold. Broadcast, cast and shard this rank's parameters, and set
        up their gradients."""
        model, config, grid = self.model, self.config, self.grid
        plan: dict[str, str] = {}
        if grid.tp_size > 1:
            of_policy = self.policy.tp_plan
            plan = plan_of(model, config.tp_size, config.tp_plan, of_policy, config.ep_size, config.ep_plan)
        self.seed = first_seed(self.grid.world)  # random initial values must not depend on the rank
        self.tied = WeakTensorKeyDictionary()  # each parameter that boost has replaced, with its replacement's name
        before = dict(model.named_parameters())
        # Weights that Booster loads right after `configure` need no initialization.
        init_weights: InitWeights = False if getattr(model, "_pretrained", None) else config.init_weights
        on_meta = shard(model, self.policy, self.device, init_weights, self.seed)
        self.blank = set() if init_weights else on_meta  # names of the parameters without values, on all stages
        kind = HostedWeight if config.offloads("optimizer") and has_own_memory(self.device) else MasterWeight
        self.holdings = HeldParameters(self.policy, grid, self.precision, config.fsdp, plan, kind)
        for name in self.blank & self.holdings.weights.keys():
            self.holdings.weights[name].blank()
        self.places = Places(model)
        self.sync = self.holdings.sync
        names = {parameter: name for name, parameter in model.named_parameters()}
        # Optimizers created before boost contain released or replaced parameters. Weak keys do not keep these alive.
        self.replaced = WeakTensorKeyDictionary({p: name for name, p in before.items() if p not in names})
        known = ChainMap(names, self.replaced)
        self.gradients = ModelGradients(self.holdings, known, grid, config.max_norm or 0.0, self.scaling)
        self.trained = self.holdings.trained()

    @property
    def last_rank(self) -> int:
        """The global rank of the last stage, which has the outputs."""
        return self.ranks[self.policy.placement[-1]]

    def held_parameters(self) -> dict[nn.Parameter, str]:
        """The parameters that this rank holds, each with its name (a tied parameter with its first name)."""
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
        """Run one step: forward and, if `train`, backward. See PipelinePlugin.execute_pipeline."""
        own_progress().begin(self.model, self.policy.chunks)
        criterion = criterion if criterion is not None else self.criterion
        self._refuse_changed(criterion)
        self.policy.replace_forward()  # again: gradient checkpointing may have been enabled since boost
        outputs = Outputs(return_outputs, num_batches)
        is_exact = self.config.has_exact_loss and (train or return_loss or outputs.with_loss)
        asked = Asked(criterion, train, return_loss, outputs, is_exact, weight)
        with lone_losses(self.num_stages):
            batches, found, agreed = self._read(asked, data_iter, num_batches)
            forwards = 0 if train else self.forwards + 1
            with self.policy.replay.randomness.step(agreed.seed, self.steps, self.reader.first(agreed), forwards):
                out = self._run(asked, batches, found)
        if train:
            self.gradients.added()
        return out

    def _refuse_changed(self, criterion: Criterion | None) -> None:
        """Raise an error if a step does not support the criterion or a change made to the model since boost, or if
        parameters have no values."""
        refuse_criterion(criterion, self.model)
        self.refuse_blank()
        self.holdings.refuse_cast()
        refuse_recomputed(self.model, self.containers)
        self.places.check()
        if any(module._compiled_call_impl is not None for module in self.called):
            refuse_compiled(self.model, self.policy.units)

    def _read(
        self, asked: Asked, data_iter: Iterator[Any], num_batches: int
    ) -> tuple[list[Batch], FoundWays | None, Agreement]:
        """Read the step's batches and agree on them with the other ranks. Returns the batches, their ways (None if a
        trace failed) and the Agreement. Each rank sends one message with the changes that the rank has detected and a
        digest of the batches that it has read. Then all ranks act on the same messages."""
        criterion, train = asked.criterion, asked.train
        config = self.cuts.config
        is_whole = config.num_microbatches == 1 and not config.has_slices
        problems = self.holdings.problems(is_whole) if train else []
        trained = self.holdings.trained()
        found: FoundWays | None = None

        def news(batches: Sequence[Batch]) -> News:
            nonlocal found
            self.traces.look(criterion)
            losses = self.traces.losses
            unproven = asked.is_exact and losses.any_unproven(batches, self.cuts.microbatches(batches), criterion)
            trains = any(parameter.requires_grad for parameter in self.holdings.held.values())
            changes = trained != self.trained
            bits = TRAINED * (changes or bool(problems)) + UNPROVEN * unproven + TRAINS * trains
            if self._unseen is not None and self._unseen.is_nan is not None and bool(self._unseen.is_nan):
                bits |= UNSEEN
            bits |= WRITTEN * self.gradients.copies.follow(adopts=train)
            # Until the ranks have exchanged which parameters they train, a trace would be wrong and stay cached.
            found = None if changes else self._find(asked, batches, looks=False)
            if self.uncuts and not train and found is not None:
                bits |= UNMERGED * (not _merges(asked.outputs, found, batches))
            ways = -1 if found is None else self.traces.number(found)
            return News(bits, ways, *self.gradients.numbers)

        training = "train" if self.model.training else "eval"
        returned = f"return_loss={bool(asked.loss)}, return_outputs={asked.outputs}"
        mode = f"{'training step' if train else 'forward only'}, {returned}, model.{training}()"
        batches, agreed = self.reader.next(data_iter, mode, news, num_batches)
        if train:
            self.reader.warn_repeated(agreed)
        if not agreed.updated_alike:
            self.gradients.updates.compare()
        if agreed.news & WRITTEN:
            self.gradients.copies.share()
        if agreed.news & TRAINED:
            self._share_trained(trained, problems)
        if train and self.grid.dp_size > 1 and not self.config.fsdp and self.steps and is_sampled(self.steps):
            self.gradients.copies.warn_of_drift(self.steps)
        if train and self.trainable and not agreed.news & TRAINS:
            raise UsageError(
                "there is nothing to train: every trainable parameter was frozen (requires_grad=False) after the model "
                "was boosted. Unfreeze the parameters that you want to train, or evaluate under torch.no_grad()"
            )
        unseen, self._unseen = self._unseen, None
        if agreed.news & UNSEEN and unseen is not None:
            self._refuse_other_way(*unseen[1:], train=True)
        if agreed.news & TRAINED:
            found = self._find(asked, batches)
        is_new = not agreed.alike or bool(agreed.news & TRAINED)
        if is_new:
            found = self._find_alike(asked, batches, found)
        if agreed.news & UNPROVEN:
            cut = self.cuts.microbatches(batches)
            with self.precision.running(), tracing(self.traces, batches, cut, criterion, asked.outputs.needed):
                self.traces.losses.prove(batches, cut, criterion, self.grid.world)
        unmerged = bool(agreed.news & UNMERGED)
        if self.uncuts and not train and is_new:
            assert found is not None
            merges = torch.tensor(int(_merges(asked.outputs, found, batches)))
            unmerged = not gather(merges, self.grid.world).all()
        if unmerged:
            self.cuts.uncut(batches)
            found = self._find_alike(asked, batches, self._find(asked, batches))
        return batches, found, agreed

    def _find(self, asked: Asked, batches: Sequence[Batch], looks: bool = True) -> FoundWays | None:
        """The ways of the step's microbatches, or None if a trace fails. The step raises the trace's error after the
        ranks have exchanged their reports."""
        with suppress(Exception), self.precision.running():
            return self.traces.find(self.cuts.all(batches, asked.train), asked.criterion, looks)
        return None

    def _find_alike(self, asked: Asked, batches: Sequence[Batch], found: FoundWays | None) -> FoundWays | None:
        """See Traces.find_alike."""
        with self.precision.running():
            cut = self.cuts.all(batches, asked.train)
            return self.traces.find_alike(cut, asked.criterion, asked.outputs.needed, self.grid, found)

    def _share_trained(self, trained: dict[str, bool], problems: Sequence[str]) -> None:
        """Share with all ranks which parameters this rank currently trains. Raises UsageError on every rank if any rank
        has `problems`, or if a parameter is trained on only some of the ranks that hold it."""
        if wrong := gather_lists(problems, self.grid.world):
            raise UsageError(wrong[0])
        self.trained = trained
        self._tell_ghosts(compare_trained(trained, self.grid.world, self.grid.named))

    def _tell_ghosts(self, trained: Mapping[str, bool]) -> None:
        """Record in each Ghost whether other stages currently train its parameter. Traces of later batches use this
        record."""
        for parameter, name in self.gradients.names.items():
            if isinstance(parameter, Ghost):
                parameter.pipeshard_trainable = trained.get(name, parameter.pipeshard_trainable)
        self.traces.look_at_trained()

    @together_in("plugin.sync_grads")
    def sync_grads(self) -> None:
        """Complete the gradients that were accumulated under `no_sync`: sum each gradient over the ranks that hold the
        parameter."""
        with self.gradients.coupling.paused():
            self.gradients.complete()

    def _run(self, asked: Asked, read: list[Batch], found: FoundWays | None) -> dict[str, Any]:
        """Plan the microbatches' routes through the stages, run the program, and collect the loss and the outputs."""
        criterion, train, outputs = asked.criterion, asked.train, asked.outputs
        with self.precision.running():
            cut = self.cuts.microbatches(read)
            with tracing(self.traces, read, cut, criterion, outputs.needed):
                planned = self.traces.plan_each(cut, found, criterion, outputs.needed, asked.is_exact, asked.weight)
                sliced: list[list[SlicedMicrobatch]] = []
                slices = self.cuts.slices(cut) if train else []
                if slices:
                    refuse_cacheless(self.model)
                    refuse_padding(self.model, read, self.padding)
                    sliced = self.traces.slice_each(cut, slices, found, planned, criterion, outputs.needed)
                    whole = [microbatch for of_batch in cut for microbatch in of_batch]
                    refuse_shorter(self.model, zip(whole, slices), "Use num_slices=1")
                elif self.config.is_ragged:
                    remedy = "Use num_microbatches instead of microbatch_tokens"
                    refuse_shorter(self.model, zip(read, cut), remedy)
        self.cuts.forget()
        flow = planned[-1][0].route.flow
        for microbatch in planned[-1]:
            outputs.check(microbatch.route.flow, cut[-1][0], len(planned[-1]) > 1, self.num_stages > 1)
        if train:
            self._refuse_untrainable(flow, outputs)
            refuse_differentiable(read, self.num_stages, len(planned[-1]))
        num_slices = len(sliced[-1][0].slices) if sliced else 1
        self.last = program = self.program(len(planned[-1]), num_slices, train)
        self.read = sum(batch.rows for batch in read), sum(batch.num_tokens for batch in read)
        self.ran = [Ran(microbatch.share, microbatch.summed, microbatch.route.flow) for microbatch in planned[-1]]
        self.stages.begin(planned, sliced, criterion, train, outputs, self.scale, program)
        try:
            with without_gradients(self.traces.foreign if train and self.grid.size > 1 else {}):
                self._execute(program, train)
        except Exception as error:
            if len(planned[-1]) > len(read) and is_of_model(error):
                error.add_note(f"{NOTE}this step has several microbatches. {BATCH_ADVICE}")
            raise
        finally:
            self.stages.end()
        self.steps, self.forwards = (self.steps + 1, 0) if train else (self.steps, self.forwards + 1)
        self.traces.stepped()
        own_progress().start("the sums of gradients and losses")
        if train:
            self.sync.finish(self.synchronizes)
        elif self.holdings.sharded is not None:
            self.holdings.sharded.reshard()
        own_progress().in_flight = False
        return self._collect(asked, cut, flow)

    def _refuse_untrainable(self, flow: Dataflow, outputs: Outputs) -> None:
        if flow.loss is None:
            raise UsageError(NO_LOSS)
        if not self.trainable:
            raise UsageError(
                "there is nothing to train: every parameter was already frozen (requires_grad=False) when the model "
                "was boosted. Unfreeze parameters before boost (for a PeftModel, load it with is_trainable=True), or "
                "evaluate under torch.no_grad()"
            )
        units, partition = self.policy.units, self.policy.partition
        refuse_backward_hooks(self.model, units, self.containers, flow, partition, outputs.needed)

    def _execute(self, program: Program, train: bool) -> None:
        """Run this rank's actions. Gradient reductions may start as soon as a stage's last backward has finished."""
        own_progress().in_flight = self.grid.size > 1
        if train:
            self.gradients.add_to()
            self.sync.begin()
        elif self.holdings.sharded is not None:
            self.holdings.sharded.begin()
        reduces = train and self.synchronizes and self.sync.is_early
        stages = {stage.index: stage for stage in self.stages.running}
        is_alone = train and self.grid.size == 1  # with several ranks, no step follows a failure
        discarding = self.gradients.discarded_on_failure(self.traces.foreign.values()) if is_alone else nullcontext()
        with discarding, self.stages.deferring(), without_values(self.replaced):
            self.interpreter.run(stages, program.ranks[self.rank], self.sync.stage_done if reduces else None)

    def _collect(self, asked: Asked, cut: Sequence[Sequence[Batch]], flow: Dataflow) -> dict[str, Any]:
        """Return the loss and the outputs, if requested. The ranks check whether the forward still matches its trace in
        two cases: the loss is NaN, or outputs that are requested from this Dataflow for the first time contain a NaN. A
        loss that is not requested is checked only in training: on a GPU, in the next step."""
        criterion, train, outputs = asked.criterion, asked.train, asked.outputs
        # If this rank has the model's last stage, that stage is the last of `running`.
        end, source = self.stages.running[-1].end_of_loss, self.last_rank
        loss = self._of_replicas(end)
        is_looked_at = asked.loss or (train and self.looks_at_once)
        total = share_scalar(loss, source, self.group, torch.device("cpu")) if is_looked_at else None
        is_nan = total is not None and bool(total.isnan())
        merged = outputs.merged(flow, self.traces.losses.own(end.loss, loss)) if end.is_last else None
        is_doubtful = end.is_last and flow not in self.traces.seen and outputs.has_nan
        is_nan |= outputs.raise_failure(self.grid.world, is_doubtful)
        if outputs.needed:
            self.traces.seen.add(flow)
        if is_nan:
            self._refuse_other_way(self._doubts(cut), criterion, train)
        if train and not is_looked_at:
            is_unknown = None if loss is None else loss.detach().isnan()
            self._unseen = Unseen(is_unknown, self._doubts(cut), criterion)
        shown = total.to(self.device).as_subclass(StepLoss) if asked.loss and total is not None else None
        return {"loss": shown, "outputs": merged}

    def _doubts(self, cut: Sequence[Sequence[Batch]]) -> list[Doubt]:
        """The microbatches of the step that has just run, with their random numbers."""
        microbatches = zip((batch for batches in cut for batch in batches), self.ran, strict=True)
        random = self.policy.replay.randomness
        return [Doubt(b, ran.flow, random.of(i, ran.flow.python_random)) for i, (b, ran) in enumerate(microbatches)]

    def _refuse_other_way(self, doubts: Sequence[Doubt], criterion: Criterion | None, train: bool) -> None:
        if self.num_stages == 1:  # a single stage runs all units
            return
        with self.precision.running():
            self.traces.refuse_other_way(doubts, criterion, self.grid.world, train)

    @together_in("plugin.recording")
    def recording(self) -> Recording:
        """The Recording of the last step, with the times of all ranks. Call it on all ranks."""
        if self.last is None:
            raise UsageError("no step has been recorded yet: call booster.execute_pipeline first")
        timeline = self.interpreter.timeline
        read = gather(torch.tensor(self.read), self.grid.world).sum(0) * self.grid.dp_size // self.grid.size
        return Recording.collect(self.last, timeline, self.steps - 1, self.group, self.device, read.tolist())

    def _program(self, num_microbatches: int, num_slices: int, train: bool) -> Program:
        program = self.config.program(num_microbatches, num_slices)
        return with_messages(program if train else forward_only(program), self.interpreter.p2p)

    def draw(self, names: Sequence[str]) -> None:
        """Initialize the parameters `names` if the plugin's `init_weights` is set. Pass the same names on every
        rank."""
        if self.config.init_weights:
            self.holdings.draw(names, self.config.init_weights, self.seed)
            self.blank -= set(names)

    def refuse_blank(self) -> None:
        if self.blank:
            raise UsageError(
                f"parameters of the model have no values yet ({listed(sorted(self.blank), 3)}): with "
                "init_weights=False, call booster.load_model(model, <folder>) before the first step"
            )

    @property
    def scale(self) -> float:
        return self.scaling.value if self.scaling is not None else 1.0

    def _of_replicas(self, end: Stage) -> Tensor | None:
        """The loss of the last stage, summed over the replicas. None on other stages."""
        if end.is_last and end.loss is not None and self.grid.dp_size > 1:
            return sum_scalar(end.loss, self.grid.replicas)
        return end.loss
