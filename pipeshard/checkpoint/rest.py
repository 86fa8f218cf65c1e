"""Rest: the content of a training.pt, which is a training state without the weights and the optimizers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeshard.checkpoint.random_state import check_random_state, random_state
from pipeshard.checkpoint.state_folder import SCHEDULER, by_name
from pipeshard.checkpoint.untrusted import load_plain, plain
from pipeshard.engine.engine import Pipeline
from pipeshard.engine.model import PipelineModel
from pipeshard.errors import CheckpointError, explained, summary

OTHERS = "others"  # in a training.pt, the progress of all models but the first


def rest_of(models: Sequence[PipelineModel], lr_scheduler: Any, dataloader: Any = None) -> dict[str, Any]:
    """The content of training.pt: a training state without the weights and the optimizers. Raises CheckpointError for a
    state that `read_rest` could not read."""

    def state_of(part: Any) -> Any:
        return None if part is None else plain(part.state_dict(), f"the state of this {type(part).__name__}")

    first, *others = (_progress(model.pipeline) for model in models)
    schedulers = {name: state_of(scheduler) for name, scheduler in by_name(SCHEDULER, lr_scheduler).items()}
    parts = {"random": random_state(), "dataloader": state_of(dataloader), SCHEDULER: None, **schedulers}
    return first | parts | {OTHERS: others}


def restore_rest(models: Sequence[PipelineModel], rest: dict[str, Any], lr_scheduler: Any) -> None:
    """Restore the result of `rest_of`, except the dataloader and the random generators."""
    for name, scheduler in by_name(SCHEDULER, lr_scheduler).items():
        scheduler.load_state_dict(rest[name])
    for model, progress in zip(models, (rest, *rest.get(OTHERS, ()))):
        _continue(model.pipeline, progress)


def _progress(pipeline: Pipeline) -> dict[str, Any]:
    """The state of one model's steps, apart from its tensors."""
    return {
        "steps": pipeline.steps,
        "forwards": pipeline.forwards,
        "model": pipeline.policy.replay.randomness.model,
        "loss_scale": None if pipeline.scaling is None else pipeline.scaling.state_dict(),
    }


def _continue(pipeline: Pipeline, progress: dict[str, Any]) -> None:
    pipeline.steps, pipeline.forwards = progress["steps"], progress.get("forwards", 0)
    randomness = pipeline.policy.replay.randomness  # a resumed script may have boosted fewer models before this one
    randomness.model = progress.get("model", randomness.model)
    if pipeline.scaling is not None and progress.get("loss_scale"):
        pipeline.scaling.load_state_dict(progress["loss_scale"])


def read_rest(file: Path) -> dict[str, Any]:
    """Read the result of `rest_of` from a file. Raises CheckpointError if the file is damaged or invalid."""
    advice = "load another step (step=... or, in a Trainer, resume_from_checkpoint=...)"
    rest = load_plain(file, "the training.pt of a training state", advice)
    with explained(  # generators may raise anything for an invalid state
        lambda error: CheckpointError(f"{file} is damaged ({summary(error)}): {advice}")
    ):
        _check_progress(rest)
        for progress in rest.get(OTHERS, ()):
            _check_progress(progress)
        for key in ("dataloader", *(key for key in rest if key.startswith(SCHEDULER))):
            if not isinstance(rest.get(key), dict | None):
                raise TypeError(f"{key} must be a dict")
        ranks = rest.get("ranks", [])
        if len(ranks) != (math.prod(rest["layout"]) if ranks else 0):
            raise ValueError(f"it has the random states of {len(ranks)} ranks, in a layout of {rest['layout']}")
        for state in (rest["random"], *ranks):
            check_random_state(state)
    return rest


def _check_progress(progress: dict[str, Any]) -> None:
    for key, count in ("steps", progress["steps"]), *((key, progress.get(key, 0)) for key in ("forwards", "model")):
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"{key} must be a non-negative integer")
    if not isinstance(progress.get("loss_scale"), dict | None):
        raise TypeError("loss_scale must be a dict")
