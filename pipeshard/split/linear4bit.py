"""Linear in 4 bits: bitsandbytes' layer, packed from the beginning. Imports bitsandbytes."""

import copy
from typing import Any

import bitsandbytes
import torch
from bitsandbytes import functional
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeshard.split.initialize import give
from pipeshard.split.packed import Packed

with torch.device("cpu"):  # bitsandbytes keeps the one that it makes first, which could be on meta
    functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())


class Params4bit(bitsandbytes.nn.Params4bit):
    """A parameter that can be copied on meta, too. It has the class name that peft looks for."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = self.detach().clone().as_subclass(type(self)).requires_grad_(self.requires_grad)
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made


class Linear4bit(Packed, bitsandbytes.nn.Linear4bit):
    """Computes the same as bitsandbytes' layer, without changing itself: bitsandbytes' own layer casts its bias
    in place, and packs its weight once more for a CPU.

    Attributes:
        is_transposed: whether a checkpoint has the weight as (in, out).
        values_dtype: of the values before they are packed, and after they are unpacked.
        options: how bitsandbytes packs them.
        state_on_meta: what `quant_state` is where the weight is on meta.
    """

    weight: Any
    bias: Any
    compute_dtype: torch.dtype
    quant_state: Any
    is_transposed: bool
    values_dtype: torch.dtype
    options: dict[str, Any]
    state_on_meta: Any

    @property
    def scales(self) -> int:
        state = self.quant_state
        absmax = [state.absmax, *([] if state.state2 is None else [state.state2.absmax])]
        return sum(tensor.nbytes for tensor in absmax if not tensor.is_meta)

    @staticmethod
    def take_over(module: nn.Module, dtype: torch.dtype) -> None:
        """Convert a layer of bitsandbytes on meta, whose values have this dtype before packing. The module
        stays the same object."""
        if type(module) is not bitsandbytes.nn.Linear4bit:
            return
        layer: Any = module
        layer.__class__, layer.weight.__class__ = Linear4bit, Params4bit
        is_transposed = issubclass(getattr(layer, "source_cls", nn.Linear), Conv1D)
        layer.whole_shape = (layer.in_features, layer.out_features)[:: 1 if is_transposed else -1]
        layer.is_transposed, layer.values_dtype = is_transposed, dtype
        names = "blocksize", "compress_statistics", "quant_type", "quant_storage"
        layer.options = {name: getattr(layer.weight, name) for name in names}
        layer.pack(torch.empty(layer.whole_shape, dtype=dtype, device="meta"))
        layer.state_on_meta = layer.quant_state
        if layer.bias is not None:
            give(layer.bias, layer.bias.data.to(dtype))

    def like(self, linear: nn.Module) -> "Linear4bit":
        """The values of another linear layer (with values), packed like this one."""
        values: Any = linear
        sizes = tuple(values.weight.shape)[:: 1 if isinstance(linear, Conv1D) else -1]
        has_bias = values.bias is not None
        how = {name: value for name, value in self.options.items() if name != "blocksize"}
        made: Any = bitsandbytes.nn.Linear4bit(*sizes, has_bias, self.compute_dtype, **how, device="meta")
        made.source_cls = type(linear)
        Linear4bit.take_over(made, values.weight.dtype)
        give(made.weight, torch.empty_like(made.weight.as_subclass(Tensor), device=values.weight.device))
        made.pack(values.weight.detach())
        if has_bias:
            give(made.bias, values.bias.detach().clone())
        return made.requires_grad_(False)

    def pack(self, value: Tensor) -> None:
        self.weight.data, self.quant_state = self._packed(value)
        self.weight.bnb_quantized = True

    @torch.no_grad()
    def _packed(self, value: Tensor) -> tuple[Tensor, Any]:
        """The result of bitsandbytes' packing for a weight of `whole_shape`."""
        value = (value.T if self.is_transposed else value).to(self.values_dtype).contiguous()
        return quantize_4bit(value, **self.options)

    def _state(self) -> Any:
        """The `quant_state` of the current weight: traces use others, on meta or with temporary values."""
        if self.weight.is_meta:
            return self.state_on_meta
        if self.quant_state is self.state_on_meta:  # the layer is of another stage, or not loaded yet
            return self._packed(torch.zeros(self.whole_shape, dtype=self.values_dtype, device=self.weight.device))[1]
        return self.quant_state

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        product = bitsandbytes.matmul_4bit(x.to(self.compute_dtype), self.weight, bias=bias, quant_state=self._state())
        return product.to(x.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Only the parameters, by their own names, which identify what a stage holds."""
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)


CHUNK = 1 << 20  # values, a multiple of every size of a block


def quantize_4bit(
    value: Tensor, blocksize: int, compress_statistics: bool, quant_type: str, quant_storage: torch.dtype
) -> tuple[Tensor, Any]:
    """The result of bitsandbytes' function of this name, bit for bit, in chunks: on a CPU that function takes some
    thirty times the memory of its result."""
    parts = [
        functional.quantize_4bit(chunk, blocksize=blocksize, quant_type=quant_type, quant_storage=quant_storage)
        for chunk in value.flatten().split(CHUNK)
    ]
    state: Any = parts[0][1]
    state.shape, state.absmax = value.shape, torch.cat([of_chunk.absmax for _, of_chunk in parts])
    if compress_statistics:
        state.offset, state.nested = state.absmax.mean(), True
        state.absmax, state.state2 = functional.quantize_blockwise(state.absmax - state.offset, blocksize=256)
    return torch.cat([packed for packed, _ in parts]), state
