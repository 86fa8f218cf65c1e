"""Safetensors files: reading a checkpoint's tensors one at a time, writing them on each rank, and joining the files.

The files of an optimizer can be read with torch.distributed.checkpoint's `HuggingFaceStorageReader`: their metadata
contains the offset of each shard in the full tensor. Ranks write and read these files without communication, and
nothing is pickled.
"""

import json
import math
import os
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import islice
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from pipeshard.checkpoint.files import sync, writes
from pipeshard.checkpoint.untrusted import has_content, is_inside, load_plain, read_document
from pipeshard.distributed.collectives import local, reason
from pipeshard.errors import CheckpointError, explained, listed, summary
from pipeshard.hf import has_adapters, without_adapters
from pipeshard.replaced import replaced

# In order of preference. If a checkpoint has several files, its index lists them.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
PICKLED = (".bin", ".pt", ".pth")  # suffixes of files that torch.save wrote
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # in safetensors
SCALES = "absmax", "quant_map", "quant_state.", "nested_absmax", "nested_quant_map", "SCB", "weight_format"
FILES = (WEIGHTS[0], INDICES[0], WEIGHTS[1], INDICES[1])


class StoredTensors:
    """The tensors of a checkpoint. `shapes` contains the shape of each key, `read` returns a key's tensor, and `rows`
    returns a matrix whose rows are read when the matrix is sliced. `bytes_read` is the number of bytes that `read` and
    `rows` have read. `scales` maps the key of each quantized weight to the keys of its scales, by suffix. `shapes`
    omits the scales.

    Safetensors files are read, not memory-mapped, so that each tensor takes memory only once. Pickled files (.bin, .pt
    and .pth) are loaded with `weights_only=True`, which executes no code. Since files may be untrusted, this class
    checks that no shape exceeds the stored data, and that an index lists only files in its own folder. Raises
    CheckpointError for files that cannot be read, and for an index that lists tensors missing from the files.
    """

    def __init__(self, path: Path, model: nn.Module | None = None) -> None:
        self.path, self.bytes_read = path, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        self._states: dict[Path, dict[str, Tensor]] = {}
        self._open: tuple[Path, Any, tuple[int, dict[str, Any]]] | None = None
        files, listed = files_of(path)
        for file in files:
            shapes = self._shapes(file, model)
            self.shapes |= shapes
            self._files |= dict.fromkeys(shapes, file)
        if lost := sorted(listed.keys() - self.shapes.keys()):
            raise CheckpointError(
                f"the index of {path} lists {lost[0]!r} in {listed[lost[0]]!r}, but that file does not contain this "
                f"tensor. The checkpoint is incomplete (missing tensors: {len(lost)}): save or download it again"
            )
        self.scales = _scales(self.shapes)
        for of_weight in self.scales.values():
            for key in of_weight.values():
                del self.shapes[key]

    def read(self, key: str) -> Tensor:
        """Read the tensor with this key into its own storage."""
        file = self._files[key]
        if file in self._states:
            tensor = self._states[file][key].clone(memory_format=torch.contiguous_format)
        else:
            content = self._opened(file)[1]
            with _naming_file(file):
                tensor = content.get_tensor(key)
        self.bytes_read += tensor.nbytes
        return tensor

    def rows(self, key: str) -> "Tensor | StoredRows":
        """The matrix with this key. Its rows are read from the file when the matrix is sliced. Tensors in pickled and
        GGUF files, and tensors with a dtype that is not in FLOATS, are returned as ordinary tensors."""
        file = self._files[key]
        if file in self._states:
            self.bytes_read += self._states[file][key].nbytes
            return self._states[file][key]
        start, entries = self._opened(file)[2]
        entry = entries[key]
        if entry["dtype"] not in FLOATS:
            return self.read(key)
        begin, end = entry["data_offsets"]
        self.bytes_read += end - begin
        return StoredRows(file, start + begin, tuple(entry["shape"]), FLOATS[entry["dtype"]])

    def ordered(self, keys: Iterable[str]) -> list[str]:
        """The keys, sorted by the files that contain them."""
        order = {file: k for k, file in enumerate(dict.fromkeys(self._files.values()))}
        return sorted(keys, key=lambda key: order[self._files[key]])

    def _opened(self, file: Path) -> tuple[Path, Any, tuple[int, dict[str, Any]]]:
        """The file, its content and its header. The most recently opened file stays open."""
        if self._open is None or self._open[0] != file:
            self._open = file, open_file(file), _header(file)
        return self._open

    def _shapes(self, file: Path, model: nn.Module | None) -> dict[str, tuple[int, ...]]:
        if file.suffix in PICKLED:
            self._states[file] = _unpickled(file)
        elif self.path.suffix == ".gguf":
            self._states[file] = _from_gguf(file, model)
        if file in self._states:
            return {key: tuple(tensor.shape) for key, tensor in self._states[file].items()}
        content = open_file(file)
        with _naming_file(file):
            return {key: tuple(content.get_slice(key).get_shape()) for key in content.keys()}  # noqa: SIM118


