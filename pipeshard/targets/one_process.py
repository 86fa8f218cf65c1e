"""One process: all stages as one module, which is called like the model."""

from typing import TYPE_CHECKING, Any

from torch import nn

from pipeshard.runtime.module import StageModule, as_keywords
from pipeshard.target import Target, register_target

if TYPE_CHECKING:
    from pipeshard.build import Split


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

    def take(self, split: "Split") -> SplitModel:
        return SplitModel(split.model, list(split.stages.values()))


register_target(None, OneProcess)
