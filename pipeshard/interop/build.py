"""Build: a model cut into stages, and handed to the runtime that is to train them."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion
from pipeshard.batch.read import dummy_inputs, read_batch
from pipeshard.errors import ConfigurationError
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.trace import trace
from pipeshard.interop.stage_module import StageModule, as_keywords
from pipeshard.split.materialize import shard
from pipeshard.split.partition import Boundary, boundaries, named
from pipeshard.split.policy import Policy, find_policy
from pipeshard.split.ties import analyze_tied_weights, tie_on_meta

SHIPPED = "pipeshard.interop.targets"  # beside those of this file


@dataclass(frozen=True)
class Split:
    """A model that was cut, for a target to take.

    Attributes:
        model, sample, criterion: what `build` was given, the sample as a Batch.
        flow: what depends on what. policy: what this process holds and runs.
        ties: the tied names of each group with their stages, as `analyze_tied_weights` gives them; and in
            `policy.ownership.shared()` what several processes hold, parameters that glue reads too.
        live: what enters each stage.
        stages: those of this process, by index; none where the target shards by itself.
    """

    model: nn.Module
    sample: Batch
    criterion: Criterion | None
    flow: Dataflow
    policy: Policy
    ties: list[tuple[tuple[str, int], ...]]
    live: list[Boundary]
    stages: dict[int, StageModule]

    @property
    def num_stages(self) -> int:
        return len(self.policy.placement)


class Target:
    """What `pipeshard.build(..., target=name, **options)` hands a model's stages to; made with the options.

    Attributes:
        whole_output: whether the last stage returns the model's output, and not the loss where there is one.
        shards_itself: whether it takes the model as it is, with the partition alone.
    """

    whole_output = False
    shards_itself = False

    def placed(self, num_stages: int) -> tuple[Sequence[int], int]:
        """The process that each stage is on, and which one this is; by default all are on this one."""
        return [0] * num_stages, 0

    def take(self, split: Split) -> Any:
        """What `build` returns."""
        raise ConfigurationError(f"{type(self).__name__} has no method take(split)")


Kind = TypeVar("Kind", bound=type[Target])
_KINDS: dict[str | None, type[Target]] = {}


def register_target(name: str | None, kind: Kind) -> Kind:
    """Let `build(..., target=name)` use this class; ConfigurationError for a name that is taken, or for no Target."""
    if not (isinstance(kind, type) and issubclass(kind, Target)):
        raise ConfigurationError(f"register_target({name!r}, ...) wants a subclass of Target, not {kind!r}")
    importlib.import_module(SHIPPED)  # whose names are taken
    if _KINDS.get(name, kind) is not kind:
        raise ConfigurationError(f"there is a target {name!r} already, {_KINDS[name].__name__}: choose another name")
    _KINDS[name] = kind
    return kind


def find_target(name: str | None, options: Mapping[str, Any]) -> Target:
    """The target of this name, with these options; ConfigurationError where there is none, or it has none of these."""
    importlib.import_module(SHIPPED)
    if name not in _KINDS:
        names = sorted(known for known in _KINDS if known is not None)
        close = get_close_matches(str(name), names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(map(repr, names))} and None"
        raise ConfigurationError(f"target={name!r} is unknown: {hint} (others are added by pipeshard.register_target)")
    kind = _KINDS[name]
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        raise ConfigurationError(f"target={name!r} takes {kind.__name__}{inspect.signature(kind)}: {error}") from error
    return kind(**options)


def build(
    model: nn.Module,
    cuts: int | Sequence[int] | Sequence[str],
    target: str | None = None,
    batch: Any = None,
    criterion: Criterion | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Any:
    """Cut `model` into stages and hand them to `target`, whose object is returned.

    Args:
        cuts: the names of the modules to cut after (Slapo, Chen et al. 2023, arXiv:2302.08005), nested ones too; or how
            many unit calls each stage gets; or the number of stages, balanced by cost.
        target: None keeps all stages in this process, as one module that is called like the model; else the name of a
            runtime in `pipeshard.interop`, or of one that was added by `register_target`.
        batch: a microbatch of the real sizes; made up for models of transformers where there is none.
        criterion: `criterion(output, batch)`, for a model whose output has no loss.
        device: where the stages' tensors are to be.
        options: the target's own, see `pipeshard.interop`.

    Raises ConfigurationError for an unknown target or option, PartitionError for cuts that cannot be, TraceError for a
    model that cannot be cut.
    """
    chosen = find_target(target, options)
    tie_on_meta(model)
    sample = read_batch(model, dummy_inputs(model) if batch is None else batch)
    flow, policy = partition(model, cuts, sample, criterion, chosen, torch.device(device))
    ties = analyze_ties(model, policy)
    if not chosen.shards_itself:
        consolidate(model, policy, torch.device(device))
    whole = chosen.whole_output or flow.loss is None
    live = liveness(flow, policy, whole)
    stages = {} if chosen.shards_itself else construct(model, policy, criterion, whole)
    return chosen.take(Split(model, sample, criterion, flow, policy, ties, live, stages))


def partition(
    model: nn.Module,
    cuts: int | Sequence[int] | Sequence[str],
    sample: Batch,
    criterion: Criterion | None,
    target: Target,
    device: torch.device,
) -> tuple[Dataflow, Policy]:
    """Which stage runs each unit call, and which process each stage."""
    if isinstance(cuts, str) or (isinstance(cuts, int) and cuts < 1):
        raise ConfigurationError(f"cuts={cuts!r}: give the names of the modules to cut after, or a number of stages")
    names = [] if isinstance(cuts, int) else named(cuts)
    parts = cuts if isinstance(cuts, int) else len(cuts) + bool(names or not cuts)
    flow = trace(model, sample, criterion, cuts=names)
    placement, rank = target.placed(parts)
    by = "auto" if isinstance(cuts, int) or not cuts else cuts
    processes = max(placement) + 1
    return flow, find_policy(model)(model, flow, rank, processes, by, device=device, placement=placement)


def analyze_ties(model: nn.Module, policy: Policy) -> list[tuple[tuple[str, int], ...]]:
    """The tied names with their stages, before anything is released."""
    calls = zip(policy.flow.calls, policy.stages, strict=True)
    return analyze_tied_weights(model, {call.unit: stage for call, stage in calls})


def consolidate(model: nn.Module, policy: Policy, device: torch.device) -> None:
    """Release what this process does not hold, and bring the rest to the device, with values where it was on meta."""
    shard(model, policy, device, seed=torch.initial_seed() % 2**63)


def liveness(flow: Dataflow, policy: Policy, whole: bool) -> list[Boundary]:
    """What enters each stage: the values that it or a later one needs of earlier ones, for the loss or all outputs."""
    return boundaries(flow, policy.stages, len(policy.placement), whole)


def construct(model: nn.Module, policy: Policy, criterion: Criterion | None, whole: bool) -> dict[int, StageModule]:
    """The stages of this process, as modules."""
    return {index: StageModule(model, policy, index, criterion, whole) for index in policy.chunks}


class SplitModel(nn.Module):
    """The stages of a model one after the other; what passes between them is what would cross between processes."""

    def __init__(self, model: nn.Module, stages: list[StageModule]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self._model = (model,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        batch = as_keywords(self._model[0], args) | kwargs if args else kwargs
        values: Any = ()
        for stage in self.stages:
            values = stage(*values, **batch)
        return values


class OneProcess(Target):
    """`target=None`."""

    whole_output = True

    def take(self, split: Split) -> SplitModel:
        return SplitModel(split.model, list(split.stages.values()))


register_target(None, OneProcess)


class Boosted(NamedTuple):
    """A booster, and what its `boost` returned."""

    booster: Any
    model: Any
    optimizer: Any


class Colossalai(Target):
    """`target="colossalai"`: a Booster with a PipelinePlugin, and the boosted model.

    Args:
        num_microbatches: how each batch is cut.
        optimizer: the model's, or a function that makes it of its parameters.
        plugin: further arguments of PipelinePlugin.
    """

    shards_itself = True

    def __init__(
        self, num_microbatches: int, optimizer: Optimizer | Callable[[Any], Optimizer] | None = None, **plugin: Any
    ) -> None:
        self.num_microbatches, self.optimizer, self.plugin = num_microbatches, optimizer, plugin

    def take(self, split: Split) -> Boosted:
        from colossalai.booster import Booster

        from pipeshard.plugin import PipelinePlugin

        stages = split.num_stages // self.plugin.get("num_model_chunks", 1)
        plugin = PipelinePlugin(
            stages,
            num_microbatches=self.num_microbatches,
            partition=split.policy.partition_by,
            dry_run_input=split.sample.data,
            **self.plugin,
        )
        booster = Booster(plugin=plugin)
        optimizer = self.optimizer
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            optimizer = optimizer(split.model.parameters())
        model, optimizer, *_ = booster.boost(split.model, optimizer, split.criterion)
        return Boosted(booster, model, optimizer)


register_target("colossalai", Colossalai)
