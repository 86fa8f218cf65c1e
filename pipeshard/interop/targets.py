"""Targets: runtimes that train a model's stages (one process, a Booster, torch's pipelining, DeepSpeed)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeshard.config import AUTO
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.clipping import ModelGradients
from pipeshard.engine.grad_sync import GradientSync
from pipeshard.engine.groups import replace_parameters
from pipeshard.engine.mixed_precision import Precision
from pipeshard.engine.norm_guard import NORM_GUARD
from pipeshard.engine.parameters import HeldParameters
from pipeshard.engine.stage import Microbatch
from pipeshard.errors import NO_LOSS, BatchError, ConfigurationError, TraceError, UsageError, counted
from pipeshard.interop.build import Split, StageModule, Target, as_keywords, register_target
from pipeshard.schedule.given import chunks_of, name_of
from pipeshard.schedule.program import Program

STEP_ARGUMENTS = {"target", "losses", "return_outputs", "loss_kwargs"}  # arguments of torch's schedule.step


class SplitModel(nn.Module):
    """A module that runs all stages of a model in turn. Only values that cross a cut are passed from one stage to the
    next."""

    def __init__(self, model: nn.Module, stages: list[StageModule]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self._parts = (model, stages)  # a tuple, so that the modules are not registered twice
        for stage in stages:
            stage.is_carried = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        model, stages = self._parts
        batch = as_keywords(model, args) | kwargs if args else kwargs
        values: Any = ()
        planned = [stage.microbatch(batch) for stage in stages]  # before any stage changes the model's state
        for stage, microbatch in zip(stages, planned, strict=True):
            stage.planned = microbatch
        stages[0].carry.begin([microbatch.route for microbatch in planned])
        try:
            for module in self.stages:
                values = module(*values, **batch)
        finally:
            stages[0].carry.end()
            for stage in stages:
                stage.planned = None
        return values


class OneProcess(Target):
    """`target=None`: a SplitModel with all stages in this process."""

    whole_output = True

    def take(self, split: Split) -> SplitModel:
        return SplitModel(split.model, list(split.stages.values()))


register_target(None, OneProcess)


class BoostedModel(NamedTuple):
    """A booster, and the model and optimizer that `booster.boost` returned."""

    booster: Any
    model: Any
    optimizer: Any


class Colossalai(Target):
    """`target="colossalai"`: a Booster with a PipelinePlugin, and the boosted model and optimizer.

    Args:
        num_microbatches: the number of microbatches per batch.
        optimizer: the model's optimizer, or a function that creates it from the model's parameters.
        plugin: additional arguments of PipelinePlugin. Omit pp_size, partition and dry_run_input: `build` derives them
            from its own arguments.
    """

    shards_itself = True

    def __init__(
        self, num_microbatches: int, optimizer: Optimizer | Callable[[Any], Optimizer] | None = None, **plugin: Any
    ) -> None:
        self.num_microbatches, self.optimizer, self.plugin = num_microbatches, optimizer, plugin
        for name, given in (("pp_size", "cuts"), ("partition", "cuts"), ("dry_run_input", "batch")):
            if name in plugin:
                raise ConfigurationError(f"build derives {name} from its argument {given}: omit {name}")

    def take(self, split: Split) -> BoostedModel:
        from colossalai.booster import Booster

        from pipeshard.plugin import PipelinePlugin

        plugin = PipelinePlugin(
            self._ranks(split.num_stages),
            num_microbatches=self.num_microbatches,
            partition=split.policy.partition_by,
            dry_run_input=split.sample.data,
            **self.plugin,
        )
        booster = Booster(plugin=plugin)
        optimizer = self.optimizer
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            optimizer = optimizer(split.model.parameters())
        elif optimizer is not None:
            replace_parameters(optimizer, split.became)
        model, optimizer, *_ = booster.boost(split.model, optimizer, split.criterion)
        return BoostedModel(booster, model, optimizer)

    def _ranks(self, num_stages: int) -> int:
        """The number of ranks in a pipeline with `num_stages` stages. The schedule determines the number of chunks per
        rank."""
        schedule = self.plugin.get("schedule") or self.plugin.get("pp_style") or "1f1b"
        v = self.plugin.get("num_model_chunks", 1)
        if callable(schedule):
            schedule = schedule(num_stages // v, self.num_microbatches, v)
        if isinstance(schedule, Program):
            chunks = len(schedule.placement) // (max(schedule.placement) + 1)
        else:
            chunks = 1 if schedule == AUTO else chunks_of(schedule, num_stages, v)
        if num_stages % chunks:
            raise ConfigurationError(
                f"schedule={name_of(schedule)!r} has {chunks} stages per rank, so cuts must define a multiple of "
                f"{chunks} stages, got {num_stages}"
            )
        return num_stages // chunks


register_target("colossalai", Colossalai)


def loss_of_stage(output: Tensor, target: Any) -> Tensor:
    """A loss function for runtimes that require one. The last stage already computes the loss, so this function returns
    `output` unchanged, or as a scalar tensor if its shape is (1,)."""
    is_vector = isinstance(output, Tensor) and output.shape == (1,)
    return output.sum() if is_vector else output  # not a view: torch detaches the loss in place


@dataclass(frozen=True)
class TorchStages:
    """The `PipelineStage`s of this rank, one per chunk, for torch's Schedule1F1B, ScheduleInterleaved1F1B, ...

        built = pipeshard.build(model, cuts, target="torch", batch=microbatch)
        schedule = Schedule1F1B(built.stages[0], m, loss_fn=built.loss_fn)
        schedule.step(**built.keywords(batch), target=labels, losses=losses, return_outputs=False)   # on every rank
        built.sync_gradients()
        built.clip_grad_norm_(1.0)                      # optional
        optimizer.step()                                # of built.parameters()

    Every rank passes the full batch as keyword arguments. `keywords` converts a tuple to keyword arguments. torch does
    not synchronize tied weights: `sync_gradients` sums their gradients over the stages that hold them. torch's
    `clip_grad_norm_` would clip each stage's gradients by the norm of that stage alone, so calling it raises
    UsageError. To accumulate gradients over several steps, create the schedule with scale_grads=False: otherwise, torch
    divides the gradients of earlier steps again in each step.
    """

    stages: list[Any]
    gradients: GradientSync
    clipping: ModelGradients
    keywords: Callable[[Any], dict[str, Any]]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank, each once."""
        return iter(dict.fromkeys(p for stage in self.stages for p in stage.submod.parameters()))

    def sync_gradients(self) -> None:
        """Sum the gradients of tied weights. Call on all ranks, before optimizer.step. A second call before the next
        step of the schedule has no effect."""
        if self.gradients.is_partial:
            self.gradients.finish(True)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients by the norm of the whole model, and return this norm. Call on all ranks, after
        `sync_gradients`."""
        if self.gradients.is_partial:
            raise UsageError(
                "gradients of parameters that several stages hold are not summed yet: call sync_gradients() before "
                "clipping"
            )
        return self.clipping.clip(max_norm, norm_type)

    def zero_grad(self) -> None:
        """Set the gradients of this rank's parameters to None."""
        self.gradients.reset(set(self.parameters()))
        for parameter in self.parameters():
            parameter.grad = None

    loss_fn = staticmethod(loss_of_stage)  # for the schedule


