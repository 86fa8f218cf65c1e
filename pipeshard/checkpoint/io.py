"""Checkpoint IO: every stage writes and reads its own part of a plain Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
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
from pipeshard.stage_manager import PipelineStageManager

__all__ = ["PipelineCheckpointIO"]

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


class PipelineCheckpointIO(CheckpointIO):
    """Saves with the architecture's own names, each tied tensor once, always as safetensors; nothing is gathered."""

    def __init__(self, stage_manager: PipelineStageManager) -> None:
        super().__init__()
        self.manager = stage_manager

    def save_sharded_model(
        self,
        model: nn.Module,
        checkpoint: str,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = True,
        use_async: bool = False,
    ) -> None:
        """Write the folder `checkpoint`: shards of at most `size_per_shard` MB, their index, the configs.

        `AutoModel.from_pretrained(checkpoint)` reads it. Every rank has to call it; it is on disk when this returns.
        """
        folder, boosted = Path(checkpoint), _boosted(model)
        if prefix is not None:
            raise CheckpointError(f"prefix={prefix!r}: parameters are saved under the architecture's own names only")
        if folder.is_file():
            raise CheckpointError(f"{folder} is a file, but shard=True writes a folder")
        folder.mkdir(parents=True, exist_ok=True)
        state = self._owned_state(boosted)
        split = split_torch_state_dict_into_shards(state, max_shard_size=size_per_shard * 1000**2)
        parts = [{name: state[name] for name in names} for names in split.filename_to_tensors.values() if names]
        counts = self._counts(len(parts))
        first, total = sum(counts[: self.manager.stage]), sum(counts)
        names = [WEIGHTS] if total == 1 else [f"model-{k + 1:05d}-of-{total:05d}.safetensors" for k in range(total)]
        for k, part in enumerate(parts):
            save_file(part, folder / names[first + k], metadata={"format": "pt"})
        self._barrier()
        if self.manager.is_first_stage():
            _write_index(folder, names)
            _write_configs(boosted.unwrap(), folder)
        self._barrier()

    def save_unsharded_model(
        self,
        model: nn.Module,
        checkpoint: str,
        gather_dtensor: bool = True,
        use_safetensors: bool = True,
        use_async: bool = False,
    ) -> None:
        """Write one file, `checkpoint`, which the first stage puts together from the others' parts."""
        target = Path(checkpoint)
        if target.is_dir():
            raise CheckpointError(f"{target} is a folder, but shard=False writes a file: pass shard=True")
        target.parent.mkdir(parents=True, exist_ok=True)
        parts = [target.with_name(f"{target.name}.stage{stage}") for stage in range(self.manager.num_stages)]
        save_file(self._owned_state(_boosted(model)), parts[self.manager.stage], metadata={"format": "pt"})
        self._barrier()
        if self.manager.is_first_stage():
            state = {name: tensor for part in parts for name, tensor in _tensors(part)}
            save_file(state, target, metadata={"format": "pt"})
            for part in parts:
                part.unlink()
        self._barrier()

    def load_model(self, model: nn.Module, checkpoint: str, strict: bool = True, **options: Any) -> nn.Module:
        """Read this stage's tensors from a Hugging Face folder, an index or a safetensors file, in place."""
        if not Path(checkpoint).exists():
            raise CheckpointError(f"{checkpoint} cannot be read: there is no such file or folder")
        return super().load_model(model, checkpoint, strict, **options)

    def load_sharded_model(
        self,
        model: nn.Module,
        index_file_path: str,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Read this stage's tensors from the shards that an index file names."""
        index = Path(index_file_path)
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            files = sorted({str(name) for name in weight_map.values()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is no index of a checkpoint: {type(error).__name__}: {error}") from error
        outside = [name for name in files if Path(name).name != name]
        if outside:
            raise CheckpointError(f"{index} names {outside[0]!r}, which is not a file of its own folder")
        self._load(model, [index.parent / name for name in files], strict)

    def load_unsharded_model(
        self,
        model: nn.Module,
        checkpoint: str,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Read this stage's tensors from one safetensors file."""
        self._load(model, [Path(checkpoint)], strict)

    def _load(self, model: nn.Module, files: list[Path], strict: bool) -> None:
        module = _boosted(model).unwrap()
        found: dict[str, tuple[Path, tuple[int, ...]]] = {}
        for file in files:
            found.update({name: (file, shape) for name, shape in _shapes(file).items()})
        # Released tensors kept their shapes, so every rank checks the whole model and raises the same.
        state = module.state_dict(keep_vars=True)
        ties = {name: names for names in names_of(module).values() for name in names}
        source = {name: next((n for n in (name, *ties.get(name, ())) if n in found), None) for name in state}
        problems = [f"{name} is missing" for name, key in source.items() if key is None]
        problems += [f"{name} is unexpected" for name in sorted(found.keys() - state.keys())]
        wrong = [
            f"{name} has shape {found[key][1]}, the model {tuple(state[name].shape)}"
            for name, key in source.items()
            if key is not None and found[key][1] != tuple(state[name].shape)
        ]
        if wrong or (strict and problems):
            listed = [*wrong, *problems]
            raise CheckpointError(
                f"{files[0].parent if len(files) > 1 else files[0]} does not fit {type(module).__name__}: "
                f"{'; '.join(listed[:8])}{f'; and {len(listed) - 8} more' if len(listed) > 8 else ''}"
            )
        held = self._held_state(_boosted(model))
        with torch.no_grad():
            for file in files:
                keys = {source[name]: tensor for name, tensor in held.items() if source[name] is not None}
                for key, value in _tensors(file, keys):
                    keys[key].copy_(value)
        self._barrier()

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str) -> None:
        """Write the scheduler's state, which all ranks share, once."""
        if self.manager.is_first_stage():
            torch.save(lr_scheduler.state_dict(), checkpoint)
        self._barrier()

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str) -> None:
        lr_scheduler.load_state_dict(torch.load(checkpoint, weights_only=True))

    def load_sharded_optimizer(self, *args: Any, **kwargs: Any) -> None:
        raise _no_optimizer_state()

    def load_unsharded_optimizer(self, *args: Any, **kwargs: Any) -> None:
        raise _no_optimizer_state()

    def save_sharded_optimizer(self, *args: Any, **kwargs: Any) -> None:
        raise _no_optimizer_state()

    def save_unsharded_optimizer(self, *args: Any, **kwargs: Any) -> None:
        raise _no_optimizer_state()

    def save_lora_as_pretrained(self, *args: Any, **kwargs: Any) -> None:
        raise CheckpointError("PipelinePlugin does not save LoRA adapters apart: use booster.save_model")

    def _held_state(self, model: PipelineModel) -> dict[str, Tensor]:
        """This stage's parameters and persistent buffers by name, tied ones under their first name."""
        module, policy = model.unwrap(), model.pipeline.policy
        held = policy.held[policy.stage]
        parameters = dict(module.named_parameters())
        buffers = (
            module.state_dict(keep_vars=True).keys() - dict(module.named_parameters(remove_duplicate=False)).keys()
        )
        everything = dict(module.named_buffers(remove_duplicate=False))
        return {name: parameters[name].data for name in sorted(held)} | {
            name: everything[name] for name in sorted(buffers) if name in everything
        }

    def _owned_state(self, model: PipelineModel) -> dict[str, Tensor]:
        """What this stage saves: of what several stages hold, the first one's."""
        policy = model.pipeline.policy
        state = self._held_state(model)
        mine = {
            name
            for name in state
            if self.manager.stage == min(_holders(name, policy.held, policy.replay.held, policy), default=0)
        }
        return {name: state[name].contiguous() for name in sorted(mine)}

    def _counts(self, count: int) -> list[int]:
        group = self.manager.get_p2p_process_group()
        device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
        counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.manager.num_stages)]
        dist.all_gather(counts, torch.tensor([count], device=device), group=group)
        return [int(one) for one in counts]

    def _barrier(self) -> None:
        dist.barrier(group=self.manager.get_p2p_process_group())


