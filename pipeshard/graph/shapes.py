"""Shapes: tensor shapes as affine functions of the sizes that may change between steps, and placeholder tensors."""

import math
import mmap
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeshard.batch.batch import Batch
from pipeshard.batch.tree import text
from pipeshard.hf import BOUNDARIES, is_mask, is_of_decoder

Group = tuple[tuple[str, int], ...]  # axes of the same size: (path of the tensor, dimension)


@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of a tensor, and whether the tensor requires a gradient.

    `slopes[d][g]` is the increase of dimension d if the size of axis group g increases by 1.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    slopes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def at(self, deltas: Sequence[int]) -> tuple[int, ...]:
        """The shape for a batch whose groups' sizes differ from the traced sizes by `deltas`."""
        if not any(deltas) or not self.slopes:
            return self.shape
        return tuple(
            size + sum(slope * delta for slope, delta in zip(slopes, deltas))  # pinned groups have no delta
            for size, slopes in zip(self.shape, self.slopes, strict=True)
        )


@dataclass(frozen=True)
class Count:
    """An integer that depends on the batch's sizes: an affine function of these sizes or, with `is_product`, a multiple
    of the product of some of the sizes. `slopes[g]` is the increase of the integer if the size of axis group g
    increases by 1 and all other groups have their traced sizes."""

    value: int
    slopes: tuple[int, ...]
    is_product: bool = False

    def at(self, deltas: Sequence[int]) -> int:
        """The integer for a batch whose groups' sizes differ from the traced sizes by `deltas`."""
        grown = [slope * delta for slope, delta in zip(self.slopes, deltas)]  # pinned groups have no delta
        if not self.is_product:
            return self.value + sum(grown)
        return int(math.prod((1 + Fraction(more, self.value) for more in grown), start=Fraction(self.value)))


def is_count(leaf: Any) -> bool:
    """Whether the leaf is an integer that may depend on the batch's sizes."""
    return type(leaf) in (int, Count)


@dataclass(frozen=True)
class Axes:
    """The groups of axes of batches with one structure. The axes in group 0 count the samples.

    Sequence axes of the same size on the same side (encoder or decoder) form one group. All other axes are pinned: a
    batch in which the size of a pinned axis differs from the traced size must be traced again.
    """

    groups: tuple[Group, ...]
    sizes: tuple[int, ...]
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    others: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, batch: Batch, encoder_decoder: bool = False) -> Self:
        groups: dict[tuple[str, int], list[tuple[str, int]]] = {("rows", batch.rows): []}

        def side(path: str) -> str:
            return "decoder" if is_of_decoder(path, encoder_decoder) else "encoder"

        tensors = batch.tensors
        dims = dict(zip(batch.paths, batch.row_dims, strict=True))
        for path in sorted(tensors, key=lambda path: (tensors[path].ndim != 2, batch.paths.index(path))):
            leaf = tensors[path]
            for axis, size in enumerate(leaf.shape):
                if axis == dims[path]:
                    groups["rows", batch.rows].append((path, axis))
                    continue
                key = (side(path), size)
                opens = leaf.ndim == 2 and size > 1  # (b, s): token ids, masks, labels, raw audio
                if opens:
                    groups.setdefault(key, [])
                beside = 0 if dims[path] == 1 else 1  # the axis s of (b, s, h) or (s, b, h)
                if key in groups and (opens or axis == beside or not leaf.is_floating_point() or is_mask(path)):
                    groups[key].append((path, axis))
        return cls(
            tuple(tuple(group) for group in groups.values()),
            tuple(size for _, size in groups),
            tuple((path, tuple(leaf.shape), leaf.dtype) for path, leaf in tensors.items()),
            batch.others,
        )

    def pin(self, pinned: set[int]) -> Self:
        """These Axes with the sizes of the groups `pinned` fixed."""
        keep = [g for g in range(len(self.groups)) if g not in pinned]
        groups, sizes = tuple(self.groups[g] for g in keep), tuple(self.sizes[g] for g in keep)
        return type(self)(groups, sizes, self.tensors, self.others)

    def deltas(self, batch: Batch) -> tuple[int, ...] | None:
        """The differences between the groups' sizes in `batch` and the traced sizes. None if `batch` has a different
        structure, dtype, pinned size or non-tensor leaf than the traced batch, or if the axes of a group differ in
        size. If the traced batch has no boundaries of documents, `batch` may have them."""
        if absent := [path for path, leaf in self.others if path in BOUNDARIES and leaf == text(None)]:
            batch = batch.without(absent)
        tensors = batch.tensors
        if len(tensors) != len(self.tensors) or len(batch.leaves) != len(self.tensors) + len(self.others):
            return None
        free = {axis for group in self.groups for axis in group}
        for path, shape, dtype in self.tensors:
            leaf = tensors.get(path)
            if leaf is None or leaf.dtype != dtype or leaf.ndim != len(shape):
                return None
            if any(leaf.shape[k] != size for k, size in enumerate(shape) if (path, k) not in free):
                return None
        if self.others and self.others != batch.others:
            return None
        deltas = []
        for group, size in zip(self.groups, self.sizes, strict=True):
            now = {tensors[path].shape[axis] for path, axis in group} or {batch.rows}  # only lists count samples
            if len(now) != 1:
                return None
            deltas.append(now.pop() - size)
        return tuple(deltas)

    def shortened(self, batch: Batch, length: int) -> Batch:
        """`batch` with every group except group 0 (the samples) shortened to at most `length`. Returns `batch` itself
        if no such group is longer than `length`."""
        deltas = self.deltas(batch) or (0,) * len(self.sizes)
        for group, (size, delta) in list(enumerate(zip(self.sizes, deltas)))[1:]:
            if size + delta > length:
                batch = self.resized(batch, group, length - size - delta)
        return batch

    def resized(self, batch: Batch, group: int, delta: int) -> Batch:
        """`batch` with the size of one group changed by `delta`. An extended axis repeats its last slice."""
        if group == 0:
            return batch.take(torch.arange(batch.rows + delta).clamp_(max=batch.rows - 1))
        members: dict[str, list[int]] = {}
        for path, axis in self.groups[group]:
            members.setdefault(path, []).append(axis)

        def resize(path: str, leaf: Tensor, dim: int | None) -> Tensor:
            for axis in members.get(path, ()):
                size = leaf.shape[axis]
                index = torch.arange(size + delta, device=leaf.device).clamp_(max=size - 1)
                leaf = leaf.index_select(axis, index)
            return leaf

        return batch.map(resize)


