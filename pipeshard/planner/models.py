"""Models: the model that a command names, built on meta."""

import contextlib
import difflib
import inspect
import json
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from pipeshard.errors import ConfigurationError, explained, hint, summary
from pipeshard.hf import can_recompute, has_adapters
from pipeshard.split.quantized import method_of, quantization_of, quantize_blank

DTYPE_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The tasks that are tried for a config without an architecture, in this order.
TASKS = ("CausalLM", "ImageTextToText", "ImageClassification", "CTC", "SequenceClassification")
# The arguments of BitsAndBytesConfig for each value of `quantize`.
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


def build_on_meta(
    source: str,
    fields: Sequence[str] = (),
    dtype: str | None = None,
    recompute: bool = False,
    lora: int = 0,
    quantize: str | None = None,
    lora_targets: str | None = None,
    as_saved: bool = False,
    trust_remote_code: bool = False,
    options: Mapping[str, Any] | None = None,
    otherwise: Callable[[], torch.dtype] = lambda: torch.bfloat16,
) -> nn.Module:
    """Build a model on meta and in training mode. `source` is a Hugging Face folder, a config.json, the name of a model
    whose config is in the Hugging Face cache, or a model type.

    `fields` are config fields as `key=value`, with values in JSON or plain text. `dtype` is "bf16", "fp16" or "fp32".
    The default is the config's dtype or, if the config has none, `otherwise()`. If `lora` is positive, the model gets
    adapters of this rank, and only the adapters are trained. The adapters are on the layers that `lora_targets` names
    (such as "q_proj,v_proj"), or by default on all linear layers. With `quantize` ("nf4", "fp4", "int8"), the base
    weights are quantized as with the `quantization_config` of `from_pretrained`. With `as_saved`, weights that the
    folder stores in 4 or 8 bits are also quantized. Without it, the folder's quantization is ignored. With
    `trust_remote_code`, code in the folder is executed. `options` are further options of from_pretrained. Unknown
    options are ignored.

    Raises ConfigurationError for a missing or unknown model, and for invalid arguments.
    """
    config = _config(source, dict(map(_field, fields)), trust_remote_code, options or {})
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise ConfigurationError(f"dtype={dtype!r} is unknown: use one of {list(DTYPE_NAMES)}")
    if quantize is not None and quantize not in QUANTIZATIONS:
        raise ConfigurationError(f"quantize={quantize!r} is unknown: {hint(quantize, QUANTIZATIONS)}")
    if quantize and not lora:
        raise ConfigurationError(
            f"quantize={quantize!r} freezes the base weights, so there is nothing to train: add adapters with "
            "--lora RANK"
        )
    if lora_targets and not lora:
        raise ConfigurationError(f"--lora-targets {lora_targets} has no effect without adapters: add --lora RANK")
    packing = BitsAndBytesConfig(**QUANTIZATIONS[quantize]) if quantize else None
    if as_saved:
        packing = _packing(config, source, packing, lora)
    chosen = DTYPE_NAMES[dtype] if dtype else getattr(config, "dtype", None) or otherwise()
    with torch.device("meta"), _quiet():
        model: Any = _blank(config, chosen, trust_remote_code)
        if recompute and not can_recompute(model):
            raise ConfigurationError(f"{type(model).__name__} does not support activation recompute: omit --recompute")
        if recompute:
            model.gradient_checkpointing_enable()
        if packing is not None:
            quantize_blank(model, packing)
        if lora:
            model = _adapted(model, lora, lora_targets)
    trained: nn.Module = model.train()
    return trained


def _blank(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    is_known = any(hasattr(transformers, name) for name in getattr(config, "architectures", None) or ())
    if trust_remote_code and not is_known and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=True)
    return _class_of(config)._from_config(config, dtype=dtype)


def _packing(config: Any, source: str, given: BitsAndBytesConfig | None, lora: int) -> BitsAndBytesConfig | None:
    """The quantization config of the folder or, if its weights are not quantized, `given`."""
    saved = getattr(config, "quantization_config", None)
    if saved is None:
        return given
    what = f"the weights in {source} are quantized (with {method_of(saved)})"
    if method_of(saved) != "bitsandbytes":
        raise ConfigurationError(
            f"{what}, and stages cannot load such weights. To plan for a copy of the model without quantization, pass "
            "quantization_config=null"
        )
    if given is not None:
        raise ConfigurationError(f"{what}, so they cannot be quantized again: omit --quantize")
    if not lora:
        raise ConfigurationError(f"{what}, so there is nothing to train: add adapters with --lora RANK")
    packing: BitsAndBytesConfig = quantization_of(config, source, given)
    return packing


