"""Tensor parallelism: the held units of a stage divided over ranks, by a plan."""

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from pipeshard.errors import ConfigurationError, hint
from pipeshard.graph.units import Interception, Sliced
from pipeshard.hf import DROPOUTS, HEADS, without_adapters
from pipeshard.split.ties import kept_tied, names_of

DIVIDE = "divide:"  # and names of attributes: numbers of heads or features that a forward takes from its module


def plan_of(
    model: nn.Module, size: int, given: Mapping[str, str] | None, shipped: Mapping[str, str] | None
) -> dict[str, str]:
    """The style of every module and parameter that is sliced over `size` ranks: by the user's plan, by the model's own
    `tp_plan`, or by that which its policy has of the base model.

    Raises ConfigurationError for a model that cannot be sliced, and for a plan that does not fit it.
    """
    _, base = without_adapters(model)
    name = type(base).__name__
    try:
        from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
    except ImportError as error:
        raise ConfigurationError(
            f"tp_size={size}: {name} has no plan of tensor parallelism, which models of transformers 5 have. Use "
            "tp_size=1, and more stages or fsdp=True"
        ) from error
    if base is not model:
        raise ConfigurationError(
            f"tp_size={size}: adapters on sliced layers are not supported. Use tp_size=1 with LoRA"
        )
    plan = dict(given or getattr(model, "tp_plan", None) or _rooted(model, shipped or {}))
    names = [path for path, _ in model.named_modules()] + [path for path, _ in model.named_parameters()]
    generic = {path: replace_layer_number_by_wildcard(path) for path in names if path}
    for rule, style in plan.items():
        style_of(style)
        if given and rule not in generic.values():
            known = sorted(set(generic.values()))
            raise ConfigurationError(f"tp_plan names {rule}, which is nothing of {name}: {hint(rule, known)}")
    expanded: dict[str, str] = {}
    for path, module in model.named_modules():
        whole = plan.get(generic.get(path, ""))
        for key, _ in module.named_parameters(recurse=False):  # before the module, whose forward goes by them
            parameter = f"{path}.{key}" if path else key
            if style := plan.get(generic.get(parameter, parameter), whole):
                expanded[parameter] = style
        if whole is not None:
            expanded[path] = whole
    if not expanded:
        raise ConfigurationError(
            f"tp_size={size}: {name} comes without a tp_plan. Use tp_size=1, or give one, "
            'PipelinePlugin(tp_plan={"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise", ...})'
        )
    _check_config(base, size)
    return expanded


def style_of(name: str) -> Any:
    """The parallel layer of this name, transformers' or one of these; ConfigurationError for an unknown one."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    if name.startswith(DIVIDE):
        return Divided(name.removeprefix(DIVIDE).split(","))
    own = {"conv1d_colwise": Conv1DColumns(1), "conv1d_qkv": Conv1DColumns(3), "conv1d_rowwise": Conv1DRows()}
    if name in own:
        return own[name]
    if name not in ALL_PARALLEL_STYLES:
        known = [*ALL_PARALLEL_STYLES.keys(), *own, f"{DIVIDE}ATTRIBUTES"]
        raise ConfigurationError(f"tp_plan has the style {name!r}, which is unknown: {hint(name, known)}")
    return ALL_PARALLEL_STYLES[name]


def _rooted(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """A plan of the base model, with the names of this one."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    return {f"{prefix}.{rule}" if prefix and hasattr(model, prefix) else rule: style for rule, style in plan.items()}


def _check_config(model: nn.Module, size: int) -> None:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return
    text = config.get_text_config()
    for field in HEADS:
        heads = getattr(text, field, None)
        if isinstance(heads, int) and heads % size:
            raise ConfigurationError(
                f"tp_size={size} does not divide {field}={heads} of {type(model).__name__}: choose one that does"
            )
    for field in DROPOUTS:  # drawn for the heads or features of a slice: other ones on each rank, but by one generator
        if isinstance(share := getattr(text, field, None), float) and share > 0:
            raise ConfigurationError(
                f"tp_size={size}: {field}={share} of {type(model).__name__} would drop the same of the heads, or "
                "features, of each slice. Build the model from a config with 0.0, or use tp_size=1"
            )


