"""Stopping: if a callback on any rank requests a stop, save, evaluation or log, all ranks act after the same step."""

from typing import Any

import torch.distributed as dist
from transformers import Trainer, TrainerCallback

from pipeshard.distributed.collectives import meet
from pipeshard.distributed.watching import calling, named

try:
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback
except ImportError:  # transformers 4
    JITCheckpointCallback = TrainerCallback

# Attributes of a TrainerControl. StopTogether sets `is_signaled` if the rank has received a termination signal.
FLAGS = "should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log", "is_signaled"


def share_flags(control: Any, group: dist.ProcessGroup) -> None:
    """Set each flag of a TrainerControl on every rank of `group` if the flag is set on any of these ranks. Flags may
    differ between ranks, since clocks differ and a callback may set a flag on the main process only."""
    with calling("trainer.train, after the callbacks of a step"):
        of_ranks = meet(group, named, [bool(getattr(control, name, False)) for name in FLAGS])
    for name, flags in zip(FLAGS, zip(*of_ranks)):
        setattr(control, name, any(flags))
    if control.is_signaled:
        control.should_evaluate = False  # the evaluation would run before the save, and may take too long


class StopTogether(JITCheckpointCallback):
    """Saves and stops after a step in which any rank has received a termination signal. transformers' own callback
    saves on each rank when the rank receives the signal. Ranks may then save at different steps, or between a step's
    backward and update. A run that resumes from such a save would repeat the step with random numbers that differ from
    the original ones."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.trainer, self.jit_manager = own.trainer, own.jit_manager

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.is_signaled = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.jit_manager.is_checkpoint_requested:
            self.jit_manager.is_checkpoint_requested = False
            control.should_save = control.should_training_stop = True
            control.is_signaled = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(control, "is_signaled", False):
            control.should_save = control.should_evaluate = False

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing. transformers' callback would save here, but other ranks may be at another point of the step."""

    on_pre_optimizer_step = on_step_begin


def stop_together(trainer: Trainer) -> None:
    """Replace a Trainer's callback for enable_jit_checkpoint with a StopTogether."""
    if own := trainer.pop_callback(JITCheckpointCallback):
        trainer.add_callback(StopTogether(own))
