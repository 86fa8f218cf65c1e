"""Forward error: the TraceError for a model whose forward fails in a trace, with a remedy that fits the batch."""

from torch import nn

from pipeshard.batch.batch import FOR_CRITERION, Batch
from pipeshard.batch.read import parameters_of_forward
from pipeshard.errors import TraceError, summary

TRITON = (
    "A trace cannot run a Triton kernel between units, such as a fused loss: turn off these kernels "
    "(Liger's with fused_linear_cross_entropy=False, cross_entropy=False). Kernels in layers may stay on"
)


def forward_error(model: nn.Module, batch: Batch, last_unit: str, error: Exception) -> TraceError:
    """The TraceError for an `error` of the forward. `last_unit` is the unit that ran before the error, or ""."""
    after = f" after unit {last_unit}" if last_unit else ""
    return TraceError(f"tracing {type(model).__name__} failed{after}: {summary(error)}. {_remedy(model, batch, error)}")


def _remedy(model: nn.Module, batch: Batch, error: Exception) -> str:
    if "Triton" in str(error):
        return TRITON
    unknown = _unknown_keys(model.get_submodule(batch.entry), batch)
    if unknown and isinstance(error, TypeError):
        return (
            f"The forward does not take {' and '.join(unknown)}. To pass an entry of the batch only to the criterion, "
            f"name it '{FOR_CRITERION}{unknown[-1]}'. If the forward takes the whole dict as its argument, let the "
            "dataloader return (batch,)"
        )
    shapes = {path: tuple(tensor.shape) for path, tensor in batch.tensors.items()}
    return (
        f"The shapes in the batch are {shapes}. If the model takes other inputs, pass dry_run_input=<a batch>. "
        "If an input's batch dimension is not the first, pass batch_dims={<name>: <dimension>}"
    )


def _unknown_keys(called: nn.Module, batch: Batch) -> list[str]:
    """The keys of a batch that are passed to the called module, but are not arguments of its forward."""
    if not isinstance(batch.data, dict):
        return []
    parameters = parameters_of_forward(called)
    if not parameters:  # it has no signature, or no arguments
        return []
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return []
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return [str(key) for key in batch.data if key not in names and not str(key).startswith(FOR_CRITERION)]
