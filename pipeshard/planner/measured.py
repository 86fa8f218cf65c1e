"""Measured costs: those of a profile, the same on every rank of a pipeline."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

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
    Raises as `profile_units` and `Profile.load` do.
    """
    kind, _, file = partition.partition(":")
    if kind != "profile":
        return None
    profile = find_profile(file, model, flow, batch.split(*cut)[0], device)
    of_ranks = gather(torch.tensor(profile.costs(flow), dtype=torch.float64), group)
    if file and group.rank() == 0 and not Path(file).exists():
        profile.save(file)
    return of_ranks.median(dim=0).values.tolist()