def _adapted(model: Any, rank: int, names: str | None) -> nn.Module:
    from peft import LoraConfig, get_peft_model  # takes a second to import

    targets = names.split(",") if names else "all-linear"
    try:
        return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    except ValueError as error:
        raise ConfigurationError(f"peft cannot add adapters to {type(model).__name__}: {error}") from error


def precision_of(model: nn.Module) -> str:
    """The plugin's `precision` for this model. It corresponds to the dtype of most floating-point elements in the
    model's parameters (with adapters, in its frozen parameters)."""
    counts: Counter[torch.dtype] = Counter()
    parameters = [*filter(Tensor.is_floating_point, model.parameters())]  # quantized weights are integers
    frozen = [p for p in parameters if not p.requires_grad] if has_adapters(model) else []
    for parameter in frozen or parameters:
        counts[parameter.dtype] += parameter.numel()
    names = {dtype: name for name, dtype in DTYPE_NAMES.items()}
    return names.get(max(counts, key=counts.__getitem__), "fp32") if counts else "fp32"


def _config(source: str, fields: dict[str, Any], trust_remote_code: bool, options: Mapping[str, Any]) -> Any:
    path = Path(source)
    if not path.exists() and source.count("/") == 1:
        path = _of_hub(source)
    given = {**options, **fields}
    with explained(lambda error: ConfigurationError(_what(source, path, fields, error))):
        if path.exists():
            config, unknown = AutoConfig.from_pretrained(
                path, return_unused_kwargs=True, trust_remote_code=trust_remote_code, **given
            )
            unknown = unknown.keys() & fields.keys()
        else:
            config = AutoConfig.for_model(source, **given)
            plain = AutoConfig.for_model(source)
            unknown = {key for key in fields if not hasattr(plain, key) and not _reads(config, key)}
    if unknown:
        key, known = min(unknown), config.to_dict().keys() - fields.keys()
        raise ConfigurationError(f"{type(config).__name__} has no field {key}: {hint(key, sorted(known))}")
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # any token will do
    return config


def _reads(config: Any, key: str) -> bool:
    """Whether the model's code reads this config field. A config may lack a field that the code reads. For example,
    Qwen3-MoE's config may lack head_dim."""
    code = inspect.getsource(sys.modules[_class_of(config).__module__])
    return re.search(rf"""config\.{key}\b|["']{key}["']""", code) is not None


def _of_hub(name: str) -> Path:
    """The path of a model's config.json in the Hugging Face Hub cache. Raises ConfigurationError if the file is
    missing."""
    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=True))
    except (OSError, ValueError):
        raise ConfigurationError(
            f"{name} is neither a local path nor a model in the Hugging Face cache. Pass a folder, a config.json or a "
            "model type. To use a model from the Hub, download its config once with "
            f"huggingface_hub.hf_hub_download({name!r}, 'config.json')"
        ) from None


def _what(source: str, path: Path, fields: dict[str, Any], error: Exception) -> str:
    if path.exists() and "trust_remote_code" in str(error):
        return (
            f"{source} requires custom code, which this command does not run: in Python, pass a model built with "
            "from_pretrained(..., trust_remote_code=True)"
        )
    if path.exists():
        valid = f"model config that is valid with {', '.join(fields)}" if fields else "valid model config"
        return f"{source} does not contain a {valid}: {summary(error)}"
    types = list(transformers.CONFIG_MAPPING.keys())
    if source in types:
        return f"the config of {source} does not support these fields: {summary(error)}"
    close = difflib.get_close_matches(source, types, n=3)
    names = f"did you mean {' or '.join(close)}?" if close else "llama, gpt2, t5, vit, ..."
    return f"{source} is not a folder, a config.json or a transformers model type ({names})"


def _field(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise ConfigurationError(f"{text!r} is not a config field: write key=value, such as hidden_size=4096")
    try:
        return key, json.loads(value)
    except ValueError:
        named = {"True": True, "False": False, "None": None}
        return key, named.get(value, value)


def _class_of(config: Any) -> Any:
    """The model class that the config names, if transformers has it. Otherwise, the model class of the first task that
    has a class for this config."""
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    first = ("Seq2SeqLM", "SpeechSeq2Seq") if getattr(config, "is_encoder_decoder", False) else ("MaskedLM",)
    for task in (*first, *TASKS):
        mapping = getattr(transformers, f"AutoModelFor{task}")._model_mapping
        if type(config) in mapping:
            return mapping[type(config)]
    raise ConfigurationError(
        f"transformers has no model with a loss for {type(config).__name__}: set architectures in the config, or pass "
        "a model and a criterion in Python (pipeshard.plan, pipeshard.initialize)"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that suppresses warnings, and transformers' log messages below the level ERROR."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
