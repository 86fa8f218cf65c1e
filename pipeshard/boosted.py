"""PipelineModel: what a model is to its user once it is boosted."""

from typing import Any

from colossalai.interface import ModelWrapper
from torch import nn

from pipeshard.errors import UsageError
from pipeshard.model.ghost import guard
from pipeshard.pipeline import Pipeline
from pipeshard.whole import Whole

# By what it asks of a model first one knows who is about to wrap it.
ASKED_BY = {
    "_ddp_params_and_buffers_to_ignore": "DistributedDataParallel",
    "_is_accelerate_prepared": "accelerate (accelerator.prepare, or transformers' Trainer)",
}


class PipelineModel(ModelWrapper):
    """A boosted model: `unwrap()` is the model itself, of which this rank holds one stage."""

    def __init__(self, module: nn.Module, pipeline: Pipeline) -> None:
        super().__init__(module)
        self.pipeline, self.whole = pipeline, Whole.of(pipeline)
        guard(self)

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:
        """The model that was boosted, a PeftModel too: ColossalAI would give its base, without the adapters' names."""
        module: nn.Module = self.module
        return module

    def __getattr__(self, name: str) -> Any:
        """What the model has: its config, `generate`, `gradient_checkpointing_enable`, ..."""
        if name in ASKED_BY:
            raise UsageError(
                f"{ASKED_BY[name]} would wrap a model that was boosted: its replicas, its optimizer and its steps are "
                "the booster's already. Train it by booster.execute_pipeline(...), or get the whole model for other "
                "uses by pipeshard.to_sequential(model)"
            )
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, where this process has all of it (pp_size=1); its loss goes to `booster.backward`.

        Raises UsageError on a stage.
        """
        if self.whole is not None:
            return self.whole.call(args, kwargs)
        raise UsageError(
            f"this process holds stage {self.pipeline.rank} of {self.pipeline.num_stages} only, so model(...) cannot "
            "be called: use booster.execute_pipeline(data_iter, model, criterion, optimizer, return_outputs=True), "
            "under torch.no_grad() for evaluation"
        )
