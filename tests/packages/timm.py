"""timm: one small model of each of its model files, and its training script's idioms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, JsdCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.packages.model import Model, Remedy, labels

CLASSES = 10
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}

# File of timm.models: model, size of the images, and what makes it smaller.
SMALL: dict[str, tuple[str, int, dict[str, Any]]] = {
    "beit": ("beit_base_patch16_224", 32, VIT),
    "byoanet": ("botnet26t_256", 64, {"img_size": 64}),
    "byobnet": ("repvgg_a0", 32, {}),
    "cait": ("cait_xxs24_224", 32, VIT),
    "coat": ("coat_lite_tiny", 64, {"img_size": 64}),
    "convit": ("convit_tiny", 32, {"img_size": 32, "patch_size": 8, "depth": 4, "local_up_to_layer": 3}),
    "convmixer": ("convmixer_1024_20_ks9_p14", 56, {}),
    "convnext": ("convnext_atto", 32, {"dims": (8, 16, 16, 32), "depths": (1, 1, 2, 1)}),
    "cpubone": ("cpubone_nano", 64, {}),
    "crossvit": ("crossvit_9_240", 240, {"depth": [[1, 1, 0], [1, 1, 0]], "embed_dim": [16, 32], "num_heads": [2, 2],
                                         "mlp_ratio": [2, 2, 1]}),
    "csatv2": ("csatv2", 64, {}),
    "cspnet": ("cs3darknet_s", 32, {}),
    "cspnext": ("cspnext_tiny", 64, {}),
    "davit": ("davit_tiny", 64, {"embed_dims": (16, 16, 32, 32), "depths": (1, 1, 2, 1), "num_heads": (1, 1, 2, 2)}),
    "deepseek_vit": ("deepseek_vit_412m", 28, {"embed_dim": 32, "depth": 4, "num_heads": 2}),
    "deit": ("deit_tiny_distilled_patch16_224", 32, VIT),
    "densenet": ("densenet121", 32, {"block_config": (2, 2, 2, 2), "growth_rate": 8}),
    "dla": ("dla34", 64, {}),
    "dpn": ("dpn48b", 32, {}),
    "edgenext": ("edgenext_xx_small", 64, {}),
    "efficientformer": ("efficientformer_l1", 224, {}),
    "efficientformer_v2": ("efficientformerv2_s0", 64, {"img_size": 64}),
    "efficientnet": ("efficientnet_b0", 32, {}),
    "efficientvim": ("efficientvim_m1", 128, {}),
    "efficientvit_mit": ("efficientvit_b0", 64, {}),
    "efficientvit_msra": ("efficientvit_m0", 64, {"img_size": 64}),
    "eva": ("eva02_tiny_patch14_224", 32, VIT),
    "fasternet": ("fasternet_t0", 64, {}),
    "fastvit": ("fastvit_t8", 64, {}),
    "focalnet": ("focalnet_tiny_srf", 64, {}),
    "gcvit": ("gcvit_xxtiny", 64, {"img_size": 64}),
    "gemma4_vit": ("gemma4_vit_167m", 48, {"embed_dim": 32, "depth": 4, "num_heads": 2}),
    "ghostnet": ("ghostnet_050", 32, {"drop_rate": 0.0}),
    "hardcorenas": ("hardcorenas_a", 32, {}),
    "hgnet": ("hgnetv2_b0", 64, {}),
    "hiera": ("hiera_tiny_224", 64, {"img_size": (64, 64), "embed_dim": 16, "stages": (1, 1, 2, 1)}),
    "hieradet_sam2": ("hieradet_small", 64, {"embed_dim": 16, "stages": (1, 1, 2, 1)}),
    "hrnet": ("hrnet_w18_small", 64, {}),
    "iformer": ("iformer_t", 64, {}),
    "inception_next": ("inception_next_atto", 64, {"depths": (1, 1, 2, 1), "dims": (8, 16, 32, 64)}),
    "inception_resnet_v2": ("inception_resnet_v2", 80, {}),
    "inception_v3": ("inception_v3", 96, {}),
    "inception_v4": ("inception_v4", 96, {}),
    "lcnetv2": ("lcnetv2_small", 64, {}),
    "levit": ("levit_128s", 64, {"img_size": 64}),
    "lowformer": ("lowformer_b0", 64, {}),
    "mambaout": ("mambaout_femto", 64, {"dims": (16, 16, 32, 32), "depths": (1, 1, 2, 1)}),
    "maxxvit": ("maxvit_rmlp_pico_rw_256", 64, {"img_size": 64}),
    "metaformer": ("poolformer_s12", 64, {}),
    "mlp_mixer": ("mixer_s32_224", 64, {"img_size": 64}),
    "mobilenetv3": ("mobilenetv3_small_050", 32, {}),
    "mobilenetv5": ("mobilenetv5_base", 64, {"channel_multiplier": 0.25}),
    "mobilevit": ("mobilevit_xxs", 64, {}),
    "mvitv2": ("mvitv2_tiny", 64, {"img_size": 64}),
    "naflexvit": ("naflexvit_base_patch16_gap", 32, {"embed_dim": 32, "depth": 4, "num_heads": 2}),
    "nasnet": ("nasnetalarge", 96, {"num_features": 384, "stem_size": 16}),
    "nest": ("nest_tiny", 64, {"img_size": 64}),
    "nextvit": ("nextvit_small", 64, {}),
    "nfnet": ("nf_resnet26", 32, {}),
    "pit": ("pit_ti_224", 64, {"img_size": 64}),
    "pnasnet": ("pnasnet5large", 64, {}),
    "pvt_v2": ("pvt_v2_b0", 64, {}),
    "qwen3_vit": ("qwen3_vit_88m", 32, {"embed_dim": 32, "depth": 4, "num_heads": 2}),
    "rdnet": ("rdnet_tiny", 64, {}),
    "regnet": ("regnetx_002", 32, {}),
    "repghost": ("repghostnet_050", 32, {"drop_rate": 0.0}),
    "repvit": ("repvit_m0_9", 64, {}),
    "res2net": ("res2net50_14w_8s", 64, {}),
    "resnest": ("resnest14d", 32, {}),
    "resnet": ("resnet18", 32, {}),
    "resnetv2": ("resnetv2_18", 32, {}),
    "rexnet": ("rexnet_100", 32, {"width_mult": 0.5, "drop_rate": 0.0}),
    "selecsls": ("selecsls42", 32, {}),
    "senet": ("legacy_seresnet18", 32, {}),
    "sequencer": ("sequencer2d_s", 56, {"layers": [1, 1, 1, 1], "embed_dims": [16, 16, 16, 16],
                                        "hidden_sizes": [8, 8, 8, 8]}),
    "shvit": ("shvit_s1", 128, {}),
    "sknet": ("skresnet18", 32, {}),
    "starnet": ("starnet_s050", 32, {}),
    "swiftformer": ("swiftformer_xs", 64, {}),
    "swin_transformer": ("swin_tiny_patch4_window7_224", 32, {"img_size": 32, "window_size": 4, "embed_dim": 16,
                                                              "depths": (2, 2), "num_heads": (2, 2)}),
    "swin_transformer_v2": ("swinv2_tiny_window8_256", 32, {"img_size": 32, "window_size": 4, "embed_dim": 16,
                                                            "depths": (2, 2), "num_heads": (2, 2)}),
    "swin_transformer_v2_cr": ("swinv2_cr_tiny_224", 64, {"img_size": 64, "window_size": 2, "embed_dim": 16,
                                                          "depths": (1, 1, 2, 1), "num_heads": (2, 2, 2, 2)}),
    "tiny_vit": ("tiny_vit_5m_224", 64, {}),
    "tnt": ("tnt_s_patch16_224", 32, {"img_size": 32, "depth": 4}),
    "tresnet": ("tresnet_m", 64, {}),
    "twins": ("twins_svt_small", 64, {"img_size": 64, "embed_dims": (16, 32, 32, 64), "depths": (1, 1, 1, 1),
                                      "num_heads": (1, 1, 1, 1)}),
    "vgg": ("vgg11_bn", 32, {"mlp_ratio": 0.01}),
    "visformer": ("visformer_tiny", 64, {"img_size": 64}),
    "vision_transformer": ("vit_tiny_patch16_224", 32, VIT),
    "vision_transformer_hybrid": ("vit_tiny_r_s16_p8_224", 64, {"img_size": 64, "embed_dim": 32, "depth": 4,
                                                                "num_heads": 2}),
    "vision_transformer_relpos": ("vit_relpos_small_patch16_224", 32, VIT),
    "vision_transformer_sam": ("samvit_base_patch16", 64, {"img_size": 64, "embed_dim": 32, "depth": 4,
                                                           "num_heads": 2, "global_attn_indexes": (1, 3)}),
    "vitamin": ("vitamin_small_224", 64, {"img_size": 64}),
    "volo": ("volo_d1_224", 64, {"img_size": 64}),
    "vovnet": ("ese_vovnet19b_slim", 32, {}),
    "xception": ("legacy_xception", 64, {}),
    "xception_aligned": ("xception41", 64, {}),
    "xcit": ("xcit_nano_12_p16_224", 32, VIT),
}  # fmt: skip


def images(size: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"x": torch.randn(4, 3, size, size), "criterion.labels": torch.randint(CLASSES, (4,))}


def family(name: str) -> Model:
    model, size, smaller = SMALL[name]
    return Model("timm", name, lambda: timm.create_model(model, num_classes=CLASSES, **smaller), images(size), scored)


def scored(output: Any, batch: Any) -> Tensor:
    """The loss of what a model returns, whose distilled ones have two heads in training."""
    if isinstance(output, tuple):
        return sum((labels(head, batch) for head in output), torch.zeros(())) / len(output)
    return labels(output, batch)


# The training script's idioms (train.py).


def vit(**options: Any) -> nn.Module:
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **VIT, **options)
    return model


def checkpointed() -> nn.Module:
    model: Any = vit()
    model.set_grad_checkpointing(True)
    return model


def mixed() -> dict[str, Tensor]:
    """A batch from timm's Mixup, as its loader gives it."""
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    x, target = mixup(torch.randn(4, 3, 32, 32), torch.randint(CLASSES, (4,)))
    return {"x": x, "criterion.target": target.float()}


