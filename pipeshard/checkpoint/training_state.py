"""Training state: everything needed to resume a run as if it had never stopped, with any number of stages."""

import copy
import gc
import logging
import os
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeshard.checkpoint.files import complete_save, existing, hidden, make_way, new_folder, remove, together, writes
from pipeshard.checkpoint.io import boosted_model, io_of
from pipeshard.checkpoint.optimizer import (
    boosted_optimizer,
    check_savable,
    load_optimizer,
    optimizer_part,
    save_optimizer,
)
from pipeshard.checkpoint.random_state import own_random_state, random_states, set_random_state
from pipeshard.checkpoint.rest import (
    own_position,
    plain_state,
    positions_of,
    read_rest,
    rest_of,
    restore_rest,
    restoring,
    saved_position,
)
from pipeshard.checkpoint.save import check_entries
from pipeshard.checkpoint.state_folder import (
    MANIFEST,
    MARKS,
    MODEL,
    OPTIMIZER,
    REST,
    SCHEDULER,
    StateSave,
    by_name,
    damage,
    flaw,
    lock,
    seal,
)
from pipeshard.distributed.collectives import gather_objects, together_in
from pipeshard.engine.engine import Pipeline
from pipeshard.engine.model import PipelineModel
from pipeshard.engine.optimizer import PipelineOptimizer
from pipeshard.errors import CheckpointError

logger = logging.getLogger("pipeshard")
STEP = re.compile(r"step-(\d{8,})")
HIDDEN = re.compile(rf"\.{STEP.pattern}\.(old|writing|removed(-[0-9a-f]+)?)")  # leftovers of killed saves


@together_in("save_training_state")
def save_training_state(
    directory: str | Path,
    step: int,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    lr_scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    dataloader: Any = None,
    keep: int = 3,
    use_async: bool = False,
) -> None:
    """Save the training state to the folder `directory/step-<step>` (such as `step-00000100`). Call it on all ranks,
    between steps, after `optimizer.zero_grad()`.

    The folder contains `model` (which `from_pretrained` can read), `optimizer`, and `training.pt` with the LR
    scheduler, the loss scale, the random states of all ranks and the position in the data. Pass several models (such as
    the two models of a GAN, or a model and an average of its weights), optimizers or LR schedulers as a list. The
    models after the first are then in `model-1`, `model-2` and so on. At every moment, each step either is complete or
    does not exist. When this step is complete, all complete steps except the last `keep` are removed.

    With `use_async=True`, copies are written while training continues. These copies take as much host memory as the
    rank's weights and optimizer state. The next save waits for an unfinished background save, and raises an error if
    the background save failed. At exit, the process also waits for an unfinished save.

    Raises CheckpointError, on every rank, in any of the following cases:

    - An object is not boosted.
    - Only some of the optimizers that were boosted with the models are given.
    - An optimizer belongs to another model.
    - The dataloader has no `state_dict` or no `load_state_dict`.
    - `step` or `keep` is invalid, or `step` differs between ranks.
    - `directory` has a later step (which would remain the newest).
    - Another job saves into `directory`.
    - Another model of this process has saved this step to `directory`.
    - A state cannot be written, or an earlier background save failed.
    """
    models, optimizers = models_by_name(model), by_name(OPTIMIZER, optimizer)
    first, parent = models[MODEL], Path(directory)
    pipeline = first.pipeline
    check_complete(model, optimizer)
    check_loader(model, dataloader)
    with together(pipeline.grid.world):
        _check_step(step, keep)
    _refuse_other_number(step, pipeline, "step")
    checkpoints = io_of(first)
    checkpoints.wait()
    with together(pipeline.grid.world):
        if pipeline.grid.first:  # on other machines, NFS would cache that a new directory does not exist
            _refuse_later_steps(parent, step)
            lock(parent, first)
            _refuse_other_model(parent, step, first)
            _remove_leftovers(parent)
        position = own_position(dataloader, pipeline.grid)
        rest = rest_of([*models.values()], lr_scheduler, position) if pipeline.grid.first else None
    of_ranks = random_states(pipeline.grid) | positions_of(position, pipeline.grid)
    rest = None if rest is None else rest | of_ranks
    target = _folder(parent, step)
    if use_async:
        finish = partial(_keep, parent, keep)
        checkpoints.start(_planned_state(target, step, models, optimizers, rest, finish))
        return
    with new_folder(target, pipeline.grid.world, mark=MANIFEST) as folder:
        for name, each in models.items():
            io_of(each).save_folder(each, folder / name)
        for name, boosted in optimizers.items():
            save_optimizer(boosted, folder / name, shard=True)
        with together(pipeline.grid.world):
            if rest is not None:
                with writes(folder / REST):
                    torch.save(rest, folder / REST)
        seal(folder, step, pipeline.num_stages, pipeline.grid.world)
    with together(pipeline.grid.world):
        if pipeline.grid.first:
            _keep(parent, keep)


