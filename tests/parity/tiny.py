"""Tiny: the config of an architecture, made small by rules on the names of its fields.

Token ids: 0 is padding, 1 the start, 2 the end; other special tokens (image, audio, ...) have ids from 3 on, and text
has ids from 32 on.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig

OLD = transformers.__version__ < "5"
VOCABULARY, FIRST_TEXT = 128, 32

# Fields by name: the first pattern that matches the whole name gives the value, where the default is an integer.
RULES: list[tuple[str, int]] = [
    (r"(\w+_)?vocab_size\w*|vocab_size_per_layer_input|n_vocab|num_tokens", VOCABULARY),
    (r"(hidden|embedding|embed)_?(size|dim)|d_model|n_embd|dim|embed_dims?|encoder_hidden_dim|hidden_dim", 32),
    (r"(word_embed_proj|projection|proj|out_hidden|output_proj|feature|decoder_hidden|encoder_hidden)_(dim|size)", 32),
    (r"(projector|moe)_hidden_(size|dim)|(projector_(in|out)put|vision_output|output|mlp|share_expert)_dim", 32),
    (r"(output|post_conv_\w+)_channels", 32),
    (r"moe_intermediate_size|shared_expert_intermediate_size|moe_shared_expert_intermediate_size", 32),
    (r"\w*intermediate_size\w*|\w*ffn_(dim|hidden_size)|d_ff|n_inner|ffn_hidden_size|intermediate_dim|d_inner", 48),
    (r"\w*num_(key_value|kv)_heads|multi_query_group_num|num_kv_heads|n_kv_heads", 2),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads", 4),
    (r"\w*(num|n)_(attention_)?heads?(_per_layer)?|(encoder|decoder)_attention_heads|n_head", 4),
    (r"qk_rope_head_dim|rotary_dim|qk_pos_emb_head_dim", 4),
    (r"\w*head_dim|d_kv|d_head|\w*head_size", 8),
    (r"(q|kv|o|qk)_lora_rank", 16),
    (r"(encoder|decoder)_layers|num_(encoder|decoder|hidden|text)_layers|num_layers|n_layers?|depth|num_blocks", 4),
    (r"n_positions|\w*max_\w*position\w*|max_seq_len\w*|\w*seq_length|max_length|n_ctx", 64),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts|num_local_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|num_selected_experts|experts_top_k|top_k_experts", 2),
    (r"n_group", 2),
    (r"topk_group|num_groups|n_groups|num_expert_group", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"index_topk", 6),
    (r"hidden_size_per_layer_input", 8),
    (r"image_size", 32),
    (r"patch_size", 8),
    (r"\w*state_size|mamba_d_state", 8),
    (r"sliding_window(_size)?|attention_window(_size)?|local_attention|\w*chunk_size", 8),
]
VISION_DEPTH = ("num_hidden_layers", "num_layers", "encoder_layers", "depth")
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
# A head of Siglip that no model here reads, and kernels that need another device.
UNUSED = {"vision_use_head": False, "use_mamba_kernels": False}


def tiny(
    config_class: type[PretrainedConfig], fixes: Mapping[str, dict[str, Any]] = MappingProxyType({}), **overrides: Any
) -> PretrainedConfig:
    """A small configuration; `overrides` win over the rules, a dict among them over the rules of a sub-config.

    `fixes` are the overrides of sub-configs by model type; those of the dict win.
    """
    default = config_class(**_kinds(overrides) if OLD and config_class.has_no_defaults_at_init else {})
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(config_class.__init__).parameters.items():
        if name not in ("self", "kwargs", "args") and parameter.default is not inspect.Parameter.empty:
            fields.update(shrink(name, parameter.default))
    for name, value in vars(default).items():
        if value is None and isinstance(overrides.get(name), dict) and name in config_class.sub_configs:
            kind = overrides[name].pop("model_type", None)
            value = AutoConfig.for_model(kind) if kind else config_class.sub_configs[name]()
        if isinstance(value, PretrainedConfig):
            nested = overrides.pop(name, {})
            own = {**given(name, value), **copy.deepcopy(fixes.get(value.model_type, {}))}
            fields[name] = tiny(type(value), fixes, **{**own, **nested}) if isinstance(nested, dict) else nested
    fields.update(overrides)
    parameters = inspect.signature(config_class.__init__).parameters
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:  # latent attention has as many of both
        fields["num_key_value_heads"] = fields.get("num_attention_heads", 4)
    depth = next((n for n in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(fields.get(n), int)), None)
    if depth:
        every = range(getattr(default, depth))
        lists = {n: v for n, v in vars(default).items() if isinstance(v, list | tuple) and len(v) == len(every) > 0}
        lists = {n: v for n, v in lists.items() if n in parameters and list(v) != list(every)}  # one value a layer
        kept = some_layers(list(lists.values()), fields[depth])
        fields.update({n: [shrink(n, v[k]).get(n, v[k]) for k in kept] for n, v in lists.items()})
    fields.update(overrides)
    if default.is_encoder_decoder and getattr(default, "decoder_start_token_id", None) is None:
        fields.setdefault("decoder_start_token_id", 0)
    if OLD:  # some composite configurations take their sub-configs as dicts only
        fields = {n: v.to_diff_dict() if isinstance(v, PretrainedConfig) else v for n, v in fields.items()}
    return config_class(**fields)


def _kinds(overrides: dict[str, Any]) -> dict[str, Any]:
    """What a configuration without defaults is first made from: the types of its sub-configs, taken off `overrides`."""
    named = {name: value for name, value in overrides.items() if isinstance(value, dict) and "model_type" in value}
    return {name: {"model_type": value.pop("model_type")} for name, value in named.items()}


def given(name: str, config: PretrainedConfig) -> dict[str, Any]:
    """What a composite config sets in its sub-config `name` beyond its class's defaults, small; three vision layers."""
    plain = type(config)()
    fields: dict[str, Any] = {}
    for field in inspect.signature(type(config).__init__).parameters:
        value = vars(config).get(field)
        if field != "dtype" and isinstance(value, int | float | str | None) and value != vars(plain).get(field):
            fields.update(shrink(field, value) or {field: value})
        if "vision" in name and field in VISION_DEPTH and isinstance(value, int):
            fields[field] = min(3, value)
    return fields


