"""Living: the bytes of the tensors that operators have allocated and that are still alive."""

import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor

from pipeshard.graph.taint import storage_of
from pipeshard.private import DispatchMode, tree_tensors

Run = Callable[[Any, Any, Any], Any]  # run(operator, args, kwargs) -> the result


def _as_ever(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


class Living(DispatchMode):
    """Mode that counts the bytes of new storages that are alive. When a storage in `before` is freed, its bytes are
    subtracted. `run` runs each operator. The results of operators in `but` do not count.

    Attributes:
        bytes: the size of the living new storages, minus the size of the freed storages of `before`.
        peak: the maximum of `bytes` so far.
    """

    def __init__(self, before: Iterable[Tensor] = (), run: Run = _as_ever, but: Container[Any] = ()) -> None:
        super().__init__()
        self.run, self.but, self.bytes, self.peak = run, but, 0, 0
        self._known: set[int] = set()
        for tensor in before:
            self._count(tensor)
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {storage_of(tensor) for tensor in tree_tensors((args, kwargs))}
        result = self.run(func, args, kwargs)
        if func._overloadpacket not in self.but:
            for tensor in tree_tensors(result):
                if storage_of(tensor) not in given:
                    self._count(tensor)
        self.peak = max(self.peak, self.bytes)
        return result

    def _count(self, tensor: Tensor) -> None:
        key = storage_of(tensor)
        if tensor.layout is torch.strided and key not in self._known:
            storage = tensor.untyped_storage()
            self._known.add(key)
            self.bytes += storage.nbytes()
            weakref.finalize(storage, self._died, key, storage.nbytes()).atexit = False

    def _died(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size
