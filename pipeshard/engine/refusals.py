"""Refusals: models, criteria and optimizers that could not be trained exactly in parts, refused at boost.

An optimizer that couples parameters (LBFGS, sharpness-aware minimization, a norm over all of them) would silently
compute something else on every stage. torch's own are known; any other class is tried on tiny parameters, as a whole
and in halves.
"""

import copy
import inspect
import logging
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Adafactor, Optimizer

from pipeshard.batch.criterion import Criterion, takes_outputs_alone
from pipeshard.config import PipelineConfig
from pipeshard.distributed.agreement import texts_of
from pipeshard.distributed.mesh import Grid
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.ghost import Ghost
from pipeshard.graph.units import containers
from pipeshard.hf import is_of_peft, recomputes
from pipeshard.split.adapters import BEGINNING, base_names
from pipeshard.split.packed import is_quantized

logger = logging.getLogger("pipeshard")
# What each does belongs around the pipeline: under it, it would talk to ranks that have other stages.
REFUSED: dict[type, str] = {
    DistributedDataParallel: "the plugin makes the replicas (dp_size, by default as many as the world has room for)",
    DataParallel: "the plugin makes the replicas (dp_size, by default as many as the world has room for)",
    FullyShardedDataParallel: "PipelinePlugin(fsdp=True) divides parameters among replicas",
    FSDPModule: "PipelinePlugin(fsdp=True) divides parameters among replicas",
}


