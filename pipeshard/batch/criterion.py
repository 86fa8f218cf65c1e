"""Criterion: a function that computes a loss from a model's output."""

import contextlib
import inspect
import traceback
from collections.abc import Callable, Hashable
from functools import partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.tree import PLAIN_VALUES
from pipeshard.errors import ConfigurationError

Criterion = Callable[[Any, Any], Any]  # returns a scalar, or (sum, count)

WHOLE_TENSOR = (
    "If the criterion reads a tensor of the whole batch from a closure or an attribute, pass this tensor in the batch, "
    "under a key with the prefix 'criterion.', so that it is split with the samples"
)


def loss_of(output: Any, criterion: Criterion | None, batch: Batch) -> Tensor | None:
    """The criterion's loss, or sum / count if the criterion returns both. Without a criterion, the loss in the model's
    output, or None if the output contains no loss."""
    loss, count = sum_and_count(output, criterion, batch)
    return loss if loss is None or count is None else loss / count


def sum_and_count(
    output: Any, criterion: Criterion | None, batch: Batch
) -> tuple[Tensor | None, Tensor | float | None]:
    """The loss as (scalar, None), or as (sum, count) if the criterion returns both. Without a criterion, the loss in
    the model's output, or None if the output contains no loss.

    If the criterion has a method `of_batch` (the model's own loss), this method is called with the output and
    `batch.data`. It returns None if the batch has no labels. The result is then (None, None).
    """
    count: Tensor | float | None = None
    if criterion is None:
        return _without_dimensions(own_loss(output)), None
    if (of_batch := getattr(criterion, "of_batch", None)) is None:
        loss = _loss_called(criterion, output, batch.for_criterion())
    elif (loss := of_batch(output, batch.data)) is None:
        return None, None
    if isinstance(loss, tuple) and len(loss) == 2 and _is_scalar(loss[0]) and _is_count(loss[1]):
        loss, count = loss
    if not _is_scalar(loss):
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else None
        raise ConfigurationError(
            f"the criterion returned {shape or repr(loss)}, not a scalar tensor. The criterion is called with the "
            f"model's output ({type(output).__name__}) and, if it takes two arguments, with the microbatch. Return a "
            "scalar, as in lambda outputs, inputs: outputs.loss (which is None if the batch has no labels). "
            "Alternatively, return (sum, count): the batch's loss is then the sum of all sums divided by the sum of "
            "all counts"
        )
    return _without_dimensions(loss), count


def raised(error: BaseException) -> bool:
    """Whether `error` was raised while a criterion computed the loss."""
    return any(frame.f_code is sum_and_count.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def _without_dimensions(loss: Tensor | None) -> Tensor | None:
    """Convert a loss of shape (1,) to a scalar, since torch's backward accepts both."""
    return loss.reshape(()) if loss is not None and loss.ndim and loss.numel() == 1 else loss


def in_step(criterion: Criterion | None) -> Criterion | None:
    """The function that a step calls: the criterion's attribute `in_step` or, without this attribute, the criterion
    itself."""
    return getattr(criterion, "in_step", criterion)


def takes_outputs_alone(criterion: Criterion) -> bool:
    """Whether the criterion accepts only the model's output, instead of (outputs, inputs). Raises ConfigurationError if
    the criterion accepts neither."""
    try:
        signature = inspect.signature(criterion.forward if isinstance(criterion, nn.Module) else criterion)
    except (TypeError, ValueError):  # it has no signature
        return False
    for count in (2, 1):
        with contextlib.suppress(TypeError):
            signature.bind(*[None] * count)
            return count == 1
    raise ConfigurationError(f"the criterion must accept (outputs, inputs) or only outputs, but it accepts {signature}")


def _loss_called(criterion: Criterion, output: Any, inputs: Any) -> Any:
    if takes_outputs_alone(criterion):
        return criterion(output)  # type: ignore[call-arg]
    try:
        return criterion(output, inputs)
    except (TypeError, AttributeError) as error:
        name = getattr(criterion, "__name__", type(criterion).__name__)
        if type(criterion).__module__.startswith("torch.nn.") or getattr(nn.functional, name, None) is criterion:
            raise ConfigurationError(
                f"{name} takes tensors, but a criterion is called with the model's output ({type(output).__name__}) "
                f"and the whole microbatch ({type(inputs).__name__}), so the call failed ({error}). Select the tensors "
                'to compare, as in lambda outputs, inputs: cross_entropy(outputs.logits, inputs["labels"]), or pass '
                "None to use the loss that the model computes from the labels"
            ) from None
        raise


def own_loss(output: Any) -> Tensor | None:
    """The model's own loss. In a plain tuple or list `(loss, logits, ...)`, this is the first entry, if the entry is a
    floating-point tensor without dimensions. Otherwise, it is the output's tensor `loss`, or None without such a
    tensor."""
    first = output[0] if type(output) in (tuple, list) and output else None
    if isinstance(first, Tensor) and first.ndim == 0 and first.is_floating_point():
        return first
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def key_of(criterion: Any) -> Hashable:
    """A key that distinguishes criteria. Functions with the same code and captured values have equal keys, as do
    partials of one function with the same arguments. A loop may therefore create a new function or partial in each
    step."""
    if isinstance(criterion, FunctionType) or (type(criterion) is partial and not vars(criterion)):
        return _Made(criterion)
    try:
        hash(criterion)
    except TypeError:
        return _Same(criterion)
    return criterion


class _Same:
    """A hashable key for an object. Two keys are equal if they refer to the same object."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


class _Made:
    """A hashable key for a function or partial that a loop may create again in each step. Keys with the same code and
    captured values are equal."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.code: Hashable
        if isinstance(function, partial):
            self.code, values, named = key_of(function.func), function.args, function.keywords
            self.captured: dict[Hashable, Hashable] = {}
        else:
            self.code, named = function.__code__, function.__kwdefaults__ or {}
            values = *(function.__defaults__ or ()), function.__globals__
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            self.captured = {name: _cell_content(cell) for name, cell in cells}
        self.captured |= {key: _identified(value) for key, value in (*enumerate(values), *named.items())}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Made):
            return False
        return self.function is other.function or (self.code == other.code and self.captured == other.captured)

    def __hash__(self) -> int:
        return hash(self.code)


def _cell_content(cell: Any) -> Hashable:
    try:
        return _identified(cell.cell_contents)
    except ValueError:  # an empty cell
        return None


def _identified(value: Any) -> Hashable:
    return (type(value), value) if type(value) in PLAIN_VALUES else _Same(value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _is_count(value: Any) -> bool:
    return _is_scalar(value) or type(value) in (int, float)
