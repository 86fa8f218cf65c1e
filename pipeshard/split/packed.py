"""Packed: weights of a frozen base in 4 or 8 bits, which a stage packs as it loads them.

    in the checkpoint          in the stage
    (out, in), 16 bits   --->  (out * in / 2, 1), uint8, and a scale for every 64 values
                         --->  (out, in), int8, and a scale for every row

A packed weight is a frozen parameter of its own shape from the beginning, also on meta: it is traced, released and
allocated like any other, and a process unpacks one layer at a time. The packing and the products are those of
bitsandbytes (Dettmers et al. 2022 and 2023, arXiv:2208.07339, arXiv:2305.14314), which is imported only if it is
used.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

UNWRITTEN = (
    "the base weights of this model are quantized, and cannot be saved as a model folder. "
    "Save the adapters with booster.save_lora_as_pretrained, or the training state with "
    "pipeshard.save_training_state. To merge them, load the checkpoint in one process without "
    "quantization_config, then call PeftModel.from_pretrained(model, <folder>) and merge_and_unload()"
)


class Packed(nn.Module, ABC):
    """A layer whose weight is packed.

    Attributes:
        mark: the attribute by which peft recognizes a model with such layers.
        whole_shape: the shape that the weight has in a checkpoint.
    """

    mark: ClassVar[str]
    whole_shape: tuple[int, ...]
    weight: Any

    @property
    @abstractmethod
    def scales(self) -> int:
        """The bytes of the scales of the weight, also on meta."""

    @abstractmethod
    def pack(self, value: Tensor) -> None:
        """Store the packed values of a weight of `whole_shape`, on any device."""

    @abstractmethod
    def restore(self, value: Tensor, scales: dict[str, Tensor]) -> None:
        """Store a weight that was saved packed, with the tensors that were saved beside it, by the ends of their names.

        Raises ValueError if the tensors are not those of this layer's packing.
        """

    @abstractmethod
    def like(self, linear: nn.Module) -> "Packed":
        """A layer with the values of another linear layer, packed like this one."""


def packed_layers(model: nn.Module) -> Iterator[tuple[str, Packed]]:
    """Each packed layer, and the full name of its weight."""
    for path, module in model.named_modules():
        if isinstance(module, Packed):
            yield f"{path}.weight" if path else "weight", module


def is_quantized(model: nn.Module) -> bool:
    return next(packed_layers(model), None) is not None


def quantize_as(model: nn.Module, built: Any, names: Mapping[str, str]) -> None:
    """Pack the layers of `built` (with values) that are packed in `model`; `names` maps the tensors of `model` to their
    names in `built`."""
    for name, layer in packed_layers(model):
        path = names[name].removesuffix(".weight")
        built.set_submodule(path, layer.like(built.get_submodule(path)))
        setattr(built, layer.mark, True)
