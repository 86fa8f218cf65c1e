"""Sequential: the trained pipeline, converted back to the unsplit model."""

import copy
from collections.abc import Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeshard.distributed.collectives import broadcast_bytes, gather_objects, whole
from pipeshard.engine.engine import Pipeline
from pipeshard.engine.fsdp import fsdp_additions, remove_fsdp, unsharded_classes
from pipeshard.engine.mixed_precision import computed_in
from pipeshard.engine.model import PipelineModel
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.ghost import Guarded, inside_pipeshard
from pipeshard.graph.units import Interception, Recomputation, Sliced
from pipeshard.hf import enable_caches
from pipeshard.private import tree_tensors
from pipeshard.split.packed import is_quantized
from pipeshard.split.skeleton import build_layer, skeletons


@inside_pipeshard()
def to_sequential(model: nn.Module, rank: int | None = None, device: torch.device | str = "cpu") -> nn.Module | None:
    """Convert the pipeline back to an unsplit model of the original class. Call it on every rank of the pipeline.

    Returns the model on each rank. With `rank`, only this rank of each replica returns the model. The other ranks
    return None, and allocate at most one full tensor at a time. The result shares no tensors with `model`, which can
    continue training. The result's weights and buffers come from the stages that own them, in the dtype in which these
    stages compute with them. Ties, `requires_grad`, training modes, activation checkpointing, hooks and `use_cache`
    come from `model`. Gradients are not copied.

    Args:
        model: the model that `booster.boost` returned.
        rank: the rank that returns the model, counted from 0 in its pipeline, or None for all ranks.
        device: the device of the result's tensors.

    Raises UsageError, on every rank, if the model was not boosted, is quantized, has parameters without values, or
    cannot be copied. Raises ConfigurationError, on every rank, for an invalid `rank`.
    """
    if not isinstance(model, PipelineModel):
        raise UsageError(
            f"to_sequential requires a boosted model, got an instance of {type(model).__name__}: pass the model that "
            "booster.boost(...) returned"
        )
    pipeline = model.pipeline
    if rank is not None and rank not in range(pipeline.num_stages):
        ranks = f"0 to {pipeline.num_stages - 1}" if pipeline.num_stages > 1 else "0"
        raise ConfigurationError(f"rank must be None or a rank of this pipeline ({ranks}), got {rank!r}")
    if is_quantized(pipeline.model):
        raise UsageError(
            "to_sequential does not support quantized base weights. Save the adapters with "
            "booster.save_lora_as_pretrained(model, <folder>), load the base model in one process with "
            "from_pretrained(..., quantization_config=...), and call PeftModel.from_pretrained(base, <folder>)"
        )
    if pipeline.blank:
        those = "parameter that has" if len(pipeline.blank) == 1 else "parameters that have"
        raise UsageError(
            f"to_sequential got a model with {len(pipeline.blank)} {those} no values yet (first: "
            f"{min(pipeline.blank)}): call booster.load_model(model, <folder>) first"
        )
    pipeline.gradients.settle()
    copied: nn.Module | None = None
    failure = ""
    if rank is None or rank == pipeline.rank:
        try:
            copied = _copied_stage(pipeline, torch.device(device))
        except Exception as error:  # __deepcopy__ of the user's attributes may raise any error
            name = type(pipeline.model).__name__
            failure = f"copy.deepcopy of {name} failed on rank {pipeline.rank} of the pipeline: {error!r}"
    for stage, tensors in enumerate(_entries_of_all(pipeline, failure)):
        for entry in tensors:
            value = _shared(pipeline, stage, entry)
            if copied is not None:
                _put(copied, entry, value)
    return copied


class StageTensor(NamedTuple):
    """The description of a parameter or buffer, sent by the stage that owns it. `flag` is a parameter's requires_grad,
    or whether a buffer is persistent."""

    name: str
    is_buffer: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    flag: bool


def _copied_stage(pipeline: Pipeline, device: torch.device) -> nn.Module:
    """Copy this stage's model as it was before boost. In the copy, the parameters of all stages are allocated."""
    model, memo = pipeline.model, _memo(pipeline.model, device)
    with unsharded_classes(model):
        copied = copy.deepcopy(model, memo)
    for module, new in zip(model.modules(), copied.modules(), strict=True):
        for key, value in module.__dict__.items():
            if new.__dict__.get(key) is not value:  # not an addition, or copied by a compiled module's constructor
                continue
            if isinstance(value, Interception):
                del new.__dict__[key]
                original = value.original.plain if isinstance(value.original, Sliced) else value.original
                if getattr(original, "__func__", None) is not type(module).forward:  # set on the instance by the user
                    new.__dict__[key] = copy.deepcopy(original, memo)
            elif isinstance(value, Sliced | Guarded):
                del new.__dict__[key]
            elif isinstance(value, Recomputation):
                new.__dict__[key] = copy.deepcopy(value.checkpoint, memo)
    for module in copied.modules():
        remove_fsdp(module)
    enable_caches(memo[id(config)] for config in pipeline.cached if id(config) in memo)
    for module in skeletons(copied):  # skeletons of other stages, whose values are set later
        build_layer(module, pipeline.seed)
    return copied


