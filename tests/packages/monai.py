"""monai: networks for medical images, with monai's own losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from monai.losses import DiceCELoss, DiceLoss
from monai.networks import nets
from torch import Tensor, nn
from torch.nn import functional

from tests.packages.model import Model, labels

DICE_CE = DiceCELoss(to_onehot_y=True, softmax=True)
DICE = DiceLoss(to_onehot_y=True, softmax=True)
PLANE: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}


def segmented(loss: nn.Module) -> Callable[[Any, Any], Tensor]:
    def of_batch(output: Any, batch: Any) -> Tensor:
        logits = output[0] if isinstance(output, (tuple, list)) else output
        return loss(logits, batch["criterion.mask"])

    return of_batch


def slices(size: int, key: str = "x") -> Callable[[], dict[str, Tensor]]:
    return lambda: {key: torch.randn(4, 1, size, size), "criterion.mask": torch.randint(2, (4, 1, size, size))}


def segmenter(name: str, build: Callable[[], nn.Module], size: int = 32, key: str = "x", loss: Any = None) -> Model:
    return Model("monai", name, build, slices(size, key), loss or segmented(DICE_CE))


def classifier(name: str, build: Callable[[], nn.Module], size: int = 32) -> Model:
    def batch() -> dict[str, Tensor]:
        return {"x": torch.randn(4, 1, size, size), "criterion.labels": torch.randint(4, (4,))}

    return Model("monai", name, build, batch, lambda output, batch: labels(first(output), batch))


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def rebuilt(output: Any, batch: Any) -> Tensor:
    return functional.l1_loss(first(output), batch["criterion.image"])


def autoencoder(name: str, build: Callable[[], nn.Module], size: int = 32) -> Model:
    def batch() -> dict[str, Tensor]:
        return {"x": torch.randn(4, 1, size, size), "criterion.image": torch.randn(4, 1, size, size)}

    return Model("monai", name, build, batch, rebuilt)


UNET: dict[str, Any] = {**PLANE, "channels": (4, 8, 16), "strides": (2, 2)}
VIT: dict[str, Any] = {"in_channels": 1, "img_size": (32, 32), "patch_size": (8, 8), "hidden_size": 24}
MODELS = [
    segmenter("UNet", lambda: nets.UNet(**UNET, num_res_units=1)),
    segmenter("UNet, Dice", lambda: nets.UNet(**UNET), loss=segmented(DICE)),
    segmenter("BasicUNet", lambda: nets.BasicUNet(**PLANE, features=(4, 4, 8, 8, 16, 4))),
    segmenter("BasicUNetPlusPlus", lambda: nets.BasicUNetPlusPlus(**PLANE, features=(4, 4, 8, 8, 16, 4))),
    segmenter("AttentionUnet", lambda: nets.AttentionUnet(**UNET)),
    segmenter("SegResNet", lambda: nets.SegResNet(**PLANE, init_filters=8, blocks_down=(1, 1, 2), blocks_up=(1, 1))),
    segmenter("SegResNetDS", lambda: nets.SegResNetDS(**PLANE, init_filters=8, blocks_down=(1, 1, 2))),
    segmenter("DynUNet", lambda: nets.DynUNet(2, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), filters=(4, 8, 16))),
    segmenter("VNet", lambda: nets.VNet(**PLANE)),
    segmenter("HighResNet", lambda: nets.HighResNet(**PLANE)),
    segmenter("FlexibleUNet", lambda: nets.FlexibleUNet(1, 2, "efficientnet-b0", False, spatial_dims=2), 64, "inputs"),
    segmenter("MedNeXt", lambda: nets.MedNeXt(2, init_filters=4, in_channels=1, out_channels=2), 64),
    segmenter(
        "UNETR",
        lambda: nets.UNETR(1, 2, 32, feature_size=4, hidden_size=24, mlp_dim=48, num_heads=2, spatial_dims=2),
        key="x_in",
    ),
    segmenter(
        "SwinUNETR",
        lambda: nets.SwinUNETR(1, 2, feature_size=12, spatial_dims=2, depths=(2,) * 4, num_heads=(1, 1, 2, 2)),
        64,
        "x_in",
    ),
    classifier("DenseNet", lambda: nets.DenseNet(2, 1, 4, init_features=8, growth_rate=4, block_config=(2, 2, 2))),
    classifier("ResNet", lambda: nets.ResNet("basic", [1, 1, 1, 1], [8, 8, 16, 16], 2, 1, num_classes=4)),
    classifier("SENet", lambda: nets.SEResNet50(spatial_dims=2, in_channels=1, num_classes=4, layers=(1, 1, 1, 1))),
    classifier(
        "ViT",
        lambda: nets.ViT(
            **VIT, mlp_dim=48, num_layers=4, num_heads=2, classification=True, num_classes=4, spatial_dims=2
        ),
    ),
    autoencoder("AutoEncoder", lambda: nets.AutoEncoder(2, 1, 1, (4, 8, 16), (2, 2, 2))),
    autoencoder(
        "ViTAutoEnc",
        lambda: nets.ViTAutoEnc(
            **(VIT | {"patch_size": (4, 4)}), mlp_dim=48, num_layers=4, num_heads=2, spatial_dims=2
        ),
    ),
    Model(
        "monai",
        "DiffusionModelUNet",
        lambda: nets.DiffusionModelUNet(
            2, 1, 1, (1, 1), (8, 16), (False, True), norm_num_groups=4, num_head_channels=8
        ),
        lambda: {
            "x": torch.randn(4, 1, 16, 16),
            "timesteps": torch.randint(1000, (4,)),
            "criterion.image": torch.randn(4, 1, 16, 16),
        },
        rebuilt,
    ),
]
