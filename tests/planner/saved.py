"""Saved: the tensors that autograd keeps in a real forward, per unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeshard.graph.preserve import preserving
from pipeshard.graph.units import find_units


class _Saved:
    def __init__(self, tensor: Tensor, unit: int) -> None:
        self.storage, self.unit = tensor.untyped_storage(), unit


def saved_bytes(model: nn.Module, batch: dict[str, Any]) -> Callable[[int, int], int]:
    """A function of a run of unit calls, start to end: the bytes that one forward keeps of it for its backward.

    Storages count once; parameters, buffers and the batch do not. The glue before a unit counts with it, that after the
    last one with the last.
    """
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), *batch.values())}
    alive: WeakSet[_Saved] = WeakSet()
    current = 0

    def keep(tensor: Tensor) -> _Saved:
        entry = _Saved(tensor, current)
        alive.add(entry)
        return entry

    def done(*_: Any) -> None:
        nonlocal current
        current += 1

    with preserving(model, timed=True), saved_tensors_hooks(keep, lambda entry: torch.empty(0)):
        for unit in find_units(model).values():
            unit.register_forward_hook(done)
        output = model(**batch)
    calls = current
    entries = [(e.storage._cdata, e.storage.nbytes(), min(e.unit, calls - 1)) for e in alive]
    del output

    def of(start: int, end: int) -> int:
        sizes = {key: size for key, size, unit in entries if start <= unit < end and key not in own}
        return sum(sizes.values())

    return of
