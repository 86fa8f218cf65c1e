"""Materialize: a whole model becomes one stage of it, with memory and values for what it holds."""

import copy
import functools
import hashlib
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeshard.errors import ConfigurationError
from pipeshard.ghost import Ghost, guard, inside_pipeshard
from pipeshard.graph.taint import mutated, storage_of
from pipeshard.split.deferred_init import blank_buffers, build, skeletons
from pipeshard.split.policy import Policy
from pipeshard.split.ties import names_of, put_parameter

# True: by the architecture's own rule; False: not at all; else fn(module) or fn(module, name) for each module that has
# tensors of its own to be initialised.
InitWeights = bool | Callable[..., Any]


def allocate(model: nn.Module, names: Collection[str], device: torch.device) -> dict[str, bool]:
    """Give these parameters, on meta, memory on the device, and all buffers on meta memory and values.

    A parameter stays the same object, so that optimizers, hooks and ties keep it. Buffers, the persistent ones too, get
    the values that the architecture's constructor gives them. Returns the names of these buffers, and whether that
    could be found out.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        give(parameters[name], torch.empty_like(parameters[name], device=device))
    blank = {name: b for name, b in model.named_buffers(remove_duplicate=False) if b.is_meta}
    made = list(twins(model)) if blank else []
    values = {path + key: b for path, twin in made for key, b in twin.named_buffers(remove_duplicate=False)}
    known = {}
    for name, buffer in blank.items():
        twin = values.get(name)
        known[name] = twin is not None and (twin.shape, twin.dtype) == (buffer.shape, buffer.dtype)
        path, _, key = name.rpartition(".")
        content = twin if known[name] and twin is not None else torch.empty_like(buffer, device=device)
        model.get_submodule(path)._buffers[key] = content.to(device)
    return known


def give(parameter: nn.Parameter, values: Tensor) -> None:
    """Let a parameter on meta take over these values; it stays the same object."""
    kept = {key: value for key, value in parameter.__dict__.items() if key != "_is_hf_initialized"}
    torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
    parameter.__dict__.update(kept)


def initialize(
    model: nn.Module, parameters: Collection[str], buffers: Mapping[str, bool], rule: InitWeights, seed: int
) -> None:
    """Draw the parameters of these (first) names and set these buffers, and nothing else of the model.

    By `rule`: True is the `_init_weights` of the PreTrainedModel around a module, then its `reset_parameters`. What a
    parameter gets depends on the seed and its name alone, not on what else is there. The user's random generators do
    not move. `buffers` is what `allocate` returned. Raises ConfigurationError for a tensor left without values.
    """
    architecture, drawn = set(buffers), set(parameters if rule else ())
    if callable(rule):
        missing = _fill(model, drawn, seed, functools.partial(_by_function, rule))
    else:
        missing, architecture = set(), architecture | drawn
    missing |= _fill(model, architecture, seed, _by_architecture) - {name for name, known in buffers.items() if known}
    if missing:
        first = min(missing)
        why = "no _init_weights of a PreTrainedModel sets it, and its module has no reset_parameters()"
        raise ConfigurationError(
            f"{len(missing)} tensors on meta got no values, {first} of "
            f"{type(model.get_submodule(first.rpartition('.')[0])).__name__} the first: "
            f"{'init_weights=fn did not write to it' if callable(rule) else why}. Give the module one, pass "
            "PipelinePlugin(init_weights=fn) with an fn(module, name) that fills all of a module's own tensors, or "
            "init_weights=False to load them all with booster.load_model"
        )


def _fill(model: nn.Module, names: set[str], seed: int, fill: Callable[..., None]) -> set[str]:
    """Call `fill` for each module that has some of these tensors, in it or below; returns those without values yet."""
    if not names:
        return set()
    with torch.no_grad(), _Drawing(model, names, seed) as drawing:
        for path, module, owner in _with_owners(model):
            if path in drawing.below:
                with drawing.inside(path):
                    own = {name for name in drawing.below[path] if name.rpartition(".")[0] == path}
                    fill(path, module, owner, own, drawing)
    return names - drawing.written


def _by_architecture(path: str, module: nn.Module, owner: Any, own: set[str], drawing: "_Drawing") -> None:
    if owner is not None:
        owner._init_weights(module)
    reset: Any = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    if own - drawing.written and reset is not None:
        drawing.settled = set(drawing.written)
        reset()
        drawing.settled = set()


def _by_function(
    rule: Callable[..., Any], path: str, module: nn.Module, owner: Any, own: set[str], drawing: "_Drawing"
) -> None:
    if not own:
        return
    parameters = list(inspect.signature(rule).parameters.values())
    takes_name = len(parameters) > 1 and parameters[1].default is inspect.Parameter.empty
    try:
        rule(module, path) if takes_name else rule(module)
    except Exception as error:
        raise ConfigurationError(
            f"init_weights failed for {path} ({type(module).__name__}, with {', '.join(sorted(own))}): "
            f"{type(error).__name__}: {error}"
        ) from error


class _Drawing(TorchDispatchMode):
    """Lets writes through to the named parameters only, and draws each from a generator of its own.

    A parameter with several names is written to by the module of its first name: the others would draw it again.
    """

    def __init__(self, model: nn.Module, names: Collection[str], seed: int) -> None:
        super().__init__()
        self.seed, self.path = seed, ""
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self.names = {storage_of(tensor): name for name, tensor in tensors.items()}  # of each, the first
        self.below: dict[str, set[str]] = {"": set(names)}  # what is to be drawn, by the paths of the modules around
        for name in names:
            for path in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
                self.below.setdefault(path, set()).add(name)
        self.written: set[str] = set()
        self.settled: set[str] = set()  # written, and not to be written again
        self.draws: Counter[str] = Counter()

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """While the module at `path` is initialised."""
        self.path = path
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number(self.seed, path))
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        for target in mutated(func, args, kwargs) if func._schema.is_mutable else ():
            name = self.names.get(storage_of(target))
            if name is None:
                continue
            if name in self.settled or name not in self.below[self.path]:
                return target
            self.written.add(name)
            if any(argument.name == "generator" for argument in func._schema.arguments):
                seed = number(self.seed, f"{name}#{self.draws[name]}")
                kwargs["generator"] = torch.Generator(target.device).manual_seed(seed)
                self.draws[name] += 1
        return func(*args, **kwargs)


def number(seed: int, text: str) -> int:
    """A seed for what `text` names."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {text}".encode(), digest_size=7).digest(), "little")


