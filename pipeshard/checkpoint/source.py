"""Source: the tensors of a checkpoint on disk, read one at a time."""

import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pipeshard.errors import CheckpointError

# In the order of preference; an index names the files of a folder that has several.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
FILES = (WEIGHTS[0], INDICES[0], WEIGHTS[1], INDICES[1])


class Source:
    """`shapes` are those of all tensors, by key; `bytes_read` counts what `read` gave.

    Safetensors files are read, not mapped, so that a tensor takes memory once; pickled ones (.bin) with
    `weights_only=True`, which runs no code.
    """

    def __init__(self, path: Path, model: nn.Module | None = None) -> None:
        self.path, self.bytes_read = path, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        self._states: dict[Path, dict[str, Tensor]] = {}
        self._open: tuple[Path, Any] | None = None
        files, listed = _files(path)
        for file in files:
            shapes = self._gguf(file, model) if file.suffix == ".gguf" else self._shapes(file)
            self.shapes |= shapes
            self._files |= dict.fromkeys(shapes, file)
        if lost := sorted(listed.keys() - self.shapes.keys()):
            raise CheckpointError(
                f"{path} has an index that names {lost[0]} in {listed[lost[0]]}, but the file has no such tensor "
                f"({len(lost)} in all): the checkpoint is not whole"
            )

    def read(self, key: str) -> Tensor:
        """The tensor, in memory of its own."""
        file = self._files[key]
        if file in self._states:
            tensor = self._states[file][key].clone(memory_format=torch.contiguous_format)
        else:
            if self._open is None or self._open[0] != file:
                self._open = file, _opened(file)
            tensor = self._open[1].get_tensor(key)
        self.bytes_read += tensor.nbytes
        return tensor

    def ordered(self, keys: Iterable[str]) -> list[str]:
        """The keys by the files that have them."""
        order = {file: k for k, file in enumerate(dict.fromkeys(self._files.values()))}
        return sorted(keys, key=lambda key: order[self._files[key]])

    def _shapes(self, file: Path) -> dict[str, tuple[int, ...]]:
        if file.suffix in (".bin", ".pt", ".pth"):
            self._states[file] = _unpickled(file)
            return {key: tuple(tensor.shape) for key, tensor in self._states[file].items()}
        content = _opened(file)
        return {key: tuple(content.get_slice(key).get_shape()) for key in content.keys()}  # noqa: SIM118

    def _gguf(self, file: Path, model: nn.Module | None) -> dict[str, tuple[int, ...]]:
        """All of it, for llama.cpp's names and order of rows are transformers' to undo."""
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        try:
            found = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
        except Exception as error:
            raise CheckpointError(f"{file} cannot be read as GGUF: {type(error).__name__}: {error}") from error
        self._states[file] = found["tensors"]
        return {key: tuple(tensor.shape) for key, tensor in self._states[file].items()}


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of a checkpoint, and what its index says of each tensor."""
    if path.is_dir():
        found = next((path / name for name in FILES if (path / name).exists()), None)
        if found is None:
            raise CheckpointError(
                f"{path} holds no checkpoint: there is none of {', '.join(FILES)} in it. Pass a folder that "
                "save_pretrained or booster.save_model(shard=True) wrote, or a file"
            )
        path = found
    if not path.exists():
        raise CheckpointError(f"{path} cannot be read: there is no such file or folder")
    if path.suffix != ".json":
        return [path], {}
    try:
        listed = {str(key): str(name) for key, name in json.loads(path.read_text())["weight_map"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is no index of a checkpoint: {type(error).__name__}: {error}") from error
    files = sorted(set(listed.values()))
    if outside := [name for name in files if Path(name).name != name or name in ("", ".", "..")]:
        raise CheckpointError(f"{path} names {outside[0]!r}, which is not a file of its own folder")
    if lost := [name for name in files if not (path.parent / name).is_file()]:
        raise CheckpointError(f"{path} names {lost[0]}, which is not there: the checkpoint is not whole")
    return [path.parent / name for name in files], listed


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, "pt", backend="pread")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} cannot be read as safetensors ({error}): it is cut short, or something else. Pass a folder that "
            "save_pretrained wrote, or one file"
        ) from error


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be read with weights_only=True ({type(error).__name__}: {str(error).splitlines()[0]}): "
            "convert the checkpoint to safetensors where you trust it"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{file} holds no tensors by name: pass the weights of a model")
    return state
