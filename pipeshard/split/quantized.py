"""Quantized: a model on meta whose linear layers are quantized by a `quantization_config`."""

from collections.abc import Mapping
from typing import Any

from transformers.utils.quantization_config import BitsAndBytesConfig, QuantizationConfigMixin

from pipeshard.errors import CheckpointError, ConfigurationError
from pipeshard.split.packed import UNWRITTEN
from pipeshard.split.ties import first_names

METHOD = "bitsandbytes"
ADVICE = "Pass BitsAndBytesConfig(load_in_4bit=True) or (load_in_8bit=True), or omit quantization_config"


def quantize_blank(model: Any, config: Any) -> None:
    """Replace linear layers of a transformers model on meta with quantized layers; transformers selects them.

    Raises ConfigurationError for any quantization other than bitsandbytes' 4-bit and 8-bit, if bitsandbytes cannot be
    imported, and if a weight to quantize is tied to another parameter.
    """
    refuse_other_ways(config)
    from transformers.quantizers import AutoHfQuantizer

    try:
        from pipeshard.split.linear4bit import Linear4bit
        from pipeshard.split.linear8bit import Linear8bit
    except ImportError as error:
        raise ConfigurationError(
            f"quantization_config needs bitsandbytes, which cannot be imported ({error}): "
            "pip install 'pipeshard[quantized]'"
        ) from error
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    before = first_names(model)
    quantizer.preprocess_model(model=model, dtype=model.dtype, device_map=None)
    refuse_lost_ties(before, first_names(model))
    for module in list(model.modules()):
        for kind in (Linear4bit, Linear8bit):
            kind.take_over(module, model.dtype)
    quantizer.postprocess_model(model)
    quantizer.is_serializable = refuse_to_save  # called by save_pretrained
    model.hf_quantizer = quantizer  # Trainer reads from it whether the model can be trained


def refuse_other_ways(config: Any) -> None:
    """Raise ConfigurationError for any quantization config except bitsandbytes' 4-bit and 8-bit."""
    if not isinstance(config, QuantizationConfigMixin):
        raise ConfigurationError(f"quantization_config has the unsupported type {type(config).__name__}. {ADVICE}")
    method = getattr(config.quant_method, "value", config.quant_method)
    if method != METHOD:
        raise ConfigurationError(f"quantization_config: the method {method} is not supported. {ADVICE}")
    if not (config.load_in_4bit or config.load_in_8bit):
        raise ConfigurationError(f"quantization_config: load_in_4bit and load_in_8bit are both False. {ADVICE}")
    if config.load_in_8bit and config.llm_int8_has_fp16_weight:
        raise ConfigurationError(
            "quantization_config: llm_int8_has_fp16_weight=True keeps 16-bit weights, which is not supported. Omit it"
        )


def refuse_to_save() -> bool:
    """Raise CheckpointError, since a stage's state_dict does not contain the scales."""
    raise CheckpointError(UNWRITTEN)


def refuse_lost_ties(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Raise ConfigurationError if quantization has broken a tie; `before` and `after` map each parameter name to its
    first name."""
    for name, first in before.items():
        if after[name] != first:
            layer = name.rpartition(".")[0]
            raise ConfigurationError(
                f"quantization_config quantizes {layer}, but {name} is tied to {first}, and tied parameters "
                f"cannot be quantized. Add {layer!r} to llm_int8_skip_modules, or omit quantization_config"
            )


def quantization_of(config: Any, path: Any, given: Any) -> Any:
    """The quantization config of a checkpoint whose weights are quantized, otherwise `given`.

    Raises ConfigurationError for a checkpoint that was quantized by a method other than bitsandbytes, or if a config is
    given for a quantized checkpoint.
    """
    saved = getattr(config, "quantization_config", None)
    if saved is None:
        return given
    method = saved.get("quant_method", "unknown") if isinstance(saved, dict) else saved.quant_method
    method = getattr(method, "value", method)
    if method != METHOD:
        raise ConfigurationError(
            f"the weights in {path} are quantized (with {method}), and stages cannot load such weights. Use the "
            "original checkpoint, with quantization_config=BitsAndBytesConfig(load_in_4bit=True)"
        )
    if given is not None:
        raise ConfigurationError(f"the weights in {path} are quantized already: omit quantization_config")
    return BitsAndBytesConfig.from_dict(saved) if isinstance(saved, dict) else saved
