"""Build: a model cut into stages, and handed to the runtime that is to train them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeshard.errors import ConfigurationError
from pipeshard.model.batch import Batch
from pipeshard.model.criterion import Criterion
from pipeshard.model.dataflow import Dataflow
from pipeshard.model.made_up import made_up
from pipeshard.model.media import read_batch
from pipeshard.model.partition import Boundary, boundaries, named
from pipeshard.model.policy import Policy
from pipeshard.model.registry import find_policy
from pipeshard.model.sharder import Sharder
from pipeshard.model.ties import analyze_tied_weights
from pipeshard.model.trace import trace
from pipeshard.runtime.module import StageModule
from pipeshard.target import Target, find_target


@dataclass(frozen=True)
class Split:
    """A model that was cut, for a target to take.

    Attributes:
        model, sample, criterion: what `build` was given, the sample as a Batch.
        flow: what depends on what. policy: what this process holds and runs.
        ties: the tied names of each group with their stages, as `analyze_tied_weights` gives them; and in
            `policy.shared_names()` what several processes hold, parameters that glue reads too.
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
            runtime in `pipeshard.targets`, or of one that was added by `register_target`.
        batch: a microbatch of the real sizes; made up for models of transformers where there is none.
        criterion: `criterion(output, batch)`, for a model whose output has no loss.
        device: where the stages' tensors are to be.
        options: the target's own, see `pipeshard.targets`.

    Raises ConfigurationError for an unknown target or option, PartitionError for cuts that cannot be, TraceError for a
    model that cannot be cut.
    """
    chosen = find_target(target, options)
    sample = read_batch(model, made_up(model) if batch is None else batch)
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
    Sharder(model, policy, device, seed=torch.initial_seed() % 2**63).shard()


def liveness(flow: Dataflow, policy: Policy, whole: bool) -> list[Boundary]:
    """What enters each stage: the values that it or a later one needs of earlier ones, for the loss or all outputs."""
    return boundaries(flow, policy.stages, len(policy.placement), whole)


def construct(model: nn.Module, policy: Policy, criterion: Criterion | None, whole: bool) -> dict[int, StageModule]:
    """The stages of this process, as modules."""
    return {index: StageModule(model, policy, index, criterion, whole) for index in policy.chunks}