class Torch(Target):
    """`target="torch"`: TorchStages. Requires a process group with one rank per stage (or per `num_model_chunks`
    stages).

    Args:
        num_model_chunks: the number of stages per rank, for torch's interleaved schedules. The default is 2 with
            style="v", and otherwise 1.
        style: "loop" places stage s on rank s % p. "v" places two stages on each rank, first in ascending and then in
            descending order of ranks, for ScheduleZBVZeroBubble and ScheduleDualPipeV.

    `build` raises ConfigurationError without such a process group, UsageError if the last stage computes no loss,
    and BatchError if the batch contains a name that `schedule.step` uses for one of its own arguments. A step raises
    BatchError for microbatches whose sizes differ from the sizes of `batch`.
    """

    def __init__(self, num_model_chunks: int | None = None, style: str = "loop") -> None:
        self.num_model_chunks = num_model_chunks or (2 if style == "v" else 1)
        if style not in ("loop", "v") or (style == "v" and self.num_model_chunks != 2):
            raise ConfigurationError(
                f"style={style!r} and num_model_chunks={self.num_model_chunks} are not supported: use style='loop', "
                "or style='v' with num_model_chunks=2"
            )
        self.style = style

    def placed(self, num_stages: int) -> tuple[Sequence[int], int]:
        p, rest = divmod(num_stages, self.num_model_chunks)
        if not dist.is_initialized():
            raise ConfigurationError(
                "target='torch' requires a process group: call torch.distributed.init_process_group before build"
            )
        if rest:
            raise ConfigurationError(
                f"target='torch' places num_model_chunks={self.num_model_chunks} stages on each rank, so cuts must "
                f"define a multiple of {self.num_model_chunks} stages, got {num_stages}"
            )
        self.grid = Grid(p, 1)
        placement = [*range(p), *reversed(range(p))] if self.style == "v" else [s % p for s in range(num_stages)]
        return placement, self.grid.stage

    def take(self, split: Split) -> TorchStages:
        if split.flow.loss is None:
            raise UsageError(
                "found no loss to train on, but torch's schedule needs the loss of the last stage: add labels to the "
                "batch, or pass criterion= to build and loss_fn=built.loss_fn to the schedule"
            )
        batch = as_keywords(split.model, split.sample.data)
        if taken := STEP_ARGUMENTS & set(batch):
            raise BatchError(
                f"the batch's {min(taken)} cannot be distinguished from the argument {min(taken)} of torch's "
                "schedule.step: rename the argument of the model's forward"
            )
        device = split.policy.replay.device
        holdings = HeldParameters(split.policy, self.grid, Precision("fp32", False, device), fsdp=False)
        names = {parameter: name for name, parameter in split.model.named_parameters()}
        clipping = ModelGradients(holdings, names, self.grid, max_norm=0.0, scaling=None)
        clipping.remedy = "Clip by the norm of the whole model: call built.clip_grad_norm_(max_norm) on every rank"
        clipping.parts = [list(stage.parameters()) for stage in split.stages.values()]
        NORM_GUARD.watch(clipping)
        built = {index: stage.microbatch(batch) for index, stage in split.stages.items()}
        kind = _stage_class(split.stages, holdings.sync, built)
        stages = [
            kind(stage, index, split.num_stages, device, *_shapes(stage, built[index], split), group=self.grid.stages)
            for index, stage in split.stages.items()
        ]
        return TorchStages(stages, holdings.sync, clipping, partial(as_keywords, split.model))


