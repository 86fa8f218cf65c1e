"""torchvision: classifiers, segmentation, video, optical flow, and detection with lists of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision import models
from torchvision.models.detection import FCOS, FasterRCNN, KeypointRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

from tests.packages.model import Model, Remedy, cutting, labels

CLASSES = 10


def images(size: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"x": torch.randn(4, 3, size, size), "criterion.labels": torch.randint(CLASSES, (4,))}


def classifier(name: str, size: int = 32, **given: Any) -> Model:
    return Model("torchvision", name, lambda: getattr(models, name)(num_classes=CLASSES, **given), images(size))


def with_auxiliary(output: Any, batch: Any) -> Tensor:
    """The reference script's loss of GoogLeNet and Inception."""
    loss = labels(output.logits, batch)
    for name, head in output._asdict().items():
        if name != "logits":
            loss = loss + 0.3 * labels(head, batch)
    return loss


def auxiliary(name: str, size: int) -> Model:
    def build() -> nn.Module:
        model: nn.Module = getattr(models, name)(num_classes=CLASSES, init_weights=False)
        return model

    return Model("torchvision", name, build, images(size), with_auxiliary)


def masks() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 3, 64, 64), "criterion.mask": torch.randint(5, (4, 64, 64))}


def of_masks(output: Any, batch: Any) -> Tensor:
    """The reference script's loss of segmentation."""
    losses = {name: functional.cross_entropy(logits, batch["criterion.mask"]) for name, logits in output.items()}
    return losses["out"] + 0.5 * losses["aux"] if "aux" in losses else losses["out"]


def segmentation(name: str, **given: Any) -> Model:
    def build() -> nn.Module:
        options = {"weights": None, "weights_backbone": None, "num_classes": 5, **given}
        model: nn.Module = getattr(models.segmentation, name)(**options)
        return model

    title = f"{name} aux" if given else name
    return Model("torchvision", title, build, masks, of_masks)


def video(name: str, size: int, frames: int) -> Model:
    def batch() -> dict[str, Tensor]:
        return {"x": torch.randn(4, 3, frames, size, size), "criterion.labels": torch.randint(CLASSES, (4,))}

    return Model("torchvision", name, lambda: getattr(models.video, name)(num_classes=CLASSES), batch)


def flows() -> dict[str, Any]:
    images = {"image1": torch.randn(4, 3, 128, 128), "image2": torch.randn(4, 3, 128, 128)}
    return images | {"num_flow_updates": 2, "criterion.flow": torch.randn(4, 2, 128, 128)}


def sequence_loss(output: Any, batch: Any) -> Tensor:
    """RAFT's: the later a prediction, the more it counts."""
    weights = [0.8 ** (len(output) - 1 - k) for k in range(len(output))]
    errors = [(flow - batch["criterion.flow"]).abs().mean() for flow in output]
    return torch.stack([w * error for w, error in zip(weights, errors, strict=True)]).sum()


def targets() -> list[dict[str, Tensor]]:
    """Boxes, masks and keypoints of a different number of objects in each image."""
    found = []
    for image in range(4):
        count = 1 + image % 2
        low = torch.rand(count, 2) * 20
        boxes = torch.cat([low, low + 10 + torch.rand(count, 2) * 20], 1)
        points = torch.cat([boxes[:, None, :2] + 5, torch.ones(count, 1, 1)], 2)
        found.append(
            {
                "boxes": boxes,
                "labels": torch.randint(1, 2, (count,)),
                "masks": (torch.rand(count, 64, 64) > 0.5).to(torch.uint8),
                "keypoints": points,
            }
        )
    return found


def detections() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    return [torch.rand(3, 64, 64) for _ in range(4)], targets()


def summed(output: Any, batch: Any) -> Tensor:
    return torch.stack(list(output.values())).sum()


SIZES = {"min_size": 64, "max_size": 64}
ALL = {  # every proposal counts, so that none is drawn
    "rpn_batch_size_per_image": 4096,
    "box_batch_size_per_image": 4096,
    "rpn_pre_nms_top_n_train": 50,
    "rpn_post_nms_top_n_train": 20,
}


def backbone() -> nn.Module:
    return resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)


def detector(name: str, build: Callable[[], nn.Module], **given: Any) -> Model:
    return Model("torchvision", f"detection: {name}", build, detections, summed, **given)


ONE = {"num_microbatches": 1}
TOGETHER = [cutting("backbone.body.layer2")]  # how many proposals there are goes over no cut
AVERAGED = Remedy(
    "loss_reduction='microbatch'", 'loss_reduction="microbatch"', {"options": {"loss_reduction": "microbatch"}}
)
PROPOSED: dict[str, Any] = {"options": ONE, "most": 2, "remedies": TOGETHER}
MODELS = [
    classifier("convnext_tiny"),
    classifier("densenet121"),
    classifier("efficientnet_b0"),
    classifier("efficientnet_v2_s"),
    classifier("mnasnet0_5"),
    classifier("mobilenet_v2"),
    classifier("mobilenet_v3_small"),
    classifier("regnet_y_400mf"),
    classifier("resnet18"),
    classifier("resnext50_32x4d"),
    classifier("shufflenet_v2_x0_5"),
    classifier("squeezenet1_1", 64),
    classifier("swin_t"),
    classifier("swin_v2_t", 64),
    classifier("wide_resnet50_2"),
    Model("torchvision", "vit", lambda: models.VisionTransformer(32, 8, 4, 2, 32, 64, num_classes=CLASSES), images(32)),
    Model(
        "torchvision",
        "maxvit",
        lambda: models.MaxVit((64, 64), 16, 2, [16, 32], [1, 2], 8, 0.0, num_classes=CLASSES),
        images(64),
    ),
    auxiliary("googlenet", 64),
    auxiliary("inception_v3", 299),
    segmentation("deeplabv3_mobilenet_v3_large"),
    segmentation("fcn_resnet50", aux_loss=True),
    video("r3d_18", 32, 4),
    video("mc3_18", 32, 4),
    video("r2plus1d_18", 32, 4),
    Model("torchvision", "raft_small", lambda: models.optical_flow.raft_small(), flows, sequence_loss),
    detector("faster_rcnn", lambda: FasterRCNN(backbone(), 3, **SIZES, **ALL), most=2, remedies=[AVERAGED, *TOGETHER]),
    detector("faster_rcnn, one microbatch", lambda: FasterRCNN(backbone(), 3, **SIZES, **ALL), **PROPOSED),
    detector(
        "faster_rcnn, one microbatch, cut in the backbone",
        lambda: FasterRCNN(backbone(), 3, **SIZES, **ALL),
        options=ONE | {"partition": ["backbone.body.layer2"]},
        most=2,
    ),
    detector("mask_rcnn, one microbatch", lambda: MaskRCNN(backbone(), 3, **SIZES, **ALL), **PROPOSED),
    detector(
        "keypoint_rcnn, one microbatch",
        lambda: KeypointRCNN(backbone(), 2, num_keypoints=1, **SIZES, **ALL),
        **PROPOSED,
    ),
    detector("retinanet", lambda: RetinaNet(backbone(), 3, **SIZES)),
    detector("retinanet, one microbatch", lambda: RetinaNet(backbone(), 3, **SIZES), options=ONE),
    detector("fcos", lambda: FCOS(backbone(), 3, **SIZES)),
    detector("fcos, one microbatch", lambda: FCOS(backbone(), 3, **SIZES), options=ONE),
]
