"""Compat: ColossalAI's stage manager, plugin arguments and plugin attributes, each supported, ignored or refused."""

import itertools
import logging
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import torch.distributed as dist

from pipeshard.distributed.mesh import ProcessGroupMesh
from pipeshard.errors import ConfigurationError, UsageError, hint
from pipeshard.private import restore_meta_kernels
from pipeshard.replaced import replaced
from pipeshard.schedule.given import Schedule

RankOrOwn = int | None  # None: use this process's value


class PipelineStageManager:
    """This process's view of the pipeline along one axis of a mesh.

    With v model chunks, chunk c of pipeline rank r is virtual stage r + c·p. In a V (`use_zbv`, always two chunks), the
    second chunks are in reverse rank order, so rank 0 has both the first and the last virtual stage:

        interleaved, p=2, v=2:  rank 0  [0, 2]        V, p=2:  rank 0  [0, 3]
                                rank 1  [1, 3]                 rank 1  [1, 2]

    Methods behave as in `colossalai.pipeline.stage_manager.PipelineStageManager` of ColossalAI 0.5.

    Args:
        pg_mesh: the mesh.
        pipeline_axis: the axis of the mesh along which the pipeline runs.
        enable_interleave: whether a rank may have several model chunks.
        use_zbv: whether the chunks form a V.
        num_model_chunks: v, the number of model chunks per rank.
        num_layers_per_stage: the number of layers of each of the p·v virtual stages, in the model's order. None
            distributes the layers evenly.

    Raises:
        ConfigurationError: in any of the following cases:
            - The axis does not exist.
            - `num_model_chunks` is not positive.
            - There are several chunks without `enable_interleave`.
            - A V does not have two chunks.
            - The length of `num_layers_per_stage` is not p·v.
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
            raise ConfigurationError(
                f"{num_model_chunks=} is not supported with {enable_interleave=} and {use_zbv=}: with use_zbv=True, "
                "use 2 chunks and enable_interleave=True. Otherwise, use 1 chunk, or more with enable_interleave=True"
            )
        self.pg_mesh, self.pipeline_axis = pg_mesh, pipeline_axis
        self.p2p_group = pg_mesh.get_group_along_axis(pipeline_axis)
        ranks = pg_mesh.get_ranks_in_group(self.p2p_group)
        self.num_stages, self.stage = len(ranks), ranks.index(pg_mesh.rank)
        self.prev_rank, self.next_rank = ranks[self.stage - 1], ranks[(self.stage + 1) % len(ranks)]
        if num_layers_per_stage is not None and len(num_layers_per_stage) != len(ranks) * num_model_chunks:
            raise ConfigurationError(
                f"{num_layers_per_stage=} must have one number per virtual stage, {len(ranks) * num_model_chunks} in "
                f"all, got {len(num_layers_per_stage)}"
            )
        self.is_interleave, self.use_zbv, self.num_model_chunks = enable_interleave, use_zbv, num_model_chunks
        self.num_layers_per_stage = num_layers_per_stage
        self.model_chunk_id: int | None = None

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether the selected chunk is the first virtual stage. With `ignore_chunk`, whether this is the first rank.

        Raises:
            UsageError: if `enable_interleave` is True, `ignore_chunk` is False, and no chunk is selected.
        """
        return (ignore_chunk or self._chunk() == 0) and self.stage == 0

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether the selected chunk is the last virtual stage: the last chunk of the last rank or, in a V, of the
        first rank.

        With `ignore_chunk`, whether this is the last rank.

        Raises:
            UsageError: if `enable_interleave` is True, `ignore_chunk` is False, and no chunk is selected.
        """
        end = 0 if self.use_zbv and not ignore_chunk else self.num_stages - 1
        return (ignore_chunk or self._chunk() == self.num_model_chunks - 1) and self.stage == end

    def get_rank(self) -> int:
        """This process's rank in the world."""
        return dist.get_rank()

    def get_prev_rank(self) -> int:
        """The world rank of the previous stage. On the first stage, this is the rank of the last stage."""
        return self.prev_rank

    def get_next_rank(self) -> int:
        """The world rank of the next stage. On the last stage, this is the rank of the first stage."""
        return self.next_rank

    def get_p2p_process_group(self) -> dist.ProcessGroup | None:
        """The process group of all stages of this pipeline."""
        return self.p2p_group

    def init_process_group_by_stages(self, stages: Sequence[int]) -> dist.ProcessGroup | None:
        """The process group of the pipeline's `stages`, or None if this process's stage is not in `stages`.

        The first call is a collective: see `ProcessGroupMesh.get_group_along_axis`.
        """
        return self.pg_mesh.get_group_along_axis(self.pipeline_axis, stages)

    def switch_model_chunk_id(self, model_chunk_id: int) -> AbstractContextManager[None]:
        """Context manager in which this object's methods refer to the given chunk."""
        return replaced(self, model_chunk_id=model_chunk_id)

    def distribute_layers(
        self, num_layers: int, num_stages: RankOrOwn = None, num_model_chunks: RankOrOwn = None
    ) -> list[int]:
        """The number of layers of each of the p·v virtual stages, in the model's order.

        If the layers do not divide evenly, stages in the middle get one more layer each, since the first stage also
        holds the embedding, and the last stage holds the head.

        Raises:
            ConfigurationError: if `num_layers` is not the sum of `num_layers_per_stage`.
        """
        given = self.num_layers_per_stage
        if given is not None:
            if sum(given) != num_layers:
                raise ConfigurationError(
                    f"num_layers_per_stage sums to {sum(given)}, but the model has {num_layers} layers: pass "
                    "numbers whose sum is the number of layers"
                )
            return list(given)
        parts = (num_stages or self.num_stages) * (num_model_chunks or self.num_model_chunks)
        quotient, remainder = divmod(num_layers, parts)
        start = parts // 2 - remainder // 2
        return [quotient + (start <= i < start + remainder) for i in range(parts)]

    def get_stage_index(
        self,
        layers_per_stage: Sequence[int],
        stage: RankOrOwn = None,
        num_model_chunks: RankOrOwn = None,
        num_stages: RankOrOwn = None,
    ) -> list[int] | list[list[int]]:
        """Return the range [first, end) of a stage's layers or, with several chunks, a list of such ranges, one per
        chunk.

        Args:
            layers_per_stage: the number of layers of each of the p·v virtual stages, as returned by
                `distribute_layers`.
            stage, num_model_chunks, num_stages: values to use instead of this process's values.

        Raises:
            ConfigurationError: if `layers_per_stage` is too short for this stage, or `stage` is out of range.
        """
        stage = self.stage if stage is None else stage
        p = num_stages or self.num_stages
        v = 2 if self.use_zbv else num_model_chunks or self.num_model_chunks
        places = [stage, 2 * p - 1 - stage] if self.use_zbv else range(stage, stage + p * v, p)
        if not 0 <= stage < p or max(places) >= len(layers_per_stage):
            raise ConfigurationError(
                f"stage must be from 0 to {p - 1} (got {stage}), and layers_per_stage must have one number per virtual "
                f"stage, {p * v} in all (got {len(layers_per_stage)})"
            )
        ends = [0, *itertools.accumulate(layers_per_stage)]
        indices = [[ends[place], ends[place + 1]] for place in places]
        return indices[0] if v == 1 else indices

    def _chunk(self) -> int:
        if not self.is_interleave:
            return 0
        if self.model_chunk_id is None:
            raise UsageError(
                "no model chunk is selected: select one in `with switch_model_chunk_id(i):`, or pass ignore_chunk=True"
            )
        return self.model_chunk_id


