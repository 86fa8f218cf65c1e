"""Mesh: ranks as replicas, stages and slices of a model, with a process group along each axis."""

import itertools
import logging
import math
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from pipeshard.distributed.collectives import gather, gather_objects
from pipeshard.distributed.groups import carrier, raising_errors, ranks_of
from pipeshard.distributed.p2p import P2P, make_p2p
from pipeshard.distributed.progress import own_progress
from pipeshard.errors import ConfigurationError, counted

Coordinate = tuple[int, ...]
MeshAxes = int | Sequence[int]
Indices = Sequence[int] | Sequence[Sequence[int]]
NEEDED = (
    "call torch.distributed.init_process_group(...) first, in a script started with torchrun --nproc-per-node N "
    "script.py"
)
logger = logging.getLogger("pipeshard")


class ProcessGroupMesh:
    """Ranks on a grid in row-major order: on a mesh of (2, 2, 2), rank 2 is at coordinate (0, 1, 0).

    All ranks must call the constructor. It creates a `torch.distributed` DeviceMesh with the groups along each single
    axis. Other groups are created on request. The interface follows `colossalai.cluster.ProcessGroupMesh` 0.5.

    Args:
        *size: the number of ranks along each axis; the product must be the world size.

    Attributes:
        shape: `size`.
        rank: this process's rank in the world.

    Raises:
        ConfigurationError: torch.distributed is not initialized, or the sizes are not positive integers whose product
            is the world size.
    """

    def __init__(self, *size: int) -> None:
        if not dist.is_initialized():
            raise ConfigurationError(f"a mesh requires a process group: {NEEDED}")
        if not size or min(size) < 1 or math.prod(size) != dist.get_world_size():
            raise ConfigurationError(
                f"the mesh sizes {size} are invalid: they must be positive, and their product must be the world size, "
                f"{dist.get_world_size()}"
            )
        self.shape: Coordinate = size
        self.rank = dist.get_rank()
        on_gpu = torch.cuda.is_available() and carrier(torch.device("cuda"))  # the device of tensors on the mesh
        kind = "cuda" if on_gpu else "cpu"
        names = tuple(map(axis_name, range(len(size))))
        with raising_errors():
            self._device_mesh = init_device_mesh(kind, size, mesh_dim_names=names)
        # By ranks and backend. All ranks have the same keys, so that every rank knows which groups are missing.
        self._groups: dict[tuple[tuple[int, ...], str | None], dist.ProcessGroup | None] = {}
        for axis in range(len(size)):
            for ranks in self._ranks_along(axis, None):
                self._groups[ranks, None] = self._device_mesh.get_group(axis) if self.rank in ranks else None

    def along(self, *axes: int) -> DeviceMesh:
        """The sub-mesh that contains this rank and has these axes, in ascending order."""
        return self._device_mesh[tuple(axis_name(axis) for axis in sorted(_axis(axis, self.shape) for axis in axes))]

    def size(self, dim: int | None = None) -> int | Coordinate:
        """The number of ranks along axis `dim`, or the shape if `dim` is None."""
        return self.shape if dim is None else self.shape[_axis(dim, self.shape)]

    def coordinate(self, dim: int | None = None) -> int | Coordinate:
        """This process's index on axis `dim`, or its coordinate if `dim` is None."""
        coord = self.unravel(self.rank, self.shape)
        return coord if dim is None else coord[_axis(dim, coord)]

    @staticmethod
    def unravel(rank: int, shape: Coordinate) -> Coordinate:
        """The coordinate of a rank. Raises ConfigurationError if the shape has no such rank."""
        if not 0 <= rank < math.prod(shape):
            raise ConfigurationError(f"rank {rank} is outside a mesh of {shape}: use 0 to {math.prod(shape) - 1}")
        return tuple(map(int, np.unravel_index(rank, shape)))

    @staticmethod
    def ravel(coord: Coordinate, shape: Coordinate, mode: Literal["raise", "wrap", "clip"] = "raise") -> int:
        """The rank at a coordinate. `mode` sets how an index out of range is treated, as in `numpy.ravel_multi_index`.

        Raises:
            ConfigurationError: unknown mode, wrong number of indices, or (in mode "raise") an index out of range.
        """
        try:
            return int(np.ravel_multi_index(coord, shape, mode))
        except ValueError as error:
            raise ConfigurationError(
                f"coordinate {coord} is invalid for a mesh of shape {shape} with mode={mode!r}: {error}"
            ) from error

    @staticmethod
    def get_coords_along_axis(base_coord: Coordinate, axis: MeshAxes, indices_at_axis: Indices) -> list[Coordinate]:
        """All copies of `base_coord` in which the indices on `axis` come from `indices_at_axis`. The last given axis
        varies fastest.

        Args:
            base_coord: the coordinate whose indices on all other axes are kept.
            axis: one axis, or several axes.
            indices_at_axis: a list of indices for one axis, or one list per axis for several axes.

        Raises:
            ConfigurationError: an axis does not exist, or `indices_at_axis` does not have this form.
        """
        axes = [axis] if isinstance(axis, int) else axis
        choices: Any = [indices_at_axis] if isinstance(axis, int) else indices_at_axis
        lists = all(isinstance(chosen, Sequence) and all(isinstance(i, int) for i in chosen) for chosen in choices)
        if len(axes) != len(choices) or not lists:
            raise ConfigurationError(
                "indices_at_axis must be a list of indices (for one axis) or a list of such lists (one for each of "
                f"several axes), got {indices_at_axis} for axis {axis}"
            )
        coords = [base_coord]
        for at, chosen in zip([_axis(ax, base_coord) for ax in axes], choices):
            coords = [(*coord[:at], index, *coord[at + 1 :]) for coord in coords for index in chosen]
        return coords

    def create_group_along_axis(
        self, axis: MeshAxes, indices_at_axis: Indices | None = None, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Return the group of the ranks that differ from this rank only on `axis`, and create the group if necessary.

        A collective: call it on every rank of the world, with the same `backend`. Axes and indices may differ between
        ranks.

        Args:
            axis: one axis, or several axes (the group then spans all combinations of their indices).
            indices_at_axis: a list of indices for one axis, or one list per axis for several axes; None means all
                indices.
            backend: the group's backend; None means the world's backend.

        Returns:
            The group, or None if this rank's own index is not among `indices_at_axis`.

        Raises:
            ConfigurationError: an axis or index does not exist, or `indices_at_axis` does not have this form.
        """
        wanted = self._ranks_along(axis, indices_at_axis)[self.rank]
        mask = torch.zeros(math.prod(self.shape), dtype=torch.int8)
        mask[list(wanted)] = 1
        world: Any = dist.group.WORLD
        # Sorted, since every rank must call new_group in the same order.
        for ranks in sorted({tuple(row.nonzero().flatten().tolist()) for row in gather(mask, world)}):
            if (ranks, backend) not in self._groups:
                with raising_errors():
                    group = dist.new_group(list(ranks), backend=backend)
                self._groups[ranks, backend] = group if self.rank in ranks else None
        return self._groups[wanted, backend]

    def get_group_along_axis(
        self, axis: MeshAxes, indices_at_axis: Indices | None = None, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Like `create_group_along_axis`, but does not communicate if the groups of all ranks already exist.

        The groups along a single full axis, with the default backend, always exist. For other groups, the first call is
        a collective. If ranks pass different arguments, and groups already exist for some of these arguments but not
        for all, call `create_group_along_axis` instead.
        """
        wanted = self._ranks_along(axis, indices_at_axis)
        # Check the groups of every rank, not only this rank's, so that all ranks make the same decision.
        if all((ranks, backend) in self._groups for ranks in wanted):
            return self._groups[wanted[self.rank], backend]
        return self.create_group_along_axis(axis, indices_at_axis, backend)

    def get_ranks_in_group(self, group: dist.ProcessGroup | None) -> list[int]:
        """The global ranks of a group that this mesh returned, in ascending order, or an empty list for None."""
        return [] if group is None else ranks_of(group)

    def warm_up(self, device: torch.device) -> None:
        """Run an all-reduce in every group that has the world's backend, in the same order on all ranks. If connections
        were created during a step instead, hosts would wait for each other, and GPUs would wait for all work in their
        queues."""
        for (_, backend), group in sorted(self._groups.items(), key=lambda item: item[0][0]):
            if group is not None and backend is None and group.size() > 1:
                work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
                own_progress().wait_in(group, work)

    def destroy_mesh_process_groups(self) -> None:
        """Destroy every group of this mesh except the world's group. Afterwards, the mesh has no groups."""
        for group in self._groups.values():
            if group not in (None, dist.group.WORLD):
                with suppress(ValueError):  # already destroyed: stored twice, or the world was destroyed first
                    dist.destroy_process_group(group)
        self._groups.clear()

    @property
    def is_destroyed(self) -> bool:
        """Whether `destroy_mesh_process_groups` was called."""
        return not self._groups

    def _ranks_along(self, axis: MeshAxes, indices_at_axis: Indices | None) -> list[tuple[int, ...]]:
        """For each rank of the world, the ranks of the group that these arguments select for that rank, in ascending
        order."""
        if indices_at_axis is None:
            axis = [axis] if isinstance(axis, int) else axis
            indices_at_axis = [range(self.shape[_axis(ax, self.shape)]) for ax in axis]
        bases = itertools.product(*map(range, self.shape))
        groups = [self.get_coords_along_axis(base, axis, indices_at_axis) for base in bases]
        return [tuple(sorted({self.ravel(coord, self.shape) for coord in coords})) for coords in groups]


def axis_name(axis: int) -> str:
    """The name of a mesh axis in the DeviceMesh."""
    return f"axis{axis}"


def _axis(axis: int, shape: Coordinate) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ConfigurationError(f"axis {axis} is outside a mesh of {shape}: use {-len(shape)} to {len(shape) - 1}")
    return axis % len(shape)


DP, PP, TP = 0, 1, 2  # the axes of the mesh


class Grid:
    """`dp_size` replicas of a pipeline of `pp_size` stages. Each stage (or its experts) is sharded across `tp_size`
    ranks.

    Consecutive ranks are the slices of one stage, then the stages of one replica, then the replicas (order="tp-pp-dp"
    in Megatron): with two replicas of two stages, the pipelines are ranks 0, 1 and ranks 2, 3.

    Attributes:
        dp_size: the number of replicas.
        pp_size: the number of ranks in a pipeline.
        tp_size: the number of ranks across which a stage (or its experts) is sharded.
        mesh: the mesh of the ranks, with the axes DP, PP and TP.
        replica: this rank's index on the axis DP.
        stage: this rank's index on the axis PP.
        slice: this rank's index on the axis TP.
        replicas: the group of the ranks that differ from this rank only on the axis DP.
        stages: the group of the ranks that differ from this rank only on the axis PP, which is this rank's pipeline.
        slices: the group of the ranks that differ from this rank only on the axis TP.
        world: the group of all ranks.
        device: the device on which this process computes.

    Raises ConfigurationError if no process group exists, if the product of the sizes is not the world size, or if two
    ranks share a GPU under NCCL.
    """

    def __init__(self, pp_size: int, dp_size: int | None = None, tp_size: int = 1) -> None:
        self.dp_size, self.pp_size, self.tp_size = num_replicas(pp_size, dp_size, tp_size), pp_size, tp_size
        self._p2ps: dict[tuple[str, tuple[int, ...]], P2P | None] = {}
        self.device = own_device()  # before any group is used, since NCCL creates communicators on the current GPU
        refuse_shared_gpus(self.device)
        self._place(ProcessGroupMesh(self.dp_size, pp_size, tp_size))
        other = torch.accelerator.current_accelerator(check_available=True)
        if self.first and self.device.type == "cpu" and other is not None:
            logger.warning("pipeshard does not support the accelerator %r, and computes on the CPU", other.type)
        if self.first and self.device.type == "cuda" and carrier(self.device) == "gloo":
            logger.warning(
                "messages and gradients between GPUs are copied through host memory, because the process group uses "
                "gloo for GPU tensors: if each rank has its own GPU, call init_process_group() without a backend, or "
                "with the backend 'cpu:gloo,cuda:nccl'"
            )

    def _place(self, mesh: ProcessGroupMesh) -> None:
        self.mesh = mesh
        self.replica, self.stage, self.slice = self.mesh.unravel(self.mesh.rank, self.mesh.shape)
        self.replicas, self.stages, self.slices = (self._group([axis]) for axis in (DP, PP, TP))
        self.world = self._group([DP, PP, TP])

    def p2p(self, kind: object, placement: Sequence[int]) -> P2P | None:
        """The P2P for the messages of this rank's pipeline, with stage s on pipeline rank `placement[s]`. Returns None
        if all stages are on one rank. A built-in P2P is created once per placement. A user's class may have state, so
        an instance is created for each model."""
        ranks = self.mesh.get_ranks_in_group(self.stages)
        if not isinstance(kind, str):
            return make_p2p(kind, ranks, placement, self.device)
        key = kind, tuple(placement)
        if key not in self._p2ps:
            self._p2ps[key] = make_p2p(kind, ranks, placement, self.device)
        return self._p2ps[key]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.dp_size * self.pp_size * self.tp_size

    @property
    def leads(self) -> bool:
        """Whether this rank belongs to the first replica and the first slice. These ranks write files on behalf of all
        ranks."""
        return self.replica == self.slice == 0

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.leads and self.stage == 0

    def named(self, rank: int) -> str:
        """The name of a global rank in errors, such as `rank 2 (stage 2)`."""
        replica, stage, piece = self.mesh.unravel(rank, self.mesh.shape)
        names = (
            [f"replica {replica}"] * (self.dp_size > 1) + [f"stage {stage}"] + [f"slice {piece}"] * (self.tp_size > 1)
        )
        return f"rank {rank} ({', '.join(names)})"

    def at(self, stage: int, group: dist.ProcessGroup) -> int:
        """The first rank of `group` on stage `stage`, as a global rank."""
        ranks = ranks_of(group)
        return next(rank for rank in ranks if self.mesh.unravel(rank, self.mesh.shape)[PP] == stage)

    @staticmethod
    def divides(tensor: torch.Tensor, axis: int) -> bool:
        """Whether a tensor is sharded along a mesh axis, that is, a DTensor that is not replicated on this axis."""
        if not isinstance(tensor, DTensor):
            return False
        names = tensor.device_mesh.mesh_dim_names or ()
        return any(
            name == axis_name(axis) and not p.is_replicate() for name, p in zip(names, tensor.placements, strict=True)
        )

    def sharing(self, axes: Sequence[int], stages: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of the ranks that differ from this rank only on `axes`. Given several `stages`, the group also
        spans these stages. Returns None if there are neither axes nor several stages, or if several `stages` do not
        include this rank's stage. A collective: call it on every rank of the world."""
        if len(stages) < 2:
            return self._group(axes) if axes else None
        chosen = [list(range(self.mesh.shape[axis])) for axis in axes]
        return self.mesh.get_group_along_axis([*axes, PP], [*chosen, list(stages)])

    def _group(self, axes: Sequence[int]) -> dist.ProcessGroup:
        group = self.mesh.get_group_along_axis(list(axes))
        assert group is not None
        return group


_grids: dict[dist.ProcessGroup, dict[tuple[int, ...], Grid]] = {}  # by world and sizes; only for the current world


def shared_grid(pp_size: int, dp_size: int | None = None, tp_size: int = 1) -> Grid:
    """Return the Grid of these sizes. All models of this world with these sizes share one Grid. Call it on all ranks.

    torch keeps a process group, with its threads and NCCL's allocations, until the world is destroyed. Without shared
    grids, a sweep that boosts one model after another would create more groups with each model. Models do not run at
    the same time, so messages of different models cannot be confused.
    """
    sizes = num_replicas(pp_size, dp_size, tp_size), pp_size, tp_size
    world = dist.group.WORLD
    assert world is not None
    if world not in _grids:
        _grids.clear()
    of_world = _grids.setdefault(world, {})
    if sizes not in of_world or of_world[sizes].mesh.is_destroyed:
        of_world[sizes] = Grid(pp_size, dp_size, tp_size)
    return of_world[sizes]


def join_alone(pp_size: int, dp_size: int | None, tp_size: int, ep_size: int) -> None:
    """Create a process group with only this process if all sizes are 1 and no launcher has started ranks, as in a
    notebook or a plain `python script.py`."""
    is_single = pp_size == tp_size == ep_size == (dp_size or 1) == 1
    if is_single and not dist.is_initialized() and "RANK" not in os.environ:
        # With a GPU, the group has gloo and NCCL. The store is in this process and opens no port.
        backend = None if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def num_replicas(pp_size: int, dp_size: int | None, tp_size: int, ep_size: int = 1) -> int:
    """The number of replicas of a pipeline with these sizes: the world size divided by the size of one replica.

    Raises ConfigurationError if the quotient is not an integer or differs from `dp_size`, or if no process group
    exists.
    """
    if not dist.is_initialized():
        of_trainer = ". With a Trainer, create its TrainingArguments, which initialize the group, before the plugin"
        advice = f"{NEEDED}{of_trainer if 'RANK' in os.environ else ''}"
        raise ConfigurationError(f"a pipeline requires a process group: {advice}")
    world, one = dist.get_world_size(), pp_size * tp_size * ep_size
    if world % one or (dp_size or world // one) * one != world:
        slices = {"tp_size": tp_size, "ep_size": ep_size}
        sizes = f"pp_size={pp_size}" + "".join(f" and {name}={size}" for name, size in slices.items() if size > 1)
        wanted = f"{sizes} and dp_size={dp_size}" if dp_size else sizes
        processes = one * (dp_size or 1)
        raise ConfigurationError(
            f"{wanted}, but the world has {counted(world, 'process')}: start "
            f"{counted(processes, 'process')} (on one machine, torchrun --nproc-per-node {processes} ...), "
            f"{'' if dp_size else f'or a multiple of {processes} for replicas, '}"
            f"or choose sizes whose product is {world}"
        )
    return world // one


def own_device() -> torch.device:
    """Return the device on which this process computes: a GPU, which becomes the current device, or the CPU if no GPU
    is available."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    bound = getattr(dist.group.WORLD, "bound_device_id", None)  # init_process_group(device_id=...)
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    local = int(os.environ.get("LOCAL_RANK", dist.get_rank())) % torch.cuda.device_count()
    device = torch.device("cuda", own_index(bound, current, local))
    torch.cuda.set_device(device)
    return device


def own_index(bound: torch.device | None, current: int, local: int) -> int:
    """The index of this process's GPU. This is the first of the following that exists: the GPU to which the process
    group is bound, the current GPU if the user selected one (its index is not 0), and the GPU whose index is this
    process's local rank."""
    if bound is not None and bound.type == "cuda" and bound.index is not None:
        return bound.index
    return current or local


def refuse_shared_gpus(device: torch.device) -> None:
    """Raise ConfigurationError, on every rank, if two ranks compute on the same GPU and the process group uses NCCL.
    The ranks exchange the ids of their GPUs, since each rank may see only its own GPU, as device 0."""
    world = dist.group.WORLD
    assert world is not None
    if carrier(torch.device("cuda")) != "nccl":
        return
    gpus = gather_objects(gpu_of(device), world)
    for rank, gpu in enumerate(gpus):
        if gpu and (first := gpus.index(gpu)) < rank:
            raise ConfigurationError(
                f"ranks {first} and {rank} compute on the same GPU, which NCCL refuses: start at most one rank per "
                "GPU (if you start several launchers on one machine, give each its own CUDA_VISIBLE_DEVICES), or "
                "create the process group with init_process_group('gloo') or, with a Trainer, "
                "TrainingArguments(ddp_backend='gloo')"
            )


def gpu_of(device: torch.device) -> str:
    """The host and the GPU of this rank, as NCCL compares them, or "" on a CPU or if NCCL lets ranks share a GPU."""
    if device.type != "cuda" or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0":
        return ""
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    return f"{host} {torch.cuda.get_device_properties(device).uuid}"


def backend_here() -> str | None:
    """The backend for `init_process_group`: None (torch's default) if this host has a GPU for each of its ranks, as
    NCCL requires, otherwise "gloo"."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))
    return None if torch.cuda.device_count() >= ranks else "gloo"
