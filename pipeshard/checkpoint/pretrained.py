"""Pretrained: the model of a Hugging Face folder, without its weights."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from torch import nn
from transformers import AutoConfig, GenerationConfig

from pipeshard.errors import CheckpointError, ConfigurationError


def blank_model(auto_class: Any, path: Path, gguf_file: str | None, options: dict[str, Any]) -> nn.Module:
    """A model on meta, in evaluation mode, which Booster is told to load; see PipelinePlugin.from_pretrained."""
    path = path if path.is_dir() else _cached(path)
    if gguf_file is not None and not (path / gguf_file).is_file():
        raise CheckpointError(f"{path / gguf_file} is not there: pass a folder that has it")
    dtype = options.pop("dtype", options.pop("torch_dtype", "auto"))
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        config, unknown = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **extra, **options)
    except Exception as error:
        raise CheckpointError(f"{path} has no config of a model: {type(error).__name__}: {error}") from error
    if unknown := unknown.keys() & options.keys():
        raise ConfigurationError(f"{type(config).__name__} has no {', '.join(sorted(unknown))}: pass fields it has")
    dtype = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else dtype
    make = getattr(auto_class, "from_config", None) or auto_class._from_config
    with torch.device("meta"):
        model: Any = make(config, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    if (path / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(path)
    model._pretrained = str(path / gguf_file if gguf_file else path)
    return model.eval()


def _cached(name: Path) -> Path:
    """The folder of a model that the Hugging Face hub has under this name, if it was downloaded."""
    message = f"{name} is not there: pass a folder that save_pretrained wrote"
    try:
        return Path(snapshot_download(str(name), local_files_only=True))
    except HFValidationError:  # no name that the hub can have
        raise CheckpointError(message) from None
    except Exception:
        raise CheckpointError(
            f"{message}, or, of a model of the Hugging Face hub, download it once, before the ranks start, by "
            f"huggingface_hub.snapshot_download({str(name)!r})"
        ) from None
