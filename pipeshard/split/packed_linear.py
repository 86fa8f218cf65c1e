"""PackedLinear: the common base class of the 4-bit and 8-bit linear layers.

Each subclass computes the same as a layer of bitsandbytes or torchao, but its forward does not modify the layer. The
forwards of bitsandbytes' layers cast the bias in place, and some replace the weight.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeshard.split.initialize import give
from pipeshard.split.packed import Packed, Rows

CHUNK = 1 << 18  # elements that are quantized at a time


class PackedLinear(Packed):
    """A linear layer with a quantized weight.

    Attributes:
        layer_class: the class of the layers that `take_over` converts.
        weight_class: the class of the weight, which can be deep-copied on meta.
        is_transposed: whether a checkpoint stores the weight as (in, out).
        values_dtype: the dtype of the values before quantization.
    """

    layer_class: ClassVar[type[nn.Module]]
    weight_class: ClassVar[type[nn.Parameter]]
    bias: Any
    in_features: int
    out_features: int
    is_transposed: bool
    values_dtype: torch.dtype

    @abstractmethod
    def blank(self, *sizes: Any) -> Any:
        """A `layer_class` on meta with the same quantization options. `sizes` contains the numbers of inputs and
        outputs, and whether the layer has a bias."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """The output of the layer for the input `x`."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self._shaped(x.dtype), self.bias) if self.weight.is_meta else self.product(x)

    def _shaped(self, dtype: torch.dtype) -> Tensor:
        """A view of the packed meta weight with the unquantized shape: a trace then counts the flops of the product,
        but no memory for the unquantized weight."""
        one = self.weight.data.flatten().view(torch.uint8)[: dtype.itemsize].view(dtype)
        return one.expand(self.whole_shape[:: -1 if self.is_transposed else 1])

    @classmethod
    def take_over(cls, module: nn.Module, dtype: torch.dtype) -> None:
        """Convert `module`, if it is a `layer_class` on meta, into a layer of this class, in place; `dtype` is the
        dtype of the values before quantization."""
        if type(module) is not cls.layer_class:
            return
        layer: Any = module
        layer.__class__, layer.weight.__class__ = cls, cls.weight_class
        layer.is_transposed = issubclass(getattr(layer, "source_cls", nn.Linear), Conv1D)
        layer.whole_shape = (layer.in_features, layer.out_features)[:: 1 if layer.is_transposed else -1]
        layer.values_dtype = dtype
        layer.begin()
        if layer.bias is not None:
            give(layer.bias, layer.bias.data.to(dtype))

    @abstractmethod
    def begin(self) -> None:
        """Set a quantized weight on meta, and record the options that `pack` needs."""

    def like(self, linear: nn.Module) -> Self:
        """A layer with the values of `linear`, quantized like this one."""
        values: Any = linear
        sizes = tuple(values.weight.shape)[:: 1 if isinstance(linear, Conv1D) else -1]
        made: Any = self.blank(*sizes, values.bias is not None)
        made.source_cls = type(linear)
        self.take_over(made, values.weight.dtype)
        give(made.weight, torch.empty_like(made.weight.as_subclass(Tensor), device=values.weight.device))
        made.pack(values.weight.detach())
        if values.bias is not None:
            give(made.bias, values.bias.detach().clone())
        return made.requires_grad_(False)

    def parts(self, value: Rows, multiple: int = 1) -> Iterator[Tensor]:
        """Yield a weight of `whole_shape` in parts. Each part contains some rows of the (out, in) matrix, in
        `values_dtype` and on the device of this layer. In each part except the last, the number of elements is a
        multiple of `multiple`."""
        whole = value[:].T if self.is_transposed else value
        least = multiple // math.gcd(multiple, self.in_features)
        rows = max(1, CHUNK // self.in_features // least) * least
        for begin in range(0, self.out_features, rows):
            part = whole[begin : begin + rows]
            yield part.to(self.weight.device, self.values_dtype).contiguous()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save only the parameters, under their own names, which identify a stage's parameters."""
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)


def quantize_rows(
    parts: Iterable[Tensor], packed: Tensor, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Tensor:
    """Quantize the rows in `parts` into `packed`, and return the scales of the rows. `quantize` returns the quantized
    values and the scales of some rows."""
    scales, row = torch.empty(0), 0
    for part in parts:
        values, of_part = quantize(part)
        if row == 0:  # small tensors that are kept for each part would leave holes in the heap
            scales = of_part.new_empty(len(packed), *of_part.shape[1:])
        rows = slice(row, row + len(part))
        packed[rows], scales[rows] = values, of_part
        row = rows.stop
    return scales