# These flags reserve no memory: a placeholder may be larger than the machine's memory, and is seldom accessed.
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)  # 0x4000: MAP_NORESERVE


ANCHOR = torch.zeros((), device="cpu", requires_grad=True)  # the input of every _StandIn


class _StandIn(torch.autograd.Function):
    """Zeros that require grad but are not a leaf of autograd's graph, so glue may write to them in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, spec: TensorSpec, device: torch.device) -> Tensor:
        return _zeros(spec, device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, None


def _zeros(spec: TensorSpec, device: torch.device) -> Tensor:
    """Zeros whose memory the system allocates only when glue accesses them: most placeholders of a large model are only
    passed on."""
    if device.type != "cpu" or 0 in spec.shape:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    size = math.prod(spec.shape) * spec.dtype.itemsize
    untouched = torch.from_numpy(np.frombuffer(mmap.mmap(-1, size, flags=_FLAGS), dtype=np.uint8))
    return torch.empty(0, dtype=spec.dtype).set_(untouched.untyped_storage()).resize_(spec.shape)


def placeholder(spec: TensorSpec, device: torch.device) -> Tensor:
    """Zeros with the shape, dtype and requires_grad of `spec`."""
    if spec.requires_grad:
        return _StandIn.apply(ANCHOR, spec, device)
    return _zeros(spec, device)


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A placeholder on `device` with the values of `tensor`, so that masks and positions that no unit has computed are
    correct."""
    copied = placeholder(TensorSpec.of(tensor), device)
    copied.data.copy_(tensor)
    return copied


def has_values(tensor: Tensor) -> bool:
    """Whether a unit's own tensor has values on this rank: the tensor is neither on meta, nor released, nor sharded
    across ranks."""
    values = getattr(tensor, "pipeshard_values", tensor)
    return not (values.is_meta or hasattr(tensor, "pipeshard_trainable") or isinstance(tensor, DTensor))


def blank_state(module: nn.Module, device: torch.device, lent: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """New tensors on `device`, by name, for a unit's parameters and buffers. Tied names share one tensor. On a device
    other than meta, each tensor contains the first of the following that exists: its values in `lent` (from another
    rank), its values on this rank, or zeros."""
    lent = lent or {}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    blanks: dict[Tensor, Tensor] = {}
    for name, t in named:
        if t not in blanks:
            values, dtype = getattr(t, "pipeshard_values", t), getattr(t, "pipeshard_dtype", t.dtype)
            values = lent.get(name, values)
            real = (name in lent or has_values(t)) and device.type != "meta"
            there = values.detach().to(device, dtype) if real else torch.zeros(t.shape, dtype=dtype, device=device)
            blanks[t] = nn.Parameter(there, is_trainable(t)) if isinstance(t, nn.Parameter) else there.clone()
    return {name: blanks[t] for name, t in named}


def is_trainable(tensor: Tensor) -> bool:
    """Whether a parameter is trained on this stage. If this stage has released the parameter, whether another stage
    trains it."""
    return getattr(tensor, "pipeshard_trainable", tensor.requires_grad)
