"""Weights: what an optimizer trains in the place of a stage's parameters."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeshard.runtime.local import local, local_grad, slice_like
from pipeshard.runtime.progress import NOW


class Weight:
    """One parameter of a stage. `holders` is the number of ranks that have the same gradient of it, `full` are its
    values where the parameter itself has them in a lower precision, until an optimizer takes them."""

    def __init__(self, name: str, parameter: nn.Parameter, holders: int, full: Tensor | None = None) -> None:
        self.name, self.parameter, self.holders = name, parameter, holders
        self.full = None if full is None else slice_like(full, parameter)
        if full is not None:  # gradients are added up in the precision of the values, not of the parameter
            parameter.grad_dtype = full.dtype
        self.master: nn.Parameter | None = None

    def trained(self) -> nn.Parameter:
        """What the optimizer is given: the parameter, this rank's slice of it, or its values in full precision."""
        if self.master is None:
            if self.full is None and not isinstance(self.parameter, DTensor):
                return self.parameter
            value = local(self.parameter.detach()) if self.full is None else self.full
            self.master, self.full = nn.Parameter(value, requires_grad=self.parameter.requires_grad), None
        return self.master

    @property
    def plain(self) -> bool:
        """Whether the parameter is all there is."""
        return self.master is None and self.full is None and not isinstance(self.parameter, DTensor)

    def give_gradient(self) -> None:
        if self.master is not None:
            self.master.grad = local_grad(self.parameter)

    @torch.no_grad()
    def take_value(self) -> None:
        """After an optimizer step; a slice shares its memory with the parameter."""
        if self.master is not None and self.master.dtype != self.parameter.dtype:
            local(self.parameter).copy_(self.master)

    @torch.no_grad()
    def set(self, value: Tensor) -> None:
        """Load the whole tensor `value`."""
        self.set_part(slice_like(value, self.parameter))

    @torch.no_grad()
    def set_part(self, part: Tensor) -> None:
        """Load this rank's part of it."""
        local(self.parameter).copy_(part)
        for precise in (self.master, self.full):
            if precise is not None:
                precise.copy_(part)

    def zero_grad(self, set_to_none: bool) -> None:
        if set_to_none:
            self.parameter.grad = None
        elif self.parameter.grad is not None:
            self.parameter.grad.zero_()
        if self.master is not None:
            self.master.grad = None


def assign(weights: Iterable[Weight], replicas: int) -> dict[str, int]:
    """The replica that keeps the optimizer's state of each weight, so that each has about as much: the largest first,
    each to the one that has least (ZeRO stage 1, Rajbhandari et al. 2020, arXiv:1910.02054, by whole parameters)."""
    load, owners = [0] * replicas, {}
    for weight in sorted(weights, key=lambda w: (-local(w.parameter).numel(), w.name)):
        owners[weight.name] = load.index(min(load))
        load[owners[weight.name]] += local(weight.parameter).numel()
    return owners


@torch.no_grad()
def share_updates(weights: Iterable[Weight], owners: Mapping[str, int], group: dist.ProcessGroup) -> None:
    """Give each replica what the others have updated; one message for each owner and dtype."""
    bundles: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for weight in weights:
        bundles.setdefault((owners[weight.name], weight.parameter.dtype), []).append(local(weight.parameter))
    flats = {key: torch.cat([tensor.reshape(-1) for tensor in tensors]) for key, tensors in bundles.items()}
    ranks = dist.get_process_group_ranks(group)
    works = [dist.broadcast(flat, ranks[owner], group=group, async_op=True) for (owner, _), flat in flats.items()]
    for work, (key, flat) in zip(works, flats.items(), strict=True):
        NOW.wait_in(group, work)
        if key[0] != group.rank():
            for tensor, part in zip(bundles[key], flat.split([t.numel() for t in bundles[key]]), strict=True):
                tensor.copy_(part.view_as(tensor))
