"""PipelineModel: what a model is to its user once it is boosted."""

from typing import Any

from colossalai.interface import ModelWrapper
from torch import nn

from pipeshard.errors import UsageError
from pipeshard.model.ghost import guard
from pipeshard.pipeline import Pipeline


class PipelineModel(ModelWrapper):
    """A boosted model: `unwrap()` is the model itself, of which this rank holds one stage."""

    def __init__(self, module: nn.Module, pipeline: Pipeline) -> None:
        super().__init__(module)
        self.pipeline = pipeline
        guard(self)

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:
        """The model that was boosted, a PeftModel too: ColossalAI would give its base, without the adapters' names."""
        module: nn.Module = self.module
        return module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            f"this process holds stage {self.pipeline.rank} of {self.pipeline.num_stages} only, so model(...) cannot "
            "be called: use booster.execute_pipeline(data_iter, model, criterion, optimizer, return_outputs=True), "
            "under torch.no_grad() for evaluation"
        )
