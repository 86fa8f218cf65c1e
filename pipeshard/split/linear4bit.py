"""Linear4bit: bitsandbytes' 4-bit linear layer, whose weight is quantized from the start. Imports bitsandbytes."""

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any

import bitsandbytes
import torch
from bitsandbytes import functional
from torch import Tensor

from pipeshard.split.packed import Packed, Rows

with torch.device("cpu"):  # bitsandbytes caches the first map that it creates, which could be on meta
    functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())


class Params4bit(bitsandbytes.nn.Params4bit):
    """bitsandbytes' 4-bit parameter, which can also be deep-copied on meta. peft looks for this class name."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = self.detach().clone().as_subclass(type(self)).requires_grad_(self.requires_grad)
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made


class Linear4bit(Packed, bitsandbytes.nn.Linear4bit):
    """A 4-bit linear layer.

    Attributes:
        options: the keyword arguments of `quantize_4bit`.
        storage: the dtype of the packed bytes in a checkpoint. In memory, the bytes are always uint8, since code that
            casts or checks floating-point tensors would treat bytes of a floating-point dtype as numbers.
        unloaded: the `quant_state` while the weight has no values. A forward then uses the `quant_state` of zeros.
    """

    layer_class, weight_class, mark = bitsandbytes.nn.Linear4bit, Params4bit, "is_loaded_in_4bit"
    compute_dtype: torch.dtype
    quant_state: Any
    options: dict[str, Any]
    storage: torch.dtype
    unloaded: Any

    @property
    def saved_shape(self) -> tuple[int, ...]:
        return len(self.weight) // self.storage.itemsize, 1

    @property
    def adapter_dtype(self) -> torch.dtype:
        return self.storage

    @property
    def scales(self) -> int:
        state = self.quant_state
        return state.absmax.nbytes + (0 if state.state2 is None else state.state2.absmax.nbytes)

    def begin(self) -> None:
        names = "blocksize", "compress_statistics", "quant_type"
        self.storage, self.weight.quant_storage = self.weight.quant_storage, torch.uint8
        self.options = {name: getattr(self.weight, name) for name in names}
        blank = quantized_blank((self.out_features, self.in_features), self.values_dtype, **self.options)
        self.weight.data, self.unloaded = copy.deepcopy(blank)
        self.quant_state, self.weight.bnb_quantized = self.unloaded, True

    def blank(self, *sizes: Any) -> Any:
        how = {name: value for name, value in self.options.items() if name != "blocksize"}
        return bitsandbytes.nn.Linear4bit(*sizes, self.compute_dtype, **how, device="meta")

    @torch.no_grad()
    def pack(self, value: Rows) -> None:
        self.quant_state = self._quantized(value, self.weight.data)

    def restore(self, value: Tensor, scales: dict[str, Tensor]) -> None:
        state = functional.QuantState.from_dict(dict(scales), value.device)
        if (found := _layout(state)) != (expected := _layout(self.unloaded)):
            raise ValueError(f"its scales have the layout {found}, but the layer needs {expected}")
        packed = value.view(torch.uint8).reshape(-1, 1)
        self.weight.data, self.quant_state, self.weight.bnb_quantized = packed, state, True

    def _quantized(self, value: Rows, packed: Tensor) -> Any:
        """Quantize a weight of `whole_shape` into `packed`, and return the `quant_state`."""
        parts = self.parts(value, self.options["blocksize"])
        return quantize_4bit(parts, packed, torch.Size((self.out_features, self.in_features)), **self.options)

    @torch.no_grad()
    def _state(self) -> Any:
        """The `quant_state` of the weight, or of zeros if the weight has no values yet."""
        if self.quant_state is not self.unloaded:
            return self.quant_state
        zero = torch.zeros((), dtype=self.values_dtype, device=self.weight.device)
        return self._quantized(zero.expand(self.whole_shape), torch.empty_like(self.weight.data))

    def product(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        product = bitsandbytes.matmul_4bit(x.to(self.compute_dtype), self.weight, bias=bias, quant_state=self._state())
        return product.to(x.dtype)


def _layout(state: Any) -> tuple[Any, ...]:
    """The fields of a `quant_state` that kernels rely on: the shape, the packing options, and the sizes of the
    scales."""
    of_scales = (*state.state2.absmax.shape, *state.state2.code.shape, state.state2.blocksize) if state.nested else ()
    sizes = *state.absmax.shape, *state.code.shape, *of_scales
    return tuple(state.shape), state.quant_type, state.blocksize, state.absmax.dtype, sizes


@cache
def quantized_blank(shape: tuple[int, int], dtype: torch.dtype, **options: Any) -> tuple[Tensor, Any]:
    """Quantize a weight on meta. The result is cached for each shape, dtype and set of options, since a model may have
    hundreds of weights of the same shape."""
    return functional.quantize_4bit(torch.empty(shape, dtype=dtype, device="meta"), **options)


def quantize_4bit(
    parts: Iterable[Tensor],
    packed: Tensor,
    shape: torch.Size,
    blocksize: int,
    compress_statistics: bool,
    quant_type: str,
) -> Any:
    """Quantize a tensor of shape `shape`, whose values are in `parts`, into `packed`. Return the `quant_state`. In each
    part except the last, the number of elements is a multiple of `blocksize`.

    The result is the same, bit for bit, as with bitsandbytes' function of the same name. On a CPU, that function needs
    about thirty times the memory of its result.
    """
    scales = torch.empty(-(-shape.numel() // blocksize), dtype=torch.float32, device=packed.device)
    values, blocks = 0, 0
    state: Any = None
    for part in parts:
        made, state = functional.quantize_4bit(part, blocksize=blocksize, quant_type=quant_type)
        packed[values : values + len(made)] = made
        scales[blocks : blocks + len(state.absmax)] = state.absmax
        values += len(made)
        blocks += len(state.absmax)
    state.shape, state.absmax = shape, scales
    if compress_statistics:
        state.offset, state.nested = scales.mean(), True
        state.absmax, state.state2 = functional.quantize_blockwise(scales - state.offset, blocksize=256)
    return state
