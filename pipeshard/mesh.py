"""The mesh: ranks laid out on an n-dimensional grid, with a process group along any of its axes."""

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import cast, overload

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from pipeshard.errors import ConfigurationError

__all__ = ["ProcessGroupMesh"]

Coordinate = tuple[int, ...]
Ranks = tuple[int, ...]
Axes = int | Sequence[int]
Indices = Sequence[int] | Sequence[Sequence[int]]


class ProcessGroupMesh:
    """Ranks on a grid in row-major order: on a mesh of (2, 2, 2), rank 2 is at coordinate (0, 1, 0).

    The groups along each single axis are those of a `torch.distributed` DeviceMesh and are made here; others are made
    when asked for. Methods and meanings are those of `colossalai.cluster.ProcessGroupMesh` 0.5. All ranks construct it.

    Args:
        *size: ranks along each axis; their product is the world size.

    Raises:
        ConfigurationError: torch.distributed is not initialized, or the sizes do not multiply to the world size.
    """

    def __init__(self, *size: int) -> None:
        if not dist.is_initialized():
            raise ConfigurationError(
                "ProcessGroupMesh needs torch.distributed: call torch.distributed.init_process_group(...) "
                "or colossalai.launch_from_torch() first, in a program started by torchrun."
            )
        world_size = dist.get_world_size()
        if not size or min(size) < 1 or math.prod(size) != world_size:
            raise ConfigurationError(
                f"A mesh of {' x '.join(map(str, size)) or 'no axes'} holds {math.prod(size)} ranks, but the world "
                f"size is {world_size}: choose positive sizes whose product is {world_size}, "
                f"or start {math.prod(size)} processes."
            )
        self._shape: Coordinate = size
        self._rank = dist.get_rank()
        self._coord = self.unravel(self._rank, size)
        # The same keys on every rank, so that all agree on what is yet to be made; None where this rank is no member.
        self._groups: dict[tuple[Ranks, str | None], ProcessGroup | None] = {}
        self._owned: list[ProcessGroup] = []
        device_mesh = init_device_mesh(_collective_device().type, size)
        for axis in range(len(size)):
            group = device_mesh.get_group(axis)
            for ranks in self._all_ranks_along([axis], [range(size[axis])]):
                self._groups[ranks, None] = group if self._rank in ranks else None
            if group is not dist.group.WORLD:
                self._owned.append(group)

    @property
    def shape(self) -> Coordinate:
        """Ranks along each axis."""
        return self._shape

    @property
    def rank(self) -> int:
        """This process's rank in the world."""
        return self._rank

    @overload
    def size(self, dim: None = None) -> Coordinate: ...

    @overload
    def size(self, dim: int) -> int: ...

    def size(self, dim: int | None = None) -> int | Coordinate:
        """Ranks along axis `dim`, or the whole shape."""
        return self._shape if dim is None else self._shape[self._axis(dim)]

    @overload
    def coordinate(self, dim: None = None) -> Coordinate: ...

    @overload
    def coordinate(self, dim: int) -> int: ...

    def coordinate(self, dim: int | None = None) -> int | Coordinate:
        """This process's index on axis `dim`, or its whole coordinate."""
        return self._coord if dim is None else self._coord[self._axis(dim)]

    @staticmethod
    def unravel(rank: int, shape: Coordinate) -> Coordinate:
        """The coordinate of a rank. Raises ConfigurationError if the shape has no such rank."""
        if not 0 <= rank < math.prod(shape):
            last = math.prod(shape) - 1
            raise ConfigurationError(f"Rank {rank} is outside a mesh of shape {shape}: use 0 to {last}.")
        coord = []
        for size in reversed(shape):
            rank, index = divmod(rank, size)
            coord.append(index)
        return tuple(reversed(coord))

    @staticmethod
    def ravel(coord: Coordinate, shape: Coordinate, mode: str = "raise") -> int:
        """The rank at a coordinate.

        Args:
            coord: one index for each axis.
            shape: ranks along each axis.
            mode: for an index out of range: "raise" an error, "wrap" it around, or "clip" it to the nearest valid one.

        Raises:
            ConfigurationError: unknown mode, wrong number of indices, or (in mode "raise") an index out of range.
        """
        if mode not in ("raise", "wrap", "clip"):
            raise ConfigurationError(f'Unknown mode {mode!r}: use "raise", "wrap" or "clip".')
        if len(coord) != len(shape):
            raise ConfigurationError(f"Coordinate {coord} needs one index for each axis of shape {shape}.")
        rank = 0
        for index, size in zip(coord, shape, strict=True):
            if mode == "raise" and not 0 <= index < size:
                raise ConfigurationError(f"Coordinate {coord} is outside a mesh of shape {shape}.")
            index = index % size if mode == "wrap" else min(max(index, 0), size - 1)
            rank = rank * size + index
        return rank

    @staticmethod
    def get_coords_along_axis(base_coord: Coordinate, axis: Axes, indices_at_axis: Indices) -> list[Coordinate]:
        """`base_coord` with its indices on `axis` replaced by every choice of `indices_at_axis`, the last axis fastest.

        Args:
            base_coord: where to start from.
            axis: one axis, or several.
            indices_at_axis: indices on that one axis, or a list of them for each of the several.
        """
        axes, choices = _normalize(axis, indices_at_axis)
        coords = []
        for picks in itertools.product(*choices):
            coord = list(base_coord)
            for ax, index in zip(axes, picks, strict=True):
                coord[ax] = index
            coords.append(tuple(coord))
        return coords

    def create_group_along_axis(
        self, axis: Axes, indices_at_axis: Indices | None = None, backend: str | None = None
    ) -> ProcessGroup | None:
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
        wanted = self._ranks_along(self._coord, *self._choices(axis, indices_at_axis))
        missing = {ranks for ranks in self._gather(wanted) if (ranks, backend) not in self._groups}
        # A set's order differs between processes; new_group must be called in one order.
        for ranks in sorted(missing):
            group = dist.new_group(list(ranks), backend=backend)
            self._groups[ranks, backend] = group if self._rank in ranks else None
            if self._rank in ranks:
                self._owned.append(group)
        return self._groups[wanted, backend]

    def get_group_along_axis(
        self, axis: Axes, indices_at_axis: Indices | None = None, backend: str | None = None
    ) -> ProcessGroup | None:
        """Like `create_group_along_axis`, but purely local once all ranks' groups of this kind exist.

        A single full axis always does. For others the first call is a collective; where ranks then differ in their
        indices, some new and some not, only `create_group_along_axis` is safe.
        """
        axes, choices = self._choices(axis, indices_at_axis)
        # All ranks' groups are looked at, not only this rank's, so that all come to the same decision.
        if all((ranks, backend) in self._groups for ranks in self._all_ranks_along(axes, choices)):
            return self._groups[self._ranks_along(self._coord, axes, choices), backend]
        return self.create_group_along_axis(axes, choices, backend)

    def get_ranks_in_group(self, group: ProcessGroup) -> list[int]:
        """The world ranks of a group that this mesh returned, ascending."""
        return list(dist.get_process_group_ranks(group))

    def destroy_mesh_process_groups(self) -> None:
        """Destroy every group made by this mesh, never the world's own; the mesh has no groups afterwards."""
        for group in self._owned:
            with contextlib.suppress(ValueError):  # it is already gone where the world was destroyed first
                dist.destroy_process_group(group)
        self._owned.clear()
        self._groups.clear()

    def _axis(self, axis: int) -> int:
        if not -len(self._shape) <= axis < len(self._shape):
            last = len(self._shape) - 1
            raise ConfigurationError(f"Axis {axis} is outside a mesh of shape {self._shape}: use 0 to {last}.")
        return axis % len(self._shape)

    def _choices(self, axis: Axes, indices_at_axis: Indices | None) -> tuple[list[int], list[Sequence[int]]]:
        if indices_at_axis is None:
            axes = [self._axis(ax) for ax in ([axis] if isinstance(axis, int) else axis)]
            return axes, [range(self._shape[ax]) for ax in axes]
        axes, choices = _normalize(axis, indices_at_axis)
        return [self._axis(ax) for ax in axes], choices

    def _ranks_along(self, base: Coordinate, axes: list[int], choices: list[Sequence[int]]) -> Ranks:
        return tuple(sorted({self.ravel(c, self._shape) for c in self.get_coords_along_axis(base, axes, choices)}))

    def _all_ranks_along(self, axes: list[int], choices: list[Sequence[int]]) -> list[Ranks]:
        bases = itertools.product(*(range(1 if ax in axes else size) for ax, size in enumerate(self._shape)))
        return [self._ranks_along(base, axes, choices) for base in bases]

    def _gather(self, wanted: Ranks) -> list[Ranks]:
        """The rank sets that the ranks want, one each."""
        world_size = dist.get_world_size()
        mask = torch.zeros(world_size, dtype=torch.int8)
        mask[list(wanted)] = 1
        mask = mask.to(_collective_device())
        masks = [torch.empty_like(mask) for _ in range(world_size)]
        dist.all_gather(masks, mask)
        return [tuple(m.nonzero().flatten().tolist()) for m in masks]


def _normalize(axis: Axes, indices_at_axis: Indices) -> tuple[list[int], list[Sequence[int]]]:
    """Axes and, for each of them, its indices."""
    axes = [axis] if isinstance(axis, int) else list(axis)
    choices = [indices_at_axis] if isinstance(axis, int) else list(indices_at_axis)
    lists = all(isinstance(choice, Sequence) and all(isinstance(i, int) for i in choice) for choice in choices)
    if len(axes) != len(choices) or not lists:
        raise ConfigurationError(
            f"Indices {indices_at_axis} do not fit axis {axis}: give a list of indices for one axis, "
            "or a list of such lists for several."
        )
    return axes, cast(list[Sequence[int]], choices)


def _collective_device() -> torch.device:
    """A device on which the world's backend runs collectives: the CPU where it can."""
    # "cpu:gloo,cuda:gloo" for gloo, "cuda:nccl" for NCCL.
    devices = [entry.split(":")[0] for entry in dist.get_backend_config().split(",")]
    return torch.device("cpu" if "cpu" in devices else devices[0])