def _holders(name: str, held: list[set[str]], running: frozenset[str], policy: Any) -> list[int]:
    """The stages that hold a parameter, or run the unit a buffer is in."""
    stages = [stage for stage, names in enumerate(held) if name in names]
    calls = zip(policy.flow.calls, policy.stages, strict=True)
    return stages or [stage for call, stage in calls if name.startswith(f"{call.unit}.")]


def _boosted(model: nn.Module) -> PipelineModel:
    if not isinstance(model, PipelineModel):
        raise CheckpointError(f"this is a {type(model).__name__}: pass the model that booster.boost(...) returned")
    return model


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, "pt") as content:
            return {name: tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} cannot be read as safetensors: {error}. Pass a folder that save_pretrained wrote, or one file"
        ) from error


def _tensors(file: Path, wanted: Iterable[str | None] | None = None) -> list[tuple[str, Tensor]]:
    with safe_open(file, "pt") as content:
        names = content.keys() if wanted is None else sorted(set(content.keys()) & set(wanted))
        return [(name, content.get_tensor(name)) for name in names]


def _write_index(folder: Path, names: list[str]) -> None:
    """The index of the shards just written, instead of what an earlier save left."""
    stale = [path for path in folder.glob("model*.safetensors") if path.name not in names]
    for path in [*stale, folder / INDEX]:
        path.unlink(missing_ok=True)
    if len(names) == 1:
        return
    weight_map, size = {}, 0
    for name in names:
        for key, (start, end) in _offsets(folder / name).items():
            weight_map[key], size = name, size + end - start
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _offsets(file: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor of a safetensors file begins and ends, from its header alone."""
    with file.open("rb") as content:
        header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
    return {key: tuple(entry["data_offsets"]) for key, entry in header.items() if key != "__metadata__"}


def _write_configs(module: nn.Module, folder: Path) -> None:
    parts: list[Any] = [getattr(module, name, None) for name in ("config", "generation_config")]
    if parts[0] is not None:
        parts[0].architectures = [type(module).__name__]
    for part in parts:
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(folder)


def _no_optimizer_state() -> CheckpointError:
    return CheckpointError(
        "optimizer states of a pipeline cannot be saved or loaded yet: booster.save_model saves the weights, and "
        "booster.save_lr_scheduler the schedule"
    )
