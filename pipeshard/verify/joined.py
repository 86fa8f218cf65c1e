"""Joined draws: random numbers for a whole batch, equal to the numbers that the batch's microbatches used in turn."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeshard.private import DispatchMode

aten = torch.ops.aten
# Operators that write random numbers and read no values. Replacing the results of other operators could hide that
# samples depend on each other.
PURE = {
    *(aten.bernoulli_.float, aten.uniform_.default, aten.normal_.default, aten.exponential_.default),
    *(aten.rand.default, aten.randn.default, aten.rand_like.default, aten.randn_like.default),
}


class JoinedDraws(DispatchMode):
    """Dispatch mode that records the random numbers of microbatches, and replays them for the whole batch in
    `joining`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []
        self.left: list[list[Tensor]] | None = None

    @contextmanager
    def joining(self, parts: int) -> Iterator[None]:
        """Context manager in which the samples of all `parts` microbatches run as one batch, with the recorded
        numbers."""
        each = len(self.drawn) // parts
        self.left = [self.drawn[k::each] for k in range(each)]
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PURE and self.left is None:
            self.drawn.append(result.clone())
        elif func in PURE and self.left is not None:
            result.copy_(_joined(self.left.pop(0), result.shape))
        return result


def _joined(parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The concatenation of the parts along the dimension in which they are smaller than `shape`."""
    return torch.cat(list(parts), next(dim for dim, size in enumerate(shape) if parts[0].shape[dim] != size))
