"""Entry: `initialize`, which splits a model and returns an Engine that trains it as a pipeline."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from pipeshard.batch.criterion import Criterion
from pipeshard.distributed.groups import raising_errors
from pipeshard.distributed.mesh import backend_here, join_alone
from pipeshard.engine.model import PipelineModel
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.engine.outputs import ReturnOutputs
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.plugin import PipelinePlugin


def initialize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    criterion: Criterion | None = None,
    dataloader: DataLoader[Any] | None = None,
    lr_scheduler: LRScheduler | None = None,
    *,
    plugin: PipelinePlugin | None = None,
    **arguments: Any,
) -> "Engine":
    """Split the model into pipeline stages and keep this process's stage. Call it on every rank.

        engine = pipeshard.initialize(model, optimizer, dataloader=loader, pp_size=2, num_microbatches=8)
        model, optimizer, criterion, loader, lr_scheduler = engine  # as from ColossalAI's booster.boost

    Args:
        model: any module. If its weights are on meta, each process initializes or loads the weights of its own stage.
        optimizer: an optimizer of the parameters of `model`. Without an optimizer, the model can only be evaluated.
        criterion: `fn(output, batch)` that returns the loss. None uses the loss that the model returns.
        dataloader: yields the same batches on every rank of a replica, as a dataloader from `plugin.prepare_dataloader`
            does.
        lr_scheduler: the scheduler of this optimizer.
        plugin: a PipelinePlugin, if you created one for its `prepare_dataloader`.
        arguments: without a plugin, the arguments of PipelinePlugin (`pipeshard.config.PipelineConfig`). `pp_size` is
            required.

    Initializes the process group from torchrun's environment, unless the script has already initialized it. With
    pp_size=1, a process without a launcher creates its own group, so `initialize` also works in a notebook.

    Raises ConfigurationError if arguments are invalid, or if this process needs a launcher and has none. Raises
    UsageError if `lr_scheduler` is passed without its optimizer, or if the model is the inner model of a boosted model.
    Raises TraceError, PartitionError, CheckpointError or BatchError if the model cannot be split, and VerificationError
    if the split model differs from the unsplit model.
    """
    if plugin is not None and arguments:
        raise ConfigurationError(
            f"initialize got plugin={type(plugin).__name__} together with {', '.join(arguments)}: pass all "
            "arguments to the plugin instead"
        )
    if plugin is None and "pp_size" not in arguments:
        raise ConfigurationError(
            "initialize requires pp_size or a plugin: pass pp_size, the number of ranks in a pipeline"
        )
    if plugin is None:
        slices = arguments.get("tp_size", 1), arguments.get("ep_size", 1)
        join_alone(arguments["pp_size"], arguments.get("dp_size"), *slices)
    join()
    engine = Engine(plugin or PipelinePlugin(**arguments))
    engine.boost(model, optimizer, criterion, dataloader, lr_scheduler)
    return engine


def join() -> None:
    """Initialize the process group from torchrun's environment, unless a group exists. The backends are gloo and, if
    this host has a GPU for each of its processes, NCCL."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        raise ConfigurationError(
            "this process has no rank (RANK is not set): start the script with torchrun --nproc-per-node N script.py, "
            "with N = pp_size * dp_size * tp_size (or ep_size), or call torch.distributed.init_process_group(...) "
            "first. In a notebook, call pipeshard.notebook_launch(fn, N). Without a launcher, N must be 1"
        )
    with raising_errors():
        dist.init_process_group(backend_here())


class Engine:
    """Runs a model with a PipelinePlugin, without ColossalAI. The methods have Booster's names and arguments.

    Attributes:
        plugin: the PipelinePlugin, which has `prepare_dataloader`, `recording`, `grid` and more.
        checkpoint_io: saves and loads checkpoints.
        model: the model that the last call to `boost` with an optimizer returned. If no call had an optimizer, the
            model of the last call. None before the first call. Iterating over the engine yields `model` and the next
            four attributes.
        optimizer: the optimizer of this process's part of the model.
        criterion: the given criterion, or the criterion in the model's hints.
        dataloader: the given dataloader.
        lr_scheduler: the given scheduler.
    """

    model: PipelineModel | None = None
    optimizer: PipelineOptimizer | None = None
    criterion: Criterion | None = None
    dataloader: DataLoader[Any] | None = None
    lr_scheduler: LRScheduler | None = None

    def __init__(self, plugin: PipelinePlugin) -> None:
        self.plugin, self.checkpoint_io = plugin, plugin.get_checkpoint_io()
        io = self.checkpoint_io
        self.save_model, self.load_model = io.save_model, io.load_model
        self.save_optimizer, self.load_optimizer = io.save_optimizer, io.load_optimizer
        self.save_lr_scheduler, self.load_lr_scheduler = io.save_lr_scheduler, io.load_lr_scheduler
        self.save_lora_as_pretrained, self.enable_lora = io.save_lora_as_pretrained, plugin.enable_lora

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer, self.criterion, self.dataloader, self.lr_scheduler))

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: Any) -> Any:
        """Index the five objects like the tuple that `boost` returns."""
        return (*self,)[index]

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Criterion | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Split the model, and load this rank's weights if the model is from `PipelinePlugin.from_pretrained`. Returns
        five objects. The engine also keeps these objects as attributes, unless this call has no `optimizer` and an
        earlier call had one."""
        if optimizer is None and isinstance(lr_scheduler, LRScheduler):
            raise UsageError(
                f"lr_scheduler={type(lr_scheduler).__name__} was passed without the "
                f"{type(lr_scheduler.optimizer).__name__} that it schedules, so the model could not be trained: pass "
                "this optimizer as well"
            )
        folder = getattr(model, "_pretrained", None)
        boosted = self.plugin.configure(model, optimizer, criterion, dataloader, lr_scheduler)
        if boosted[1] is not None or self.optimizer is None:
            self.model, self.optimizer, self.criterion, self.dataloader, self.lr_scheduler = boosted
        if folder:
            self.load_model(boosted[0], folder)
            setattr(boosted[0].unwrap(), "_pretrained", None)  # noqa: B010 - torch types a module's attributes as tensors
        return boosted

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module | None = None,
        criterion: Criterion | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: ReturnOutputs = False,
        **options: Any,
    ) -> dict[str, Any]:
        """Run one batch of `data_iter`. See `PipelinePlugin.execute_pipeline` for the result.

        Without a `model`, the method uses the engine's own model, criterion and optimizer, and trains if the engine has
        an optimizer. With a `model`, it behaves like Booster's method: it trains if an `optimizer` is given. Under
        `torch.no_grad()`, it only evaluates.
        """
        if model is None:
            if self.model is None:
                raise UsageError(
                    "this engine has no model yet: call engine.boost(model, ...) first, or use the engine that "
                    "pipeshard.initialize(model, ...) returns"
                )
            model, criterion = self.model, criterion or self.criterion
            optimizer = optimizer or self.optimizer
        return self.plugin.execute_pipeline(
            data_iter, model, criterion, optimizer, return_loss, return_outputs, **options
        )

    def backward(self, loss: Tensor, optimizer: Any) -> None:
        """Run the backward pass of a loss from `model(...)`. Requires pp_size=1, so that one process holds the whole
        model."""
        optimizer.backward(loss)

    def no_sync(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Context manager in which gradients are not summed over replicas or over the ranks that hold a tied parameter.
        See `PipelinePlugin.no_sync`."""
        return self.plugin.no_sync(model, optimizer)
