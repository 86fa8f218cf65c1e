"""CutPoint: marks a place in a forward where a model may be cut."""

from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeshard.errors import UsageError

T = TypeVar("T")


class CutPoint(nn.Module):
    """Call it on what flows on at a place where the model may be cut: `x = self.cut(x)` (Varuna, Athlur et al. 2022,
    arXiv:2111.04007). It returns what it was given, the very same object.

    A model with CutPoints is cut after some of them and nowhere else; p stages need p - 1. Each is for one place: in a
    loop use an `nn.ModuleList` of them. `x` is a tensor (b, ...) whose dimension 0 counts the samples, or a tuple, list
    or dict of anything that has tensors. Other values that are used on both sides of a cut (skip connections, numbers,
    masks) need no mark: they are found.

    Raises UsageError for a value without a tensor.
    """

    def forward(self, value: T) -> T:
        """The value itself."""
        if not isinstance(value, Tensor) and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            raise UsageError(
                f"a CutPoint got {type(value).__name__} {value!r:.60}, which has no tensor: call it on the activations "
                "that flow on there, x = cut(x)"
            )
        return value


def misplaced(value: Any, rows: int) -> bool:
    """Whether this is a tensor that does not count `rows` samples in dimension 0."""
    return isinstance(value, Tensor) and (value.ndim == 0 or value.shape[0] != rows)
