"""Materialize: a whole model becomes one stage of it, with memory and values for the tensors that the stage holds.

The model keeps its classes and its module tree, so that its own forward can run. A parameter of another stage is
replaced by a Ghost under every one of its names, and a unit of another stage by a replay. Tensors that were built on
meta are allocated here, on the stages that hold them.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipeshard.errors import ConfigurationError, explained, summary
from pipeshard.ghost import Ghost, guard, inside_pipeshard
from pipeshard.graph.units import CutPoint, intercept
from pipeshard.split.adapters import begin
from pipeshard.split.initialize import InitWeights, blank_buffers, build, give, initialize, skeletons
from pipeshard.split.policy import Policy
from pipeshard.split.ties import names_of, put_parameter


@inside_pipeshard()
def shard(
    model: nn.Module, policy: Policy, device: torch.device, init_weights: InitWeights = True, seed: int = 0
) -> set[str]:
    """Keep the part of `model` that this stage holds by `policy`, on the device; `init_weights` fills meta tensors.

    Returns the names of the parameters of all stages that were on meta.
    """
    held = policy.ownership.held[policy.stage]
    on_meta = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    release(model, policy, device)
    policy.replace_forward()
    _build_skeletons(model, policy, seed)
    unbuilt = sorted(on_meta & held)
    fresh = [name for name in unbuilt if model.get_parameter(name).is_meta]
    buffers = allocate(model, fresh, device)
    initialize(model, unbuilt if callable(init_weights) else fresh, buffers, init_weights, seed)
    if init_weights:
        begin(model)
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_released(tensor):
            tensor.data = tensor.data.to(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # NCCL takes memory past torch, which keeps that of what was released
    guard(model)
    return on_meta


def release(model: nn.Module, policy: Policy, device: torch.device) -> None:
    """Free the parameters that this stage does not hold; each stays visible under all of its names, as a Ghost."""
    parameters = dict(model.named_parameters())
    for first, names in names_of(model).items():
        if first not in policy.ownership.held[policy.stage]:
            label = (
                f"{first} has no values on this rank, which holds stage {policy.stage} of {policy.num_stages}; "
                f"stage {policy.ownership.owner(first)} has them"
            )
            ghost = Ghost.of(parameters[first], device, label)
            for name in names:
                put_parameter(model, name, ghost)


def compile_units(units: Mapping[str, nn.Module], **options: Any) -> None:
    """Let torch.compile compile each unit separately; units of one class share the compiled code.

    A unit with a single operation is not compiled: there is nothing to fuse, and calling compiled code takes longer.
    """
    single = (nn.Linear, nn.Embedding)  # themselves: a class made of them may do more
    fusible = {name: u for name, u in units.items() if type(u) not in single and not isinstance(u, CutPoint)}
    for interception in intercept(fusible):
        interception.compiled = torch.compile(interception.original, **options)


def refuse_compile_options(options: Mapping[str, Any], pp_size: int, by_whole_batch: bool) -> None:
    """Refuse options of torch.compile that units of a pipeline cannot support; `by_whole_batch` says that units are
    compiled although batch norm is to use the whole batch."""
    if by_whole_batch:
        raise ConfigurationError(
            "deferred_batch_norm=True does not support compile: the inputs of batch norm in a compiled unit are hidden"
        )
    if "units" in options:
        raise ConfigurationError(
            f'compile={options!r}: consecutive units are no longer compiled as one function. Remove "units", '
            "and combine layers that should be fused into one module of the model"
        )
    modes = ("reduce-overhead", "max-autotune")
    graphs = options.get("mode") in modes or "triton.cudagraphs" in options.get("options", {})
    if graphs and pp_size > 1:
        raise ConfigurationError(
            f"compile={options!r}: CUDA graphs overwrite the results of the previous microbatch, whose backward pass "
            "has not run yet. Turn them off, or use mode='max-autotune-no-cudagraphs'"
        )


def _build_skeletons(model: nn.Module, policy: Policy, seed: int) -> None:
    """Build the skeletons in held units; the others stay, with buffers of zeros."""
    inside = {module for unit in policy.get_held_layers() for module in unit.modules()}
    for module in skeletons(model):
        if module in inside:
            build(module, seed)
        else:
            blank_buffers(module)


def allocate(model: nn.Module, names: Collection[str], device: torch.device) -> dict[str, bool]:
    """Allocate these meta parameters on the device, and all meta buffers with their values.

    A parameter stays the same object, so that optimizers, hooks and ties keep it. Buffers, including persistent ones,
    get the values that the architecture's constructor gives them. Returns the names of these buffers, and whether they
    could be computed.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        give(parameters[name], torch.empty_like(parameters[name].as_subclass(torch.Tensor), device=device))
    blank = {name: b for name, b in model.named_buffers(remove_duplicate=False) if b.is_meta}
    rebuilt = list(rebuilt_models(model)) if blank else []
    values = {path + key: b for path, twin in rebuilt for key, b in twin.named_buffers(remove_duplicate=False)}
    known = {}
    for name, buffer in blank.items():
        twin = values.get(name)
        known[name] = twin is not None and (twin.shape, twin.dtype) == (buffer.shape, buffer.dtype)
        path, _, key = name.rpartition(".")
        content = twin if known[name] and twin is not None else torch.empty_like(buffer, device=device)
        model.get_submodule(path)._buffers[key] = content.to(device)
    return known


def rebuilt_models(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Models rebuilt from the configurations of the outermost PreTrainedModels in `model`, and the prefix of the names
    of each; their parameters take no memory and no time. The models have this dtype, if one is given."""
    from accelerate import init_empty_weights
    from transformers import PreTrainedModel

    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights

    def walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if not isinstance(module, PreTrainedModel):
            for name, child in module.named_children():
                yield from walk(f"{path}{name}.", child)
            return
        empty = no_init_weights(), init_empty_weights(include_buffers=False), torch.random.fork_rng(devices=[])
        refusal = explained(
            lambda error: ConfigurationError(
                f"the buffers of {type(module).__name__} are on meta, and the model cannot be built again to get their "
                f"values ({summary(error)}). Build it under accelerate's init_empty_weights(), which keeps "
                "the values of buffers, instead of torch.device('meta')"
            )
        )
        with refusal, torch.device("cpu"), empty[0], empty[1], empty[2], _default(dtype, module.config) as config:
            twin = type(module)(config)
        yield path, twin

    yield from walk("", model)


@contextmanager
def _default(dtype: torch.dtype | None, config: Any) -> Iterator[Any]:
    """Inside, this is the default dtype of tensors, and of configurations that name it."""
    from transformers import PretrainedConfig

    if dtype is None:
        yield config
        return
    parts = [config := copy.deepcopy(config)]
    for part in parts:
        part.dtype = dtype
        parts += [inner for inner in vars(part).values() if isinstance(inner, PretrainedConfig)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield config
    finally:
        torch.set_default_dtype(before)


def storageless(tensor: torch.Tensor, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    """A tensor of the same shape that takes the memory of one number."""
    return torch.zeros((), dtype=dtype, device=device).expand(tensor.shape)


def is_released(parameter: torch.Tensor) -> bool:
    """Whether this stage does not hold the parameter."""
    return isinstance(parameter, Ghost)
