"""Grid: where this process is among the replicas, the stages and the slices of a model."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pipeshard.errors import ConfigurationError
from pipeshard.mesh import ProcessGroupMesh, axis_name

DP, PP, TP = 0, 1, 2  # the axes of the mesh


class Grid:
    """`dp_size` replicas of a pipeline of `pp_size` stages, each of them on `tp_size` ranks that have a slice of it.

    Neighbouring ranks are slices of one stage, then come the stages, then the replicas: with (2, 2, 1) the pipelines
    are ranks 0, 1 and ranks 2, 3.

    Attributes:
        mesh: the ranks, with the axes DP, PP and TP.
        replica, stage, slice: this process's place on each.
        replicas, stages, slices: the groups of the ranks that differ from this one on that axis alone.

    Raises ConfigurationError where the sizes do not multiply to that of the world.
    """

    def __init__(self, pp_size: int, dp_size: int | None = None, tp_size: int = 1) -> None:
        for name, size in (("pp_size", pp_size), ("dp_size", dp_size), ("tp_size", tp_size)):
            if not (isinstance(size, int) and size > 0) and (name, size) != ("dp_size", None):
                what = {"pp_size": "stages", "dp_size": "replicas", "tp_size": "slices of each stage"}[name]
                raise ConfigurationError(f"{name}={size!r}: the number of {what} is a positive integer")
        world, one = dist.get_world_size() if dist.is_initialized() else pp_size, pp_size * tp_size
        sizes = f"pp_size={pp_size}" + (f" and tp_size={tp_size}" if tp_size > 1 else "")
        if world % one or (dp_size or world // one) * one != world:
            wanted = f"{sizes} and dp_size={dp_size}" if dp_size else sizes
            processes = one * (dp_size or 1)
            raise ConfigurationError(
                f"{wanted} but the world has {world} processes: start torchrun --nproc-per-node {processes} ..., "
                f"{'' if dp_size else 'or a multiple of it for replicas, '}or choose sizes whose product is {world}"
            )
        self.mesh = ProcessGroupMesh(world // one, pp_size, tp_size)
        self.dp_size, self.pp_size, self.tp_size = world // one, pp_size, tp_size
        self.replica, self.stage, self.slice = self.mesh.unravel(self.mesh.rank, self.mesh.shape)
        self.replicas, self.stages, self.slices = (self._group([axis]) for axis in (DP, PP, TP))
        self.world = self._group([DP, PP, TP])

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.dp_size * self.pp_size * self.tp_size

    @property
    def leads(self) -> bool:
        """Whether this process is of the first replica, and of the first slice in it: one that writes for all."""
        return self.replica == self.slice == 0

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.leads and self.stage == 0

    def named(self, rank: int) -> str:
        """What errors call a rank of the world, as `rank 2 (stage 2)`."""
        replica, stage, piece = self.mesh.unravel(rank, self.mesh.shape)
        names = (
            [f"replica {replica}"] * (self.dp_size > 1) + [f"stage {stage}"] + [f"slice {piece}"] * (self.tp_size > 1)
        )
        return f"rank {rank} ({', '.join(names)})"

    def at(self, stage: int, group: dist.ProcessGroup) -> int:
        """The first global rank of `group` that is of this stage."""
        ranks = dist.get_process_group_ranks(group)
        return next(rank for rank in ranks if self.mesh.unravel(rank, self.mesh.shape)[PP] == stage)

    @staticmethod
    def divides(tensor: torch.Tensor, axis: int) -> bool:
        """Whether the ranks along an axis have different slices of a tensor."""
        if not isinstance(tensor, DTensor):
            return False
        names = tensor.device_mesh.mesh_dim_names or ()
        return any(
            name == axis_name(axis) and not p.is_replicate() for name, p in zip(names, tensor.placements, strict=True)
        )

    def sharing(self, axes: Sequence[int], stages: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of the ranks that differ from this one on `axes` alone, and on PP too where there are several
        `stages`, of which they are then; None for a rank of none of these. A collective of the world."""
        if len(stages) < 2:
            return self._group(axes) if axes else None
        chosen = [list(range(self.mesh.shape[axis])) for axis in axes]
        return self.mesh.get_group_along_axis([*axes, PP], [*chosen, list(stages)])

    def _group(self, axes: Sequence[int]) -> dist.ProcessGroup:
        group = self.mesh.get_group_along_axis(list(axes))
        assert group is not None
        return group
