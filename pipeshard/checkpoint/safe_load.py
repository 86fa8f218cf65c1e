"""Safe loading: files of tensors, numbers and strings, and JSON, which run no code when they are read."""

import json
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import torch
from torch import Tensor

from pipeshard.distributed.collectives import reason
from pipeshard.errors import CheckpointError


def load_plain(file: Path, kind: str, advice: str) -> Any:
    """What `torch.save` wrote, by `torch.load(weights_only=True)`; tensors are on the CPU, mapped from the file.

    Raises CheckpointError, which says that the file is not `kind`, and the `advice`, for what cannot be read so.
    """
    try:
        if not file.is_file():
            raise FileNotFoundError("it does not exist")
        zipped = zipfile.is_zipfile(file)
        if zipped:
            _refuse_compressed(file)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:
        raise CheckpointError(f"{file} is not {kind} ({reason(error)}): {advice}") from error


def has_content(tensor: Tensor) -> bool:
    """Whether the file has a value for each element: a description may make tensors of any shape of nothing."""
    return not tensor.is_meta and tensor.layout is torch.strided and tensor.nbytes <= tensor.untyped_storage().nbytes()


def _refuse_compressed(file: Path) -> None:
    """Torch never compresses: what does may be of any size once it is unpacked."""
    with zipfile.ZipFile(file) as archive:
        packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ValueError(f"{packed[0]!r} in it is compressed, which torch.save does not do")


LARGEST = 64 << 20  # bytes; an index of a hundred thousand tensors has a tenth of it


def read_document(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises ValueError, or OSError, for anything else, and for a file of more than 64 MiB before it is read.
    """
    if not file.is_file():
        raise FileNotFoundError("it does not exist")
    if (size := file.stat().st_size) > LARGEST:
        raise ValueError(f"it has {size} bytes, more than the {LARGEST} that are read")
    try:
        content = json.loads(file.read_text("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"it must be an object, not a {type(content).__name__}")
    return content


def is_inside(name: object) -> TypeGuard[str]:
    """Whether this names a file in a folder or in a folder within it; a link there may lead anywhere, as in the caches
    of the Hugging Face hub."""
    if not isinstance(name, str) or "\0" in name:
        return False
    path = PurePosixPath(name)
    return name == str(path) != "." and not path.is_absolute() and ".." not in path.parts