def some_layers(lists: list[Any], count: int) -> list[int]:
    """The first layer of each value of the lists (such as kinds of attention), and those that follow."""
    if not lists:
        return []
    firsts = sorted({next(k for k, v in enumerate(values) if v == value) for values in lists for value in values})
    kept = firsts[:count]
    others = [k for k in range(len(lists[0])) if k not in kept]
    return sorted(kept + sorted(others, key=lambda k: k < kept[-1])[: count - len(kept)])


def shrink(name: str, default: Any) -> dict[str, Any]:
    """{name: its small value}, or {} where the default stays."""
    if name in SPECIAL | UNUSED:
        return {name: (SPECIAL | UNUSED)[name]}
    if isinstance(default, bool) or default is None:
        return {}
    if isinstance(default, int):
        if re.fullmatch(r"\w*token_(id|index)", name):
            return {name: special_id(name)} if default >= 0 else {}
        for pattern, value in RULES:
            if re.fullmatch(pattern, name):
                return {name: min(value, default)}
    if isinstance(default, float) and re.search(r"drop|jitter", name):
        return {name: 0.0}
    if isinstance(default, float) and re.fullmatch(r"init(ializer)?_(range|std)", name) and default < 0.1:
        return {name: 0.1}  # for this width; with the usual 0.02 hardly anything would depend on the encoders
    if isinstance(default, float) and re.fullmatch(r"layer_?scale\w*", name):
        return {name: 0.5}  # the default of many is so near 0 that their layers would do nothing
    if isinstance(default, list | tuple) and "drop" in name and all(isinstance(rate, float) for rate in default):
        return {name: [0.0] * len(default)}
    if isinstance(default, int) and re.search(r"drop", name):
        return {name: 0}
    return {}


_SPECIAL_IDS: dict[str, int] = {}


def special_id(name: str) -> int:
    """One id below the text for each name of a special token."""
    order = ("image", "video", "audio", "vision_start", "vision_end", "start", "end", "mask", "unk", "newline")
    for k, word in enumerate(order):
        if word in name:
            return 3 + k
    return 3 + len(order) + sum(map(ord, name)) % (FIRST_TEXT - 3 - len(order))
