"""Region: consecutive unit calls of one stage that torch.compile gets as one function.

Of a region the last call runs all of it, on what the first one was given; the other calls return what those of units
on other stages return, numbers that nobody needs.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import TreeSpec

from pipeshard.model.dataflow import Dataflow, Wanted
from pipeshard.model.taint import Value

CONSTANTS = (bool, int, float, str)


@dataclass(frozen=True)
class Handed:
    """The arguments of a unit call of a trace, and the modes it runs in; `opening` is the first argument of the first
    one of a row of calls of which each continues the one before. Once it has returned, the result and the versions of
    tensors, which change when they are written to."""

    first: Tensor
    rest: tuple[Any, ...]
    tree: TreeSpec
    modes: tuple[Any, ...]
    opening: Tensor
    result: Tensor | None = None
    versions: tuple[int, ...] = ()

    @classmethod
    def of(cls, args: tuple[Any, ...], leaves: Sequence[Any], tree: TreeSpec) -> Self | None:
        """Of a call whose arguments, the positional `args` first, are `leaves` in this tree. None for arguments that
        cannot be compared, or of which the first is no tensor, and inside of activation checkpointing, which calls the
        unit again by itself."""
        if not args or not isinstance(args[0], Tensor) or torch._C._autograd._top_saved_tensors_default_hooks(False):
            return None
        if not all(leaf is None or isinstance(leaf, (Tensor, *CONSTANTS)) for leaf in leaves):
            return None
        if torch.is_inference_mode_enabled() or any(isinstance(t, Tensor) and t.is_inference() for t in leaves):
            return None  # such tensors have no versions
        return cls(args[0], tuple(leaves[1:]), tree, _modes(), args[0])

    def continues(self, before: "Handed | None") -> bool:
        """Whether the first argument is what the call before returned, and the others are that one's."""
        if before is None or self.first is not before.result or self.tree != before.tree or self.modes != before.modes:
            return False
        same = all(a is b or (isinstance(a, CONSTANTS) and _equal(a, b)) for a, b in zip(self.rest, before.rest))
        return same and before._versions() == before.versions

    def returning(self, result: Tensor, before: "Handed | None") -> Self:
        """The same once it has returned; `before` is the call that it continues."""
        handed = replace(self, result=result, opening=self.opening if before is None else before.opening)
        return replace(handed, versions=handed._versions())

    def _versions(self) -> tuple[int, ...]:
        return tuple(leaf._version for leaf in (self.opening, *self.rest, self.result) if isinstance(leaf, Tensor))


def _modes() -> tuple[Any, ...]:
    """What glue may switch between two calls, and torch computes by."""
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return torch.is_grad_enabled(), *casts


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def regions(flow: Dataflow, calls: Collection[int], longest: int, outputs: Wanted = False) -> list[range]:
    """Those among `calls`, the numbers of unit calls, of two to `longest` calls each: what one returns is given to the
    next, and nobody else looks at it."""
    needed = flow.needed(outputs)
    if flow.decisions or flow.python_random or needed.hidden or any(call.reads.hidden for call in flow.calls):
        return []
    readers = Counter(value for call in flow.calls for value in call.reads.values)
    seen = needed.values | flow.touched | flow.written
    found: list[range] = []
    for k in sorted(calls):
        handed_on, last = Value(k - 1, 0), found[-1] if found else range(0)
        is_private = readers[handed_on] == 1 and handed_on not in seen
        if last.stop == k and len(last) < longest and flow.calls[k].continues and is_private:
            found[-1] = range(last.start, k + 1)
        else:
            found.append(range(k, k + 1))
    return [calls for calls in found if len(calls) > 1]


def in_turn(forwards: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """The function that runs a region."""

    def run(x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
        for forward in forwards:
            x = forward(x, *args, **kwargs)
        return x

    return run


def is_hooked(unit: nn.Module) -> bool:
    """Whether somebody listens to a unit's calls."""
    own = unit._forward_hooks, unit._forward_pre_hooks, unit._backward_hooks, unit._backward_pre_hooks
    return any(own) or bool(_has_any_global_hook())
