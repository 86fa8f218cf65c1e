"""Stand-ins: objects that a Trainer uses as its model and its Accelerator, backed by stages and replicas.

A Trainer trains a model on windows of batches, and evaluates by calling the model on a batch. A Trainer assumes that
every process reads different data and holds the full model. In a pipeline, the stages of a replica read the same data.
The PipelineAccelerator therefore distributes data among replicas instead of processes, and gathers from replicas. It
does not wrap models or scale losses, and it clips by the norm of the full model.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.data import DataLoader
from transformers.utils import ModelOutput

from pipeshard.batch.criterion import Criterion
from pipeshard.distributed.collectives import gather, gather_lists, share_value
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.engine import Pipeline
from pipeshard.engine.model import PipelineModel
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.engine.outputs import BACKWARD
from pipeshard.errors import UsageError, listed
from pipeshard.graph.units import unrecomputed
from pipeshard.hf import LAYER_CACHES
from pipeshard.plugin import PipelinePlugin
from pipeshard.private import tree_map_only
from pipeshard.replaced import replaced
from pipeshard.trainer.refusals import refuse_prepared
from pipeshard.trainer.serialization import Pickled, ValueReader, ValueWriter, sending

REPLICAS = "shared_by"  # attribute of a loader: the number of replicas among which it distributes batches
SPLIT = "_pipeshard_split"  # attribute of a model that a Trainer has split: a KeptStages


class Boosts(Protocol):
    """A Trainer that splits models into stages, and returns the optimizer of its own stages."""

    _latest_loader: Any

    def boosted_model(self, model: nn.Module) -> Any: ...

    def boosted_optimizer(self, optimizer: Any) -> PipelineOptimizer: ...


class PipelineAccelerator(Accelerator):
    """An Accelerator whose processes are the replicas of a pipeline, or a single process inside `alone()`."""

    grid: Grid
    trainer: Boosts
    is_alone: bool
    is_muted: bool  # whether gathers return a placeholder instead of communicating
    is_last_call: bool  # whether this is the last call of compute_loss in a step
    gathers: int = 0  # the number of calls that gather from other replicas, including muted calls
    uneven: str  # the argument that may let replicas call compute_loss different numbers of times in a step, or ""

    @classmethod
    def of(cls, accelerator: Accelerator, grid: Grid, trainer: Boosts) -> "PipelineAccelerator":
        """Create a PipelineAccelerator with all attributes of another accelerator."""
        new = cls.__new__(cls)
        new.__dict__.update(vars(accelerator))
        new.grid, new.trainer, new.is_alone, new.is_muted = grid, trainer, False, False
        new.is_last_call, new.uneven = True, ""
        new.scaler = None  # the pipeline itself scales the loss in fp16
        return new

    def alone(self) -> AbstractContextManager[None]:
        """Context manager in which every replica reads all data, as a single process does."""
        return replaced(self, is_alone=True)

    @property
    def num_processes(self) -> int:
        return 1 if self.is_alone else self.grid.dp_size

    @property
    def process_index(self) -> int:
        return 0 if self.is_alone else self.grid.replica

    @property
    def sync_gradients(self) -> bool:
        return self.is_last_call and bool(self.gradient_state.sync_gradients)

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        prepared = tuple(map(self._prepared, args))
        return prepared if len(prepared) > 1 else prepared[0]

    def _prepared(self, thing: Any) -> Any:
        if isinstance(thing, DataLoader):
            return self.prepare_data_loader(thing)
        if isinstance(thing, torch.optim.Optimizer):
            return self.trainer.boosted_optimizer(thing)
        return self.trainer.boosted_model(thing) if isinstance(thing, nn.Module) else thing

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return self.trainer.boosted_model(model)

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> DataLoader[Any]:
        refuse_prepared(data_loader, "accelerator.prepare got")
        seed = data_loader.worker_init_fn
        if isinstance(seed, partial) and "rank" in seed.keywords:  # workers of all stages need the same seed
            data_loader.worker_init_fn = partial(seed.func, *seed.args, **seed.keywords | {"rank": self.process_index})
        with replaced(self.dataloader_config, dispatch_batches=False):  # every rank reads its own batches
            loader: DataLoader[Any] = super().prepare_data_loader(data_loader, *args, **kwargs)
        setattr(loader, REPLICAS, self.num_processes)
        self.trainer._latest_loader = loader
        return loader

    def gather(self, tensor: Any) -> Any:
        def gathered(one: Tensor) -> Tensor:
            rows = gather(one, self.grid.replicas).to(one.device)
            return rows.flatten(0, 1) if one.ndim else rows

        return self._of_replicas(gathered, tensor)

    def gather_entries(self, values: list[Any]) -> list[Any]:
        """Gather the entries of every replica's list."""
        return gather_lists(values, self.grid.replicas) if self._communicates() else values

    def _communicates(self) -> bool:
        """Count a call that gathers, and return whether it communicates."""
        self.gathers += self.num_processes > 1
        if self.is_muted or self.num_processes == 1:
            return False
        self._refuse_uneven()
        return True

    def _of_replicas(self, combine: Callable[[Tensor], Tensor], tensor: Any) -> Any:
        if self._communicates():
            return recursively_apply(combine, tensor, error_on_other_type=True)
        return recursively_apply(_ones, tensor, error_on_other_type=True) if self.is_muted else tensor

    def _refuse_uneven(self) -> None:
        """Raise UsageError if replicas may call compute_loss different numbers of times in this step. The last call in
        a step is allowed, since every replica makes it."""
        if self.uneven and not self.is_last_call:
            raise UsageError(
                f"compute_loss gathers values from {self.num_processes} replicas before its last call in a step, but "
                f"with {self.uneven}, replicas may have different numbers of microbatches, so some replicas could wait "
                "forever: pass num_microbatches instead, or train one replica (use all ranks for pp_size, tp_size or "
                "ep_size)"
            )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather from replicas, and omit samples that were repeated at the end of an epoch. For objects, returns a
        list."""
        if not self._communicates() and self.is_muted:
            return recursively_apply(_ones, input_data)
        try:
            recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
        except TypeError:
            rest = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else -1
            return list(self.gather_entries(input_data))[: rest if rest > 0 else None]
        return super().gather_for_metrics(input_data)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        if not self._communicates():
            return tensor

        def padded(one: Tensor) -> Tensor:
            if dim >= one.ndim:
                return one
            more = int(gather(torch.tensor(one.shape[dim]), self.grid.replicas).max()) - one.shape[dim]
            sizes = [0, 0] * (one.ndim - 1 - dim) + ([more, 0] if pad_first else [0, more])
            return pad(one, sizes, value=pad_index)

        return recursively_apply(padded, tensor, error_on_other_type=True)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        def reduced(one: Tensor) -> Tensor:
            rows = gather(one, self.grid.replicas)
            total = rows.mean(0) if reduction == "mean" else rows.sum(0)
            return (total * scale).to(one)

        return self._of_replicas(reduced, tensor)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        raise UsageError(BACKWARD)

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        """Clip by the norm of the full model, and return this norm. If `max_norm` is inf, do not clip. Raises
        UsageError, on every rank, if `parameters` omit a trained parameter that has a gradient."""
        optimizer = self.trainer.boosted_optimizer(None)
        self._refuse_some([parameters] if isinstance(parameters, Tensor) else parameters, optimizer)
        if max_norm == float("inf"):
            return optimizer.get_grad_norm(norm_type)
        return optimizer.clip_grad_by_norm(max_norm, norm_type)

    def _refuse_some(self, parameters: Iterable[Tensor], optimizer: PipelineOptimizer) -> None:
        """Raise UsageError, on every rank, if `optimizer` on any rank updates a parameter that has a gradient but is
        not in `parameters`."""
        given = {*optimizer.gradients.names_of(parameters).values()}
        missing = [name for name in optimizer.names.values() if name not in given]
        lacking = [name for name in missing if optimizer.weights[name].parameter.grad is not None]
        if lacking := gather_lists(lacking, self.grid.world):
            raise UsageError(
                "accelerator.clip_grad_norm_ clips all gradients by the norm of the whole model, but the parameters "
                f"that you passed do not include {listed(lacking, 3)}: pass model.parameters(), or set "
                "TrainingArguments(max_grad_norm=...). To clip the gradients of some parameters of one stage by their "
                "own norm, pass these parameters to torch.nn.utils.clip_grad_norm_"
            )

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        raise UsageError(
            "a pipeline does not support clip_grad_value_: set TrainingArguments(max_grad_norm=...) instead"
        )

    @property
    def optimizer_step_was_skipped(self) -> bool:
        return self.trainer.boosted_optimizer(None).skipped

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, PipelineModel):
            return model.unwrap()
        return model.module if isinstance(model, ModuleStandIn) else super().unwrap_model(model, *args, **kwargs)


def _ones(tensor: Tensor) -> Tensor:
    """Ones with the shape, dtype and device of `tensor`, as a placeholder for a gathered result."""
    return torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def in_fp32(tensor: Tensor) -> Tensor:
    """Cast an output of a forward under autocast as accelerate does: from fp16 or bf16 to fp32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _drop(outputs: Any, inputs: Any) -> None:
    """A `return_outputs` function that requires all outputs, but keeps none."""


