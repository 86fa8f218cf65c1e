"""Rounding: finds in-place operators whose changes of 16-bit tensors are rounded away.

With fp32 master weights, a training loop still computes its own writes to a parameter in 16 bits: `p.mul_(0.9999)`
changes no element of a bf16 parameter. A clamp that has nothing to clamp also changes no element, so the values alone
do not show a rounded write: the operator is run a second time, on copies in fp32.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeshard.batch.tree import map_tensors
from pipeshard.distributed.collectives import local
from pipeshard.graph.operators import mutated

LOW = torch.float16, torch.bfloat16
KINDS = "mul_", "div_", "add_", "sub_", "lerp_", "addcmul_", "addcdiv_"  # may change a value by less than its precision
PACKETS = {getattr(torch.ops.aten, prefix + kind) for kind in KINDS for prefix in ("", "_foreach_")}


class Write(NamedTuple):
    """A write to a 16-bit tensor: the tensor, its values before the write, and the values that fp32 would have now."""

    tensor: Tensor
    before: Tensor
    exact: Tensor

    @property
    def is_lost(self) -> bool:
        """Whether most elements that the write was to change still have their value."""
        changed = self.exact != self.before
        return bool(2 * (changed & (self.tensor == self.before)).sum() > changed.sum())


def writes(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], is_watched: Callable[[Tensor], bool]
) -> list[Write]:
    """The writes to watched 16-bit tensors of an operator that is about to run."""
    if func._overloadpacket not in PACKETS:
        return []
    written = [*mutated(func, args, kwargs)]
    low = [tensor for tensor in written if tensor.dtype in LOW and is_watched(tensor)]
    if not low:
        return []
    targets, copies = set(map(id, written)), dict[int, Tensor]()

    def copied(tensor: Tensor) -> Tensor:
        if tensor.dtype not in LOW and id(tensor) not in targets:
            return tensor
        dtype = torch.float32 if tensor.dtype in LOW else tensor.dtype
        return copies.setdefault(id(tensor), tensor.detach().to(dtype, copy=True))

    args, kwargs = map_tensors(copied, (tuple(args), dict(kwargs)))
    func(*args, **kwargs)
    return [Write(local(tensor), local(tensor).clone(), local(copies[id(tensor)])) for tensor in low]
