"""Save: each stage's tensors, written to a Hugging Face checkpoint that atomically replaces the previous one."""

import copy
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import GENERATION_CONFIG_NAME

from pipeshard.checkpoint.files import Save, complete_save, remove, sync, together, writes
from pipeshard.checkpoint.load import revert, ties_name
from pipeshard.checkpoint.safetensors_files import INDICES, PICKLED, RANK_FILES, WEIGHTS, joined_file, write_file
from pipeshard.checkpoint.state_dict import own_entries, refuse_converted
from pipeshard.distributed.collectives import gather_objects, whole
from pipeshard.engine.model import PipelineModel
from pipeshard.errors import CheckpointError, summary
from pipeshard.graph.storage import storage_of
from pipeshard.hf import ADAPTER_CONFIG, enable_caches, is_of_custom_code, without_adapters
from pipeshard.options import is_number
from pipeshard.split.packed import packed_layers
from pipeshard.split.ties import first_names, names_of

logger = logging.getLogger("pipeshard")

SINGLE, INDEX = WEIGHTS[0], INDICES[0]
STATE_DICTS = (".pt", ".pth")  # suffixes of files with the names of `model.state_dict()`
# The names of the files in a folder that this module or transformers wrote in earlier saves.
SAVED_FILES = re.compile(r"model((-v\d+)?-\d{5,}-of-\d{5,})?\.safetensors|\.pipeshard-.*")


def owned(model: PipelineModel) -> dict[str, Tensor]:
    """The model's own tensors that this stage saves, by their names in the model, without the conversions of state_dict
    hooks. The first stage that holds a tensor saves it. Quantized weights are omitted, since the checkpoint from which
    they were loaded contains them.

    Call it on all ranks, since sharded tensors are gathered. Raises CheckpointError as `check_entries` does.
    """
    module, policy = model.unwrap(), model.pipeline.policy
    check_entries(module)
    state, saved = own_entries(module), saved_names(module)
    held = policy.ownership.held[policy.stage].difference(name for name, _ in packed_layers(module))
    own = {first: saved[first] for first in sorted(held)}
    own |= {name: name for name in sorted(state.keys() - first_names(module).keys())}  # buffers and extra states
    owned = {first: name for first, name in own.items() if policy.ownership.owner(first) == policy.stage}
    tensors = {name: _gathered(state[first].detach()) for first, name in owned.items()}
    copies = {name: saved[first] for name, first in copied_names(module).items() if saved[first] in tensors}
    return tensors | {name: tensors[main].clone() for name, main in copies.items()}


def check_entries(module: nn.Module) -> None:
    """Raise CheckpointError for an entry of the model's state_dict that is not a tensor, or is a tensor that a file
    cannot contain."""
    state = own_entries(module)
    if strange := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(
            f"the state_dict of {type(module).__name__} contains {strange[0]} of type "
            f"{type(state[strange[0]]).__name__}, but a checkpoint contains only tensors: return a tensor from "
            "get_extra_state, or use a buffer"
        )
    for name, value in state.items():
        if value.layout != torch.strided or value.is_quantized or value.dtype in (torch.complex32, torch.complex128):
            has = f"layout {value.layout}" if value.layout != torch.strided else f"dtype {value.dtype}"
            raise CheckpointError(
                f"stages write safetensors files, which do not support the {has} of {name} in this "
                f"{type(module).__name__}: use a dense, unquantized tensor of a dtype that safetensors supports or, if "
                f"{name} is a buffer, register it with persistent=False"
            )


def refuse_unsavable(model: PipelineModel) -> None:
    """Raise CheckpointError, on every rank, if the model's state_dict converts tensors, so that the unsplit model would
    save others. Call it on all ranks."""
    module, policy = model.unwrap(), model.pipeline.policy
    first, held = first_names(module), policy.ownership.held[policy.stage]
    with together(model.pipeline.grid.world):
        here = [name for name in own_entries(module) if name not in first or first[name] in held]
        refuse_converted(module, here)


def _gathered(tensor: Tensor) -> Tensor:
    """The full tensor. A gathered tensor is moved to the CPU, since the GPU may not have room for all full tensors."""
    return whole(tensor).to("cpu") if isinstance(tensor, DTensor) else tensor


