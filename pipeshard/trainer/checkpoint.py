"""Checkpoint: saves the pipeline's part of a Trainer checkpoint, and loads it with any number of stages and replicas.

checkpoint-7/config.json, model*.safetensors    a Hugging Face folder (for adapters, a peft folder)
checkpoint-7/pipeline/                          the optimizer, the LR schedule, random states: written by this module
checkpoint-7/manifest.json                      size and SHA-256 of the files above, as in every training state
checkpoint-7/trainer_state.json, rng_state*     written by Trainer, last
"""

import json
import logging
import os
import re
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeshard.checkpoint.files import (
    differing_folders,
    differing_names,
    new_folder,
    of_first,
    refuse_differing_folders,
    remove,
    together,
    writes,
)
from pipeshard.checkpoint.io import io_of, refuse_packed, refuse_unwrapped_adapters
from pipeshard.checkpoint.lora import load_lora, save_lora, warn_of_other_weights
from pipeshard.checkpoint.optimizer import load_optimizer, save_optimizer
from pipeshard.checkpoint.random_state import own_random_state, random_state, random_states, set_random_state
from pipeshard.checkpoint.rest import read_rest, rest_of, restore_rest, restoring
from pipeshard.checkpoint.save import refuse_unsavable
from pipeshard.checkpoint.state_dict import refuse_converted
from pipeshard.checkpoint.state_folder import MANIFEST, OPTIMIZER, REST, damage, flaw, lock, seal
from pipeshard.distributed.collectives import gather_objects, together_in
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.model import PipelineModel
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.errors import CheckpointError, UsageError
from pipeshard.hf import is_of_peft

logger = logging.getLogger("pipeshard")
FOLDER, STATE, RANDOM = "pipeline", "trainer_state.json", "rng_state*.pth"
Stamps = dict[str, tuple[int, int]]
LEASE = 120.0  # seconds; an NFS server keeps the locks of a lost machine for about 90 seconds
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


def refuse_unsavable_weights(model: nn.Module) -> None:
    """Raise CheckpointError if `save_weights` would raise it after training, because the state_dict of this model
    converts tensors. Adapters are saved by peft."""
    if not is_of_peft(model, "PeftModel"):
        refuse_converted(model)


@together_in("trainer.save_model")
def save_weights(model: PipelineModel, folder: Path) -> Stamps:
    """Save the model, or its adapters, to a folder that `from_pretrained` can load. Call it on all ranks. Returns the
    `stamps` of the files that were in the folder before the save, or {} on ranks other than the first."""
    grid = model.pipeline.grid
    refuse_unwrapped_adapters(model.unwrap())
    if is_adapted := is_of_peft(model.unwrap(), "PeftModel"):
        warn_of_other_weights(model, folder)
    before: Stamps = {}
    made = folder / ".adapter"  # a subfolder, since `folder` may contain checkpoints
    with together(grid.world):
        if grid.first:
            if CHECKPOINT_NAME.fullmatch(folder.name):  # before the first write, since another job may own the folder
                lock(folder.parent, model)
            folder.mkdir(parents=True, exist_ok=True)
            remove(made)  # left by a save that was killed
            before = stamps(folder)
            if (folder / FOLDER / REST).is_file():  # a checkpoint, whose manifest would not match the new files
                (folder / MANIFEST).unlink(missing_ok=True)
    if not is_adapted:
        refuse_packed(model.unwrap())
        refuse_unsavable(model)
        io_of(model).save_folder(model, folder)
        return before
    save_lora(model, str(made))
    with together(grid.world):
        if grid.first:
            for path in [path for path in made.rglob("*") if path.is_file()]:  # peft saves some adapters in subfolders
                target = folder / path.relative_to(made)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
            remove(made)
    return before


def stamps(folder: Path) -> Stamps:
    """The inode and modification time of each file in a folder, by relative path. Rewriting a file changes at least one
    of them."""
    found = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: (of_file.st_ino, of_file.st_mtime_ns) for name, of_file in found.items()}


@together_in("trainer.load_weights")
def load_checkpoint_weights(model: PipelineModel, folder: Path) -> None:
    if is_of_peft(model.unwrap(), "PeftModel"):
        load_lora(model, folder)
    else:
        io_of(model).load_model(model, str(folder))


@together_in("trainer.save_state")
def save_state(
    folder: Path, model: PipelineModel, optimizer: PipelineOptimizer, lr_scheduler: Any, step: int, before: Stamps
) -> None:
    """Write `folder/pipeline`, and a manifest of the files that this save has written. Call it on all ranks.

    `before` is the result of `save_weights`. The manifest omits files in `before` that this save has not changed,
    because callbacks and Trainer may rewrite these files later.
    """
    grid = model.pipeline.grid
    random = random_states(grid)
    with together(grid.world):
        if grid.first:
            lock(folder.parent, model)
            for old in (folder / STATE, *folder.glob(RANDOM)):  # Trainer writes new files
                old.unlink(missing_ok=True)
    with new_folder(folder / FOLDER, grid.world, mark=REST) as made:
        save_optimizer(optimizer, made / OPTIMIZER, shard=True)
        if grid.first:
            with writes(made / REST):
                torch.save({**rest_of([model], lr_scheduler), **random}, made / REST)
    with together(grid.world):
        others = before.items() & stamps(folder).items() if grid.first else ()
    seal(folder, step, model.pipeline.num_stages, grid.world, others={name for name, _ in others})


