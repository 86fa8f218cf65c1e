"""Untrusted: files of unknown origin (JSON, configs, pickles), checked before anything is built from them.

A config of a few bytes may request so many layers, labels or ranks that transformers and peft would fill the memory, or
never return: they check no bounds. And `torch.load(weights_only=True)` executes no code, but a
pickle of a few bytes may still take all memory or never end.
"""

import json
import math
import pickletools
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeGuard

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AutoConfig, GenerationConfig

from pipeshard.distributed.collectives import reason
from pipeshard.errors import CheckpointError, ConfigurationError, explained, summary
from pipeshard.hf import ADAPTER_CONFIG
from pipeshard.split.quantized import quantization_of, quantize_blank

LARGEST_JSON = 64 << 20  # bytes; an index of a hundred thousand tensors has a tenth of it
VALUES = 1_000_000  # each of which takes up to a hundred bytes


def read_document(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises ValueError, or OSError, for anything else, for a file of more than 64 MiB before it is read, and for a file
    with more than a million values before they are built.
    """
    if not file.is_file():
        raise FileNotFoundError("it does not exist")
    if (size := file.stat().st_size) > LARGEST_JSON:
        raise ValueError(f"it is {size} bytes long, more than the limit of {LARGEST_JSON}")
    text = file.read_text("utf-8")
    if (values := sum(map(text.count, ",[{"))) > VALUES:
        raise ValueError(f"it contains about {values} values, more than the limit of {VALUES}")
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"it must be an object, not a {type(content).__name__}")
    return content


def is_inside(name: object) -> TypeGuard[str]:
    """Whether this names a file in a folder or in a folder within it; a link there may lead anywhere, as in the caches
    of the Hugging Face Hub."""
    if not isinstance(name, str) or "\0" in name:
        return False
    path = PurePosixPath(name)
    return name == str(path) != "." and not path.is_absolute() and ".." not in path.parts


COUNTED = re.compile(r"(^|_)(num|n|layers?|depths?|blocks|stages|heads|groups|experts|hashes|buckets)(_|$)")
NOT_COUNTED = re.compile(r"param|token|sample|step|flop|size")  # of the training, or of a text
THINGS, LABELS, MODULES = 1_000_000, 500_000, 200_000  # of what a config counts, of its labels, of what it makes
RANK, VIRTUAL = 65_536, 2**28  # what an adapter may count, and the numbers of its virtual tokens
PROMPT = "num_virtual_tokens", "token_dim", "num_layers", "num_transformer_submodules"
MATCHING_SECONDS = 10.0  # seconds in which the names of modules are to be matched


def blank_model(auto_class: Any, path: Path, gguf_file: str | None, options: dict[str, Any]) -> nn.Module:
    """A model on meta, in evaluation mode, which Booster will load; see PipelinePlugin.from_pretrained."""
    path = path if path.is_dir() else _cached(path)
    if gguf_file is not None and not (path / gguf_file).is_file():
        raise CheckpointError(f"{path / gguf_file} does not exist: pass a folder that contains it")
    dtype = options.pop("dtype", options.pop("torch_dtype", "auto"))
    extra: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    extra["trust_remote_code"] = options.pop("trust_remote_code", False)  # None asks on the terminal
    quantization = options.pop("quantization_config", None)
    config, unused = folder_config(path, **extra, **options)
    if unknown := unused.keys() & options.keys():
        raise ConfigurationError(
            f"{type(config).__name__} has no {', '.join(sorted(unknown))}: pass only fields of the config"
        )
    quantization = quantization_of(config, path, quantization)
    dtype = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else dtype
    make = getattr(auto_class, "from_config", None) or auto_class._from_config
    with torch.device("meta"), _counting(path):
        model: Any = make(config, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    if quantization is not None:
        quantize_blank(model, quantization)
    if (path / "generation_config.json").exists():
        model.generation_config = generation_config_of(path)
    model._pretrained = str(path / gguf_file if gguf_file else path)
    return model.eval()


def folder_config(folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The result of `AutoConfig.from_pretrained` for a folder with these options, and the unknown ones among them.

    Raises CheckpointError if it is not a config of a model, or has implausible sizes.
    """
    with _explaining(f"{folder} does not contain a valid model config"):
        for file in sorted(folder.glob("config*.json")):  # one names others, for other versions of transformers
            _measure_config(read_document(file))
        config, unknown = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **options)
        return config, unknown


