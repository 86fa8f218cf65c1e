"""The mesh: ranks laid out on an n-dimensional grid, with a process group along any of its axes."""

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeshard.errors import ConfigurationError

Coordinate = tuple[int, ...]
Axes = int | Sequence[int]
Indices = Sequence[int] | Sequence[Sequence[int]]


class ProcessGroupMesh:
    """Ranks on a grid in row-major order: on a mesh of (2, 2, 2), rank 2 is at coordinate (0, 1, 0).

    The groups along each single axis are those of a `torch.distributed` DeviceMesh and are made here; others are made
    when asked for. Methods and meanings are those of `colossalai.cluster.ProcessGroupMesh` 0.5. All ranks construct it.

    Args:
        *size: ranks along each axis; their product is the world size.

    Attributes:
        shape: `size`.
        rank: this process's rank in the world.

    Raises:
        ConfigurationError: torch.distributed is not initialized, or the sizes do not multiply to the world size.
    """

    def __init__(self, *size: int) -> None:
        if not dist.is_initialized():
            raise ConfigurationError(
                "A mesh needs a world: call torch.distributed.init_process_group(...) first, in a script that is "
                "started by torchrun --nproc-per-node N script.py."
            )
        if not size or min(size) < 1 or math.prod(size) != dist.get_world_size():
            raise ConfigurationError(f"{size}: choose sizes whose product is {dist.get_world_size()}, the world size.")
        self.shape: Coordinate = size
        self.rank = dist.get_rank()
        # Of the configuration, which is like "cpu:gloo,cuda:gloo" or "cuda:nccl", the first device is for messages of
        # the mesh itself: gloo gathers on the CPU alone. The tensors that others put on the mesh are on a GPU.
        config = dist.get_backend_config()
        self._messages = config.split(":")[0]
        kind = "cuda" if "cuda:" in config and torch.cuda.is_available() else self._messages
        names = tuple(map(axis_name, range(len(size))))
        self._device_mesh = init_device_mesh(kind, size, mesh_dim_names=names)
        # By ranks and backend. The keys are the same on every rank, so that all agree on what is yet to be made.
        self._groups: dict[tuple[tuple[int, ...], str | None], dist.ProcessGroup | None] = {}
        for axis in range(len(size)):
            for ranks in self._ranks_along(axis, None):
                self._groups[ranks, None] = self._device_mesh.get_group(axis) if self.rank in ranks else None

    def along(self, *axes: int) -> DeviceMesh:
        """torch's own mesh of the ranks that differ from this one on these axes alone, in the order of the axes."""
        return self._device_mesh[tuple(axis_name(axis) for axis in sorted(_axis(axis, self.shape) for axis in axes))]

    def size(self, dim: int | None = None) -> int | Coordinate:
        """Ranks along axis `dim`, or the whole shape."""
        return self.shape if dim is None else self.shape[_axis(dim, self.shape)]

    def coordinate(self, dim: int | None = None) -> int | Coordinate:
        """This process's index on axis `dim`, or its whole coordinate."""
        coord = self.unravel(self.rank, self.shape)
        return coord if dim is None else coord[_axis(dim, coord)]

    @staticmethod
    def unravel(rank: int, shape: Coordinate) -> Coordinate:
        """The coordinate of a rank. Raises ConfigurationError if the shape has no such rank."""
        if not 0 <= rank < math.prod(shape):
            raise ConfigurationError(f"Rank {rank} is outside a mesh of {shape}: use 0 to {math.prod(shape) - 1}.")
        return tuple(map(int, np.unravel_index(rank, shape)))

    @staticmethod
    def ravel(coord: Coordinate, shape: Coordinate, mode: Literal["raise", "wrap", "clip"] = "raise") -> int:
        """The rank at a coordinate; `mode` is for an index out of range, as in `numpy.ravel_multi_index`.

        Raises:
            ConfigurationError: unknown mode, wrong number of indices, or (in mode "raise") an index out of range.
        """
        try:
            return int(np.ravel_multi_index(coord, shape, mode))
        except ValueError as error:
            raise ConfigurationError(f"{coord} is outside a mesh of {shape} in mode {mode!r}: {error}.") from error

    @staticmethod
    def get_coords_along_axis(base_coord: Coordinate, axis: Axes, indices_at_axis: Indices) -> list[Coordinate]:
        """`base_coord` with its indices on `axis` replaced by every choice of `indices_at_axis`, the last axis fastest.

        Args:
            base_coord: where to start from.
            axis: one axis, or several.
            indices_at_axis: indices on that one axis, or a list of them for each of the several.

        Raises:
            ConfigurationError: no such axis, or indices that are not of this form.
        """
        axes = [axis] if isinstance(axis, int) else axis
        choices: Any = [indices_at_axis] if isinstance(axis, int) else indices_at_axis
        lists = all(isinstance(chosen, Sequence) and all(isinstance(i, int) for i in chosen) for chosen in choices)
        if len(axes) != len(choices) or not lists:
            raise ConfigurationError(f"Give one list of indices per axis: {indices_at_axis} does not fit axis {axis}.")
        coords = [base_coord]
        for at, chosen in zip([_axis(ax, base_coord) for ax in axes], choices):
            coords = [(*coord[:at], index, *coord[at + 1 :]) for coord in coords for index in chosen]
        return coords

    def create_group_along_axis(
        self, axis: Axes, indices_at_axis: Indices | None = None, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """The group of the ranks that differ from this one only on `axis`; made on all ranks where it is not there yet.

        A collective: every rank of the world calls it, with the same `backend`. The axes and indices may differ.

        Args:
            axis: one axis, or several (the group then spans all their combinations).
            indices_at_axis: indices on that one axis, or a list of them for each of the several; None means all.
            backend: None for that of the world.

        Returns:
            The group, or None where this rank's own index is not among `indices_at_axis`.

        Raises:
            ConfigurationError: an axis or index the mesh does not have.
        """
        wanted = self._ranks_along(axis, indices_at_axis)[self.rank]
        mask = torch.zeros(math.prod(self.shape), dtype=torch.int8, device=self._messages)
        mask[list(wanted)] = 1
        masks = mask.repeat(len(mask), 1)
        dist.all_gather(list(masks), mask)
        # A set's order differs between processes; new_group must be called in one order.
        for ranks in sorted({tuple(row.nonzero().flatten().tolist()) for row in masks}):
            if (ranks, backend) not in self._groups:
                group = dist.new_group(list(ranks), backend=backend)
                self._groups[ranks, backend] = group if self.rank in ranks else None
        return self._groups[wanted, backend]

    def get_group_along_axis(
        self, axis: Axes, indices_at_axis: Indices | None = None, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Like `create_group_along_axis`, but purely local once all ranks' groups of this kind exist.

        A single full axis always does. For others the first call is a collective; where ranks then differ in their
        indices, some new and some not, only `create_group_along_axis` is safe.
        """
        wanted = self._ranks_along(axis, indices_at_axis)
        # Every rank's group is looked at, not only this one's, so that all come to the same decision.
        if all((ranks, backend) in self._groups for ranks in wanted):
            return self._groups[wanted[self.rank], backend]
        return self.create_group_along_axis(axis, indices_at_axis, backend)

    def get_ranks_in_group(self, group: dist.ProcessGroup | None) -> list[int]:
        """The world ranks of a group that this mesh returned, ascending; none of None."""
        return [] if group is None else list(dist.get_process_group_ranks(group))

    def destroy_mesh_process_groups(self) -> None:
        """Destroy every group made by this mesh, never the world's own; the mesh has no groups afterwards."""
        for group in self._groups.values():
            if group not in (None, dist.group.WORLD):
                with suppress(ValueError):  # already gone: kept twice, or the world was destroyed first
                    dist.destroy_process_group(group)
        self._groups.clear()

    def _ranks_along(self, axis: Axes, indices_at_axis: Indices | None) -> list[tuple[int, ...]]:
        """For each rank of the world, the members of the group it would be given."""
        if indices_at_axis is None:
            axis = [axis] if isinstance(axis, int) else axis
            indices_at_axis = [range(self.shape[_axis(ax, self.shape)]) for ax in axis]
        bases = itertools.product(*map(range, self.shape))
        groups = [self.get_coords_along_axis(base, axis, indices_at_axis) for base in bases]
        return [tuple(sorted({self.ravel(coord, self.shape) for coord in coords})) for coords in groups]


def axis_name(axis: int) -> str:
    """What torch's own mesh calls an axis of this one."""
    return f"axis{axis}"


def _axis(axis: int, shape: Coordinate) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ConfigurationError(f"Axis {axis} is outside a mesh of {len(shape)} axes: use 0 to {len(shape) - 1}.")
    return axis % len(shape)
