"""PipelineModel: the boosted model that a user works with, on a stage or in one process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.batch.read import read_batch
from pipeshard.distributed.collectives import together_in
from pipeshard.engine.engine import Pipeline
from pipeshard.errors import UsageError
from pipeshard.ghost import guard
from pipeshard.private import tree_tensors


class Whole:
    """Calls the model of a pipeline of one stage, outside of its steps, and adds the gradients of a loss."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._adding = False  # inside `backward`

    @classmethod
    def of(cls, pipeline: Pipeline) -> "Whole | None":
        """The Whole of this pipeline; None if this process holds only a part of the model, or gathers it in each step
        (FSDP)."""
        grid = pipeline.grid
        return cls(pipeline) if grid.pp_size == grid.tp_size == 1 and not pipeline.config.fsdp else None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output. Its own `loss.backward()` is refused if it would be wrong."""
        pipeline, precision = self.pipeline, self.pipeline.precision
        pipeline.refuse_blank()
        if torch.is_grad_enabled():
            pipeline.gradients.add_to()
        with precision.running():
            if not precision.lowers:
                output = pipeline.model(*args, **kwargs)
            elif args and kwargs:
                raise UsageError(
                    "model(...) in 16 bits takes positional or keyword arguments, not both: pass all of them by keyword"
                )
            else:
                batch = replace(read_batch(pipeline.model, kwargs or args), taken=None)
                output = precision.of_batch(batch).call(pipeline.model)
        if pipeline.grid.dp_size > 1 or pipeline.scaling is not None:
            for tensor in tree_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._refuse_plain)
        return output

    @together_in("booster.backward")
    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of the mean of the replicas' losses, unweighted."""
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
                "loss.backward() would neither scale the loss (precision='fp16') nor sum gradients over replicas: "
                "call booster.backward(loss, optimizer)"
            )


# By what it asks of a model first one knows who is about to wrap it.
ASKED_BY = {
    "_ddp_params_and_buffers_to_ignore": "DistributedDataParallel",
    "_is_accelerate_prepared": "accelerate (accelerator.prepare, or transformers' Trainer)",
}

OWN = frozenset({"module", "pipeline", "whole", "generation", "checkpoint_io"})  # attributes: others are the model's
OWN_METHODS = ("forward", "compile", "extra_repr")
# torch's methods of modules that the model itself answers, so that names, children, hooks and keys are its own.
PUBLIC = [name for name, value in vars(nn.Module).items() if callable(value) and not name.startswith("_")]
ANSWERED = ("_apply", *(name for name in PUBLIC if name not in OWN_METHODS))


def _answered(name: str) -> Callable[..., Any]:
    """The method of this name, called on the model itself; if it returns the model, the boosted model is returned
    instead."""

    def call(self: "PipelineModel", *args: Any, **kwargs: Any) -> Any:
        module = self.module
        answer = getattr(module, name)(*args, **kwargs)
        return self if answer is module else answer

    call.__name__, call.__doc__ = name, getattr(nn.Module, name).__doc__
    return call


class PipelineModel(nn.Module):
    """A boosted model: `unwrap()` is the model itself, of which this rank holds one stage.

    It has the attributes and methods of the model. Attributes are set on the model, whose forward reads them.
    """

    def __init__(self, module: nn.Module, pipeline: Pipeline) -> None:
        nn.Module.__init__(self)  # not that of ColossalAI's ModelWrapper, which may come after this class
        self.module = module
        self.pipeline, self.whole = pipeline, Whole.of(pipeline)
        self.generation: Any = None  # what all stages generate with
        self.checkpoint_io: Any = None  # that of the plugin, which knows of saves in the background
        guard(module)

    @property
    def training(self) -> bool:
        """The model's mode: its mode at boost, until train() or eval() is called."""
        module = self._modules.get("module")
        return module is None or module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if (module := self.__dict__.get("_modules", {}).get("module")) is not None:
            module.training = mode

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:
        """The model that was passed to boost, even if it is a PeftModel: ColossalAI would return the base model,
        without the names of the adapters."""
        module: nn.Module = self.module
        return module

    @property
    def generate(self) -> Any:
        """transformers' `generate`, run by all stages together; only for models that have it."""
        getattr(self.module, "generate")  # noqa: B009 - AttributeError
        return self.generation

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_modules", {}).get("module")
        if module is None or name in OWN:
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __getattr__(self, name: str) -> Any:
        """The model's attributes: its config, `generate`, `gradient_checkpointing_enable`, ..."""
        if name in ASKED_BY:
            raise UsageError(
                f"{ASKED_BY[name]} would wrap a boosted model, but the booster already manages its replicas, optimizer "
                "and steps. Train it with booster.execute_pipeline(...), or get the full model for other uses with "
                "pipeshard.to_sequential(model)"
            )
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, if this process has the whole model (pp_size=1); pass its loss to `booster.backward`.

        Raises UsageError on a stage.
        """
        if self.whole is not None:
            return self.whole.call(args, kwargs)
        raise UsageError(
            f"this process holds only stage {self.pipeline.rank} of {self.pipeline.num_stages}, so model(...) cannot "
            "be called: use booster.execute_pipeline(data_iter, model, criterion, optimizer, return_outputs=True), "
            "under torch.no_grad() for evaluation"
        )


for _name in ANSWERED:
    setattr(PipelineModel, _name, _answered(_name))