def _stage_class(stages: Mapping[int, StageModule], gradients: GradientSync, built: Mapping[int, Microbatch]) -> Any:
    """torch's PipelineStage with four changes. After `sync_gradients`, the next step sets the summed gradients aside,
    so that they are not summed again. If several stages of this rank share a weight, the weight's gradient is divided
    by the number of microbatches only once, after the last of these stages. A microbatch raises BatchError if the
    shapes or dtypes of its messages differ from those of `built`, since torch allocates buffers for the messages of
    `built`. The last stage's loss has one dimension, along which torch concatenates the outputs of microbatches."""
    from torch.distributed.pipelining import PipelineStage

    holders = Counter(parameter for stage in stages.values() for parameter in stage.parameters())
    ended: Counter[nn.Parameter] = Counter()

    class Stage(PipelineStage):
        def clear_runtime_states(self) -> None:  # called once for each stage, at the beginning of a step
            super().clear_runtime_states()
            if self.stage_index == min(stages) and self.has_backward:
                if not gradients.is_partial or all(parameter.grad is None for parameter in holders):  # zero_grad
                    gradients.begin()
                gradients.is_partial = True  # until sync_gradients

        def forward_one_chunk(
            self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *more: Any, **options: Any
        ) -> Any:
            stage = stages[self.stage_index]
            stage.planned = stage.microbatch(kwargs or {})
            _refuse_other_messages(self.stage_index, stage.planned, built[self.stage_index])
            try:
                return super().forward_one_chunk(fwd_chunk_id, args, kwargs, *more, **options)
            finally:
                stage.planned = None

        def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward_maybe_with_nosync(*args, **kwargs)
            return output.reshape(1) if isinstance(output, Tensor) and not output.ndim else output

        def scale_grads(self, grad_scale_factor: int) -> None:
            for parameter in self.submod.parameters():
                ended[parameter] += 1
                if parameter.grad is not None and ended[parameter] % holders[parameter] == 0:
                    parameter.grad.div_(grad_scale_factor)

    return Stage


