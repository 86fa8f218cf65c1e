"""Quantized: weights of a frozen base in 4 bits, which a stage packs as it loads them.

    in the checkpoint          in the stage
    (out, in), 16 bits   --->  (out * in / 2, 1), uint8, and a scale for every 64 values

A packed weight is a frozen parameter of its own shape from the beginning, on meta too: it is traced, released and given
memory as any other, and no process has the weights of a whole layer stack in 16 bits. The packing and the products are
those of bitsandbytes (Dettmers et al. 2023, arXiv:2305.14314), which is imported only where it is asked for.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from pipeshard.errors import ConfigurationError

METHOD = "bitsandbytes"
ADVICE = "Pass BitsAndBytesConfig(load_in_4bit=True), or leave quantization_config out"


class Packed(nn.Module):
    """A layer whose weight is packed.

    Attributes:
        whole_shape: the shape that the weight has in a checkpoint.
    """

    whole_shape: tuple[int, ...]

    def pack(self, value: Tensor) -> None:
        """Take over the packed values of a weight of `whole_shape`, on any device."""
        raise NotImplementedError

    def like(self, linear: nn.Module) -> "Packed":
        """The values of another linear layer, packed as those of this one."""
        raise NotImplementedError


def packed_layers(model: nn.Module) -> Iterator[tuple[str, Packed]]:
    """Each packed layer, and the full name of its weight."""
    for path, module in model.named_modules():
        if isinstance(module, Packed):
            yield f"{path}.weight" if path else "weight", module


def is_quantized(model: nn.Module) -> bool:
    return next(packed_layers(model), None) is not None


def quantize_blank(model: Any, config: Any) -> None:
    """Pack the linear layers of a model of transformers that is on meta; which ones, transformers decides.

    Raises ConfigurationError for any other way to quantize than 4 bits by bitsandbytes, and where that is missing.
    """
    refuse_other_ways(config)
    from transformers.quantizers import AutoHfQuantizer

    try:
        from pipeshard.split.linear4bit import Linear4bit
    except ImportError as error:
        raise ConfigurationError(
            f"quantization_config needs bitsandbytes, which cannot be imported ({error}): pip install bitsandbytes"
        ) from error
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.preprocess_model(model=model, dtype=model.dtype, device_map=None)
    for module in list(model.modules()):
        Linear4bit.take_over(module, model.dtype)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer  # Trainer asks it whether the model can be trained


def quantize_as(model: nn.Module, built: Any, names: Mapping[str, str]) -> None:
    """Pack the layers of `built`, which has values, of which `model` has packed ones; `names` has what `built` calls
    the tensors of `model`."""
    for name, layer in packed_layers(model):
        path = names[name].removesuffix(".weight")
        built.set_submodule(path, layer.like(built.get_submodule(path)))
        built.is_loaded_in_4bit = True  # as peft asks


def refuse_other_ways(config: Any) -> None:
    """Raise ConfigurationError for a configuration of anything but 4 bits by bitsandbytes."""
    if isinstance(config, dict):
        raise ConfigurationError(f"quantization_config is a dict. {ADVICE}")
    method = getattr(config.quant_method, "value", config.quant_method)
    if method != METHOD:
        raise ConfigurationError(f"quantization_config: the method {method} is not supported. {ADVICE}")
    if not config.load_in_4bit:
        raise ConfigurationError(f"quantization_config: 8 bits are not supported. {ADVICE}")


def refuse_quantized_folder(config: Any, path: Any) -> None:
    """Raise ConfigurationError for the config of a checkpoint whose weights are quantized."""
    if (saved := getattr(config, "quantization_config", None)) is not None:
        method = saved.get("quant_method", "unknown") if isinstance(saved, dict) else saved.quant_method
        raise ConfigurationError(
            f"the weights in {path} are quantized (by {getattr(method, 'value', method)}), and stages do not read such "
            "weights. Use the checkpoint that they were made from, with "
            "quantization_config=BitsAndBytesConfig(load_in_4bit=True)"
        )
