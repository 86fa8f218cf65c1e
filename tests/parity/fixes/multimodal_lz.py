"""Models of images, text and audio from l to z: what their tiny models need in addition to the general rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.images import MROPE, TWO_SIZES, equal, grids, insert, pixels, sized, token

# Linear and full attention, and rotary positions along time, height and width in half of each head of full attention.
_QWEN3_5 = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
_MINICPM = {"image_token_id": 3, "insert_layer_id": 0, "text_config": _QWEN3_5, "vision_config": {"insert_layer_id": 0}}
_ANYRES = {"image_grid_pinpoints": [[16, 32], [32, 32]], "vision_config": {"image_size": 16}}
_DEEPSTACK = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
_OMNI = {
    "text_config": MROPE,
    "vision_start_token_id": 6,
    "vision_end_token_id": 7,
    "audio_start_token_id": 8,
    "audio_end_token_id": 9,
}
_SAM = {"global_attn_indexes": [1], "window_size": 3, "image_size": 64, "initializer_range": 0.2}

CONFIGS: dict[str, dict[str, Any]] = {
    "lfm2_vl": {"vision_config": {"num_patches": 16}},
    "llama4": {"vision_config": {"intermediate_size": 128}},  # as the pixel shuffle before it makes
    "llava_next": _ANYRES,
    "llava_next_video": _ANYRES,
    "llava_onevision": _ANYRES,
    "minicpm_ocr": _MINICPM | {"downsample_mode": "16x"},
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": _MINICPM
    | {"image_start_id": 10, "image_end_id": 11, "slice_start_id": 12, "slice_end_id": 13, "newline_id": 14},
    "mistral4": {"first_k_dense_replace": 1},
    "mistral_large4": {
        "text_config": {
            "num_hidden_layers": 5,
            "index_topk": 6,
            "no_rope_layers": [1, 1, 0, 1, 0],
            "kv_source_layers": [0, 0, 2, 3, 2],
            "indexer_types": ["full", "shared", "full", "full", "full"],
        }
    },
    "mllama": {
        "vision_config": {
            "attention_heads": 4,
            "num_global_layers": 2,
            "intermediate_layers_indices": [0, 2],
            "vision_output_dim": 96,
            "max_num_tiles": 2,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        }
    },
    "molmo2": {
        "image_patch_id": 3,
        "adapter_config": {"vision_feature_layer": [2, 1], "text_hidden_size": 32, "initializer_range": 0.2},
        "vision_config": {"image_size": [32, 32], "num_position_embeddings": 16, "initializer_range": 0.2},
        "text_config": {"additional_vocab_size": 8},
    },
    "muse_glimmer": {"out_hidden_size": 128, "vision_config": {"pos_emb_height": 4, "pos_emb_width": 4}},
    "muse_spark": {
        "out_hidden_size": 128,
        "vision_config": {"pos_emb_height": 4, "pos_emb_width": 4},
        "text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
        "audio_config": {"patch_sizes": [4, 2, 2, 2], "hidden_sizes": [8, 16, 16, 32], "depths": [1, 2, 1, 1]},
    },
    "nemotron_h_omni": {
        "image_token_id": 3,
        "audio_token_id": 5,
        "vision_hidden_size": 32,
        "vision_config": {"video_temporal_patch_size": 2, "max_img_size": 64, "num_registers": 1},
        "text_config": {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 4,
        },
        "audio_config": {
            "model_type": "parakeet_encoder",
            "num_hidden_layers": 2,
            "subsampling_conv_channels": 8,
            "num_mel_bins": 16,
            "initializer_range": 0.2,
            "projection_hidden_size": 32,
            "projection_bias": True,
            "attention_bias": False,
            "scale_input": False,
        },
    },
    "ovis2": {"visual_indicator_token_ids": [10, 11, 12, 13, 14]},
    "paddleocr_vl": {"text_config": MROPE},
    "perception_lm": {
        "projector_pooling_ratio": 2,
        "vision_config": {
            "architecture": "vit_pe_lang_large_patch14_448",
            "model_args": {
                "embed_dim": 32,
                "depth": 3,
                "num_heads": 4,
                "img_size": [32, 32],
                "patch_size": 8,
                "ref_feat_shape": [4, 4],
            },
        },
    },
    "pix2struct": {"vision_config": {"seq_len": 16, "patch_embed_hidden_size": 32}},
    "pp_chart2table": {"vision_config": _SAM},
    "pp_formulanet": {"vision_config": _SAM},
    "qianfan_ocr": {"vision_config": {"image_size": [32, 32], "patch_size": [8, 8]}},
    "qwen2_5_omni_thinker": _OMNI
    | {
        "audio_config": {"num_mel_bins": 16, "n_window": 4, "initializer_range": 0.2},
        "vision_config": {"fullatt_block_indexes": [1], "window_size": 32},
    },
    "qwen3_omni_moe_thinker": _OMNI
    | {
        "text_config": MROPE | {"mlp_only_layers": [0]},
        "audio_config": {"num_mel_bins": 16, "downsample_hidden_size": 8, "initializer_range": 0.2},
        "vision_config": _DEEPSTACK,
    },
    "qwen3_5": {"text_config": _QWEN3_5, "vision_config": {"num_position_embeddings": 16}},
    "qwen3_5_moe": {"text_config": _QWEN3_5, "vision_config": {"num_position_embeddings": 16}},
    "qwen3_vl_moe": {"text_config": MROPE | {"mlp_only_layers": [0]}, "vision_config": _DEEPSTACK},
    "qwen4_exp": {"text_config": _QWEN3_5, "vision_config": {"num_position_embeddings": 16}},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "step3p7": {
        "text_config": {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "num_sliding_attention_heads": 2,
            "sliding_window": 8,
        },
        "vision_config": {"image_size": 64},
    },
    "t5gemma2": {"encoder": {"eoi_token_index": 24, "mm_tokens_per_image": 4}},
    "udop": {"decoder_start_token_id": 0},
    "unlimited_ocr": {
        "vision_config": {"sam_config": {**_SAM, "downsample_channels": [16, 32]}, "encoder_config": {"image_size": 16}}
    },
    "vision-encoder-decoder": {"pad_token_id": 0, "decoder_start_token_id": 1},
    "vipllava": {"vision_feature_layer": [-2, 1]},
}


def _naflex(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Flat patches of each image, padded to the largest."""
    config: Any = model.config
    counts = [height * width for height, width in TWO_SIZES]
    mask = (torch.arange(max(counts)) < torch.tensor(counts)[:, None]).long()
    values = pixels(model, generator, *mask.shape, 3 * config.vision_config.patch_size**2)
    return {
        **insert(batch, [[token(model)] * (count // config.downsample_factor**2) for count in counts]),
        "pixel_values": values * mask[..., None],
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor(TWO_SIZES),
    }


def _anyres(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """The image as one tile, and as two or four, of which the second image uses the middle rows only."""
    counts = [4 + rows * (4 + 1) for rows in (4, 2, 2, 4)]  # each row ends with a token of its own
    return {
        **insert(batch, [[token(model)] * count for count in counts]),
        "pixel_values": pixels(model, generator, 4, 5, 3, 16, 16),
        "image_sizes": torch.tensor([(32, 32), (20, 32), (16, 32), (32, 32)]),
    }


def _strip(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """The patches of all images side by side."""
    config: Any = model.config
    sizes = [(2 * height, 2 * width) for height, width in TWO_SIZES]
    pieces = [[3] * (height * width // 16) for height, width in sizes]
    marks = {}
    if config.model_type == "minicpmv4_7":
        pieces = [[config.image_start_id, *piece, config.image_end_id] for piece in pieces]
        marks = {"mm_token_type_ids": 3}
    patch = config.vision_config.patch_size
    return {
        **insert(batch, pieces, **marks),
        "pixel_values": pixels(model, generator, 1, 3, patch, patch * sum(map(math.prod, sizes))),
        "target_sizes": torch.tensor(sizes),
    }


def _tiles(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """One or two tiles a sample, seen by the text from the image token on."""
    ids, tiles = torch.tensor([1, 2, 3, 1]), torch.tensor([1, 2, 2, 1])
    used = (torch.arange(2) < tiles[:, None]).long()
    batch = insert(batch, [[token(model)]] * 4)
    seen = (torch.arange(batch["input_ids"].shape[1]) >= 2).long()
    return {
        **batch,
        "pixel_values": pixels(model, generator, 4, 1, 2, 3, 32, 32) * used[:, None, :, None, None, None],
        "aspect_ratio_ids": ids[:, None],
        "aspect_ratio_mask": used[:, None],
        "cross_attention_mask": seen[None, :, None, None] * used[:, None, None],
    }


def _crops(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """The image, of the second sample with one crop; each token pools a square of patches."""
    crops = torch.tensor([1, 2, 1, 1])
    corners = torch.tensor([0, 2, 8, 10])[:, None] + torch.tensor([0, 1, 4, 5])
    return {
        **insert(batch, [[3] * 4 * int(count) for count in crops], mm_token_type_ids=3),
        "pixel_values": pixels(model, generator, int(crops.sum()), 16, 192),
        "image_token_pooling": torch.cat([corners + 16 * k for k in range(int(crops.sum()))]),
        "image_grids": torch.stack([2 * crops.clamp(max=1), 2 + 0 * crops, 2 * (crops - 1), 2 * (crops - 1)], dim=1),
    }


def _packed(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Images of two sizes as one list of flat patches, of which 2 x 2 are one token."""
    counts = [height * width for height, width in TWO_SIZES]
    return {
        **insert(batch, [[3] * (count // 4) for count in counts]),
        "pixel_values": pixels(model, generator, sum(counts), 3 * 8 * 8),
    }


def _merged(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    batch = _packed(model, batch, generator)
    sizes = torch.tensor([(1, *size) for size in TWO_SIZES])
    return {**batch, "image_grid_thw": sizes, "image_merge_sizes": torch.full((4,), 2)}


def _single_patches(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    batch = grids()(model, batch, generator)
    config: Any = model.config
    patch = config.vision_config.patch_size
    return {**batch, "pixel_values": batch["pixel_values"].unflatten(1, (3, patch, patch))}


def _wave(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Images, and sound of two lengths, 32 samples a token."""
    batch = grids(None)(model, batch, generator)
    counts = torch.tensor([4, 2, 2, 4])
    mask = (torch.arange(128) < 32 * counts[:, None]).long()
    return {
        **insert(batch, [[5] * int(count) for count in counts]),
        "input_values": torch.randn(4, 128, generator=generator) * mask,
        "input_values_mask": mask,
    }


def _radio(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Images, and sound of two lengths, begun 8 frames a token."""
    batch = _packed(model, batch, generator)
    frames = torch.tensor([24, 12, 12, 24])
    mask = (torch.arange(24) < frames[:, None]).long()
    return {
        **insert(batch, [[5] * count for count in (3, 2, 2, 3)]),
        "image_grid_hw": torch.tensor(TWO_SIZES),
        "input_features": torch.randn(4, 24, 16, generator=generator) * mask[..., None],
        "input_features_mask": mask,
    }


def _omni(tokens: tuple[int, ...]) -> Callable[..., Any]:
    """Images, and sound of two lengths, as `tokens` tokens a sample."""

    def fix(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        batch = grids(None, around=lambda config: ([6], [7]))(model, batch, generator)
        frames = torch.tensor([24, 16, 16, 24])
        mask = (torch.arange(24) < frames[:, None]).long()
        return {
            **insert(batch, [[8, *[5] * count, 9] for count in tokens]),
            "input_features": torch.randn(4, 16, 24, generator=generator) * mask[:, None],
            "feature_attention_mask": mask,
        }

    return fix


def _film(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """An image, and a film of two pictures."""
    batch = equal(16)(model, batch, generator)
    return {**insert(batch, [[4] * 34] * 4), "pixel_values_videos": pixels(model, generator, 4, 2, 3, 32, 32)}


def _two_views(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    return {**insert(batch, [[3] * 7] * 4), "pixel_values": pixels(model, generator, 4, 3, 64, 64)}


def _robot(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """One or two cameras a sample, and the noise that would be drawn."""
    cameras = torch.tensor([2, 1, 2, 1])
    batch = insert(batch, [[3] * 16 * int(count) for count in cameras])
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "pixel_values": pixels(model, generator, 4, 2, 3, 32, 32),
        "pixel_attention_mask": torch.arange(2) < cameras[:, None],
        "state": torch.randn(4, 32, generator=generator),
        "noise": torch.randn(4, 8, 32, generator=generator),
        "actions": torch.randn(4, 8, 32, generator=generator),
        "timestep": torch.rand(4, generator=generator),
    }


def _rendered(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Patches of 4 x 4 or 3 x 4, each after its row and column."""
    places = torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 5)).float()
    mask = (torch.arange(16) < torch.tensor([16, 12, 12, 16])[:, None]).long()
    values = torch.cat([places.expand(4, -1, -1), pixels(model, generator, 4, 16, 32)], dim=-1)
    return {"flattened_patches": values * mask[..., None], "attention_mask": mask, "labels": batch["labels"]}


def _image_to_text(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": pixels(model, generator), "labels": batch["labels"]}


def _formula(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    start = torch.ones_like(batch["input_ids"][:, :1])
    return {
        **_image_to_text(model, batch, generator),
        "decoder_input_ids": torch.cat([start, batch["input_ids"][:, :-1]], dim=1),
    }


def _document(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Words with their places on the page."""
    corner = torch.rand(*batch["input_ids"].shape, 2, generator=generator) * 0.6 + 0.1
    return {
        **batch,
        "labels": batch["labels"][:, :9].contiguous(),
        "bbox": torch.cat([corner, corner + 0.2], dim=-1),
        "pixel_values": pixels(model, generator),
    }


def _close_ups(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Each image whole, the second in two parts besides."""
    return {
        **insert(batch, [[3] * (4 * (1 + parts)) for parts in (0, 2, 0, 0)]),
        "pixel_values": pixels(model, generator),
        "pixel_values_local": pixels(model, generator, 2, 3, 64, 64),
        "num_local_patches": torch.tensor([0, 2, 0, 0]),
    }


def _translation(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """An image and its end for the encoder."""
    return {
        **insert(batch, [[3] * 4 + [24]] * 4),
        "pixel_values": pixels(model, generator, 4, 3, 32, 32),
        "labels": batch["labels"],
    }


BATCHES: dict[str, Callable[..., Any]] = {
    "lfm2_vl": _naflex,
    "lfm3_vl": grids(None),
    "lighton_ocr": sized(lambda config: config.spatial_merge_size),
    "llama4": equal(4),
    "llava_next": _anyres,
    "llava_next_video": _anyres,
    "llava_onevision": _anyres,
    "minicpm_ocr": _strip,
    "minicpmv4_6": _strip,
    "minicpmv4_7": _strip,
    "minimax_m3_vl": grids(None),
    "mistral_large4": sized(lambda config: config.spatial_merge_size),
    "mllama": _tiles,
    "molmo2": _crops,
    "muse_glimmer": grids(None),
    "muse_spark": _wave,
    "nemotron_h_omni": _radio,
    "ovis2": equal(16),
    "paddleocr_vl": _single_patches,
    "perception_lm": equal(4, nested=True),
    "pi0": _robot,
    "pix2struct": _rendered,
    "pp_chart2table": equal(4),
    "pp_formulanet": _formula,
    "qianfan_ocr": equal(4),
    "qwen2_5_omni_thinker": _omni((6, 4, 4, 6)),
    "qwen3_omni_moe_thinker": _omni((3, 2, 2, 3)),
    "qwen3_5": grids(),
    "qwen3_5_moe": grids(),
    "qwen3_vl_moe": grids(),
    "qwen4_exp": grids(),
    "image-text-to-text/shieldgemma2": equal(4, "token_type_ids"),
    "step3p7": _close_ups,
    "t5gemma2": _translation,
    "udop": _document,
    "unlimited_ocr": _two_views,
    "video_llama_3": _merged,
    "video_llava": _film,
    "vipllava": equal(16),
    "vision-encoder-decoder": _image_to_text,
}

# What cannot be trained unsplit, and why.
UNTRAINABLE: dict[str, str] = {
    "image-text-to-text/perception_lm": "its vision tower is timm's, and timm needs torchvision, "
    "which is on the package registry for CUDA builds of torch only"
}