def models_by_name(model: nn.Module | Sequence[nn.Module]) -> dict[str, PipelineModel]:
    """The given boosted models (at least one), by their names in a training state."""
    given: Any = model if isinstance(model, list | tuple) and model else [model]
    return {name: boosted_model(each) for name, each in by_name(MODEL, given).items()}


def check_complete(model: nn.Module | Sequence[nn.Module], optimizer: Optimizer | Sequence[Optimizer] | None) -> None:
    """Raise CheckpointError, on every rank, if one of the following objects is missing:

    - the model of a given optimizer;
    - if any optimizers are given, another optimizer that was boosted with a given model, and that updates parameters
      that no given optimizer updates.

    After resuming, a missing model would have its initial weights, and a missing optimizer would have an empty state.
    """
    models = [*models_by_name(model).values()]
    with together(models[0].pipeline.grid.world):
        given = [boosted_optimizer(each) for each in by_name(OPTIMIZER, optimizer).values()]
        for each in given:
            _check_model(each, models)
        for boosted in models if given else ():
            _check_optimizers(boosted, given)


def _check_model(optimizer: PipelineOptimizer, models: Sequence[PipelineModel]) -> None:
    if not any(optimizer.gradients is each.pipeline.gradients for each in models):
        raise CheckpointError(
            f"this {type(optimizer.optim).__name__} belongs to another model, whose state would be lost on resuming: "
            "pass a list of all models (model=[generator, discriminator]), in the same order when saving and loading"
        )


def _check_optimizers(model: PipelineModel, given: Sequence[PipelineOptimizer]) -> None:
    boosted = [*model.pipeline.gradients.optimizers]
    updated = {name for each in boosted if each in given for name in each.names.values()}
    others = [each for each in boosted if each not in given and not updated.issuperset(each.names.values())]
    if others:
        names = ", ".join(type(each.optim).__name__ for each in others)
        raise CheckpointError(
            f"the {type(model.unwrap()).__name__} was also boosted with {names}, whose state would be lost on "
            "resuming: pass a list of all optimizers (optimizer=[muon, adamw]), in the same order when saving and "
            "loading"
        )


def check_loader(model: nn.Module | Sequence[nn.Module], dataloader: Any) -> None:
    """Raise CheckpointError, on every rank, if the dataloader cannot save its position in the data."""
    with together(models_by_name(model)[MODEL].pipeline.grid.world):
        if dataloader is not None and not all(hasattr(dataloader, name) for name in ("state_dict", "load_state_dict")):
            raise CheckpointError(
                f"this {type(dataloader).__name__} cannot save its position in the data, since it has no state_dict or "
                "load_state_dict: create it with plugin.prepare_dataloader(dataset, batch_size, shuffle, seed), or "
                "pass dataloader=None"
            )


def check_contents(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None,
    lr_scheduler: LRScheduler | Sequence[LRScheduler] | None,
    dataloader: Any,
) -> None:
    """Raise CheckpointError, on every rank, if `save_training_state` could not write the states of these objects. Call
    it on all ranks after a first step, which creates the states."""
    models = [*models_by_name(model).values()]
    grid = models[0].pipeline.grid
    for each in by_name(OPTIMIZER, optimizer).values():
        check_savable(each)
    with together(grid.world):
        for each in models:
            check_entries(each.unwrap())
        if grid.first:
            rest_of(models, lr_scheduler, plain_state(dataloader))


def _planned_state(
    target: Path,
    step: int,
    models: dict[str, PipelineModel],
    optimizers: dict[str, Optimizer],
    rest: dict[str, Any] | None,
    finish: Callable[[], None],
) -> StateSave:
    """Plan a save whose `write` and `commit` need no collectives. Call it on all ranks."""
    pipeline = models[MODEL].pipeline
    world, first = pipeline.grid.world, pipeline.grid.first
    writing = hidden(target, "writing")
    with together(world):
        if first:
            make_way(target, mark=MANIFEST)
            for folder in (MARKS, *models, *optimizers):
                (writing / folder).mkdir(parents=True)
    saves = [io_of(model).planned(model, writing / name) for name, model in models.items()]
    copies = {name: optimizer_part(optimizer) for name, optimizer in optimizers.items()}
    with together(world):  # all ranks have their copies before any rank writes and then waits for the others
        parts = {name: copied() for name, copied in copies.items()}
        rest = copy.deepcopy(rest)
    return StateSave(
        target=target,
        stage=world.rank(),
        stages=world.size(),
        token="",
        writing=writing,
        models=[save for save in saves if save is not None],
        optimizers=parts,
        rest=rest,
        step=step,
        pipeline_stages=pipeline.num_stages,
        finish=finish,
    )


