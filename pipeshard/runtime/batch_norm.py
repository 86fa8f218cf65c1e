"""Batch norm: running statistics of a whole batch, moved once a step, as torchgpipe's DeferredBatchNorm has them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# By module, the sum, the sum of squares and the number of what a step has normalized in each channel. They are nothing
# that a module or a hook can reach, as what units change is compared with what the trace saw.
_SUMS: dict[nn.Module, tuple[Tensor, Tensor, int]] = {}


@contextmanager
def deferred(units: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, each microbatch is normalized by its own statistics, as always; afterwards the running ones of these
    units have moved once, by mean and (biased) variance of all that was normalized (Kim et al. 2020, arXiv:2004.09910).
    """
    modules: dict[Any, None] = {module: None for unit in units for module in unit.modules() if _tracks(module)}
    before = {module: [buffer.clone() for buffer in _buffers(module)] for module in modules}
    hooks = [module.register_forward_pre_hook(_add) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for module, buffers in before.items():
                if module in _SUMS:
                    _move(module, buffers, *_SUMS.pop(module))


def _tracks(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.training and module.running_mean is not None


def _buffers(module: _BatchNorm) -> list[Tensor]:
    return [
        buffer for buffer in (module.running_mean, module.running_var, module.num_batches_tracked) if buffer is not None
    ]


def _add(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    x: Tensor = inputs[0].detach()
    dims = [dim for dim in range(x.ndim) if dim != 1]
    total, squares, count = _SUMS.get(module, (0, 0, 0))
    _SUMS[module] = total + x.sum(dims), squares + x.square().sum(dims), count + x.numel() // x.shape[1]


def _move(module: Any, before: list[Tensor], total: Tensor, squares: Tensor, count: int) -> None:
    for buffer, value in zip(_buffers(module), before, strict=True):
        buffer.copy_(value)
    module.num_batches_tracked += 1
    share = module.momentum if module.momentum is not None else 1 / float(module.num_batches_tracked)
    mean = total / count
    module.running_mean.mul_(1 - share).add_(mean * share)
    module.running_var.mul_(1 - share).add_((squares / count - mean.square()) * share)