def _shared(outputs: Any, pipeline: Pipeline) -> Any:
    """The last stage's outputs, on every rank. Raises UsageError, on every rank, for outputs that cannot be sent."""
    is_last = dist.get_rank() == pipeline.last_rank
    said = share_value(_pickled(outputs) if is_last else "", pipeline.last_rank, pipeline.group)
    if isinstance(said, str):
        raise UsageError(said)
    return outputs if is_last else ValueReader(said, {}, pipeline.device).load()


def _pickled(outputs: Any) -> Pickled | str:
    """The outputs as a ValueWriter pickles them, or the error for outputs that cannot be sent."""
    writer = ValueWriter({}, {})
    try:
        with sending("the model's output"):
            writer.dump(outputs)
    except UsageError as error:
        return str(error)
    return writer.written


def without_checkpointing(model: nn.Module) -> AbstractContextManager[None]:
    """Context manager that turns off activation checkpointing. Otherwise, TRL would turn it off and on for each batch
    of a reference model, which creates new functions and hooks: each batch would require a new trace."""
    return unrecomputed(model, lambda module: bool(getattr(module, "gradient_checkpointing", False)))


class ModuleStandIn:
    """Base class of stand-ins for `module`: a stand-in delegates attribute access to `module`, and defines
    `__call__`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)


class KeptStages:
    """Keeps the stages of a model for later Trainers, as long as the model exists. A copy of the model contains None
    instead of the stages, since process groups can be neither copied nor pickled."""

    def __init__(self, boosted: PipelineModel) -> None:
        self.boosted = boosted

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(None), ()


class StagesStandIn(ModuleStandIn):
    """A stand-in for `module` that runs its stages. Every rank must make the same calls."""

    def __init__(self, plugin: PipelinePlugin, module: nn.Module, boosted: PipelineModel) -> None:
        super().__init__(module)
        self.plugin, self.boosted = plugin, boosted
        self.optimizer: PipelineOptimizer | None = None
        self.loss_only = False  # whether an evaluation needs only the loss

    def optimize(self, optimizer: Any) -> None:
        """Boost an optimizer of the full model, so that it updates this rank's part of the model."""
        _, self.optimizer, *_ = self.plugin.configure(self.boosted, optimizer)

    def step(self, window: Sequence[dict[str, Any]], criterion: Criterion | None, weight: float) -> Tensor:
        """Accumulate the gradients of several batches, and return the sum of their losses, each multiplied by `weight`.

        The last stage receives the full batches and all outputs if a `criterion` reads them.
        """
        out = self.plugin.execute_pipeline(
            iter(window),
            self.boosted,
            criterion,
            self.optimizer,
            return_outputs=False if criterion is None else _drop,
            num_batches=len(window),
            weight=weight,
        )
        loss: Tensor = out["loss"]
        return loss.as_subclass(Tensor)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """The model's outputs for a batch, on every rank, without caches for generation."""
        if torch.is_grad_enabled():
            raise UsageError(
                "neither model(...) nor compute_loss, such as compute_loss(model, inputs, return_outputs=True), can be "
                "called with gradients enabled in your own training_step or prediction_step. To evaluate, call it "
                "under torch.no_grad(). To train, call super().training_step(...), and read the outputs in "
                "compute_loss, which may call the model once, with the batch that training_step receives"
            )
        if args:
            raise UsageError("model(...) of a pipeline takes only keyword arguments: call model(**inputs)")
        pipeline = self.boosted.pipeline
        with replaced(pipeline, uncuts=True):
            run = self.plugin.execute_pipeline
            out = run(iter([inputs]), self.boosted, None, None, return_outputs=not self.loss_only)
        if self.loss_only:
            return ModelOutput(loss=out["loss"].as_subclass(Tensor))
        shown = out["outputs"]
        if isinstance(shown, dict):
            dropped = getattr(getattr(self.module, "config", None), "keys_to_ignore_at_inference", LAYER_CACHES)
            shown = {name: value for name, value in shown.items() if name not in dropped}
        if pipeline.group.size() > 1:
            shown = _shared(shown, pipeline)
        shown = tree_map_only(Tensor, self._placed, shown)
        return ModelOutput(**shown) if isinstance(shown, dict) else shown

    def _placed(self, tensor: Tensor) -> Tensor:
        pipeline = self.boosted.pipeline
        tensor = tensor.as_subclass(Tensor).to(pipeline.device)
        return in_fp32(tensor) if pipeline.config.autocast else tensor

    def train(self, mode: bool = True) -> "StagesStandIn":
        self.module.train(mode)
        return self

    def eval(self) -> "StagesStandIn":
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)
        self.boosted.zero_grad(set_to_none)  # also parameters without an optimizer, which a callback may have unfrozen
