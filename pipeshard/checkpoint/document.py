"""Document: a JSON file of a checkpoint, which may be anyone's."""

import json
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

LARGEST = 64 << 20  # bytes; an index of a hundred thousand tensors has a tenth of it


def read_document(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises ValueError, or OSError, for anything else, and for a file of more than 64 MiB before it is read.
    """
    if not file.is_file():
        raise FileNotFoundError("there is no such file")
    if (size := file.stat().st_size) > LARGEST:
        raise ValueError(f"it has {size} bytes, more than the {LARGEST} that are read")
    try:
        content = json.loads(file.read_text("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"it is no object, but a {type(content).__name__}")
    return content


def is_inside(name: object) -> TypeGuard[str]:
    """Whether this names a file in a folder or in a folder within it; a link there may lead anywhere, as in the caches
    of the Hugging Face hub."""
    if not isinstance(name, str) or "\0" in name:
        return False
    path = PurePosixPath(name)
    return name == str(path) != "." and not path.is_absolute() and ".." not in path.parts
