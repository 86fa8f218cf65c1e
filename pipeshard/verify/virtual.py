"""Virtual: all ranks of a pipeline in one process, which hand over what they would send."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pipeshard.batch.batch import Batch
from pipeshard.batch.read import RowDims
from pipeshard.config import PipelineConfig
from pipeshard.engine.clipping import ModelGradients
from pipeshard.engine.grad_sync import GradientSync
from pipeshard.engine.microbatches import RouteCache
from pipeshard.engine.mixed_precision import MasterWeight
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.engine.outputs import Outputs
from pipeshard.engine.running_state import Carry
from pipeshard.engine.stage import Microbatch, Stage
from pipeshard.engine.weight_grad import Deferral
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.trace import trace
from pipeshard.hf import disable_caches
from pipeshard.schedule.program import Action, Kind, Program
from pipeshard.split.materialize import is_released, shard
from pipeshard.split.partition import is_profile, named
from pipeshard.split.policy import find_policy
from pipeshard.verify.reference import Copies, Weights

Messages = dict[tuple[Kind, int, int], list[Tensor]]  # what an action has made for the next stage, or the one before


class Different(Exception):
    """The split model is not the unsplit one; says what differs, and in which part of a step, if that is known."""

    def __init__(self, what: str, part: str = "") -> None:
        super().__init__(what)
        self.part = part


class Unproven(Exception):
    """Nothing can be said of the model; says why."""


class VirtualRank:
    """One rank: a copy of the model that is traced, cut and sharded by itself, as on a process of its own.

    Left out is what has nothing to do with the cut: replicas, slices, precision and compilation.
    """

    def __init__(self, config: PipelineConfig, rank: int, own: Copies, device: torch.device, seed: int) -> None:
        self.rank, self.own, self.config = rank, own, config
        self.model = model = own.model
        partition, recompute, self.criterion = config.settled(getattr(model, "pipeline_hints", None), own.criterion)
        if is_profile(partition):  # measured by all ranks together
            partition = "auto"
        disable_caches(model)
        if config.num_microbatches != 1:
            own.sample = RowDims(model, config.batch_dims).settle(own.sample)
        self.flow: Dataflow = trace(model, own.sample, self.criterion, cuts=named(partition))
        kind = config.policy or find_policy(model)
        self.policy = kind(model, self.flow, rank, config.pp_size, partition, device=device, placement=config.placement)
        self.planner = RouteCache(self.policy, recompute)
        self.planner.remember(self.flow, self.criterion)
        self.foreign = own.foreign()  # before anything is replaced
        self.names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
        shard(model, self.policy, device, True, seed)
        self.held = {name: p for name, p in model.named_parameters() if not is_released(p)}
        self.deferral = Deferral(module for unit in self.policy.get_held_layers() for module in unit.modules())
        last, replay = config.num_stages - 1, self.policy.replay
        self.carry = Carry(model)
        around = self.carry.around
        self.stages = {s: Stage(replay, s, s == last, self.deferral, carry=around) for s in self.policy.chunks}
        self.optimizer: PipelineOptimizer | None = None

    def narrow(self) -> None:
        """Narrow the optimizer as booster.boost does."""
        holders = self.policy.ownership.holders
        weights = {name: MasterWeight(name, p, len(holders(name))) for name, p in self.held.items()}
        holdings: Any = SimpleNamespace(sync=GradientSync([]), weights=weights, held=self.held)
        grid: Any = SimpleNamespace(dp_size=1, pp_size=1, tp_size=1, size=1, replica=0, stage=self.rank, slice=0)
        if self.own.optimizer is not None:
            names = self.names | {parameter: name for name, parameter in self.held.items()}
            self.optimizer = PipelineOptimizer(self.own.optimizer, ModelGradients(holdings, names, grid, 0.0, None))

    @contextlib.contextmanager
    def step(self, batch: Batch, m: int, program: Program, outputs: Outputs, at: tuple[int, int]) -> Iterator[None]:
        """Around the actions of a step, which is the `at`: (seed, number)."""
        self.policy.replace_forward()
        splits = {s: program.splits(s) for s in self.stages}
        with self.policy.replay.randomness.step(*at):
            exact = self.config.has_exact_loss
            if exact and self.planner.unproven(batch, m, self.criterion):
                self.planner.learn(batch, batch.split(m)[0], self.criterion)
            planned = self.planner.plan(batch.split(m), self.criterion, outputs.needed, exact)
            self.microbatches = planned[-1]  # of the last of its stages
            for stage, microbatches in zip(self.stages.values(), planned, strict=True):
                stage.begin(microbatches, self.criterion, True, outputs, 1.0, splits[stage.index])
            self.carry.begin([microbatch.route for microbatches in planned for microbatch in microbatches])
            with self.deferral.installed(lookups=not any(splits.values())):
                yield
        for stage in self.stages.values():
            stage.end()
        self.carry.end()
        self.planner.stepped()

    def run(self, action: Action, messages: Messages) -> None:
        """One action, with copies of what others have made for it."""
        kind, i, s = action
        stage = self.stages[s]
        if kind is Kind.W:
            stage.weight(i)
            return
        forward, other = kind is Kind.F, s - 1 if kind is Kind.F else s + 1
        expected = stage.entering(i) if forward else stage.returning(i)
        taken = [tensor.clone() for tensor in messages.pop((kind, i, other), [])]
        if (sent := [(tuple(t.shape), t.dtype) for t in taken]) != [(tuple(shape), d) for shape, d in expected]:
            raise Different(f"stage {s} expects {expected} for {action} where stage {other} sends {sent}")
        messages[kind, i, s] = stage.forward(i, taken) if forward else stage.backward(i, taken)


class Virtual:
    """The ranks of a pipeline; `make()` gives each its copies, and `note` is called between actions."""

    def __init__(
        self,
        config: PipelineConfig,
        make: Callable[[], Copies],
        device: torch.device,
        seed: int,
        note: Callable[[], None],
    ) -> None:
        self.config, self.note, self.ranks = config, note, list[VirtualRank]()
        for rank in range(config.pp_size):
            self.ranks.append(VirtualRank(config, rank, make(), device, seed))
            note()
        cuts = [(rank.policy.flow.occurrences, rank.policy.stages) for rank in self.ranks]
        if any(cut != cuts[0] for cut in cuts):
            raise Different("ranks that trace the model cut it at different places")
        self.policy, self.placement = self.ranks[0].policy, self.ranks[0].policy.placement
        self.last = self.ranks[self.placement[-1]]

    def step(self, rows: Callable[[Batch], Batch], m: int, asked: bool, at: tuple[int, int]) -> tuple[Tensor, Outputs]:
        """A training step on these `rows` of the sample, in m microbatches; ties have their sums afterwards."""
        program = self.config.program(m)
        outputs = Outputs(asked)
        with contextlib.ExitStack() as around:
            for rank in self.ranks:
                around.enter_context(rank.step(rows(rank.own.sample), m, program, outputs, at))
                self.note()
            self._run(program)
        self._sum_ties()
        end = self.last.stages[len(self.placement) - 1]
        assert end.loss is not None
        return end.loss, outputs

    @property
    def microbatches(self) -> Sequence[Microbatch]:
        """Those of the last step, with what the loss of each counted."""
        return self.last.microbatches

    @property
    def weights(self) -> Weights:
        shares = [microbatch.share for microbatch in self.microbatches]
        return Weights(shares, any(microbatch.summed for microbatch in self.microbatches))

    def of(self, name: str) -> VirtualRank:
        """The rank to ask for a parameter, a buffer, or what else a module has."""
        return self.ranks[self.policy.ownership.owner(name)]

    def _run(self, program: Program) -> None:
        """Each rank does its actions in order, whenever what the next one needs is there."""
        messages: Messages = {}
        queues = [deque(actions) for actions in program.ranks]
        end = len(self.placement) - 1

        def ready(action: Action) -> bool:
            kind, i, s = action
            edge = kind is Kind.W or s == (0 if kind is Kind.F else end)
            return edge or (kind, i, s - 1 if kind is Kind.F else s + 1) in messages

        while any(queues):
            before = sum(map(len, queues))
            for rank, queue in zip(self.ranks, queues, strict=True):
                while queue and ready(queue[0]):
                    rank.run(queue.popleft(), messages)
                    self.note()
            if sum(map(len, queues)) == before:
                raise Different(f"schedule {program.name} waits without end for {[str(q[0]) for q in queues if q]}")

    def _sum_ties(self) -> None:
        for name, holders in self.policy.ownership.shared().items():
            held = [self.ranks[rank].held[name] for rank in holders]
            gradients = [parameter.grad for parameter in held if parameter.grad is not None]
            for parameter in held if gradients else ():
                parameter.grad = torch.stack(gradients).sum(0)