def _keep(parent: Path, keep: int) -> None:
    """Remove all complete steps except the last `keep`. Each folder is first renamed to a hidden name, so that no
    reader considers the folder complete during the removal."""
    for old in sorted(_saved_steps(parent))[:-keep]:
        folder = _folder(parent, old)
        removed = hidden(folder, "removed")
        os.rename(folder, removed)
        remove(removed)


@together_in("load_training_state")
def load_training_state(
    directory: str | Path,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    lr_scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    dataloader: Any = None,
    step: int | None = None,
    verify: bool = True,
) -> int:
    """Restore the given objects to their state at `step` (by default, the newest complete step), and return this step.

    Call it on all ranks, with the model that `booster.boost` returned. The number of stages may have changed since the
    save. Objects that are not passed are not loaded. Pass several models, optimizers or LR schedulers as a list, in the
    order in which they were saved. Each rank's random generators are always restored. If the sizes of the grid have
    changed, every rank gets the random states of the first rank. The call first waits for a background save that is
    still running. With `verify`, every file is compared with its saved checksum. If a file of the newest step has
    changed and `step` is not given, this step is renamed to `step-<step>.damaged`, and an older step is loaded, with a
    warning.

    Raises CheckpointError, on every rank, in any of the following cases:

    - No complete (and unchanged) step exists.
    - A file of the step cannot be read.
    - The step lacks the state of a given object, or a saved state does not match its object.
    - A background save failed.
    - The step to load differs between ranks.
    - An object is not boosted.
    - Only some of the optimizers that were boosted with the models are given.
    - An optimizer belongs to another model.
    - The dataloader has no `state_dict` or no `load_state_dict`.
    """
    models, parent = models_by_name(model), Path(directory)
    pipeline = models[MODEL].pipeline
    check_complete(model, optimizer)
    check_loader(model, dataloader)
    io_of(models[MODEL]).wait()  # a save in progress may still add the newest step, and remove earlier steps
    with together(pipeline.grid.world):
        steps = _choose(parent, step)
    _refuse_other_number(steps[0], pipeline, "step to load")
    damaged: dict[Path, str] = {}
    for chosen in steps:
        folder = existing(_folder(parent, chosen))
        with together(pipeline.grid.world):
            why = damage(folder, pipeline.grid.world) if verify else ""
        if not why:
            break
        damaged[folder] = why
    else:
        what = "; ".join(f"{folder.name} has changed ({why})" for folder, why in damaged.items())
        raise CheckpointError(
            f"{parent} contains no intact step{'' if step is None else f' {step}'}: {what}. Pass another directory"
            f"{'' if step is None else ' or step'}"
        )
    if step is None and pipeline.grid.first:
        for path, why in [*_incomplete(parent), *damaged.items()]:
            logger.warning(
                "%s is skipped, because it is incomplete or damaged (%s): resuming from step %d", path, why, chosen
            )
        for path in damaged:  # so that it does not count as the newest or as one of the last `keep` steps
            with suppress(OSError):
                path.rename(path.with_name(f"{path.name}.damaged"))
    with together(pipeline.grid.world), restoring(folder / REST):
        rest = read_rest(folder / REST)
        optimizers = by_name(OPTIMIZER, optimizer)
        given = optimizers | by_name(SCHEDULER, lr_scheduler) | {"dataloader": dataloader} | models
        saved = rest | {name: folder / name for name in (*optimizers, *models) if (folder / name).exists()}
        missing = [name for name in given if given[name] is not None and saved.get(name) is None]
        if missing:
            raise CheckpointError(
                f"{folder} was saved without {', '.join(missing)}: pass only objects whose state is in the folder"
            )
        if dataloader is not None:
            dataloader.load_state_dict(saved_position(rest, pipeline.grid))
    for name, each in models.items():
        io_of(each).load_folder(each, folder / name)
    for name, boosted in optimizers.items():
        load_optimizer(boosted, folder / name)
    with together(pipeline.grid.world), restoring(folder / REST):
        restore_rest([*models.values()], rest, lr_scheduler)
        set_random_state(own_random_state(rest, pipeline.grid))
    return chosen