def generation_config_of(folder: Path) -> Any:
    """The result of `GenerationConfig.from_pretrained` for a folder; raises CheckpointError for anything else."""
    with _explaining(f"the generation_config.json of {folder} cannot be read"):
        return GenerationConfig.from_dict(read_document(folder / "generation_config.json"))


def check_adapter(folder: Path, model: nn.Module) -> None:
    """Raise CheckpointError if peft would fail or hang with the adapter config of a folder and this model."""
    with _explaining(f"the {ADAPTER_CONFIG} of {folder} cannot be read"):
        document = read_document(folder / ADAPTER_CONFIG)
        for key, number in _whole_numbers(document):
            if number > RANK:
                raise ValueError(f"{key}={number} is more than the limit of {RANK}")
        prompt = [document.get(key) for key in PROMPT]
        if (values := math.prod(number for number in prompt if type(number) is int)) > VIRTUAL:
            raise ValueError(f"its virtual tokens contain {values} numbers, more than the limit of {VIRTUAL}")
        keys = ("target_modules", "exclude_modules", "layers_pattern")
        patterns = [document[key] for key in keys if isinstance(document.get(key), str)]
        mappings = [document.get(key) for key in ("rank_pattern", "alpha_pattern")]
        patterns += [key for mapping in mappings if isinstance(mapping, dict) for key in mapping]
        _match(patterns, [name for name, _ in model.named_modules()])


@contextmanager
def _explaining(what: str) -> Iterator[None]:
    with explained(  # transformers and peft raise anything for what is not as they expect it
        lambda error: CheckpointError(f"{what}: {summary(error)}")
    ):
        yield


@contextmanager
def _counting(folder: Path) -> Iterator[None]:
    """Inside, only a limited number of modules may be built; other errors are attributed to the config, too."""
    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1
        if made > MODULES:
            raise ValueError(f"it has more than {MODULES} modules")

    handle = register_module_module_registration_hook(count)
    try:
        with _explaining(f"no model can be built from the config of {folder}"):
            yield
    finally:
        handle.remove()


def _measure_config(document: Any) -> None:
    """Raise ValueError for a number that would make transformers build as many objects."""
    for key, number in _whole_numbers(document):
        is_counted = COUNTED.search(key) and not NOT_COUNTED.search(key)
        most = LABELS if key == "num_labels" else THINGS if is_counted else None
        if most is not None and number > most:
            raise ValueError(f"{key}={number} is more than the limit of {most}")


def _whole_numbers(document: Any) -> Iterator[tuple[str, int]]:
    """The integers in a document, with their names, or the lists that they are in."""
    rest = [("", document)]
    while rest:
        key, value = rest.pop()
        if isinstance(value, dict):
            rest += value.items()
        elif isinstance(value, list):
            rest += [(key, inner) for inner in value]
        elif isinstance(value, int):
            yield key, value


MATCHING = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    for name in names:
        re.fullmatch(pattern, name), re.match(rf"(.*\\.)?({pattern})$", name)
"""


def _match(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Try regular expressions on names in a separate process: some never end, and hold the GIL meanwhile."""
    if not patterns:
        return
    command = [sys.executable, "-I", "-S", "-c", MATCHING]
    try:
        subprocess.run(
            command,
            input=json.dumps([patterns, names]),
            text=True,
            capture_output=True,
            timeout=MATCHING_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"matching its patterns {patterns} takes more than {MATCHING_SECONDS:g} seconds") from None
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:]
        raise ValueError(f"its patterns {patterns} are not valid regular expressions: {' '.join(last)}") from None


def _cached(name: Path) -> Path:
    """The folder of a model with this name in the cache of the Hugging Face Hub, if it was downloaded."""
    message = f"{name} does not exist: pass a folder that save_pretrained wrote"
    try:
        return Path(snapshot_download(str(name), local_files_only=True))
    except HFValidationError:  # no name that the hub can have
        raise CheckpointError(message) from None
    except Exception:  # the hub's errors are of several kinds, which change; whatever it is, the model is not here
        raise CheckpointError(
            f"{message}, or download a model of the Hugging Face Hub once, before the ranks start, with "
            f"huggingface_hub.snapshot_download({str(name)!r})"
        ) from None


