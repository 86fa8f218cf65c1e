"""Tensor parallelism: shards the parameters of a stage's units across ranks, according to a `tp_plan` or `ep_plan`.

transformers shards a model while loading it, across all ranks of the world. pipeshard shards a stage after it has split
the model. The trace therefore sees unsharded modules, and only the stage's parameters are sharded. The parallel layers
come from transformers. For models without a plan in transformers, the style `Divided` supports modules that store a
number of heads in an attribute. `LatentProjection` replaces transformers' style for the first projection of latent
attention. Expert parallelism uses the `ep_plan` instead of the `tp_plan`: each rank holds some experts of each layer.
"""

import copy
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pipeshard.errors import ConfigurationError, counted, hint
from pipeshard.graph.units import Interception, Sliced
from pipeshard.hf import DROPOUTS, HEADS, without_adapters
from pipeshard.private import Dropout
from pipeshard.replaced import replaced
from pipeshard.split.ties import first_names, kept_tied, names_of

DIVIDE = "divide:"  # followed by the names of attributes (numbers of heads or features) that a module's forward reads
LATENT = "mla_kv_a_proj"  # the style of the projection to latent keys and values and to a rotary key
EXPERTS, DISPATCH = "grouped_gemm", "ep_dispatch_experts"  # the styles of experts' parameters, and of their module
# The first word of a style for linear layers, and the attribute of the layer that transformers reads
SIZES = {"colwise": "out_features", "rowwise": "in_features"}
KEYS = re.compile(r"(.*)\.([kv])_proj(\.|$)")  # the key and value projections of an attention module
EXAMPLES = {
    "tp": '{"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise", ...}',
    "ep": f'{{"layers.*.mlp.experts": "{DISPATCH}", "layers.*.mlp.experts.gate_up_proj": "{EXPERTS}", ...}}',
}
INSTEAD = "more stages, fsdp=True or zero_stage=1"  # other ways to reduce the memory of a rank