logger = logging.getLogger("pipeshard")
# Arguments for speed: if they are ignored, results are the same or more exact.
SPEED = {
    "broadcast_buffers": True,
    "check_reduction": False,
    "communication_dtype": None,
    "ddp_bucket_cap_mb": 25,
    "enable_all_optimization": False,
    "enable_flash_attention": False,
    "enable_fused_normalization": False,
    "enable_jit_fused": False,
    "enable_metadata_cache": True,
    "find_unused_parameters": False,
    "fp8_communication": False,
    "gradient_as_bucket_view": False,
    "make_vocab_size_divisible_by": 64,
    "overlap_allgather": False,
    "overlap_communication": True,
    "overlap_p2p": True,
    "parallel_output": True,
    "scheduler_nodes": None,
    "static_graph": False,
    "zero_bucket_size_in_m": 12,
}
_SEQUENCES = "sequences are not sharded across ranks: use pp_size, dp_size, tp_size, and num_slices for long sequences"
_SCALE = "with precision='fp16', the loss scale is halved when a gradient overflows, doubled after 1000 steps without "
_SCALE += "overflow, and stays between 1 and 2**32. Only its initial value can be set, with initial_scale"
_POLICY = "pass the class as policy=..., or register it with pipeshard.register_policy"
# Unsupported arguments: ColossalAI's default, which is accepted, and the advice for any other value.
INSTEAD: dict[str, tuple[Any, str]] = {
    "backoff_factor": (0.5, _SCALE),
    "cpu_offload": (False, "pass offload='optimizer'"),
    "custom_policy": (None, _POLICY),
    "dp_outside": (True, "the order of ranks is always tp-pp-dp, with replicas outermost: omit dp_outside"),
    "enable_sequence_parallelism": (False, _SEQUENCES),
    "gradient_checkpoint_config": (None, "pass recompute=True, a ratio, or a list of ratios, one per stage"),
    "growth_factor": (2, _SCALE),
    "growth_interval": (1000, _SCALE),
    "hysteresis": (None, _SCALE),  # in ColossalAI, only the second overflow in a row halves the scale
    "inner_ring_size": (None, _SEQUENCES),
    "max_scale": (2**32, _SCALE),
    "min_scale": (1, _SCALE),
    "num_layers_per_stage": (
        None,
        "pass partition=[...], the number of unit calls of each stage, including the embedding and the head",
    ),
    "sequence_parallelism_mode": (None, _SEQUENCES),
    "sp_size": (1, _SEQUENCES),
    "use_fp8": (False, "pass precision='bf16' or 'fp16'"),
}
PLUGIN_ATTRIBUTES = {
    "amp_config": "plugin.precision is the precision and, with fp16, model.pipeline.scaling has the loss scale",
    "custom_policy": _POLICY,
    "ddp_config": "pipeshard itself reduces gradients across replicas, without DistributedDataParallel",
    "scheduler": "plugin.schedule is the schedule's name, and booster.execute_pipeline runs it",
    "shard_config": "pipeshard has no settings per architecture; ranks are in plugin.tp_group and plugin.stage_manager",
    "sp_group": _SEQUENCES,
    "zero_config": "plugin.zero_stage and plugin.fsdp determine what is sharded across replicas",
}


