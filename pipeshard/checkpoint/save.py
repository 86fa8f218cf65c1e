"""Save: each stage writes its own tensors of a Hugging Face checkpoint, which takes the old one's place at once."""

import copy
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeshard.boosted import PipelineModel
from pipeshard.checkpoint.beside import sync, together
from pipeshard.checkpoint.conversion import copied_names, revert, saved_names
from pipeshard.checkpoint.join import join
from pipeshard.checkpoint.source import INDICES, WEIGHTS
from pipeshard.errors import CheckpointError
from pipeshard.model.ties import first_names
from pipeshard.runtime.agreement import gather_objects
from pipeshard.runtime.local import whole

logger = logging.getLogger("pipeshard")

SINGLE, INDEX = WEIGHTS[0], INDICES[0]
OWN = re.compile(r"model(-.*)?\.safetensors|\.pipeshard-.*")  # what a save may have left in a folder
PATIENCE = 1800.0  # seconds the first stage waits in the background for the others to have written


def owned(model: PipelineModel) -> dict[str, Tensor]:
    """What this stage saves, by the names of the model: of what several stages hold, the first one's.

    All ranks call it: what is sliced is gathered from the ranks that have the slices.
    """
    module, policy = model.unwrap(), model.pipeline.policy
    state, saved = module.state_dict(keep_vars=True), saved_names(module)
    own = {first: saved[first] for first in sorted(policy.held[policy.stage])}
    own |= {name: name for name in sorted(state.keys() - first_names(module).keys())}  # buffers
    tensors = {name: whole(state[first].detach()) for first, name in own.items() if policy.owner(first) == policy.stage}
    copies = {name: saved[first] for name, first in copied_names(module).items() if saved[first] in tensors}
    return tensors | {name: tensors[main].clone() for name, main in copies.items()}


