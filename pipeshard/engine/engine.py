"""Pipeline: one rank's stages of a boosted model, ready to run steps."""

import math
from collections import ChainMap
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from pipeshard.batch.batch import Batch, split_sizes
from pipeshard.batch.criterion import Criterion, refuse_criterion
from pipeshard.batch.tree import paths_of
from pipeshard.boost import refuse_compiled
from pipeshard.distributed.collectives import gather, gather_objects, share_scalar, sum_scalar
from pipeshard.distributed.consistency import compare_ranks, compare_trained, together_in
from pipeshard.distributed.progress import NOW
from pipeshard.engine.clipping import ModelGradients
from pipeshard.engine.interpreter import Interpreter
from pipeshard.engine.microbatches import StepPlanner
from pipeshard.engine.nan_check import Finite
from pipeshard.engine.outputs import Outputs, ReturnOutputs, StepLoss
from pipeshard.engine.p2p import make_p2p
from pipeshard.engine.parameters import Holdings, Places
from pipeshard.engine.reader import Reader
from pipeshard.engine.recording import Recorder, Recording
from pipeshard.engine.running_state import Carry, deferred
from pipeshard.engine.stage import Stage
from pipeshard.engine.weight_grad import Deferral
from pipeshard.errors import TraceError, UsageError
from pipeshard.graph.infer_batch_dims import RowDims
from pipeshard.graph.preserve import without_cache
from pipeshard.graph.trace import trace
from pipeshard.graph.units import containers, find_units, recomputes
from pipeshard.options import check_split_backward
from pipeshard.planner.profile import measured_costs
from pipeshard.schedule.given import program_of
from pipeshard.schedule.passes import add_communication, shorten_cooldown
from pipeshard.schedule.program import Program, forward_only
from pipeshard.split.materialize import InitWeights, Sharder
from pipeshard.split.partition import named
from pipeshard.split.policy import find_policy, refuse_backward_hooks
from pipeshard.split.tensor_parallel import plan_of
from pipeshard.wishes import settled

if TYPE_CHECKING:
    from pipeshard.plugin import PipelinePlugin


TRAINED, UNPROVEN = 1, 2  # news: bits of what ranks tell each other at the beginning of a step


