"""Meter: the memory and objects of a rank, recorded every few steps."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor
from torch.distributed.distributed_c10d import _world

from pipeshard.engine.engine import Pipeline

EVERY = 5  # steps
QUANTITIES = {  # and what they are counted in
    "rss": "MiB",
    "tensors": "tensors",
    "objects": "objects",
    "fds": "file descriptors",
    "threads": "threads",
    "groups": "process groups",
}


class Meter:
    """Appends a line of JSON to a file."""

    def __init__(self, file: Path, pipeline: Pipeline) -> None:
        self.file, self.pipeline, self.process = file, pipeline, psutil.Process()

    def __call__(self, step: int) -> None:
        if step % EVERY == 0:
            with self.file.open("a") as file:
                file.write(json.dumps({"step": step, **self._read()}) + "\n")

    def _read(self) -> dict[str, Any]:
        gc.collect()
        objects = gc.get_objects()
        return {
            "rss": self.process.memory_info().rss / 2**20,
            "tensors": sum(issubclass(type(thing), Tensor) for thing in objects),
            "objects": len(objects),
            "fds": self.process.num_fds(),
            "threads": self.process.num_threads(),
            "groups": len(_world.pg_map),
        }
