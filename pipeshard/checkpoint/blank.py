"""Blank: a checkpoint folder's model, built on meta without values. After the split, each stage loads its weights."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from pipeshard.checkpoint.safetensors_files import stored_dtype
from pipeshard.checkpoint.untrusted import folder_config, generation_config_of, limited_modules
from pipeshard.errors import CheckpointError, ConfigurationError
from pipeshard.hf import kept_in_fp32
from pipeshard.split.blank import note_blank
from pipeshard.split.quantized import quantization_of, quantize_blank

RESIZED_HEAD = (
    " (for a head of another size, call transformers' from_pretrained(..., ignore_mismatched_sizes=True), save the "
    "model with save_pretrained, and load the new folder)"
)


# Values of transformers' options that PipelinePlugin.from_pretrained already follows, by option.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "low_cpu_mem_usage": (None, True, False),
    "use_safetensors": (None, True),
    "device_map": (None,),
    "tp_plan": (None,),
    "output_loading_info": (None, False),
    "ignore_mismatched_sizes": (None, False),
}


def auto_dtype(folder: Path | None) -> torch.dtype:
    """The dtype for dtype="auto" if the config specifies no dtype: the dtype of the folder's weights, or else fp32."""
    return (stored_dtype(folder) if folder else None) or torch.float32


def blank_model(auto_class: Any, path: Path, gguf_file: str | None, options: dict[str, Any]) -> nn.Module:
    """Build a folder's model on the meta device, in evaluation mode, for PipelinePlugin.from_pretrained. `boost` loads
    the weights."""
    if gguf_file is not None and not (path / gguf_file).is_file():
        raise CheckpointError(f"{path / gguf_file} is not a file: pass a folder that contains {gguf_file}")
    dtype = options.pop("dtype", options.pop("torch_dtype", "auto"))
    extra: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    trusted = {"trust_remote_code": options.pop("trust_remote_code", False)}  # None would prompt on the terminal
    quantization = options.pop("quantization_config", None)
    kind = getattr(auto_class, "config_class", None) or AutoConfig  # a model class reads its part of a composite config
    for name, values in WITHOUT_EFFECT.items():
        if options.get(name) in values:
            options.pop(name, None)
    config, unused = folder_config(path, kind, **extra, **trusted, **options)
    if unknown := unused.keys() & options.keys():
        remedy = RESIZED_HEAD if "ignore_mismatched_sizes" in unknown else ""
        raise ConfigurationError(
            f"{type(config).__name__} has no {', '.join(sorted(unknown))}: from_pretrained accepts only its own "
            f"options and fields of the config{remedy}"
        )
    config.name_or_path = config.name_or_path or str(path)  # AutoConfig sets it; Trainers load the tokenizer from there
    quantization = quantization_of(config, path, quantization)
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigurationError(f"dtype={dtype!r} is unknown: use 'auto', or a torch dtype such as 'bfloat16'")
    if dtype == "auto":
        stored = auto_dtype(None if gguf_file else path)
        dtype = getattr(config, "dtype", None) or stored
    is_auto = hasattr(auto_class, "from_config")
    make, code = (auto_class.from_config, trusted) if is_auto else (auto_class._from_config, {})
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.device("meta"), limited_modules(path):
        model: Any = make(config, dtype=dtype, **code)
    for tensor in kept_in_fp32(model, dtype):
        tensor.data = tensor.data.float()
    if quantization is not None:
        quantize_blank(model, quantization)
    if (path / "generation_config.json").exists():
        model.generation_config = generation_config_of(path)
    model._pretrained = str(path / gguf_file if gguf_file else path)
    note_blank(model)
    return model.eval()
