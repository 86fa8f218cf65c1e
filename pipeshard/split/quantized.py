"""Quantized: a model on meta whose linear layers are quantized by a `quantization_config`."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.utils.quantization_config import BitsAndBytesConfig, QuantizationConfigMixin

from pipeshard.errors import CheckpointError, ConfigurationError
from pipeshard.split.packed import UNWRITTEN, Packed
from pipeshard.split.ties import first_names

ADVICE = (
    "Pass BitsAndBytesConfig(load_in_4bit=True), BitsAndBytesConfig(load_in_8bit=True) or "
    "TorchAoConfig(Int8WeightOnlyConfig()), or omit quantization_config"
)


# For each library that quantizes weights: the optional dependency of pipeshard that installs the library, and the
# argument of the quantization config that names the layers to leave unquantized.
EXTRAS = {"bitsandbytes": "quantized", "torchao": "torchao"}
SKIPS = {"bitsandbytes": "llm_int8_skip_modules", "torchao": "modules_to_not_convert"}


def quantize_blank(model: Any, config: Any) -> None:
    """Replace linear layers of a transformers model on meta with quantized layers. transformers selects the layers.

    Raises ConfigurationError for any quantization other than bitsandbytes' 4-bit or 8-bit weights or torchao's int8
    weights, for a library that cannot be imported, and for a layer that cannot be quantized.
    """
    refuse_other_ways(config)
    from transformers.quantizers import AutoHfQuantizer

    method = method_of(config)
    kinds = kinds_of(method)
    if method == "torchao":
        refuse_other_torchao(config)
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    before = first_names(model)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters(remove_duplicate=False)}
    quantizer.preprocess_model(model=model, dtype=model.dtype, device_map=None)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and quantizer.param_needs_quantization(model, f"{path}.weight"):
            for kind in kinds:
                kind.take_over(module, dtypes[f"{path}.weight"], path)
            refuse_other_layer(path, module, method)
    refuse_lost_ties(before, first_names(model), method)
    quantizer.postprocess_model(model)
    quantizer.is_serializable = refuse_to_save  # called by save_pretrained
    model.hf_quantizer = quantizer  # Trainer reads from the quantizer whether the model can be trained


def kinds_of(method: str) -> tuple[type[Packed], ...]:
    """The layer classes for a quantization method. Raises ConfigurationError if the method's library cannot be
    imported."""
    try:
        if method == "torchao":
            from pipeshard.split.linear_torchao import LinearTorchao

            return (LinearTorchao,)
        from pipeshard.split.linear4bit import Linear4bit
        from pipeshard.split.linear8bit import Linear8bit

        return Linear4bit, Linear8bit
    except ImportError as error:
        raise ConfigurationError(
            f"quantization_config needs {method}, which cannot be imported ({error}): "
            f"install it with pip install 'pipeshard[{EXTRAS[method]}]'"
        ) from error


def method_of(config: Any) -> str:
    """The name of the library that quantizes with `config`. `config` may also be a dict."""
    method = config.get("quant_method", "unknown") if isinstance(config, dict) else config.quant_method
    return str(getattr(method, "value", method))


def refuse_other_ways(config: Any) -> None:
    """Raise ConfigurationError unless `config` selects torchao, or bitsandbytes with 4-bit or 8-bit weights."""
    if not isinstance(config, QuantizationConfigMixin):
        raise ConfigurationError(f"quantization_config has the unsupported type {type(config).__name__}. {ADVICE}")
    method = method_of(config)
    if method not in EXTRAS:
        raise ConfigurationError(f"quantization_config: the method {method} is not supported. {ADVICE}")
    if method != "bitsandbytes":
        return
    if not (config.load_in_4bit or config.load_in_8bit):
        raise ConfigurationError(f"quantization_config: load_in_4bit and load_in_8bit are both False. {ADVICE}")
    if config.load_in_8bit and config.llm_int8_has_fp16_weight:
        raise ConfigurationError(
            "quantization_config: llm_int8_has_fp16_weight=True, which keeps 16-bit weights, is not supported. Omit it"
        )


def refuse_other_torchao(config: Any) -> None:
    """Raise ConfigurationError for any torchao quantization except int8 weights with one scale per row, and for options
    that quantize or untie embeddings."""
    from torchao.quantization import Int8WeightOnlyConfig, PerRow

    how = config.quant_type
    if type(how) is not Int8WeightOnlyConfig:
        name = how if isinstance(how, str) else type(how).__name__
        raise ConfigurationError(f"quantization_config: torchao's {name} is not supported. {ADVICE}")
    if how.granularity != PerRow():
        raise ConfigurationError(
            f"quantization_config: Int8WeightOnlyConfig(granularity={how.granularity}) is not supported. Omit "
            "granularity (its default is PerRow())"
        )
    for name in ("include_input_output_embeddings", "untie_embedding_weights"):
        if getattr(config, name, False):
            raise ConfigurationError(
                f"quantization_config: {name}=True is not supported, since only linear layers are quantized. Omit it"
            )


def refuse_to_save() -> bool:
    """Raise CheckpointError, since a stage's state_dict does not contain the scales."""
    raise CheckpointError(UNWRITTEN)


def refuse_other_layer(path: str, module: nn.Module, method: str) -> None:
    """Raise ConfigurationError for a layer that transformers would quantize, but that was not replaced with a quantized
    layer."""
    if not isinstance(module, Packed):
        every = f".*{path.rpartition('.')[2]}"
        raise ConfigurationError(
            f"quantization_config quantizes {path} ({type(module).__name__}), but only layers of the class "
            "nn.Linear itself, not of a subclass, can be quantized (with bitsandbytes, also transformers' Conv1D). Add "
            f"{every!r} to {SKIPS[method]}, or omit quantization_config"
        )


def refuse_lost_ties(before: Mapping[str, str], after: Mapping[str, str], method: str) -> None:
    """Raise ConfigurationError if quantization has broken a tie. `before` and `after` map each parameter name to the
    first name of the same parameter."""
    for name, first in before.items():
        if after[name] != first:
            layer = name.rpartition(".")[0]
            raise ConfigurationError(
                f"quantization_config quantizes {layer}, but {name} is tied to {first}, and tied parameters "
                f"cannot be quantized. Add {layer!r} to {SKIPS[method]}, or omit quantization_config"
            )


def quantization_of(config: Any, path: Any, given: Any) -> Any:
    """The quantization config of the checkpoint if its weights are quantized, otherwise `given`.

    Raises ConfigurationError if a method other than bitsandbytes quantized the checkpoint, or if both the checkpoint
    and `given` define a quantization.
    """
    saved = getattr(config, "quantization_config", None)
    if saved is None:
        return given
    method = method_of(saved)
    if method != "bitsandbytes":
        raise ConfigurationError(
            f"the weights in {path} are quantized (with {method}), and stages cannot load such weights. Load "
            "the unquantized original checkpoint with quantization_config=BitsAndBytesConfig(load_in_4bit=True)"
        )
    if given is not None:
        raise ConfigurationError(f"the weights in {path} are already quantized: omit quantization_config")
    return BitsAndBytesConfig.from_dict(saved) if isinstance(saved, dict) else saved
