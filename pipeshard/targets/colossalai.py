"""ColossalAI: the stages behind its Booster, by pipeshard's own plugin."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.optim import Optimizer

from pipeshard.target import Target, register_target

if TYPE_CHECKING:
    from pipeshard.build import Split


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

    def take(self, split: "Split") -> Boosted:
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