@dataclass
class FolderSave(Save):
    """A save to a folder, planned by all ranks of a pipeline together. `write` and `commit` use no collectives.

    The index determines which files belong to the checkpoint. Therefore, shards are written under names that do not
    exist in the folder yet, and the index (or the single file) is renamed last: a reader finds either the previous or
    the new weights.
    """

    configs: list[Any]  # copies of the model's configs
    coded: nn.Module | None  # the model, if it has custom code (the code's files are also saved)
    parts: dict[str, dict[str, Tensor]]  # this stage's shards by file name
    weight_map: dict[str, str]  # the file of each tensor of all stages
    total_size: int

    @classmethod
    def plan(
        cls,
        boosted: PipelineModel,
        tensors: dict[str, Tensor],
        folder: Path,
        size_per_shard: int,
        snapshot: bool,
        of_base: bool = False,
    ) -> "FolderSave":
        """Plan a save. Call it on all ranks of one pipeline, each with the `tensors` that its stage saves. With
        `snapshot`, the tensors are copied. With `of_base`, the tensors have their names in a PeftModel's base model."""
        pipeline, module = boosted.pipeline, boosted.unwrap()
        module = without_adapters(module)[1] if of_base else module
        with together(pipeline.group):
            if not is_number(size_per_shard) or not size_per_shard > 0:
                raise CheckpointError(
                    f"size_per_shard must be a positive number of MB, such as 5000, got {size_per_shard!r}"
                )
            if pipeline.rank == 0:  # on other machines, NFS would cache that a new folder does not exist
                _make(folder, module)
            state = _ready(revert(module, tensors), snapshot)
            split = split_torch_state_dict_into_shards(state, max_shard_size=size_per_shard * 1000**2)
            own = [names for names in split.filename_to_tensors.values() if names]
        counts = gather_objects([[(name, state[name].nbytes) for name in names] for names in own], pipeline.group)
        (token, generation), *_ = gather_objects((os.urandom(4).hex(), _generation(folder)), pipeline.group)
        shards = [shard for stage in counts for shard in stage]
        files = [f"model{generation}-{k + 1:05d}-of-{len(shards):05d}.safetensors" for k in range(len(shards))]
        files = [SINGLE] if len(shards) == 1 else files
        first = sum(map(len, counts[: pipeline.rank]))
        dtype = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), None)
        configs = _configs(module, pipeline.cached, dtype)
        if of_base and _is_untied(module):
            configs[0].tie_word_embeddings = False
        return cls(
            folder,
            pipeline.rank,
            pipeline.num_stages,
            token,
            configs,
            module if is_of_custom_code(module) else None,
            {file: {name: state[name] for name in names} for file, names in zip(files[first:], own)},
            {name: file for file, shard in zip(files, shards, strict=True) for name, _ in shard},
            sum(size for shard in shards for _, size in shard),
        )

    @property
    def is_single(self) -> bool:
        return set(self.weight_map.values()) == {SINGLE}

    def write(self) -> None:
        """Write this stage's shards and, on the first stage, the configs and the index. No reader opens files with
        these names yet."""
        sizes = {file: sum(tensor.nbytes for tensor in tensors.values()) for file, tensors in self.parts.items()}
        disable = None if self.stage == 0 and self.thread is None else True
        with tqdm(total=sum(sizes.values()), desc="saving stage 0", unit="B", unit_scale=True, disable=disable) as bar:
            for file, tensors in self.parts.items():
                ready = {name: tensor.contiguous() for name, tensor in tensors.items()}
                write_file(ready, self._path(file), self._room, {"format": "pt"})
                bar.update(sizes[file])
        if self.stage == 0:
            (configs := self.beside("configs")).mkdir()
            if self.coded is not None:
                custom_object_save(self.coded, configs, config=self.configs[0])
            for config in self.configs:
                _write_config(config, configs)
            if not self.is_single:
                index = {
                    "metadata": {"total_size": self.total_size},
                    "weight_map": dict(sorted(self.weight_map.items())),
                }
                self.beside(INDEX).write_text(json.dumps(index, indent=2) + "\n")
                sync(self.beside(INDEX))

    def commit(self) -> None:
        """Make this save the folder's checkpoint, and remove the previous checkpoint. Called on the first stage, when
        all stages have written their shards. Raises CheckpointError if the folder lacks a shard."""
        if lost := sorted(file for file in {*self.weight_map.values()} if not self._path(file).exists()):
            raise CheckpointError(
                f"{self.target} does not contain {lost[0]}, although another stage has written this file: save to a "
                "folder that all ranks share, with the same path on every rank"
            )
        for config in sorted(self.beside("configs").iterdir()):
            os.replace(config, self.target / config.name)
        leftovers = list(self._leftovers())
        last = SINGLE if self.is_single else INDEX
        os.replace(self.beside(last), self.target / last)
        if not self.is_single:
            (self.target / SINGLE).unlink(missing_ok=True)  # readers prefer this file to the index
        # The checkpoint is complete. An error would make the stages abandon it, so errors are only logged from here on.
        errors = []
        for clean in (partial(sync, self.target), *(partial(remove, path) for path in leftovers)):
            try:
                clean()
            except OSError as error:
                errors.append(error)
        if errors:
            logger.warning(
                "%s contains the complete new checkpoint, but the folder could not be synced to disk, or files of "
                "earlier saves could not be removed (%s). The next save tries again to remove such files",
                self.target,
                "; ".join(map(summary, errors[:3])),
            )

    def abandon(self) -> None:
        """Remove the files that this stage has written."""
        shutil.rmtree(self._room, ignore_errors=True)
        for file in self.parts:
            self._path(file).unlink(missing_ok=True)
        if self.stage == 0:
            shutil.rmtree(self.beside("configs"), ignore_errors=True)
            self.beside(INDEX).unlink(missing_ok=True)

    def beside(self, name: str) -> Path:
        return self.target / f".pipeshard-{self.token}-{name}"

    def _path(self, file: str) -> Path:
        return self.beside(SINGLE) if file == SINGLE else self.target / file

    def _leftovers(self) -> Iterator[Path]:
        """Yield the files of earlier saves: their shards and index, and leftovers of killed saves."""
        kept = set(self.weight_map.values()) | (set() if self.is_single else {INDEX})
        for path in self.target.iterdir():
            if path.name not in kept and (path.name == INDEX or SAVED_FILES.fullmatch(path.name)):
                yield path


