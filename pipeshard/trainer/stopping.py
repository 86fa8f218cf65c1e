"""Stopping: enable_jit_checkpoint, with which all ranks save and stop after the same step."""

from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback

from pipeshard.distributed.collectives import gather

try:
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback
except ImportError:  # transformers 4
    JITCheckpointCallback = TrainerCallback


class StopTogether(JITCheckpointCallback):
    """Saves and stops after a step in which any rank has received a termination signal. transformers' own callback
    saves on each rank when the rank receives the signal. Ranks may then save at different steps, or between a step's
    backward and update, and a resumed run would repeat this step with different random numbers."""

    def __init__(self, own: Any, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.trainer, self.jit_manager, self.group = own.trainer, own.jit_manager, group
        self.is_stopping = False

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.is_stopping = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if gather(torch.tensor(int(self.jit_manager.is_checkpoint_requested)), self.group).any():
            self.jit_manager.is_checkpoint_requested, self.is_stopping = False, True
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # the evaluation would run before the save, and may take too long

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_stopping:
            control.should_save = control.should_evaluate = False

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing. transformers' callback would save here, but other ranks may be at another point of the step."""

    on_pre_optimizer_step = on_step_begin


def stop_together(trainer: Trainer, group: dist.ProcessGroup) -> None:
    """Replace a Trainer's callback for enable_jit_checkpoint with a StopTogether for all ranks of `group`."""
    if own := trainer.pop_callback(JITCheckpointCallback):
        trainer.add_callback(StopTogether(own, group))