@dataclass(frozen=True)
class StoredRows:
    """A matrix in a safetensors file. `begin` is the matrix's offset in the file. Rows are read from the file when the
    matrix is sliced, so the matrix takes no memory."""

    file: Path
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, rows: slice) -> Tensor:
        first, end, _ = rows.indices(self.shape[0])
        read = torch.empty(end - first, *self.shape[1:], dtype=self.dtype)
        into: Any = read.view(torch.uint8).numpy()
        size = read.nbytes // max(1, end - first)
        with _naming_file(self.file), self.file.open("rb") as content:
            content.seek(self.begin + first * size)
            if content.readinto(into) < read.nbytes:
                raise OSError("the file is shorter than its header declares")
        return read


def _scales(keys: Collection[str]) -> dict[str, dict[str, str]]:
    """Map the key of each quantized weight to the keys of its scales: `x.weight.absmax` (4 bits), `x.SCB` (8 bits)."""
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        layer, _, end = key.partition(".weight.")
        if not end:
            layer, _, end = key.rpartition(".")
        if f"{layer}.weight" in keys and end.startswith(SCALES):
            found.setdefault(f"{layer}.weight", {})[end] = key
    return found


def files_of(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of a checkpoint, and the file that its index lists for each key ({} without an index).

    Raises CheckpointError if a file is missing, or if the index cannot be read or lists a file outside its folder.
    """
    if path.is_dir():
        found = next((path / name for name in FILES if (path / name).exists()), None)
        if found is None:
            raise CheckpointError(
                f"{path} does not contain a checkpoint: it has none of {', '.join(FILES)}. Pass a file, or a folder "
                "that save_pretrained or booster.save_model(shard=True) wrote"
            )
        path = found
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: pass a folder, an index or a weights file")
    if path.suffix != ".json":
        return [path], {}
    try:
        listed = read_document(path)["weight_map"]
        if not isinstance(listed, dict):
            raise TypeError("the weight_map must be a JSON object")
        files = sorted({_of_folder(path, name) for name in listed.values()})
        lost = [file for file in files if not (path.parent / file).is_file()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint index: {summary(error)}. Save or download the checkpoint again"
        ) from error
    if lost:
        raise CheckpointError(
            f"{path} refers to {lost[0]!r}, which is missing: the checkpoint is incomplete. Save or download it again"
        )
    return [path.parent / file for file in files], listed


def stored_dtype(folder: Path) -> torch.dtype | None:
    """The dtype of a checkpoint's first floating-point tensor, or None if no such tensor exists. transformers uses this
    dtype if the config specifies none. Raises CheckpointError for files that cannot be read."""
    if not any((folder / name).exists() for name in FILES):
        return None
    first = files_of(folder)[0][0]
    if first.suffix in PICKLED:
        return next((value.dtype for value in _unpickled(first).values() if value.is_floating_point()), None)
    content = open_file(first)
    with _naming_file(first):
        dtypes = [content.get_slice(key).get_dtype() for key in content.keys()]  # noqa: SIM118
    return next((FLOATS[dtype] for dtype in dtypes if dtype in FLOATS), None)


def _of_folder(index: Path, name: object) -> str:
    if not is_inside(name) or "/" in name:
        raise CheckpointError(
            f"{index} lists {short(name)}, but may only list names of files in its own folder. Save the checkpoint "
            "again, or correct the weight_map of the index"
        )
    return name


def open_file(file: Path) -> Any:
    """Open a safetensors file, and check that the header describes the content of the file.

    Raises CheckpointError if the file does not exist, or is not a valid safetensors file.
    """
    with _naming_file(file):
        if not file.is_file():
            raise FileNotFoundError("it does not exist")
        return safe_open(file, "pt", backend="pread")


@contextmanager
def _naming_file(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, TypeError, ValueError) as error:  # torch raises the last three
        raise CheckpointError(
            f"{file} cannot be read as safetensors ({reason(error)}). Check that the file is complete and is a "
            "safetensors file, or pass a folder that save_pretrained wrote"
        ) from error


def _unpickled(file: Path) -> dict[str, Tensor]:
    state = load_plain(
        file, "a checkpoint that weights_only=True can load", "if you trust the file, convert it to safetensors"
    )
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(
            f"{file} does not contain a dict that maps names to tensors: pass a file with the weights of a model"
        )
    if hollow := [key for key, value in state.items() if not has_content(value)]:
        raise CheckpointError(f"{file} has no values for {short(hollow[0])}: pass a file with the weights of a model")
    return state


def _from_gguf(file: Path, model: nn.Module | None) -> dict[str, Tensor]:
    """Read all tensors of a GGUF file at once. transformers converts the tensors from llama.cpp's names and row
    order."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    if model is not None and has_adapters(model):  # a PeftModel's layers have other names
        base: Any = without_adapters(model)[1]
        with torch.device("meta"):
            model = type(base)(base.config)
    with explained(  # gguf barely validates the content
        lambda error: CheckpointError(f"{file} cannot be read as GGUF ({summary(error)}): check that it is complete")
    ):
        import gguf

        # transformers would build the same map again for each module of the model.
        with replaced(gguf, get_tensor_name_map=cache(gguf.get_tensor_name_map)):
            return load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]


