"""Packed: the 4-bit and 8-bit weights of a frozen base model. A stage quantizes its weights while loading them.

    in the checkpoint          in the stage
    (out, in), 16-bit    --->  (out * in / 2, 1), uint8, and a scale for every 64 values
                         --->  (out, in), int8, and a scale for every row

A packed weight is a frozen parameter that has its quantized shape from the start, even on meta. It is traced, released
and allocated like any other parameter. A process dequantizes one layer at a time. Either bitsandbytes (Dettmers et al.
2022 and 2023, arXiv:2208.07339, arXiv:2305.14314) quantizes the weights and computes the products, or torchao quantizes
the weights. Each library is imported only if needed.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

UNWRITTEN = (
    "the base weights of this model are quantized, and cannot be saved as a model folder. "
    "Save the adapters with booster.save_lora_as_pretrained, or the training state with "
    "pipeshard.save_training_state. To merge the adapters, load the base model in one process without "
    "quantization_config, then call PeftModel.from_pretrained(model, <folder>) and merge_and_unload()"
)


class Rows(Protocol):
    """The values of a weight before quantization: a tensor, or a matrix in a file, whose rows are read when the matrix
    is sliced."""

    def __getitem__(self, rows: slice, /) -> Tensor: ...


class Packed(nn.Module, ABC):
    """A layer with a quantized weight.

    Attributes:
        mark: the model attribute by which peft and transformers recognize a model with layers of this class.
        whole_shape: the shape of the weight in an unquantized checkpoint.
    """

    mark: ClassVar[str]
    whole_shape: tuple[int, ...]
    weight: Any

    @property
    @abstractmethod
    def scales(self) -> int:
        """The size of the weight's scales in bytes, also on meta."""

    @property
    def adapter_dtype(self) -> torch.dtype:
        """The dtype of the library's own weight. If this is a floating-point dtype, peft casts new adapters to it."""
        return self.weight.dtype

    @abstractmethod
    def pack(self, value: Rows) -> None:
        """Quantize `value`, which has `whole_shape` and may be on any device, into the memory of the weight."""

    @abstractmethod
    def restore(self, value: Tensor, scales: dict[str, Tensor]) -> None:
        """Store a quantized weight from a checkpoint. `scales` contains the checkpoint's tensors that are needed to
        dequantize the weight, keyed by the last part of their names.

        Raises an error if the scales do not fit this layer.
        """

    @abstractmethod
    def like(self, linear: nn.Module) -> "Packed":
        """A layer with the values of `linear`, quantized like this one."""


def packed_layers(model: nn.Module) -> Iterator[tuple[str, Packed]]:
    """The full name of each quantized weight, and its layer."""
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
