"""CutPoint: marks a place in a forward where a model may be cut."""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeshard.errors import TraceError, UsageError

if TYPE_CHECKING:
    from pipeshard.model.dataflow import Call, Use
    from pipeshard.model.taint import Value

T = TypeVar("T")

_tracing = 0


@contextmanager
def strays_refused() -> Iterator[None]:
    """While units are handled: all CutPoints that are called have to be among them."""
    global _tracing
    _tracing += 1
    try:
        yield
    finally:
        _tracing -= 1


class CutPoint(nn.Module):
    """Call it on what flows on at a place where the model may be cut: `x = self.cut(x)` (Varuna, Athlur et al. 2022,
    arXiv:2111.04007). It returns what it was given, the very same object.

    A model with CutPoints is cut after some of them and nowhere else; p stages need p - 1. Each is for one place: in a
    loop use an `nn.ModuleList` of them. `x` is a tensor (b, ...) whose dimension 0 counts the samples, or a tuple, list
    or dict of anything that has tensors. Other values that are used on both sides of a cut (skip connections, numbers,
    masks) need no mark: they are found.

    Raises UsageError for a value without a tensor. One that is no module of the model is a TraceError at boost.
    """

    def forward(self, value: T) -> T:
        """The value itself."""
        if _tracing and "forward" not in self.__dict__:  # no Interception has found it
            raise TraceError(
                "a CutPoint is called that is no module of the model (one of a plain list or dict?), so that nothing "
                "would be cut there: make it an attribute, and several of them an nn.ModuleList"
            )
        if not isinstance(value, Tensor) and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            raise UsageError(
                f"a CutPoint got {type(value).__name__} {value!r:.60}, which has no tensor: call it on the activations "
                "that flow on there, x = cut(x)"
            )
        return value


def check_call(name: str, args: Sequence[Any], calls: Sequence["Call"], rows: int) -> None:
    """Refuse a call, after these, of a CutPoint that was called before, or gets a tensor that does not count the `rows`
    samples in dimension 0."""
    if any(call.unit == name for call in calls):
        raise TraceError(
            f"CutPoint {name} is called twice: use one for each place, and in a loop an nn.ModuleList of them"
        )
    value = args[0] if args else None
    if isinstance(value, Tensor) and value.shape[:1] != (rows,):
        raise TraceError(
            f"CutPoint {name} got a tensor of shape {tuple(value.shape)}, whose dimension 0 does not count the {rows} "
            "samples of the batch: call it where it does, or as `(x,) = cut((x,))`"
        )


def check_aliases(calls: Sequence["Call"], written: Set["Value"], final: Sequence["Use"]) -> None:
    """Refuse writing to what a CutPoint returned where what it was given may be used further on: where it is a cut, the
    one is a copy of the other. `written` is what is changed in place, `final` what the loss and the outputs need."""
    changed = {value.call for value in written}
    for index in [k for k, call in enumerate(calls) if call.is_cut and k in changed]:
        given, later = calls[index].reads.values, [*(call.reads for call in calls[index + 1 :]), *final]
        if any(use.values & given for use in later):
            raise TraceError(
                f"what CutPoint {calls[index].unit} returns is changed in place, and what it was given may be used "
                "further on, where the change would be missed: compute a new tensor (x = x + y, not x += y)"
            )
