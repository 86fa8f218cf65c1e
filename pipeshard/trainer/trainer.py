"""PipelineTrainer: transformers' Trainer with steps that run in a pipeline.

    class                 purpose
    Pipelined...          the class that the user constructs: takes the plugin
    the user's Trainer    SFTTrainer, Seq2SeqTrainer, or a custom class: unchanged
    Loop                  between the user's class and transformers.Trainer: runs the steps on stages of the model

Methods that the user's class overrides are therefore called as usual, and their `super()` calls reach the pipeline. The
training loop, callbacks, logs and LR schedules are Trainer's own. A gradient accumulation window is one pipeline step.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerControl
from transformers.trainer import TRAINING_ARGS_NAME

from pipeshard.checkpoint.files import together
from pipeshard.checkpoint.io import io_of, refuse_unwrapped_adapters
from pipeshard.checkpoint.load import refuse_ignored_adapters
from pipeshard.checkpoint.optimizer import check_savable
from pipeshard.checkpoint.random_state import set_random_state
from pipeshard.config import PipelineConfig
from pipeshard.data.first_samples import first_samples
from pipeshard.data.order import refuse_unseeded
from pipeshard.data.seeded import share_generators
from pipeshard.distributed.collectives import together_in
from pipeshard.distributed.watching import watch_world
from pipeshard.engine.model import PipelineModel
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.engine.optimizer_trial import set_training
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.graph.rng import Draws
from pipeshard.graph.shapes import is_trainable
from pipeshard.hf import is_of_peft
from pipeshard.plugin import PipelinePlugin
from pipeshard.replaced import replaced
from pipeshard.split.adapters import adding, put_adapters
from pipeshard.split.blank import is_blank
from pipeshard.trainer.checkpoint import (
    Stamps,
    checkpoint_of,
    load_checkpoint_weights,
    load_state,
    lock_folder,
    one_folder,
    refuse_unsavable_weights,
    save_state,
    save_weights,
)
from pipeshard.trainer.evaluation import Evaluation
from pipeshard.trainer.objective import ITEMS, Objective, Preferences
from pipeshard.trainer.refusals import (
    cut_arguments,
    refuse,
    refuse_blank_reference,
    refuse_callback,
    refuse_class,
    refuse_other_arguments,
    refuse_precision,
    refuse_prepared,
    refuse_split,
    refusing_resize,
)
from pipeshard.trainer.rollouts import Rollouts
from pipeshard.trainer.stand_ins import SPLIT, KeptStages, PipelineAccelerator, StagesStandIn
from pipeshard.trainer.stopping import share_flags, stop_together
from pipeshard.trainer.written import Written


class Loop(Evaluation):
    """Overrides methods of Trainer, so that they run on stages."""

    control: TrainerControl
    _objective: Objective | None = None
    _random: dict[str, Any] | None = None  # a checkpoint's random state, until the loop reaches the checkpoint's step
    _held: tuple[dict[str, Any], ...] = ()  # the batches of an incomplete window
    _num_items: Any = None  # the number of items in the latest window
    _before: Stamps | None = None  # the files that were in the folder before the latest save of the model
    _begins: bool = False  # whether train() has begun, but not yet created its dataloader
    _left: Written | None = None  # detects writes to trained parameters since the latest batch
    _begun_at: int | None = None  # the step at which train() began
    _unreported: list[Any] | None = None  # logs of the running compute_loss that callbacks have not received

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if getattr(self.args, "enable_jit_checkpoint", False):
            stop_together(self)
        handler = self.callback_handler
        for callback in handler.callbacks:
            refuse_callback(callback, type(self).__name__, self.pipeline.config)
        setattr(handler, "on_log", partial(self._logged, handler.on_log))  # noqa: B010

    def add_callback(self, callback: Any) -> None:
        refuse_callback(callback, type(self).__name__, self.pipeline.config)
        super().add_callback(callback)

    def create_accelerator_and_postprocess(self) -> None:
        self.args._n_gpu = min(self.args.n_gpu, 1)  # otherwise, Trainer multiplies its batch size by the number of GPUs
        super().create_accelerator_and_postprocess()
        refuse_class(type(self))
        refuse(self.args, self.pipeline.config, type(self).__name__)
        refuse_precision(self.accelerator.mixed_precision, type(self).__name__)
        cut_arguments(self.pipeline.config, self.args.gradient_accumulation_steps)
        self.accelerator = PipelineAccelerator.of(self.accelerator, self.pipeline.grid, self)
        self.gather_function = self.accelerator.gather_for_metrics
        # Trainer sets this in the first step, but the trace at boost calls compute_loss earlier.
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps

    @property
    def place_model_on_device(self) -> bool:
        """False: the full model may not fit on one device, or may be on meta. Only its stages are moved to devices."""
        return False

    @place_model_on_device.setter
    def place_model_on_device(self, _: bool) -> None:
        pass

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        """False, so that Trainer clips with the accelerator's method. With tp_size, some gradients are DTensors; if
        this method returned True, Trainer would clip each rank's gradients by that rank's own norm."""
        return False

    # models and optimizers become stages

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> StagesStandIn:
        stages = self._own_stages()
        if training:
            stages.optimize(self.optimizer)
        return stages

    def _own_stages(self) -> StagesStandIn:
        if self._stages is None or (self.model is not self._stages.module and self.model is not self._stages):
            self._objective = Objective(self) if self._makes_loss() else None
            if self._objective is not None and (self.model_accepts_loss_kwargs or self.compute_loss_func is not None):
                self._objective.num_items = torch.tensor(1)  # during the trace
            self._stages = self._boosted(self.model, self._objective)
        return self._stages

    def _boosted(self, model: nn.Module, objective: Objective | None) -> StagesStandIn:
        """Split a model, or adopt the stages of a model that another Trainer has split."""
        config, name = self._config, type(self).__name__
        if (split := vars(model).get(SPLIT)) is not None:
            refuse_other_arguments(split.boosted.pipeline.asked, config, name)
            with replaced(self.pipeline, config=config):
                boosted, *_ = self.pipeline.configure(split.boosted)
            if (scaling := boosted.pipeline.scaling) is not None:
                scaling.reset()  # in one process, each Trainer has its own loss scale
            return StagesStandIn(self.pipeline, model, boosted)
        refuse_split(model, name)
        sample = self._sample() if config.dry_run_input is None else config.dry_run_input
        if objective is not None and self.is_predicted(sample):
            objective = None  # the loss is traced in the first training step, if any
        elif objective is not None or config.dry_run_input is None:
            sample = self._as_given(sample)
        with replaced(self.pipeline, config=replace(config, dry_run_input=sample)):
            window = self.args.gradient_accumulation_steps
            boosted, *_ = self.pipeline.configure(model, None, objective, num_batches=window)
        boosted.pipeline.criterion = None  # the criterion is only for training
        boosted.pipeline.gradients.advise("set TrainingArguments(max_grad_norm=...)")
        if folder := getattr(model, "_pretrained", None):
            io_of(boosted).load_model(boosted, folder)
        if boosted.whole is None:
            vars(model)[SPLIT] = KeptStages(boosted)
        return StagesStandIn(self.pipeline, model, boosted)

    @property
    def _config(self) -> PipelineConfig:
        """The plugin's arguments, with the changes that the Trainer's arguments require."""
        config, args = self.pipeline.config, self.args
        changes: dict[str, Any] = {"loss_reduction": "batch", **cut_arguments(config, args.gradient_accumulation_steps)}
        changes |= self._precision
        if args.torch_compile and not config.compile:
            given = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
            changes["compile"] = {name: value for name, value in given.items() if value} or True
        return replace(config, **changes)

    @property
    def _precision(self) -> dict[str, Any]:
        """The plugin's precision or, if it is fp32, the mixed precision of TrainingArguments or `accelerate launch`."""
        config, mixed = self.pipeline.config, self.accelerator.mixed_precision
        if config.precision == "fp32" and mixed in ("bf16", "fp16"):
            return {"precision": mixed, "autocast": True}
        return {"precision": config.precision, "autocast": config.autocast}

    @property
    def autocasts(self) -> bool:
        """Whether the model's forward runs under autocast."""
        return bool(self._precision["autocast"])

    def _sample(self) -> Any:
        """The first samples, or None if they cannot be read. Does not advance random generators."""
        with Draws.from_here(self.pipeline.grid.device):
            return None if self._loader is None else first_samples(self._loader)

    def _as_given(self, sample: Any) -> Any:
        """Convert a batch from the collator to the form that the training loop passes to the pipeline."""
        if not isinstance(sample, Mapping):
            return sample
        return self._given(sample, torch.tensor(1) if "labels" in sample else None, is_sample=True)

    def boosted_model(self, model: Any) -> Any:
        """Return the stages of the Trainer's model, or of another model that the user's code prepares."""
        if isinstance(model, StagesStandIn):
            return model
        return self._own_stages() if model is self.model else self._boosted(model, None)

    def boosted_optimizer(self, optimizer: Any) -> PipelineOptimizer:
        made = None if self._stages is None else self._stages.optimizer
        if made is None:
            raise UsageError("the optimizer is not split before train() starts: use it during or after train()")
        if optimizer is not None and optimizer not in (made, made.optim):
            raise UsageError(f"this {type(optimizer).__name__} is not the Trainer's optimizer: use trainer.optimizer")
        return made

    # data

    def share_generators(self, loader: Any) -> None:
        """Make the dataset and the collator use the same random numbers on all stages of a replica. Raises
        ConfigurationError for a stream that every rank shuffles in its own order."""
        if self.pipeline.grid.world.size() > 1:
            refuse_unseeded(getattr(loader, "dataset", None))
        watch_world(self.pipeline.config.timeout, self.pipeline.config.watchdog)
        with together_in("trainer.train, evaluate or predict"):
            share_generators(loader, self.pipeline.grid.stages, self.pipeline.grid.slices)

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(super().get_total_train_batch_size(args)) // self._ranks_of_replica

    def floating_point_ops(self, inputs: Any) -> float:
        """This rank's share of the floating-point operations, since Trainer sums over all ranks."""
        return float(super().floating_point_ops(inputs)) / self._ranks_of_replica

    def get_num_trainable_parameters(self) -> int:
        """The number of trained parameters of the whole model, even after the model is split."""
        return sum(parameter.numel() for parameter in self.model.parameters() if is_trainable(parameter))

    @property
    def _ranks_of_replica(self) -> int:
        return self.pipeline.grid.size // self.pipeline.grid.dp_size

    # steps

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        if self._held and len(self._held) == self.current_gradient_accumulation_steps:
            raise UsageError(
                f"the last gradient accumulation window of the training data has only {len(self._held)} of "
                f"gradient_accumulation_steps={self.args.gradient_accumulation_steps} batches. For a dataset without a "
                "length, pipeshard cannot know in advance which batch is the last. Pass a dataset with a length, let "
                "the stream end with a full window, or make it endless and set max_steps"
            )
        if self._held:
            raise UsageError(
                f"a callback ended the epoch in on_substep_end, so {len(self._held)} of the "
                f"{self.current_gradient_accumulation_steps} batches of a gradient accumulation window would not be "
                "used for training: set control.should_epoch_stop in on_step_end instead"
            )
        self._refuse_unsavable()
        return super().get_batch_samples(*args, **kwargs)

    def _refuse_unsavable(self) -> None:
        """After the first step, raise CheckpointError if the Trainer would fail to save the optimizer's state later."""
        if self._begun_at is None:
            self._begun_at = self.state.global_step
        if self._saves and not self.args.save_only_model and self.state.global_step == self._begun_at + 1:
            check_savable(self.boosted_optimizer(None))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Keep the batch until its gradient accumulation window is complete, then run one step on the full window.
        Raises UsageError if `model` is not the Trainer's own, if a parameter or gradient has changed since the window's
        previous batch, or if the Trainer's own loss was set or removed after the model was split."""
        if self.is_foreign(model):
            raise UsageError(
                f"{type(self).__name__} calls training_step with an instance of {type(model).__name__} that is not the "
                "Trainer's model, but a pipeline trains only its own model: pass the model that training_step "
                "receives. To train another model, create another Trainer"
            )
        if self._held:
            self.refuse_written("between the batches of a window")
        try:
            return self._kept_or_stepped(inputs, num_items_in_batch)
        finally:
            if self.current_gradient_accumulation_steps > 1:
                self._left = Written(self._own_stages().boosted.pipeline.gradients.trainables())

    def refuse_written(self, when: str) -> None:
        """Raise UsageError if a trained parameter or gradient was written to since the latest batch of a window.

        One process would have used the written values for the next batches of the window.
        """
        if self._left is not None and self._left.is_changed:
            raise UsageError(
                f"{type(self).__name__}: gradients or parameters have changed {when}. The "
                f"{self.current_gradient_accumulation_steps} batches of this window form one step of the pipeline. "
                "Change gradients or parameters once per step, in a callback: gradients in on_pre_optimizer_step, "
                "parameters in on_step_end. Alternatively, pass gradient_accumulation_steps=1 and "
                "PipelinePlugin(num_microbatches=...)"
            )

    def _kept_or_stepped(self, inputs: Any, num_items_in_batch: Any) -> Tensor:
        if self._makes_loss() != (self._objective is not None):
            raise UsageError(
                f"the loss of {type(self).__name__} changed after its model was split, but training would still use "
                "the earlier loss: set compute_loss, compute_loss_func and label_smoother before the first train(), "
                "evaluate() or predict()"
            )
        self._own_stages().train()
        inputs = self._prepare_inputs(inputs)
        if self._objective is not None:
            self._objective.num_items = num_items_in_batch
        self._held += (self._given(inputs, num_items_in_batch),)
        self._num_items = num_items_in_batch
        return self.step_held() if self.accelerator.sync_gradients else torch.zeros((), device=self.args.device)

    def step_held(self) -> Tensor:
        """Run one step on the batches that `training_step` has kept."""
        stages, objective = self._own_stages(), self._objective
        set_training(self.optimizer)
        window, self._held = self._held, ()
        with nullcontext() if objective is None else objective.stepping(stages.boosted.pipeline):
            return stages.step(window, objective, self._weight(self._num_items)).to(self.args.device)

    def _given(self, inputs: Any, num_items: Any, is_sample: bool = False) -> dict[str, Any]:
        """Convert a batch to the pipeline's inputs: inputs of the model and, with an objective, of compute_loss."""
        if self._objective is not None:
            return self._objective.called_with(self.with_reference(inputs, is_sample))
        accepts = self.model_accepts_loss_kwargs and num_items is not None
        return {**inputs, ITEMS: torch.as_tensor(num_items)} if accepts else dict(inputs)

    def with_reference(self, inputs: dict[str, Any], is_sample: bool = False) -> dict[str, Any]:
        """The batch with the values that the loss reads from another model, if any. For a sample, only the shapes of
        these values matter."""
        return inputs

    def _weight(self, num_items: Any) -> float:
        """The factor for the loss of a batch, as in Trainer's training_step and compute_loss."""
        counted = self.model_accepts_loss_kwargs and num_items is not None
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        scaled = counted or self.compute_loss_func is not None if scaled is None else scaled
        weight = 1.0 if scaled else 1.0 / self.current_gradient_accumulation_steps
        if self._objective is None and counted and self.args.average_tokens_across_devices:
            weight *= self.accelerator.num_processes
        return weight

    # logs of compute_loss

    def _logged(self, on_log: Callable[..., Any], args: Any, state: Any, control: Any, logs: Any) -> Any:
        """Pass a log entry to the callbacks, or keep an entry of compute_loss for `report_logs`."""
        if self._unreported is None:
            return on_log(args, state, control, logs)
        self._unreported.append(dict(logs))
        return control

    def keeping_logs(self, logs: list[Any]) -> AbstractContextManager[None]:
        """Context manager in which log entries are appended to `logs` instead of being passed to the callbacks."""
        return replaced(self, _unreported=logs)

    def report_logs(self, logs: list[Any]) -> None:
        """Pass the log entries of compute_loss to the callbacks."""
        for each in logs:
            self.control = self.callback_handler.on_log(self.args, self.state, self.control, each)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError("a pipeline does not support hyperparameter_search: start one run per trial")

    # files

    @property
    def _saves(self) -> bool:
        """Whether train() may save a checkpoint."""
        return self.args.save_strategy != "no" or bool(getattr(self.args, "enable_jit_checkpoint", False))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self._saves:
            refuse_unwrapped_adapters(self.model)
            refuse_unsavable_weights(self.model)
            lock_folder(Path(self.args.output_dir), self, self.pipeline.grid)
        chosen = checkpoint_of(resume_from_checkpoint, Path(self.args.output_dir), self.pipeline.grid)
        self._held, self._left, self._begun_at = (), None, None  # left by an earlier call that ended within a window
        self._begins = True
        return super().train(chosen, *args, **kwargs)

    @property
    def _is_whole(self) -> bool:
        """Whether every rank holds the whole model with its values, and transformers can save the model."""
        saves_itself = isinstance(self.model, PreTrainedModel) or is_of_peft(self.model, "PeftModel")
        is_split = self._stages is not None or vars(self.model).get(SPLIT) is not None
        return saves_itself and not is_split and not is_blank(self.model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model. Call it on every rank: each rank writes its part. If a transformers or peft model is neither
        split yet nor on meta, only the first rank saves it, as in Trainer."""
        grid = self.pipeline.grid
        folder = one_folder(Path(output_dir or self.args.output_dir), grid)
        if self._is_whole:
            with together_in("trainer.save_model"), together(grid.world):
                if grid.first:
                    super().save_model(str(folder), True)
        else:
            self._before = save_weights(self._own_stages().boosted, folder)
            if grid.first:
                holder = self.processing_class or getattr(self.data_collator, "tokenizer", None)
                if holder is not None:
                    holder.save_pretrained(folder)
                torch.save(self.args, folder / TRAINING_ARGS_NAME)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        boosted, optimizer = self._own_stages().boosted, self.boosted_optimizer(None)
        step = self.state.global_step
        save_state(Path(output_dir), boosted, optimizer, self.lr_scheduler, step, self._before or {})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing: `_load_optimizer_and_scheduler` loads the checkpoint later, when the stages exist."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            boosted, optimizer = self._own_stages().boosted, self.boosted_optimizer(None)
            self._random = load_state(Path(checkpoint), boosted, optimizer, self.lr_scheduler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random state that `load_state` returned, instead of the state in Trainer's file for this rank."""
        random, self._random = self._random, None
        if random is not None:
            set_random_state(random)

    def _load_best_model(self) -> None:
        load_checkpoint_weights(self._own_stages().boosted, Path(self.state.best_model_checkpoint))


class Front:
    """Mixin that takes the `pipeline` argument, then constructs the Trainer that follows the mixin in the MRO."""

    _begins: bool
    _held: tuple[dict[str, Any], ...]
    _left: Written | None
    control: TrainerControl

    def __init__(self, *args: Any, pipeline: PipelinePlugin, **kwargs: Any) -> None:
        if not isinstance(pipeline, PipelinePlugin):
            raise ConfigurationError(f"pipeline must be a PipelinePlugin, got {pipeline!r}")
        model = args[0] if args else kwargs.get("model")
        if isinstance(model, StagesStandIn):  # model_wrapped of another Trainer
            model = model.module
            args, kwargs = ((model, *args[1:]), kwargs) if args else (args, {**kwargs, "model": model})
        if isinstance(model, PipelineModel):
            raise ConfigurationError(
                f"{type(self).__name__} boosts the model itself: pass the original model, not a boosted one"
            )
        self.pipeline = pipeline
        wrappers: dict[str, Callable[..., Any]] = {
            "get_train_dataloader": self._noted,
            "training_step": self._completed,
            "_maybe_log_save_evaluate": self._acted,
            "_evaluate": self._evaluated,
        }
        for name, around in wrappers.items():
            setattr(self, name, partial(around, getattr(self, name)))  # also for methods that a subclass overrides
        _ = pipeline.grid  # refuses GPUs that ranks share, before a Trainer's constructor uses NCCL
        refuse_blank_reference(kwargs.get("ref_model") or model, (*args, *kwargs.values()))
        if not isinstance(model, nn.Module) or not is_blank(model):
            super().__init__(*args, **kwargs)
            return
        with refusing_resize(model, type(self).__name__):
            self._construct(model, args, kwargs)

    def _construct(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Construct the Trainer of a model on meta. The Trainer's constructor may add adapters to the model."""
        config = kwargs.get("peft_config")
        if config is None:  # TRL may add a reference adapter to the model's adapters
            with adding(model) if is_of_peft(model, "PeftModel") else nullcontext():
                super().__init__(*args, **kwargs)
            return
        if folder := getattr(model, "_pretrained", ""):
            refuse_ignored_adapters(model, Path(folder))
        begin = super().__init__  # the __init__ of a TRL trainer, which adds adapters to the model

        def put(_: nn.Module, config: Any) -> Any:
            begin(*args, **kwargs | {"peft_config": config})
            return self.model  # type: ignore[attr-defined]

        put_adapters(model, config, put)

    def _noted(self, make: Callable[[], Any]) -> Any:
        """Create and record the dataloader. For the first dataloader of `train`, also call `share_generators`."""
        self._latest_loader = None
        loader = make()
        refuse_prepared(loader, "get_train_dataloader returns")
        # An object that chains several dataloaders has no dataset itself.
        has_data = getattr(loader, "dataset", None) is not None or self._latest_loader is None
        self._loader = loader if has_data else self._latest_loader
        if self._begins:
            self._begins = False
            self.share_generators(loader)  # type: ignore[attr-defined]
        return loader

    def _completed(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the training_step of the user's class, once per batch of a window. In a window of several batches,
        raises UsageError if training_step changes parameters or gradients."""
        loss = step(*args, **kwargs)
        self.refuse_written("in training_step, which is called for each batch of a window")  # type: ignore[attr-defined]
        if self._held and self.accelerator.sync_gradients:  # type: ignore[attr-defined]
            loss = loss + self.step_held()  # type: ignore[attr-defined]  # the user's class has skipped the last batch
        if not self._held:
            self._left = None  # since the optimizer will change the parameters; also frees the gradients
        return loss

    def _acted(self, act: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Log, evaluate or save at the end of a step or an epoch, if the callbacks of any rank request it."""
        world = self.pipeline.grid.world
        share_flags(self.control, world)
        acts = self.control.should_log or self.control.should_evaluate or self.control.should_save
        act(*args, **kwargs)
        if acts:  # on_log and on_save may also request a stop
            share_flags(self.control, world)

    def _evaluated(self, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate during training. If on_evaluate requests a save on any rank, all ranks save afterwards."""
        metrics = evaluate(*args, **kwargs)
        share_flags(self.control, self.pipeline.grid.world)
        return metrics


def pipelined(trainer: type[Trainer]) -> Any:
    """Return a pipeline version of a subclass of Trainer: `pipelined(SFTTrainer)(model, ..., pipeline=plugin)`.

    Methods that the subclass overrides are called as usual; see `pipeshard.trainer.trainer`. Raises ConfigurationError
    if `trainer` is not a subclass of transformers.Trainer.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise ConfigurationError(f"pipelined requires a subclass of transformers.Trainer, got {trainer!r}")
    fronts: tuple[type, ...] = (Front,)
    if hasattr(trainer, "compute_ref_log_probs"):
        fronts = (Front, Preferences)
    elif hasattr(trainer, "_calculate_rewards"):
        fronts = (Front, Rollouts)
    bases = (*fronts, Loop) if trainer is Trainer else (*fronts, trainer, Loop)
    return type(f"Pipelined{trainer.__name__}", bases, {"__doc__": trainer.__doc__, "__module__": __name__})


class PipelineTrainer(Front, Loop):
    """transformers' Trainer with a pipeline: `PipelineTrainer(model, args, pipeline=PipelinePlugin(pp_size=2), ...)`.

    All other arguments are Trainer's.
    """
