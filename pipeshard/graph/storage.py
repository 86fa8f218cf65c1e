"""Storage: the memory that a tensor shares with its views."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pipeshard.private import functorch_unwrapped


def storage_of(tensor: Tensor) -> int:
    """A key that identifies a tensor's storage. A torch.func wrapper has the key of the wrapped tensor. A sparse tensor
    has no storage, so its key identifies the tensor itself."""
    if tensor.layout is not torch.strided:
        return -id(tensor)
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return storage_of(functorch_unwrapped(tensor))


def is_moved(tensor: Tensor, data: Tensor) -> bool:
    """Whether a tensor's storage, shape or strides differ from those of `data`, its former or next `.data`."""
    return storage_of(tensor) != storage_of(data) or tensor.shape != data.shape or tensor.stride() != data.stride()


def address_of(tensor: Tensor) -> Any:
    """An object that prevents reuse of the address of a tensor's storage, but does not keep the storage's memory
    allocated. For a sparse tensor, this object is the tensor itself."""
    return StorageWeakRef(tensor.untyped_storage()) if tensor.layout is torch.strided else tensor
