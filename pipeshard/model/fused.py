"""Fused operators by shape: attention as kernels on a device do it, and the flops of what torch has no rule for."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


class FusedAttention(TorchFunctionMode):
    """Attention by shape as fused kernels do it: what they keep are inputs, result and a number a row, no scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args and isinstance(args[0], Tensor) and args[0].is_meta:
            return _attention(func, *args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    plain: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    learned = attn_mask is not None and attn_mask.requires_grad
    if learned or query.ndim != 4 or query.shape[-1] != value.shape[-1]:
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    fused = aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, out_val: Any, **kwargs: Any) -> int:
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[2] * (width + value.shape[-1])


def _grouped_flops(tokens: Tensor, weights: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    return 2 * math.prod(out_val.shape) * tokens.shape[-1]


# Operators that torch's own table of rules has not.
FLOPS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._grouped_mm: _grouped_flops,
}
