"""Options: the plugin's arguments, refused by name where they cannot work."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from pipeshard.engine.mixed_precision import PRECISIONS
from pipeshard.errors import ConfigurationError
from pipeshard.schedule.given import Schedule, chunks_of, program_of
from pipeshard.schedule.program import Program
from pipeshard.split.policy import Policy

LOSS_REDUCTIONS = ("token", "microbatch")


def check_microbatches(num_microbatches: int | None, microbatch_size: int | None) -> None:
    if (num_microbatches is None) == (microbatch_size is None):
        raise ConfigurationError(
            f"num_microbatches={num_microbatches} and microbatch_size={microbatch_size}: give exactly one of the two"
        )
    for name, value in (("num_microbatches", num_microbatches), ("microbatch_size", microbatch_size)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigurationError(f"{name}={value!r} is no positive integer")


def check_chunks(schedule: Schedule, p: int, m: int | None, num_model_chunks: int) -> int:
    """The number of chunks of each rank; for `m` microbatches there is a program."""
    if not isinstance(num_model_chunks, int) or num_model_chunks < 1:
        raise ConfigurationError(f"num_model_chunks={num_model_chunks!r} is no positive integer")
    chunks = chunks_of(schedule, p, num_model_chunks)
    if not isinstance(schedule, str):
        program_of(schedule, p, m or 1, chunks)
    return chunks


def check_kinds(policy: Any, init_weights: Any, loss_reduction: str) -> None:
    if loss_reduction not in LOSS_REDUCTIONS:
        raise ConfigurationError(f"loss_reduction={loss_reduction!r} is unknown: use one of {LOSS_REDUCTIONS}")
    if policy is not None and not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ConfigurationError(f"policy={policy!r} is no subclass of pipeshard.Policy")
    if not (isinstance(init_weights, bool) or callable(init_weights)):
        raise ConfigurationError(f"init_weights={init_weights!r} is none of True, False, and a function")


def check_replicas(zero_stage: int, fsdp: bool) -> None:
    """ZeRO and FSDP, beside a pipeline."""
    if zero_stage in (2, 3):
        raise ConfigurationError(
            f"zero_stage={zero_stage}: a pipeline adds up gradients over the microbatches of a step, so each stage "
            "would reduce and scatter them m times to keep only a part. Use zero_stage=1, which keeps a part of the "
            "optimizer's state, or fsdp=True, which keeps a part of the parameters too and reduces once a step"
        )
    if zero_stage not in (0, 1):
        raise ConfigurationError(f"zero_stage={zero_stage!r} is unknown: use 0 or 1")
    if fsdp and zero_stage:
        raise ConfigurationError(
            "zero_stage=1 and fsdp=True: fsdp=True shards the optimizer's state already, drop zero_stage"
        )


def check_split_backward(program: Program, compile: Any, fsdp: bool) -> None:
    """What does not go with weight gradients that are computed apart."""
    if not program.has_weight:
        return
    if compile:
        raise ConfigurationError(
            f"compile={compile!r} does not go with schedule={program.name!r}: a compiled backward cannot leave out its "
            "weight gradients. Use '1f1b', 'interleaved' or 'gpipe'"
        )
    if fsdp:
        raise ConfigurationError(
            f"fsdp=True does not go with schedule={program.name!r}: weight gradients that are put off would miss the "
            "gathered parameters. Use '1f1b', 'interleaved' or 'gpipe', or zero_stage=1"
        )


def check_compile(compile: Any, deferred_batch_norm: bool) -> None:
    """True, False, or options of torch.compile."""
    if compile and deferred_batch_norm:
        raise ConfigurationError(
            "deferred_batch_norm=True does not go with compile: what a compiled unit normalizes is not seen"
        )
    if not isinstance(compile, bool | dict):
        raise ConfigurationError(f"compile={compile!r} is none of True, False, and a dict of torch.compile's options")
    if isinstance(compile, dict) and "units" in compile:
        raise ConfigurationError(
            f'compile={compile!r}: consecutive units are no longer compiled as one function. Drop "units", and make '
            "layers that should be fused one module of the model"
        )


def check_timeout(timeout: Any) -> None:
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not (timeout is None or timeout == "adaptive" or (number and timeout > 0)):
        raise ConfigurationError(f"timeout={timeout!r} is none of a number of seconds, 'adaptive', and None")


def check_tp_plan(plan: Any) -> dict[str, str] | None:
    if plan is not None and not (isinstance(plan, Mapping) and plan and all(isinstance(s, str) for s in plan.values())):
        raise ConfigurationError(f"tp_plan={plan!r}: give styles by the names of modules")
    return None if plan is None else dict(plan)


def check_verify(verify: Any) -> bool | str:
    """What is to be done; where PIPESHARD_VERIFY=0 is set, "auto" is False."""
    if not (isinstance(verify, bool) or verify == "auto"):
        raise ConfigurationError(f"verify={verify!r} is none of 'auto', True, and False")
    return False if verify == "auto" and os.environ.get("PIPESHARD_VERIFY") == "0" else verify


def check_precision(precision: str, autocast: bool) -> None:
    if precision not in PRECISIONS:
        raise ConfigurationError(f"precision={precision!r} is unknown: use one of {list(PRECISIONS)}")
    if precision != "fp32" and not autocast and not hasattr(torch.Tensor, "grad_dtype"):
        raise ConfigurationError(
            f"precision={precision!r} keeps gradients in another dtype than parameters, as torch {torch.__version__} "
            "cannot: install torch 2.13, or use autocast=True"
        )
    if autocast and precision == "fp32":
        raise ConfigurationError("autocast=True computes in 16 bits: give precision='bf16' or 'fp16' with it")
