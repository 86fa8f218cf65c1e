"""Source: the tensors of a checkpoint on disk, read one at a time."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pipeshard.checkpoint.document import is_inside, read_document
from pipeshard.checkpoint.plain import has_content, load_plain
from pipeshard.errors import CheckpointError
from pipeshard.runtime.codec import reason

# In the order of preference; an index names the files of a folder that has several.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
PICKLED = (".bin", ".pt", ".pth")  # suffixes of what torch.save wrote
FILES = (WEIGHTS[0], INDICES[0], WEIGHTS[1], INDICES[1])


class Source:
    """`shapes` are those of all tensors, by key; `bytes_read` counts what `read` gave.

    Safetensors files are read, not mapped, so that a tensor takes memory once; pickled ones (.bin) with
    `weights_only=True`, which runs no code. The shapes are no larger than the files, and an index names files of its
    own folder only, whoever wrote them. Raises CheckpointError for what cannot be read.
    """

    def __init__(self, path: Path, model: nn.Module | None = None) -> None:
        self.path, self.bytes_read = path, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        self._states: dict[Path, dict[str, Tensor]] = {}
        self._open: tuple[Path, Any] | None = None
        files, listed = _files(path)
        for file in files:
            shapes = self._gguf(file, model) if path.suffix == ".gguf" else self._shapes(file)
            self.shapes |= shapes
            self._files |= dict.fromkeys(shapes, file)
        if lost := sorted(listed.keys() - self.shapes.keys()):
            raise CheckpointError(
                f"{path} has an index that names {lost[0]!r} in {listed[lost[0]]!r}, but the file has no such tensor "
                f"({len(lost)} in all): the checkpoint is not whole"
            )

    def read(self, key: str) -> Tensor:
        """The tensor, in memory of its own."""
        file = self._files[key]
        if file in self._states:
            tensor = self._states[file][key].clone(memory_format=torch.contiguous_format)
        else:
            if self._open is None or self._open[0] != file:
                self._open = file, opened(file)
            with _named(file):
                tensor = self._open[1].get_tensor(key)
        self.bytes_read += tensor.nbytes
        return tensor

    def ordered(self, keys: Iterable[str]) -> list[str]:
        """The keys by the files that have them."""
        order = {file: k for k, file in enumerate(dict.fromkeys(self._files.values()))}
        return sorted(keys, key=lambda key: order[self._files[key]])

    def _shapes(self, file: Path) -> dict[str, tuple[int, ...]]:
        if file.suffix in PICKLED:
            self._states[file] = _unpickled(file)
            return {key: tuple(tensor.shape) for key, tensor in self._states[file].items()}
        content = opened(file)
        with _named(file):
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
    if not path.is_file():
        raise CheckpointError(f"{path} cannot be read: there is no such file or folder")
    if path.suffix != ".json":
        return [path], {}
    try:
        listed = read_document(path)["weight_map"]
        if not isinstance(listed, dict):
            raise TypeError("its weight_map is no object")
        files = sorted({_of_folder(path, name) for name in listed.values()})
        lost = [file for file in files if not (path.parent / file).is_file()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no index of a checkpoint: {type(error).__name__}: {error}") from error
    if lost:
        raise CheckpointError(f"{path} names {lost[0]!r}, which is not there: the checkpoint is not whole")
    return [path.parent / file for file in files], listed


def _of_folder(index: Path, name: object) -> str:
    if not is_inside(name) or "/" in name:
        raise CheckpointError(f"{index} names {short(name)}, which is not a file of its own folder")
    return name


def opened(file: Path) -> Any:
    """A safetensors file, of which the header was read, and describes what is in the file.

    Raises CheckpointError for any other.
    """
    with _named(file):
        if not file.is_file():
            raise FileNotFoundError("there is no such file")
        return safe_open(file, "pt", backend="pread")


@contextmanager
def _named(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, TypeError, ValueError) as error:  # torch's, for an absurd shape
        raise CheckpointError(
            f"{file} cannot be read as safetensors ({reason(error)}): it is cut short, or something else. Pass a "
            "folder that save_pretrained wrote, or one file"
        ) from error


def _unpickled(file: Path) -> dict[str, Tensor]:
    state = load_plain(
        file, "checkpoint that weights_only=True reads", "convert the checkpoint to safetensors where you trust it"
    )
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{file} holds no tensors by name: pass the weights of a model")
    if hollow := [key for key, value in state.items() if not has_content(value)]:
        raise CheckpointError(f"{file} has no values for {short(hollow[0])}: pass the weights of a model")
    return state
