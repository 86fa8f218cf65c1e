"""Stages: a boosted model as a Trainer uses one: trained on windows of batches, and called on one to evaluate it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from pipeshard.batch.criterion import Criterion
from pipeshard.distributed.collectives import share_value
from pipeshard.engine.model import PipelineModel
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.errors import UsageError
from pipeshard.plugin import PipelinePlugin
from pipeshard.private import tree_map_only


@contextmanager
def configured(plugin: PipelinePlugin, **changes: Any) -> Iterator[None]:
    """Inside, models are boosted with other arguments."""
    before, plugin.config = plugin.config, replace(plugin.config, **changes)
    try:
        yield
    finally:
        plugin.config = before


class Stages:
    """The stages of `module`, all of which every rank asks for the same."""

    def __init__(self, plugin: PipelinePlugin, module: nn.Module, boosted: PipelineModel) -> None:
        self.plugin, self.module, self.boosted = plugin, module, boosted
        self.optimizer: PipelineOptimizer | None = None
        self.loss_only = False  # of what is evaluated

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)

    def optimize(self, optimizer: Any) -> PipelineOptimizer:
        """Let an optimizer of the whole model train this rank's part of it."""
        _, made, *_ = self.plugin.configure(self.boosted, optimizer)
        assert made is not None
        self.optimizer = made
        return made

    def step(
        self, window: Sequence[dict[str, Any]], criterion: Criterion | None, weight: float, note: Any = False
    ) -> Tensor:
        """Add the gradients of several batches, and return the sum of their losses; each times `weight`.

        `note(output, batch)` is called on the last stage, after each.
        """
        out = self.plugin.execute_pipeline(
            iter(window),
            self.boosted,
            criterion,
            self.optimizer,
            return_outputs=note,
            num_batches=len(window),
            weight=weight,
        )
        loss: Tensor = out["loss"]
        return loss.as_subclass(Tensor)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """The outputs of a batch, on every rank."""
        if torch.is_grad_enabled():
            raise UsageError(
                "model(...) of a pipeline evaluates, under torch.no_grad(): while training it is called once, inside "
                "of compute_loss(model, inputs), with the batch that training_step was given"
            )
        if args:
            raise UsageError("model(...) of a pipeline takes a batch by name: model(**inputs)")
        pipeline = self.boosted.pipeline
        out = self.plugin.execute_pipeline(iter([inputs]), self.boosted, None, None, return_outputs=not self.loss_only)
        if self.loss_only:
            return ModelOutput(loss=out["loss"].as_subclass(Tensor))
        shown = self._shown(out["outputs"])
        if pipeline.group.size() > 1:
            shown = share_value(shown, pipeline.last_rank, pipeline.group)
        shown = tree_map_only(Tensor, self._placed, shown)
        return ModelOutput(**shown) if isinstance(shown, dict) else shown

    def _shown(self, outputs: Any) -> Any:
        """What of the outputs is not kept for generation."""
        dropped = getattr(getattr(self.module, "config", None), "keys_to_ignore_at_inference", ["past_key_values"])
        if isinstance(outputs, dict):
            return {name: value for name, value in outputs.items() if name not in dropped}
        return outputs

    def _placed(self, tensor: Tensor) -> Tensor:
        pipeline = self.boosted.pipeline
        short = pipeline.config.autocast and tensor.dtype in (torch.float16, torch.bfloat16)
        tensor = tensor.as_subclass(Tensor).to(pipeline.device)
        return tensor.float() if short else tensor  # as accelerate gives back what autocast has made

    def train(self, mode: bool = True) -> "Stages":
        self.module.train(mode)
        return self

    def eval(self) -> "Stages":
        return self.train(False)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """None: whoever looks at gradients, or clips, would see those of one stage."""
        return iter(())

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)
        else:
            self.boosted.zero_grad(set_to_none)
