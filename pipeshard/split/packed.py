"""Packed: the 4-bit and 8-bit linear layers of a frozen base model. A stage quantizes the weights while it loads them.

    in the checkpoint          in the stage
    (out, in), 16-bit    --->  (out * in / 2, 1), uint8, and a scale for every 64 values
                         --->  (out, in), int8, and a scale for every row

A packed weight is a frozen parameter that has its quantized shape from the start, even on meta. It is traced, released
and allocated like any other parameter. A process dequantizes one layer at a time. Either bitsandbytes
(Dettmers et al. 2022 and 2023, arXiv:2208.07339, arXiv:2305.14314) quantizes the weights and computes the products, or
torchao quantizes the weights. Each library is imported only if needed.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from pipeshard.errors import TraceError
from pipeshard.split.blank import give

CHUNK = 1 << 18  # elements that are quantized at a time
UNWRITTEN = (
    "the base weights of this model are quantized: they cannot be changed, and cannot be saved as a model folder. "
    "Save the adapters with booster.save_lora_as_pretrained, or the training state with "
    "pipeshard.save_training_state. To merge the adapters, load the unquantized base model in one process, then call "
    "PeftModel.from_pretrained(model, <folder>) and merge_and_unload()"
)


class Rows(Protocol):
    """The values of a weight before quantization: a tensor, or a matrix in a file, whose rows are read when the matrix
    is sliced."""

    def __getitem__(self, rows: slice, /) -> Tensor: ...


class Packed(nn.Module, ABC):
    """A linear layer with a quantized weight.

    Each subclass gives the same results as a layer of bitsandbytes or torchao, but its forward does not modify the
    layer. The forwards of bitsandbytes' layers cast the bias in place, and some replace the weight.

    Attributes:
        layer_class: the class of the layers that `take_over` converts.
        weight_class: the class of the weight, which can be deep-copied on meta.
        mark: the model attribute by which peft and transformers recognize a model with layers of this class.
        whole_shape: the shape of the weight in an unquantized checkpoint.
        is_transposed: whether a checkpoint stores the weight as (in, out).
        values_dtype: the dtype of the values before quantization.
        path: the path of the layer in the base model.
    """

    layer_class: ClassVar[type[nn.Module]]
    weight_class: ClassVar[type[nn.Parameter]]
    mark: ClassVar[str]
    whole_shape: tuple[int, ...]
    weight: Any
    bias: Any
    in_features: int
    out_features: int
    is_transposed: bool
    values_dtype: torch.dtype
    path: str

    @property
    def scales(self) -> int:
        """The size of the weight's scales in bytes, even if the weight is on meta. By default, each row has an fp32
        scale."""
        return 4 * len(self.weight)

    @property
    def saved_shape(self) -> tuple[int, ...]:
        """The shape of the weight in a quantized checkpoint."""
        return tuple(self.weight.shape)

    @property
    def adapter_dtype(self) -> torch.dtype:
        """The dtype of the library's own weight. If this is a floating-point dtype, peft casts new adapters to it."""
        return self.weight.dtype

    @abstractmethod
    def pack(self, value: Rows) -> None:
        """Quantize `value` into the memory of the weight. `value` has `whole_shape`, and may be on any device."""

    @abstractmethod
    def restore(self, value: Tensor, scales: dict[str, Tensor]) -> None:
        """Store a quantized weight from a checkpoint. `scales` contains the checkpoint's tensors that are needed to
        dequantize the weight, keyed by the last part of their names.

        Raises an error if the scales do not match this layer.
        """

    @abstractmethod
    def blank(self, *sizes: Any) -> Any:
        """A module of class `layer_class` on meta, with the quantization options of this layer. `sizes` contains the
        numbers of inputs and outputs, and whether the layer has a bias."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """The output of the layer for the input `x`."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise TraceError(
                f"the quantized layer {self.path} got an input of dtype {x.dtype}, but supports only floating-point "
                "inputs. Either the batch contains integers, or the model casts inputs to the dtype of the layer's "
                "weight. In the second case, load an unquantized folder, and leave this layer unquantized: list the "
                "layer, and the layers that are unquantized by default (such as lm_head), in llm_int8_skip_modules of "
                "BitsAndBytesConfig, or in modules_to_not_convert of TorchAoConfig"
            )
        return nn.functional.linear(x, self._shaped(x.dtype), self.bias) if self.weight.is_meta else self.product(x)

    def _shaped(self, dtype: torch.dtype) -> Tensor:
        """A view of the packed meta weight with the unquantized shape: a trace then counts the flops of the product,
        but no memory for the unquantized weight."""
        one = self.weight.data.flatten().view(torch.uint8)[: dtype.itemsize].view(dtype)
        return one.expand(self.whole_shape[:: -1 if self.is_transposed else 1])

    @classmethod
    def take_over(cls, module: nn.Module, dtype: torch.dtype, path: str) -> None:
        """If the class of `module` is `layer_class`, convert `module` in place into a layer of this class. `module` is
        on meta, `dtype` is the dtype of the values before quantization, and `path` is the layer's path in the base
        model."""
        if type(module) is not cls.layer_class:
            return
        layer: Any = module
        layer.__class__, layer.weight.__class__ = cls, cls.weight_class
        layer.is_transposed = _is_conv1d(getattr(layer, "source_cls", nn.Linear))
        layer.whole_shape = (layer.in_features, layer.out_features)[:: 1 if layer.is_transposed else -1]
        layer.values_dtype, layer.path = dtype, path
        layer.begin()
        if layer.bias is not None:
            give(layer.bias, layer.bias.data.to(dtype))

    @abstractmethod
    def begin(self) -> None:
        """Set a quantized weight on meta, and record the options that `pack` needs."""

    def like(self, linear: nn.Module) -> Self:
        """A layer with the values of `linear`, quantized like this layer."""
        values: Any = linear
        sizes = tuple(values.weight.shape)[:: 1 if _is_conv1d(type(linear)) else -1]
        made: Any = self.blank(*sizes, values.bias is not None)
        made.source_cls = type(linear)
        self.take_over(made, values.weight.dtype, self.path)
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
        """Save only the parameters, under their own names: these names identify a stage's parameters."""
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)


