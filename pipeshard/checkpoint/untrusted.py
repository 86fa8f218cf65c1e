"""Untrusted: files of unknown origin (JSON, configs, pickles), checked before anything is built from them.

A config of a few bytes may request so many layers, labels or ranks that transformers and peft exhaust the memory or
never return, since they check no bounds. `torch.load(weights_only=True)` executes no code, but a pickle of a few bytes
may still exhaust the memory or never finish.
"""

import io
import json
import math
import os
import pickletools
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AutoConfig, GenerationConfig

from pipeshard.distributed.collectives import encode, reason
from pipeshard.errors import CheckpointError, explained, summary
from pipeshard.hf import ADAPTER_CONFIG

ZIP = b"PK\x03\x04"  # the beginning of a file of torch.save
LARGEST_JSON = 64 << 20  # bytes; an index of 100,000 tensors takes a tenth of this
VALUES = 1_000_000  # the maximum number of values in a JSON document; each takes up to 100 bytes of memory


def read_document(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises OSError if the file cannot be read. Raises ValueError if the file does not contain a JSON object, is larger
    than 64 MiB (checked before the file is read), or has more than a million values (checked before the values are
    built).
    """
    if not file.is_file():
        raise FileNotFoundError("it does not exist")
    if (size := file.stat().st_size) > LARGEST_JSON:
        raise ValueError(f"the file is {size} bytes long, more than the limit of {LARGEST_JSON}")
    text = file.read_text("utf-8")
    if (values := sum(map(text.count, ",[{"))) > VALUES:
        raise ValueError(f"the file contains about {values} values, more than the limit of {VALUES}")
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"the file must contain a JSON object, but contains a value of type {type(content).__name__}")
    return content


def is_inside(name: object) -> TypeGuard[str]:
    """Whether `name` is a relative path that stays inside its folder. Links may still point outside, as in the caches
    of the Hugging Face Hub."""
    if not isinstance(name, str) or "\0" in name:
        return False
    path = PurePosixPath(name)
    return name == str(path) != "." and not path.is_absolute() and ".." not in path.parts


COUNTED = re.compile(r"(^|_)(num|n|layers?|depths?|blocks|stages|heads|groups|experts|hashes|buckets)(_|$)")
NOT_COUNTED = re.compile(r"param|token|sample|step|flop|size")  # counts of training or text, not of objects to build
THINGS, LABELS, MODULES = 1_000_000, 500_000, 200_000  # limits for a config's counts, for labels and for modules
RANK, VIRTUAL = 65_536, 2**28  # limits of a count in an adapter config, and of the elements of virtual tokens
# Numbers in an adapter config that are not sizes: token ids, training steps, and seeds.
NOT_SIZES = re.compile(r"(token_ids|token_indices|invocation_tokens|total_step|tinit|tfinal|warmup|seed|prng_key)$")
PROMPT = "num_virtual_tokens", "token_dim", "num_layers", "num_transformer_submodules"
MATCHING_SECONDS = 10.0  # time limit for matching patterns against module names


def folder_config(folder: Path, kind: Any = AutoConfig, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return the config that `kind.from_pretrained` loads with these options, and the unused options.

    Raises CheckpointError if the folder does not contain a valid model config, or if the config has implausible sizes.
    """
    with _explaining(f"{folder} does not contain a valid model config"):
        for file in sorted(folder.glob("config*.json")):  # a config may refer to configs for other versions
            _measure_config(read_document(file))
        config, unknown = kind.from_pretrained(folder, return_unused_kwargs=True, **options)
        return config, unknown


def generation_config_of(folder: Path) -> Any:
    """Load the GenerationConfig in a folder. Raises CheckpointError if the config cannot be read."""
    with _explaining(f"the generation_config.json of {folder} cannot be read"):
        return GenerationConfig.from_dict(read_document(folder / "generation_config.json"))


def check_adapter(folder: Path, model: nn.Module) -> None:
    """Raise CheckpointError if a folder's adapter config could make peft exhaust the memory or hang with this model."""
    with _explaining(f"the {ADAPTER_CONFIG} of {folder} cannot be read"):
        document = read_document(folder / ADAPTER_CONFIG)
        sizes = {key: value for key, value in document.items() if not NOT_SIZES.search(key)}
        for key, number in _whole_numbers(sizes):
            if number > RANK:
                raise ValueError(f"{key}={number} is more than the limit of {RANK}")
        prompt = [document.get(key) for key in PROMPT]
        if (values := math.prod(number for number in prompt if type(number) is int)) > VIRTUAL:
            raise ValueError(f"the virtual tokens would contain {values} elements, more than the limit of {VIRTUAL}")
        keys = ("target_modules", "exclude_modules", "layers_pattern")
        patterns = [document[key] for key in keys if isinstance(document.get(key), str)]
        mappings = [document.get(key) for key in ("rank_pattern", "alpha_pattern")]
        patterns += [key for mapping in mappings if isinstance(mapping, dict) for key in mapping]
        _match(patterns, [name for name, _ in model.named_modules()])


def _explaining(what: str) -> AbstractContextManager[None]:
    # transformers and peft may raise any error for unexpected content
    return explained(lambda error: CheckpointError(f"{what}: {summary(error)}"))


@contextmanager
def limited_modules(folder: Path) -> Iterator[None]:
    """Context manager that limits the number of modules in a model while the model is built from the config in
    `folder`. Converts all errors to CheckpointErrors that name the folder."""
    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1
        if made > MODULES:
            raise ValueError(f"the model would have more than {MODULES} modules")

    handle = register_module_module_registration_hook(count)
    try:
        with _explaining(f"no model can be built from the config of {folder}"):
            yield
    finally:
        handle.remove()


def _measure_config(document: Any) -> None:
    """Raise ValueError if the config requests more objects than a limit allows."""
    for key, number in _whole_numbers(document):
        is_counted = COUNTED.search(key) and not NOT_COUNTED.search(key)
        most = LABELS if key == "num_labels" else THINGS if is_counted else None
        if most is not None and number > most:
            raise ValueError(f"{key}={number} is more than the limit of {most}")


def _whole_numbers(document: Any) -> Iterator[tuple[str, int]]:
    """Yield the integers in a document, each with its key or the key of the list that contains it."""
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
    """Match the patterns with all names in a separate process, since matching never ends for some regular expressions,
    and holds the GIL.

    Raises ValueError if matching does not finish in time, or if an expression is invalid.
    """
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
        raise ValueError(f"matching the patterns {patterns} takes more than {MATCHING_SECONDS:g} seconds") from None
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:]
        raise ValueError(
            f"one of the patterns {patterns} is not a valid regular expression: {' '.join(last)}"
        ) from None


