"""Norm guard: raises UsageError if torch would clip incomplete, sharded or scaled gradients, or compute their norm.

With a split model, `torch.nn.utils.clip_grad_norm_` would clip each stage's gradients by the norm of that stage alone.
While a boosted model is alive, the guard patches torch's functions in place, so it also works if a loop, a hook or a
library has already imported them. A single tensor, or some of a stage's parameters, can be clipped as usual.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import GeneratorType
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from pipeshard.engine.clipping import ModelGradients
from pipeshard.engine.guard import Guard
from pipeshard.engine.hosted import stored_grad
from pipeshard.errors import UsageError
from pipeshard.ghost import Ghost
from pipeshard.private import set_wrapped

SCALED = (
    "torch.nn.utils.{} got gradients that are multiplied by the loss scale of precision='fp16' until optimizer.step()."
)
ALONE = "For the norm of a single parameter, pass the tensor instead of a list"
FEWER = ". For the norm of a module that contains all trained parameters of a stage, use fewer stages"

FUNCTIONS: tuple[Any, ...] = clip_grad_norm_, get_total_norm, clip_grad_value_


class NormGuard(Guard):
    """Checks the arguments of torch's functions that clip gradients or compute their norm."""

    _is_single = False  # whether the loop has passed one tensor; clip_grad_norm_ then passes a list to get_total_norm

    def install(self) -> None:
        checks = self._check_parameters, self._check_gradients, self._check_values
        for function, check in zip(FUNCTIONS, checks, strict=True):
            set_wrapped(function, self._guarding(function, check))

    def remove(self) -> None:
        for function in FUNCTIONS:
            set_wrapped(function, function.__wrapped__)

    def _guarding(self, function: Any, check: Callable[[Sequence[Tensor]], None]) -> Callable[..., Any]:
        original = function.__wrapped__
        first = original.__code__.co_varnames[0]  # "parameters", or "tensors"

        def guarded(*args: Any, **kwargs: Any) -> Any:
            tensors, *rest = args or (kwargs.pop(first),)
            before = self._is_single
            self._is_single = before or isinstance(tensors, Tensor)
            listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            given = (tensor for tensor in listed) if isinstance(tensors, GeneratorType) else listed
            try:
                check(listed)
                with self._clipped(listed) if function is not get_total_norm else nullcontext():
                    return original(given, *rest, **kwargs)
            finally:
                self._is_single = before

        return guarded

    @contextmanager
    def _clipped(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Context manager in which torch clips the gradients of `parameters`."""
        with ExitStack() as stack:
            for gradients in list(self._models):
                if related := [parameter for parameter in parameters if gradients.has(parameter)]:
                    stack.enter_context(gradients.clipped_by_torch(related))
            yield

    def _check_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Raise UsageError if `parameters` contain both parameters with gradients on this rank and parameters that
        another stage trains, or if `_check` raises."""
        for gradients in list(self._models):
            names = gradients.names_of(parameters)
            held = [p for p, name in names.items() if name in gradients.weights and p.grad is not None]
            elsewhere = [name for p, name in names.items() if isinstance(p, Ghost) and p.pipeshard_trainable]
            if held and elsewhere:
                raise UsageError(_problem("clip_grad_norm_", gradients, names[held[0]], elsewhere[0]))
            self._check(held, gradients, "clip_grad_norm_")

    def _check_gradients(self, tensors: Sequence[Tensor]) -> None:
        for gradients in list(self._models):
            marked = ((stored_grad(parameter), parameter) for parameter in gradients.trainables())
            of_gradients = {id(gradient): parameter for gradient, parameter in marked if gradient is not None}
            held = [of_gradients[id(tensor)] for tensor in tensors if id(tensor) in of_gradients]
            self._check(held, gradients, "get_total_norm")

    def _check_values(self, parameters: Sequence[Tensor]) -> None:
        """Raise UsageError if gradients of `parameters` are multiplied by the loss scale."""
        for gradients in list(self._models):
            if gradients.is_scaled and any(p.grad is not None for p in gradients.names_of(parameters)):
                remedy = "Call optimizer.clip_grad_by_value(clip_value) on every rank before optimizer.step()"
                raise UsageError(f"{SCALED.format('clip_grad_value_')} {remedy}")

    def _check(self, held: Sequence[Tensor], gradients: ModelGradients, function: str) -> None:
        """Raise UsageError if `held` is incomplete because of the split, or if the gradients are shards or are
        multiplied by the loss scale. `held` is incomplete if it contains all parameters of the model or of an optimizer
        group that have gradients on this rank, but no parameter that another stage holds or another replica updates. A
        single tensor is never incomplete, but a list of one parameter may be this rank's part of a group."""
        if held and gradients.is_scaled:
            raise UsageError(f"{SCALED.format(function)} {gradients.remedy}")
        if held and (shard := gradients.shard_of(held)):
            raise UsageError(
                f"torch.nn.utils.{function} got sharded gradients, such as the gradient of {shard}, so each rank would "
                f"compute a different norm. {gradients.remedy}"
            )
        if self._is_single:
            return
        chosen, names = set(map(id, held)), gradients.names_of(held)
        for parameters, elsewhere in gradients.wholes():
            here = [parameter for parameter in parameters if stored_grad(parameter) is not None]
            is_lacking = elsewhere and elsewhere.isdisjoint(names.values())
            if here and is_lacking and all(id(parameter) in chosen for parameter in here):
                problem = _problem(function, gradients, names.get(held[0], "a parameter"), min(elsewhere))
                remedy = ALONE if min(elsewhere) in gradients.weights else ALONE + FEWER  # with ZeRO, replicas hold it
                raise UsageError(f"{problem}. {remedy}")


NORM_GUARD = NormGuard()


def _problem(function: str, gradients: ModelGradients, here: str, elsewhere: str) -> str:
    grid = gradients.grid
    if elsewhere in gradients.weights:  # with ZeRO, all replicas hold it
        own, other, kind = f"of weights that replica {grid.replica} of {grid.dp_size} updates", "updates", "replica"
    else:
        own, other, kind = f"of rank {grid.stage} of {grid.pp_size} in its pipeline", "holds", "rank"
    return (
        f"torch.nn.utils.{function} got only the gradients {own}. Their norm includes {here}, but not {elsewhere}, "
        f"which another {kind} {other}, so each {kind} would compute a different norm. "
        f"{gradients.remedy}"
    )