@together_in("trainer.load_state")
def load_state(folder: Path, model: PipelineModel, optimizer: PipelineOptimizer, lr_scheduler: Any) -> Any:
    """Restore the weights, the optimizer and the LR schedule. Return this rank's saved random state or, if the sizes of
    the grid have changed since the save, the first rank's."""
    grid = model.pipeline.grid
    load_checkpoint_weights(model, folder)
    load_optimizer(optimizer, folder / FOLDER / OPTIMIZER)
    file = folder / FOLDER / REST
    with together(grid.world), restoring(file):
        rest = read_rest(file)
        restore_rest([model], rest, lr_scheduler)
        random, before = own_random_state(rest, grid), random_state()
        try:
            set_random_state(random)  # checks the state, which Trainer sets later, during the epoch
        finally:
            set_random_state(before)
    with together(grid.world):
        if grid.first:
            for path in folder.glob(RANDOM):  # not used, and may be partial, since no rank waits for the write
                if not zipfile.is_zipfile(path):
                    path.unlink()
    return random


@together_in("trainer.train")
def checkpoint_of(asked: Any, folder: Path, grid: Grid) -> str | None:
    """Return the path of the checkpoint to resume from, or None. Call it on all ranks.

    `asked` is the argument `resume_from_checkpoint` of `Trainer.train`. True selects the newest complete, intact
    checkpoint in `folder`. Raises UsageError if the checkpoint's name differs between ranks. Raises CheckpointError if
    the checkpoint is incomplete or damaged or, with True, if `folder` has no intact checkpoint.
    """
    name = "True" if asked is True else Path(asked).name if asked else "None"
    if apart := differing_names(name, grid.world):
        raise UsageError(
            f"resume_from_checkpoint differs between ranks: {apart}. Pass the same checkpoint on every rank. If "
            "each machine looks for the checkpoint on its own disk, use a folder that all machines share"
        )
    if asked is True:
        return newest(folder, grid.world)
    if asked:
        refuse_broken(Path(asked), grid.world)
    return asked or None


@together_in("trainer.train")
def lock_folder(folder: Path, owner: Any, grid: Grid) -> None:
    """Lock the folder of the checkpoints until `owner` is freed. Raises UsageError, on every rank, if the ranks would
    save to different folders, and CheckpointError if another job saves to this folder. On NFS, first waits up to
    `LEASE` seconds for the lock, since a lost machine may still hold it."""
    refuse_differing_folders("output_dir", folder, grid.world)
    with together(grid.world):
        if grid.first:
            lock(folder, owner, patience=LEASE)


@together_in("trainer.save_model")
def one_folder(folder: Path, grid: Grid) -> Path:
    """Return the folder to which all ranks save the model. If the ranks pass different folders, warn and return the
    first rank's folder, since raising an error could lose the trained model."""
    if not (apart := differing_folders(folder, grid.world)):
        return folder
    if grid.first:
        logger.warning(
            "the folder for the model differs between ranks (%s): all ranks save the model to %s", apart, folder
        )
    return Path(gather_objects(str(folder), grid.world)[0])


def refuse_broken(folder: Path, group: dist.ProcessGroup) -> None:
    why = of_first(partial(flaw_of, folder), group)
    with together(group):
        if why := why or damage(folder, group):
            raise CheckpointError(
                f"Can't find a valid checkpoint at {folder}: it is not a complete, intact PipelineTrainer checkpoint "
                f"({why}). Pass another checkpoint, or resume_from_checkpoint=True to use the newest intact checkpoint"
            )


def newest(folder: Path, group: dist.ProcessGroup) -> str:
    """The path of the newest complete, intact checkpoint in `folder`. Skips newer checkpoints that are incomplete
    or damaged, with a warning. Raises CheckpointError if no checkpoint is intact. Call it on all ranks."""
    flaws = of_first(lambda: {step: flaw_of(path) for step, path in _checkpoints(folder).items()}, group)
    for step in sorted(flaws, reverse=True):
        path = folder / f"checkpoint-{step}"
        if not (why := flaws[step] or damage(path, group)):
            return str(path)
        if group.rank() == 0:
            logger.warning("%s is skipped: %s", path, why)
    raise CheckpointError(
        f"No valid checkpoint found in output directory ({folder}): "
        "pass resume_from_checkpoint=None to start from the beginning"
    )


def complete_in(folder: Path) -> dict[int, int]:
    """Map the step of each complete checkpoint in `folder` to the time at which the checkpoint was written, in ns."""
    complete = {step: path for step, path in _checkpoints(folder).items() if not flaw_of(path)}
    return {step: (path / STATE).stat().st_mtime_ns for step, path in complete.items()}


def _checkpoints(folder: Path) -> dict[int, Path]:
    names = {path: CHECKPOINT_NAME.fullmatch(path.name) for path in folder.glob("checkpoint-*")}
    return {int(name[1]): path for path, name in names.items() if name}


def flaw_of(folder: Path) -> str:
    """The reason why a checkpoint is incomplete, or "" if it is complete. Checks the names and sizes of the files,
    and reads trainer_state.json."""
    if not (folder / FOLDER / REST).is_file():
        return f"it has no {FOLDER}/{REST}: its save was interrupted, or a Trainer without a pipeline wrote it"
    name = CHECKPOINT_NAME.fullmatch(folder.name)
    if why := flaw(folder, int(name[1]) if name else None):
        return why
    try:
        json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        return f"its {STATE} cannot be read (was the save interrupted?): {error}"
    return ""