@dataclass
class FolderSave:
    """One save of a folder, planned by all ranks together; `write` and `commit` then need nothing of the others.

    The index decides which files are the checkpoint, so shards are written under names that the folder does not have
    yet, and the index (or the single file) is renamed last: a reader finds the previous checkpoint or the new one.
    """

    folder: Path
    configs: list[Any]  # as they are to be written
    stage: int
    parts: dict[str, dict[str, Tensor]]  # this stage's shards by file name
    weight_map: dict[str, str]  # of all stages
    total_size: int
    token: str
    stages: int
    failed: Exception | None = None
    thread: threading.Thread | None = field(default=None, repr=False)

    @classmethod
    def plan(
        cls, boosted: PipelineModel, tensors: dict[str, Tensor], folder: Path, size_per_shard: int, snapshot: bool
    ) -> "FolderSave":
        """By the ranks of one pipeline, of the `tensors` that each of them owns."""
        pipeline, module = boosted.pipeline, boosted.unwrap()
        with together(pipeline.group):
            if folder.is_file():
                raise CheckpointError(f"{folder} is a file, but shard=True writes a folder")
            state = {name: _ready(tensor, snapshot) for name, tensor in revert(module, tensors).items()}
            split = split_torch_state_dict_into_shards(state, max_shard_size=size_per_shard * 1000**2)
            own = [names for names in split.filename_to_tensors.values() if names]
            if pipeline.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
        counts = gather_objects([[(name, state[name].nbytes) for name in names] for names in own], pipeline.group)
        (token, generation), *_ = gather_objects((os.urandom(4).hex(), _generation(folder)), pipeline.group)
        shards = [shard for stage in counts for shard in stage]
        files = [f"model{generation}-{k + 1:05d}-of-{len(shards):05d}.safetensors" for k in range(len(shards))]
        files = [SINGLE] if len(shards) == 1 else files
        first = sum(map(len, counts[: pipeline.rank]))
        return cls(
            folder,
            _configs(module, pipeline.cached),
            pipeline.rank,
            {file: {name: state[name] for name in names} for file, names in zip(files[first:], own)},
            {name: file for file, shard in zip(files, shards, strict=True) for name, _ in shard},
            sum(size for shard in shards for _, size in shard),
            token,
            pipeline.num_stages,
        )

    @property
    def is_single(self) -> bool:
        return set(self.weight_map.values()) == {SINGLE}

    def write(self) -> None:
        """This stage's shards, and on the first the configs and the index, under hidden names."""
        for file, tensors in self.parts.items():
            path = self.folder / (self._hidden(SINGLE) if file == SINGLE else file)
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
            sync(path)
        if self.stage == 0:
            (configs := self.folder / self._hidden("configs")).mkdir()
            for config in self.configs:
                config.save_pretrained(configs)
            if not self.is_single:
                index = {
                    "metadata": {"total_size": self.total_size},
                    "weight_map": dict(sorted(self.weight_map.items())),
                }
                (self.folder / self._hidden(INDEX)).write_text(json.dumps(index, indent=2) + "\n")
                sync(self.folder / self._hidden(INDEX))

    def commit(self) -> None:
        """On the first stage, once all have written: make it the folder's checkpoint and remove what was before."""
        for config in sorted((self.folder / self._hidden("configs")).iterdir()):
            os.replace(config, self.folder / config.name)
        last = SINGLE if self.is_single else INDEX
        os.replace(self.folder / self._hidden(last), self.folder / last)
        if not self.is_single:
            (self.folder / SINGLE).unlink(missing_ok=True)  # a reader prefers it to the index
        sync(self.folder)
        for path in self._leftovers():
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Remove what this stage has written."""
        for file in self.parts:
            (self.folder / (self._hidden(SINGLE) if file == SINGLE else file)).unlink(missing_ok=True)
        if self.stage == 0:
            shutil.rmtree(self.folder / self._hidden("configs"), ignore_errors=True)
            (self.folder / self._hidden(INDEX)).unlink(missing_ok=True)

    def start(self) -> None:
        """Write in the background; at its end Python waits for it."""
        self.thread = threading.Thread(target=self._in_background, name="pipeshard-save")
        self.thread.start()

    def _in_background(self) -> None:
        try:
            self.write()
            self._mark(self.stage).write_text("")
            if self.stage == 0:
                self._await_others()
                self.commit()
        except Exception as error:
            self.failed = error
            self.abandon()
            self._mark(self.stage).with_suffix(".failed").touch()
            logger.error("saving %s failed on stage %d: %s", self.folder, self.stage, error)

    def _await_others(self) -> None:
        deadline = time.monotonic() + PATIENCE
        waiting = set(range(self.stages))
        while waiting:
            waiting = {stage for stage in waiting if not self._mark(stage).exists()}
            failed = [stage for stage in waiting if self._mark(stage).with_suffix(".failed").exists()]
            if failed or time.monotonic() > deadline:
                raise CheckpointError(
                    f"stages {failed or sorted(waiting)} have not written their part; it is kept as it was"
                )
            time.sleep(0.02)

    def _mark(self, stage: int) -> Path:
        return self.folder / self._hidden(f"stage{stage}.done")

    def _hidden(self, name: str) -> str:
        return f".pipeshard-{self.token}-{name}"

    def _leftovers(self) -> Iterator[Path]:
        """What neither this save nor the user needs: older shards, and what killed saves left."""
        kept = set(self.weight_map.values()) | (set() if self.is_single else {INDEX})
        for path in self.folder.iterdir():
            if path.name not in kept and (path.name == INDEX or OWN.fullmatch(path.name)):
                yield path


def save_file_of_stages(boosted: PipelineModel, tensors: dict[str, Tensor], target: Path) -> None:
    """One safetensors file: each stage writes a part beside it, which the first joins byte by byte."""
    pipeline, module = boosted.pipeline, boosted.unwrap()
    parts = [target.with_name(f".{target.name}.stage{stage}") for stage in range(pipeline.num_stages)]
    try:
        with together(pipeline.group):
            if target.is_dir():
                raise CheckpointError(f"{target} is a folder, but shard=False writes a file: pass shard=True")
            target.parent.mkdir(parents=True, exist_ok=True)
            state = {name: _ready(tensor, False).contiguous() for name, tensor in revert(module, tensors).items()}
            save_file(state, parts[pipeline.rank])
        with together(pipeline.group):
            if pipeline.rank == 0:
                joined = target.with_name(f".{target.name}.whole")
                join(parts, joined)
                sync(joined)
                os.replace(joined, target)
    finally:
        parts[pipeline.rank].unlink(missing_ok=True)


def _configs(module: nn.Module, cached: Collection[Any]) -> list[Any]:
    """Copies of the model's, with the caches as they were before boost turned them off."""
    memo: dict[int, Any] = {}
    parts: list[Any] = [getattr(module, name, None) for name in ("config", "generation_config")]
    configs = [copy.deepcopy(part, memo) for part in parts if hasattr(part, "save_pretrained")]
    if parts[0] is not None and id(parts[0]) in memo:
        memo[id(parts[0])].architectures = [type(module).__name__]
    for config in cached:
        if id(config) in memo:
            memo[id(config)].use_cache = True
    return configs


def _ready(tensor: Tensor, snapshot: bool) -> Tensor:
    """On the CPU; with `snapshot` a copy that training does not change."""
    there = tensor.to("cpu")
    return there.clone(memory_format=torch.contiguous_format) if snapshot and there is tensor else there


def _generation(folder: Path) -> str:
    """Something that keeps new shards' names apart from those that the folder has."""
    taken = {path.name for path in folder.glob("model*.safetensors")} if folder.is_dir() else set()
    k = 0
    while any(name.startswith(f"model{f'-v{k}' if k else ''}-0") for name in taken):
        k += 1
    return f"-v{k}" if k else ""