# The maximum number of opcodes in a pickle, and of the values that a pickle builds. An optimizer state of 100,000
# tensors has about this many.
MOST_STEPS = 4_000_000
MADE_OF = re.compile(
    r"collections (OrderedDict|Counter)|_codecs encode|torch Size|torch (\w+Storage|[a-z0-9_]+)"
    r"|torch\._utils _rebuild_(tensor(_v2)?|parameter|meta_tensor_no_storage)|torch\._tensor _rebuild_from_type_v2"
    r"|torch\.storage (Untyped|Typed)Storage"
)


def load_plain(file: Path, kind: str, advice: str) -> Any:
    """Load a `torch.save` file with `torch.load(weights_only=True)`. Tensors are on the CPU, memory-mapped if possible.

    Raises CheckpointError for any other file. The message says that the file is not `kind`, and ends with the `advice`.
    """
    if _is_truncated(file):
        raise CheckpointError(f"{file} is incomplete (its end is missing): copy or save it again")
    with explained(  # zipfile, pickletools and torch may raise any error for a damaged file
        lambda error: CheckpointError(f"{file} is not {kind} ({reason(error)}): {advice}")
    ):
        if not file.is_file():
            raise FileNotFoundError("it does not exist")
        with file.open("rb") as content:
            _refuse_bombs(content)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))