@dataclass
class FileSave(Save):
    """A save to a file: each stage writes a part next to the file, and the first stage joins the parts.

    The suffix selects the format. A .pt, .pth or .bin file has the format of `torch.save`, and contains each tied
    tensor under all its names. Other files are in the safetensors format. A .pt or .pth file uses the names in the
    model's state_dict. Other files use the names that `save_pretrained` writes.
    """

    part: dict[str, Tensor]
    also: dict[str, str]  # for the format of `torch.save`: other names of tied tensors -> the saved names

    @classmethod
    def plan(cls, boosted: PipelineModel, tensors: dict[str, Tensor], target: Path, snapshot: bool) -> "FileSave":
        """Plan a save. Call it on all ranks of one pipeline, each with the `tensors` that its stage saves. With
        `snapshot`, the tensors are copied."""
        pipeline, module = boosted.pipeline, boosted.unwrap()
        with together(pipeline.group):
            if target.is_dir():
                raise CheckpointError(
                    f"{target} is a folder, but shard=False writes a file: pass shard=True, or the path of a file"
                )
            target = target.resolve()  # the file to which a link leads is replaced, not the link
            target.parent.mkdir(parents=True, exist_ok=True)
            named = tensors if target.suffix in STATE_DICTS else revert(module, tensors)
            ready = _ready(named, snapshot)
            state = {name: tensor.contiguous() for name, tensor in ready.items()}
            also = _also_named(module, target) if target.suffix in PICKLED else {}
        token, *_ = gather_objects(os.urandom(4).hex(), pipeline.group)
        return cls(target, pipeline.rank, pipeline.num_stages, token, state, also)

    def write(self) -> None:
        write_file(self.part, self.beside(f"stage{self.stage}"), self._room)

    def commit(self) -> None:
        with writes(self.target):
            self._join()
        for path in self.target.parent.iterdir():
            if path.name.startswith(f".{self.target.name}.pipeshard-"):
                remove(path)

    def _join(self) -> None:
        joined = self.beside("whole")
        joined_file([self.beside(f"stage{stage}") for stage in range(self.stages)], joined)
        if self.target.suffix in PICKLED:
            state, joined = load_file(joined), self.beside("pickled")  # memory-mapped
            torch.save(state | {name: state[kept] for name, kept in self.also.items() if kept in state}, joined)
        sync(joined)
        os.replace(joined, self.target)

    def abandon(self) -> None:
        shutil.rmtree(self._room, ignore_errors=True)
        for name in (f"stage{self.stage}", "whole", "pickled"):
            self.beside(name).unlink(missing_ok=True)

    def beside(self, name: str) -> Path:
        return self.target.with_name(f".{self.target.name}.pipeshard-{self.token}-{name}")


def _also_named(module: nn.Module, target: Path) -> dict[str, str]:
    """For the tied tensors in a file, map each additional name to the name under which the tensor is saved."""
    saved = saved_names(module)
    tied = {name: saved[first] for name, first in first_names(module).items() if saved[first] != name}
    if target.suffix in STATE_DICTS:
        return tied

    def reverted(name: str) -> list[str]:
        return list(revert(module, {name: torch.empty(module.get_parameter(name).shape, device="meta")}))

    pairs = ((reverted(name), reverted(kept)) for name, kept in tied.items())
    # not strict: of two tied names, save_pretrained may omit one (`_keys_to_ignore_on_save`)
    return {name: kept for names, kept_names in pairs for name, kept in zip(names, kept_names)}


