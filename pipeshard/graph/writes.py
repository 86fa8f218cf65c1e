"""Writes: whether a training loop has written to a tensor, even through `data`, which does not change the version.

While a boosted model is alive (engine/data_guard.py), pipeshard counts the reads and the replacements of `tensor.data`
for each tensor that was passed to `count_reads` or `note`. Before the first read after a note, the sum of the tensor's
values is stored. So a note is fast unless the loop uses `data`, and a mere read does not count as a write.

Replacing the `data` of a sharded parameter raises UsageError, since torch would only replace the DTensor's outer
tensor.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeshard.errors import UsageError
from pipeshard.graph.storage import is_moved
from pipeshard.private import DisableTorchFunction

READS, SUMS = "pipeshard_reads", "pipeshard_sums"  # attributes of a tensor
SHARD_OF = "pipeshard_shard_of"  # the attribute in which a shard stores its parameter's name
KEPT = 8  # the sums of this many latest notes of a tensor are kept
WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DATA: Any = Tensor.data  # torch's descriptor, which `CountedData` replaces


class Noted(NamedTuple):
    """The state of a tensor when it was noted: its version, and the number of uses of its `data`."""

    version: int
    reads: int


def count_reads(tensor: Tensor) -> int:
    """Start to count the uses of this tensor's `data`, unless they are already counted. Returns the number of uses so
    far."""
    number: int = vars(tensor).setdefault(READS, 0)
    return number


def reads(tensor: Tensor) -> int:
    """The number of uses of this tensor's `data` since the first `count_reads`."""
    number: int = vars(tensor).get(READS, 0)
    return number


def note(tensor: Tensor) -> Noted:
    """The current state of a tensor. Pass this state to `is_written` later."""
    number = count_reads(tensor)
    sums: dict[int, Tensor | None] = vars(tensor).setdefault(SUMS, {})
    if number not in sums:
        sums[number] = None
        if len(sums) > KEPT:
            del sums[min(sums)]
    return Noted(tensor._version, number)


def is_written(tensor: Tensor, since: Noted) -> bool:
    """Whether a tensor has been written to since `note` returned `since`."""
    if tensor._version != since.version:
        return True
    if reads(tensor) == since.reads:
        return False
    before = vars(tensor).get(SUMS, {}).get(since.reads)
    return before is None or before.device != tensor.device or not torch.equal(before, sum_of_words(tensor))


def sum_of_words(tensor: Tensor) -> Tensor:
    """The sum of a tensor's values, with their bits reinterpreted as integers. Does not synchronize the device."""
    with DisableTorchFunction():
        words = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        words = stored(words).contiguous()
        words = torch.view_as_real(words) if words.is_complex() else words
        return words.view(WORD[words.element_size()]).sum(dtype=torch.int64)


def stored(tensor: Tensor) -> Tensor:
    """The values that a tensor stores, each element once. Returns the tensor itself unless it is sparse."""
    return tensor.coalesce().values() if tensor.is_sparse else tensor


class CountedData:
    """The descriptor that replaces `Tensor.data` while a boosted model is alive."""

    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        if tensor is None:  # on the class: a __torch_function__ may compare its `func` with Tensor.data.__get__
            return DATA
        _count(tensor)
        return DATA.__get__(tensor)

    def __set__(self, tensor: Tensor, value: Tensor) -> None:
        _count(tensor)
        if (name := vars(tensor).get(SHARD_OF)) is not None and is_moved(tensor, value):
            raise UsageError(
                f"cannot assign to .data of {name}: this parameter is sharded (fsdp, tp_size or ep_size), and the "
                "model would continue to compute with the old values. Call p.data.copy_(value) instead. To restore "
                "values later, keep p.detach().clone()"
            )
        DATA.__set__(tensor, value)


def _count(tensor: Tensor) -> None:
    attributes = vars(tensor)
    if (number := attributes.get(READS)) is None:
        return
    sums = attributes.get(SUMS, {})
    if number in sums and not tensor.is_meta:
        sums[number] = sum_of_words(tensor)
    attributes[READS] = number + 1
