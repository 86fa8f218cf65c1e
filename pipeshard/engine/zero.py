"""ZeRO: the replica that owns each weight, keeps its optimizer state, and sends its updates to the other replicas."""

from collections import deque
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeshard.distributed.collectives import broadcast, local
from pipeshard.distributed.groups import ranks_of
from pipeshard.distributed.progress import own_progress
from pipeshard.engine.grad_sync import bundled
from pipeshard.engine.mixed_precision import MasterWeight


def assign_owners(weights: Iterable[MasterWeight], replicas: int) -> None:
    """Assign each weight an owner, the replica that keeps its optimizer state. Weights are assigned from the largest to
    the smallest, each to the replica that owns the fewest elements so far (ZeRO stage 1, Rajbhandari et al. 2020,
    arXiv:1910.02054, but with whole parameters). Frozen weights, which have no state, are assigned separately. A weight
    that already has an owner keeps this owner, even if another optimizer trains the weight, since only the owner has
    the fp32 master weight."""
    loads = {is_trained: [0] * replicas for is_trained in (True, False)}
    for weight in sorted(weights, key=lambda w: (w.owner is None, -_size(w), w.name)):
        load = loads[weight.parameter.requires_grad]
        if weight.owner is None:
            weight.owner = load.index(min(load))
        load[weight.owner] += _size(weight)


def _size(weight: MasterWeight) -> int:
    """The number of a weight's elements on each slice of a stage, or the average if slices differ in size. The number
    is the same on all slices, so all slices choose the same owner: a checkpoint contains the slices of only one
    replica."""
    parameter = weight.parameter
    return parameter.numel() // (parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1)


@torch.no_grad()
def share_updates(weights: Iterable[MasterWeight], group: dist.ProcessGroup) -> None:
    """Broadcast each weight from its owner to the other replicas in `group`. The next message is built while a message
    is in flight."""
    ranks, under_way = ranks_of(group), deque[tuple[dist.Work, Tensor, list[Tensor]]]()
    bundles = bundled(weights, lambda w: (w.owner, w.parameter.dtype), lambda w: local(w.parameter).nbytes)
    for bundle in bundles:
        owner, tensors = bundle[0].owner, [local(weight.parameter) for weight in bundle]
        assert owner is not None
        in_place = len(tensors) == 1 and tensors[0].is_contiguous()
        flat = tensors[0] if in_place else torch.cat([tensor.reshape(-1) for tensor in tensors])
        work = broadcast(flat, ranks[owner], group)
        under_way.append((work, flat, [] if in_place or owner == group.rank() else tensors))
        if len(under_way) > 1:
            _receive(group, *under_way.popleft())
    for message in under_way:
        _receive(group, *message)


def _receive(group: dist.ProcessGroup, work: dist.Work, flat: Tensor, tensors: list[Tensor]) -> None:
    own_progress().wait_in(group, work)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]) if tensors else ()):
        tensor.copy_(part.view_as(tensor))