# Steps to unpickle a file, and values in what it makes: an optimizer of 100,000 tensors takes as many.
MOST_STEPS = 4_000_000
MADE_OF = re.compile(
    r"collections (OrderedDict|Counter)|_codecs encode|torch Size|torch (\w+Storage|[a-z0-9_]+)"
    r"|torch\._utils _rebuild_(tensor(_v2)?|parameter|meta_tensor_no_storage)|torch\._tensor _rebuild_from_type_v2"
    r"|torch\.storage (Untyped|Typed)Storage"
)


def load_plain(file: Path, kind: str, advice: str) -> Any:
    """Load a file of `torch.save` with `torch.load(weights_only=True)`; tensors are on the CPU, mapped from the file.

    Raises CheckpointError, which says that the file is not `kind`, with the `advice`, for any other file.
    """
    with explained(  # zipfile, pickletools and torch raise anything for a broken file
        lambda error: CheckpointError(f"{file} is not {kind} ({reason(error)}): {advice}")
    ):
        if not file.is_file():
            raise FileNotFoundError("it does not exist")
        zipped = zipfile.is_zipfile(file)
        _refuse_bombs(file, zipped)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)


def has_content(tensor: Tensor) -> bool:
    """Whether the file has a value for each element: a description may declare tensors of any shape without data."""
    return not tensor.is_meta and tensor.layout is torch.strided and tensor.nbytes <= tensor.untyped_storage().nbytes()


def _refuse_bombs(file: Path, zipped: bool) -> None:
    """Refuse pickles that could take all memory or never end. A few bytes can create gigabytes (`bytearray(2**40)`), or
    nested tuples whose hash never ends, in C, where nothing interrupts it. `torch.save` of plain values needs neither,
    and it never compresses: compressed data may have any size once unpacked."""
    if zipped:
        with zipfile.ZipFile(file) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise ValueError(f"{packed[0]!r} in it is compressed, but torch.save does not compress")
            (name,) = (name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl"))
            with archive.open(name) as content:
                _measure_pickle(_Bounded(content, file.stat().st_size))
        return
    with file.open("rb") as content:  # as torch wrote before 1.6: a magic number, versions, the object, its storages
        for _ in range(5):
            _measure_pickle(_Bounded(content, file.stat().st_size))


class _Bounded:
    """A file that never reads more at once than it has: Python first allocates the requested size."""

    def __init__(self, content: IO[bytes], size: int) -> None:
        self.content, self.size = content, size
        self.readline, self.tell = content.readline, content.tell

    def read(self, count: int) -> bytes:
        return self.content.read(min(count, self.size))


def _measure_pickle(content: Any) -> None:
    """Walk through a pickle without building anything; raises ValueError for opcodes that `torch.save` never uses for
    plain values, or if the values in it, counted with every reference, are too many."""
    # How many values are in each, in a list, as pickles refer to them; None is a mark.
    stack: list[list[int] | None] = []
    memo: dict[Any, list[int]] = {}
    for k, (code, argument, _) in enumerate(pickletools.genops(content)):
        if k > MOST_STEPS:
            raise ValueError(f"unpickling it takes more than {MOST_STEPS} steps: use safetensors")
        if code.name == "GLOBAL" and not MADE_OF.fullmatch(str(argument)):
            raise ValueError(f"Unsupported global: GLOBAL {str(argument).replace(' ', '.')} is not a plain value")
        if code.name == "MARK":
            stack.append(None)
        elif code.name.endswith("PUT"):
            memo[argument] = stack[-1] or [1]
        elif code.name.endswith("GET"):
            stack.append(memo[argument])
        else:
            taken = []
            before = [each is pickletools.markobject for each in code.stack_before]
            if any(before):
                while (top := stack.pop()) is not None:
                    taken.append(top)
            for _ in range(before.index(True) if any(before) else len(before)):
                taken.append(stack.pop() or [1])
            total = 1 + sum(count for (count,) in taken)
            if total > MOST_STEPS:
                raise ValueError(f"it expands to more than {MOST_STEPS} values")
            if code.name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"):
                taken[-1][0] = total  # the object itself, below what is put into it
                stack.append(taken[-1])
            elif code.stack_after:
                stack.append([total])
