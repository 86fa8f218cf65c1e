"""Summand: what one backward pass adds to a weight's gradient, made by itself or added up in place."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LARGE = 2**17  # elements of a weight from which it is worth while not to make a summand by itself


class Summand(Protocol):
    """`fits(total)` tells whether `add_to` can add it to this gradient."""

    def made(self) -> Tensor: ...

    def fits(self, total: Tensor) -> bool: ...

    def add_to(self, total: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Product:
    """left @ right, of two matrices."""

    left: Tensor
    right: Tensor

    def made(self) -> Tensor:
        return self.left.mm(self.right)

    def fits(self, total: Tensor) -> bool:
        return _is_plain(total) and total.dtype == self.left.dtype == self.right.dtype

    def add_to(self, total: Tensor) -> None:
        total.addmm_(self.left, self.right)


@dataclass(frozen=True, slots=True)
class RowSum:
    """The sum of the rows of a matrix."""

    rows: Tensor

    def made(self) -> Tensor:
        return self.rows.sum(0)

    def fits(self, total: Tensor) -> bool:
        return _is_plain(total)

    def add_to(self, total: Tensor) -> None:
        total += self.made()


@dataclass(frozen=True, slots=True)
class Lookup:
    """Gradients (..., width) of what was read at `ids` (...) of a table with `count` rows; row `padding` gets none."""

    gradients: Tensor
    ids: Tensor
    count: int
    padding: int | None

    def made(self) -> Tensor:
        padding = -1 if self.padding is None else self.padding
        return torch.ops.aten.embedding_dense_backward(self.gradients, self.ids, self.count, padding, False)

    def fits(self, total: Tensor) -> bool:
        return _is_plain(total) and _is_plain(self.gradients)

    def add_to(self, total: Tensor) -> None:
        ids, rows = self.ids.reshape(-1), self.gradients.reshape(-1, total.shape[1]).to(total.dtype)
        if self.padding is not None:
            kept = ids != self.padding
            ids, rows = ids[kept], rows[kept]
        if total.device.type == "cpu":
            total.index_add_(0, ids, rows)  # in the order of the rows
        else:
            total.index_put_((ids,), rows, accumulate=True)  # index_add_ is in no certain order on a GPU


def _is_plain(tensor: Tensor) -> bool:
    """No DTensor, and nothing sparse."""
    return type(tensor) is Tensor and tensor.layout is torch.strided
