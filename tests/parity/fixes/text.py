"""Text models: what their tiny models need in addition to the general rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.images import equal, insert, pixels
from tests.parity.inputs import text, uneven

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SLIDING = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
_UPPER_SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 2,
    "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
}
_CONV = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
_SHARED_BLOCKS = ["mamba", "hybrid", "mamba", "hybrid", "mamba"]  # the attention is one of all hybrid layers
_SHARED_KV = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
_PERCEIVER = {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 3, "num_self_attention_heads": 4}
_REFORMER = {
    "attn_layers": ["local", "lsh", "local", "lsh"],
    "axial_pos_shape": [3, 4],  # of the length of the batch, as training asks
    "axial_pos_embds_dim": [8, 24],
    "feed_forward_size": 48,
    "hash_seed": 0,
    "num_buckets": 4,
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 4,
}
_NO_LABELS = "its forward has no labels"

CONFIGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "big_bird": {"block_size": 4, "num_random_blocks": 1},
    "bloom": {"n_layer": 4},
    "blt": {
        "encoder_hash_byte_group_size": [3, 4],
        "encoder_hash_byte_group_vocab": 64,
        "patching_threshold": 4.4,  # some of the entropies that the random patcher gives are higher
        "patcher_config": {"initializer_range": 0.2},
        "encoder_config": {"hidden_size_global": 32, "num_hidden_layers": 2},
        "decoder_config": {"hidden_size_global": 32, "num_hidden_layers": 2},
        "global_config": {"num_hidden_layers": 3},
    },
    "canine": {"num_hash_buckets": 64},
    "cohere2_moe": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "cohere_compass_text": {
        **_SLIDING,
        "rope_parameters": {"sliding_attention": {**_ROPE, "mrope_section": [2, 1, 1]}, "full_attention": None},
    },
    "cpmant": {"dim_head": 8, "dim_ff": 48, "prompt_length": 4, "prompt_types": 8, "segment_types": 8},
    "ctrl": {"dff": 48},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": {"moe_top_k": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v4": {
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "partial_rotary_factor": 0.5,
        "index_topk": 2,
    },
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        **_SLIDING,
    },
    "dots3_note_text": {
        "sliding_window": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "esm": {"vocab_size": 128, "mask_token_id": 10, "pad_token_id": 0, "position_embedding_type": "rotary"},
    "esmc": {"vocab_size": 128},
    "flaubert": {"emb_dim": 32},
    "gemma3n_text": {**_SHARED_KV, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0], "laurel_rank": 8},
    "gemma4_text": _SHARED_KV,
    "gemma4_unified_text": _SHARED_KV,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "hunyuan_v1_dense": {"head_dim": 8, "num_key_value_heads": 2},
    "hunyuan_v1_moe": {"head_dim": 8, "num_key_value_heads": 2, "num_experts": 4, "moe_topk": 2},
    "inkling_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "rel_extent": 8},
    "inkling2_text": {"rel_extent": 8, "n_layers_per_attn_res_block": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0},
    "laguna": _SLIDING,
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "input_size": 32},
    "lilt": {"hidden_size": 48},
    "lfm2": {**_CONV, "block_multiple_of": 16},
    "lfm2_moe": _CONV,
    "llama4_text": {"interleave_moe_layer_step": 2},
    "longcat_flash": {"head_dim": 4, "zero_expert_num": 2, "num_layers": 3},
    "mamba2": {"head_dim": 16, "num_heads": 4},
    "markuplm": {
        "max_xpath_tag_unit_embeddings": 32,
        "max_xpath_subs_unit_embeddings": 32,
        "max_depth": 4,
        "tag_pad_id": 0,
        "subs_pad_id": 0,
    },
    "mellum": {**_SLIDING, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": {"head_dim": 8, **_SLIDING},
    "mllama_text_model": {"cross_attention_layers": [1, 3]},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16},
    "modernvbert": {"pixel_shuffle_factor": 2},
    "nemotron": {"num_key_value_heads": 2},
    "nystromformer": {"num_landmarks": 4, "segment_means_seq_len": 12},  # of the length of the batch
    "neomme": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": {**_ROPE, "partial_rotary_factor": 0.5}},
    },
    "masked-lm/perceiver": {**_PERCEIVER, "max_position_embeddings": 12},
    "sequence-classification/perceiver": _PERCEIVER,
    "phi4_multimodal": {
        "vision_config": {"crop_size": 32},
        "audio_config": {
            "input_size": 16,
            "nemo_conv_channels": 16,
            "nemo_final_size": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
        },
    },
    "qwen2": _UPPER_SLIDING,
    "qwen2_moe": {**_UPPER_SLIDING, "mlp_only_layers": [1]},
    "qwen3": _UPPER_SLIDING,
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen3_next": {"mlp_only_layers": [1]},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "linear_attention", "indexed_attention", "linear_attention"],
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [2],
        "heads_per_ngram": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": _REFORMER,
    "causal-lm/reformer": {**_REFORMER, "is_decoder": True},
    "smollm3": _UPPER_SLIDING,
    "sequence-classification/t5": {"decoder_start_token_id": 0},
    "sequence-classification/mt5": {"decoder_start_token_id": 0},
    "sequence-classification/umt5": {"decoder_start_token_id": 0},
    "ultravbert": {"pixel_shuffle_factor": 2},
    "xlm": {"emb_dim": 32},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX", "de_DE"]},
    "zamba": {"num_hidden_layers": 5, "layers_block_type": _SHARED_BLOCKS},
    "zamba2": {"num_hidden_layers": 5, "layers_block_type": _SHARED_BLOCKS},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 8},
}


def _memory(name: str) -> Callable[..., Any]:
    """With what an encoder or a vision model would give, for the cross attention."""

    def fix(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        config: Any = model.config
        return {**batch, name: torch.randn(4, 6, config.hidden_size, generator=generator)}

    return fix


def _long(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Long enough for sparse attention."""
    ids = text(4, 40, generator)
    ids[:, -1] = batch["input_ids"][:, -1]
    labels = uneven(ids) if batch["labels"].ndim > 1 else batch["labels"]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _segments(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Two segments, of which the first is shorter in later rows."""
    rows, length = batch["input_ids"].shape
    return {**batch, "token_type_ids": (torch.arange(length) >= length - 2 - torch.arange(rows)[:, None]).long()}


def _languages(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    return {**batch, "lang_ids": torch.tensor([0, 1, 1, 0])}


def _shapes(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """With the shape and the pronunciation of each character."""
    rows, length = batch["input_ids"].shape
    names = ("input_shape_ids", "input_pronunciation_ids")
    return {**batch, **{name: text(rows, length, generator) for name in names}}


def _boxes(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """With the place of each token on the page: left, top, right, bottom."""
    left_top = torch.randint(0, 30, (*batch["input_ids"].shape, 2), generator=generator)
    size = torch.randint(1, 30, left_top.shape, generator=generator)
    return {**batch, "bbox": torch.cat([left_top, left_top + size], -1)}


def _page(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """With the place of each token on the page, and the picture of the page."""
    config: Any = model.config
    side = config.input_size
    return {**_boxes(model, batch, generator), "pixel_values": pixels(model, generator, 4, 3, side, side)}


def _paths(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """With the tags and the subscripts of each token's path in the page's tree."""
    config: Any = model.config
    shape = (*batch["input_ids"].shape, config.max_depth)
    names = ("xpath_tags_seq", "xpath_subs_seq")
    return {**batch, **{name: torch.randint(1, 32, shape, generator=generator) for name in names}}


def _global(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """The first token attends to all, and all to it."""
    return {**batch, "global_attention_mask": (torch.arange(batch["input_ids"].shape[1]) == 0).long().expand(4, -1)}


def _entities(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """With two entities a row, and the tokens that each spans."""
    ids = text(4, 2, generator)
    spans = torch.tensor([[2, 3, -1], [5, 6, 7]]).expand(4, -1, -1)
    more = {"entity_ids": ids, "entity_attention_mask": torch.ones_like(ids), "entity_position_ids": spans}
    return {**batch, **more} | ({"entity_labels": ids} if batch["labels"].ndim > 1 else {})


def _patches(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """With an image of four patches a row."""
    config: Any = model.config
    values = pixels(model, generator, 16, 3 * config.patch_size**2)
    return {**insert(batch, [[config.image_token_id] * 4] * 4), "pixel_values": values}


def _for_phi4(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """An image of one or two tiles besides the whole of it, and a recording, of which the second is shorter."""
    config: Any = model.config
    image, audio = config.vision_config.image_token_id, config.audio_config.audio_token_id
    tiles, lengths = torch.tensor([1, 2, 1, 1]), torch.tensor([4, 3, 4, 4])
    # Two tokens a tile in height and in width, one more at the end of each line, and one between the two pictures.
    pieces = [
        [image] * (2 * (2 * tile + 1) + 1 + 2 * (2 + 1)) + [audio] * length
        for tile, length in zip(tiles.tolist(), lengths.tolist())
    ]
    return {
        **insert(batch, pieces),
        "image_pixel_values": pixels(model, generator, 4, 3, 3, 32, 32),
        "image_sizes": torch.stack([torch.full_like(tiles, 32), 32 * tiles], -1),
        "image_attention_mask": torch.ones(4, 3, 4, 4, dtype=torch.bool),
        "audio_input_features": pixels(model, generator, 4, 32, config.audio_config.input_size),
        "audio_embed_sizes": lengths,
        "audio_attention_mask": torch.arange(32) < 8 * lengths[:, None],
    }


def _codebooks(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Codes of sound, of several codebooks, with what a text encoder would give."""
    config: Any = model.config
    ids = torch.stack([text(4, 12, generator) for _ in range(config.num_codebooks)], 1)
    labels = torch.stack([uneven(codes) for codes in ids.unbind(1)], -1)
    return {**_memory("encoder_hidden_states")(model, batch, generator), "input_ids": ids, "labels": labels}


def _image(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    return {**batch, "pixel_values": pixels(model, generator)}


_CROSS_ATTENTION = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart"),
    *("prophetnet", "trocr"),
)

BATCHES: dict[str, Callable[..., Any]] = {
    **{f"causal-lm/{model_type}": _memory("encoder_hidden_states") for model_type in _CROSS_ATTENTION},
    "sequence-classification/bigbird_pegasus": _long,
    "masked-lm/big_bird": _long,
    "sequence-classification/big_bird": _long,
    "causal-lm/git": _image,
    "causal-lm/mllama_text_model": _memory("cross_attention_states"),
    "causal-lm/whisper": _memory("encoder_outputs"),
    "layoutlm": _boxes,
    "layoutlmv3": _page,
    "lilt": _boxes,
    "luke": _entities,
    "markuplm": _paths,
    "masked-lm/longformer": _global,
    "modernvbert": equal(4, nested=True, mask="pixel_attention_mask"),
    "neomme": _patches,
    "phi4_multimodal": _for_phi4,
    "roc_bert": _shapes,
    "ultravbert": equal(4, nested=True, mask="pixel_attention_mask"),
    "xlnet": _segments,
    "xmod": _languages,
    "causal-lm/musicgen_decoder": _codebooks,
    "causal-lm/musicgen_melody_decoder": _codebooks,
}

# What cannot be trained unsplit, and why.
UNTRAINABLE: dict[str, str] = {
    "sequence-classification/layoutlmv2": "needs detectron2, which is not on the package registry",
    "causal-lm/gemma3n": "needs timm, which needs torchvision, whose wheels on the registry are built for CUDA only",
    "causal-lm/gemma4_assistant": _NO_LABELS,
    "causal-lm/gemma4_unified_assistant": _NO_LABELS,
}
