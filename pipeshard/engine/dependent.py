"""Dependent: detects a microbatch whose forward fails although the forward of the full batch succeeds.

An input may contain row indices (graph edges, bag offsets), or a dimension may equal the batch size only by
coincidence. The model then fails on a microbatch with an error that names no remedy. So if a microbatch fails in a
trace or in the proof (verify/proof.py), pipeshard also runs the full batch, and raises BatchError if the full batch
succeeds. If a microbatch fails in a step, pipeshard adds a note to the model's error.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import WHOLE_TENSOR, Criterion, raised
from pipeshard.distributed.failures import is_lost
from pipeshard.engine.traces import Traces
from pipeshard.errors import BatchError, PipeshardError, TraceError
from pipeshard.graph.dataflow import Wanted

BATCH_ADVICE = (
    "If an input contains row indices, or if entries of an input (such as images) belong to samples of other "
    "microbatches, pass num_microbatches=1 to PipelinePlugin. If the first dimension of an input is not the batch "
    "dimension, pass batch_dims={name: None} to send the full tensor with every microbatch"
)


def is_of_model(error: Exception) -> bool:
    """Whether the model may have raised `error` because of the batch's content."""
    return not (isinstance(error, PipeshardError | torch.OutOfMemoryError) or is_lost(error))


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


def dependent_text(batch: Batch, parts: Sequence[Batch], i: int, error: Exception) -> str:
    """The error message for microbatch i, which fails with `error`."""
    start, selection = sum(part.rows for part in parts[:i]), parts[i].selection
    rows = f"{start} to {start + parts[i].rows - 1}" if selection is None else ", ".join(map(str, selection.rows))
    rows = f"rows {rows}" if parts[i].rows > 1 else f"row {start if selection is None else rows}"
    who, remedy = ("criterion", f"{WHOLE_TENSOR}. ") if raised(error) else ("forward", "")
    return (
        f"the {who} fails for {rows} of the batch (microbatch {i} of {len(parts)}), but not for the full batch of "
        f"{batch.rows} rows: {type(error).__name__}: {error}. {remedy}{BATCH_ADVICE}"
    )


@contextmanager
def tracing(
    traces: Traces, read: Sequence[Batch], cut: Sequence[Sequence[Batch]], criterion: Criterion | None, outputs: Wanted
) -> Iterator[None]:
    """Context manager for traces of the microbatches in `cut`. Raises BatchError, on every rank of the pipeline, if
    glue or the criterion fails for a microbatch but not for its full batch in `read`."""
    try:
        yield
    except TraceError as error:
        why = error.__cause__
        if not isinstance(why, Exception):
            raise
        for batch, parts in zip(read, cut, strict=True):
            found = failing(batch, parts, lambda part: traces.on_stage(part, criterion, outputs, 0))
            if found is not None:
                raise BatchError(dependent_text(batch, parts, found[0], why)) from why
        raise
