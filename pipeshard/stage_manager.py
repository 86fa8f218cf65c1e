"""The stage manager: where this process is in its pipeline, who its neighbours are and which layers it holds."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.mesh import ProcessGroupMesh

Own = int | None  # None: this process's own


class PipelineStageManager:
    """The pipeline along one axis of a mesh, seen from this process.

    With v model chunks, chunk c of the rank at stage r is virtual stage r + c·p; in a V (`use_zbv`, always two chunks)
    the second chunk runs back, so both the first and the last virtual stage are at rank 0:

        interleaved, p=2, v=2:  rank 0  [0, 2]        V, p=2:  rank 0  [0, 3]
                                rank 1  [1, 3]                 rank 1  [1, 2]

    Methods and meanings are those of `colossalai.pipeline.stage_manager.PipelineStageManager` 0.5.

    Args:
        pg_mesh: the mesh.
        pipeline_axis: the axis of the mesh that is the pipeline.
        enable_interleave: several model chunks on each rank.
        use_zbv: the chunks form a V.
        num_model_chunks: v.
        num_layers_per_stage: layers of each of the p·v virtual stages, in the model's order; None spreads them evenly.

    Raises:
        ConfigurationError: no such axis, several chunks without `enable_interleave`, a V without two of them, or a
            `num_layers_per_stage` of another length than p·v.
    """

    def __init__(
        self,
        pg_mesh: ProcessGroupMesh,
        pipeline_axis: int,
        enable_interleave: bool = False,
        use_zbv: bool = False,
        num_model_chunks: int = 1,
        num_layers_per_stage: Sequence[int] | None = None,
    ) -> None:
        fits = num_model_chunks == 2 if use_zbv else num_model_chunks > 0
        if not fits or (num_model_chunks > 1 and not enable_interleave):
            raise ConfigurationError(f"{num_model_chunks=}: give 1; more need enable_interleave=True, use_zbv=True 2.")
        self.pg_mesh, self.pipeline_axis = pg_mesh, pipeline_axis
        self.p2p_group = pg_mesh.get_group_along_axis(pipeline_axis)
        ranks = pg_mesh.get_ranks_in_group(self.p2p_group)
        self.num_stages, self.stage = len(ranks), ranks.index(pg_mesh.rank)
        self.prev_rank, self.next_rank = ranks[self.stage - 1], ranks[(self.stage + 1) % len(ranks)]
        if num_layers_per_stage is not None and len(num_layers_per_stage) != len(ranks) * num_model_chunks:
            raise ConfigurationError(f"{num_layers_per_stage=}: give {len(ranks) * num_model_chunks} numbers.")
        self.is_interleave, self.use_zbv, self.num_model_chunks = enable_interleave, use_zbv, num_model_chunks
        self.num_layers_per_stage = num_layers_per_stage
        self.model_chunk_id: int | None = None

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether the model begins here: on the first rank and, unless `ignore_chunk`, in the first chunk.

        Raises:
            UsageError: interleaved, and no chunk is chosen by `switch_model_chunk_id`.
        """
        return (ignore_chunk or self._chunk() == 0) and self.stage == 0

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether the model ends here: in the last chunk of the last rank, or of the first in a V.

        With `ignore_chunk`: whether this is the last rank.

        Raises:
            UsageError: interleaved, and no chunk is chosen by `switch_model_chunk_id`.
        """
        end = 0 if self.use_zbv and not ignore_chunk else self.num_stages - 1
        return (ignore_chunk or self._chunk() == self.num_model_chunks - 1) and self.stage == end

    def get_rank(self) -> int:
        """This process's rank in the world."""
        return dist.get_rank()

    def get_prev_rank(self) -> int:
        """World rank of the previous stage; of the last stage, for the first."""
        return self.prev_rank

    def get_next_rank(self) -> int:
        """World rank of the next stage; of the first stage, for the last."""
        return self.next_rank

    def get_p2p_process_group(self) -> dist.ProcessGroup | None:
        """The group of all stages of this pipeline."""
        return self.p2p_group

    def init_process_group_by_stages(self, stages: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of the given stages of this pipeline, or None where this process is at none of them.

        A collective the first time: see `ProcessGroupMesh.get_group_along_axis`.
        """
        return self.pg_mesh.get_group_along_axis(self.pipeline_axis, stages)

    @contextmanager
    def switch_model_chunk_id(self, model_chunk_id: int) -> Iterator[None]:
        """In the context, questions are about this chunk."""
        previous, self.model_chunk_id = self.model_chunk_id, model_chunk_id
        try:
            yield
        finally:
            self.model_chunk_id = previous

    def distribute_layers(self, num_layers: int, num_stages: Own = None, num_model_chunks: Own = None) -> list[int]:
        """Layers of each of the p·v virtual stages, in the model's order.

        Where they do not divide, the middle stages take one more: the first and last have the embedding and the head.

        Raises:
            ConfigurationError: `num_layers` is not the sum of `num_layers_per_stage`.
        """
        given = self.num_layers_per_stage
        if given is not None:
            if sum(given) != num_layers:
                raise ConfigurationError(f"num_layers_per_stage sums to {sum(given)}: give all {num_layers} layers.")
            return list(given)
        parts = (num_stages or self.num_stages) * (num_model_chunks or self.num_model_chunks)
        quotient, remainder = divmod(num_layers, parts)
        start = parts // 2 - remainder // 2
        return [quotient + (start <= i < start + remainder) for i in range(parts)]

    def get_stage_index(
        self, layers_per_stage: Sequence[int], stage: Own = None, num_model_chunks: Own = None, num_stages: Own = None
    ) -> list[int] | list[list[int]]:
        """The layers of a stage as [first, end): one such pair, or with several chunks (or in a V) one for each.

        Args:
            layers_per_stage: layers of each of the p·v virtual stages, as from `distribute_layers`.
            stage, num_model_chunks, num_stages: instead of this process's own.

        Raises:
            ConfigurationError: `layers_per_stage` does not reach to this stage's last chunk.
        """
        stage = self.stage if stage is None else stage
        p = num_stages or self.num_stages
        v = 2 if self.use_zbv else num_model_chunks or self.num_model_chunks
        places = [stage, 2 * p - 1 - stage] if self.use_zbv else range(stage, stage + p * v, p)
        if min(places) < 0 or max(places) >= len(layers_per_stage):
            raise ConfigurationError(f"Give layers for {p} x {v} stages, and a stage from 0 to {p - 1}, not {stage}.")
        ends = [0, *itertools.accumulate(layers_per_stage)]
        indices = [[ends[place], ends[place + 1]] for place in places]
        return indices[0] if v == 1 else indices

    def _chunk(self) -> int:
        if not self.is_interleave:
            return 0
        if self.model_chunk_id is None:
            raise UsageError("Choose a chunk by `with switch_model_chunk_id(i):`, or ask with ignore_chunk=True.")
        return self.model_chunk_id
