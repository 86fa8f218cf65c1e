"""Quantized: a model on meta whose linear layers are packed, as a `quantization_config` says."""

from typing import Any

import torch

from pipeshard.errors import ConfigurationError

METHOD = "bitsandbytes"
ADVICE = "Pass BitsAndBytesConfig(load_in_4bit=True), or leave quantization_config out"


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
            f"quantization_config needs bitsandbytes, which cannot be imported ({error}): "
            "pip install 'pipeshard[quantized]'"
        ) from error
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.preprocess_model(model=model, dtype=model.dtype, device_map=None)
    with torch.device("cpu"):  # where bitsandbytes keeps its maps
        for module in list(model.modules()):
            Linear4bit.take_over(module, model.dtype)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer  # Trainer asks it whether the model can be trained


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
