"""Checkpoint IO: every stage writes and reads its own part of a plain Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.checkpoint_io import CheckpointIO
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from pipeshard.errors import CheckpointError
from pipeshard.model.ties import names_of
from pipeshard.pipeline import PipelineModel
from pipeshard.runtime.agreement import gather
from pipeshard.stage_manager import PipelineStageManager

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


class PipelineCheckpointIO(CheckpointIO):
    """Saves with the architecture's own names, each tied tensor once, always as safetensors; nothing is gathered.

    Every rank has to make each call; what is saved is on disk when it returns.
    """

    def __init__(self, stage_manager: PipelineStageManager) -> None:
        super().__init__()
        self.manager = stage_manager

    def save_sharded_model(
        self, model: nn.Module, checkpoint: str, gather_dtensor: bool, prefix: str | None, size_per_shard: int, *_: Any
    ) -> None:
        """Write the folder `checkpoint`: shards of at most `size_per_shard` MB, their index, the configs.

        `AutoModel.from_pretrained(checkpoint)` reads it.
        """
        folder, boosted = Path(checkpoint), _boosted(model)
        if prefix is not None:
            raise CheckpointError(f"prefix={prefix!r}: parameters are saved under the architecture's own names only")
        if folder.is_file():
            raise CheckpointError(f"{folder} is a file, but shard=True writes a folder")
        folder.mkdir(parents=True, exist_ok=True)
        state = _owned(boosted)
        split = split_torch_state_dict_into_shards(state, max_shard_size=size_per_shard * 1000**2)
        parts = [{name: state[name] for name in names} for names in split.filename_to_tensors.values() if names]
        counts = gather(torch.tensor([len(parts)]), boosted.pipeline.group).flatten().tolist()
        first, total = sum(counts[: self.manager.stage]), sum(counts)
        names = [WEIGHTS] if total == 1 else [f"model-{k + 1:05d}-of-{total:05d}.safetensors" for k in range(total)]
        for name, part in zip(names[first:], parts):
            save_file(part, folder / name, metadata={"format": "pt"})
        self._barrier()
        if self.manager.is_first_stage():
            _write_index(folder, names)
            _write_configs(boosted.unwrap(), folder)
        self._barrier()

    def save_unsharded_model(self, model: nn.Module, checkpoint: str, *_: Any) -> None:
        """Write one file, `checkpoint`, which the first stage puts together from the others' parts."""
        target = Path(checkpoint)
        if target.is_dir():
            raise CheckpointError(f"{target} is a folder, but shard=False writes a file: pass shard=True")
        target.parent.mkdir(parents=True, exist_ok=True)
        parts = [target.with_name(f"{target.name}.stage{stage}") for stage in range(self.manager.num_stages)]
        save_file(_owned(_boosted(model)), parts[self.manager.stage])
        self._barrier()
        if self.manager.is_first_stage():
            whole = {name: tensor for part in parts for name, tensor in _read(part).items()}
            save_file(whole, target, metadata={"format": "pt"})
            for part in parts:
                part.unlink()
        self._barrier()

    def load_model(self, model: nn.Module, checkpoint: str, strict: bool = True, **options: Any) -> nn.Module:
        """Read this stage's tensors from a Hugging Face folder, an index or a safetensors file, in place."""
        if not Path(checkpoint).exists():
            raise CheckpointError(f"{checkpoint} cannot be read: there is no such file or folder")
        return super().load_model(model, checkpoint, strict, **options)

    def load_sharded_model(self, model: nn.Module, index_file_path: str, strict: bool = True, **_: Any) -> None:
        index = Path(index_file_path)
        try:
            files = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is no index of a checkpoint: {type(error).__name__}: {error}") from error
        outside = [name for name in files if Path(name).name != name]
        if outside:
            raise CheckpointError(f"{index} names {outside[0]!r}, which is not a file of its own folder")
        self._load(model, [index.parent / name for name in files], strict)

    def load_unsharded_model(self, model: nn.Module, checkpoint: str, strict: bool = True, **_: Any) -> None:
        self._load(model, [Path(checkpoint)], strict)

    def _load(self, model: nn.Module, files: list[Path], strict: bool) -> None:
        boosted = _boosted(model)
        module = boosted.unwrap()
        found = {name: (file, shape) for file in files for name, shape in _shapes(file).items()}
        # Released tensors kept their shapes, so every rank checks the whole model and raises the same.
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        ties = {name: names for names in names_of(module).values() for name in names}
        source = {name: next((n for n in (name, *ties.get(name, ())) if n in found), name) for name in shapes}
        problems = [
            f"{name} has shape {found[key][1]}, the model {shapes[name]}"
            for name, key in source.items()
            if key in found and found[key][1] != shapes[name]
        ]
        if strict:
            problems += [f"{name} is missing" for name, key in source.items() if key not in found]
            problems += [f"{name} is unexpected" for name in sorted(found.keys() - shapes.keys())]
        if problems:
            where = files[0] if len(files) == 1 else files[0].parent
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise CheckpointError(f"{where} does not fit {type(module).__name__}: {'; '.join(problems[:8])}{more}")
        held = {source[name]: tensor for name, tensor in _held(boosted).items()}
        for file in files:
            for name, value in _read(file, held.keys()).items():
                held[name].copy_(value)
        self._barrier()

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str) -> None:
        """Write the scheduler's state, which all ranks share, once."""
        if self.manager.is_first_stage():
            torch.save(lr_scheduler.state_dict(), checkpoint)
        self._barrier()

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str) -> None:
        lr_scheduler.load_state_dict(torch.load(checkpoint, weights_only=True))

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise CheckpointError(
            "optimizer states and LoRA adapters of a pipeline cannot be saved or loaded apart: booster.save_model "
            "saves all weights, booster.save_lr_scheduler the schedule"
        )

    load_sharded_optimizer = load_unsharded_optimizer = save_sharded_optimizer = _refuse
    save_unsharded_optimizer = save_lora_as_pretrained = _refuse

    def _barrier(self) -> None:
        dist.barrier(group=self.manager.get_p2p_process_group())


