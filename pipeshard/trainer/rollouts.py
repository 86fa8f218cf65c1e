"""Rollouts: Trainers that generate the completions on which they train, such as TRL's GRPOTrainer and RLOOTrainer.

TRL's own code generates, scores and buffers completions on every rank. This module makes four changes:

- TRL calls the stages of all ranks instead of a model.
- TRL gathers from replicas instead of processes.
- The size of a generation batch depends on the number of replicas instead of processes.
- Each replica computes rewards once.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import accelerate.utils
import torch
from accelerate.utils import set_seed
from torch import Tensor, nn

from pipeshard.checkpoint.random_state import random_state, set_random_state
from pipeshard.distributed.collectives import share_in_turn, together_in
from pipeshard.distributed.progress import own_progress
from pipeshard.errors import ConfigurationError, UsageError, summary
from pipeshard.plugin import PipelinePlugin
from pipeshard.replaced import replaced
from pipeshard.trainer.stand_ins import PipelineAccelerator, without_checkpointing

logger = logging.getLogger("pipeshard")

# Functions of accelerate.utils that gather from all processes, and the methods that gather from replicas instead.
GATHERS = {"gather": "gather", "gather_object": "gather_entries"}
# By attribute: arguments of these Trainers that contain functions, which every rank would call.
CALLED = {"rollout_func": "rollout_func", "tools": "tools", "environment_factories": "environment_factory"}


class Rollouts:
    """Mixin for a GRPOTrainer or RLOOTrainer. The `reward_funcs` run on the first rank of each replica."""

    args: Any
    model: Any
    accelerator: PipelineAccelerator
    pipeline: PipelinePlugin
    reward_funcs: list[Any]
    _pending_metrics: dict[str, list[Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        set_seed(
            self.args.seed + self.accelerator.process_index
        )  # TRL adds the rank to the seed, but all stages of a replica need the same seed

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        for attribute, name in CALLED.items():
            if getattr(self, attribute, None):
                raise ConfigurationError(
                    f"{type(self).__name__} does not support {name}: every rank would call it separately, and "
                    f"completions could differ between ranks. Remove {name}"
                )
        if (tokens := self.pipeline.config.microbatch_tokens) is not None:
            raise ConfigurationError(
                f"{type(self).__name__} does not support microbatch_tokens={tokens}: its loss concatenates prompts "
                "and completions that are padded to the lengths of the whole batch, but microbatches would have less "
                "padding. Omit microbatch_tokens, so that each accumulation step is a microbatch, or pass "
                "num_microbatches or microbatch_size"
            )
        self._count_replicas()

    def _count_replicas(self) -> None:
        """Compute the size of a generation batch from the number of replicas. TRL would use the number of processes."""
        args, replicas, counted = self.args, self.pipeline.grid.dp_size, self.args.generation_batch_size
        args.generation_batch_size = args.per_device_train_batch_size * replicas * args.steps_per_generation
        told = (
            f"{args.generation_batch_size} = per_device_train_batch_size ({args.per_device_train_batch_size}) * "
            f"steps_per_generation ({args.steps_per_generation}) * replicas ({replicas})"
        )
        if args.generation_batch_size % args.num_generations:
            raise ConfigurationError(
                f"the generation batch size {told} is not a multiple of num_generations={args.num_generations}. The "
                "stages of a pipeline count as one process. Change one of these arguments"
            )
        evaluated, each = args.per_device_eval_batch_size, args.num_generations_eval or args.num_generations
        if args.do_eval and args.eval_strategy != "no" and evaluated % each:
            raise ConfigurationError(
                f"per_device_eval_batch_size={evaluated} is not a multiple of the {each} generations per prompt. "
                f"The stages of a pipeline count as one process. Choose a multiple of {each}"
            )
        if self.pipeline.grid.first and counted != args.generation_batch_size:
            logger.warning(
                "the generation batch size is %s. TRL computed %d, because it counts stages as processes. If you have "
                "set generation_batch_size, set steps_per_generation instead",
                told,
                counted,
            )

    def boosted_model(self, model: Any) -> Any:
        """Return the stages of a model. For a reward model, return the unsplit model, which is first moved to the
        rank's device if this rank computes rewards."""
        if any(model is one for one in self.reward_funcs):
            assert isinstance(model, nn.Module)
            return model.to(self.args.device) if self._computes_rewards else model
        return super().boosted_model(model)  # type: ignore[misc]

    @property
    def _computes_rewards(self) -> bool:
        grid = self.pipeline.grid
        return grid.stage == grid.slice == 0

    def _boosted(self, model: nn.Module, objective: Any) -> Any:
        """Boost a model without its loss. The loss is traced later, when the first completions exist."""
        return super()._boosted(model, None)  # type: ignore[misc]

    def _sample(self) -> None:
        """Return None: the dataset contains prompts, but the model is called with completions."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Return TRL's inputs for a batch of prompts, with new or buffered completions. Call it on all ranks."""
        if any(has_images(sample) for sample in generation_batch):
            raise ConfigurationError(
                f"{type(self).__name__} does not support images in prompts: its loss splits the batch's pixel values "
                "by sample, but each stage receives the pixel values as one tensor. Train on prompts without images, "
                "or use SFTTrainer"
            )
        stages = self._own_stages()  # type: ignore[attr-defined]
        together = self._generated_together()  # type: ignore[attr-defined]
        of_replicas = gathered_from_replicas(self.accelerator, type(self))
        with replaced(self, model=stages), together, of_replicas, without_checkpointing(stages.module):
            return super()._prepare_inputs(generation_batch)  # type: ignore[misc]

    @together_in("trainer.rewards")
    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the rewards of all replicas' completions. A reward function may use random numbers or keep state, so
        only the first rank of a replica calls it. The replica's other ranks receive the results."""
        rewards, failure = torch.empty(0), ""
        error: Exception | None = None
        if self._computes_rewards:
            try:
                rewards = super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]
            except Exception as raised:  # of any type: the other ranks must not wait for this rank
                error, failure = raised, summary(raised)
        metrics = {name: [float(value) for value in values] for name, values in self._pending_metrics.items()}
        shared = self._of_replica((rewards, metrics, random_state(), failure))
        rewards, metrics, random, failure = shared
        if failure:
            raise error or UsageError(f"the first rank of the replica failed to compute rewards: {failure}")
        if not self._computes_rewards:
            self._pending_metrics.clear()
            self._pending_metrics.update(metrics)
            set_random_state(random)
        return rewards.to(self.accelerator.device)

    def _of_replica(self, value: Any) -> Any:
        """Broadcast the value of the replica's first rank, and return it on all ranks of the replica."""
        own_progress().start("the rewards, which the first rank of the replica computes")
        return share_in_turn(value, self.pipeline.grid.stages, self.pipeline.grid.slices)


def has_images(sample: Any) -> bool:
    """Whether a sample of TRL's data has images, in columns or among the parts of its messages."""
    if sample.get("image") is not None or sample.get("images"):
        return True
    prompt = sample.get("prompt")
    messages = prompt if isinstance(prompt, list) else []
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return any(part.get("type") == "image" for content in contents for part in content)


@contextmanager
def gathered_from_replicas(accelerator: PipelineAccelerator, kind: type) -> Iterator[None]:
    """Context manager in which the modules that define `kind` and its bases gather from replicas.

    A PipelineAccelerator always gathers from replicas. However, these modules also import functions of accelerate.utils
    that gather from processes.
    """
    modules = {one.__module__: sys.modules[one.__module__] for one in kind.__mro__}
    with ExitStack() as stack:
        for module in modules.values():
            for name, of_accelerator in GATHERS.items():
                if vars(module).get(name) is getattr(accelerate.utils, name):
                    stack.enter_context(replaced(module, **{name: getattr(accelerator, of_accelerator)}))
        yield