def _memo(model: nn.Module, device: torch.device) -> dict[int, Any]:
    """The memo for `deepcopy`: replacements for the objects that `deepcopy` must not copy, by id."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():  # a ghost's copy has the ghost's full shape; ties stay tied
        empty = torch.empty(parameter.shape, dtype=computed_in(parameter), device=device)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=False)
    for module in model.modules():
        for tensor in tree_tensors(list(module.__dict__.values())):
            if id(tensor) not in memo:  # buffers, and non-leaf tensors left by a forward
                memo[id(tensor)] = tensor if tensor.is_meta else tensor.detach().to(device, copy=True)
        memo.update((id(hook), hook) for hook in _module_hooks(module) if not _is_bound(hook))
        memo.update((id(addition), addition) for addition in additions(module))
    return memo


def additions(module: nn.Module) -> list[Any]:
    """The attribute values and hooks that boost has added to a module. `deepcopy` must not copy them, since they refer
    to the whole pipeline."""
    own = (Interception, Recomputation, Sliced, Guarded)
    return [*(value for value in module.__dict__.values() if isinstance(value, own)), *fsdp_additions(module)]


def _module_hooks(module: nn.Module) -> Iterator[Any]:
    for name, value in module.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            yield from value.values()


def _is_bound(hook: Any) -> bool:
    """Whether a hook refers to a module, and must therefore be copied with this module. The copy and the model share
    all other hooks. If a shared hook is a method of an object (a recorder, a trainer), they also share this object.

    torch wraps some hooks in an object with a reference to their module. Other hooks may be methods or partial
    functions.
    """
    if isinstance(hook, MethodType):
        return isinstance(hook.__self__, nn.Module)
    arguments = [*getattr(hook, "args", ()), *getattr(hook, "keywords", {}).values()]
    return hasattr(hook, "with_module") or any(isinstance(argument, nn.Module) for argument in arguments)


def _entries_of_all(pipeline: Pipeline, failure: str) -> list[list[StageTensor]]:
    """Gather the entries of all stages. Raises UsageError, on every rank, if one rank could not copy the model."""
    own: list[Any] = [tuple(entry) for entry in _stage_tensors(pipeline)]
    answers = gather_objects((failure, own), pipeline.group)
    failures = [text for text, _ in answers if text]
    if failures:
        raise UsageError(f"{failures[0]}. Remove the attributes of the model that copy.deepcopy cannot copy")
    return [[StageTensor(*entry) for entry in entries] for _, entries in answers]


def _stage_tensors(pipeline: Pipeline) -> Iterator[StageTensor]:
    """Yield an entry for each parameter and buffer that this stage owns."""
    policy, model = pipeline.policy, pipeline.model
    for name, parameter in model.named_parameters():
        if pipeline.rank == policy.ownership.owner(name):
            yield StageTensor(name, False, tuple(parameter.shape), computed_in(parameter), parameter.requires_grad)
    for name, buffer in model.named_buffers():
        if pipeline.rank == policy.ownership.owner(name):
            path, _, key = name.rpartition(".")
            persistent = key not in model.get_submodule(path)._non_persistent_buffers_set
            yield StageTensor(name, True, tuple(buffer.shape), buffer.dtype, persistent)


def _shared(pipeline: Pipeline, stage: int, entry: StageTensor) -> Tensor:
    """Broadcast the value of this entry from `stage`, and return it on every rank."""
    if stage == pipeline.rank:
        model = pipeline.model
        own = model.get_buffer(entry.name) if entry.is_buffer else model.get_parameter(entry.name)
        value = whole(own.detach()).to(pipeline.device, entry.dtype).contiguous()
    else:
        value = torch.empty(entry.shape, dtype=entry.dtype, device=pipeline.device)
    broadcast_bytes(value, pipeline.ranks[stage], pipeline.group)
    return value


def _put(model: nn.Module, entry: StageTensor, value: Tensor) -> None:
    path, _, key = entry.name.rpartition(".")
    owner = model.get_submodule(path)
    if not entry.is_buffer:
        owner.get_parameter(key).data.copy_(value)
        owner.get_parameter(key).requires_grad_(entry.flag)
        return
    buffer = owner._buffers.get(key)
    if buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
        buffer.copy_(value)
    else:  # created or replaced by its stage during training
        device = next(model.parameters()).device
        owner.register_buffer(key, value.to(device, copy=True), entry.flag)
