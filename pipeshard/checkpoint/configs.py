"""Configs: the JSON documents beside a model's weights, measured before anything is made of them.

A config of a few bytes may name so many layers, labels or ranks that transformers and peft would fill the memory, or
never come back: they make what it says, and look at no bounds.
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AutoConfig, GenerationConfig

from pipeshard.checkpoint.files import read_document
from pipeshard.errors import CheckpointError, ConfigurationError
from pipeshard.hf import ADAPTER_CONFIG

COUNTED = re.compile(r"(^|_)(num|n|layers?|depths?|blocks|stages|heads|groups|experts|hashes|buckets)(_|$)")
NOT_COUNTED = re.compile(r"param|token|sample|step|flop|size")  # of the training, or of a text
MOST, LABELS, MODULES = 1_000_000, 500_000, 200_000  # of what a config counts, of its labels, of what it makes
RANK, VIRTUAL = 65_536, 2**28  # what an adapter may count, and the numbers of its virtual tokens
PROMPT = "num_virtual_tokens", "token_dim", "num_layers", "num_transformer_submodules"
PATIENCE = 10.0  # seconds in which the names of modules are to be matched


def blank_model(auto_class: Any, path: Path, gguf_file: str | None, options: dict[str, Any]) -> nn.Module:
    """A model on meta, in evaluation mode, which Booster is told to load; see PipelinePlugin.from_pretrained."""
    path = path if path.is_dir() else _cached(path)
    if gguf_file is not None and not (path / gguf_file).is_file():
        raise CheckpointError(f"{path / gguf_file} is not there: pass a folder that has it")
    dtype = options.pop("dtype", options.pop("torch_dtype", "auto"))
    extra: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    extra["trust_remote_code"] = options.pop("trust_remote_code", False)  # None asks on the terminal
    config, unused = config_of(path, **extra, **options)
    if unknown := unused.keys() & options.keys():
        raise ConfigurationError(f"{type(config).__name__} has no {', '.join(sorted(unknown))}: pass fields it has")
    dtype = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else dtype
    make = getattr(auto_class, "from_config", None) or auto_class._from_config
    with torch.device("meta"), _counting(path):
        model: Any = make(config, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    if (path / "generation_config.json").exists():
        model.generation_config = generation_config_of(path)
    model._pretrained = str(path / gguf_file if gguf_file else path)
    return model.eval()


def config_of(folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """What `AutoConfig.from_pretrained` makes of a folder with these options, and those of them that are unknown.

    Raises CheckpointError where that is not a config of a model, or one that is not to be believed.
    """
    with _named(f"{folder} has no config of a model"):
        for file in sorted(folder.glob("config*.json")):  # one names others, for other versions of transformers
            _measure(read_document(file))
        config, unknown = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **options)
        return config, unknown


def generation_config_of(folder: Path) -> Any:
    """What `GenerationConfig.from_pretrained` makes of a folder; raises CheckpointError for anything else."""
    with _named(f"the generation_config.json of {folder} cannot be read"):
        return GenerationConfig.from_dict(read_document(folder / "generation_config.json"))


def check_adapter(folder: Path, model: nn.Module) -> None:
    """Raise CheckpointError where peft would be lost with the adapter config of a folder and this model."""
    with _named(f"the {ADAPTER_CONFIG} of {folder} cannot be read"):
        document = read_document(folder / ADAPTER_CONFIG)
        for key, number in _numbers(document):
            if number > RANK:
                raise ValueError(f"it says {key}={number}, more than {RANK}")
        prompt = [document.get(key) for key in PROMPT]
        if (values := math.prod(number for number in prompt if type(number) is int)) > VIRTUAL:
            raise ValueError(f"its virtual tokens are {values} numbers, more than {VIRTUAL}")
        keys = ("target_modules", "exclude_modules", "layers_pattern")
        patterns = [document[key] for key in keys if isinstance(document.get(key), str)]
        patterns += [key for kind in ("rank_pattern", "alpha_pattern") for key in _keys(document.get(kind))]
        _match(patterns, [name for name, _ in model.named_modules()])


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error


@contextmanager
def _counting(folder: Path) -> Iterator[None]:
    """Inside, modules are made, but not without end; what else goes wrong is the config's fault, too."""
    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1
        if made > MODULES:
            raise ValueError(f"it is of more than {MODULES} modules")

    handle = register_module_module_registration_hook(count)
    try:
        with _named(f"no model can be made of the config of {folder}"):
            yield
    finally:
        handle.remove()


def _measure(document: Any) -> None:
    """Raise ValueError for a number that transformers would make as many things of."""
    for key, number in _numbers(document):
        is_counted = COUNTED.search(key) and not NOT_COUNTED.search(key)
        most = LABELS if key == "num_labels" else MOST if is_counted else None
        if most is not None and number > most:
            raise ValueError(f"it says {key}={number}, more than {most}")


def _numbers(document: Any) -> Iterator[tuple[str, int]]:
    """The whole numbers in it, with the names that they have, or the lists that they are in."""
    rest = [("", document)]
    while rest:
        key, value = rest.pop()
        if isinstance(value, dict):
            rest += value.items()
        elif isinstance(value, list):
            rest += [(key, inner) for inner in value]
        elif isinstance(value, int):
            yield key, value


def _keys(mapping: Any) -> list[str]:
    return list(mapping) if isinstance(mapping, dict) else []


MATCHING = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    for name in names:
        re.fullmatch(pattern, name), re.match(rf"(.*\\.)?({pattern})$", name)
"""


def _match(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Try regular expressions on names in a process of its own: some never end, and hold Python's lock meanwhile."""
    if not patterns:
        return
    command = [sys.executable, "-I", "-S", "-c", MATCHING]
    try:
        subprocess.run(
            command, input=json.dumps([patterns, names]), text=True, capture_output=True, timeout=PATIENCE, check=True
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"its patterns {patterns} are not matched within {PATIENCE:g} seconds") from None
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:]
        raise ValueError(f"its patterns {patterns} are not regular expressions: {' '.join(last)}") from None


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
