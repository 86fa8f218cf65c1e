"""Linear4bit: bitsandbytes' 4-bit linear layer, whose weight is quantized from the start. Imports bitsandbytes."""

import copy
from functools import cache
from typing import Any

import bitsandbytes
import torch
from bitsandbytes import functional
from torch import Tensor

from pipeshard.split.packed_linear import PackedLinear

with torch.device("cpu"):  # bitsandbytes caches the first map that it creates, which could be on meta
    functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())


class Params4bit(bitsandbytes.nn.Params4bit):
    """bitsandbytes' 4-bit parameter, which can also be deep-copied on meta. peft looks for this class name."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = self.detach().clone().as_subclass(type(self)).requires_grad_(self.requires_grad)
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made


class Linear4bit(PackedLinear, bitsandbytes.nn.Linear4bit):
    """A 4-bit linear layer.

    Attributes:
        options: the keyword arguments of `quantize_4bit`.
        unloaded: the `quant_state` while the weight has no values; a forward then uses the `quant_state` of zeros.
    """

    layer_class, weight_class, mark = bitsandbytes.nn.Linear4bit, Params4bit, "is_loaded_in_4bit"
    compute_dtype: torch.dtype
    quant_state: Any
    options: dict[str, Any]
    unloaded: Any

    @property
    def scales(self) -> int:
        state = self.quant_state
        return state.absmax.nbytes + (0 if state.state2 is None else state.state2.absmax.nbytes)

    def begin(self) -> None:
        names = "blocksize", "compress_statistics", "quant_type", "quant_storage"
        self.options = {name: getattr(self.weight, name) for name in names}

    def blank(self, *sizes: Any) -> Any:
        how = {name: value for name, value in self.options.items() if name != "blocksize"}
        return bitsandbytes.nn.Linear4bit(*sizes, self.compute_dtype, **how, device="meta")

    def pack(self, value: Tensor) -> None:
        self.weight.data, self.quant_state = self._packed(value)
        if value.is_meta:
            self.unloaded = self.quant_state
        self.weight.bnb_quantized = True

    def restore(self, value: Tensor, scales: dict[str, Tensor]) -> None:
        state = functional.QuantState.from_dict(dict(scales), value.device)
        if (found := _layout(state)) != (expected := _layout(self.unloaded)):
            raise ValueError(f"its scales are {found}, but the layer has {expected}")
        self.weight.data, self.quant_state, self.weight.bnb_quantized = value, state, True

    @torch.no_grad()
    def _packed(self, value: Tensor) -> tuple[Tensor, Any]:
        """Quantize a weight of `whole_shape`; return the quantized values and their `quant_state`."""
        value = self.as_computed(value)
        if value.is_meta:
            return copy.deepcopy(quantized_blank(value.shape, value.dtype, **self.options))
        return quantize_4bit(value, **self.options)

    def _state(self) -> Any:
        """The `quant_state` of the weight, or of zeros if the weight has no values yet."""
        if self.quant_state is not self.unloaded:
            return self.quant_state
        return self._packed(torch.zeros(self.whole_shape, dtype=self.values_dtype, device=self.weight.device))[1]

    def product(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        product = bitsandbytes.matmul_4bit(x.to(self.compute_dtype), self.weight, bias=bias, quant_state=self._state())
        return product.to(x.dtype)


def _layout(state: Any) -> tuple[Any, ...]:
    """The fields that the kernels rely on: the shape, the packing options and the sizes of the scales."""
    of_scales = (*state.state2.absmax.shape, *state.state2.code.shape, state.state2.blocksize) if state.nested else ()
    sizes = *state.absmax.shape, *state.code.shape, *of_scales
    return tuple(state.shape), state.quant_type, state.blocksize, state.absmax.dtype, sizes


@cache
def quantized_blank(shape: torch.Size, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Any]:
    """Quantize a weight on meta, once for all layers of the same sizes: a model of 80 layers has 560."""
    return quantize_4bit(torch.empty(shape, dtype=dtype, device="meta"), **options)


CHUNK = 1 << 20  # elements, a multiple of every block size


def quantize_4bit(
    value: Tensor, blocksize: int, compress_statistics: bool, quant_type: str, quant_storage: torch.dtype
) -> tuple[Tensor, Any]:
    """Quantize in chunks; the result is that of bitsandbytes' function of the same name, bit for bit. On a CPU, that
    function needs about thirty times the memory of its result."""
    parts = [
        functional.quantize_4bit(chunk, blocksize=blocksize, quant_type=quant_type, quant_storage=quant_storage)
        for chunk in value.flatten().split(value.numel() if value.is_meta else CHUNK)
    ]
    state: Any = parts[0][1]
    state.shape, state.absmax = value.shape, torch.cat([of_chunk.absmax for _, of_chunk in parts])
    if compress_statistics:
        state.offset, state.nested = state.absmax.mean(), True
        state.absmax, state.state2 = functional.quantize_blockwise(state.absmax - state.offset, blocksize=256)
    return torch.cat([packed for packed, _ in parts]), state
