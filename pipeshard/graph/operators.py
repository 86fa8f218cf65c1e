"""Operators: the tensors that torch's operators read, write or return to Python, and their use of random numbers."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from pipeshard.graph.shapes import TensorSpec, placeholder
from pipeshard.private import tree_map_only

aten = torch.ops.aten
# Operators that return values to Python, or results whose shapes depend on values. If glue calls such an operator, the
# call is a decision.
SCALAR = {aten._local_scalar_dense, aten.is_nonzero, aten.equal}
DECIDING = SCALAR | {aten.nonzero, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave}
DECIDING |= {aten.bincount}
SIZED_BY_SECOND = {aten.masked_select, aten._pack_padded_sequence}  # only the second input's values decide
# Operators that use only the shape of their input, not its values.
SHAPED = {aten.full_like, aten.zeros_like, aten.ones_like, aten.empty_like, aten.rand_like, aten.randn_like}
SHAPED |= {aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided}
COLLECTIVES = {"c10d", "_c10d_functional"}  # namespaces of operators that several ranks run together
CASTING = "cuda", "cpu"  # device types for which torch.autocast may be enabled


def tensors_among(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among `values`, including tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_among(value)


def mutated(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_among([args[position] if position < len(args) else kwargs.get(argument.name)])


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, out_val: Any, **kwargs: Any) -> int:
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[2] * (width + value.shape[-1])


def _grouped_flops(tokens: Tensor, weights: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    return 2 * math.prod(out_val.shape) * tokens.shape[-1]


# Rules for operators that torch's flop_registry lacks.
FLOPS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._grouped_mm: _grouped_flops,
}


def flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    rule = FLOPS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
    return rule(*args, **kwargs, out_val=result) if rule is not None else 0


def run_by_shape(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Run an operator on meta, and return zeros on `device`, or the result itself if `device` is meta. An operator that
    writes to its first argument returns this argument unchanged."""
    on_meta, meta_kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
    if kwargs.get("device") is not None:
        meta_kwargs["device"] = torch.device("meta")
    result = func(*on_meta, **meta_kwargs)
    if func._schema.is_mutable:
        return args[0] if func._schema.returns else None
    if device.type == "meta":
        return result
    return tree_map_only(Tensor, lambda t: placeholder(TensorSpec.of(t), device), result)


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator uses random numbers. Attention without dropout does not, despite its tag."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value))
    return True


def deciding_inputs(func: Any, args: Any) -> list[Tensor]:
    """The input tensors whose values an operator returns to Python, or uses to determine the shape of its result."""
    if func is aten.index.Tensor:  # a boolean index
        return [t for t in tensors_among([args[1]]) if t.dtype in (torch.bool, torch.uint8)]
    if func._overloadpacket in SIZED_BY_SECOND or func is aten.repeat_interleave.self_Tensor:
        return [args[1]]
    return list(tensors_among(args)) if func._overloadpacket in DECIDING else []


def casting() -> str | None:
    """The device type for which torch.autocast is enabled, or None."""
    return next((kind for kind in CASTING if torch.is_autocast_enabled(kind)), None)