def plan_of(
    model: nn.Module,
    tp_size: int,
    tp_plan: Mapping[str, str] | None,
    of_policy: Mapping[str, str] | None,
    ep_size: int = 1,
    ep_plan: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The style of every module and parameter that is sharded across the ranks of a stage. The styles come from the
    first of these plans that exists: the user's plan, the model's own `tp_plan` (with `ep_size`, its `ep_plan`), or the
    policy's `tp_plan` for the base model.

    Raises ConfigurationError if the model cannot be sharded, or if the plan does not match the model.
    """
    by, size, of_user = ("ep", ep_size, ep_plan) if ep_size > 1 else ("tp", tp_size, tp_plan)
    prefix, base = without_adapters(model)
    name = type(base).__name__
    try:
        from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
    except ImportError as error:
        raise ConfigurationError(
            f"{by}_size={size} needs transformers.distributed.parallel_utils, which cannot be imported ({error}). "
            f"Install transformers 5, or use {by}_size=1 with more stages or fsdp=True"
        ) from error
    plan = dict(of_user or getattr(base, f"{by}_plan", None) or _rooted(base, (by == "tp" and of_policy) or {}))
    plan = {rule if rule.startswith(prefix) else prefix + rule: style for rule, style in plan.items()}
    names = [path for path, _ in model.named_modules()] + [path for path, _ in model.named_parameters()]
    generic = {path: replace_layer_number_by_wildcard(path) for path in names if path}
    for rule, style in plan.items():
        style_of(style, by)
        if of_user and rule not in generic.values():
            known = sorted(set(generic.values()))
            raise ConfigurationError(f"{by}_plan names {rule}, which {name} does not have: {hint(rule, known)}")
    expanded: dict[str, str] = {}
    of_adapters: dict[str, str] = {}
    head = getattr(base, "get_output_embeddings", lambda: None)()
    for path, module in model.named_modules():
        whole = plan.get(generic.get(path, ""), of_adapters.get(path))
        if whole is not None and type(module).__module__.startswith("peft."):
            of_adapters |= _of_adapters(path, module, whole, by, size)
            continue
        for key, _ in module.named_parameters(recurse=False):  # before their module, whose forward depends on them
            parameter = f"{path}.{key}" if path else key
            if style := plan.get(generic.get(parameter, parameter), whole):
                expanded[parameter] = style
            if whole is None and style not in (None, EXPERTS, PARTIAL) and isinstance(module, nn.Linear | nn.Embedding):
                raise ConfigurationError(
                    f"{by}_plan assigns {style!r} to {parameter}, but not to its module {path}, whose forward would "
                    f"then fail: assign this style to {path}"
                )
        if whole in ("colwise", "packed_colwise") and module is head:
            raise ConfigurationError(
                f"{by}_plan assigns {whole!r} to {path}, which would give each rank only a part of the logits: use "
                "'colwise_gather_output'"
            )
        if whole is not None:
            expanded[path] = whole
        if type(module).__name__ == "Conv1D" and (path in expanded or f"{path}.weight" in expanded):
            raise ConfigurationError(
                f"{by}_plan shards {path}, a Conv1D, but the transposed weight of a Conv1D cannot be sharded: omit "
                f"this module from the {by}_plan, or use {by}_size=1 with {INSTEAD}"
            )
        needed = SIZES.get((whole or "").partition("_")[0])
        if needed and not hasattr(module, needed):
            raise ConfigurationError(
                f"{by}_plan assigns {whole!r}, a style for linear layers, to {path} ({type(module).__name__}), which "
                f"has no {needed}: assign another style, or omit this module from the {by}_plan"
            )
    if not expanded:
        raise ConfigurationError(
            f"{by}_size={size}: {name} does not have {'a' if by == 'tp' else 'an'} {by}_plan. Use {by}_size=1 with "
            f"{INSTEAD}, or pass a plan: PipelinePlugin({by}_plan={EXAMPLES[by]})"
        )
    if by == "tp":
        _check_config(base, size)
    _check_heads(model, size, expanded, by)
    _check_experts(model, size, expanded, by)
    return expanded


def _check_heads(model: nn.Module, size: int, plan: Mapping[str, str], by: str) -> None:
    """Raise ConfigurationError if the plan would split a key or value head across ranks. `_check_config` does not
    detect this in modules, such as vision towers, whose numbers of heads are not in the model's text config."""
    modules = dict(model.named_modules())
    for name, style in plan.items():
        if style != "colwise" or name not in modules or not (found := KEYS.match(name)):
            continue
        width, attention = getattr(modules[name], "out_features", None), modules[found[1]]
        head = getattr(attention, f"{found[2]}_head_dim", getattr(attention, "head_dim", None))
        if isinstance(width, int) and isinstance(head, int) and width % (head * size):
            raise ConfigurationError(
                f"{by}_size={size} would cut a head of {name}, which computes {counted(width // head, 'head')} of "
                f"{head} features: choose a size that divides the number of heads, or omit {found[1]} from the "
                f"{by}_plan"
            )


def _check_experts(model: nn.Module, size: int, plan: Mapping[str, str], by: str) -> None:
    """Raise ConfigurationError in each of these cases:

    - A number of experts is missing, is not an integer, or is not divisible by `size`.
    - The plan does not shard all weights of the experts.
    - The plan shards weights of a module that runs all experts.
    - Sharded experts have dropout, a kernel that needs all experts, or a non-parameter tensor with an entry for each
      expert.
    """
    dispatching = {path: module for path, module in model.named_modules() if plan.get(path) == DISPATCH}
    for path, module in dispatching.items():
        if not isinstance(count := getattr(module, "num_experts", None), int):
            raise ConfigurationError(
                f"{by}_plan assigns {DISPATCH!r} to {path}, whose num_experts is missing or not an integer: set this "
                f"attribute to the number of experts, or omit this module from the {by}_plan"
            )
        if count % size:
            raise ConfigurationError(
                f"{by}_size={size} does not divide num_experts={count} of {path}: choose a size that does"
            )
        kernel = getattr(getattr(module, "config", None), "_experts_implementation", None)
        if kernel in ("eager", "deepgemm_megamoe"):
            call = ", or call model.set_experts_implementation('grouped_mm')" if kernel == "eager" else ""
            raise ConfigurationError(
                f"{by}_size={size}: {path} runs its experts with experts_implementation={kernel!r}, which does not "
                "support a subset of the experts. Pass experts_implementation='grouped_mm' to "
                f"from_pretrained{call}"
            )
        others = {**dict(module.named_buffers()), **vars(module)}
        if key := next((key for key, x in others.items() if isinstance(x, Tensor) and count in x.shape[:1]), None):
            raise ConfigurationError(
                f"{by}_size={size}: the first dimension of {path}.{key} is num_experts={count}, but {key} is not a "
                "parameter, and only parameters are sharded. If this tensor has an entry for each expert, make it an "
                f"nn.Parameter with requires_grad=False, and assign {EXPERTS!r} to it in your {by}_plan; otherwise, "
                f"give it another shape, such as (1, {count})"
            )
        if any(isinstance(inner, Dropout) and inner.p for inner in module.modules()):
            raise ConfigurationError(
                f"{by}_size={size}: {path} has dropout, but each rank would generate masks only for its own experts, "
                "so the loss would differ from the loss in one process: set p=0.0, move the dropout out of this "
                f"module, or use {by}_size=1"
            )
    for name, _ in model.named_parameters(remove_duplicate=False):
        within = next((path for path in dispatching if name.startswith(f"{path}.")), None)
        style = plan.get(name)
        if style not in (EXPERTS, PARTIAL) if within else style == EXPERTS:
            raise ConfigurationError(
                f"{by}_plan assigns {f'the style {style!r}' if style else 'no style'} to {name}, "
                f"but the module that contains this parameter does not allow it. Assign {EXPERTS!r} to the weights of "
                f"experts, {PARTIAL!r} to other parameters of their module, and {DISPATCH!r} to the module itself"
            )


def style_of(name: str, by: str = "tp") -> Any:
    """The parallel layer for the style `name`, from transformers or this module. Raises ConfigurationError if the style
    is unknown or shards sequences."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    if name in (EXPERTS, DISPATCH):
        return Experts()
    if name.startswith(DIVIDE):
        return Divided(name.removeprefix(DIVIDE).split(","))
    if name == "sequence_parallel":
        raise ConfigurationError(
            f"{by}_plan contains the style {name!r}, which requires inputs that are sharded along the sequence "
            f"dimension, but each rank has whole sequences: omit the modules with this style from the {by}_plan"
        )
    if name not in ALL_PARALLEL_STYLES:
        known = [*ALL_PARALLEL_STYLES.keys(), f"{DIVIDE}ATTRIBUTES"]
        raise ConfigurationError(f"{by}_plan contains the unknown style {name!r}: {hint(name, known)}")
    return ALL_PARALLEL_STYLES[name]


def _of_adapters(path: str, layer: Any, style: str, by: str, size: int) -> dict[str, str]:
    """The styles inside a sharded layer with LoRA: a colwise layer shards lora_B, and a rowwise layer shards lora_A.

    Raises ConfigurationError for other adapters and other styles, for variants that need full matrices (such as DoRA),
    and for dropout before a rowwise layer.
    """
    matrix = {"colwise": "lora_B", "rowwise": "lora_A"}.get(style, "")
    adapters = getattr(layer, matrix, {})
    variants = getattr(layer, "lora_variant", {}) or any(getattr(layer, "use_dora", {}).values())
    drops = adapters and style == "rowwise" and any(getattr(one, "p", 0.0) for one in layer.lora_dropout.values())
    if not adapters or variants or drops:
        what = "lora_dropout, which would differ between slices" if drops else "adapters that cannot be sliced"
        remedy = "without variants on these layers and without dropout on rowwise layers, other target_modules,"
        if style == DISPATCH:  # for these models, peft's "all-linear" includes the experts
            remedy = 'on other layers, such as target_modules=["q_proj", "v_proj"] (--lora-targets q_proj,v_proj),'
        raise ConfigurationError(
            f"{by}_size={size}: {path} ({style} in the {by}_plan) has {what}. Use LoRA {remedy} or {by}_size=1"
        )
    return {f"{path}.base_layer": style} | {f"{path}.{matrix}.{name}": style for name in adapters}


def _rooted(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """A plan of the base model, with its names translated to the names in `model`."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    return {f"{prefix}.{rule}" if prefix and hasattr(model, prefix) else rule: style for rule, style in plan.items()}


def _check_config(model: nn.Module, size: int) -> None:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return
    text = config.get_text_config()
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    for layer, field in itertools.product(layers, HEADS):
        heads = getattr(layer, field, None)
        if isinstance(heads, int) and heads % size:
            raise ConfigurationError(
                f"tp_size={size} does not divide {field}={heads} of {type(model).__name__}: choose a size that does"
            )
    for layer, field in itertools.product(layers, DROPOUTS):  # ranks have different heads, but the same random numbers
        if isinstance(share := getattr(layer, field, None), float) and share > 0:
            raise ConfigurationError(
                f"tp_size={size}: {field}={share} of {type(model).__name__} would drop heads or features at the "
                f"same positions in every slice. Build the model from a config with {field}=0.0, or use tp_size=1"
            )


class Divided:
    """The style of a module whose forward reads sizes from attributes. These attributes are divided by `tp_size` during
    a forward."""

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
                raise ConfigurationError(
                    f"tp_plan cannot divide {name}={value!r} of {kind} by tp_size={size}: list only attributes "
                    "whose values are multiples of tp_size"
                )

        def forward(*args: Any, **kwargs: Any) -> Any:
            with replaced(module, **{name: getattr(module, name) // size for name in self.attributes}):
                return plain(*args, **kwargs)

        module.forward = forward


class Experts:
    """The style of a module of experts. Each rank holds some of the experts. All ranks route every token, and each rank
    computes the outputs of its own experts. The outputs are summed over the ranks, as are the gradients of the tokens
    and of the routing weights."""

    def validate_param(self, module: nn.Module, key: str, mesh: DeviceMesh, parameter_name: str) -> None:
        pass

    def shard_param(self, module: nn.Module, key: str, mesh: DeviceMesh) -> None:
        whole = module.get_parameter(key)
        sliced = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        module._parameters[key] = nn.Parameter(sliced, requires_grad=whole.requires_grad)

    def install_forward(self, module: Any, mesh: DeviceMesh) -> None:
        from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

        inside = {"num_experts": module.num_experts // mesh.size()}
        if hasattr(module, "_is_expert_parallel"):
            inside["_is_expert_parallel"] = True
        else:  # unlike transformers' kernels, this forward may omit experts that no token has chosen
            module.forward = _connected(module, module.forward)
        with replaced(module, **inside):
            EpDispatchExpertsParallel().install_forward(module, mesh, tp_mesh=mesh, ep_implementation="all_reduce")
        dispatching = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with replaced(module, **inside):
                return dispatching(*args, **kwargs)

        module.forward = forward


def _connected(module: Any, plain: Any) -> Any:
    """Wrap the forward `plain` of experts. In autograd, the output always depends on the tokens and their weights, so
    that every rank takes part in the sums of the backward pass. If no token chooses an expert of this rank, the output
    also depends on the module's own parameters, so that their gradients are zeros, as in one process."""

    def forward(tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output: Tensor = plain(tokens, index, weights)
        if torch.is_grad_enabled():
            inputs = [tokens, weights]
            if not (index < module.num_experts).any():
                inputs += module.parameters(recurse=False)
            output = output + sum(x[None][:0].sum() for x in inputs if x.requires_grad)
        return output

    return forward


class LatentProjection:
    """The style of the first projection in multi-head latent attention. Each rank computes the full projection.

    The projection's first features (the latent) are the input of a colwise layer, which sums the gradients of these
    features over the ranks. The last features (the rotary key) go directly to each rank's own heads, so this style sums
    their gradients. transformers' own style reads the number of rotary features from a config that only transformers'
    loading assigns to the module.
    """

    def __init__(self, model: nn.Module) -> None:
        base: Any = without_adapters(model)[1]
        config = base.config.get_text_config() if hasattr(base, "config") else None
        rotary = getattr(config, "qk_rope_head_dim", None)
        if not isinstance(rotary, int):
            raise ConfigurationError(
                f"tp_plan contains the style {LATENT!r}, which needs the number of rotary features, but the config of "
                f"{type(base).__name__} has no qk_rope_head_dim: omit the modules with this style from the tp_plan"
            )
        self.rotary: int = rotary

    def install_forward(self, module: Any, mesh: DeviceMesh) -> None:
        from transformers.distributed.parallel_utils import _AllReduceBackward

        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            features = plain(*args, **kwargs)
            latent, key = features.split([features.shape[-1] - self.rotary, self.rotary], dim=-1)
            return torch.cat([latent, _AllReduceBackward.apply(key, mesh.get_group())], dim=-1)

        module.forward = forward


# The style of a module between sharded modules: each rank has a partial sum of its gradients. transformers sums the
# gradients after every backward pass, so accumulated gradients count several times. Here, they are summed once a step.
PARTIAL = "replicated_with_grad_allreduce"


def slice_parameters(
    model: nn.Module,
    held: Collection[str],
    units: Mapping[str, nn.Module],
    of_glue: Collection[str],
    mesh: DeviceMesh,
    plan: Mapping[str, str],
) -> set[str]:
    """Shard the parameters whose names are in both `held` and `plan` across the ranks of `mesh`.

    The parameters become DTensors. Each rank takes its shard from its own copy of the values. The modules' forwards are
    replaced with forwards of parallel layers, which communicate activations. A parameter with several names is sharded
    once. If the plan shards these names in different ways, or if glue reads the parameter (`of_glue`), the parameter is
    not sharded. Returns the names of unsharded parameters whose gradients the ranks must sum.
    """
    first = first_names(model)
    modules = dict(model.named_modules())
    sliced = {name for name in plan if first.get(name) in held and _is_in_unit(name, units)}
    with kept_tied(model):
        for name, style in _sliced(model, units, of_glue, plan):
            layer = style_of(style)
            if name in sliced:
                _slice(layer, modules[name.rpartition(".")[0]], name, mesh)
            elif name in modules:
                _install(LatentProjection(model) if style == LATENT else layer, modules[name], mesh)
    return {first[name] for name in sliced if plan[name] == PARTIAL}


def sliced_sizes(
    model: nn.Module, units: Collection[str], of_glue: Collection[str], size: int, plan: Mapping[str, str]
) -> dict[nn.Parameter, int]:
    """For each parameter in the plan, the number of its elements on the first of `size` ranks, which has the largest
    shards. The arguments are as in `slice_parameters`. Requires no process group."""
    mesh = DeviceMesh("cpu", torch.arange(size), _init_backend=False, _rank=0)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    sizes: dict[nn.Parameter, int] = {}
    for name, style in _sliced(model, units, of_glue, plan):
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


def _sliced(
    model: nn.Module, units: Collection[str], of_glue: Collection[str], plan: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the name and the style of each parameter and module in `units` that the plan shards."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    together = [names for first, names in names_of(model).items() if first in of_glue or _disagree(names, plan)]
    whole = {name.rpartition(".")[0] for names in together for name in names}  # modules to leave unsharded
    for name, style in plan.items():
        path = name.rpartition(".")[0] if name in parameters else name
        if style != PARTIAL and path not in whole and _is_in_unit(path, units):
            yield name, style


def _slice(layer: Any, module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Shard the parameter of `module` whose full name is `name`, in the style `layer`."""
    key = name.rpartition(".")[2]
    layer.validate_param(module, key, mesh, parameter_name=name)
    layer.shard_param(module, key, mesh)


def _install(layer: Any, module: Any, mesh: DeviceMesh) -> None:
    """Replace the forward of `module` with the forward of a parallel layer. If `module` is a unit, its Interception
    wraps the new forward, since the Interception must handle the same calls and results as before."""
    interception = module.__dict__.get("forward")
    if isinstance(interception, Interception):
        module.forward = interception.original
    plain = module.forward
    layer.install_forward(module, mesh)
    if module.forward is not plain:
        module.forward = Sliced(plain, module.forward)
    if isinstance(interception, Interception):
        interception.original, module.forward = module.forward, interception


def _is_in_unit(name: str, units: Collection[str]) -> bool:
    return any(f"{name}.".startswith(f"{unit}.") for unit in units)


def _disagree(names: tuple[str, ...], plan: Mapping[str, str]) -> bool:
    """Whether the plan shards the names of a parameter along different dimensions, or shards only some of them."""
    return len({_dimension(plan.get(name)) for name in names}) > 1


def _dimension(style: str | None) -> str:
    kinds = ("colwise", "rowwise")
    if style is None or style.startswith("packed"):
        return str(style)
    if style.startswith("embedding"):  # its features are the inputs of a tied linear layer
        return "rows" if style == "embedding_rowwise" else "columns"
    return next(("rows" if kind == "colwise" else "columns" for kind in kinds if style.startswith(kind)), style)
