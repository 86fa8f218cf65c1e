"""Adapters: peft adapters on a model whose base weights are on meta until the stages load them.

    base weights    meta ---- stand-ins ---- meta ---------------- loaded, stage by stage
    adapters                  initialized by peft, on the CPU ---- DoRA, PiSSA, OLoRA: computed from a layer's weights

No process holds more than its own stage of the model. Adapters have the same initial values as in one process.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.errors import ConfigurationError
from pipeshard.hf import is_of_peft
from pipeshard.private import without_weakrefs
from pipeshard.replaced import replaced
from pipeshard.split.base_names import COPIES_WRAPPER, base_names
from pipeshard.split.blank import give, refuse_changed_blank
from pipeshard.split.packed import is_quantized, packed_layers
from pipeshard.split.ties import names_of

ADAPTER_KINDS = ("LORA", "IA3")  # kinds whose initial values depend only on shapes, or on the adapted layer's weights
OF_ONE_LAYER: dict[str, Callable[[Any, str], None]] = {  # the keys are values of `init_lora_weights`
    "pissa": lambda layer, adapter: layer.pissa_init(adapter, "pissa"),
    "olora": lambda layer, adapter: layer.olora_init(adapter),
}
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # values of `init_lora_weights`, or prefixes of values
READS_BASE = ("FROD", "OSF", "PSOFT")  # kinds with tensors that peft computes from the weights and does not save
# Kinds of adapters that use only the outputs of their layers (LORA and MISS: by default). All other kinds are refused
# on a quantized base.
OF_OUTPUTS = {"ADALORA", "BEFT", "BOFT", "C3A", "FOURIERFT", "GRALORA", "IA3", "LILY", "LN_TUNING", "LOHA", "LOKR"}
OF_OUTPUTS |= {"LORA", "MISS", "OFT", "POLY", "PVERA", "RANDLORA", "ROAD", "TRAINABLE_TOKENS", "UNILORA", "VBLORA"}
OF_OUTPUTS |= {"VERA", "WAVEFT"}
OF_SHAPES = (True, False, "gaussian", "orthogonal")
BEGINNING = "pipeshard_begins"  # the attribute that lists the adapters to initialize once the weights are loaded


def put_adapters(model: nn.Module, config: Any, put: Callable[[nn.Module, Any], Any]) -> Any:
    """Apply `put` (peft's `get_peft_model`) to a model on meta, and return its result. Base weights stay on meta.
    Adapters have the same initial values as on the loaded model. `begin` later sets the values that depend on weights.

    Raises ConfigurationError if initial values depend on more than the weights of the adapter's own layer, if the
    initialization changes a tied weight, or if the model is quantized and the adapters use its weights.
    """
    refuse_packed_base(model, config)
    refuse_far(model, config)
    from peft.tuners.lora import LoraLayer  # the import takes a second

    how, by_weights = getattr(config, "init_lora_weights", True), needs_weights(config)
    skipped = {f"{name}_init": lambda *_: None for name in OF_ONE_LAYER}  # `begin` calls these methods
    with adding(model, begins_later=by_weights), replaced(LoraLayer, **skipped):
        made = put(model, copy(config))
    if how not in OF_SHAPES:
        _refuse_tied_begin(made, how)
    for name, parameter in made.named_parameters() if config.is_prompt_learning else ():
        _refuse_computed(model, name, parameter)
    setattr(made, BEGINNING, frozenset(made.peft_config) if by_weights else frozenset())
    return made


def _refuse_tied_begin(model: nn.Module, how: Any) -> None:
    """Raise ConfigurationError if this initialization would change a tied weight: another stage may hold the weight
    under its other name."""
    firsts = {name: names[0] for names in names_of(model).values() if len(names) > 1 for name in names}
    for path, layer in model.named_modules():
        name = f"{path}.base_layer.weight"
        if name in firsts and getattr(layer, "lora_A", None):  # empty for an embedding, which peft initializes as usual
            raise ConfigurationError(
                f"init_lora_weights={how!r} changes {name}, which is tied to {firsts[name]}, but the model is on meta. "
                f"{_advice(model)}, or remove this layer from target_modules"
            )


@contextmanager
def adding(model: nn.Module, begins_later: bool = False) -> Iterator[None]:
    """Context manager that lets peft add adapters to a model on meta. On exit, parameters of new copies of modules
    (`modules_to_save`) are moved to meta if they contain only the values of stand-ins.

    Raises ConfigurationError if any other new parameter was computed from weights. With `begins_later`, new parameters
    of LoRA layers are accepted, since `begin` computes them again.
    """
    known = set(model.parameters())
    try:
        with stand_ins(model, math.nan):
            yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"peft decomposes weights when it adds these adapters, but the model is on meta. {_advice(model)}"
        ) from error
    new = {name: p for name, p in model.named_parameters() if p not in known and _is_nan(p)}
    copies, later = (
        {p for module in model.modules() if is_of_peft(module, kind) for p in module.parameters()}
        for kind in (COPIES_WRAPPER, "LoraLayer")
    )
    for name, parameter in new.items():
        if parameter in copies:
            give(parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
        elif not (begins_later and parameter in later):
            _refuse_computed(model, name, parameter)


def _refuse_computed(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Raise ConfigurationError if this parameter of an adapter was computed from stand-ins for weights."""
    if _is_nan(parameter):
        raise ConfigurationError(
            f"the initial values of the adapter parameter {name} depend on weights, but the model is on meta. "
            f"{_advice(model)}"
        )


@contextmanager
def adding_saved(model: nn.Module) -> Iterator[None]:
    """Context manager that lets peft load saved adapters into a model on meta. If peft has saved base weights (of an
    embedding or a head) with the adapters, these weights have the saved values on exit. The weights are then no longer
    on meta, as if the script had set them."""
    blank = {parameter for parameter in model.parameters() if parameter.is_meta}
    saved: dict[nn.Parameter, Tensor] = {}

    def take(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        """Move from `state` to `saved` the values that torch could not copy into stand-ins. Values of another shape
        stay in `state`, so that torch raises an error that names them."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for full in base_names(model):
            parameter, value = parameters.get(full), state.get(prefix + full)
            if parameter in blank and value is not None and value.shape == parameter.shape:
                saved[parameter] = state.pop(prefix + full)
        for full, buffer in [*model.named_buffers(remove_duplicate=False)]:  # such as the buffers of a trained copy
            if buffer.is_meta and prefix + full in state:  # torch then copies the value
                path, key = full.rpartition(".")[::2]
                model.get_submodule(path)._buffers[key] = torch.empty_like(buffer, device="cpu")

    handle = model.register_load_state_dict_pre_hook(take)
    try:
        with stand_ins(model):
            yield
    finally:
        handle.remove()
    with without_weakrefs(model):
        for parameter, value in saved.items():
            give(parameter, value.to(parameter.dtype))


def _is_nan(parameter: nn.Parameter) -> bool:
    """Whether the first element, which represents all elements of a stand-in, is NaN."""
    return not parameter.is_meta and parameter.numel() > 0 and bool(parameter[(0,) * parameter.ndim].float().isnan())


@contextmanager
def stand_ins(model: nn.Module, value: float = 0.0) -> Iterator[None]:
    """Context manager that temporarily replaces meta parameters with CPU tensors of `value`, each expanded from one
    element. Otherwise, peft would create the adapters on meta, like the weights, and would not initialize them.

    Raises ConfigurationError if base parameters were modified before, or if peft replaces them or changes their values.
    """
    refuse_changed_blank(model)
    before, elements = _of_base(model), dict[nn.Parameter, Tensor]()
    blank = {parameter: parameter.dtype for parameter in model.parameters() if parameter.is_meta}
    dtypes = blank | {layer.weight: layer.adapter_dtype for _, layer in packed_layers(model)}
    with without_weakrefs(model):
        for parameter in blank:
            dtype = dtypes[parameter]
            elements[parameter] = torch.full((), value if dtype.is_floating_point else 0, dtype=dtype)
            give(parameter, elements[parameter].expand(parameter.shape))
    try:
        yield
        after = _of_base(model)
        changed = [name for name in before | after if before.get(name) is not after.get(name)]
        changed += [name for name, p in after.items() if p in elements and _has_other_values(p, elements[p])]
        if changed:
            raise ConfigurationError(
                f"adding these adapters changes the base model (the first change is in {changed[0]}), but the model is "
                f"on meta. {_advice(model)}"
            )
    finally:
        with without_weakrefs(model):
            for parameter, dtype in blank.items():
                kept = dtype if parameter.dtype == dtypes[parameter] else parameter.dtype  # keeps a cast
                give(parameter, torch.empty(parameter.shape, dtype=kept, device="meta"))


def _of_base(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the base model, keyed by their names in the base model. Trained copies are omitted."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, nn.Parameter] = {}
    for full, name in base_names(model).items():  # copies follow their originals
        if full in parameters:
            found.setdefault(name, parameters[full])
    return found


def _has_other_values(parameter: nn.Parameter, stand_in: Tensor) -> bool:
    """Whether the data of a parameter was replaced, rather than moved to another device or cast."""
    is_moved = (parameter.device, parameter.dtype) != (stand_in.device, stand_in.dtype)
    return not is_moved and parameter.data_ptr() != stand_in.data_ptr()


def _advice(model: nn.Module) -> str:
    """The advice for adapters that a model on meta does not support. A quantized model gets different advice, since it
    cannot be boosted with values."""
    if is_quantized(model):
        return (
            "Use plain LoRA, IA3 or random prompts (prompt_tuning_init='RANDOM'), or load an unquantized model with "
            "its weights before booster.enable_lora"
        )
    return "Load the model with its weights before booster.enable_lora"


def refuse_far(model: nn.Module, config: Any) -> None:
    """Raise ConfigurationError for adapters other than LoRA, IA3 and prompt learning, and for adapters whose initial
    values depend on several layers, on data, or on rows of the embedding."""
    kind, how = _kind(config), getattr(config, "init_lora_weights", True)
    is_known = how in OF_SHAPES or (isinstance(how, str) and how.lower() in OF_ONE_LAYER)
    if kind not in ADAPTER_KINDS and not config.is_prompt_learning:
        raise ConfigurationError(
            f"the model is on meta, but peft needs the weights to initialize {kind} adapters. {_advice(model)}"
        )
    if not is_known:
        raise ConfigurationError(
            f"init_lora_weights={how!r} is not supported for a model on meta. {_advice(model)}, or use True, False, "
            "'gaussian' or 'orthogonal' (without quantization, also 'olora' or 'pissa')"
        )
    if getattr(config, "trainable_token_indices", None):
        raise ConfigurationError(
            f"trainable_token_indices needs the values of the embedding, but the model is on meta. {_advice(model)}"
        )


def _kind(config: Any) -> str:
    """The kind of the adapters, such as "LORA"."""
    return str(getattr(config.peft_type, "value", config.peft_type))


def refuse_packed_base(model: nn.Module, config: Any) -> None:
    """If the model is quantized, raise ConfigurationError for adapters that use the weights of their layer, and not
    only the layer's outputs."""
    kind = _kind(config)
    is_bat = kind == "MISS" and config.init_weights == "bat"
    reads_weights = kind not in OF_OUTPUTS or is_bat or needs_weights(config)
    if not reads_weights or config.is_prompt_learning or not is_quantized(model):
        return
    some = {"LORA": "DoRA, PiSSA and OLoRA", "MISS": "MISS adapters with init_weights='bat'"}
    why = "are computed from the weights" if kind in some else "may use the weights of their layers"
    raise ConfigurationError(
        f"{some.get(kind, f'{kind} adapters')} {why}, but the weights of this model are quantized. {_advice(model)}"
    )


def refuse_changed_base(model: nn.Module, config: Any) -> None:
    """Raise ConfigurationError for saved adapters whose initialization changes the weights of their layer, or computes
    unsaved tensors from these weights: peft repeats the initialization when it loads the adapters."""
    kind, how = _kind(config), str(getattr(config, "init_lora_weights", True)).lower()
    if kind in READS_BASE:
        raise ConfigurationError(
            f"when peft loads saved {kind} adapters, it computes some of their tensors from the model's weights, but "
            f"the model is on meta. {_advice(model)}"
        )
    if how.startswith(CHANGES_BASE):
        raise ConfigurationError(
            f"these adapters were initialized with init_lora_weights={how!r}, which changes the weights of the adapted "
            "layers. peft computes this change again when it loads the adapters, but the model is on meta. "
            f"{_advice(model)}"
        )


def needs_weights(config: Any) -> bool:
    """Whether the adapters' initial values are computed from the weights of their own layer."""
    how = getattr(config, "init_lora_weights", True)
    return bool(getattr(config, "use_dora", False)) or (isinstance(how, str) and how.lower() in OF_ONE_LAYER)


def trained_copies(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield the path of each copy of a module that adapters train in full (`modules_to_save`), the copy, and the
    original module."""
    wrappers: list[Any] = [(path, each) for path, each in model.named_modules() if is_of_peft(each, COPIES_WRAPPER)]
    for path, wrapper in wrappers:
        for adapter, made in wrapper.modules_to_save.items():
            yield f"{path}.modules_to_save.{adapter}", made, wrapper.original_module


def begin(model: nn.Module) -> None:
    """Copy the weights of the original modules to the trained copies (`modules_to_save`), then call
    `begin_with_weights`. Do nothing for a model that is not the result of `put_adapters`."""
    if getattr(model, BEGINNING, None) is None:
        return
    for _, made, original_module in trained_copies(model):
        for parameter, original in zip(made.parameters(), original_module.parameters(), strict=True):
            if not original.is_meta and type(original) is nn.Parameter:
                parameter.data.copy_(original.data)
    begin_with_weights(model, lambda name, value: model.get_parameter(name).data.copy_(value))


def begin_with_weights(model: nn.Module, set_value: Callable[[str, Tensor], Any]) -> None:
    """For each layer whose weights this process has, compute the initial values of adapters that depend on these
    weights. `set_value` receives the full name and the value of each parameter."""
    adapters = getattr(model, BEGINNING, None)
    if not adapters or not is_of_peft(model, "PeftModel"):
        return
    layers: list[tuple[str, Any]] = [pair for pair in model.named_modules() if is_of_peft(pair[1], "LoraLayer")]
    for path, layer in layers:
        if all(type(p) is nn.Parameter and not p.is_meta for p in layer.parameters()):
            for adapter in adapters & layer.scaling.keys():
                for name, value in _computed(layer, adapter, model.peft_config[adapter]).items():
                    set_value(f"{path}.{name}", value)


def _computed(layer: Any, adapter: str, config: Any) -> dict[str, Tensor]:
    """The new values, by name, of the parameters of `layer` that peft changes to initialize the adapter. `layer` itself
    is restored. peft initializes adapters in the dtype of the base weights, and casts them later."""
    before, vectors = dict(layer.named_parameters()), dict(layer.lora_magnitude_vector.items())
    values = {name: parameter.data for name, parameter in before.items()}
    how, dtype = config.init_lora_weights, next(layer.get_base_layer().parameters()).dtype
    own = [name for name in before if f".{adapter}." in f"{name}." and not name.startswith("base_layer.")]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            if isinstance(how, str) and how.lower() in OF_ONE_LAYER and adapter in layer.lora_A:
                OF_ONE_LAYER[how.lower()](layer, adapter)
            begun = {name for name, p in before.items() if p.data_ptr() != values[name].data_ptr()}
            for name in own:
                before[name].data = before[name].data.to(dtype)
            cast = {name: parameter.data for name, parameter in before.items()}
            if adapter in layer.lora_variant:
                layer.lora_variant[adapter].init(layer, adapter_name=adapter, config=config)
        made = {name: parameter.data for name, parameter in layer.named_parameters()}
    finally:
        layer.lora_magnitude_vector.update(vectors)
        for name, parameter in before.items():
            parameter.data = values[name]
    return {name: value for name, value in made.items() if name in begun or value.data_ptr() != cast[name].data_ptr()}
