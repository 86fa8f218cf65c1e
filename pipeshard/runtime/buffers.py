"""Buffers: memory for what is received, lent again once nobody holds it."""

from functools import lru_cache

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

Kind = tuple[tuple[int, ...], torch.dtype]
strides_of = lru_cache(make_contiguous_strides_for)  # a step takes the same few shapes, again and again


class Buffers:
    """Tensors by shape and dtype. One is free as soon as its storage has no other owner: no leaf, no graph, no send."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[Kind, list[torch.UntypedStorage]] = {}
        self._asked: set[Kind] = set()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor without values of its own."""
        kind = shape, dtype
        self._asked.add(kind)
        kept = self._kept.setdefault(kind, [])
        for k, storage in enumerate(kept):
            if _owners(storage) == 1:
                kept.append(kept.pop(k))  # the next to be free is that which was lent first
                empty = torch.empty(0, dtype=dtype, device=self.device)
                return empty.set_(storage, 0, shape, strides_of(shape))
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        kept.append(tensor.untyped_storage())
        return tensor

    def trim(self) -> None:
        """Let go of the shapes that were not asked for since the last `trim`: sequence lengths change."""
        self._kept = {kind: kept for kind, kept in self._kept.items() if kind in self._asked}
        self._asked = set()


def _owners(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)
