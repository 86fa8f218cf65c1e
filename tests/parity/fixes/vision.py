"""Image classifiers: what their tiny models need in addition to the general rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_WINDOWS = {  # 16x16, 8x8 and 4x4 patches in windows of 4x4
    "image_size": 64,
    "embed_dim": 16,
    "depths": [2, 2, 2],
    "num_heads": [2, 4, 4],
    "window_size": 4,
}
_PYRAMID = {
    "image_size": 64,
    "depths": [2, 2, 1, 2],
    "hidden_sizes": [16, 24, 32, 48],
    "num_attention_heads": [1, 2, 4, 4],
    "mlp_ratios": [2, 2, 2, 2],
    "sr_ratios": [8, 4, 2, 1],
}

CONFIGS: dict[str, dict[str, Any]] = {
    "beit": {"use_absolute_position_embeddings": True, "use_shared_relative_position_bias": True},
    "bit": {"embedding_size": 16, "hidden_sizes": [32, 48, 64], "depths": [1, 2, 2], "num_groups": 4},
    "convnext": {"hidden_sizes": [16, 24, 32], "depths": [2, 2, 2], "num_stages": 3},
    "convnextv2": {"hidden_sizes": [16, 24, 32], "depths": [2, 2, 2], "num_stages": 3},
    "cvt": {"embed_dim": [16, 24, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
    "data2vec-vision": {"use_relative_position_bias": True},
    "dinov2": {"use_mask_token": False},
    "dinov2_with_registers": {"use_swiglu_ffn": True},
    "donut-swin": _WINDOWS,
    "efficientformer": {
        "image_size": 64,
        "resolution": 2,
        "depths": [1, 2, 1, 3],
        "hidden_sizes": [16, 24, 32, 48],
        "dim": 48,
        "key_dim": 8,
    },
    "efficientnet": {
        "width_coefficient": 0.1,
        "depth_coefficient": 1.0,
        "in_channels": [32, 80, 160],
        "out_channels": [80, 160, 240],
        "kernel_sizes": [3, 3, 5],
        "strides": [1, 2, 2],
        "num_block_repeats": [1, 2, 2],
        "expand_ratios": [1, 4, 4],
        "hidden_dim": 128,
        "initializer_range": 0.3,
    },
    "focalnet": {
        "embed_dim": 16,
        "hidden_sizes": [16, 32, 64],
        "depths": [2, 2, 2],
        "focal_levels": [2, 2, 2],
        "focal_windows": [3, 3, 3],
        "use_layerscale": True,
    },
    "hgnet_v2": {
        "embedding_size": 16,
        "hidden_sizes": [24, 32, 48],
        "depths": [1, 1, 2],
        "stem_channels": [3, 8, 16],
        "stage_in_channels": [16, 24, 32],
        "stage_mid_channels": [8, 12, 16],
        "stage_out_channels": [24, 32, 48],
        "stage_num_blocks": [1, 1, 2],
        "stage_downsample": [False, True, True],
        "stage_downsample_strides": [2, 2, 2],
        "stage_light_block": [False, False, True],
        "stage_kernel_size": [3, 3, 5],
        "stage_numb_of_layers": [2, 2, 3],
    },
    "hiera": {
        "embed_dim": 16,
        "image_size": [64, 64],
        "depths": [1, 2, 2],
        "num_heads": [1, 2, 4],
        "num_query_pool": 2,
        "masked_unit_attention": [True, True, False],
    },
    "levit": {
        "image_size": 96,
        "patch_size": 16,
        "hidden_sizes": [16, 24, 32],
        "num_attention_heads": [2, 3, 4],
        "depths": [2, 2, 2],
        "key_dim": [8, 8, 8],
    },
    "mobilenet_v1": {"depth_multiplier": 0.125, "image_size": 64},
    "mobilenet_v2": {"depth_multiplier": 0.125, "image_size": 64},
    "mobilevit": {
        "image_size": 64,
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 48],
        "output_stride": 16,
        "initializer_range": 0.2,
    },
    "mobilevitv2": {
        "image_size": 64,
        "width_multiplier": 0.25,
        "n_attn_blocks": [2, 2, 2],
        "base_attn_unit_dims": [64, 96, 128],
        "output_stride": 16,
        "initializer_range": 0.2,
    },
    "perceiver": {
        "image_size": 16,
        "num_latents": 8,
        "d_latents": 32,
        "num_blocks": 2,
        "num_self_attends_per_block": 2,
        "initializer_range": 0.1,
    },
    "poolformer": {"depths": [2, 2, 1, 2], "hidden_sizes": [16, 24, 32, 48], "image_size": 64},
    "pvt": {**_PYRAMID, "num_labels": 4},
    "pvt_v2": _PYRAMID,
    "regnet": {"embedding_size": 16, "hidden_sizes": [16, 24, 32], "depths": [1, 2, 2], "groups_width": 8},
    "resnet": {"embedding_size": 16, "hidden_sizes": [32, 48, 64], "depths": [1, 2, 2]},
    "segformer": {**_PYRAMID, "decoder_hidden_size": 16},
    "siglip": {"vision_config": {"vision_use_head": False}},
    "siglip2": {"vision_config": {"vision_use_head": False, "num_patches": 16}},
    "swiftformer": {"depths": [2, 2, 2, 2], "embed_dims": [16, 24, 32, 48], "mlp_ratio": 2, "image_size": 64},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "textnet": {
        "image_size": [64, 64],
        "stem_out_channels": 16,
        "hidden_sizes": [16, 16, 24, 32, 48],
        "conv_layer_kernel_sizes": [[[3, 3], [3, 3]], [[3, 3], [1, 3]], [[3, 3], [3, 1]], [[3, 3], [1, 3]]],
        "conv_layer_strides": [[1, 2], [2, 1], [2, 1], [1, 1]],
    },
    "timm_wrapper": {
        "architecture": "vit_tiny_patch16_224",
        "model_args": {"depth": 3, "embed_dim": 32, "img_size": 32, "num_heads": 4, "patch_size": 8},
    },
    "van": {"image_size": 64, "depths": [1, 2, 1, 2], "hidden_sizes": [16, 24, 32, 48], "mlp_ratios": [2, 2, 2, 2]},
}


def _pixel_ids(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """An image as a row of color clusters."""
    config: Any = model.config
    shape = (len(batch["labels"]), config.n_positions // 2)
    return {"input_ids": torch.randint(0, config.vocab_size - 1, shape, generator=generator), "labels": batch["labels"]}


def _patches(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Images of several shapes, as padded rows of patches."""
    config: Any = model.config
    vision = config.vision_config
    shapes = torch.tensor([[4, 4], [3, 4], [5, 3], [2, 7]])
    size = vision.num_channels * vision.patch_size**2
    mask = (torch.arange(16) < shapes.prod(1)[:, None]).long()
    pixels = torch.randn(len(shapes), 16, size, generator=generator)
    return {
        "pixel_values": pixels * mask[..., None],
        "pixel_attention_mask": mask,
        "spatial_shapes": shapes,
        "labels": batch["labels"],
    }


BATCHES: dict[str, Callable[..., Any]] = {"imagegpt": _pixel_ids, "image-classification/siglip2": _patches}

# What cannot be trained unsplit, and why.
UNTRAINABLE: dict[str, str] = {
    "image-classification/dinat": "its attention gives natten the heads in the wrong dimension, where natten builds",
    "image-classification/pp_lcnet": "its forward has no labels",
    "image-classification/shieldgemma2": "its forward takes labels but returns no loss",
    "image-classification/timm_wrapper": "timm needs torchvision, which does not load with a CPU build of torch",
}
