"""Attention: attention from each position of a slice to itself and all earlier positions, without a mask in memory.

    keys           earlier slices    this slice
    a query reads  all positions     positions up to its own
                   flash(q, k0)      flash(q, k1, causal)       one softmax over both, with their logsumexp

`is_causal` of torch's scaled_dot_product_attention is correct only if queries and keys have the same length. For a
slice, transformers builds a mask, and the kernel keeps a floating-point copy of the mask for each layer until the
backward. Over all slices of a sequence of s positions, a layer's copies have about s * s / 2 elements. On CPUs, this
module computes attention to earlier slices and to the slice itself separately, without a mask. The gradients of both
parts are computed from the output and the logsumexp of the whole attention (Dao et al. 2022, arXiv:2205.14135). On
other devices, this module passes torch's `causal_lower_right` to scaled_dot_product_attention.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from pipeshard.private import disable_current_modes, flash_on_cpu, flash_on_cpu_backward
from pipeshard.slices.states import Grown, Slice

SDPA = "sdpa"
FRESH = "pipeshard_fresh"  # the attribute of keys that a cache for slices returns


class Fresh(NamedTuple):
    """The keys and values (b, h, s, d) of slice `now`, and the Grown tensors (`keys`, `values`) to which they were
    appended. `all_values` is the tensor of values that the cache returned. With any other tensor of values, the layer
    uses transformers' own attention."""

    now: Slice
    key: Tensor
    value: Tensor
    keys: Grown
    values: Grown
    all_values: Tensor


@cache
def register() -> None:
    """Make models with "sdpa" attention use this module's attention for calls that `_can` accepts, whose keys have the
    attribute FRESH, and whose values are those that the cache returned with the keys. All other calls use transformers'
    own attention."""
    plain = ALL_ATTENTION_FUNCTIONS[SDPA]

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **kw: Any) -> Any:
        fresh: Fresh | None = getattr(key, FRESH, None)
        given = mask[0] if len(mask) == 1 else None if mask else kw.get("attention_mask")
        if fresh is None or value is not fresh.all_values or not _can(fresh.now, query, key, value, given, kw):
            return plain(module, query, key, value, *mask, **kw)
        scale = kw.get("scaling")
        if key.device.type == "cpu":
            attended = Attention.apply(query, fresh.key, fresh.value, fresh.keys, fresh.values, fresh.now.start, scale)
        else:
            attended = nn.functional.scaled_dot_product_attention(
                query, key, value, lower_right(query, key), scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            )
        return attended.transpose(1, 2).contiguous(), None

    AttentionInterface.register(SDPA, attention)


def lower_right(query: Tensor, key: Tensor) -> Tensor:
    """torch's causal mask for queries at the last positions of the keys. The mask is created outside torch modes, since
    torch cannot create a Tensor subclass inside a mode."""
    with disable_current_modes():
        return causal_lower_right(query.shape[-2], key.shape[-2])


def _can(now: Slice, query: Tensor, key: Tensor, value: Tensor, mask: Any, kw: dict[str, Any]) -> bool:
    """Whether this call is ordinary causal attention from a slice, other than the first, to itself and all earlier
    positions."""
    if kw.get("dropout") or any(kw.get(name) is not None for name in ("position_bias", "softcap", "cache")):
        return False
    is_plain = query.shape[-1] == value.shape[-1] and query.dtype == key.dtype == value.dtype
    is_whole = key.shape[-2] == now.end and query.shape[-2] == now.end - now.start
    if not is_plain or not is_whole or now.start == 0 or torch.is_autocast_enabled(query.device.type):
        return False
    return isinstance(mask, Tensor) and now.is_causal(mask)


class Attention(torch.autograd.Function):
    """Attention from the queries (b, h, s, d) of the slice that begins at `start` to the keys and values (b, h or
    fewer, s, d) of this slice and of earlier slices. The gradients of earlier slices' keys and values are added to
    `keys` and `values`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, keys: Grown, values: Grown, start: int, scale: float | None
    ) -> Tensor:
        ctx.keys, ctx.values, ctx.start, ctx.scale = keys, values, start, scale
        outputs, sums = [], []
        for k, v, is_causal in _parts(query, keys, values, start):
            output, of_exp = flash_on_cpu(query, k, v, 0.0, is_causal, scale=scale)
            outputs.append(output)
            sums.append(of_exp)
        total = torch.logaddexp(*sums)
        first, second = (torch.exp(of_exp - total)[..., None] for of_exp in sums)
        output = (outputs[0] * first + outputs[1] * second).to(query.dtype)
        ctx.save_for_backward(query, output, total)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, output, total = ctx.saved_tensors
        keys, values, start = ctx.keys, ctx.values, ctx.start
        made = [
            flash_on_cpu_backward(gradient, query, k, v, output, total, 0.0, is_causal, scale=ctx.scale)
            for k, v, is_causal in _parts(query, keys, values, start)
        ]
        (of_query, *of_earlier), (of_own_query, *of_own) = made
        for grown, each, is_needed in zip((keys, values), of_earlier, ctx.needs_input_grad[1:3], strict=True):
            if is_needed:
                grown.add(_of_groups(each, grown), 0)
        of_own = [_of_groups(each, grown) for grown, each in zip((keys, values), of_own, strict=True)]
        return of_query.add_(of_own_query), *of_own, None, None, None, None


def _parts(query: Tensor, keys: Grown, values: Grown, start: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield (keys, values, is_causal) of the earlier slices, then of the slice itself. Keys and values are repeated for
    all heads of the query."""
    end = start + query.shape[-2]
    for part, is_causal in (((0, start), False), ((start, end), True)):
        k, v = keys.part(*part), values.part(*part)
        groups = query.shape[1] // k.shape[1]
        yield _for_groups(k, groups), _for_groups(v, groups), is_causal


def _for_groups(tensor: Tensor, groups: int) -> Tensor:
    return tensor.repeat_interleave(groups, 1) if groups > 1 else tensor


def _of_groups(gradient: Tensor, grown: Grown) -> Tensor:
    """The gradient of a tensor that was repeated for several heads: the sum over these heads."""
    heads = grown.shape[1]
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)
