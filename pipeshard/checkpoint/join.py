"""Join: one safetensors file made of several, byte by byte, with no tensor in memory."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeshard.checkpoint.source import opened


def join(parts: Sequence[Path], target: Path) -> None:
    """Write `target` with the tensors of all parts, no two of which have one name.

    A safetensors file is the length of its header, the header, and the tensors' bytes, to which it has offsets.

    Raises CheckpointError where a part is no whole safetensors file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, offset = [], 0
    for part in parts:
        opened(part)  # refuses a header that does not describe the file
        with part.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            entries: dict[str, Any] = json.loads(content.read(length))
        for name, entry in entries.items():
            if name != "__metadata__":
                header[name] = entry | {"data_offsets": [offset + at for at in entry["data_offsets"]]}
        starts.append(8 + length)
        offset += part.stat().st_size - 8 - length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as whole:
        whole.write(len(text).to_bytes(8, "little") + text)
        for part, start in zip(parts, starts, strict=True):
            with part.open("rb") as content:
                content.seek(start)
                shutil.copyfileobj(content, whole, 1 << 20)