class Divided:
    """A module whose forward reads sizes from its own attributes: in it, they are those of a slice."""

    def __init__(self, attributes: list[str]) -> None:
        self.attributes = attributes

    def validate_param(self, module: nn.Module, key: str, mesh: DeviceMesh, parameter_name: str) -> None:
        pass

    shard_param = validate_param

    def install_forward(self, module: Any, mesh: DeviceMesh) -> None:
        plain, size = module.forward, mesh.size()
        for name in self.attributes:
            if not isinstance(value := getattr(module, name, None), int) or value % size:
                kind = type(module).__name__
                raise ConfigurationError(f"tp_plan divides {name} of {kind}, which is {value!r}, by tp_size={size}")

        def forward(*args: Any, **kwargs: Any) -> Any:
            whole = {name: getattr(module, name) for name in self.attributes}
            vars(module).update((name, value // size) for name, value in whole.items())
            try:
                return plain(*args, **kwargs)
            finally:
                vars(module).update(whole)

        module.forward = forward


class Conv1DColumns:
    """A Conv1D of GPT-2, whose weight is (inputs, outputs), with a slice of the outputs: one of each of the `parts`
    equal blocks that it makes at once."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def validate_param(self, module: Any, key: str, mesh: DeviceMesh, parameter_name: str) -> None:
        outputs = getattr(module, "nf", None)
        if outputs is None or outputs % (self.parts * mesh.size()):
            raise ConfigurationError(
                f"tp_plan slices {parameter_name} of {type(module).__name__} as a Conv1D of {self.parts} blocks of "
                f"outputs: tp_size={mesh.size()} has to divide each of them, and outputs are {outputs}"
            )

    def shard_param(self, module: nn.Module, key: str, mesh: DeviceMesh) -> None:
        last = module.get_parameter(key).ndim - 1
        _shard(module, key, mesh, _StridedShard(last, split_factor=self.parts) if self.parts > 1 else Shard(last))

    def install_forward(self, module: Any, mesh: DeviceMesh) -> None:
        from transformers.distributed.parallel_utils import _AllReduceBackward

        def forward(x: Tensor) -> Tensor:
            x = _AllReduceBackward.apply(x, mesh.get_group())
            made = torch.addmm(_local(module.bias), x.reshape(-1, x.shape[-1]), _local(module.weight))
            return made.view(*x.shape[:-1], -1)

        module.forward = forward


class Conv1DRows:
    """A Conv1D with a slice of its inputs; the products are added up over the ranks."""

    def validate_param(self, module: Any, key: str, mesh: DeviceMesh, parameter_name: str) -> None:
        if getattr(module, "nx", 1) % mesh.size():
            raise ConfigurationError(
                f"tp_plan slices {parameter_name}: tp_size={mesh.size()} does not divide its inputs"
            )

    def shard_param(self, module: nn.Module, key: str, mesh: DeviceMesh) -> None:
        if key == "weight":
            _shard(module, key, mesh, Shard(0))

    def install_forward(self, module: Any, mesh: DeviceMesh) -> None:
        from transformers.distributed.parallel_utils import _AllReduceForward

        def forward(x: Tensor) -> Tensor:
            made = x.reshape(-1, x.shape[-1]) @ _local(module.weight)
            return (_AllReduceForward.apply(made, mesh.get_group()) + module.bias).view(*x.shape[:-1], -1)

        module.forward = forward


def _shard(module: nn.Module, key: str, mesh: DeviceMesh, placement: Any) -> None:
    whole = module.get_parameter(key)
    sliced = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    module._parameters[key] = nn.Parameter(sliced, requires_grad=whole.requires_grad)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# Of a module between sliced ones, whose own gradients are parts of a sum: transformers adds them up after every
# backward pass, which is once too often for what piled up before; here it is done once a step.
PARTIAL = "replicated_with_grad_allreduce"


class Slicing:
    """Slices what `held` (names of parameters) and the plan have in common over the ranks of `mesh`.

    The parameters become DTensors, each rank's slice cut out of the values that it has, and the forwards of the
    modules those of transformers' parallel layers, which exchange activations. What several names stand for is sliced
    once, or, where the plan slices it in two ways, stays whole.

    Attributes:
        partial: the names of whole parameters whose gradients the ranks have to add up.
    """

    def __init__(
        self,
        model: nn.Module,
        held: Collection[str],
        units: Mapping[str, nn.Module],
        mesh: DeviceMesh,
        plan: Mapping[str, str],
    ) -> None:
        first = {name: names for names in names_of(model).values() for name in names}
        parameters, modules = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_modules())
        own = {name for name in plan if name in parameters and first[name][0] in held and _unit_of(name, units)}
        self.partial = {first[name][0] for name in own if plan[name] == PARTIAL}
        with kept_tied(model):
            for name, style in _sliced(model, units, plan):
                layer = style_of(style)
                if name in own:
                    _slice(layer, modules[name.rpartition(".")[0]], name, mesh)
                elif name in modules:
                    _install(layer, modules[name], mesh)


def sliced_sizes(
    model: nn.Module, units: Collection[str], size: int, plan: Mapping[str, str]
) -> dict[nn.Parameter, int]:
    """How many numbers the first of `size` ranks, which has most, would have of each parameter that is sliced; needs no
    process group."""
    mesh = DeviceMesh("cpu", torch.arange(size), _init_backend=False, _rank=0)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    sizes: dict[nn.Parameter, int] = {}
    for name, style in _sliced(model, units, plan):
        if (parameter := parameters.get(name)) is None or parameter in sizes:
            continue
        path, _, key = name.rpartition(".")
        module = copy.copy(modules[path])
        blank = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        module._parameters = module._parameters | {key: blank}
        _slice(style_of(style), module, name, mesh)
        made = module._parameters[key]
        sizes[parameter] = made.to_local().numel() if isinstance(made, DTensor) else parameter.numel()
    return sizes


def _sliced(model: nn.Module, units: Collection[str], plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The parameters and modules of these units that the plan slices, each with its style."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    whole = {path for names in names_of(model).values() for path in _disagreeing(names, plan)}
    for name, style in plan.items():
        path = name.rpartition(".")[0] if name in parameters else name
        if style != PARTIAL and path not in whole and _unit_of(path, units):
            yield name, style


def _slice(layer: Any, module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Slice the parameter `name` of `module`."""
    key = name.rpartition(".")[2]
    layer.validate_param(module, key, mesh, parameter_name=name)
    layer.shard_param(module, key, mesh)


def _install(layer: Any, module: Any, mesh: DeviceMesh) -> None:
    """Inside the interception of a unit, which has to see what its callers see."""
    interception = module.__dict__.get("forward")
    if isinstance(interception, Interception):
        module.forward = interception.original
    plain = module.forward
    layer.install_forward(module, mesh)
    if module.forward is not plain:
        module.forward = Sliced(plain, module.forward)
    if isinstance(interception, Interception):
        interception.original, module.forward = module.forward, interception


def _unit_of(name: str, units: Collection[str]) -> bool:
    return any(f"{name}.".startswith(f"{unit}.") for unit in units)


def _disagreeing(names: tuple[str, ...], plan: Mapping[str, str]) -> set[str]:
    """The modules that have a parameter which the plan slices along different dimensions, or under some names only."""
    ways = {_dimension(plan.get(name)) for name in names}
    return {name.rpartition(".")[0] for name in names} if len(ways) > 1 else set()


def _dimension(style: str | None) -> str:
    kinds = ("colwise", "rowwise")
    if style is None or style.startswith("packed"):
        return str(style)
    if style.startswith("embedding"):  # whose rows are the features that a linear layer of the same weight makes
        return "rows" if style == "embedding_rowwise" else "columns"
    return next(("rows" if kind == "colwise" else "columns" for kind in kinds if style.startswith(kind)), style)
