"""Local pipeline: all stages of a model in one process, built as booster.boost builds each stage in its process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.config import PipelineConfig
from pipeshard.distributed.local import LocalGrid, LocalWorld
from pipeshard.engine.division import traced
from pipeshard.engine.engine import Pipeline
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.engine.optimizer_trial import set_training
from pipeshard.errors import DeadlockError, MessageSizeError
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.kinds import OF_ANY_COPY
from pipeshard.graph.rng import Draws
from pipeshard.graph.shapes import Count
from pipeshard.graph.unit_outputs import Known
from pipeshard.split.partition import is_profile
from pipeshard.split.policy import Policy
from pipeshard.verify.reference import Copies, Weights

T = TypeVar("T")
SLICES = 3  # used for num_slices="auto", since the samples of a proof are short


class Different(Exception):
    """The split model differs from the unsplit model. `part` is the part of the step that differs, or "" if unknown."""

    def __init__(self, what: str, part: str = "") -> None:
        super().__init__(what)
        self.part = part


class Unproven(Exception):
    """The proof has no result for the model. The message is the reason."""


class LocalRank:
    """One rank: a copy of the model that the engine traces with `trace` and splits, as in a separate process. A
    profile or, for a smaller copy (`is_smaller`), a list of cuts is replaced with partition="uniform"."""

    def __init__(
        self,
        config: PipelineConfig,
        grid: LocalGrid,
        own: Copies,
        is_smaller: bool,
        trace: Callable[..., tuple[Batch, Dataflow]],
    ) -> None:
        self.own, self.model = own, own.model
        self.foreign = own.foreign()  # before the Pipeline replaces parameters
        partition, *_ = config.settled(self.model, own.criterion)
        # A profile is measured by all processes together. Unlike "auto", "uniform" overrides the model's hints.
        if is_profile(partition) or (is_smaller and not isinstance(partition, str)):
            config = replace(config, partition="uniform")
        self.pipeline = Pipeline(config, grid, self.model, own.sample, own.criterion, _no_costs, trace=trace)
        own.sample = self.pipeline.reader.settle(own.sample)
        self.optimizer: PipelineOptimizer | None = None

    @property
    def policy(self) -> Policy:
        return self.pipeline.policy

    @property
    def held(self) -> dict[str, nn.Parameter]:
        return self.pipeline.holdings.held

    def boost(self) -> None:
        """Wrap the optimizer for this rank's parameters, as booster.boost does."""
        if self.own.optimizer is not None:
            zero = self.pipeline.config.zero_stage == 1
            self.optimizer = PipelineOptimizer(self.own.optimizer, self.pipeline.gradients, zero)


