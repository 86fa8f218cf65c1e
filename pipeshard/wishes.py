"""Wishes: what a model asks of its pipeline, where the plugin's arguments leave it open."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from pipeshard.batch.criterion import Criterion
from pipeshard.errors import ConfigurationError
from pipeshard.split.partition import Cuts
from pipeshard.split.recompute import Recompute

if TYPE_CHECKING:
    from pipeshard.plugin import PipelinePlugin


@dataclass(frozen=True)
class Wishes:
    """The attribute `pipeline_wishes` of a model.

    `num_stages` is the number of parts it is made for, if that matters to it; `recompute` asks that every unit keeps
    no activations, or every one whose class's name is in `checkpointable`.
    """

    num_stages: int | None = None
    partition: Cuts = "auto"
    recompute: bool = False
    criterion: Criterion | None = None
    checkpointable: Collection[str] | None = None


def settled(
    model: nn.Module, plugin: "PipelinePlugin", criterion: Criterion | None
) -> tuple[Cuts, Recompute, Criterion | None]:
    """Partition, recompute and criterion: the plugin's and the user's, where they gave some, else the model's wishes.

    Raises ConfigurationError for a model that is made for another number of stages.
    """
    wishes: Wishes = getattr(model, "pipeline_wishes", Wishes())
    parts = len(plugin.recompute.ratios)
    if wishes.num_stages not in (None, parts):
        raise ConfigurationError(
            f"{type(model).__name__} is made for num_stages={wishes.num_stages}, but pp_size={plugin.pp_size} with "
            f"{plugin.num_model_chunks} chunks on each process has {parts}: give both the same, or leave num_stages out"
        )
    given = any(plugin.recompute.ratios) or plugin.recompute.interval > 0
    wished = replace(Recompute.of(wishes.recompute, 0, parts), classes=wishes.checkpointable)
    recompute = plugin.recompute if given else wished
    partition = wishes.partition if plugin.partition == "auto" else plugin.partition
    return partition, recompute, criterion if criterion is not None else wishes.criterion
