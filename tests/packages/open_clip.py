"""open_clip_torch: CLIP and CoCa, with the loss over the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from open_clip import CLIP, ClipLoss, CoCa, CoCaLoss, CustomTextCLIP
from open_clip.loss import SigLipLoss
from torch import Tensor, nn

from tests.packages.model import Model

ONE = {"num_microbatches": 1}
VISION = {"layers": 3, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32}
RESNET = {"layers": [1, 1, 1, 1], "width": 8, "image_size": 64, "head_width": 16}
TEXT = {"context_length": 8, "vocab_size": 60, "width": 32, "heads": 2, "layers": 3}


def pairs(size: int = 32) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"image": torch.randn(4, 3, size, size), "text": torch.randint(1, 60, (4, 8))}


class Dicts(nn.Module):
    """A model of open_clip that returns a dict, as its training script has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.model(image, text)
        return found


def contrastive(output: Any, batch: Any) -> Tensor:
    return ClipLoss()(output["image_features"], output["text_features"], output["logit_scale"])


def sigmoid(output: Any, batch: Any) -> Tensor:
    return SigLipLoss()(output["image_features"], output["text_features"], output["logit_scale"], output["logit_bias"])


def captioning(output: Any, batch: Any) -> Tensor:
    loss = CoCaLoss(caption_loss_weight=2.0, clip_loss_weight=1.0)
    return torch.stack(list(loss(**output))).sum()


def clip(**given: Any) -> Callable[[], nn.Module]:
    return lambda: Dicts(CLIP(16, **({"vision_cfg": VISION, "text_cfg": TEXT} | given), output_dict=True))


def custom() -> nn.Module:
    return Dicts(CustomTextCLIP(16, VISION, TEXT, init_logit_bias=-10, output_dict=True))


def coca() -> nn.Module:
    text = TEXT | {"embed_cls": True, "output_tokens": True}
    vision = VISION | {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True}
    multimodal = {"context_length": 8, "vocab_size": 60, "width": 32, "heads": 2, "layers": 2}
    model = CoCa(32, multimodal, text, vision)
    nn.init.normal_(model.text_decoder.text_projection, std=32**-0.5)  # CoCa leaves it as the memory was
    return Dicts(model)


def of(name: str, build: Callable[[], nn.Module], loss: Any = contrastive, size: int = 32, **given: Any) -> Model:
    return Model("open_clip_torch", name, build, pairs(size), loss, **given)


MODELS = [
    of("CLIP", clip()),
    of("CLIP, one microbatch", clip(), options=ONE),
    of("CLIP, ResNet", clip(vision_cfg=RESNET), size=64, options=ONE),
    of("CLIP, frozen images", lambda: locked(), options=ONE),
    of("SigLIP", custom, sigmoid, options=ONE),
    of("CoCa", coca, captioning, options=ONE),
]


def locked() -> nn.Module:
    """LiT: only the texts' side trains."""
    model: Any = clip()()
    model.model.lock_image_tower()
    return model
