"""Local pipeline: all stages of a model on a local world, as booster.boost makes them on processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.config import PipelineConfig
from pipeshard.distributed.local import LocalGrid, LocalWorld
from pipeshard.engine.engine import Pipeline, Ran
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.errors import DeadlockError, MessageError
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.rng import OwnDraws
from pipeshard.split.partition import is_profile
from pipeshard.split.policy import Policy
from pipeshard.verify.reference import Copies, Weights


class Different(Exception):
    """The split model is not the unsplit one; says what differs, and in which part of a step, if that is known."""

    def __init__(self, what: str, part: str = "") -> None:
        super().__init__(what)
        self.part = part


class Unproven(Exception):
    """Nothing can be said of the model; says why."""


class LocalRank:
    """One rank: a copy of the model that is traced, cut and sharded by the engine, as on a process of its own."""

    def __init__(self, config: PipelineConfig, grid: LocalGrid, own: Copies) -> None:
        self.own, self.model = own, own.model
        self.foreign = own.foreign()  # before anything is replaced
        partition = config.settled(getattr(self.model, "pipeline_hints", None), own.criterion).partition
        if is_profile(partition):  # measured by all processes together
            config = replace(config, partition="auto")
        self.pipeline = Pipeline(config, grid, self.model, own.sample, own.criterion, _no_costs)
        own.sample = self.pipeline.reader.settle(own.sample)
        self.optimizer: PipelineOptimizer | None = None

    @property
    def policy(self) -> Policy:
        return self.pipeline.policy

    @property
    def held(self) -> dict[str, nn.Parameter]:
        return self.pipeline.holdings.held

    def step(self, batch: Batch, criterion: Any, return_outputs: Any) -> dict[str, Any]:
        return self.pipeline.step(iter([batch]), criterion, True, True, return_outputs)

    def boost(self) -> None:
        """Narrow the optimizer as booster.boost does."""
        if self.own.optimizer is not None:
            config = self.pipeline.config
            self.optimizer = PipelineOptimizer(
                self.own.optimizer, self.pipeline.gradients, zero=config.zero_stage == 1
            )


class LocalPipeline:
    """The ranks of a pipeline; `make()` gives each its copies, and `note` is called between actions."""

    def __init__(
        self, config: PipelineConfig, make: Callable[[], Copies], device: torch.device, note: Callable[[], None]
    ) -> None:
        self.world = LocalWorld(config.pp_size, note, lambda: OwnDraws(device))
        own = [make() for _ in range(self.world.size)]
        boosted = as_proven(config)

        def build(rank: int) -> LocalRank:
            return LocalRank(boosted, LocalGrid(self.world, rank, config.pp_size, 1, device), own[rank])

        self.ranks = self.world.run(build)
        self.policy, self.placement = self.ranks[0].policy, self.ranks[0].policy.placement
        self.last = self.ranks[self.placement[-1]]

    @property
    def flow(self) -> Dataflow:
        """That with which the model was cut."""
        return self.policy.flow

    def step(self, rows: Callable[[Batch], Batch], m: int, asked: bool, at: tuple[int, int]) -> tuple[Tensor, list[Any]]:
        """A training step on these `rows` of the sample, in m microbatches: the loss, and if asked, the outputs of the
        microbatches. `at` is (seed, number) of the step."""
        seed, number = at
        torch.manual_seed(seed)  # which all ranks have at first

        def of_rank(rank: int) -> dict[str, Any]:
            pipeline = self.ranks[rank].pipeline
            pipeline.config = replace(pipeline.config, num_microbatches=m, microbatch_size=None)
            pipeline.steps = number
            return self.ranks[rank].step(rows(self.ranks[rank].own.sample), None, _whole if asked else False)

        try:
            results = self.world.run(of_rank)
        except (DeadlockError, MessageError) as error:  # of the pipeline itself, and not of the model
            raise Different(str(error)) from error
        result = results[self.placement[-1]]
        return result["loss"], result["outputs"] or []

    def optimize(
        self, gradients: Mapping[str, Tensor | None], foreign: Sequence[Tensor | None], optimizers: Sequence[Any]
    ) -> None:
        """A step of each rank's optimizer by these gradients, those of the model and of what else is optimized."""

        def of_rank(rank: int) -> None:
            own = self.ranks[rank]
            given = [*((own.held[name], gradients[name]) for name in own.held), *zip(own.foreign, foreign, strict=True)]
            for parameter, gradient in given:
                parameter.grad = None if gradient is None else gradient.clone()
            own.pipeline.gradients.added()
            stepped(optimizers[rank])
            for parameter, _ in given:
                parameter.grad = None

        self.world.run(of_rank)

    def boost(self) -> None:
        """Narrow the optimizers of all ranks."""
        self.world.run(lambda rank: self.ranks[rank].boost())

    @property
    def ran(self) -> Sequence[Ran]:
        """The microbatches of the last step, with what the loss of each counted."""
        return self.last.pipeline.ran

    @property
    def weights(self) -> Weights:
        return Weights([ran.share for ran in self.ran], any(ran.summed for ran in self.ran))

    def of(self, name: str) -> LocalRank:
        """The rank to ask for a parameter, a buffer, or what else a module has."""
        return self.ranks[self.policy.ownership.owner(name)]

    def holders(self, name: str) -> Iterator[LocalRank]:
        return (rank for rank in self.ranks if name in rank.held)


def as_proven(config: PipelineConfig) -> PipelineConfig:
    """The configuration of a local pipeline: without what is about devices, processes or precision."""
    return replace(
        config,
        dp_size=1,
        tp_size=1,
        tp_plan=None,
        zero_stage=0,
        fsdp=False,
        compile=False,
        precision="fp32",
        autocast=False,
        max_norm=0.0,
        init_weights=True,
        check_finite=False,
        deferred_batch_norm=False,
        verify=False,
    )


def stepped(optimizer: Any) -> None:
    try:
        optimizer.step()
    except TypeError:  # LBFGS and the like want a closure
        optimizer.step(lambda: torch.zeros(()))


def _whole(output: Any, batch: Any) -> Any:
    return output


def _no_costs(partition: str, flow: Dataflow, sample: Batch) -> Sequence[float]:
    raise AssertionError("a local pipeline is not cut by measured costs")
