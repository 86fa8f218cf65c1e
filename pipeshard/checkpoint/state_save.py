"""State save: a whole training state, written in the background from copies, by every rank its part.

    all ranks, between two steps      copy weights, optimizer and the rest ──▶ go on training
    a thread of each rank             writes its files into a hidden folder, with their sums ──▶ marks its part done
    the first rank's thread           waits for all marks ──▶ manifest ──▶ the folder gets its name
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeshard.checkpoint.files import Save, place, sync
from pipeshard.checkpoint.manifest import sum_of, write_manifest
from pipeshard.checkpoint.optimizer import DESCRIPTION
from pipeshard.checkpoint.safetensors_files import Content as FileContent
from pipeshard.checkpoint.safetensors_files import write_files
from pipeshard.checkpoint.save import FolderSave

MODEL, OPTIMIZER, REST = "model", "optimizer", "training.pt"  # the parts of a state
MARKS = ".marks"  # in the hidden folder, of ranks whose part is done


@dataclass
class StateSave(Save):
    """Its stages are all ranks. What they write is planned, and copied, by all of them together."""

    writing: Path  # the hidden folder
    model: FolderSave | None  # on the ranks of the first replica
    optimizer: tuple[list[FileContent], dict[str, Any] | None] | None  # of `part_of`
    rest: dict[str, Any] | None  # on the first rank: what training.pt holds
    step: int
    pipeline_stages: int
    finish: Callable[[], None]  # on the first rank, once the state is complete

    def write(self) -> None:
        optimizer, rest = self.writing / OPTIMIZER, self.writing / REST
        if self.model is not None:
            self.model.write()
        own: list[Path] = []
        if self.optimizer is not None:
            files, description = self.optimizer
            own += write_files(files, optimizer, self.stage)
            if description is not None:
                torch.save(description, optimizer / DESCRIPTION)
                own.append(optimizer / DESCRIPTION)
        if self.rest is not None:
            torch.save(self.rest, rest)
            own.append(rest)
        shards = [] if self.model is None else [self.model.target / name for name in self.model.parts]
        own += [shard for shard in shards if shard.exists()]  # a single one is still hidden
        sums = {str(path.relative_to(self.writing)): sum_of(path) for path in own}
        self.beside(f"sums{self.stage}").write_text(json.dumps(sums))

    def commit(self) -> None:
        if self.model is not None:
            self.model.commit()
        sums: dict[str, str] = {}
        for stage in range(self.stages):
            sums |= json.loads(self.beside(f"sums{stage}").read_text())
        shutil.rmtree(self.writing / MARKS)
        names = [str(path.relative_to(self.writing)) for path in self.writing.rglob("*") if path.is_file()]
        found = {name: sums.get(name) or sum_of(self.writing / name) for name in sorted(names)}
        write_manifest(self.writing, self.step, self.pipeline_stages, found)
        sync(self.writing, *self.writing.rglob("*"))
        place(self.writing, self.target)
        self.finish()

    def abandon(self) -> None:
        if self.model is not None:
            self.model.abandon()
        if self.stage == 0:
            shutil.rmtree(self.writing, ignore_errors=True)

    def beside(self, name: str) -> Path:
        return self.writing / MARKS / name