def _refuse_other_messages(index: int, microbatch: Microbatch, built: Microbatch) -> None:
    """Raise BatchError if the tensors that the stage receives or sends have other shapes or dtypes for `microbatch`
    than for `built`. Without this check, the receiver would misinterpret the bytes, or wait for more bytes."""
    ends = (
        ("receives", microbatch.route.enters, built.route.enters),
        ("sends", microbatch.route.leaves, built.route.leaves),
    )
    for does, now, then in ends:
        tensors, expected = [*map(microbatch.shape, now.values)], [*map(built.shape, then.values)]
        if tensors != expected:
            raise BatchError(
                f"the tensors that stage {index} {does} for this microbatch are {_listed(tensors)}, but build expected "
                f"{_listed(expected)}. All microbatches must have the sizes of the batch that was passed to build: pad "
                "or drop other microbatches. If steps run inside torch.autocast, also call build inside it"
            )


def _listed(tensors: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {tuple(shape)}" for shape, dtype in tensors)


def _shapes(stage: StageModule, microbatch: Microbatch, split: Split) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Meta tensors with the shapes and dtypes of the stage's inputs and outputs for this microbatch, so that torch does
    not have to infer them."""
    route, receiving = microbatch.route, split.flow.receiving

    def like(values: Any) -> tuple[Tensor, ...]:
        shapes = [(*microbatch.shape(value), value in receiving) for value in values]
        return tuple(torch.empty(s, dtype=dtype, device="meta", requires_grad=grad) for s, dtype, grad in shapes)

    leaving = (torch.empty(1, device="meta", requires_grad=True),) if stage.is_last else like(route.leaves.values)
    return like(route.enters.values), leaving


register_target("torch", Torch)


class StageLayer(nn.Module):
    """A stage as a layer for DeepSpeed. The layer receives one tuple of tensors: the microbatch, then the values of the
    previous stage."""

    def __init__(self, stage: StageModule, names: Sequence[str]) -> None:
        super().__init__()
        self.stage, self.names = stage, tuple(names)

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Any:
        tensors = inputs if isinstance(inputs, tuple) else (inputs,)
        batch, received = tensors[: len(self.names)], tensors[len(self.names) :]
        result = self.stage(*received, **dict(zip(self.names, batch, strict=True)))
        return result if self.stage.is_last else (*batch, *result)


class Tied(nn.Module):
    """A layer that holds one tied weight of a stage, so that DeepSpeed broadcasts the weight and sums its gradients.
    The layer returns its input."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, inputs: Any) -> Any:
        return inputs


class Deepspeed(Target):
    """`target="deepspeed"`: a PipelineModule for `deepspeed.initialize(model=...)`. Additional ranks form replicas.
    Each stage is one layer, built only on the stage's ranks. For each tied weight, every stage that holds the weight
    also has a TiedLayerSpec.

    Pass `module.microbatches(batches)` to DeepSpeed's engine. Each of `batches` is one microbatch: a tuple or a dict of
    tensors. The keys of a dict must be `module.microbatch_names`, the names in the batch that was passed to `build`.

    Args:
        module: additional arguments of PipelineModule (dynamic_shape, ...).
    """

    def __init__(self, **module: Any) -> None:
        if interval := module.get("activation_checkpoint_interval"):
            raise ConfigurationError(
                f"activation_checkpoint_interval={interval} would recompute whole stages, with dropout masks that "
                "differ from the masks of the first forward. Omit this argument. To recompute each layer, call "
                "model.gradient_checkpointing_enable() before build"
            )
        self.module = module

    def placed(self, num_stages: int) -> tuple[Sequence[int], int]:
        size = dist.get_world_size() if dist.is_initialized() else 0
        if not size or size % num_stages:
            called = "" if size else ", and call deepspeed.init_distributed before build"
            raise ConfigurationError(
                f"target='deepspeed' requires a number of ranks that is a multiple of num_stages={num_stages} (defined "
                f"by the cuts), but {f'the world size is {size}' if size else 'no process group exists'}: "
                f"start {counted(num_stages, 'process')}, or a multiple of this number{called}"
            )
        return range(num_stages), dist.get_rank() // (size // num_stages)

    def take(self, split: Split) -> Any:
        from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # type: ignore[import-not-found]

        if split.flow.loss is None:
            raise UsageError(NO_LOSS)
        batch = as_keywords(split.model, split.sample.data)
        _refuse_unsendable(split, batch)
        names, tied = tuple(batch), split.policy.ownership.shared()
        layers: list[Any] = []
        parts = [0]
        for index in range(split.num_stages):
            for name in (name for name, stages in tied.items() if index in stages):
                weight = split.model.get_parameter(name) if index in split.stages else None
                layers.append(TiedLayerSpec(name.replace(".", "/"), Tied, weight, tied_weight_attr="weight"))
            layers.append(LayerSpec(StageLayer, split.stages.get(index), names))
            parts.append(len(layers))

        class StagesModule(PipelineModule):
            """DeepSpeed's PipelineModule, partitioned into pipeshard's stages."""

            microbatch_names = names

            def _partition_layers(self, method: str = "") -> None:
                self.parts = parts
                self._set_bounds(start=parts[self.stage_id], stop=parts[self.stage_id + 1])

            def microbatches(self, batches: Iterable[Any]) -> Iterator[Any]:
                for batch in (as_keywords(split.model, data) for data in batches):
                    if set(batch) != set(names):
                        raise BatchError(
                            f"a microbatch has the keys {sorted(batch)}, but `build` received a batch with the keys "
                            f"{sorted(names)}: pass the same keys"
                        )
                    yield tuple(batch[name] for name in names), torch.zeros(())

        return StagesModule(layers=layers, num_stages=split.num_stages, loss_fn=loss_of_stage, **self.module)


def _refuse_unsendable(split: Split, batch: Mapping[str, Any]) -> None:
    """Raise BatchError or TraceError for values that DeepSpeed cannot send. DeepSpeed sends only tensors, and sends
    back a gradient for each floating-point tensor."""
    for name, value in batch.items():
        if not isinstance(value, Tensor) or (value.is_floating_point() and split.num_stages > 1):
            what = (
                f"an object of type {type(value).__name__}"
                if not isinstance(value, Tensor)
                else f"a tensor of {value.dtype}"
            )
            raise BatchError(
                f"the batch's {name} is {what}: DeepSpeed sends only integer tensors together with activations. Use "
                "target='torch' or 'colossalai'"
            )
    for stage, boundary in enumerate(split.live):
        for value in boundary.values:
            spec, unit = split.flow.spec(value), split.flow.calls[value.call].unit
            if spec.dtype.is_floating_point and value not in boundary.gradients:
                raise TraceError(
                    f"the output of unit {unit} that stage {stage} receives has no gradient, but DeepSpeed returns a "
                    "gradient for every floating-point tensor: cut elsewhere, or use target='torch' or 'colossalai'"
                )


register_target("deepspeed", Deepspeed)