def _write_config(config: Any, folder: Path) -> None:
    """Write a config. Writes a generation config that transformers refuses to save, with a warning: a save after hours
    of training must not fail for it."""
    try:
        config.save_pretrained(folder)
    except ValueError as error:
        if not isinstance(config, GenerationConfig):
            raise
        logger.warning("%s contains an invalid generation config: %s", folder.parent, summary(error))
        config.to_json_file(folder / GENERATION_CONFIG_NAME, use_diff=True)


def _configs(module: nn.Module, cached: Collection[Any], dtype: torch.dtype | None) -> list[Any]:
    """Copies of the model's configs, with the name of the model's class, the saved dtype, and the values of `use_cache`
    from before boost."""
    memo: dict[int, Any] = {}
    parts: list[Any] = [getattr(module, name, None) for name in ("config", "generation_config")]
    configs = [copy.deepcopy(part, memo) for part in parts if hasattr(part, "save_pretrained")]
    if parts[0] is not None and id(parts[0]) in memo:
        memo[id(parts[0])].architectures = [type(module).__name__]
        memo[id(parts[0])].dtype = dtype or memo[id(parts[0])].dtype
    enable_caches(memo[id(config)] for config in cached if id(config) in memo)
    return configs


def _is_untied(module: nn.Module) -> bool:
    """Whether the config ties the head to the input embedding, but adapters train a copy of one of the two."""
    if not isinstance(module, PreTrainedModel) or not getattr(module.config, "tie_word_embeddings", False):
        return False
    head = getattr(module.get_output_embeddings(), "weight", None)
    return head is not None and head is not getattr(module.get_input_embeddings(), "weight", None)


def _ready(state: Mapping[str, Tensor], snapshot: bool) -> dict[str, Tensor]:
    """The tensors on the CPU or, with `snapshot`, copies that training does not change. If tensors overlap (a mask that
    all layers share), all but the first are copied, since safetensors rejects tensors that share memory."""
    ready: dict[str, Tensor] = {}
    spans: dict[int, list[range]] = {}  # the addresses that are in use, by storage
    for name, tensor in state.items():
        there = tensor.to("cpu")
        used = range(there.data_ptr(), there.data_ptr() + there.nbytes)
        others = spans.setdefault(storage_of(there), [])
        # Tensors that are not contiguous are copied one at a time when they are written.
        overlaps = there.is_contiguous() and any(one.start < used.stop and used.start < one.stop for one in others)
        if overlaps or (snapshot and there is tensor):
            there = there.clone(memory_format=torch.contiguous_format)
        elif there.is_contiguous():
            others.append(used)
        ready[name] = there
    return ready


def _make(folder: Path, module: nn.Module) -> None:
    """Create the folder of a save. Raises CheckpointError if the path is a file, and warns if the folder contains
    adapters."""
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file, but the save writes a folder: pass another path")
    complete_save(folder, RANK_FILES)
    if isinstance(module, PreTrainedModel) and (folder / ADAPTER_CONFIG).is_file():
        logger.warning(  # an error would lose the result of a run
            "%s contains adapters (%s), which from_pretrained will apply to the weights that are saved here: remove "
            "the adapters, or move the weights to another folder",
            folder,
            ADAPTER_CONFIG,
        )
    folder.mkdir(parents=True, exist_ok=True)


def _generation(folder: Path) -> str:
    """A mark for the names of new shards, such as "" or "-v1". No shard that is already in the folder has this mark."""
    taken = {path.name for path in folder.glob("model*.safetensors")}
    marks = (f"-v{k}" if k else "" for k in itertools.count())
    return next(mark for mark in marks if not any(name.startswith(f"model{mark}-0") for name in taken))


def saved_names(model: nn.Module) -> dict[str, str]:
    """Map the first name of each parameter to the name under which the parameter is saved. For a tied parameter, this
    is the name to which the architecture ties the parameter's other names."""
    is_tied = ties_name(model)
    return {
        first: next((name for name in names if not is_tied(name)), first) for first, names in names_of(model).items()
    }


def copied_names(model: nn.Module) -> dict[str, str]:
    """Map each additional name under which a parameter is saved to the parameter's first name. The user tied these
    names (`shared_weights`), so transformers would not tie them when it loads the checkpoint."""
    if not isinstance(model, PreTrainedModel):
        return {}
    is_tied, saved = ties_name(model), saved_names(model)
    return {
        name: first
        for first, names in names_of(model).items()
        for name in names
        if name != saved[first] and not is_tied(name)
    }
