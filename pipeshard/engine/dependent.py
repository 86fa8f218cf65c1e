"""Dependent: a microbatch whose forward fails, although the forward of its full batch succeeds.

An input may contain row indices (graph edges, bag offsets), or a dimension may equal the batch size only by
coincidence. The model then fails on a microbatch with an error that names no remedy. So if a microbatch fails,
pipeshard also runs the full batch, and raises BatchError if the full batch succeeds.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import WHOLE_TENSOR, Criterion, raised
from pipeshard.distributed.failures import is_lost
from pipeshard.distributed.progress import own_progress
from pipeshard.engine.cuts import Cuts
from pipeshard.engine.mixed_precision import Precision
from pipeshard.engine.outputs import Outputs
from pipeshard.engine.stages import Stages
from pipeshard.engine.traces import Traces
from pipeshard.errors import BatchError, PipeshardError, TraceError
from pipeshard.schedule.program import Action, Kind

ADVICE = (
    "If an input contains row indices, or if entries of an input (such as images) belong to samples of other "
    "microbatches, pass num_microbatches=1 to PipelinePlugin. If the first dimension of an input is not the batch "
    "dimension, pass batch_dims={name: None} to send the full tensor with every microbatch"
)


def is_of_model(error: BaseException) -> bool:
    """Whether the model may have raised `error` because of the content of the batch."""
    return isinstance(error, Exception) and not isinstance(error, PipeshardError | torch.OutOfMemoryError)


def failing(batch: Batch, parts: Sequence[Batch], run: Callable[[Batch], object]) -> tuple[int, Exception] | None:
    """The index of the first microbatch in `parts` for which `run` fails, and the error. Returns None if no microbatch
    fails, if the full `batch` also fails, or if the first microbatch is the full batch."""
    if parts[0].rows == batch.rows or _error(run, batch) is not None:
        return None
    for i, part in enumerate(parts):
        if (error := _error(run, part)) is not None:
            return i, error
    return None


def _error(run: Callable[[Batch], object], batch: Batch) -> Exception | None:
    try:
        run(batch.copied(batch.paths))  # a copy, since the model may write to the batch
    except Exception as error:  # of any type, since the user's model raises it
        return error
    return None


def dependent_text(batch: Batch, parts: Sequence[Batch], i: int, error: Exception, module: str = "") -> str:
    """The error message for microbatch i, which fails with `error` (in `module`, if known)."""
    start, selection = sum(part.rows for part in parts[:i]), parts[i].selection
    rows = f"{start} to {start + parts[i].rows - 1}" if selection is None else ", ".join(map(str, selection.rows))
    rows = f"rows {rows}" if parts[i].rows > 1 else f"row {start if selection is None else rows}"
    where = f" in {module}" if module else ""
    who, remedy = ("criterion", f"{WHOLE_TENSOR}. ") if raised(error) else ("forward", "")
    return (
        f"the {who} fails for {rows} of the batch (microbatch {i} of {len(parts)}), but not for the full batch of "
        f"{batch.rows} rows: {type(error).__name__}{where}: {error}. {remedy}{ADVICE}"
    )


class Dependents:
    """Determines whether a step failed because a microbatch depends on the rest of its batch."""

    def __init__(self, traces: Traces, cuts: Cuts, stages: Stages, precision: Precision) -> None:
        self.traces, self.cuts, self.stages, self.precision = traces, cuts, stages, precision

    @contextmanager
    def tracing(self, read: Sequence[Batch], criterion: Criterion | None, outputs: Outputs) -> Iterator[None]:
        """Context manager for traces of microbatches. Raises BatchError, on every rank of the pipeline, if glue or the
        criterion fails for a microbatch, but not for the full batch."""
        try:
            yield
        except TraceError as error:
            why = error.__cause__
            if not isinstance(why, Exception):
                raise
            for batch, parts in zip(read, self.cuts.microbatches(read), strict=True):
                found = failing(batch, parts, lambda part: self.traces.on_stage(part, criterion, outputs.needed, 0))
                if found is not None:
                    raise BatchError(dependent_text(batch, parts, found[0], why)) from why
            raise

    def explain(
        self,
        error: Exception,
        read: Sequence[Batch],
        cut: Sequence[Sequence[Batch]],
        criterion: Criterion | None,
        outputs: Outputs,
    ) -> BatchError | None:
        """The BatchError for `error` if the forward of a microbatch raised `error`, fails again with zeros as received
        values, and does not fail for the full batch; otherwise None."""
        action = own_progress().action
        if not isinstance(action, Action) or action.kind is not Kind.F or not is_of_model(error) or is_lost(error):
            return None
        owners = [(k, i) for k, parts in enumerate(cut) for i in range(len(parts))]
        place = [stage.index for stage in self.stages.whole].index(action.stage)
        k, i = owners[action.microbatch // (len(self.stages.running[place].microbatches) // len(owners))]
        batch, parts = read[k], cut[k]

        def run(part: Batch) -> None:
            microbatch = self.traces.on_stage(part, criterion, outputs.needed, place)
            self.stages.whole[place].try_zeros(microbatch, criterion)

        with self.precision.running():
            found = failing(batch, parts[i : i + 1], run)
        if found is None or type(found[1]) is not type(error):
            return None
        module = own_progress().module([frame for frame, _ in traceback.walk_tb(error.__traceback__)])
        return BatchError(dependent_text(batch, parts, i, error, module))
