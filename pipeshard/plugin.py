"""PipelinePlugin: pipeline parallelism for `pipeshard.initialize` and for ColossalAI's Booster."""

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from pipeshard.batch.criterion import Criterion
from pipeshard.boost import boost_model, boost_optimizer, check_optimizer
from pipeshard.checkpoint.blank import blank_model
from pipeshard.checkpoint.hub import model_folder
from pipeshard.checkpoint.io import PipelineCheckpointIO, io_of
from pipeshard.checkpoint.lora import enable_lora
from pipeshard.compat import (
    PipelineStageManager,
    missing_attribute,
    refuse_positional,
    register_plugin,
    schedule_of,
    wrapper,
)
from pipeshard.config import PipelineConfig
from pipeshard.dataloader import ResumableDataLoader
from pipeshard.distributed.agreement import compare_ranks, texts_of, versions
from pipeshard.distributed.collectives import together_in
from pipeshard.distributed.failures import outlast_watch
from pipeshard.distributed.mesh import DP, PP, TP, Grid, join_alone, num_replicas, own_device, shared_grid
from pipeshard.distributed.p2p import P2P, check_p2p
from pipeshard.distributed.peers import attach_workers
from pipeshard.distributed.watching import calling, constructing, name_ranks, named, watch_world
from pipeshard.engine.engine import Pipeline
from pipeshard.engine.model import PipelineModel
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.engine.outputs import ReturnOutputs
from pipeshard.engine.recording import Recording
from pipeshard.engine.refusals import refuse_default_device, refuse_other_config
from pipeshard.errors import UsageError
from pipeshard.graph.rng import Randomness
from pipeshard.hf import hide_world, lone_losses
from pipeshard.options import POSITIVE, PRECISIONS
from pipeshard.private import never_compiled, without_parametrization_cache
from pipeshard.replaced import replaced
from pipeshard.schedule.given import Schedule
from pipeshard.script import fold
from pipeshard.split.initialize import InitWeights
from pipeshard.split.partition import Cuts
from pipeshard.split.policy import Policy
from pipeshard.verify.decide import standing_alone

PASSED = "pass {} to PipelinePlugin or pipeshard.initialize instead"
CHANGING = "For a limit that changes, omit max_norm, and call optimizer.clip_grad_by_norm(limit) before step"
ONE_GRID = {"pg_mesh": "mesh", "dp_group": "replicas", "pp_group": "stages", "tp_group": "slices", "device": "device"}


