"""Whole: a model that one process has all of, called as it is, as scripts do where there is no pipeline."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeshard.errors import UsageError
from pipeshard.model.media import read_batch
from pipeshard.pipeline import Pipeline
from pipeshard.runtime.agreement import together_in


class Whole:
    """Calls the model of a pipeline of one stage, outside of its steps, and adds the gradients of a loss."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._adding = False  # inside `backward`

    @classmethod
    def of(cls, pipeline: Pipeline) -> "Whole | None":
        """None where this process has a part of the model only, or gathers it in steps."""
        grid = pipeline.grid
        return cls(pipeline) if grid.pp_size == grid.tp_size == 1 and not pipeline.plugin.fsdp else None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output. Its own `loss.backward()` is refused where that would not do."""
        pipeline, precision = self.pipeline, self.pipeline.precision
        pipeline.refuse_blank()
        if torch.is_grad_enabled():
            pipeline.gradients.add_to()
        with precision.running():
            if not precision.lowers:
                output = pipeline.model(*args, **kwargs)
            elif args and kwargs:
                raise UsageError("model(...) in 16 bits gets a batch by name or by place, not both: name all of it")
            else:
                output = precision.of_batch(read_batch(pipeline.model, kwargs or args)).call(pipeline.model)
        if pipeline.grid.dp_size > 1 or pipeline.plugin.scaling is not None:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._refuse_plain)
        return output

    @together_in("booster.backward")
    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the mean of the replicas' losses, each as it is."""
        pipeline, sync = self.pipeline, self.pipeline.sync
        pipeline.gradients.add_to()
        if problems := sync.problems():
            raise UsageError(problems[0])
        sync.begin()
        self._adding = True
        try:
            loss.backward(torch.full_like(loss, pipeline.scale / pipeline.grid.dp_size))
        finally:
            self._adding = False
        sync.finish(pipeline.synchronizes)
        pipeline.gradients.added()

    def _refuse_plain(self, _: Tensor) -> None:
        if not self._adding:
            raise UsageError(
                "loss.backward() would neither scale the loss, for precision='fp16', nor sum gradients over replicas: "
                "call booster.backward(loss, optimizer)"
            )