def joined_file(parts: Sequence[Path], target: Path) -> None:
    """Write the tensors of all parts to the file `target`. Each tensor name may occur in only one part.

    A safetensors file consists of the header's length, the header, and the tensors' bytes at the header's offsets.

    Raises CheckpointError if a part is not a complete safetensors file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, offset = [], 0
    for part in parts:
        open_file(part)  # checks that the header describes the file
        start, entries = _header(part)
        for name, entry in entries.items():
            if name != "__metadata__":
                header[name] = entry | {"data_offsets": [offset + at for at in entry["data_offsets"]]}
        starts.append(start)
        offset += part.stat().st_size - start
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as whole:
        whole.write(len(text).to_bytes(8, "little") + text)
        for part, start in zip(parts, starts, strict=True):
            with part.open("rb") as content:
                content.seek(start)
                shutil.copyfileobj(content, whole, 1 << 20)


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """The offset at which the tensors' bytes begin in a safetensors file, and the header. Call `open_file` first, which
    checks the header."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        return 8 + length, json.loads(content.read(length))


def write_file(tensors: Mapping[str, Tensor], target: Path, room: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically: the file is written in the folder `room`, then renamed to `target`. The file
    has the permissions of an ordinary new file."""
    with writes(target):
        room.mkdir(exist_ok=True)
        path = room / target.name
        path.touch()
        mode = path.stat().st_mode
        save_file(dict(tensors), path, metadata)
        path.chmod(mode)
        sync(path)
        os.replace(path, target)
        room.rmdir()


LARGEST_FILE = 1 << 30  # the maximum number of bytes per file, and per copy; a larger tensor has its own file


RANK_FILES = "rank-?????-?????.safetensors"  # the pattern of the names of the files that ranks write
FileContent = tuple[dict[str, Tensor], dict[str, str]]  # the content of a file: copies of tensors, and metadata


def file_contents(tensors: Mapping[str, Tensor]) -> Iterator[FileContent]:
    """Yield the content of each file that this rank writes. The tensors are copies of this rank's shards of
    `tensors`."""
    for names in _shard_files(tensors):
        parts = {name: _on_cpu(local(tensors[name].detach())) for name in names}
        begins = {name: {"saved_offsets": _begin(tensors[name])} for name in names}
        yield parts, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(begins)}


def write_files(files: Iterable[FileContent], folder: Path, rank: int) -> list[Path]:
    """Write this rank's `file_contents` into `folder`. Returns the paths of the files."""
    written = []
    for k, (parts, metadata) in enumerate(files):
        written.append(folder / f"rank-{rank:05d}-{k:05d}.safetensors")
        write_file(parts, written[-1], folder / f".rank-{rank:05d}", metadata)
    return written


def read_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read `tensors` (DTensors or ordinary tensors) in place from a folder that any number of ranks wrote.

    Raises CheckpointError for files that cannot be read. Call `check_shards` first.
    """
    reader = HuggingFaceStorageReader(str(folder))
    try:
        with warnings.catch_warnings():  # torch warns that it reads without a process group
            warnings.simplefilter("ignore", UserWarning)
            load(dict(tensors), storage_reader=reader, no_dist=True)
    except CheckpointException as error:  # torch wraps this rank's error
        raise CheckpointError(
            f"{folder} is damaged: {reason(error.failures[0][0])}. Load another checkpoint"
        ) from error


def check_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless the ranks' files in the folder contain exactly `tensors` (possibly on meta), by
    name, shape and dtype.

    The check allocates no tensors. Reading files that pass the check takes no more memory than the size of the files.
    """
    stored = _stored(folder)
    problems = [f"{name} is missing" for name in sorted(tensors.keys() - stored.keys())]
    problems += [f"{name!r} is unexpected" for name in sorted(stored.keys() - tensors.keys())]
    for name in sorted(tensors.keys() & stored.keys()):
        said, found = tensors[name], stored[name]
        if (said.shape, said.dtype) != (found.size, found.properties.dtype):
            problems.append(
                f"{name} is {found.properties.dtype} of shape {tuple(found.size)}, but is described as {said.dtype} of "
                f"shape {tuple(said.shape)}"
            )
        elif not _is_whole(found):
            problems.append(f"{name} is incomplete: the slices in the files do not cover the tensor exactly once")
    if problems:
        raise CheckpointError(f"{folder} is damaged: {listed(problems)}. Load another checkpoint")


def _shard_files(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names of the tensors in each file. Sharded tensors without elements on this rank are omitted."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        part = local(tensor)
        if part.numel() == 0 < tensor.numel():
            continue
        if names and size + part.nbytes > LARGEST_FILE:
            yield names
            names, size = [], 0
        names.append(name)
        size += part.nbytes
    if names:
        yield names


def _on_cpu(part: Tensor) -> Tensor:
    """A copy of the part on the CPU, with its own storage: safetensors rejects tensors that share storage."""
    return part.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _begin(tensor: Tensor) -> list[int]:
    """The offset of this rank's shard in the full tensor."""
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()  # torch.distributed.checkpoint also calls this
        return list(chunk.offsets)
    return [0] * tensor.ndim


def _stored(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Read the metadata of the tensors in the ranks' files, by name, from the files' headers. Files of a model in the
    same folder are ignored."""
    with explained(  # torch does not check the JSON, which may be untrusted
        lambda error: CheckpointError(f"{folder} is damaged: {reason(error)}. Load another checkpoint")
    ):
        read = HuggingFaceStorageReader(str(folder)).read_metadata()
        files = [(index.fqn, Path(info.relative_path).name) for index, info in read.storage_data.items()]
        own = {name for name, file in files if fnmatchcase(file, RANK_FILES)}
        return {name: read.state_dict_metadata[name] for name in own}  # type: ignore[misc]


def _is_whole(stored: TensorStorageMetadata) -> bool:
    """Whether the chunks cover the tensor exactly once. torch derives the tensor's size from the ends of the chunks, so
    no chunk exceeds the tensor."""
    chunks, dims = stored.chunks, len(stored.size)
    if any(len(c.offsets) != dims or len(c.sizes) != dims or min(c.offsets, default=0) < 0 for c in chunks):
        return False
    if sum(math.prod(c.sizes) for c in chunks) != math.prod(stored.size):
        return False
    boxes = sorted([(at, at + size) for at, size in zip(c.offsets, c.sizes)] for c in chunks)
    for k, box in enumerate(boxes if dims else []):
        for other in islice(boxes, k + 1, None):
            if other[0][0] >= box[0][1]:  # this and all later boxes begin after `box`
                break
            if all(a < d and c < b for (a, b), (c, d) in zip(box, other)):
                return False
    return True
