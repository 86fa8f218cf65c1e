"""Dependent: a microbatch that does not run by itself, although its whole batch does.

An input may index samples (the edges of a graph, the offsets of bags), or have as many entries as there are samples by
chance. A model then raises its own error in some microbatch, which does not say what a user can
change about the microbatches. So if a microbatch fails, the whole batch is tried.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipeshard.batch.batch import Batch
from pipeshard.errors import BatchError, PipeshardError


def is_of_model(error: BaseException) -> bool:
    """Whether the content of the batch may have caused an error."""
    return isinstance(error, Exception) and not isinstance(error, PipeshardError | torch.OutOfMemoryError)


def failing(batch: Batch, parts: Sequence[Batch], run: Callable[[Batch], object]) -> tuple[int, Exception] | None:
    """The first of these microbatches of a batch for which `run` fails, and its error; None if none fails, or if the
    batch fails, too."""
    if parts[0].rows == batch.rows or _error(run, batch) is not None:
        return None
    for i, part in enumerate(parts):
        if (error := _error(run, part)) is not None:
            return i, error
    return None


def _error(run: Callable[[Batch], object], batch: Batch) -> Exception | None:
    try:
        run(batch)
    except Exception as error:  # of whatever kind: the user's model raises it
        return error
    return None


def dependent_text(batch: Batch, parts: Sequence[Batch], i: int, error: Exception, module: str = "") -> str:
    """What to do about microbatch i, which fails with `error`, in `module` if that is known."""
    start, place = sum(part.rows for part in parts[:i]), parts[i].place
    rows = f"{start} to {start + parts[i].rows - 1}" if place is None else ", ".join(map(str, place.rows))
    names = cut_inputs(batch)
    where = f" in {module}" if module else ""
    example = f"{{{names[0]!r}: None}}" if names else "{<name>: None}"
    return (
        f"rows {rows} of the batch (microbatch {i} of {len(parts)}) do not run by "
        f"themselves, but the whole batch of {batch.rows} rows does: {type(error).__name__}{where}: {error}. An input "
        f"may index the rows. Pass num_microbatches=1 to PipelinePlugin. If one of {', '.join(names)} does not count "
        f"the rows in its first dimension, pass batch_dims instead, for example batch_dims={example} if every "
        "microbatch needs all of it"
    )


def cut_inputs(batch: Batch) -> list[str]:
    """The paths of the tensors that are cut."""
    leaves = zip(batch.paths, batch.leaves, batch.row_dims, strict=True)
    return [path for path, leaf, dim in leaves if dim is not None and isinstance(leaf, Tensor)]


def dependent_error(batch: Batch, parts: Sequence[Batch], i: int, error: Exception, module: str = "") -> BatchError:
    return BatchError(dependent_text(batch, parts, i, error, module))