def plain(model: nn.Module, warns: bool = True) -> nn.Module:
    """`model` before it was compiled as a whole by `torch.compile(model)` or `model.compile()`; `warns` logs this.
    Raises ConfigurationError for a model that is wrapped, or has wrapped modules, in any other way."""
    compiled = False
    while (inner := model._modules.get("_orig_mod")) is not None:
        model, compiled = inner, True
    if model._compiled_call_impl is not None:
        model._compiled_call_impl, compiled = None, True
    if compiled and warns:
        logger.warning(
            "this %s was compiled as a whole, but runs in parts, which run as they are written. Pass the model as it "
            "is, and compile=True to PipelinePlugin, which compiles each layer",
            type(model).__name__,
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigurationError(
                f"{name} has no shape before the first forward (a Lazy module of torch): run the model on a batch "
                "once, model(**batch) under torch.no_grad(), before its optimizer is made and it is boosted"
            )
        if type(parameter).__module__.startswith("colossalai.lazy"):
            raise ConfigurationError(
                f"{name} was made under colossalai's LazyInitContext, of which the stages could not take their parts: "
                "build the model under torch.device('meta') instead, which takes no memory either, and "
                "PipelinePlugin(init_weights=True) draws its weights on the stages (or call "
                "LazyInitContext.materialize(model), which makes all of it in every process)"
            )
    refused = dict(REFUSED)
    if (wrapper := getattr(sys.modules.get("colossalai.interface"), "ModelWrapper", None)) is not None:
        refused[wrapper] = "one Booster boosts it, that of the PipelinePlugin"
    for name, module in model.named_modules():
        if type(module).__module__.startswith("bitsandbytes."):
            raise ConfigurationError(
                f"{name} is a {type(module).__name__} of bitsandbytes, which replaces its weight as it runs. Make the "
                "model by PipelinePlugin.from_pretrained(cls, folder, "
                "quantization_config=BitsAndBytesConfig(load_in_4bit=True)), of which each stage packs its own weights"
            )
        for kind, instead in refused.items():
            if isinstance(module, kind):
                raise ConfigurationError(
                    f"{name or 'the model'} is wrapped in {kind.__name__} ({type(module).__name__}): pass the model as "
                    f"it was before that (not prepared by accelerate either), {instead}"
                )
    return model


def refuse_other_config(config: PipelineConfig, other: PipelineConfig) -> None:
    """Raise ConfigurationError if a boosted model is boosted by a plugin with other arguments, which would be lost."""
    texts, others = texts_of(config.of_all_ranks), texts_of(other.of_all_ranks)
    name = next((name for name in texts if texts[name] != others[name]), None)
    if name is not None:
        raise ConfigurationError(
            f"this model was boosted with {name}={getattr(config, name)!r}, and the plugin of this call has "
            f"{name}={getattr(other, name)!r}: use the plugin that boosted it, or boost "
            "pipeshard.to_sequential(model), which is whole again"
        )


def refuse_released(model: nn.Module) -> None:
    """Raise UsageError for the model inside a boosted one, of which this rank has released other stages."""
    name = next((name for name, parameter in model.named_parameters() if isinstance(parameter, Ghost)), None)
    if name is not None:
        raise UsageError(
            f"this model was boosted before, and this rank has released {name}, which another stage holds: pass the "
            "model that boost returned, boost pipeshard.to_sequential(model) of that, or create the model again"
        )


def refuse_blank_adapters(model: nn.Module) -> None:
    """Refuse adapters on meta: peft has initialized them, and the values are lost."""
    if not is_of_peft(model, "PeftModel"):
        return
    known = base_names(model)
    blank = [name for name, p in model.named_parameters() if p.is_meta and name not in known]
    if blank:
        raise ConfigurationError(
            f"{len(blank)} parameters of adapters are on meta, {blank[0]} the first, so the values that peft gave "
            "them are lost. Put adapters on a model on meta by booster.enable_lora(model, lora_config=...), which "
            "keeps them on the CPU, or load the model with its weights, and leave low_cpu_mem_usage out"
        )


def refuse_sharded_packing(model: nn.Module, fsdp: bool, slices: int) -> None:
    """Refuse to shard packed weights."""
    if (fsdp or slices > 1) and is_quantized(model):
        raise ConfigurationError(
            "fsdp=True, tp_size and ep_size shard weights, and this model has them quantized, which are not sharded. "
            "Use more stages (pp_size) or replicas without these arguments"
        )


def refuse_lowered_begin(model: nn.Module, config: PipelineConfig) -> None:
    """Refuse adapters that are computed from loaded weights if these are not whole or not as loaded."""
    if getattr(model, BEGINNING, None) and (config.lowers or config.fsdp or config.slices_of_stage > 1):
        raise ConfigurationError(
            "DoRA, PiSSA and OLoRA begin with what is computed from the loaded weights, and with precision, fsdp, "
            "tp_size or ep_size these are cast or sharded before they are loaded. Load the model with its weights "
            "before booster.enable_lora, or leave these arguments out"
        )


def refuse_criterion(criterion: Criterion | None, model: nn.Module) -> None:
    """Raise ConfigurationError for a criterion that cannot be called, or that has trainable parameters that are not
    the model's."""
    if criterion is not None and not callable(criterion):
        raise ConfigurationError(f"the criterion is a {type(criterion).__name__}: pass criterion(outputs, inputs)")
    if criterion is not None and not hasattr(criterion, "of_batch"):
        takes_outputs_alone(criterion)
    if not isinstance(criterion, nn.Module):
        return
    known = set(model.parameters())
    foreign = [name for name, p in criterion.named_parameters() if p.requires_grad and p not in known]
    if foreign:
        raise ConfigurationError(
            f"the criterion ({type(criterion).__name__}) has parameters of its own, {foreign[0]} the first, "
            "which would be trained on no stage: make it a child of the model that computes the loss in its forward, "
            "or freeze them"
        )


def refuse_compiled(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Raise ConfigurationError for a compiled module whose call is cut into parts, or replayed.

    A unit that `torch.compile(layer)` has put in a layer's place is run whole, and so is everything inside of a unit.
    """
    around = set(containers(model, units))
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward", type(module).forward) if module in around else None
        compiled = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
        compiled |= module in around and "_orig_mod" in module._modules
        compiled |= module._compiled_call_impl is not None and (module in around or name in units)
        if compiled:
            raise ConfigurationError(
                f"{name or 'the model'} ({type(module).__name__}) was compiled by itself: leave that out, and pass "
                'compile=True, or options as compile={"backend": ...}, to PipelinePlugin, which compiles each layer'
            )


def refuse_recomputed(model: nn.Module, around: Iterable[nn.Module]) -> None:
    """Raise UsageError for a module around units that recomputes its forward, which may be enabled after the cut."""
    whole = next(filter(recomputes, around), None)
    if whole is not None:
        name = next(name for name, module in model.named_modules() if module is whole)
        raise UsageError(
            f"{name} ({type(whole).__name__}) recomputes its forward, which was cut into units when the model was "
            "boosted: call model.gradient_checkpointing_enable() before booster.boost"
        )


class Places:
    """All places of `model`. A module set there after boosting (a new head, an adapter) was never cut: its gradients
    would not be summed, and other ranks do not have it. With `parameters` theirs count too, which FSDP itself
    changes."""

    def __init__(self, model: nn.Module, parameters: bool) -> None:
        self._kept = [
            (name, module, dict(module._modules), dict(module._parameters) if parameters else {})
            for name, module in model.named_modules()
        ]

    def check(self) -> None:
        """Raise UsageError if a place has another module now, or if there are new parameters."""
        for name, module, children, parameters in self._kept:
            key = _changed(module._modules, children) or (parameters and _changed(module._parameters, parameters))
            if key:
                raise UsageError(
                    f"{name}.{key}".lstrip(".") + f" of this {type(module).__name__} is not what it was when the model "
                    "was boosted: put in modules, parameters and adapters before booster.boost"
                )


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The first name whose object was replaced, or that is new and has parameters; "" if there is none."""
    for key, value in before.items():
        if now.get(key) is not value:
            return key
    if len(now) > len(before):
        for key in [key for key in now if key not in before]:
            if isinstance(now[key], Tensor) or (now[key] is not None and any(True for _ in now[key].parameters())):
                return key
    return ""


FEW = 2  # parameters of each group that an optimizer is tried on
SIZE, SCALES, SPARED = 4, (1.0, 100.0, 0.01) + (1.0,) * 7, 0.02  # of tiny parameters; of gradients; a gap that counts
OVERRIDDEN = ("step", "add_param_group", "zero_grad")  # which schedulers, or an earlier boost, have put on an optimizer
KNOWN = "torch.optim.", "bitsandbytes.optim."  # modules whose optimizers look at one parameter at a time
WHOLE = (Adafactor, getattr(torch.optim, "Muon", Adafactor))  # torch's own that look at whole matrices
Place = tuple[int, int]  # of a parameter: its group, and its place in it


def check_separable(optimizer: Optimizer, model: nn.Module, config: PipelineConfig, grid: Grid) -> None:
    """Raise ConfigurationError for an optimizer that would update a part of the model differently than all of
    it."""
    name = type(optimizer).__name__
    sharded = grid.tp_size > 1 or (config.fsdp and grid.dp_size > 1)
    if grid.pp_size == 1 and not sharded and not (config.zero_stage and grid.dp_size > 1):
        return
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(
            f"{name} takes its direction from the gradients of all parameters together, of which each rank has a part "
            "only: use another optimizer, or pp_size=1 without tp_size, ep_size, zero_stage and fsdp"
        )
    known = type(optimizer).__module__.startswith(KNOWN)
    try:
        couples = not known and gap(optimizer, model, False) > SPARED
        divides = sharded and (looks_at_whole(optimizer) if known else gap(optimizer, model, True) > SPARED)
    except Exception as error:  # a user's class may raise anything
        if grid.first:
            logger.warning(
                "%s could not be tried on a part of the model (%s: %s): it trains as on the whole model only if it "
                "looks at one parameter at a time",
                name, type(error).__name__, error,
            )  # fmt: skip
        return
    if couples:
        raise ConfigurationError(
            f"{name} does something else to parameters together than to each alone (a norm over all of them, an "
            "estimate from all of them, random numbers, a list of parameters outside its groups), but each rank "
            "has a part of them only: let it keep what belongs to a parameter in self.state[parameter], use another "
            "optimizer (max_norm clips by the norm of the whole model), or pp_size=1 without zero_stage and fsdp"
        )
    if divides:
        raise ConfigurationError(
            f"{name} looks at whole parameters, of which each rank has slices with tp_size, ep_size or fsdp: use "
            "zero_stage=1 instead, or an optimizer that works element by element"
        )


def looks_at_whole(optimizer: Optimizer) -> bool:
    """Whether an optimizer of the KNOWN modules looks at whole parameters, as those of bitsandbytes do whose states
    share a scale for every 256 values, or whose updates have a norm."""
    of_bitsandbytes = getattr(optimizer, "args", None)
    in_blocks = getattr(of_bitsandbytes, "optim_bits", 32) == 8
    return isinstance(optimizer, WHOLE) or in_blocks or getattr(of_bitsandbytes, "max_unorm", 0.0) > 0


def gap(optimizer: Optimizer, model: nn.Module, sliced: bool) -> float:
    """How much an optimizer's updates differ, relative to its largest, if each half of its parameters, or (`sliced`) of
    the rows of each, has a separate optimizer. Its own methods are tried as well as `step`."""
    try:
        return _gap_of_few(optimizer, model, sliced, FEW)
    except Exception:  # it may count on all parameters
        return _gap_of_few(optimizer, model, sliced, None)


def _gap_of_few(optimizer: Optimizer, model: nn.Module, sliced: bool, few: int | None) -> float:
    start, methods = _tiny(optimizer, sliced, few), own_methods(optimizer)
    by_methods = _gap(start, lambda values: _called(optimizer, model, values, methods), sliced) if methods else 0.0
    if by_methods > SPARED:
        return by_methods
    return _gap(start, lambda values: _stepped(optimizer, model, values), sliced)


def _gap(start: dict[Place, Tensor], run: Callable[[dict[Place, Tensor]], dict[Place, Tensor]], sliced: bool) -> float:
    halves = [
        {place: value.chunk(2)[half] for place, value in start.items()} if sliced else dict([*start.items()][half::2])
        for half in (0, 1)
    ]
    with torch.random.fork_rng():
        together = run(start)
        try:
            first, second = [run(values) for values in halves]
        except Exception:  # it counts on all of them being there: by lists of its own beside them
            return 1.0
    apart = {place: torch.cat([first[place], second[place]], 1) for place in start} if sliced else first | second
    if not start:
        return 0.0
    gaps = [(together[place], together[place] - apart[place]) for place in start]
    moved, differs = (torch.cat([gap.flatten(1) for gap in of_all], 1).abs().amax(1) for of_all in zip(*gaps))
    counts = moved > 1e-6
    return float((differs[counts] / moved[counts]).max()) if counts.any() else 0.0


def own_methods(optimizer: Optimizer) -> list[str]:
    """The public methods that its class adds to torch's Optimizer, that need no arguments and iterate over the
    parameter groups, in the order of their definition (SAM's first_step before its second_step)."""
    found: dict[str, None] = {}
    for kind in reversed(type(optimizer).__mro__):
        if kind is object or issubclass(Optimizer, kind) or kind.__module__.startswith("torch."):
            continue
        for name, method in vars(kind).items():
            if isinstance(method, FunctionType) and not name.startswith("_") and not hasattr(Optimizer, name):
                found[name] = None
    return [name for name in found if _goes_through_groups(getattr(type(optimizer), name))]


def _goes_through_groups(method: Callable[..., Any]) -> bool:
    """Whether it can be called without arguments, and reads the parameter groups."""
    original = inspect.unwrap(method)
    first, *others = inspect.signature(original).parameters.values()
    optional = (first.VAR_POSITIONAL, first.VAR_KEYWORD)
    needed = [one for one in others if one.default is one.empty and one.kind not in optional]
    return not needed and "param_groups" in original.__code__.co_names


def _tiny(optimizer: Optimizer, sliced: bool, few: int | None) -> dict[Place, Tensor]:
    """Values in place of the first `few` parameters of each group, or of all; with `sliced`, of those with
    rows."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        (k, j): [min(size, SIZE) for size in parameter.shape]
        for k, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"][:few])
    }
    if sliced:
        shapes = {place: shape for place, shape in shapes.items() if shape and shape[0] > 1}
    return {place: torch.randn(shape, generator=generator) for place, shape in shapes.items()}


def _stepped(optimizer: Optimizer, model: nn.Module, values: dict[Place, Tensor]) -> dict[Place, Tensor]:
    """The values after some steps of a copy that has only these parameters."""
    try:
        return _trial(optimizer, model, values, closes=False)
    except Exception as error:  # it may want a closure
        try:
            return _trial(optimizer, model, values, closes=True)
        except Exception:  # the first one tells more
            raise error from None


def _trial(optimizer: Optimizer, model: nn.Module, values: dict[Place, Tensor], closes: bool) -> dict[Place, Tensor]:
    parameters = _parameters(optimizer, values)
    trial = _copy(optimizer, model, parameters)
    torch.manual_seed(0)
    seen = [_values(parameters)]
    for scale in SCALES:

        def closure(scale: float = scale) -> Tensor:
            """A separable loss, whose gradients change slightly on the way; its value does not depend on parameters."""
            _give_gradients(parameters, scale)
            return torch.ones((), requires_grad=True)

        closure()
        type(trial).step(trial, *([closure] if closes else []))
        seen.append(_values(parameters))
    return _moves(parameters, seen)


def _called(
    optimizer: Optimizer, model: nn.Module, values: dict[Place, Tensor], methods: Sequence[str]
) -> dict[Place, Tensor]:
    """What each of these methods does to the values, one after the other, with new gradients each time."""
    parameters = _parameters(optimizer, values)
    trial = _copy(optimizer, model, parameters)
    torch.manual_seed(0)
    seen = [_values(parameters)]
    for name in methods:
        _give_gradients(parameters, 1.0)
        with suppress(Exception):  # it may want what only a training loop gives it
            getattr(type(trial), name)(trial)
        seen.append(_values(parameters))
    return _moves(parameters, seen)


def _parameters(optimizer: Optimizer, values: dict[Place, Tensor]) -> dict[Place, nn.Parameter]:
    parameters = {}
    for (k, j), value in values.items():
        original = optimizer.param_groups[k]["params"][j]
        parameters[k, j] = nn.Parameter(value.to("cpu" if original.is_meta else original.device).clone())
    return parameters


def _give_gradients(parameters: dict[Place, nn.Parameter], scale: float) -> None:
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.grad = scale * torch.cos(40.0 * parameter)


def _values(parameters: dict[Place, nn.Parameter]) -> dict[Place, Tensor]:
    return {place: parameter.detach().cpu().clone() for place, parameter in parameters.items()}


def _moves(parameters: dict[Place, nn.Parameter], seen: Sequence[dict[Place, Tensor]]) -> dict[Place, Tensor]:
    return {place: torch.stack([values[place] for values in seen]).diff(dim=0) for place in parameters}


def _corner(tensor: Tensor) -> Tensor:
    return tensor.detach()[(slice(SIZE),) * tensor.ndim].clone() if tensor.ndim else tensor.detach().clone()


def _tensors(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors in an optimizer's own lists and dicts, and in those of optimizers inside of it."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        inner = vars(value) if isinstance(value, Optimizer) else value
        entries = inner.values() if isinstance(inner, Mapping) else inner if isinstance(inner, list | tuple) else ()
        for entry in entries:
            yield from _tensors(entry, depth - 1)


def _copy(optimizer: Optimizer, model: nn.Module, parameters: dict[Place, nn.Parameter]) -> Any:
    """The optimizer with these parameters in place of its own; nothing large is copied."""
    content = {key: value for key, value in optimizer.__dict__.items() if key not in (*OVERRIDDEN, "state")}
    memo: dict[int, Any] = {id(tensor): _corner(tensor) for tensor in _tensors(content)}
    memo |= {id(tensor): torch.empty(0) for tensor in (*model.parameters(), *model.buffers())}
    state = memo[id(optimizer.state)] = defaultdict[Any, Any](dict)
    for k, group in enumerate(optimizer.param_groups):
        for j, original in enumerate(group["params"]):
            tried = memo[id(original)] = parameters.get((k, j), nn.Parameter(_corner(original)))
            tried.__dict__.update({key: _like(value, original, tried) for key, value in vars(original).items()})
            if original in optimizer.state:
                of_state = optimizer.state[original]
                state[tried] = {key: _like(value, original, tried) for key, value in of_state.items()}
    trial = memo[id(optimizer)] = object.__new__(type(optimizer))
    trial.__dict__.update(copy.deepcopy(content, memo), state=state)
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    for k, group in enumerate(trial.param_groups):
        group["params"][:] = [parameter for (of, _), parameter in parameters.items() if of == k]
    return trial


def _like(value: Any, original: nn.Parameter, tried: nn.Parameter) -> Any:
    """The state of a parameter, for the one that replaces it: for a tensor of its shape, ones, since the
    replacement may be any slice of it."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value) if isinstance(value, list | dict) else value
    return torch.ones_like(tried, dtype=value.dtype) if value.shape == original.shape else _corner(value)