def _with_owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Every module after its children, with the nearest module around it (or itself) that has `_init_weights`."""

    def walk(path: str, module: nn.Module, owner: Any) -> Iterator[tuple[str, nn.Module, Any]]:
        owner = module if hasattr(module, "_init_weights") else owner
        for name, child in module.named_children():
            yield from walk(f"{path}.{name}" if path else name, child, owner)
        yield path, module, owner

    return walk("", model, None)


def twins(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Models newly built from the configurations of the outermost PreTrainedModels in `model`, and what the names of
    each begin with; parameters take no memory and no time. As of this dtype, if one is given."""
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
        with torch.device("cpu"), empty[0], empty[1], empty[2], _default(dtype, module.config) as config:
            try:
                twin = type(module)(config)
            except Exception as error:
                raise ConfigurationError(
                    f"the buffers of {type(module).__name__} are on meta, and the model cannot be built again to get "
                    f"their values ({type(error).__name__}: {error}). Build it under accelerate's init_empty_weights() "
                    "instead of torch.device('meta'): that leaves buffers their values"
                ) from error
        yield path, twin

    yield from walk("", model)


@contextmanager
def _default(dtype: torch.dtype | None, config: Any) -> Iterator[Any]:
    """Inside, tensors are made in this dtype where nothing else is said; a configuration that says the same."""
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


class Sharder:
    """Keeps of `model` what `policy` says its stage holds. Each step may be overridden; `shard` calls them in order."""

    def __init__(
        self, model: nn.Module, policy: Policy, device: torch.device, init_weights: InitWeights = True, seed: int = 0
    ) -> None:
        self.model, self.policy, self.device = model, policy, device
        self.init_weights, self.seed = init_weights, seed

    @inside_pipeshard()
    def shard(self) -> list[dict[int, nn.Parameter]]:
        """Shard the model in place and return the shared parameters: one {stage: parameter} per tie across stages."""
        self._preprocess()
        self._release_unheld_layers()
        self._replace_module()
        self._materialize_model()
        return self._postprocess()

    def _preprocess(self) -> None:
        """Ties are recorded by name now: of released parameters nothing would tell that they were one."""
        self.names = names_of(self.model)
        self.held = self.policy.held[self.policy.stage]
        self.on_meta = {name for name, parameter in self.model.named_parameters() if parameter.is_meta}

    def _release_unheld_layers(self) -> None:
        """A released parameter stays visible under its names, as a Ghost."""
        parameters = dict(self.model.named_parameters())
        for first, names in self.names.items():
            if first not in self.held:
                ghost = Ghost.of(parameters[first], self.device, self._label(first))
                for name in names:
                    put_parameter(self.model, name, ghost)

    def _replace_module(self) -> None:
        self.policy.replace_forward()

    def _materialize_model(self) -> None:
        """Bring what is held to the device; what is on meta gets memory there, and the values of `init_weights`."""
        held = sorted(self.on_meta & self.held)
        self._build_skeletons()
        fresh = [name for name in held if self.model.get_parameter(name).is_meta]
        buffers = allocate(self.model, fresh, self.device)
        drawn = held if callable(self.init_weights) else fresh
        initialize(self.model, drawn, buffers, self.init_weights, self.seed)
        for parameter in self.model.parameters():
            if not is_released(parameter):
                parameter.data = parameter.data.to(self.device)
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(self.device)

    def _build_skeletons(self) -> None:
        """Those in held units become what their constructors make of them; the others stay, with buffers of zeros."""
        inside = {module for unit in self.policy.get_held_layers() for module in unit.modules()}
        for module in skeletons(self.model):
            if module in inside:
                build(module, self.seed)
            else:
                blank_buffers(module)

    def _postprocess(self) -> list[dict[int, nn.Parameter]]:
        """Names become tensors last, when nothing replaces them any more."""
        guard(self.model)
        return self.policy.get_shared_params()

    def _label(self, name: str) -> str:
        policy = self.policy
        here, there = f"which holds stage {policy.stage} of {policy.num_stages}", f"stage {policy.owner(name)} has them"
        return f"{name} has no values on this rank, {here}; {there}"


def storageless(tensor: torch.Tensor, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    """A tensor of the same shape that takes the memory of one number."""
    return torch.zeros((), dtype=dtype, device=device).expand(tensor.shape)


def is_released(parameter: torch.Tensor) -> bool:
    """Whether this stage does not hold the parameter."""
    return isinstance(parameter, Ghost)
