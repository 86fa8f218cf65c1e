"""Gradients: summed over the holders of a tie, counted once in the norm, clipped alike everywhere."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard.runtime.agreement import device_of


@dataclass(frozen=True)
class Tie:
    """One parameter that several stages hold; `group` are their ranks, `owner` the global rank of the first."""

    name: str
    parameter: nn.Parameter
    group: dist.ProcessGroup
    owner: int

    @property
    def owned(self) -> bool:
        return dist.get_rank() == self.owner


class TieSync:
    """Sums each tie's gradient over its holders, exactly once for every part of it.

    `p.grad` is made of a part that was summed before and of what this rank added since. Only the latter is reduced,
    so gradients may pile up over several steps, with or without `no_sync`, and are right after each synced one.
    """

    def __init__(self, ties: Sequence[Tie]) -> None:
        self.ties = list(ties)
        self._summed: dict[str, Tensor] = {}

    def share_values(self) -> None:
        """Give every holder the owner's value."""
        for tie in self.ties:
            dist.broadcast(tie.parameter.data, tie.owner, group=tie.group)

    def begin(self) -> None:
        """Set the summed part aside, so that `p.grad` gathers this rank's own part alone."""
        for tie in self.ties:
            if tie.parameter.grad is None:  # zero_grad
                self._summed.pop(tie.name, None)
            elif tie.name in self._summed and self._summed[tie.name] is tie.parameter.grad:
                tie.parameter.grad = None

    def finish(self, sync: bool) -> None:
        """Sum the own parts over the holders and add what was set aside; without `sync` they stay apart.

        A frozen tie has none, and costs nothing.
        """
        for tie in self.ties:
            if not tie.parameter.requires_grad:
                continue
            summed = self._summed.get(tie.name)
            if not sync:
                if tie.parameter.grad is None:
                    tie.parameter.grad = summed
                continue
            total = _sum(tie)
            if total is not None and summed is not None:
                total += summed
            tie.parameter.grad = total if total is not None else summed
            if tie.parameter.grad is not None:
                self._summed[tie.name] = tie.parameter.grad

    def reset(self) -> None:
        self._summed.clear()


def _sum(tie: Tie) -> Tensor | None:
    """The gradient summed over the holders; a holder without one adds zeros, and None if no holder has one."""
    parameter = tie.parameter
    flat = torch.zeros(parameter.numel() + 1, dtype=parameter.dtype, device=parameter.device)
    if parameter.grad is not None:
        flat[:-1] = parameter.grad.reshape(-1)
        flat[-1] = 1
    dist.all_reduce(flat, group=tie.group)
    return flat[:-1].view_as(parameter) if flat[-1] > 0 else None


def grad_norm(
    parameters: Iterable[nn.Parameter], ties: Sequence[Tie], group: dist.ProcessGroup, norm_type: float = 2.0
) -> Tensor:
    """The norm of all gradients of the model, over all stages, a tie once: by its owner."""
    counted_elsewhere = {tie.parameter for tie in ties if not tie.owned}
    held = list(parameters)
    gradients = [p.grad for p in held if p.grad is not None and p not in counted_elsewhere]
    device, dtype = device_of(group), _at_least_fp32(held[0]).dtype if held else torch.float32
    norms = [torch.linalg.vector_norm(_at_least_fp32(g), norm_type).to(device) for g in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms or [torch.zeros((), dtype=dtype, device=device)]), norm_type)
    if math.isinf(norm_type):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        return norm
    power = norm.double() ** norm_type
    dist.all_reduce(power, group=group)
    return (power ** (1.0 / norm_type)).to(norm.dtype)


def clip_by_norm(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients so that their norm is `max_norm` at most, as torch.nn.utils.clip_grad_norm_ does."""
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([p.grad for p in parameters if p.grad is not None] or [torch.zeros(())], coefficient)


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
