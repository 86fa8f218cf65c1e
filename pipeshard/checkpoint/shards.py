"""Shards: tensors, or this rank's slices of them, as safetensors files that each rank writes for itself.

The files are those of torch.distributed.checkpoint's `HuggingFaceStorageReader`: their metadata say where in the whole
tensor each one begins. No rank has to hear of another one to write or read them, and nothing is pickled.
"""

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice, takewhile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from pipeshard.errors import CheckpointError, listed
from pipeshard.runtime.codec import reason
from pipeshard.runtime.local import local

LARGEST = 1 << 30  # bytes of a file, and so of what is copied at a time; a larger tensor is alone in its file


def write_shards(tensors: Mapping[str, Tensor], folder: Path, rank: int) -> None:
    """Write this rank's part of `tensors`, of which no other rank writes the same slice, into `folder`."""
    for k, names in enumerate(_files(tensors)):
        parts = {name: _copy(local(tensors[name].detach())) for name in names}
        begins = {name: {"saved_offsets": _begin(tensors[name])} for name in names}
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(begins)}
        save_file(parts, folder / f"rank-{rank:05d}-{k:05d}.safetensors", metadata)


def read_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors`, whole or sliced, in place, with what any number of ranks wrote.

    Raises CheckpointError for files that cannot be read; what `check_shards` finds is to be refused before.
    """
    reader = HuggingFaceStorageReader(str(folder))
    try:
        with warnings.catch_warnings():  # that it reads without the other ranks
            warnings.simplefilter("ignore", UserWarning)
            load(dict(tensors), storage_reader=reader, no_dist=True)
    except CheckpointException as error:  # around that of this rank, the only one it knows of
        raise CheckpointError(f"{folder} is damaged: {reason(error.failures[0][0])}") from error


def check_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse files that do not have exactly the `tensors`, which may be on meta, by name, shape and dtype.

    What passes takes no more memory than its files: nothing has to be allocated to know. Raises CheckpointError.
    """
    stored = _stored(folder)
    problems = [f"{name} is missing" for name in sorted(tensors.keys() - stored.keys())]
    problems += [f"{name!r} is unexpected" for name in sorted(stored.keys() - tensors.keys())]
    for name in sorted(tensors.keys() & stored.keys()):
        said, found = tensors[name], stored[name]
        if (said.shape, said.dtype) != (found.size, found.properties.dtype):
            problems.append(
                f"{name} is {found.properties.dtype} of shape {tuple(found.size)}, but {said.dtype} of shape "
                f"{tuple(said.shape)} by its description"
            )
        elif not _is_whole(found):
            problems.append(f"{name} is not whole: no file has some slice of it, or two files have one")
    if problems:
        raise CheckpointError(f"{folder} is damaged: {listed(problems)}")


def _files(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """The names of what goes into each file; of a sliced tensor this rank may have nothing."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        part = local(tensor)
        if part.numel() == 0 < tensor.numel():
            continue
        if names and size + part.nbytes > LARGEST:
            yield names
            names, size = [], 0
        names.append(name)
        size += part.nbytes
    if names:
        yield names


def _copy(part: Tensor) -> Tensor:
    """On the CPU, with a storage of its own: safetensors refuses tensors that share one."""
    return part.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _begin(tensor: Tensor) -> list[int]:
    """Where in the whole tensor this rank's part of it begins."""
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()  # what torch.distributed.checkpoint asks, too
        return list(chunk.offsets)
    return [0] * tensor.ndim


def _stored(folder: Path) -> dict[str, TensorStorageMetadata]:
    """What the headers of the files say."""
    try:
        return HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata  # type: ignore[return-value]
    except Exception as error:
        raise CheckpointError(f"{folder} is damaged: {reason(error)}") from error


def _is_whole(stored: TensorStorageMetadata) -> bool:
    """Whether the slices, all inside of the tensor, have as many elements as it has, and none twice."""
    chunks, dims = stored.chunks, len(stored.size)
    if any(len(c.offsets) != dims or len(c.sizes) != dims or min(c.offsets, default=0) < 0 for c in chunks):
        return False
    if sum(math.prod(c.sizes) for c in chunks) != math.prod(stored.size):
        return False
    boxes = sorted([(at, at + size) for at, size in zip(c.offsets, c.sizes)] for c in chunks)
    for k, box in enumerate(boxes if dims else []):
        behind = takewhile(partial(_begins_before, box[0][1]), islice(boxes, k + 1, None))
        if any(all(a < d and c < b for (a, b), (c, d) in zip(box, other)) for other in behind):
            return False
    return True


def _begins_before(end: int, box: list[tuple[int, int]]) -> bool:
    return box[0][0] < end
