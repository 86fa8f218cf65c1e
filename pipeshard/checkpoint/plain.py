"""Plain: a file of tensors, numbers and strings, which runs no code when it is read."""

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeshard.errors import CheckpointError
from pipeshard.runtime.codec import reason


def load_plain(file: Path, kind: str, advice: str) -> Any:
    """What `torch.save` wrote, by `torch.load(weights_only=True)`; tensors are on the CPU, mapped from the file.

    Raises CheckpointError, which says that the file is no `kind`, and the `advice`, for what cannot be read so.
    """
    try:
        if not file.is_file():
            raise FileNotFoundError("there is no such file")
        zipped = zipfile.is_zipfile(file)
        if zipped:
            _refuse_compressed(file)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:
        raise CheckpointError(f"{file} is no {kind} ({reason(error)}): {advice}") from error


def has_content(tensor: Tensor) -> bool:
    """Whether the file has a value for each element: a description may make tensors of any shape of nothing."""
    return not tensor.is_meta and tensor.layout is torch.strided and tensor.nbytes <= tensor.untyped_storage().nbytes()


def _refuse_compressed(file: Path) -> None:
    """Torch never compresses: what does may be of any size once it is unpacked."""
    with zipfile.ZipFile(file) as archive:
        packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ValueError(f"{packed[0]!r} in it is compressed, which torch.save does not do")
