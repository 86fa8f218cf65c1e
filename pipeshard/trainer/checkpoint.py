"""Checkpoint: what a Trainer's checkpoint-N folder holds of a pipeline, which any number of stages and replicas reads.

checkpoint-7/config.json, model*.safetensors    a Hugging Face folder (of adapters: what peft writes)
checkpoint-7/pipeline/                          the optimizer, the schedule, random numbers: this file
checkpoint-7/trainer_state.json                 what Trainer writes, at last
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pipeshard.checkpoint.files import new_folder, together
from pipeshard.checkpoint.io import io_of
from pipeshard.checkpoint.lora import load_lora, save_lora
from pipeshard.checkpoint.optimizer import load_optimizer, save_optimizer
from pipeshard.checkpoint.training_state import OPTIMIZER, REST, read_rest, rest_of, restore_rest, set_random_state
from pipeshard.distributed.collectives import gather_objects, together_in
from pipeshard.engine.model import PipelineModel
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.errors import CheckpointError

FOLDER, STATE = "pipeline", "trainer_state.json"


@together_in("trainer.save_model")
def save_weights(model: PipelineModel, folder: Path) -> None:
    """A folder that `from_pretrained` reads, of the model or of its adapters; every rank calls it."""
    grid = model.pipeline.grid
    with together(grid.world):
        if grid.first:
            folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(model.unwrap(), PeftModel):
        io_of(model).save_folder(model, folder)
        return
    made = folder / ".adapter"  # the folder itself may hold checkpoints
    save_lora(model, str(made))
    with together(grid.world):
        if grid.first:
            for path in made.iterdir():
                os.replace(path, folder / path.name)
            made.rmdir()


@together_in("trainer.load_weights")
def load_weights(model: PipelineModel, folder: Path) -> None:
    if isinstance(model.unwrap(), PeftModel):
        load_lora(model, folder)
    else:
        io_of(model).load_model(model, str(folder))


def save_state(folder: Path, model: PipelineModel, optimizer: PipelineOptimizer, lr_scheduler: Any) -> None:
    """Write `folder/pipeline`, all of it or nothing; every rank calls it."""
    grid = model.pipeline.grid
    with new_folder(folder / FOLDER, grid.world, mark=REST) as made:
        save_optimizer(optimizer, made / OPTIMIZER, shard=True)
        if grid.first:
            torch.save({**rest_of(model.pipeline, lr_scheduler), "ranks": grid.size}, made / REST)


def load_state(folder: Path, model: PipelineModel, optimizer: PipelineOptimizer, lr_scheduler: Any) -> Any:
    """Put weights, optimizer and schedule back to where they were; returns the random state, unless the ranks have
    files of their own for that."""
    grid = model.pipeline.grid
    load_weights(model, folder)
    load_optimizer(optimizer, folder / FOLDER / OPTIMIZER)
    with together(grid.world):
        rest = read_rest(folder / FOLDER / REST)
        restore_rest(model.pipeline, rest, lr_scheduler)
    return None if rest.get("ranks") == grid.size else rest["random"]


def refuse_incomplete(folder: Path) -> None:
    if why := _flaw(folder):
        raise CheckpointError(
            f"{folder} is not a checkpoint of a PipelineTrainer ({why}): pass one that is, or "
            "resume_from_checkpoint=True for the newest that is complete"
        )


def newest(folder: Path, group: Any) -> str:
    """The newest complete checkpoint, as the first rank finds it; a save that was killed leaves one that is not."""
    found = {
        int(m[1]): path for path in folder.glob("checkpoint-*") if (m := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    complete = [step for step, path in found.items() if not _flaw(path)]
    step = gather_objects(max(complete, default=None), group)[0]
    if step is None:
        raise CheckpointError(f"{folder} has no complete checkpoint to go on from: pass resume_from_checkpoint=None")
    return str(folder / f"checkpoint-{step}")


def _flaw(folder: Path) -> str:
    if not (folder / FOLDER / REST).is_file():
        return f"it has no {FOLDER}/{REST}; of one process, load the model by from_pretrained and train anew"
    try:
        json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        return f"its {STATE} cannot be read, as after a save that was killed: {error}"
    return ""


class Randomness(TrainerCallback):
    """Gives the generators back a checkpoint's state where it was saved by other ranks, at the moments at which Trainer
    loads what each rank has saved for itself."""

    state: dict[str, Any] | None = None

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if args.ignore_data_skip or float(state.epoch or 0).is_integer():
            self._restore()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        random, self.state = self.state, None
        if random is not None:
            set_random_state(random)