def of_target(loss: nn.Module) -> Callable[[Any, Any], Tensor]:
    return lambda output, batch: loss(output, batch["criterion.target"])


def decayed(model: nn.Module) -> Optimizer:
    """Groups with a rate for each layer, which timm's schedulers scale by `lr_scale`."""
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    for group in optimizer.param_groups:
        group["lr"] *= group.get("lr_scale", 1.0)
    return optimizer


def lamb(model: nn.Module, **options: Any) -> Optimizer:
    return create_optimizer_v2(model, opt="lamb", lr=1e-3, weight_decay=0.05, **options)


OFF = "max_grad_norm=None"
UNCLIPPED = Remedy(OFF, OFF, {"optimizer": lambda model: lamb(model, max_grad_norm=None)})


class Distilled(nn.Module):
    """A student beside a frozen teacher, whose predictions it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = vit(), vit().requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x), taught


def distilling(output: Any, batch: Any) -> Tensor:
    student, teacher = (functional.log_softmax(logits / 2, -1) for logits in output)
    taught = functional.kl_div(student, teacher, reduction="batchmean", log_target=True) * 4
    return taught + labels(output[0], batch)


def idiom(
    name: str, build: Callable[[], nn.Module] = vit, batch: Any = None, loss: Any = labels, **given: Any
) -> Model:
    return Model("timm", f"step: {name}", build, batch or images(32), loss, **given)


def features() -> nn.Module:
    model: nn.Module = timm.create_model("convnext_atto", features_only=True, dims=(8, 16, 16, 32), depths=(1, 1, 2, 1))
    return model


def squared(output: Any, batch: Any) -> Tensor:
    return torch.stack([level.pow(2).mean() for level in output]).sum()


MODELS = [
    *(family(name) for name in SMALL),
    idiom("mixup, soft targets", batch=mixed, loss=of_target(SoftTargetCrossEntropy())),
    idiom("mixup, binary cross entropy", batch=mixed, loss=of_target(BinaryCrossEntropy())),
    idiom(
        "label smoothing", loss=lambda output, batch: LabelSmoothingCrossEntropy(0.1)(output, batch["criterion.labels"])
    ),
    idiom(
        "augmentation splits, JSD",
        batch=lambda: images(32)() | {"criterion.labels": torch.randint(CLASSES, (2,)).repeat(2)},
        loss=lambda output, batch: JsdCrossEntropy(num_splits=2)(output, batch["criterion.labels"]),
    ),
    idiom("layer decay", optimizer=decayed),
    idiom("lamb", optimizer=lamb, remedies=[UNCLIPPED]),
    idiom("activation checkpoints", checkpointed),
    idiom("distillation", Distilled, loss=distilling),
    idiom("features_only", features, images(64), squared),
    idiom("features_only resnet", lambda: timm.create_model("resnet18", features_only=True), images(64), squared),
]
APART: dict[str, str] = {}  # why a file has no entry


def every() -> set[str]:
    """The names of all files of timm.models that have models."""
    return set(timm.list_modules())
