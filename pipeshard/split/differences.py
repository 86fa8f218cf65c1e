"""Differences: the comparison of a unit call or a forward with its trace, and the texts of the resulting errors."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pipeshard.errors import TraceError
from pipeshard.graph.places import is_comparable
from pipeshard.graph.shapes import TensorSpec
from pipeshard.graph.unit_outputs import Known
from pipeshard.private import OF_COMPILER

UNFROZEN = (
    "Freeze or unfreeze parameters only between steps, turn activation recomputation on before booster.boost, and "
    "detach a layer's result either always or never"
)
SHAPES = (
    "Shapes and dtypes must depend only on the batch's sizes, not on values of activations, or of parameters and "
    "buffers that training changes (nonzero, unique, boolean masks, int(parameter)): return a tensor of a fixed size "
    "and a mask, or cut before the unit (partition=[...]) to run it on the last stage, which supports any sizes. If "
    "the shapes and dtypes depend only on sizes, pass dry_run_input=<a batch like this one>, and remove any hook or "
    "autocast context around execute_pipeline that changes them"
)
PLACE = "Other stages would see a stale value. Return the value as a tensor, or update it identically in every forward"
PLAIN_TENSOR = "Other stages receive only its values: return other data as a tensor, or cut elsewhere (partition=[...])"
CONSTANT = (
    "Other stages take the non-tensor results of a unit from the trace, so these results must not depend "
    "on the values of tensors: return a tensor (x.max(), not x.max().item()), or cut before the unit "
    "(partition=[...]) to run it on the last stage, where Python may branch on values"
)
WRITES, OF_A_LEAF = "changes an argument in place", "a leaf Variable that requires grad"
WRITTEN = (
    "Other stages and other readers of the tensor do not see the change: modify a copy in the unit (x = x.clone()), "
    "or modify the argument in every forward, regardless of its values"
)
WITH_CACHE = "The unit returns a different structure with a cache: generate without a cache (use_cache=False)"
END = "the end"


def other_way(what: str, expected: str) -> TraceError:
    """The error for a forward that takes a different path than its trace."""
    return TraceError(
        f"{what}, but the trace recorded {expected}: the code between units took a different path at random "
        "(LayerDrop), because of a counter (a depth that grows with each forward), or because of the batch (a branch "
        "on its length). Turn LayerDrop off, set what the path depends on in an attribute of the model between steps, "
        "or, if all batches are of this kind, pass one of them as dry_run_input"
    )


def is_like(leaf: Any, seen: TensorSpec) -> bool:
    if not isinstance(leaf, Tensor) or leaf.dtype is not seen.dtype:
        return False
    return seen.requires_grad or not leaf.requires_grad


def has_more(tensor: Tensor) -> bool:
    """Whether attributes other than the compiler's and pipeshard's were added to a tensor. False for a parameter."""
    return bool(vars(tensor)) and not isinstance(tensor, nn.Parameter) and bool(added(tensor))


def added(tensor: Tensor) -> list[str]:
    return [name for name in vars(tensor) if not name.startswith((OF_COMPILER, "pipeshard_"))]


def described(leaf: Any) -> str:
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__


def constant_text(leaf: Any) -> str:
    return described(leaf) if isinstance(leaf, Tensor) else f"{leaf!r:.80}"


def is_as(leaf: Any, seen: Any) -> bool:
    """Whether a constant equals the traced constant or, if the two cannot be compared, has the same type."""
    if isinstance(seen, Known):
        return True
    if not is_comparable(seen):
        return type(leaf) is type(seen)
    return type(leaf) is type(seen) and (leaf == seen or leaf != leaf)


def differ(leaves: Sequence[Any], seen: Sequence[Any]) -> bool:
    """Whether the number of leaves, or a constant among them, differs from `seen`."""
    if len(leaves) != len(seen):
        return True
    return any(is_comparable(then) and not is_as(leaf, then) for leaf, then in zip(leaves, seen))


def tree_text(tree: Any) -> str:
    """A description of a tree, in at most 120 characters."""
    return str(tree).removeprefix("TreeSpec(").removesuffix(")")[:120]
