"""Pickles: what `torch.save` wrote of plain values, read without running code, and measured before it is.

`torch.load(weights_only=True)` runs no code, but a few bytes may still have it take all memory or never end.
"""

import pickletools
import re
import zipfile
from pathlib import Path
from typing import IO, Any

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
        _refuse_bombs(file, zipped)
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


MOST = 4_000_000  # steps to unpickle a file, and values in what it makes: an optimizer of 100,000 tensors takes as many
MADE_OF = re.compile(
    r"collections (OrderedDict|Counter)|_codecs encode|torch Size|torch (\w+Storage|[a-z0-9_]+)"
    r"|torch\._utils _rebuild_(tensor(_v2)?|parameter|meta_tensor_no_storage)|torch\._tensor _rebuild_from_type_v2"
    r"|torch\.storage (Untyped|Typed)Storage"
)


def _refuse_bombs(file: Path, zipped: bool) -> None:
    """A pickle of a few bytes can make gigabytes (`bytearray(2**40)`), or a tuple of tuples that is never hashed to its
    end, in C, where nothing interrupts it. What `torch.save` writes of plain values needs neither."""
    if zipped:
        with zipfile.ZipFile(file) as archive:
            (name,) = (name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl"))
            with archive.open(name) as content:
                _measure(_Bounded(content, file.stat().st_size))
        return
    with file.open("rb") as content:  # as torch wrote before 1.6: a magic number, versions, the object, its storages
        for _ in range(5):
            _measure(_Bounded(content, file.stat().st_size))


class _Bounded:
    """A file of which no more is read at once than it has: Python first makes room for all that it is asked for."""

    def __init__(self, content: IO[bytes], size: int) -> None:
        self.content, self.size = content, size
        self.readline, self.tell = content.readline, content.tell

    def read(self, count: int) -> bytes:
        return self.content.read(min(count, self.size))


def _measure(content: Any) -> None:
    """Go through a pickle without making anything; ValueError for what `torch.save` makes of no plain value, or where
    the values in it, counted as often as they are referred to, are too many."""
    stack: list[
        list[int] | None
    ] = []  # how many values are in each, in a list, as pickles refer to them; None is a mark
    memo: dict[Any, list[int]] = {}
    for k, (code, argument, _) in enumerate(pickletools.genops(content)):
        if k > MOST:
            raise ValueError(f"it takes more than {MOST} steps to unpickle: use safetensors")
        if code.name == "GLOBAL" and not MADE_OF.fullmatch(str(argument)):
            raise ValueError(f"Unsupported global: GLOBAL {str(argument).replace(' ', '.')} is not of plain values")
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
            if total > MOST:
                raise ValueError(f"it unfolds to more than {MOST} values")
            if code.name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"):
                taken[-1][0] = total  # the object itself, below what is put into it
                stack.append(taken[-1])
            elif code.stack_after:
                stack.append([total])