def _is_conv1d(kind: type) -> bool:
    """Whether this class is transformers' Conv1D, which stores its weight as (in, out)."""
    from transformers.pytorch_utils import Conv1D  # takes a second to import

    return issubclass(kind, Conv1D)


def packed_layers(model: nn.Module) -> Iterator[tuple[str, Packed]]:
    """Yield the full name of each quantized weight, and the layer with this weight."""
    for path, module in model.named_modules():
        if isinstance(module, Packed):
            yield f"{path}.weight" if path else "weight", module


def is_quantized(model: nn.Module) -> bool:
    return next(packed_layers(model), None) is not None


def quantize_as(model: nn.Module, built: Any, names: Mapping[str, str]) -> None:
    """Quantize the layers of `built` that are quantized in `model`. `built` has values, and `names` maps the tensor
    names of `model` to the names in `built`."""
    for name, layer in packed_layers(model):
        path = names[name].removesuffix(".weight")
        built.set_submodule(path, layer.like(built.get_submodule(path)))
        setattr(built, layer.mark, True)


def quantize_rows(
    parts: Iterable[Tensor], packed: Tensor, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Tensor:
    """Quantize the rows in `parts` into `packed`, and return the scales of the rows. `quantize` returns the quantized
    values and the scales of the rows that it receives."""
    scales, row = torch.empty(0), 0
    for part in parts:
        values, of_part = quantize(part)
        if row == 0:  # a small tensor kept for each part would fragment the heap
            scales = of_part.new_empty(len(packed), *of_part.shape[1:])
        rows = slice(row, row + len(part))
        packed[rows], scales[rows] = values, of_part
        row = rows.stop
    return scales