def newest_step(directory: str | Path) -> int | None:
    """The newest complete step in `directory`, or None if no step is complete."""
    return max(_saved_steps(Path(directory)), default=None)


def has_step(directory: str | Path) -> bool:
    """Whether `directory` contains a step, complete or not. A save that was killed before it completed its step leaves
    only a hidden folder, which does not count."""
    return bool(_steps(Path(directory)))


def _check_step(step: int, keep: int) -> None:
    if not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step, the number of completed steps, must be a non-negative integer, got {step!r}")
    if not isinstance(keep, int) or keep < 1:
        raise CheckpointError(f"keep, the number of newest steps to keep, must be a positive integer, got {keep!r}")


def _refuse_later_steps(parent: Path, step: int) -> None:
    """Raise CheckpointError if the directory has a later step."""
    later = max(_saved_steps(parent), default=step)
    if later > step:
        raise CheckpointError(
            f"{parent} already contains step {later}, which would remain the newest after step {step} is saved: save "
            "to another folder, or move the later steps away"
        )


# By directory, the latest step that this process has saved there, and its model.
_latest: dict[Path, tuple[int, weakref.ref[nn.Module]]] = {}


def _refuse_other_model(parent: Path, step: int, model: nn.Module) -> None:
    """Raise CheckpointError if another model of this process, which still exists, has saved this step to `parent`."""
    saved, other = _latest.get(parent.resolve(), (None, None))
    is_there = saved == step and existing(_folder(parent, step)).exists()
    if is_there and other is not None and other() not in (None, model):
        gc.collect()  # frees a model that only reference cycles keep alive
        if other() is not None:
            raise CheckpointError(
                f"another model of this process has saved step {step} to {parent}, and this save would replace that "
                "step: save both models in one call (model=[model, other]), or use a separate directory for each model"
            )
    _latest[parent.resolve()] = step, weakref.ref(model)


def _refuse_other_number(value: int, pipeline: Pipeline, what: str) -> None:
    values = gather_objects(value, pipeline.grid.world)
    if len(set(values)) > 1:
        raise CheckpointError(
            f"the {what} differs between ranks: {values}. Pass the same arguments on every rank, with a directory that "
            "all ranks can access"
        )


def _folder(parent: Path, step: int) -> Path:
    return parent / f"step-{step:08d}"


def _saved_steps(parent: Path) -> Iterator[int]:
    """The steps whose folders are complete, in any order."""
    return (step for step in _steps(parent) if not flaw(existing(_folder(parent, step)), step))


def _steps(parent: Path) -> set[int]:
    """The steps that have complete or incomplete folders."""
    names = {path.name.removeprefix(".").removesuffix(".old") for path in parent.glob("*step-*")}
    return {int(match[1]) for name in names if (match := STEP.fullmatch(name))}


def _incomplete(parent: Path) -> list[tuple[Path, str]]:
    found = {path: STEP.fullmatch(path.name) for path in sorted(parent.glob("step-*"))}
    return [(path, why) for path, match in found.items() if (why := flaw(path, int(match[1]) if match else None))]


def _choose(parent: Path, step: int | None) -> list[int]:
    """The complete steps to try, newest first: all complete steps or, if given, only `step`. Raises CheckpointError if
    no such step exists."""
    steps = sorted(_saved_steps(parent), reverse=True)
    if step is None and steps:
        return steps
    if step in steps:
        return [step]
    flaws = [f"; {path.name} is not complete ({why})" for path, why in _incomplete(parent)]
    what = f"no complete step {step}, only {steps[::-1]}" if steps else "no complete step"
    other = "another step, or " if steps else ""
    advice = "; restore the files of incomplete steps, or move these steps away" if flaws else ""
    raise CheckpointError(
        f"{parent} contains {what}{''.join(flaws[-3:])}: pass {other}a directory that save_training_state wrote{advice}"
    )


def _remove_leftovers(parent: Path) -> None:
    """Remove leftovers of killed saves, and restore steps that these saves were replacing."""
    leftovers = [path for path in parent.glob(".step-*") if HIDDEN.fullmatch(path.name)]
    for path in leftovers:
        if path.suffix == ".old":
            complete_save(parent / path.name.removeprefix(".").removesuffix(".old"))
    for path in leftovers:
        remove(path)
