"""Triton SiLU: an activation whose forward and backward are Triton kernels, which do not support meta tensors."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

BLOCK = 1024


@triton.jit
def _forward(x, y, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count).to(tl.float32)
    tl.store(y + at, value * tl.sigmoid(value), mask=at < count)


@triton.jit
def _backward(x, of_y, of_x, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count).to(tl.float32)
    s = tl.sigmoid(value)
    gradient = tl.load(of_y + at, mask=at < count).to(tl.float32)
    tl.store(of_x + at, gradient * s * (1 + value * (1 - s)), mask=at < count)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        _forward[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        of_x = torch.empty_like(x)
        _backward[(triton.cdiv(x.numel(), BLOCK),)](x, gradient.contiguous(), of_x, x.numel(), BLOCK)
        return of_x


class Silu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Silu.apply(x)
