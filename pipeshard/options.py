"""Options: the valid values of arguments that PipelineConfig and the planner share, and checks of numbers."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from pipeshard.errors import ConfigurationError, hint

POSITIVE = "a positive integer"
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
LEAST_SCALE, MOST_SCALE = 1.0, 2.0**32  # limits of the loss scale, with "fp16"
OFFLOADED = ("activations", "optimizer", "both")


def check_plan(name: str, plan: Any) -> None:
    """Raise ConfigurationError unless `plan` (tensor-parallel or expert-parallel) is None or a non-empty dict from
    names of modules and parameters to names of styles."""
    if plan is not None and not (isinstance(plan, Mapping) and {*map(type, plan.values())} == {str}):
        style = "colwise" if name == "tp_plan" else "grouped_gemm"
        raise ConfigurationError(
            f"{name} must be a non-empty dict from names of modules and parameters to names of styles (strings such as "
            f"{style!r}), got {plan!r}"
        )


def check_replicas(zero_stage: int, fsdp: bool) -> None:
    """Raise ConfigurationError for ZeRO and FSDP settings that a pipeline does not support."""
    if zero_stage in (2, 3):
        raise ConfigurationError(
            f"zero_stage={zero_stage} is not supported: a pipeline accumulates gradients over the microbatches of a "
            "step, so each stage would reduce-scatter once per microbatch. Use zero_stage=1, which shards the "
            "optimizer state, or fsdp=True, which also shards the parameters and reduces once per step"
        )
    if zero_stage not in (0, 1):
        raise ConfigurationError(f"zero_stage={zero_stage!r} is unknown: use 0 or 1")
    if fsdp and zero_stage:
        raise ConfigurationError(
            "fsdp=True already shards the optimizer state, so zero_stage=1 is redundant: omit zero_stage"
        )


def check_precision(precision: str, autocast: bool) -> None:
    if precision not in PRECISIONS:
        raise ConfigurationError(f"precision={precision!r} is unknown: use one of {list(PRECISIONS)}")
    if precision != "fp32" and not autocast and not hasattr(torch.Tensor, "grad_dtype"):
        raise ConfigurationError(
            f"precision={precision!r} keeps gradients in a different dtype than parameters, which torch "
            f"{torch.__version__} does not support: install torch 2.11 or newer, or use autocast=True"
        )
    if autocast and precision == "fp32":
        raise ConfigurationError("autocast=True requires precision='bf16' or 'fp16', got 'fp32'")


def is_offloaded(offload: str | None, what: str) -> bool:
    """Whether `offload` includes `what` ("activations" or "optimizer")."""
    return offload in (what, "both")


def check_offload(offload: Any, fsdp: bool, tp_size: int, ep_size: int) -> None:
    if offload not in (None, *OFFLOADED):
        raise ConfigurationError(f"offload={offload!r} is unknown: {hint(str(offload), OFFLOADED)}")
    if is_offloaded(offload, "optimizer") and (fsdp or tp_size > 1 or ep_size > 1):
        sharding = "fsdp=True" if fsdp else f"tp_size={tp_size}" if tp_size > 1 else f"ep_size={ep_size}"
        raise ConfigurationError(
            f"offload={offload!r} is not supported with {sharding}: the optimizer's states would be DTensors, which a "
            f"checkpoint gathers on the device. Instead of {sharding}, use more stages, or zero_stage=1, which shards "
            "the states across replicas"
        )


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_time(value: Any) -> bool:
    return is_positive(value) or value in (None, "adaptive") or (isinstance(value, float) and value > 0)


def is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
