"""Models of images, text and audio from a to k: what their tiny models need in addition to the general rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.images import MROPE, TWO_SIZES, equal, grids, insert, pixels, sized, token

_VQ = {"base_channels": 32, "num_res_blocks": 1}
_QWEN3_VISION = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
_WINDOWS = {"fullatt_block_indexes": [1], "window_size": 32}
_GEMMA4 = {"global_head_dim": 16, "use_double_wide_mlp": True}  # beside what the text models have
_GEMMA4_MOE = {
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 8,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "top_k_experts": 2,
}
_RESAMPLER = {"resampler_depth": 2, "resampler_head_dim": 8, "resampler_n_heads": 4, "resampler_n_latents": 4}
_SAM = {"global_attn_indexes": [1], "window_size": 3}

CONFIGS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 8}},
    "blip-2": {"image_token_index": 3, "num_query_tokens": 4},
    "chameleon": {
        "vocabulary_map": {"<image>": 3, **{f"IMGIMG{chr(65 + code)}Z": 10 + code for code in range(8)}},
        "vq_config": {
            **_VQ,
            "latent_channels": 32,
            "num_embeddings": 8,
            "resolution": 16,
            "channel_multiplier": [1, 1, 1],
        },
    },
    "cohere_compass": {
        "text_config": {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            },
        },
        "vision_config": _QWEN3_VISION,
    },
    "cosmos3_edge": {"text_config": MROPE, "vision_config": {"num_patches": 16}},
    "cosmos3_omni": {"text_config": MROPE, "vision_config": _QWEN3_VISION},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_experts_per_tok": 2},
        "vision_config": {
            "encoder_config": {"num_hidden_layers": 2},
            "sam_config": {**_SAM, "image_size": 64, "downsample_channels": [32, 32], "num_hidden_layers": 2},
        },
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": {**_SAM, "image_size": 64, "num_hidden_layers": 3, "mlp_dim": 48}},
    "dots3_note": {
        "audio_config": {
            "adapter_input_size": 32,
            "adapter_out_dim": 32,
            "downsample_hidden_size": 8,
            "num_hidden_layers": 2,
        },
        "text_config": {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "index_topk": 6,
            "layer_types": ["indexed_attention", "sliding_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 16,
            "swa_kv_lora_rank": 16,
            "swa_head_dim": 8,
            "swa_qk_nope_head_dim": 4,
            "swa_v_head_dim": 8,
        },
        "vision_config": {
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    },
    "emu3": {
        "vocabulary_map": {
            "<image>": 3,
            "<|extra_200|>": 4,
            **{f"<|visual token {code:06}|>": 10 + code for code in range(8)},
        },
        "vq_config": {**_VQ, "codebook_size": 8, "attn_resolutions": [2], "channel_multiplier": [1, 1, 1]},
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [32, 16],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        }
    },
    "evolla": {
        "aligner_num_add_layers": 2,
        "resampler_depth": 2,
        "resampler_dim_head": 8,
        "resampler_heads": 2,
        "resampler_num_latents": 4,
        "protein_encoder_config": {"num_hidden_layers": 2},
    },
    "exaone4_5": {"vision_config": _WINDOWS},
    "florence2": {
        "text_config": {"encoder_layers": 2, "decoder_layers": 2},
        "vision_config": {
            "depths": [1, 1, 2, 1],
            "embed_dim": [16, 16, 32, 32],
            "num_groups": [2, 2, 2, 2],
            "num_heads": [2, 2, 2, 2],
            "patch_stride": [2, 2, 2, 2],
            "window_size": 3,
        },
    },
    "gemma4": {
        "audio_config": None,
        "text_config": {**_GEMMA4, **_GEMMA4_MOE},
        "vision_config": {"pooling_kernel_size": 2, "position_embedding_size": 16},
    },
    "gemma4_unified": {
        "audio_config": None,
        "text_config": _GEMMA4,
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32, "pooling_kernel_size": 2},
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "glm46v": {"text_config": MROPE},
    "glm4v": {"text_config": MROPE},
    "glm4v_moe": {"text_config": {"hidden_size": 64, **MROPE}, "vision_config": {"out_hidden_size": 64}},
    "glm5_next": {"text_config": {"index_kpool": 2, "index_topk": 6}},
    "glm_ocr": {"text_config": MROPE},
    "glmga": {"text_config": MROPE},
    "got_ocr2": {"vision_config": {**_SAM, "image_size": 64}},
    "granite4_vision": {
        "deepstack_layer_map": [[-3, 0], [-2, 1]],
        "downsample_rate": "1/2",
        "image_grid_pinpoints": [[32, 64], [64, 32]],
        "spatial_target_layers": [2, 3, 4, 5],
        "text_config": {"num_hidden_layers": 6},
        "vision_config": {"hidden_size": 64},
    },
    "granite_docling": {"vision_config": {"deepstack_visual_indexes": [0, 1], "scale_factor": 2}},
    "hunyuan_vl": {
        "text_config": {"head_dim": 8, **MROPE},
        "vision_config": {"max_image_size": 32, "text_hidden_size": 32},
    },
    "hyperclovax_vision_v2": {"vision_config": _WINDOWS},
    "idefics": {
        "cross_layer_interval": 2,
        "freeze_text_layers": False,
        "freeze_vision_layers": False,
        "use_resampler": True,
        "perceiver_config": _RESAMPLER,
    },
    "idefics2": {"perceiver_config": _RESAMPLER},
    "inkling2": {
        "text_config": {
            "layer_types": ["hybrid_sliding", "hybrid"] * 2,
            "log_scaling_n_floor": 8,
            "n_layers_per_attn_res_block": 2,
            "rel_extent": 12,
            "unpadded_vocab_size": 128,
            "vocab_size": 136,
        },
        "vision_config": {"posemb_grid_size": 4, "projection_hidden_dim": 32, "text_hidden_size": 32},
    },
    "inkling_mm_model": {
        "audio_config": {"n_mel_bins": 8},
        "text_config": {
            "layer_types": ["hybrid_sliding", "hybrid"] * 2,
            "log_scaling_n_floor": 8,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "rel_extent": 12,
            "unpadded_vocab_size": 128,
            "vocab_size": 136,
        },
        "vision_config": {"num_hidden_layers": 3, "patch_size": 2},  # larger patches: more layers, or scipy
    },
    "instructblip": {"image_token_index": 3, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 3, "num_query_tokens": 4},
    "internvl": {"vision_config": {"image_size": [32, 32], "patch_size": [8, 8]}},
    "janus": {
        "vision_config": {"num_image_tokens": 16},
        "vq_config": {
            **_VQ,
            "channel_multiplier": [1, 1],
            "image_token_embed_dim": 32,
            "latent_channels": 32,
            "num_embeddings": 8,
            "num_patches": 4,
        },
    },
    "kimi_k25": {
        "projection_hidden_size": 32,
        "text_config": {"first_k_dense_replace": 1},
        "vision_config": {"pos_emb_height": 4, "pos_emb_width": 4},
    },
    "kosmos-2": {"latent_query_num": 4, "text_config": {"attention_heads": 4, "layers": 4}},
    "kosmos-2.5": {
        "latent_query_num": 4,
        "text_config": {"attention_heads": 4, "layers": 4},
        "vision_config": {"max_num_patches": 32, "patch_embed_hidden_size": 48},
    },
    "mistral3": {"vision_config": {"head_dim": 8, "image_size": 64}},
    "qwen2_5_vl": {"text_config": MROPE, "vision_config": _WINDOWS},
    "qwen2_vl": {"text_config": MROPE},
    "qwen3_vl": {"text_config": MROPE, "vision_config": _QWEN3_VISION},
}


def _text_apart(fix: Callable[..., Any]) -> Callable[..., Any]:
    """Of an encoder-decoder: the labels are those of the decoder, without places for the image."""
    return lambda model, batch, generator: {**fix(model, batch, generator), "labels": batch["labels"]}


def _both_kinds(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    batch = grids()(model, batch, generator)
    return {**batch, "moe_mm_token_type_ids": batch["mm_token_type_ids"]}


def _codes(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Images of two sizes, as 2 x 2 and 2 x 4 codes and the ends of their lines."""
    values = pixels(model, generator, 4, 3, 8, 16)
    sizes = [(2 * height, 2 * width) for height, width in TWO_SIZES]
    pieces = [[3] * (height // 4 * (width // 4 + 1)) for height, width in sizes]
    return {**insert(batch, pieces), "pixel_values": values, "image_sizes": torch.tensor(sizes)}


def _chameleon(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    return {**insert(batch, [[3] * 16] * 4), "pixel_values": pixels(model, generator, 4, 3, 16, 16)}


def _prefix(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """The image and the first token are a prefix, seen both ways and without labels."""
    batch = insert(batch, [[token(model)] * 16] * 4, at=0)
    prefix = torch.arange(batch["input_ids"].shape[1]) < 17
    return {
        **batch,
        "labels": batch["labels"].masked_fill(prefix, -100),
        "token_type_ids": (~prefix).long().expand(4, -1).contiguous(),
        "pixel_values": pixels(model, generator),
    }


def _protein(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(5, 128, (4, 10), generator=generator)
    mask = torch.arange(10) < torch.tensor([10, 7, 10, 4])[:, None]
    return {**batch, "protein_input_ids": ids * mask, "protein_attention_mask": mask.long()}


def _fuyu(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    return {**insert(batch, [[token(model)] * 6] * 4), "pixel_values": pixels(model, generator, 4, 6, 3 * 8 * 8)}


def _deepseek_ocr2(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """The second image is also read in a second view."""
    image, parts = token(model), [0, 1, 0, 0]
    return {
        **insert(batch, [[image] * (144 * (1 + count) + 1) for count in parts]),
        "pixel_values": pixels(model, generator, 4, 3, 64, 64),
        "pixel_values_local": pixels(model, generator, sum(parts), 3, 64, 64),
        "num_local_patches": torch.tensor(parts),
    }


def _two_resolutions(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    batch = equal(16)(model, batch, generator)
    return {**batch, "high_res_pixel_values": pixels(model, generator, 4, 3, 64, 64)}


def _granite4(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Images as a whole and in two parts, beside or above each other: 4 tokens each, and the ends of 2 or 4 lines."""
    wide = torch.tensor([True, False, True, True])
    pieces = [[token(model)] * (14 if row else 16) for row in wide]
    sizes = torch.where(wide[:, None], torch.tensor([32, 64]), torch.tensor([64, 32]))
    return {**insert(batch, pieces), "pixel_values": pixels(model, generator, 4, 3, 3, 32, 32), "image_sizes": sizes}


def _tiles(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Images of one tile, the second one of two."""
    tiles = torch.tensor([[True, False], [True, True], [True, False], [True, False]])
    pieces = [[token(model)] * 4 * int(row.sum()) for row in tiles]
    values = pixels(model, generator, 4, 2, 3, 32, 32)
    return {**insert(batch, pieces), "pixel_values": values, "pixel_attention_mask": tiles}


def _hunyuan(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    image, images = token(model), grids(None)(model, batch, generator)
    pieces = [[image] * (height // 2 * (width // 2 + 1) + 2) for height, width in TWO_SIZES]
    return {**images, **insert(batch, pieces, mm_token_type_ids=image)}


def _idefics(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """The image comes after the second token."""
    seen = (torch.arange(batch["input_ids"].shape[1]) >= 2).long().repeat(4, 1)
    return {**batch, "pixel_values": pixels(model, generator)[:, None], "image_attention_mask": seen[..., None]}


def _merged(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Images of two sizes as one list of squares of four patches."""
    sizes = [(1, height // 2, width // 2) for height, width in TWO_SIZES]
    counts = [height * width for _, height, width in sizes]
    return {
        **insert(batch, [[token(model)] * count for count in counts]),
        "pixel_values": pixels(model, generator, sum(counts), 16, 16, 3),
        "image_grid_thw": torch.tensor(sizes),
    }


def _dots3_note(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """An image and a sound in each sample."""
    config: Any = model.config
    lengths = torch.tensor([4, 2, 4, 3])
    batch = insert(batch, [[config.audio_token_id] * int(length) for length in lengths], at=4)
    return {
        **grids(None)(model, batch, generator),
        "input_features": pixels(model, generator, 4, config.audio_config.feature_size, 32),
        "chunk_sample_lengths": lengths * config.audio_config.samples_per_token,
    }


def _inkling(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Images of two sizes as one list of squares, each of two frames, and sounds of three lengths."""
    config: Any = model.config
    sounds = torch.arange(4) < torch.tensor([4, 2, 4, 3])[:, None]
    batch = insert(batch, [[config.audio_token_id] * int(length) for length in sounds.sum(1)], at=4)
    counts = [height * width // 4 for height, width in TWO_SIZES]
    return {
        **insert(batch, [[config.image_token_id] * count for count in counts]),
        "pixel_values": pixels(model, generator, sum(counts), 2, 2, 2, 3),
        "audio_input_ids": torch.randint(0, 128, (4, 4, 8), generator=generator),
        "audio_input_ids_mask": sounds,
    }


def _instructed(frames: int | None = None) -> Callable[..., Any]:
    """The Q-former reads a text too."""

    def fix(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        shape = (4, frames, 3, 32, 32) if frames else (4, 3, 32, 32)
        return {
            **insert(batch, [[3] * 4 * (frames or 1)] * 4),
            "pixel_values": pixels(model, generator, *shape),
            "qformer_input_ids": batch["input_ids"][:, 5:],
            "qformer_attention_mask": batch["attention_mask"][:, 5:],
        }

    return fix


def _kimi(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    sizes = torch.tensor([(1, *size) for size in TWO_SIZES])
    return {
        **insert(batch, [[token(model)] * int(size.prod() // 4) for size in sizes]),
        "pixel_values": pixels(model, generator, int(sizes.prod(1).sum()), 3, 8, 8),
        "image_grid_thw": sizes,
    }


def _flattened(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Images of two sizes as patches, with their row and column before their values."""
    patches = torch.zeros(4, max(height * width for height, width in TWO_SIZES), 2 + 48)
    for row, (height, width) in enumerate(TWO_SIZES):
        grid = torch.meshgrid(torch.arange(1, height + 1), torch.arange(1, width + 1), indexing="ij")
        patches[row, : height * width, :2] = torch.stack(grid, -1).flatten(0, 1).float()
        patches[row, : height * width, 2:] = pixels(model, generator, height * width, 48)
    return {**insert(batch, [[3] * 4] * 4, image_embeds_position_mask=3), "flattened_patches": patches}


def _positions(kernel: int, times: int) -> Callable[..., Any]:
    """Images of two sizes as patches with their positions, those that pad have none."""

    def fix(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        image, longest = token(model), max(height * width for height, width in TWO_SIZES)
        places = torch.full((4, longest, 2), -1)
        for row, (height, width) in enumerate(TWO_SIZES):
            grid = torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy")
            places[row, : height * width] = torch.stack(grid, -1).flatten(0, 1)
        pieces = [[image] * (height * width // kernel**2) for height, width in TWO_SIZES]
        return {
            **insert(batch, pieces, mm_token_type_ids=image),
            "pixel_values": pixels(model, generator, 4, longest, 3 * (8 * times) ** 2) * (places[..., :1] >= 0),
            "image_position_ids": places,
        }

    return fix


BATCHES: dict[str, Callable[..., Any]] = {
    "aria": equal(8, mask="pixel_mask"),
    "aya_vision": equal(4),
    "blip": equal(0),
    "blip-2": equal(4),
    "chameleon": _chameleon,
    "cohere2_vision": equal(4),
    "cohere_compass": grids(),
    "cosmos3_edge": grids(),
    "cosmos3_omni": grids(),
    "deepseek_ocr2": _deepseek_ocr2,
    "deepseek_vl": equal(16),
    "deepseek_vl_hybrid": _two_resolutions,
    "dots3_note": _dots3_note,
    "emu3": _codes,
    "ernie4_5_vl_moe": _both_kinds,
    "evolla": _protein,
    "exaone4_5": grids(),
    "florence2": _text_apart(equal(5)),
    "fuyu": _fuyu,
    "gemma3": equal(4, "token_type_ids"),
    "gemma4": _positions(2, 1),
    "gemma4_unified": _positions(1, 2),
    "git": equal(0),
    "glm46v": grids(),
    "glm4v": grids(),
    "glm4v_moe": grids(),
    "glm5_next": grids(),
    "glm_ocr": grids(),
    "glmga": grids(),
    "got_ocr2": equal(4),
    "granite4_vision": _granite4,
    "granite_docling": _tiles,
    "hunyuan_vl": _hunyuan,
    "hyperclovax_vision_v2": grids(None),
    "idefics": _idefics,
    "idefics2": equal(4, nested=True, mask="pixel_attention_mask"),
    "idefics3": equal(4, nested=True, mask="pixel_attention_mask"),
    "inkling2": _merged,
    "inkling_mm_model": _inkling,
    "instructblip": _instructed(),
    "instructblipvideo": _instructed(2),
    "internvl": equal(4),
    "janus": equal(16),
    "kimi_k25": _kimi,
    "kosmos-2": equal(4, "image_embeds_position_mask", image=3),
    "kosmos-2.5": _flattened,
    "llava": equal(16),
    "mistral3": sized(lambda config: config.spatial_merge_size),
    "paligemma": _prefix,
    "qwen2_5_vl": grids(),
    "qwen2_vl": grids(),
    "qwen3_vl": grids(),
    "smolvlm": equal(4, nested=True, mask="pixel_attention_mask"),
}

_TIMM = "needs timm, which needs torchvision, whose wheels on the registry are built for CUDA only"
# What cannot be trained unsplit, and why.
UNTRAINABLE: dict[str, str] = {
    "image-text-to-text/diffusion_gemma": "its forward has no labels",
    "image-text-to-text/fast_vlm": _TIMM,
    "image-text-to-text/gemma3n": _TIMM,
}
