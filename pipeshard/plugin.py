"""PipelinePlugin: pipeline parallelism behind ColossalAI's Booster."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from colossalai.booster.plugin.pp_plugin_base import PipelinePluginBase
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from pipeshard.batch.batch_dims import check_declared
from pipeshard.batch.criterion import Criterion
from pipeshard.boost import boost_model, boost_optimizer, check_optimizer
from pipeshard.checkpoint.io import PipelineCheckpointIO
from pipeshard.checkpoint.load import blank_model
from pipeshard.checkpoint.lora import enable_lora
from pipeshard.compat import (
    PipelineStageManager,
    missing_attribute,
    refuse_positional,
    restore_meta_kernels,
    schedule_of,
)
from pipeshard.dataloader import ResumableDataLoader
from pipeshard.distributed.consistency import compare_ranks, texts_of, together_in, versions
from pipeshard.distributed.mesh import DP, PP, TP, Grid, own_device
from pipeshard.distributed.watching import calling, watch_world
from pipeshard.engine.engine import Pipeline
from pipeshard.engine.mixed_precision import PRECISIONS, LossScale, Precision
from pipeshard.engine.model import PipelineModel
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.engine.outputs import ReturnOutputs
from pipeshard.engine.p2p import P2P, check_p2p
from pipeshard.engine.recording import Recording
from pipeshard.errors import UsageError
from pipeshard.options import (
    check_chunks,
    check_compile,
    check_kinds,
    check_microbatches,
    check_precision,
    check_replicas,
    check_split_backward,
    check_timeout,
    check_tp_plan,
    check_verify,
)
from pipeshard.schedule.given import Schedule, is_v, program_of
from pipeshard.split.initialize import InitWeights
from pipeshard.split.partition import Cuts
from pipeshard.split.policy import Policy
from pipeshard.split.recompute import Recompute
from pipeshard.verify.result import standing_alone

restore_meta_kernels()
NOT_COMPARED = ("self", "__class__", "dry_run_input", "timeout")  # may differ between ranks


class PipelinePlugin(PipelinePluginBase):
    """Trains a model across `pp_size` processes, each of which holds one stage, or several chunks of the model.

    The world may have more: `dp_size` replicas of the pipeline, which read different batches, and `tp_size` slices of
    every stage. Rank 0 is the first slice of the first stage of the first replica; then come slices, stages, replicas.

    Args:
        pp_size: p, the number of stages.
        num_microbatches, microbatch_size: exactly one of the two; how each batch is cut along its samples. With
            pp_size=1 both may be left out.
        schedule: "1f1b", "gpipe", "interleaved", "zb-h1" or "zbv". With the last two, the weight gradients of linear
            and embedding layers are computed apart, while a stage would wait. Or a `pipeshard.schedule.Program`, or a
            function of (p, m, v) that returns one, which is run as it is, messages added.
        num_model_chunks: v, the chunks of the model on each process, for "interleaved"; "zbv" always has two.
        p2p: "broadcast", "isend", or a subclass of `pipeshard.P2P`.
        partition: "auto" (by cost), "uniform", "parameters", "type:REGEX" (equally many units whose class matches),
            "profile" (by measured time; "profile:PATH" keeps it in a file), how many unit calls each of the p·v stages
            gets, or the names of the units to cut after.
        policy: a Policy class for this model; by default the one registered for it.
        init_weights: for what is on meta (built under `torch.device("meta")`, or accelerate's `init_empty_weights`).
            True draws it by the architecture's own rule, False leaves it to `booster.load_model`, a function is called
            as `fn(module)` or `fn(module, name)` for every module with such tensors. What is drawn depends on the seed
            (`torch.manual_seed`, of the first stage) and on names only, not on `pp_size`.
        dry_run_input: a batch the model is traced with, or a function `fn(size, device)` that makes one of so many
            samples; by default the first samples of the dataloader.
        shared_weights: groups of names of parameters that are to be one, such as [("embed.weight", "head.weight")],
            which become so before the model is cut; the first one's values stay.
        max_norm: clip the gradients of the whole model to this L2 norm in every `optimizer.step()`; 0 does not.
        loss_reduction: "token" makes the loss that of the whole batch, the mean over its valid labels;
            "microbatch" averages the microbatches' losses as they are.
        dp_size: the replicas; by default as many as the world has room for.
        tp_size: ranks that slice each stage, by the architecture's own `tp_plan` (transformers 5) or its policy's.
        tp_plan: another one: by the names of modules, with * for numbers, "colwise", "rowwise" or another style.
        zero_stage: 1 divides the optimizer's state among the replicas, by whole parameters.
        fsdp: True divides parameters, gradients and the optimizer's state of each held unit among the replicas, by
            torch's `fully_shard`; parameters are gathered once a step. Not with "zb-h1" and "zbv".
        precision: "fp32" leaves the model in its own dtype; with "bf16" or "fp16" parameters are in 16 bits, gradients
            are added up and parameters updated in fp32. "fp16" scales the loss, and leaves a step out on every rank
            when a gradient overflowed on one.
        autocast: keep the parameters in fp32, and run forwards under torch.autocast of `precision`.
        initial_scale: what the loss is scaled with at first, with "fp16".
        compile: True, or options of torch.compile: each held unit is compiled by itself, and units of one class once.
            Not with "zb-h1" and "zbv", which split the backward of layers.
        batch_dims: for leaves of the batch, by path, the dimension that counts the samples where that is not the first
            (time-major inputs), or None for what every microbatch gets whole. What is not declared and may be either
            is found by running the glue both ways; a main input has to be declared.
        recompute: the units that keep no activations and run again in the backward pass: True (all), a share of each
            stage's units in [0, 1] (repeated layers first), or a list of shares, one for each of the p·v stages.
        activation_checkpoint_interval: or every k-th unit of the model, where k > 0.
        timeout: seconds that one action of a step, or a wait for another rank, may take (three times as long elsewhere)
            before all ranks end with a table of what each of them does; None for ever. "adaptive" is 20 times the
            longest so far, and at least 30.
        check_finite: look at the loss and at what every stage sends and adds up, and stop on what is not finite by an
            error that names the stage and the parameter. With "fp16", gradients may overflow: they are not looked at.
        verify: prove before the model is cut that it trains as it does unsplit: all stages take two steps in the first
            process, on samples of the batch that it is traced with, beside the model as it is. "auto" does so for
            models other than transformers' own and for criteria, where it takes less than 5 seconds and a tenth of the
            free memory; what was not proven is said. A difference is a VerificationError.
        deferred_batch_norm: running statistics of batch norm move once a step, by mean and variance of the whole batch
            (of this replica), and not once a microbatch. Not with `compile`.
        foreign: what ColossalAI's HybridParallelPlugin takes beside these. `pp_style` is the schedule; options for
            speed are left out, with a warning; the others are refused, unless they have their defaults, with what to
            use here instead.

    Raises ConfigurationError for arguments that cannot work, on every rank.
    """

    def __init__(
        self,
        pp_size: int,
        *positional: Any,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        schedule: Schedule = "1f1b",
        num_model_chunks: int = 1,
        p2p: str | type[P2P] = "broadcast",
        partition: Cuts = "auto",
        policy: type[Policy] | None = None,
        dry_run_input: Any = None,
        init_weights: InitWeights = True,
        max_norm: float = 0.0,
        loss_reduction: str = "token",
        compile: bool | dict[str, Any] = False,
        dp_size: int | None = None,
        tp_size: int = 1,
        zero_stage: int = 0,
        fsdp: bool = False,
        precision: str = "fp32",
        autocast: bool = False,
        initial_scale: float = 2.0**16,
        batch_dims: Mapping[str, int | None] | None = None,
        recompute: bool | float | Sequence[float] = False,
        activation_checkpoint_interval: int = 0,
        shared_weights: Sequence[Sequence[str]] = (),
        timeout: float | str | None = 600.0,
        check_finite: bool = False,
        verify: bool | str = "auto",
        tp_plan: Mapping[str, str] | None = None,
        deferred_batch_norm: bool = False,
        **foreign: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in NOT_COMPARED}
        super().__init__()
        check_timeout(timeout)
        watch = watch_world(timeout)
        with calling("PipelinePlugin"):
            refuse_positional(positional)
            known = [name for name in inspect.signature(type(self)).parameters if name not in ("positional", "foreign")]
            first = watch is None or watch.rank == 0
            schedule = schedule_of(schedule, foreign, known, warns=first)
            if pp_size == 1 and num_microbatches is microbatch_size is None:
                num_microbatches = 1
            check_microbatches(num_microbatches, microbatch_size)
            chunks = check_chunks(schedule, pp_size, num_microbatches, num_model_chunks)
            check_kinds(policy, init_weights, loss_reduction)
            check_replicas(zero_stage, fsdp)
            check_compile(compile, deferred_batch_norm)
            p = 1 if isinstance(schedule, str) else pp_size
            check_split_backward(program_of(schedule, p, 1, chunks), compile, fsdp)
            check_precision(precision, autocast)
            check_declared(batch_dims)
            self.verify = check_verify(verify)
            if watch is not None:
                compare_ranks(versions() | texts_of(given), watch.world, watch.named)
            alone = standing_alone()
            pp_size = pp_size if alone is None else alone.pp_size or pp_size
            self.grid = Grid(pp_size, dp_size, tp_size) if alone is None else Grid(1, 1, 1)
            if watch is not None:
                watch.named = self.grid.named
            self.pp_size, self.dp_size, self.tp_size = pp_size, self.grid.dp_size, self.grid.tp_size
            self.dp_axis, self.pp_axis, self.tp_axis = DP, PP, TP
            self.dp_group, self.pp_group, self.tp_group = self.grid.replicas, self.grid.stages, self.grid.slices
            self.num_microbatches, self.microbatch_size = num_microbatches, microbatch_size
            self.schedule = self.pp_style = schedule
            self.num_model_chunks = chunks
            self.p2p, self.partition = check_p2p(p2p), partition
            self.policy, self.dry_run_input, self.init_weights = policy, dry_run_input, init_weights
            self.max_norm, self.loss_reduction, self.compile = max_norm, loss_reduction, compile
            self.check_finite, self.deferred_batch_norm = check_finite, deferred_batch_norm
            self.zero_stage, self.fsdp, self.batch_dims = zero_stage, fsdp, dict(batch_dims or {})
            self.shared_weights, self.tp_plan = shared_weights, check_tp_plan(tp_plan)
            self.recompute = Recompute.of(recompute, activation_checkpoint_interval, pp_size * chunks)
            self.pg_mesh = self.grid.mesh
            in_v = chunks == 2 and is_v(program_of(schedule, pp_size, 1, chunks).placement, pp_size)
            self.stage_manager = PipelineStageManager(self.pg_mesh, PP, chunks > 1, in_v or schedule == "zbv", chunks)
            self.device = own_device()
            self.precision, self.arithmetic = precision, Precision(precision, autocast, self.device)
            self.scaling = LossScale(initial_scale) if self.arithmetic.scales else None
            self._checkpoint_io = PipelineCheckpointIO(self.grid)
            self._pipeline: Pipeline | None = None

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute(name)

    @property
    def enable_pipeline_parallelism(self) -> bool:
        return self.pp_size > 1

    def _yes(self) -> bool:
        return True

    control_device = control_precision = control_checkpoint_io = support_no_sync = support_lora = _yes

    def get_checkpoint_io(self) -> PipelineCheckpointIO:
        """One for all: it knows of the save in the background."""
        return self._checkpoint_io

    def supported_devices(self) -> list[str]:
        return ["cpu", "cuda"]

    def supported_precisions(self) -> list[str]:
        return list(PRECISIONS)

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
    ) -> nn.Module:
        """Put LoRA adapters on a model, before it is boosted; see `pipeshard.checkpoint.lora.enable_lora`."""
        return enable_lora(model, pretrained_dir, lora_config, bnb_quantization_config)

    @staticmethod
    def from_pretrained(auto_class: Any, path: str | Path, gguf_file: str | None = None, **options: Any) -> nn.Module:
        """The model of a Hugging Face folder without its weights, which `booster.boost` then loads, each stage its own.

        `auto_class` is an AutoModelFor... or a model class; `options` are fields of its config (and `dtype`), as in its
        own `from_pretrained`, and what the folder lacks is drawn likewise. `gguf_file` names a GGUF file in the folder.
        In evaluation mode. Raises CheckpointError for a folder without a config, ConfigurationError for an option that
        the config has not.
        """
        return blank_model(auto_class, Path(path), gguf_file, options)

    @together_in("booster.boost")
    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Criterion | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[PipelineModel, PipelineOptimizer | None, Criterion | None, DataLoader[Any] | None, LRScheduler | None]:
        """Cut the model, keep this rank's stage, and narrow the optimizer to it."""
        model, criterion = boost_model(self, model, optimizer, criterion, dataloader)
        self._pipeline = model.pipeline
        return model, boost_optimizer(self, model, optimizer), criterion, dataloader, lr_scheduler

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Criterion | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: ReturnOutputs = False,
    ) -> dict[str, Any]:
        """Run one batch of `data_iter` through the pipeline; every rank calls it with the same batch.

        Forward and backward where gradients are enabled and an optimizer is given; the gradients are then in place,
        ties summed. Otherwise (under `torch.no_grad()`, or without an optimizer) forward alone. Returns "loss", a
        tensor with the same value on every rank, and "outputs", on the last stage what `return_outputs` asks for (None
        elsewhere): with True the model's output for the whole batch, with a field's name or a list of them an output
        with these only, with "loss" the losses of the microbatches, shape (m,), and with a function
        `fn(output, microbatch)`, called under no_grad right after each forward of the last stage, the list of its
        results, one for each microbatch in order. Nothing else of the outputs is kept.
        """
        pipeline = self._pipeline_of(model, "execute_pipeline")
        train = torch.is_grad_enabled() and optimizer is not None
        if train:
            check_optimizer(optimizer, pipeline)
        with calling("execute_pipeline"), torch.set_grad_enabled(train):
            return pipeline.step(data_iter, criterion, train, return_loss, return_outputs)

    @contextmanager
    def no_sync(self, model: nn.Module | None = None, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Inside, gradients of this model (by default, of the one that was boosted last) stay as this rank has them;
        the first step outside, or `sync_grads`, sums what has piled up over the replicas and the holders of ties."""
        pipeline = self._pipeline_of(model, "no_sync")
        before, pipeline.synchronizes = pipeline.synchronizes, False
        try:
            yield
        finally:
            pipeline.synchronizes = before

    def sync_grads(self, model: nn.Module | None = None) -> None:
        """Sum the gradients of this model (by default, of the one that was boosted last) that have piled up under
        `no_sync`, without a step; every rank calls it."""
        self._pipeline_of(model, "sync_grads").sync_grads()

    def _pipeline_of(self, model: nn.Module | None, call: str) -> Pipeline:
        if model is None and self._pipeline is not None and call != "execute_pipeline":
            return self._pipeline
        if not isinstance(model, PipelineModel):
            got = "no model" if model is None else f"a {type(model).__name__}"
            raise UsageError(f"{call} got {got}: pass the model that booster.boost(...) returned")
        return model.pipeline

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int | None,
        shuffle: bool = False,
        seed: int = 1024,
        *,
        distributed_sampler_cls: Any = None,
        **options: Any,
    ) -> ResumableDataLoader:
        """A DataLoader from which every stage reads the same batches, in an order that depends on `seed` and epoch.

        It knows its position: `save_training_state(..., dataloader=...)` keeps it, also within an epoch. `options` are
        DataLoader's own: drop_last, num_workers, collate_fn, ... A `distributed_sampler_cls` is asked for the order of
        all replicas, as of one, and shared out here.
        """
        if distributed_sampler_cls is not None:
            options["sampler"] = distributed_sampler_cls(dataset, num_replicas=1, rank=0, shuffle=shuffle)
            shuffle = False
        place = {"replica": self.grid.replica, "num_replicas": self.grid.dp_size}
        return ResumableDataLoader(dataset, batch_size, shuffle, seed, **place, **options)

    def recording(self) -> Recording:
        """When each rank ran each action of the last step, and whom it waited for; every rank has to call it.

        `plugin.recording().summary()` is one line about the step; `draw(path)` shows it above its simulation. On a GPU
        these are times at which work was handed to it, except for a step inside `with plugin.measuring():`.
        """
        if self._pipeline is None:
            raise UsageError("there is nothing recorded before booster.boost and a step")
        return self._pipeline.recording()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, every action of a step waits until the GPU is done with it, so that its times are the device's."""
        if self._pipeline is None:
            raise UsageError("there is nothing to measure before booster.boost")
        interpreter = self._pipeline.interpreter
        interpreter.synchronous = self.device.type == "cuda"
        try:
            yield
        finally:
            interpreter.synchronous = False
