"""Materialize: the reduction of a model to one stage, with values only for the parameters that the stage holds.

The model keeps its classes and its module tree, so that its own forward can run. A Ghost replaces each parameter that
only other stages hold, under all of the parameter's names. A Replay answers the calls of units that other stages run.
Each parameter on meta is allocated here, but only on the stages that hold it.
"""

import contextlib
import copy
import ctypes
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pipeshard.errors import ConfigurationError, explained, summary
from pipeshard.ghost import Ghost, guard, inside_pipeshard, looks_held
from pipeshard.graph.units import CutPoint, intercept
from pipeshard.private import compiled, without_weakrefs
from pipeshard.replaced import replaced
from pipeshard.split.adapters import begin
from pipeshard.split.blank import give
from pipeshard.split.initialize import InitWeights, initialize_tensors, written_again
from pipeshard.split.policy import Policy
from pipeshard.split.skeleton import blank_buffers, build_layer, skeletons
from pipeshard.split.ties import names_of, put_parameter


@inside_pipeshard()
def shard(
    model: nn.Module, policy: Policy, device: torch.device, init_weights: InitWeights = True, seed: int = 0
) -> set[str]:
    """Reduce `model` to the stage of `policy`, in place: release the parameters of other stages, move held tensors to
    `device`, and initialize held meta tensors with the rule `init_weights`.

    Returns the names of all parameters that were on meta, including parameters of other stages.
    """
    held = policy.ownership.held[policy.stage]
    on_meta = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    release(model, policy, device)
    policy.replace_forward()
    _build_skeletons(model, policy, seed)
    unbuilt = sorted(on_meta & held)
    fresh = [name for name in unbuilt if model.get_parameter(name).is_meta]
    constructed = written_again(model, fresh)
    buffers = allocate(model, fresh, device)
    initialize_tensors(model, unbuilt if callable(init_weights) else fresh, buffers, init_weights, seed, constructed)
    if init_weights:
        begin(model)
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_released(tensor):
            tensor.data = tensor.data.to(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # NCCL allocates outside torch, whose allocator caches released memory
    guard(model)
    return on_meta


def trim() -> None:
    """Return freed host memory to the system. glibc keeps freed blocks of up to 32 MB in the process, and reuses their
    memory only for blocks that fit into the gaps."""
    with contextlib.suppress(OSError, AttributeError):  # C libraries other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def release(model: nn.Module, policy: Policy, device: torch.device) -> None:
    """Free the parameters that this stage does not hold: a Ghost replaces each parameter, under all of its names."""
    parameters = dict(model.named_parameters())
    for first, names in names_of(model).items():
        if first not in policy.ownership.held[policy.stage]:
            label = (
                f"{first} has no values on this rank (rank {policy.stage} of {policy.num_stages} in its pipeline), "
                f"since rank {policy.ownership.owner(first)} of the pipeline holds this parameter"
            )
            ghost = Ghost.of(parameters[first], device, label)
            for name in names:
                put_parameter(model, name, ghost)


def compile_units(units: Mapping[str, nn.Module], **options: Any) -> None:
    """Compile each unit separately with torch.compile. Units of one class share the compiled code.

    Linear and embedding layers are not compiled: they have only one operation, so nothing can be fused, and calling
    compiled code takes longer than calling the operation.
    """
    single = (nn.Linear, nn.Embedding)  # not their subclasses, which may do more
    fusible = {name: u for name, u in units.items() if type(u) not in single and not isinstance(u, CutPoint)}
    for interception in intercept(fusible):
        interception.compiled = compiled(interception.original, **options)


def refuse_compile_options(options: Mapping[str, Any], pp_size: int, by_whole_batch: bool) -> None:
    """Raise ConfigurationError for torch.compile options that pipeline units cannot support. `by_whole_batch` is True
    if both compile and deferred_batch_norm=True are set."""
    if by_whole_batch:
        raise ConfigurationError(
            "deferred_batch_norm=True does not support compile, since a compiled unit hides the inputs of its batch "
            "norms. Use only one of the two"
        )
    if "units" in options:
        raise ConfigurationError(
            f'compile={options!r}: the option "units" is not supported, since each unit is compiled separately. '
            "Remove the option. To fuse several layers, put these layers into one module of the model"
        )
    modes = ("reduce-overhead", "max-autotune")
    graphs = options.get("mode") in modes or "triton.cudagraphs" in options.get("options", {})
    if graphs and pp_size > 1:
        raise ConfigurationError(
            f"compile={options!r}: CUDA graphs overwrite the results of the previous microbatch, whose backward pass "
            "has not run yet. Turn CUDA graphs off, for example with mode='max-autotune-no-cudagraphs'"
        )


def _build_skeletons(model: nn.Module, policy: Policy, seed: int) -> None:
    """Build the skeletons in held units. All other skeletons keep their meta parameters and receive zero-filled
    buffers."""
    inside = {module for unit in policy.get_held_layers() for module in unit.modules()}
    for module in skeletons(model):
        if module in inside:
            build_layer(module, seed)
        else:
            blank_buffers(module)


def allocate(model: nn.Module, names: Collection[str], device: torch.device) -> dict[str, bool]:
    """Allocate the meta parameters `names` (uninitialized) and all meta buffers on `device`.

    A parameter stays the same object, so that optimizers, hooks and ties still refer to it. Buffers of a
    PreTrainedModel, including persistent ones, have the values that the model's constructor computes. Other buffers are
    uninitialized. Returns a dict that maps the name of each meta buffer to whether the buffer's values are known.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with without_weakrefs(model):
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


def rebuilt_models(
    model: nn.Module, dtype: torch.dtype | None = None, partly: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Rebuild each outermost PreTrainedModel in `model` from its config, with `dtype` if given. Yields the prefix
    of the original's names in `model`, and the new model. In the new model, parameters are on meta and buffers have
    values. With `partly`, if a model cannot be rebuilt from its config alone, the models inside it are rebuilt."""
    from accelerate import init_empty_weights
    from transformers import PreTrainedModel

    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights

    def walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if isinstance(module, PreTrainedModel):
            try:
                yield path, rebuilt(module)
                return
            except ConfigurationError:
                if not partly:
                    raise
        for name, child in module.named_children():
            yield from walk(f"{path}{name}.", child)

    def rebuilt(module: PreTrainedModel) -> nn.Module:
        empty = no_init_weights(), init_empty_weights(include_buffers=False), torch.random.fork_rng(devices=[])
        refusal = explained(
            lambda error: ConfigurationError(
                f"the buffers of {type(module).__name__} are on meta, and the model cannot be built again to compute "
                f"the values of the buffers ({summary(error)}). Build the model under accelerate's "
                "init_empty_weights(), which keeps the values of buffers, instead of torch.device('meta')"
            )
        )
        loading = replaced(PreTrainedModel, from_pretrained=_refuse_loading) if partly else contextlib.nullcontext()
        default = _default(dtype, module.config)
        with refusal, loading, torch.device("cpu"), empty[0], empty[1], empty[2], default as config:
            return type(module)(config)

    yield from walk("", model)


def _refuse_loading(*_: Any, **__: Any) -> None:
    """Replacement for `from_pretrained`: a model whose constructor loads a checkpoint cannot be rebuilt from config."""
    raise ConfigurationError("the constructor of the model loads a checkpoint")


@contextlib.contextmanager
def _default(dtype: torch.dtype | None, config: Any) -> Iterator[Any]:
    """Context manager that sets torch's default dtype, and yields a copy of `config` with this dtype. If `dtype` is
    None, yields `config` itself."""
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
    """A tensor of zeros that has the shape of `tensor`, but stores only one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(tensor.shape)


def is_released(parameter: torch.Tensor) -> bool:
    """Whether this stage does not hold the parameter. Always False in a compute_loss that a Trainer runs on all ranks
    (see `as_if_held`), where parameters of other stages look like held parameters."""
    return isinstance(parameter, Ghost) and not looks_held()
