"""Rest: the content of training.pt, which is a training state without its weights and optimizers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pipeshard.checkpoint.random_state import random_state
from pipeshard.checkpoint.state_folder import SCHEDULER, by_name
from pipeshard.checkpoint.untrusted import load_plain, plain
from pipeshard.distributed.collectives import encode, gather_objects
from pipeshard.distributed.mesh import Grid
from pipeshard.engine.engine import Pipeline
from pipeshard.engine.model import PipelineModel
from pipeshard.errors import CheckpointError, PipeshardError, explained, summary

OTHERS = "others"  # in a training.pt, the progress of all models except the first
REPLICA_POSITIONS = "positions"  # in a training.pt, the state of each replica's dataloader, if these states differ
ADVICE = "load another step (step=... or, in a Trainer, resume_from_checkpoint=...)"


def rest_of(models: Sequence[PipelineModel], lr_scheduler: Any, position: Any = None) -> dict[str, Any]:
    """The content of training.pt, without the entries from `random_states` and `positions_of`. `position` is the state
    of the dataloader. Raises CheckpointError for a state that `load_plain` could not read."""
    first, *others = (_progress(model.pipeline) for model in models)
    schedulers = {name: plain_state(scheduler) for name, scheduler in by_name(SCHEDULER, lr_scheduler).items()}
    parts = {"random": random_state(), "dataloader": position, SCHEDULER: None, **schedulers}
    return first | parts | {OTHERS: others}


def plain_state(part: Any) -> Any:
    """The state of an LR scheduler or a dataloader, or None if `part` is None. Raises CheckpointError as `rest_of`
    does."""
    return None if part is None else plain(part.state_dict(), f"the state of this {type(part).__name__}")


def own_position(dataloader: Any, grid: Grid) -> Any:
    """The state of this rank's dataloader, or None on ranks that do not save the position. All ranks of a replica have
    the same position, so only one of these ranks saves it. If the dataloader divides the data among the replicas, all
    ranks have the same position, and only rank 0 saves it."""
    is_common = getattr(dataloader, "shared_by", 1) == grid.dp_size
    is_saved = grid.first if is_common else grid.stage == grid.slice == 0
    return plain_state(dataloader) if is_saved else None


def positions_of(position: Any, grid: Grid) -> dict[str, Any]:
    """The entry of training.pt with the positions of all replicas, or {} if all replicas have the same position. Call
    it on all ranks, with the result of `own_position`."""
    positions = gather_objects(position, grid.replicas)
    different = {encode(position) for position in positions if position is not None}
    return {REPLICA_POSITIONS: positions} if len(different) > 1 else {}


def saved_position(rest: dict[str, Any], grid: Grid) -> Any:
    """The data position of this rank's replica, from the content of training.pt. Raises CheckpointError if each replica
    had its own position, and the number of replicas has changed."""
    positions = rest.get(REPLICA_POSITIONS) or [rest["dataloader"]] * grid.dp_size
    if len(positions) != grid.dp_size:
        raise CheckpointError(
            f"the dataloaders of {len(positions)} replicas were saved at different positions, but this run has dp_size="
            f"{grid.dp_size}: resume with dp_size={len(positions)}, or pass dataloader=None to load_training_state to "
            "start at the beginning of the data. To be able to change dp_size, train with a dataloader from "
            "plugin.prepare_dataloader, whose position does not depend on the number of replicas"
        )
    return positions[grid.replica]


def restore_rest(models: Sequence[PipelineModel], rest: dict[str, Any], lr_scheduler: Any) -> None:
    """Restore the states in the result of `rest_of`, except the states of the dataloader and the random generators."""
    for name, scheduler in by_name(SCHEDULER, lr_scheduler).items():
        scheduler.load_state_dict(rest[name])
    for model, progress in zip(models, (rest, *rest.get(OTHERS, ()))):
        _continue(model.pipeline, progress)


def _progress(pipeline: Pipeline) -> dict[str, Any]:
    """The training progress of one model: its counters of steps and forwards, its number, and its loss scale."""
    return {
        "steps": pipeline.steps,
        "forwards": pipeline.forwards,
        "model": pipeline.policy.replay.randomness.model,
        "loss_scale": None if pipeline.scaling is None else pipeline.scaling.state_dict(),
    }


def _continue(pipeline: Pipeline, progress: dict[str, Any]) -> None:
    pipeline.steps, pipeline.forwards = int(progress["steps"]), int(progress.get("forwards", 0))
    randomness = pipeline.policy.replay.randomness  # a resumed script may have boosted fewer models before this one
    randomness.model = int(progress.get("model", randomness.model))
    if pipeline.scaling is not None and progress.get("loss_scale"):
        pipeline.scaling.load_state_dict(progress["loss_scale"])


def read_rest(file: Path) -> dict[str, Any]:
    """Read the result of `rest_of` from a file. Call this function inside the context manager `restoring`."""
    return load_plain(file, "the training.pt of a training state", ADVICE)


def restoring(file: Path) -> AbstractContextManager[None]:
    """Context manager for code that uses the content of `file`. Converts errors to CheckpointErrors that name the file,
    since generators, schedulers and dataloaders may raise any exception for an invalid state, or for the state of
    another class."""
    advice = f"pass objects of the same classes and settings as in the save, or {ADVICE}"
    return explained(
        lambda error: CheckpointError(f"{file} cannot be restored ({summary(error)}): {advice}"), but=(PipeshardError,)
    )
