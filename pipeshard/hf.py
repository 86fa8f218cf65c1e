"""HF: the naming conventions of transformers and peft that pipeshard relies on.

A trace finds most facts that a pipeline needs about a model, but not the meaning of values: which leaf contains labels,
which token represents an image, and which leaves have the decoder's positions. transformers expresses these meanings
only in names. All of these names are in this module and nowhere else, and no name is specific to one architecture.
`tests/test_hf.py` tests each name against transformers and peft: if a release renames something, these tests fail.
"""

import inspect
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

# Leaves of a batch.
IDS, MASK, LABELS, PIXELS, POSITIONS = "input_ids", "attention_mask", "labels", "pixel_values", "position_ids"
PER_TOKEN = POSITIONS, "token_type_ids"  # integers per token that are not labels
IGNORED = -100  # the label that losses ignore

# Leaves with the boundaries of the documents in a packed row: kernels read them instead of `position_ids`.
BOUNDARIES = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"

# Words in the names of each media kind's inputs; the first kind that matches applies.
MEDIA = {
    "video": ("video", "per_grid"),
    "audio": ("audio", "input_features", "feature_", "speech"),
    "image": ("image", "pixel", "target_sizes", "spatial"),
}
TOKEN_KINDS = "mm_token_type_ids"  # the kind of each token: 0 for text, or a number in MEDIA_KINDS
MEDIA_KINDS = {"image": 1, "video": 2, "audio": 3}
SIZES = "_thw", "_sizes", "_shapes", "_hws"  # suffixes of leaves that have one row of sizes per image

# Registries of functions, by module of transformers, and the config fields that select a function of a registry.
REGISTRIES = {
    "transformers.modeling_utils": "ALL_ATTENTION_FUNCTIONS",
    "transformers.masking_utils": "ALL_MASK_ATTENTION_FUNCTIONS",
    "transformers.integrations.moe": "ALL_EXPERTS_FUNCTIONS",
}
IMPLEMENTATIONS = "_attn_implementation", "_experts_implementation"
SELECTING = IMPLEMENTATIONS[0]  # config classes have this attribute if their configs have these fields
LOSSES = "transformers.loss.loss_utils", "LOSS_MAPPING"  # module and name of the registry of losses
LOSS_TYPE, DEFAULT_LOSS = "loss_type", "ForCausalLM"  # a model's attribute that selects a loss, and the default loss

KNOWN_PACKAGES = ("torch", "transformers", "peft", "colossalai")  # packages with modules that docs/parity.md covers

# Config fields: head counts that tp_size must divide, and dropouts on sharded activations.
HEADS = "num_attention_heads", "num_key_value_heads", "decoder_attention_heads"
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "activation_dropout", "dropout_rate")

