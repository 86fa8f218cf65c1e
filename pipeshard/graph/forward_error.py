"""Forward error: the TraceError for a model whose forward fails in a trace, with a remedy that fits the batch."""

from torch import nn

from pipeshard.batch.batch import FOR_CRITERION, Batch
from pipeshard.errors import TraceError, summary

TRITON = (
    "A trace cannot run a Triton kernel between units, such as a fused loss: turn off these kernels "
    "(in Liger, with fused_linear_cross_entropy=False and cross_entropy=False). Kernels inside layers may stay on"
)
PACKED = (
    "A recurrent layer returns a PackedSequence, whose lengths other stages do not have: write a module that takes and "
    "returns padded tensors, and whose forward calls pack_padded_sequence, the recurrent layer and "
    "pad_packed_sequence(..., total_length=x.shape[1])"
)


def forward_error(model: nn.Module, batch: Batch, last_unit: str, is_packed: bool, error: Exception) -> TraceError:
    """The TraceError for an `error` of the forward. `last_unit` is the last unit that ran before the error, or "".
    `is_packed` is True if a unit has returned a PackedSequence."""
    after = f" after unit {last_unit}" if last_unit else ""
    remedy = PACKED if is_packed else _remedy(batch, error)
    return TraceError(f"tracing {type(model).__name__} failed{after}: {summary(error)}. {remedy}")


def _remedy(batch: Batch, error: Exception) -> str:
    if "Triton" in str(error):
        return TRITON
    unknown = str(error).partition("unexpected keyword argument '")[2].partition("'")[0]
    if isinstance(batch.data, dict) and unknown in batch.data:
        return (
            f"To pass {unknown} only to the criterion, rename it to '{FOR_CRITERION}{unknown}' in the batch. If the "
            "forward takes the whole dict as its argument, let the dataloader return (batch,): the criterion also "
            "receives this tuple"
        )
    shapes = {path: tuple(tensor.shape) for path, tensor in batch.tensors.items()}
    return (
        f"The shapes in the batch are {shapes}. If the model takes other inputs, pass dry_run_input=<a batch>. "
        "If an input's batch dimension is not the first, pass batch_dims={<name>: <dimension>}"
    )