class ForeignAttributeError(UsageError, AttributeError):
    """Raised for an attribute of ColossalAI's plugins that pipeshard does not have. This error is an AttributeError, so
    that `hasattr` returns False."""


def refuse_positional(values: Collection[Any]) -> None:
    if values:
        raise ConfigurationError(
            f"PipelinePlugin takes only pp_size as a positional argument, got {len(values)} more "
            f"({', '.join(map(repr, values))}): pass all other arguments by name, as in PipelinePlugin(pp_size=2, "
            "num_microbatches=8, tp_size=1, dp_size=1). In HybridParallelPlugin, the first two positional arguments "
            "are tp_size and pp_size"
        )


def schedule_of(schedule: Schedule, foreign: Mapping[str, Any], known: Collection[str], warns: bool) -> Schedule:
    """Return `schedule`, or the schedule that `pp_style` names. Raises ConfigurationError if both are set and differ,
    or if `foreign` contains unknown or unsupported arguments. With `warns`, also warns about ignored arguments."""
    style: Schedule = foreign.get("pp_style", schedule)
    if schedule not in ("1f1b", style):
        raise ConfigurationError(f"schedule={schedule!r} and pp_style={style!r} differ: pass only one of the two")
    idle = []
    for name, value in foreign.items():
        if name not in (*SPEED, *INSTEAD, "pp_style"):
            raise ConfigurationError(f"PipelinePlugin has no argument {name}: {hint(name, known)}")
        default, instead = INSTEAD.get(name, (SPEED.get(name), None))
        if name == "pp_style" or value is None or value == default:
            continue
        if instead is not None:
            raise ConfigurationError(f"{name}={value!r} is a ColossalAI argument that is not supported: {instead}")
        idle.append(f"{name}={value!r}")
    if idle and warns:
        given = ", ".join(idle)
        logger.warning(
            "ignoring ColossalAI's options for speed (results are at least as exact without these options): %s", given
        )
    return style


def missing_attribute(name: str) -> AttributeError:
    """The error to raise for an attribute that the plugin lacks."""
    if name in PLUGIN_ATTRIBUTES:
        return ForeignAttributeError(
            f"plugin.{name} is a ColossalAI attribute that is not supported: {PLUGIN_ATTRIBUTES[name]}"
        )
    return AttributeError(f"PipelinePlugin has no attribute {name!r}")


T = TypeVar("T")
BASE, INTERFACE = "colossalai.booster.plugin.pp_plugin_base", "colossalai.interface"


def import_booster() -> None:
    """Import ColossalAI's Booster, if ColossalAI is installed, without ColossalAI's warnings about missing optional
    packages."""
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            import_module(BASE)
        finally:
            logging.disable(before)


def register_plugin(plugin: type) -> None:
    """If ColossalAI's Booster is imported, make it accept `plugin`. Undo ColossalAI's changes to torch."""
    base = getattr(sys.modules.get(BASE), "PipelinePluginBase", None)
    if base is not None and not issubclass(plugin, base):
        base.register(plugin)
    restore_meta_kernels()


def wrapper(kind: type[T], interface: str) -> type[T]:
    """`kind` or, if ColossalAI is imported, a subclass of `kind` and of ColossalAI's class `interface`."""
    base = getattr(sys.modules.get(INTERFACE), interface, None)
    return kind if base is None else _also(kind, base)  # type: ignore[arg-type]


@cache
def _also(kind: Any, base: type) -> Any:
    return type(kind.__name__, (kind, base), {"__module__": kind.__module__, "__doc__": kind.__doc__})
