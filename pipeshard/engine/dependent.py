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
from pipeshard.hf import IDS, LABELS, MASK
from pipeshard.schedule.program import Action, Kind


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
        f"{batch.rows} rows: {type(error).__name__}{where}: {error}. {remedy}{_advice(batch)}"
    )


def _advice(batch: Batch) -> str:
    """What to do if a microbatch fails: the likely causes, and the remedy for each."""
    whole = [path for path, leaf in batch.tensors.items() if leaf.numel() > 1 and path not in batch.parted]
    causes = [f"the entries of {', '.join(batch.owners)} are assigned to the wrong samples"] * bool(batch.owners)
    causes += [f"entries of {', '.join(whole)} (not split) belong to samples"] * bool(whole)
    causes += ["an input contains row indices"]
    advice = f"If {', or if '.join(causes)}, pass num_microbatches=1 to PipelinePlugin"
    if not (names := _doubtful_inputs(batch)):
        return advice
    return (
        f"{advice}. If the first dimension of {'one of ' * (len(names) > 1)}{', '.join(names)} is not the batch "
        f"dimension, pass batch_dims instead, for example batch_dims={{{names[0]!r}: None}} to send the full tensor "
        "with every microbatch"
    )


def _doubtful_inputs(batch: Batch) -> list[str]:
    """The paths of the tensors that are split along their first dimension, except media (split by their samples) and
    tensors whose batch dimension is certain: labels, and tensors with one entry per token."""
    ids = batch.tensors.get(IDS)
    by_rows = {path for path, dim in zip(batch.paths, batch.row_dims, strict=True) if dim == 0}
    cut = [path for path in batch.tensors if path in by_rows and path not in batch.owners]
    certain = [path for path in cut if ids is not None and batch.tensors[path].shape[:2] == ids.shape]
    return [path for path in cut if path not in (IDS, MASK, LABELS, *certain)]


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