class PipelinePlugin:
    """Trains a model across `pp_size` processes. Each process holds one stage, or several chunks of the model.

    The world may have more ranks: `dp_size` replicas of the pipeline, each of which reads its own batches, and
    `tp_size` (or `ep_size`) slices of every stage. Ranks are numbered first along the slices of a stage, then along the
    stages of a replica, and then along the replicas (`order="tp-pp-dp"` in Megatron).

    Args:
        pp_size: the number of ranks in a pipeline. `pipeshard.config.PipelineConfig` documents all named arguments.
        foreign: additional arguments of ColossalAI's HybridParallelPlugin. `pp_style` is the schedule. Options that
            only affect speed are ignored with a warning. Any other argument must be None or ColossalAI's default.
            Otherwise, the plugin raises an error that names the replacement.

    Every boosted model has its own pipeline, its own random numbers and, with "fp16", its own loss scale. If you boost
    several models with one plugin, pass the model to the plugin's methods.

    Attributes:
        config: the arguments as a PipelineConfig. Each of its fields is also a read-only attribute of the plugin.
        grid: this process's position and the process groups. The first use of `grid` is a collective: before
            `booster.boost`, use it on all ranks or on none.

    Raises ConfigurationError for invalid arguments. If an argument differs between ranks, `booster.boost` raises
    ConfigurationError.
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
        max_norm: float | None = 0.0,
        loss_reduction: str = "token",
        compile: bool | dict[str, Any] = False,
        dp_size: int | None = None,
        tp_size: int = 1,
        ep_size: int = 1,
        zero_stage: int = 0,
        fsdp: bool = False,
        precision: str = "fp32",
        autocast: bool = False,
        initial_scale: float = 2.0**16,
        batch_dims: Mapping[str, int | None] | None = None,
        recompute: bool | float | Sequence[float] = False,
        activation_checkpoint_interval: int = 0,
        shared_weights: Sequence[Sequence[str]] = (),
        timeout: float | str | Mapping[str, Any] | None = 600.0,
        watchdog: bool = True,
        check_finite: bool = False,
        verify: bool | str = "auto",
        tp_plan: Mapping[str, str] | None = None,
        ep_plan: Mapping[str, str] | None = None,
        deferred_batch_norm: bool = False,
        num_slices: int | str = 1,
        offload: str | None = None,
        microbatch_tokens: int | None = None,
        memory_limit: str | int | None = None,
        **foreign: Any,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name in PipelineConfig.__dataclass_fields__}
        register_plugin(type(self))
        alone = standing_alone()  # one process with all stages
        if watchdog:
            fold()
        with constructing():
            refuse_positional(positional)
            warns = not dist.is_initialized() or dist.get_rank() == 0
            arguments["schedule"] = schedule_of(schedule, foreign, list(arguments), warns)
            arguments["pp_size"] = pp_size if alone is None else alone.pp_size or pp_size
            check_p2p(p2p)
            self.config = PipelineConfig(**arguments)
            sizes = (pp_size, dp_size, tp_size, ep_size) if alone is None else (1, 1, 1, 1)
            join_alone(*sizes)
            self._dp_size = num_replicas(*sizes)
            self._sizes = *sizes[:2], sizes[2] * sizes[3]
            own_device()  # makes the rank's GPU the current device before the script builds its model
        self.dp_axis, self.pp_axis, self.tp_axis = DP, PP, TP
        self._checkpoint_io = PipelineCheckpointIO(lambda: self.grid)
        self._boosted: list[weakref.ref[PipelineModel]] = []
        self._random: list[Randomness] = []  # one per boosted model; loading a training state sets its `model`
        self._grid: tuple[dist.ProcessGroup, Grid] | None = None  # the Grid, and the world for which it was created

    def __getattr__(self, name: str) -> Any:
        name = "schedule" if name == "pp_style" else name
        if name in PipelineConfig.__dataclass_fields__:
            return getattr(self.config, name)
        if name in ONE_GRID:
            return getattr(self.grid, ONE_GRID[name])
        raise missing_attribute(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Raises UsageError if the attribute is an argument of the plugin, since the config and the
        boosted models would keep the old value."""
        if name in PipelineConfig.__dataclass_fields__ or name == "pp_style":
            also = f". {CHANGING}" if name == "max_norm" else ""
            raise UsageError(f"plugin.{name} cannot be set: {PASSED.format(name)}{also}")
        super().__setattr__(name, value)

    @property
    def dp_size(self) -> int:
        """The number of replicas."""
        return self._dp_size

    @property
    def grid(self) -> Grid:
        """This process's Grid. The first use of this property in a world is a collective, which compares the plugin's
        arguments across all ranks."""
        world = dist.group.WORLD
        if self._grid is None or (world is not None and self._grid[0] is not world):
            assert world is not None
            compare_ranks(versions() | texts_of(self.config.of_all_ranks), world, named)
            self._grid = world, shared_grid(*self._sizes)
            self._dp_size = self._grid[1].dp_size
            vars(self).pop("stage_manager", None)
        return self._grid[1]

    @cached_property
    def stage_manager(self) -> PipelineStageManager:
        """The PipelineStageManager for the chunks of the last boosted model. Before the first boost, schedule="auto"
        counts as one chunk per rank."""
        boosted = self._boosted[-1]() if self._boosted else None
        config = self.config if boosted is None else boosted.pipeline.config
        chunks = config.num_model_chunks
        return PipelineStageManager(self.grid.mesh, PP, chunks > 1, config.is_v, chunks)

    @property
    def enable_pipeline_parallelism(self) -> bool:
        return self.config.pp_size > 1

    def _yes(self) -> bool:
        return True

    control_device = control_precision = control_checkpoint_io = support_no_sync = support_lora = _yes

    def get_checkpoint_io(self) -> PipelineCheckpointIO:
        """Return this plugin's checkpoint IO. All calls return the same object, which tracks the background save."""
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
        """Add LoRA adapters to a model before you boost it. See `pipeshard.checkpoint.lora.enable_lora`."""
        return enable_lora(model, pretrained_dir, lora_config, bnb_quantization_config)

    @staticmethod
    def from_pretrained(auto_class: Any, path: str | Path, gguf_file: str | None = None, **options: Any) -> nn.Module:
        """Build a Hugging Face model without its weights. `booster.boost` and `pipeshard.initialize` load the weights
        of each stage.

        `auto_class` is an AutoModelFor... class or a model class. `path` is a folder, or the ID of a Hub model in the
        local cache. `options` may contain fields of the model's config, and the following options of
        `auto_class.from_pretrained`: `dtype`, `quantization_config`, `revision`, `subfolder`, `cache_dir` and
        `trust_remote_code`. Weights that are missing from the folder are initialized. `gguf_file` names a GGUF file in
        the folder. The model is in evaluation mode. Raises CheckpointError if the config, the GGUF file or
        a weights file of a cached Hub model is missing, and ConfigurationError for an option that is not supported.
        """
        return blank_model(auto_class, model_folder(Path(path), gguf_file, options), gguf_file, options)

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Criterion | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
        num_batches: int = 1,
    ) -> tuple[PipelineModel, PipelineOptimizer | None, Criterion | None, DataLoader[Any] | None, LRScheduler | None]:
        """Split the model, keep this rank's stages, and restrict the optimizer to the parameters of these stages. With
        schedule="auto", the search assumes that each step runs `num_batches` batches."""
        refuse_default_device()
        watch_world(self.config.timeout, self.config.watchdog)
        with together_in("booster.boost"):
            name_ranks(self.grid.named)
            attach_workers(dataloader)
            is_new = all(own() is not model for own in self._boosted)
            if is_new and isinstance(model, PipelineModel):
                refuse_other_config(model.pipeline.asked, self.config)
            kind = wrapper(PipelineModel, "ModelWrapper")
            hide_world()
            with lone_losses(self.config.pp_size):
                boosted, criterion = boost_model(
                    self.config, self.grid, model, optimizer, criterion, dataloader, kind, num_batches
                )
            if is_new:
                randomness = boosted.pipeline.policy.replay.randomness
                if boosted is model:
                    io_of(boosted).wait()  # for a background save of the plugin that boosted the model
                else:
                    randomness.model = 1 + max((other.model for other in self._random), default=-1)
                boosted.checkpoint_io = self._checkpoint_io
                self._random.append(randomness)
                self._boosted.append(weakref.ref(boosted))
                vars(self).pop("stage_manager", None)  # schedule="auto" may have chosen a different number of chunks
            boosted_optimizer = boost_optimizer(boosted, optimizer, wrapper(PipelineOptimizer, "OptimizerWrapper"))
            if self.config.watchdog:
                outlast_watch()
            return boosted, boosted_optimizer, criterion, dataloader, lr_scheduler

    @never_compiled  # torch.compile of a loop compiles the code around the call
    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Criterion | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: ReturnOutputs = False,
        num_batches: int = 1,
        weight: float = 1.0,
    ) -> dict[str, Any]:
        """Run one batch of `data_iter` through the pipeline. Call it on every rank. Ranks of a replica must pass the
        same batch.

        If gradients are enabled and an optimizer is passed, runs the forward and the backward. After the backward, each
        gradient is summed over all ranks that hold its parameter (except under `no_sync`). Under `torch.no_grad()`, or
        without an optimizer, runs only the forward. Returns a dict. Its entry "loss" is a tensor with the same value on
        every rank (None with return_loss=False). Its entry "outputs" is None on all stages except the last.
        `return_outputs` selects the outputs, and the pipeline discards all other outputs:

        - True: the model's output for the whole batch.
        - The name of a field, or a list of names: an output with only these fields.
        - "loss": the losses of the microbatches, of shape (m,).
        - A function `fn(output, microbatch)`, called under no_grad right after each forward of the last stage: the list
          of its results, one per microbatch, in order.

        With `num_batches` k, the next k batches run as one step, so the pipeline fills only once. The loss of each
        batch is computed separately, and the batches may have different shapes. The loss and the gradients are summed
        over the k batches. The sums are multiplied by `weight`, even if k is 1.
        """
        pipeline = self._pipeline_of(model, "execute_pipeline")
        if not isinstance(num_batches, Integral) or num_batches < 1:
            raise UsageError(f"num_batches must be {POSITIVE}, got {num_batches!r}")
        weight = float(weight)  # a tensor could be modified in place
        if not math.isfinite(weight):
            raise UsageError(f"weight must be a finite number, got {weight}: it multiplies the loss and the gradients")
        train = torch.is_grad_enabled() and optimizer is not None
        if train:
            check_optimizer(optimizer, pipeline)
        elif torch.is_grad_enabled():
            pipeline.gradients.updates.evaluated = True
        with (
            calling("execute_pipeline"),
            pipeline.gradients.coupling.paused(),
            torch.set_grad_enabled(train),
            without_parametrization_cache(),
        ):
            return pipeline.step(data_iter, criterion, train, return_loss, return_outputs, num_batches, weight)

    @contextmanager
    def no_sync(self, model: nn.Module | None = None, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Context manager in which this model's gradients are not reduced. The first step after the context, or
        `sync_grads`, sums the accumulated gradients over the replicas and over the ranks that hold a tied parameter."""
        pipeline = self._pipeline_of(model, "no_sync")
        with replaced(pipeline, synchronizes=False):
            yield

    def sync_grads(self, model: nn.Module | None = None) -> None:
        """Without running a step, reduce the gradients that this model accumulated under `no_sync`. Call it on every
        rank."""
        self._pipeline_of(model, "sync_grads").sync_grads()

    def _pipeline_of(self, model: nn.Module | None, call: str) -> Pipeline:
        """The pipeline of a boosted model. If `model` is None, returns the pipeline of the only boosted model that
        still exists. execute_pipeline does not support None."""
        if model is None and call != "execute_pipeline":
            alive = [boosted for own in self._boosted if (boosted := own()) is not None]
            if len(alive) > 1:
                raise UsageError(f"{call} is ambiguous with {len(alive)} boosted models: pass one, as in {call}(model)")
            model = alive[0] if alive else None
        if not isinstance(model, PipelineModel):
            got = "no model" if model is None else f"an instance of {type(model).__name__}"
            raise UsageError(f"{call} got {got}: pass the model that booster.boost(...) returned")
        return model.pipeline

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool = False,
        seed: int = 1024,
        *,
        distributed_sampler_cls: Any = None,
        **options: Any,
    ) -> ResumableDataLoader:
        """Create a DataLoader that gives every stage the same batches, in an order that depends only on `seed` and the
        epoch.

        The DataLoader tracks its position, including the position within an epoch, and
        `save_training_state(..., dataloader=...)` saves this position. `options` are DataLoader's own arguments
        (drop_last, num_workers, collate_fn, batch_sampler, ...), and may be combined as in DataLoader. If
        `distributed_sampler_cls` is given, the plugin constructs it with num_replicas=1, and divides the sampler's
        order among the replicas. As in ColossalAI, torch's DistributedSampler shuffles with its own default seed
        instead of `seed`: to set its seed, pass a functools.partial of the class.
        """
        if distributed_sampler_cls is not None:
            options["sampler"] = distributed_sampler_cls(dataset, num_replicas=1, rank=0, shuffle=shuffle)
            shuffle = False
        replica = dist.get_rank() * self.dp_size // dist.get_world_size()  # replicas are a grid's outermost axis
        return ResumableDataLoader(
            dataset, batch_size, shuffle, seed, replica=replica, num_replicas=self.dp_size, **options
        )

    def recording(self, model: nn.Module | None = None) -> Recording:
        """The times of each rank's actions and waits for other ranks, in this model's last step. Call it on every rank.

        `plugin.recording().summary()` describes the step in one line. `plugin.recording().draw(path)` plots the
        measured step above the simulated step. On a GPU, the times are measured with GPU events.
        """
        return self._pipeline_of(model, "recording").recording()


PipelinePlugin.__init__.__doc__ = PipelineConfig.__doc__  # for help(PipelinePlugin)
