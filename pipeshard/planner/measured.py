"""Measured costs: those of a profile, the same on every rank of a pipeline."""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pipeshard.errors import ConfigurationError
from pipeshard.model.batch import Batch
from pipeshard.model.dataflow import Dataflow
from pipeshard.planner.profile import find_profile
from pipeshard.runtime.agreement import gather


def measured_costs(
    partition: str,
    model: nn.Module,
    flow: Dataflow,
    batch: Batch,
    cut: tuple[int | None, int | None],
    device: torch.device,
    group: dist.ProcessGroup,
) -> list[float] | None:
    """Seconds of each unit call: the median of what the ranks of `group`, which all call it, have measured.

    `cut` is the number of microbatches in `batch`, or the samples in each. None if `partition` is neither "profile" nor
    "profile:PATH". A file that is there is read, one that is not is written.
    Raises on every rank what fails on one: there ConfigurationError, or as `profile_units` and `Profile.load` do.
    """
    kind, _, file = partition.partition(":")
    if kind != "profile":
        return None
    failure: Exception | None = None
    seconds = torch.full((len(flow.calls),), math.nan, dtype=torch.float64)
    try:
        microbatch = batch.split(*cut)[0]
        profile = find_profile(file, model, flow, microbatch, device)
        seconds = torch.tensor(profile.costs(flow), dtype=torch.float64)
    except Exception as error:
        failure = error
    of_ranks = gather(seconds, group)
    if of_ranks.isnan().any():
        raise failure or ConfigurationError("partition='profile' failed on another stage: the reason is there")
    if file and group.rank() == 0 and not Path(file).exists():
        profile.save(file)
    return of_ranks.median(dim=0).values.tolist()