# Integer config fields that define a model's size: a smaller copy of a model has different values for them.
LAYER_COUNTS = re.compile(r"(num_(hidden_|encoder_|decoder_)?layers|n_layers?|(encoder|decoder)_layers|^depth)$")
HEAD_COUNTS = re.compile(r"(attention_heads|key_value_heads|kv_heads|n_heads?|num_heads|n_groups)$")
WIDTHS = re.compile(r"(hidden_size|d_model|n_embd|embed_dim|^dim|hidden_dim|model_dim|embedding_size)$")
INNER_WIDTHS = re.compile(r"(intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|intermediate_dim)$")
NO_WIDTHS = re.compile(r"position|token|image|patch|window|context|length|vocab|head_dim|chunk|max_|_ids?$|theta")
EXPERT_COUNTS = re.compile(r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$")
EXPERTS_OF_TOKEN = re.compile(r"(experts_per_tok|experts_per_token|top_?k|num_selected_experts)$")
EXPERT_GROUPS = re.compile(r"n_group$")
VOCABULARIES = re.compile(r"vocab_size")

# Names that `generate` passes to a forward, or reads from its output.
LAYER_CACHES = "past_key_values", "cache_params", "cache"  # the last name exists since transformers 5.24
CACHES = *LAYER_CACHES, "state", "mems", "past_buckets_states"
USES_CACHE, LOGITS, DECODER_MASK = "use_cache", "logits", "decoder_attention_mask"
TIME = "max_time"
LAYER_CLASS = "layer_class_to_replicate"  # in a cache without a config: the class of the entries that it creates
QUANTIZED = "_quantized_keys"  # attribute of a cache's entry for one layer, if the entry quantizes its states
CONTINUOUS = "init_continuous_batching"  # the method that every use of continuous batching calls first
COMPILED_CALL = "get_compiled_call"  # the method with which `generate` gets a model's compiled `__call__`

# RoPE types whose frequencies depend on the greatest position in the batch if it exceeds a limit, and the config fields
# that contain this limit.
ROPES_OF_LENGTH = "dynamic", "longrope"
ROPE_LIMITS = "original_max_position_embeddings", "max_position_embeddings"
NOISE = "neftune_noise_alpha"

# Patterns of buffers that older checkpoints contain. If a model has a buffer that matches a pattern, transformers
# ignores checkpoint keys that match this pattern.
OLD_BUFFERS = r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"

ADAPTER_CONFIG = "adapter_config.json"  # in a folder that peft saved


def is_target(path: str) -> bool:
    """Whether a leaf of the batch is a target, such as labels, that the loss compares with the model's output."""
    return "label" in path or "target" in path


def targets(paths: Iterable[str]) -> list[str]:
    """The `paths` of leaves that are targets."""
    return [path for path in paths if is_target(path)]


def is_spacing(path: str) -> bool:
    """Whether a leaf contains the time between the frames of each video, in seconds. A model computes positions from
    this time."""
    return "second_per_grid" in path


def is_ids(path: str) -> bool:
    """Whether a leaf of the batch contains token ids."""
    return path.endswith(IDS)


def is_token(name: str) -> bool:
    """Whether a config field contains one or several token ids."""
    return name.endswith(("token_id", "token_ids", "token_index"))


def is_mask(path: str) -> bool:
    """Whether a leaf of the batch is a mask. All dimensions of a mask may be positions."""
    return "mask" in path


def is_of_decoder(path: str, encoder_decoder: bool) -> bool:
    """Whether a leaf has one entry per position of the decoder. With `encoder_decoder`, this includes labels."""
    return path.startswith("decoder_") or (encoder_decoder and path.endswith(LABELS))


def is_of_encoder(path: str) -> bool:
    """Whether a leaf is the output of an encoder, or a mask for this output."""
    return path.startswith("encoder_")


def counts_items(path: str) -> bool:
    """Whether a leaf with one integer per sample may count each sample's entries in another leaf."""
    return path.startswith("num_")


def media_kind(path: str) -> str | None:
    """The kind of media in a leaf of the batch, or None for other leaves."""
    return next((kind for kind, words in MEDIA.items() if any(word in path.lower() for word in words)), None)


def config_of(model: nn.Module) -> Any:
    """The model's config, or None if the model has no config."""
    return getattr(model, "config", None)


def text_config(model: nn.Module) -> Any:
    """The text part of the model's config. For a plain language model, this is the whole config."""
    config = config_of(model)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def main_input(model: nn.Module) -> str | None:
    """The name of the model's main input, or None if the model does not declare one. If the model declares several main
    inputs, returns the first."""
    name = getattr(model, "main_input_name", None)
    return name[0] if isinstance(name, list | tuple) else name


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether the model has an encoder for the inputs, and a decoder for the labels."""
    return bool(getattr(config_of(model), "is_encoder_decoder", False))


def placeholder_token(model: nn.Module, kind: str) -> int | None:
    """The id of the token that represents each patch, frame or item of this kind of media, or None if the config does
    not define one."""
    config = config_of(model)
    names = "text_config", "thinker_config", "vision_config", "audio_config"
    parts = config, *(getattr(config, name, None) for name in names)
    tokens = (getattr(part, f"{kind}_token_{end}", None) for part in parts for end in ("id", "index"))
    return next((token for token in tokens if isinstance(token, int)), None)


def padding_token(model: nn.Module) -> int | None:
    """The id of the token that pads shorter samples, or None if the config does not define one."""
    token = getattr(config_of(model), "pad_token_id", None)
    return token if isinstance(token, int) else None


def special_tokens(model: nn.Module) -> list[int]:
    """Token ids that a loss may weight differently or omit: padding, beginning, end, ..."""
    fields = getattr(config_of(model), "__dict__", {})
    return [value for name, value in fields.items() if name.endswith("token_id") and type(value) is int]


def image_shape(model: nn.Module) -> tuple[int, int, int] | None:
    """(channels, height, width) of the model's images, or None if their size is not fixed."""
    config = config_of(model)
    size = getattr(config, "image_size", None)
    if size is None:
        return None
    height, width = size if isinstance(size, Sequence) else (size, size)
    return getattr(config, "num_channels", 3), height, width


def has_label_per_sample(model: nn.Module) -> bool:
    """Whether a model of token ids expects one label per sequence, instead of one label per token."""
    return type(without_adapters(model)[1]).__name__.endswith("SequenceClassification")


def has_flash_attention(model: nn.Module) -> bool:
    """Whether any module's attention is a flash kernel, which may derive document boundaries from position ids."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any("flash" in str(getattr(config, "_attn_implementation", None)) for config in configs)


def use_eager_kernels(model: nn.Module) -> None:
    """Replace kernels that do not support fp64: flash attention, and the grouped matrix product of experts."""
    if (experts := getattr(model, "set_experts_implementation", None)) is not None:
        experts("eager")
    for module in model.modules():
        attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if "flash" in str(attention) and (change := getattr(module, "set_attn_implementation", None)) is not None:
            change("eager")


def disable_caches(model: nn.Module) -> list[Any]:
    """Turn off the key-value caches in every config and sub-config that enables them, and return these configs.

    Caches are for generation. If units filled a cache, units on later stages would read cached values, which are not
    sent.
    """
    cached = [part for part in _configs(model) if getattr(part, "use_cache", None) is True]
    for part in cached:
        part.use_cache = False
    return cached


def enable_caches(configs: Iterable[Any]) -> None:
    """Turn the key-value caches of these configs on again."""
    for config in configs:
        config.use_cache = True


def _configs(model: nn.Module) -> list[Any]:
    """The configs of a model and its submodules, and the values of their fields (such as sub-configs)."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return [part for config in configs.values() for part in (config, *getattr(config, "__dict__", {}).values())]


_withheld: dict[int, weakref.ref[Any]] = {}  # configs whose caches boost has turned off, by id: they may be unhashable


def _forget(key: int, _: object) -> None:
    _withheld.pop(key, None)


def withhold_caches(model: nn.Module) -> list[Any]:
    """Like `disable_caches`, but also return the model's configs whose caches an earlier call turned off. These configs
    contain pipeshard's setting instead of the user's if the model (or a wrapper of it) is boosted again, or if an
    earlier boost failed."""
    for part in disable_caches(model):
        _withheld[id(part)] = weakref.ref(part, partial(_forget, id(part)))
    return [part for part in _configs(model) if id(part) in _withheld and part.use_cache is False]


def is_cache(value: Any) -> bool:
    """Whether `value` is a transformers cache, which contains the keys and values (or other states) of each layer."""
    return any(base.__name__ == "Cache" for base in type(value).__mro__)


def is_quantized_cache(cache: Any) -> bool:
    """Whether a transformers cache, or a cache inside it, quantizes the states of its layers."""
    inside = filter(is_cache, vars(cache).values())
    return any(hasattr(layer, QUANTIZED) for layer in getattr(cache, "layers", ())) or any(
        map(is_quantized_cache, inside)
    )


def complete_cache(cache: Any, config: Any) -> None:
    """If a cache is empty and was created without a config, append an entry for each layer that `config` defines. Such
    a cache otherwise creates its entries only when the layers run."""
    from transformers import DynamicCache

    for inside in vars(cache).values():
        if is_cache(inside):
            complete_cache(inside, config)
    kind = getattr(cache, LAYER_CLASS, None)
    if kind is not None and config is not None and not cache.layers:
        with suppress(AttributeError):  # the config defines no layers
            cache.layers.extend(kind() for _ in DynamicCache(config=config).layers)


def stops_by_clock(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of `generate` has a time limit, set by an argument, a generation config, or a stopping criterion
    of transformers."""
    criteria = kwargs.get("stopping_criteria") or ()
    given = (getattr(model, "generation_config", None), *args, kwargs.get("generation_config"), *criteria)
    return any(limit is not None for limit in (kwargs.get(TIME), *(getattr(one, TIME, None) for one in given)))


def is_output_class(kind: Any) -> bool:
    """Whether `kind` is one of transformers' classes for model outputs."""
    return isinstance(kind, type) and any(base.__name__ == "ModelOutput" for base in kind.__mro__)


def has_parameter(model: nn.Module, name: str) -> bool:
    """Whether the forward of the model, without adapters, has an argument of this name."""
    forward: Any = without_adapters(model)[1].forward
    return name in _parameters(getattr(forward, "__func__", forward))


@lru_cache
def _parameters(function: Any) -> frozenset[str]:
    """The names of a function's arguments. The result is cached, since each slice of each step needs the names."""
    return frozenset(inspect.signature(function).parameters)


def is_new(name: str, value: Any, is_decoder: bool) -> bool:
    """Whether a forward's argument contains the tokens or embeddings of positions that the forward adds to its
    cache."""
    names = (IDS, "inputs_embeds")
    return isinstance(value, Tensor) and name in ([f"decoder_{end}" for end in names] if is_decoder else names)


def recomputes(module: nn.Module) -> bool:
    """Whether transformers' activation checkpointing recomputes this module."""
    is_layer = any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)
    return is_layer and bool(getattr(module, "gradient_checkpointing", False))


def rope_limit(module: nn.Module) -> int | None:
    """The number of positions up to which the module's RoPE frequencies are constant, or None if they never depend on
    the number of positions."""
    kinds = vars(module).get("rope_type")
    kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
    if not any(kind in ROPES_OF_LENGTH for kind in kinds):
        return None
    config = config_of(module)
    values = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    sources = [values, *(part for part in (rope, *rope.values()) if isinstance(part, dict))]
    limits = [source.get(name) for source in sources for name in ROPE_LIMITS]
    return min((limit for limit in limits if type(limit) is int), default=0)


def adds_noise(module: nn.Module) -> bool:
    """Whether NEFTune adds noise to the results of this embedding, with a scale that depends on the sequence length."""
    return module.training and NOISE in vars(module) and bool(module._forward_hooks)


def can_recompute(model: nn.Module) -> bool:
    """Whether `model.gradient_checkpointing_enable()` works."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def is_of_peft(module: object, kind: str) -> TypeGuard[Any]:
    """Whether `module` is an instance of the peft class `kind`. Does not import peft, since this import takes a
    second."""
    return any(base.__name__ == kind and base.__module__.startswith("peft.") for base in type(module).__mro__)


def has_adapters(model: nn.Module) -> bool:
    """Whether any module of this model has a peft class: a PeftModel, a layer with an adapter, or a wrapper."""
    return any(type(module).__module__.startswith("peft.") for module in model.modules())


def without_adapters(model: nn.Module) -> tuple[str, nn.Module]:
    """The prefix that names of the base model have in `model`, and the base model itself. For a PeftModel, the base
    model is the wrapped model."""
    base: Any = getattr(model, "get_base_model", lambda: model)()
    path = next(name for name, module in model.named_modules() if module is base)
    return f"{path}." if path else "", base


def cache_argument(model: nn.Module) -> str | None:
    """The name of the forward argument for a cache with one entry per layer, or None if the forward has no such
    argument."""
    return next((name for name in LAYER_CACHES if has_parameter(model, name)), None)


def full_name(model: nn.Module, name: str) -> str:
    """The full name of the module `name`. For a PeftModel, `name` may be relative to the base model."""
    prefix, _ = without_adapters(model)
    return name if name.startswith(prefix) else f"{prefix}{name}"


def is_of_transformers(model: nn.Module) -> bool:
    """Whether transformers defines the class of the model (without adapters)."""
    return type(without_adapters(model)[1]).__module__.startswith("transformers.")


def is_of_custom_code(model: nn.Module) -> bool:
    """Whether the model's class was loaded from code in a folder or a repository, or was registered with
    `register_for_auto_class`, so that its code is saved with the model."""
    return getattr(model, "_auto_class", None) is not None


def is_of_packages(function: Any, packages: Sequence[str] = KNOWN_PACKAGES) -> bool:
    """Whether a function, and each function that it wraps, was defined in one of `packages`, in pipeshard or in
    Python's standard library. Ignores `__module__`, since functools.wraps copies this attribute."""
    while function is not None:
        package = getattr(function, "__globals__", {}).get("__name__", "").split(".")[0]
        if package not in (*packages, "pipeshard") and package not in sys.stdlib_module_names:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def has_known_loss(model: nn.Module) -> bool:
    """Whether the model computes one of transformers' own losses. False if the user has replaced the model's forward,
    or has set another function as `model.loss_function` or in transformers' registry of losses."""
    modules, registry = [*model.modules()], getattr(sys.modules.get(LOSSES[0]), LOSSES[1], {})
    kinds = [getattr(module, LOSS_TYPE, None) for module in modules]
    losses = [registry[kind] for kind in kinds if kind in registry] or [registry.get(DEFAULT_LOSS)]
    losses += [vars(module).get("_loss_function") for module in modules]
    forwards = model.forward, without_adapters(model)[1].forward
    are_own = all(map(is_of_packages, forwards)) and all(is_of_packages(loss, ("transformers",)) for loss in losses)
    return is_of_transformers(model) and are_own


def registered_functions(config: Any) -> dict[str, Any]:
    """The functions for attention, masks and experts that a config selects from transformers' registries, by registry
    and name."""
    selected = {name for field in IMPLEMENTATIONS if isinstance(name := getattr(config, field, None), str)}
    found: dict[str, Any] = {}
    for path, registry in REGISTRIES.items() if selected else ():
        of_path = getattr(sys.modules.get(path), registry, {})
        found |= {f"{registry} {name}": of_path[name] for name in selected if name in of_path}
    return found


_is_lone: ContextVar[bool] = ContextVar("is_lone", default=False)


class _World:
    """Replaces accelerate's PartialState in losses of transformers (DETR, Mask2Former) that sum the number of boxes or
    masks over all processes: in `lone_losses`, accelerate appears uninitialized to these losses."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    @property
    def _shared_state(self) -> Any:
        return {} if _is_lone.get() else self.kind._shared_state

    def __call__(self) -> Any:
        return self.kind()


def hide_world() -> None:
    """Make `lone_losses` apply to the losses of the transformers modules that have been imported."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("transformers.") and {"PartialState", "reduce"} <= vars(module).keys():
            kind = vars(module)["PartialState"]
            setattr(module, "PartialState", kind if isinstance(kind, _World) else _World(kind))  # noqa: B010


@contextmanager
def lone_losses(pp_size: int) -> Iterator[None]:
    """Context manager in which losses of transformers normalize by the batch of this process. Has no effect with one
    stage. With several stages, only the ranks of the last stage compute the loss, so the other ranks cannot take part
    in a sum over all processes."""
    token = _is_lone.set(pp_size > 1)
    try:
        yield
    finally:
        _is_lone.reset(token)


def kept_in_fp32(model: nn.Module, dtype: torch.dtype | None) -> set[Tensor]:
    """The tensors that the transformers models in `model` keep in fp32 if the model has the dtype `dtype`, such as the
    biases of a router. Empty unless `dtype` is fp16 or bf16."""
    tensors: set[Tensor] = set()
    for module in model.modules() if dtype in (torch.float16, torch.bfloat16) else ():
        names = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
        if dtype is torch.float16:
            names |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
        if names:
            pattern = re.compile("|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in sorted(names)))
            named = *module.named_parameters(), *module.named_buffers()
            tensors |= {tensor for name, tensor in named if pattern.search(name)}
    return tensors
