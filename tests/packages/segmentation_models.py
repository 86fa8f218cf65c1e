"""segmentation-models-pytorch: its decoders, encoders and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import segmentation_models_pytorch as smp
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.packages.model import Model

DECODERS = ("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3", "DeepLabV3Plus",
            "Segformer", "UPerNet")  # fmt: skip
ENCODERS = ("mobilenet_v2", "timm-regnetx_002", "mit_b0", "efficientnet-b0", "tu-convnext_atto", "vgg11_bn")
DICE, FOCAL = smp.losses.DiceLoss(mode="binary"), smp.losses.FocalLoss(mode="binary")
BCE = functional.binary_cross_entropy_with_logits


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 3, 128, 128), "criterion.mask": torch.randint(2, (4, 1, 128, 128)).float()}


def of_mask(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda output, batch: loss(output, batch["criterion.mask"])


def segmenter(decoder: str, encoder: str = "resnet18", loss: Any = BCE, title: str = "") -> Model:
    def build() -> nn.Module:
        model: nn.Module = getattr(smp, decoder)(encoder, encoder_weights=None, classes=1)
        return model

    return Model("segmentation-models-pytorch", title or f"{decoder} {encoder}", build, batch, of_mask(loss))


MODELS = [
    *(segmenter(decoder) for decoder in DECODERS),
    *(segmenter("Unet", encoder) for encoder in ENCODERS),
    segmenter("Unet", loss=DICE, title="Unet, Dice"),
    segmenter("Unet", loss=FOCAL, title="Unet, focal loss"),
]