class LocalPipeline:
    """The ranks of one or several replicas of a pipeline, in the order of the replicas. `make()` returns the Copies for
    one rank. `note` is called between actions."""

    def __init__(
        self,
        config: PipelineConfig,
        make: Callable[[], Copies],
        device: torch.device,
        note: Callable[[], None],
        replicas: int = 1,
        is_smaller: bool = False,
    ) -> None:
        self.replicas, self.num_stages = replicas, config.pp_size
        self.world = LocalWorld(replicas * config.pp_size, note, lambda: Draws.from_here(device))
        self._traced: tuple[Batch, Dataflow] | None = None  # the trace of the first copy, if it fits all copies
        own = [make() for _ in range(self.world.size)]
        proven = as_proven(config, replicas)

        def build(rank: int) -> LocalRank:
            grid = LocalGrid(self.world, rank, config.pp_size, replicas, device)
            return LocalRank(proven, grid, own[rank], is_smaller, self._trace)

        self.ranks = self._run(build)
        self.policy, self.placement = self.ranks[0].policy, self.ranks[0].policy.placement

    def _trace(self, *of_copy: Any) -> tuple[Batch, Dataflow]:
        """Trace a copy of the model. If the trace of the first copy fits all copies, all copies share this trace, since
        a trace takes longer than all other preparations of a rank."""
        if self._traced is not None:
            return self._traced
        sample, flow = traced(*of_copy)
        self._traced = (sample, flow) if _fits_all_copies(flow) else None
        return sample, flow

    def _run(self, work: Callable[[int], T]) -> list[T]:
        """Run `work` on all ranks. Raises Different for a deadlock, or a message of an unexpected size."""
        try:
            return self.world.run(work)
        except (DeadlockError, MessageSizeError) as error:
            raise Different(str(error)) from error

    def last(self, replica: int = 0) -> LocalRank:
        """The rank that computes the loss of a replica."""
        return self.ranks[replica * self.num_stages + self.placement[-1]]

    def of(self, name: str, replica: int = 0) -> LocalRank:
        """The rank of a replica that has the current value of the parameter, buffer or other state called `name`. A
        name that ends with a dot denotes a module."""
        return self.ranks[replica * self.num_stages + self.policy.ownership.owner(name)]

    def named(self, rank: LocalRank) -> str:
        """The suffix that identifies the rank's replica in errors, if there are several replicas."""
        return f" on replica {self.ranks.index(rank) // self.num_stages}" if self.replicas > 1 else ""

    def step(
        self, rows: Callable[[Batch, int], Batch], m: int, asked: bool, at: tuple[int, int]
    ) -> tuple[Tensor, list[Any]]:
        """Run a training step on `rows(sample, replica)` in each replica, with m microbatches per replica. Return the
        loss and, if `asked`, the outputs of all microbatches. `at` is the step's (seed, number)."""
        seed, number = at
        torch.manual_seed(seed)  # all ranks start from this seed

        def of_rank(rank: int) -> dict[str, Any]:
            pipeline = self.ranks[rank].pipeline
            cuts = pipeline.cuts
            cuts.config = replace(cuts.config, num_microbatches=m, microbatch_size=None, microbatch_tokens=None)
            pipeline.steps = number
            batch = rows(self.ranks[rank].own.sample, rank // self.num_stages)
            return pipeline.step(iter([batch]), None, True, True, _whole if asked else False)

        results = self._run(of_rank)
        ends = [results[self.ranks.index(self.last(replica))] for replica in range(self.replicas)]
        return ends[0]["loss"], [output for end in ends for output in end["outputs"] or ()]

    def weights(self, *replicas: int) -> Weights:
        """The weights of the last step's microbatches in the loss, in the order of `replicas`."""
        ran = [each for replica in replicas for each in self.last(replica).pipeline.ran]
        return Weights([each.share for each in ran], any(each.summed for each in ran))

    @property
    def flow(self) -> Dataflow:
        """The Dataflow of the last step."""
        return self.last().pipeline.ran[0].flow

    def boost(self) -> None:
        """Wrap the optimizer of each rank."""
        self._run(lambda rank: self.ranks[rank].boost())

    def trained(self, rank: LocalRank) -> dict[str, nn.Parameter]:
        """The parameters that a rank holds, by name. On the rank that computes the first replica's loss, also the other
        tensors that the optimizer trains."""
        return rank.held | (rank.foreign if rank is self.last() else {})

    def optimize(self, gradients: Mapping[str, Tensor | None], optimizers: Sequence[Any]) -> list[float]:
        """Step each rank's optimizer with these gradients. Return the gradient norm that each rank used for clipping,
        or [] without clipping."""

        def of_rank(rank: int) -> float | None:
            own, optimizer = self.ranks[rank], optimizers[rank]
            given = own.held | own.foreign
            for name, parameter in given.items():
                gradient = gradients[name]
                parameter.grad = None if gradient is None else gradient.clone()
            own.pipeline.gradients.added()
            stepped(optimizer)
            clips = optimizer is own.optimizer and own.pipeline.config.max_norm
            norm = optimizer.get_grad_norm() if clips else None
            for parameter in given.values():
                parameter.grad = None
            return norm

        return [norm for norm in self._run(of_rank) if norm is not None]


def as_proven(config: PipelineConfig, replicas: int) -> PipelineConfig:
    """The configuration of a local pipeline: without options for devices, precision or sharding within a stage."""
    return replace(
        config,
        dp_size=replicas,
        tp_size=1,
        tp_plan=None,
        ep_size=1,
        ep_plan=None,
        zero_stage=config.zero_stage if replicas > 1 else 0,
        fsdp=False,
        compile=False,
        precision="fp32",
        autocast=False,
        init_weights=True,
        check_finite=False,
        deferred_batch_norm=False,
        verify=False,
        num_slices=SLICES if config.num_slices == "auto" else config.num_slices,
    )


def _fits_all_copies(flow: Dataflow) -> bool:
    """Whether the Dataflow of one copy of a model refers to no object or tensor of this copy."""
    leaves = [leaf for call in flow.calls for leaf in call.leaves]
    paths = [part.source.place for call in flow.calls for part in call.parts]
    paths += [leaf.path for leaf in leaves if isinstance(leaf, Known)]
    paths += [*(place.path for place in flow.carried), *(place.place for place in flow.observed), *flow.passing]
    keys = [step.key for path in paths for step in path]
    constants = [leaf for question in flow.questions for step in question.steps or () for leaf in step.leaves]
    is_free = all(isinstance(value, (Count, *OF_ANY_COPY)) for value in (*leaves, *keys))
    return is_free and not any(isinstance(constant, Tensor) for constant in constants)


def stepped(optimizer: Any) -> None:
    set_training(optimizer)
    try:
        optimizer.step()
    except TypeError:  # optimizers such as LBFGS require a closure
        optimizer.step(lambda: torch.zeros(()))


def _whole(output: Any, batch: Any) -> Any:
    return output


def _no_costs(partition: str, flow: Dataflow, sample: Batch) -> Sequence[float]:
    raise AssertionError("a local pipeline is not cut by measured costs")