class Pipeline:
    """Shards `model` to this rank's stages and runs steps of them; made by every rank at the same time."""

    def __init__(self, plugin: "PipelinePlugin", model: nn.Module, sample: Batch, criterion: Criterion | None) -> None:
        manager, self.grid, self.precision = plugin.stage_manager, plugin.grid, plugin.arithmetic
        partition, recompute, criterion = settled(model, plugin, criterion)
        refuse_criterion(criterion, model)
        self.plugin, self.model, self.device, self.criterion = plugin, model, plugin.device, criterion
        self.rank, self.num_stages = manager.stage, manager.num_stages
        group: Any = manager.get_p2p_process_group()
        self.group: dist.ProcessGroup = group
        self.ranks: list[int] = plugin.pg_mesh.get_ranks_in_group(self.group)
        self.program = lru_cache(self._program)
        self.steps = 0  # training steps so far
        self.synchronizes = True  # not under no_sync
        self.last: Program | None = None  # what ran last
        self.recorder = Recorder(self.group)
        self.trainable = any(parameter.requires_grad for parameter in model.parameters())  # of the whole model
        policy = plugin.policy or find_policy(model)
        size = self.grid.tp_size
        plan = plan_of(model, size, plugin.tp_plan, policy.tp_plan) if size > 1 else None
        refuse_compiled(model, find_units(model, paths_of(model, named(partition))))
        self.cached = without_cache(model)  # configs to be given their cache back
        self.reader = Reader(RowDims(model, plugin.batch_dims), self._cut, self.grid, self.precision)
        sample = self.reader.settle(sample, criterion)
        with self.precision.seeming(model), self.precision.running():
            try:
                flow = trace(model, sample, criterion, cuts=named(partition))
            except TraceError as error:  # a model may take no more samples than a microbatch has: one, without padding
                sample = sample.split(*self._cut())[0]
                try:
                    flow = trace(model, sample, criterion, cuts=named(partition))
                except TraceError:
                    raise error from None
        size = plugin.microbatch_size or max(1, sample.rows // (plugin.num_microbatches or 1))
        scale = next(iter(sample.tensors.values())).numel() / sample.rows * size / math.prod(flow.axes.tensors[0][1])
        placement = program_of(plugin.schedule, self.num_stages, 1, plugin.num_model_chunks).placement
        costs = measured_costs(str(partition), model, flow, sample, self._cut(), self.device, self.grid.world)
        where = self.rank, self.num_stages, partition, scale, self.device
        self.policy = policy(model, flow, *where, placement=placement, costs=costs)
        cuts = [f"{call.unit} in stage {stage}" for call, stage in zip(flow.calls, self.policy.stages, strict=True)]
        compare_ranks({"where the model is cut": cuts}, self.grid.world, self.grid.named)
        self.containers = containers(model, self.policy.units)
        self.called = [*self.containers, *self.policy.units.values()]
        replicas = self.grid.replicas if self.grid.dp_size > 1 else None
        self.planner = StepPlanner(model, self.policy, recompute, replicas)
        self.seed = self._first_seed()
        before = dict(model.named_parameters())
        sharder = Sharder(model, self.policy, self.device, self._init_weights(), self.seed)
        sharder.shard()
        self.blank = set() if sharder.init_weights else sharder.on_meta  # on all stages: names without values so far
        self.holdings = Holdings(model, self.policy, self.grid, self.precision, plugin.fsdp, plan)
        self.places = Places(model, parameters=self.holdings.sharded is None)
        self.sync = self.holdings.sync
        names = {parameter: name for name, parameter in model.named_parameters()}
        # Optimizers made before this still have what was released or replaced, which is nobody else's to keep alive.
        replaced = WeakTensorKeyDictionary({p: name for name, p in before.items() if p not in names})
        known = ChainMap(names, replaced)
        self.gradients = ModelGradients(self.holdings, known, self.grid, plugin.max_norm, plugin.scaling)
        self.trained = self.sync.trained()
        if plugin.compile:
            self.policy.compile(**(plugin.compile if isinstance(plugin.compile, dict) else {}))
        self.deferral = Deferral(module for unit in self.policy.get_held_layers() for module in unit.modules())
        last = len(placement) - 1
        shared = self.deferral, self.precision.running
        self.carry = Carry(model)
        finite = {s: self.finite(s, self.policy.held_by_parts[s]) for s in self.policy.chunks}
        self.stages = [
            Stage(model, self.policy.replay, s, s == last, *shared, finite[s], self.carry.around)
            for s in self.policy.chunks
        ]
        p2p = make_p2p(plugin.p2p, self.ranks, placement, self.device)
        self.interpreter = Interpreter({stage.index: stage for stage in self.stages}, placement, p2p, self.device)
        self.policy.replace_forward()
        with self.precision.running():
            self.planner.remember(flow, criterion)

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
    ) -> dict[str, Any]:
        """One batch, forward and (if `train`) backward; see PipelinePlugin.execute_pipeline."""
        NOW.model, NOW.chunks = self.model, self.policy.chunks
        criterion = criterion if criterion is not None else self.criterion
        refuse_criterion(criterion, self.model)
        self.refuse_blank()
        self._refuse_recomputed_containers()
        self.places.check()
        if any(module._compiled_call_impl is not None for module in self.called):
            refuse_compiled(self.model, self.policy.units)
        self.policy.replace_forward()  # again: checkpointing may have been enabled since
        outputs = Outputs(return_outputs)
        problems = self.sync.problems() if train else []
        trained = self.sync.trained()
        exact = self.plugin.loss_reduction == "token" and (train or return_loss or outputs.with_loss)

        def news(batch: Batch) -> int:
            cut = len(split_sizes(batch.rows, *self._cut()))
            unproven = exact and self.planner.unproven(batch, cut, criterion)
            return TRAINED * (trained != self.trained or bool(problems)) + UNPROVEN * unproven

        mode = train, outputs.code, self.model.training
        batch, agreed = self.reader.next(data_iter, criterion, mode, news)
        if agreed.news & TRAINED:
            if found := [problem for said in gather_objects(problems, self.grid.world) for problem in said]:
                raise UsageError(found[0])
            compare_trained(trained, self.grid.world, self.grid.named)
            self.trained = trained
        if agreed.news & UNPROVEN:
            with self.precision.running():
                self.planner.prove(batch, batch.split(*self._cut())[0], criterion, self.grid.world)
        with self.policy.replay.randomness.step(agreed.seed, self.steps, self.reader.first(agreed)):
            out = self._run(batch, criterion, train, return_loss, outputs, exact)
        if train:
            self.gradients.added()
        return out

    @together_in("plugin.sync_grads")
    def sync_grads(self) -> None:
        """Sum what has piled up under `no_sync`."""
        self.sync.begin()
        self.sync.finish(True)
        self.gradients.added()

    def _run(
        self, batch: Batch, criterion: Criterion | None, train: bool, return_loss: bool, outputs: Outputs, exact: bool
    ) -> dict[str, Any]:
        batches = batch.split(*self._cut())
        with self.precision.running():
            planned = self.planner.plan(batches, criterion, outputs.needed, exact)
        flow = planned[-1][0].route.flow
        for microbatch in planned[-1]:
            outputs.check(microbatch.route.flow, len(batches) > 1)
        if train and flow.loss is None:
            raise UsageError("there is no loss to train on: give the batch labels, or pass a criterion")
        if train and not self.trainable:
            raise UsageError(
                "there is nothing to train: every parameter was frozen when the model was boosted (a PeftModel that "
                "was loaded without is_trainable=True?). Evaluate under torch.no_grad()"
            )
        if train:
            refuse_backward_hooks(self.policy, self.containers, flow, outputs.needed)
        self.last = program = self.program(len(batches), train)
        for stage, microbatches in zip(self.stages, planned, strict=True):
            stage.begin(microbatches, criterion, train, outputs, self.scale, program.splits(stage.index))
        self.carry.begin([microbatch.route for microbatches in planned for microbatch in microbatches])
        NOW.in_flight = self.grid.size > 1
        if train:
            self.gradients.add_to()
        if train or self.holdings.sharded is not None:
            self.sync.begin()
        try:
            with self._deferring(), self._norms():
                reduces = train and self.synchronizes and self.sync.is_early
                self.interpreter.run(program.ranks[self.rank], self.sync.stage_done if reduces else None)
        finally:
            for stage in self.stages:
                stage.end()
            self.carry.end()
        self.steps += train
        self.planner.flags.stepped()
        NOW.start("the sums of gradients and losses")
        if train or self.holdings.sharded is not None:
            self.sync.finish(train and self.synchronizes)
        NOW.in_flight = False
        end, source = self.stages[-1], self.ranks[self.policy.placement[-1]]  # the last stage is the last of its rank
        loss = self._of_replicas(end)
        total = share_scalar(loss, source, self.group, self.device) if return_loss else None
        merged = outputs.merged(flow, loss) if end.is_last else None
        if outputs.may_fail:
            failed = int(gather(outputs.failed, self.grid.world).max())
            if failed:
                outputs.raise_failure(failed - 1)
        return {"loss": None if total is None else total.as_subclass(StepLoss), "outputs": merged}

    @together_in("plugin.recording")
    def recording(self) -> Recording:
        """The last step on every rank; all of them call it."""
        if self.last is None:
            raise UsageError("there is nothing recorded before a step: call booster.execute_pipeline first")
        return self.recorder.recording(self.last, self.interpreter.spans, self.interpreter.waited, self.steps - 1)

    def _deferring(self) -> AbstractContextManager[None]:
        """Around a step's actions: layers leave their weight gradients to W. Where there is none, embeddings leave
        theirs to the end of each B."""
        if any(stage.splits for stage in self.stages):
            return self.deferral.installed()
        return self.deferral.installed(lookups=True) if self._defers and torch.is_grad_enabled() else nullcontext()

    def _norms(self) -> AbstractContextManager[None]:
        """Around a step's actions: running statistics wait for its end."""
        return deferred(self.policy.held_units.values()) if self.plugin.deferred_batch_norm else nullcontext()

    @property
    def _defers(self) -> bool:
        """Whether weight gradients may come apart though the schedule does not ask for it: nothing else is to happen to
        the parameters of layers, or to their forwards."""
        return not (self.plugin.compile or self.plugin.fsdp or self.grid.tp_size > 1)

    def finite(self, stage: int, names: Collection[str]) -> Finite | None:
        """What looks at these of the held parameters, if the plugin is asked to."""
        held = {name: parameter for name, parameter in self.holdings.held.items() if name in names}
        return Finite(stage, held, gradients=self.plugin.scaling is None) if self.plugin.check_finite else None

    def _program(self, num_microbatches: int, train: bool) -> Program:
        plugin = self.plugin
        program = program_of(plugin.schedule, self.num_stages, num_microbatches, plugin.num_model_chunks)
        check_split_backward(program, plugin.compile, plugin.fsdp)
        program = shorten_cooldown(program) if self._defers and isinstance(plugin.schedule, str) else program
        return add_communication(program if train else forward_only(program))

    def _init_weights(self) -> InitWeights:
        """What Booster loads right after `configure` is not drawn before."""
        return False if getattr(self.model, "_pretrained", None) else self.plugin.init_weights

    def draw(self, names: Sequence[str]) -> None:
        """Give the blank parameters of these names what `init_weights` draws; every rank names the same."""
        if self.plugin.init_weights:
            self.holdings.draw(names, self.plugin.init_weights, self.seed)
            self.blank -= set(names)

    def _first_seed(self) -> int:
        """That of the first rank's generator: what is drawn must not depend on the rank."""
        seed = torch.tensor([torch.initial_seed() % 2**63])
        return int(gather(seed, self.grid.world)[0])

    def refuse_blank(self) -> None:
        if self.blank:
            raise UsageError(
                f"{len(self.blank)} parameters, {min(self.blank)} the first, have no values yet: init_weights=False "
                "leaves them to booster.load_model(model, <folder>), to be called before the first step"
            )

    def _refuse_recomputed_containers(self) -> None:
        whole = next(filter(recomputes, self.containers), None)
        if whole is not None:
            name = next(name for name, module in self.model.named_modules() if module is whole)
            raise UsageError(
                f"{name} ({type(whole).__name__}) recomputes its forward, which was cut into units when the model was "
                "boosted: call model.gradient_checkpointing_enable() before booster.boost"
            )

    def _cut(self) -> tuple[int | None, int | None]:
        """The number of microbatches in a batch, or the samples in each."""
        return self.plugin.num_microbatches, self.plugin.microbatch_size

    @property
    def scale(self) -> float:
        return self.plugin.scaling.value if self.plugin.scaling is not None else 1.0

    def _of_replicas(self, end: Stage) -> Tensor | None:
        """The loss of all replicas' batches together, on the last stage."""
        if end.is_last and end.loss is not None and self.grid.dp_size > 1:
            return sum_scalar(end.loss, self.grid.replicas)
        return end.loss
