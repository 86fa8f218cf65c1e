"""Foreign: arguments and attributes that ColossalAI's HybridParallelPlugin has, and what to use here instead."""

import difflib
import logging
from collections.abc import Collection, Mapping
from typing import Any

from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.schedule.given import Schedule

logger = logging.getLogger("pipeshard")

# Arguments that are there for speed: whatever they are, the numbers are the same, or more exact without them.
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
_SEQUENCES = "sequences are not divided among ranks: use pp_size, dp_size and tp_size, and recompute for long ones"
_SCALE = "with precision='fp16' the loss scale is halved when a gradient overflows and doubled after 1000 steps "
_SCALE += "without, between 1 and 2**32: give initial_scale alone"
_POLICY = "pass the class as policy=..., or register it by pipeshard.register_policy"
# The others, by their default in ColossalAI, with which they are taken, and what to use instead.
INSTEAD: dict[str, tuple[Any, str]] = {
    "backoff_factor": (0.5, _SCALE),
    "cpu_offload": (False, "states stay on the device: zero_stage=1, fsdp=True and recompute=... take less memory"),
    "custom_policy": (None, _POLICY),
    "dp_outside": (True, "ranks are slices of one stage first, then come the stages, then the replicas"),
    "enable_sequence_parallelism": (False, _SEQUENCES),
    "gradient_checkpoint_config": (None, "recompute=True, a share, or a list of shares, one for each stage"),
    "growth_factor": (2, _SCALE),
    "growth_interval": (1000, _SCALE),
    "hysteresis": (None, _SCALE),  # there the second overflow in a row halves
    "inner_ring_size": (None, _SEQUENCES),
    "max_scale": (2**32, _SCALE),
    "min_scale": (1, _SCALE),
    "num_layers_per_stage": (None, "partition=[...] says how many unit calls, embedding and head too, each stage gets"),
    "sequence_parallelism_mode": (None, _SEQUENCES),
    "sp_size": (1, _SEQUENCES),
    "use_fp8": (False, "precision='bf16' or 'fp16'"),
}
ATTRIBUTES = {
    "amp_config": "plugin.precision is its name, and plugin.scaling, with fp16, has the scale of the loss",
    "custom_policy": _POLICY,
    "ddp_config": "replicas are summed by pipeshard itself, there is no DistributedDataParallel",
    "scheduler": "plugin.schedule is the schedule's name, and booster.execute_pipeline runs it",
    "shard_config": "nothing is configured by architecture; plugin.tp_group and plugin.stage_manager have the ranks",
    "sp_group": _SEQUENCES,
    "zero_config": "plugin.zero_stage and plugin.fsdp say what is divided among replicas",
}


class ForeignAttributeError(UsageError, AttributeError):
    """An attribute that another plugin has; `hasattr` says that it is not there."""


def refuse_positional(values: Collection[Any]) -> None:
    if values:
        raise ConfigurationError(
            f"PipelinePlugin takes pp_size alone by its place, and got {len(values)} more "
            f"({', '.join(map(repr, values))}): name the others, as in PipelinePlugin(pp_size=2, num_microbatches=8, "
            "tp_size=1, dp_size=1). (HybridParallelPlugin's first two are tp_size and pp_size)"
        )


def schedule_of(schedule: Schedule, foreign: Mapping[str, Any], known: Collection[str], warns: bool) -> Schedule:
    """The schedule, which `pp_style` names too. Raises ConfigurationError for what else has no meaning here, and
    warns of what has none that matters."""
    style: Schedule = foreign.get("pp_style", schedule)
    if schedule not in ("1f1b", style):
        raise ConfigurationError(f"schedule={schedule!r} and pp_style={style!r}: give one of the two")
    idle = []
    for name, value in foreign.items():
        if name not in (*SPEED, *INSTEAD, "pp_style"):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {close[0]}?" if close else f". Known are {', '.join(known)}"
            raise ConfigurationError(f"PipelinePlugin has no argument {name}{hint}")
        default, instead = INSTEAD.get(name, (SPEED.get(name), None))
        if name == "pp_style" or value is None or value == default:
            continue
        if instead is not None:
            raise ConfigurationError(f"{name}={value!r} is ColossalAI's, and not known here: {instead}")
        idle.append(f"{name}={value!r}")
    if idle and warns:
        logger.warning(
            "%s: ColossalAI's options for speed, which do nothing here and change no result", ", ".join(idle)
        )
    return style


def missing_attribute(name: str) -> AttributeError:
    """What to raise for an attribute that the plugin lacks."""
    if name in ATTRIBUTES:
        return ForeignAttributeError(f"plugin.{name} is ColossalAI's, and not known here: {ATTRIBUTES[name]}")
    return AttributeError(f"PipelinePlugin has no attribute {name!r}")