def _is_truncated(file: Path) -> bool:
    """Whether the file begins like a file of `torch.save`, but lacks the zip directory at its end."""
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return content.read(len(ZIP)) == ZIP and not zipfile.is_zipfile(file)


def plain(value: Any, what: str, advice: str = " in its state_dict()") -> Any:
    """`value` with NumPy scalars converted to Python numbers, so that `load_plain` can read a file that contains the
    result.

    Raises CheckpointError if `load_plain` could not read a file that contains this value. The message names `what`, and
    ends with the `advice`.
    """
    if value is None or type(value) in (bool, int, float, str):  # for speed: optimizers have many of these
        return value
    with explained(
        lambda error: CheckpointError(
            f"{what} cannot be saved ({reason(error)}): use tensors, numbers, strings, or lists, tuples and dicts of "
            f"these{advice}"
        )
    ):
        value = without_scalars(value)
        _refuse_bombs(io.BytesIO(encode(value)))
    return value


def without_scalars(value: Any) -> Any:
    """`value` with NumPy scalars converted to Python numbers, including scalars inside lists, tuples and dicts. Raises
    TypeError for the builtin types that `load_plain` refuses."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (set, frozenset, bytearray, complex)):
        raise TypeError(f"a value of type {type(value).__name__} cannot be saved")
    if type(value) is dict:
        return {without_scalars(key): without_scalars(each) for key, each in value.items()}
    return type(value)(map(without_scalars, value)) if type(value) in (list, tuple) else value


def has_content(tensor: Tensor) -> bool:
    """Whether the tensor's storage has a value for each element. A file may declare tensors of any shape without
    data."""
    return not tensor.is_meta and tensor.layout is torch.strided and tensor.nbytes <= tensor.untyped_storage().nbytes()


def _refuse_bombs(file: IO[bytes]) -> None:
    """Raise ValueError for pickles that could exhaust the memory or never finish.

    A few bytes can create gigabytes (`bytearray(2**40)`), or nested tuples whose hash never finishes, in C code that
    cannot be interrupted. For plain values, `torch.save` uses neither. Compressed data is also refused: it may have any
    size after decompression, and `torch.save` never compresses.
    """
    size = file.seek(0, os.SEEK_END)
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise ValueError(f"the entry {packed[0]!r} is compressed, but torch.save does not compress")
            (name,) = (name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl"))
            with archive.open(name) as content:
                _measure_pickle(_Bounded(content, size))
        return
    file.seek(0)
    for _ in range(5):  # the format before torch 1.6: a magic number, versions, the object, storages
        _measure_pickle(_Bounded(file, size))


class _Bounded:
    """A file whose `read` requests at most the file's size, since Python allocates the requested number of bytes before
    it reads."""

    def __init__(self, content: IO[bytes], size: int) -> None:
        self.content, self.size = content, size
        self.readline, self.tell = content.readline, content.tell

    def read(self, count: int) -> bytes:
        return self.content.read(min(count, self.size))


def _measure_pickle(content: Any) -> None:
    """Check a pickle without building anything. Raises ValueError for globals that `torch.save` never uses for plain
    values, and for too many opcodes or values. A shared value counts once per reference."""
    # The unpickler's stack. An object is a list with the object's number of values, and all references to the object
    # share this list. None is a mark.
    stack: list[list[int] | None] = []
    memo: dict[Any, list[int]] = {}
    for k, (code, argument, _) in enumerate(pickletools.genops(content)):
        if k > MOST_STEPS:
            raise ValueError(f"loading the pickle takes more than {MOST_STEPS} steps: store long lists as tensors")
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
                raise ValueError(f"the pickle expands to more than {MOST_STEPS} values")
            if code.name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"):
                taken[-1][0] = total  # the container, below its new items
                stack.append(taken[-1])
            elif code.stack_after:
                stack.append([total])