def _boosted(model: nn.Module) -> PipelineModel:
    if not isinstance(model, PipelineModel):
        raise CheckpointError(f"this is a {type(model).__name__}: pass the model that booster.boost(...) returned")
    return model


def _held(model: PipelineModel) -> dict[str, Tensor]:
    """This stage's parameters, tied ones under their first name, and all persistent buffers."""
    module, policy = model.unwrap(), model.pipeline.policy
    parameters = {name for names in names_of(module).values() for name in names}
    state = module.state_dict()
    names = policy.held[policy.stage] | (state.keys() - parameters)
    return {name: state[name] for name in sorted(names)}


def _owned(model: PipelineModel) -> dict[str, Tensor]:
    """What this stage saves: of what several stages hold, the first one's."""
    policy = model.pipeline.policy
    calls = list(zip((call.unit for call in policy.flow.calls), policy.stages, strict=True))

    def owner(name: str) -> int:
        holders = [stage for stage, held in enumerate(policy.held) if name in held]
        return min(holders or [stage for unit, stage in calls if name.startswith(f"{unit}.")] or [0])

    return {name: tensor.contiguous() for name, tensor in _held(model).items() if owner(name) == policy.stage}


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, "pt") as content:
            return {name: tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} cannot be read as safetensors: {error}. Pass a folder that save_pretrained wrote, or one file"
        ) from error


def _read(file: Path, wanted: Any = None) -> dict[str, Tensor]:
    with safe_open(file, "pt") as content:
        return {name: content.get_tensor(name) for name in content.keys() if wanted is None or name in wanted}  # noqa: SIM118


def _write_index(folder: Path, names: list[str]) -> None:
    """The index of the shards just written, instead of what an earlier save left."""
    for path in [*folder.glob("model*.safetensors"), folder / INDEX]:
        if path.name not in names:
            path.unlink(missing_ok=True)
    if len(names) == 1:
        return
    weight_map, size = {}, 0
    for name in names:
        with (folder / name).open("rb") as content:  # a safetensors file begins with the length of its header
            header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
        for key in header.keys() - {"__metadata__"}:
            start, end = header[key]["data_offsets"]
            weight_map[key], size = name, size + end - start
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_configs(module: nn.Module, folder: Path) -> None:
    parts: list[Any] = [getattr(module, name, None) for name in ("config", "generation_config")]
    if parts[0] is not None:
        parts[0].architectures = [type(module).__name__]
    for part in parts:
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(folder)
