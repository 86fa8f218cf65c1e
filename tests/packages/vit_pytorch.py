"""vit-pytorch: one model of each of its files that classifies images."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.packages.model import Model, Remedy, returned

VIT: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 4, "heads": 2,
                       "mlp_dim": 64}  # fmt: skip
HEAD = {"dim_head": 16}
SMALL: dict[str, tuple[str, int, dict[str, Any]]] = {
    "vit": ("ViT", 32, VIT | HEAD),
    "simple_vit": ("SimpleViT", 32, VIT | HEAD),
    "simple_vit_with_register_tokens": ("SimpleViT", 32, VIT | HEAD),
    "simple_vit_with_qk_norm": ("SimpleViT", 32, VIT | HEAD),
    "simple_vit_with_value_residual": ("SimpleViT", 32, VIT | HEAD),
    "simple_vit_with_hyper_connections": ("SimpleViT", 32, VIT | HEAD | {"num_residual_streams": 2}),
    "simple_vit_with_fft": ("SimpleViT", 32, VIT | HEAD | {"freq_patch_size": 8}),
    "normalized_vit": ("nViT", 32, VIT | HEAD),
    "deepvit": ("DeepViT", 32, VIT | HEAD),
    "parallel_vit": ("ViT", 32, VIT | HEAD | {"num_parallel_branches": 2}),
    "learnable_memory_vit": ("ViT", 32, VIT | HEAD),
    "vit_for_small_dataset": ("ViT", 32, VIT | HEAD),
    "vit_with_patch_merger": ("ViT", 32, VIT | HEAD | {"patch_merge_layer": 2, "patch_merge_num_tokens": 4}),
    "vit_with_decorr": ("ViT", 32, VIT | HEAD),
    "vit_with_keel_post_ln": ("ViT", 32, VIT | HEAD),
    "rvt": ("RvT", 32, VIT | HEAD),
    "cait": ("CaiT", 32, VIT | HEAD | {"cls_depth": 2}),
    "xcit": ("XCiT", 32, VIT | HEAD | {"cls_depth": 2}),
    "pit": ("PiT", 32, VIT | HEAD | {"patch_size": 4, "depth": (2, 1, 1)}),
    "jumbo_vit": ("JumboViT", 32, VIT | HEAD | {"jumbo_cls_k": 2, "jumbo_ff_mult": 2}),
    "look_vit": ("LookViT", 32, {"image_size": 32, "num_classes": 10, "dim": 32, "depth": 3, "patch_size": 8,
                                 "heads": 2, "dim_head": 16, "highres_patch_size": 4, "cross_attn_heads": 2}),
    "cross_vit": (
        "CrossViT",
        32,
        {"image_size": 32, "num_classes": 10, "depth": 2, "sm_dim": 16, "lg_dim": 32, "sm_patch_size": 4,
         "sm_enc_depth": 1, "sm_enc_heads": 2, "sm_enc_mlp_dim": 32, "lg_patch_size": 8, "lg_enc_depth": 2,
         "lg_enc_heads": 2, "lg_enc_mlp_dim": 32, "cross_attn_depth": 1, "cross_attn_heads": 2},
    ),
    "cct": ("CCT", 32, {"img_size": 32, "embedding_dim": 32, "num_layers": 4, "num_heads": 2, "num_classes": 10,
                        "mlp_ratio": 2.0, "n_conv_layers": 1, "kernel_size": 7, "stride": 2, "padding": 3,
                        "pooling_kernel_size": 3, "pooling_stride": 2, "pooling_padding": 1}),
    "levit": ("LeViT", 64, {"image_size": 64, "num_classes": 10, "stages": 3, "dim": (16, 24, 32), "depth": 2,
                            "heads": (2, 3, 4), "mlp_mult": 2}),
    "cvt": ("CvT", 64, {"num_classes": 10, "s1_emb_dim": 16, "s2_emb_dim": 32, "s3_emb_dim": 48, "s3_depth": 2}),
    "regionvit": ("RegionViT", 112, {"dim": (8, 16, 16, 32), "depth": (1, 1, 2, 1), "num_classes": 10}),
    "scalable_vit": ("ScalableViT", 64, {"num_classes": 10, "dim": 16, "heads": (1, 1, 2, 2), "depth": (1, 1, 2, 1),
                                         "ssa_dim_key": 8, "reduction_factor": (4, 2, 2, 1),
                                         "window_size": (4, 4, 2, 2)}),
    "sep_vit": ("SepViT", 224, {"num_classes": 10, "dim": 8, "dim_head": 8, "heads": (1, 1, 2, 2),
                                "depth": (1, 1, 2, 1), "window_size": 7}),
    "max_vit": ("MaxViT", 64, {"num_classes": 10, "dim_conv_stem": 16, "dim": 16, "dim_head": 8, "depth": (1, 2),
                               "window_size": 8}),
    "nest": ("NesT", 32, {"image_size": 32, "patch_size": 4, "dim": 16, "heads": 2, "num_hierarchies": 2,
                          "block_repeats": (2, 2), "num_classes": 10}),
    "mobile_vit": ("MobileViT", 64, {"image_size": (64, 64), "dims": [16, 24, 32],
                                     "channels": [8, 8, 16, 16, 16, 16, 24, 24, 32, 32, 64], "num_classes": 10}),
}  # fmt: skip


def images(size: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"img": torch.randn(4, 3, size, size), "criterion.labels": torch.randint(10, (4,))}


class Positional(nn.Module):
    """Called with a name of its own for the images, which the files do not share."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, img: Tensor) -> Tensor:
        output = self.model(img)
        return output[0] if isinstance(output, tuple) else output


def classifier(file: str) -> Model:
    class_name, size, options = SMALL[file]

    def build() -> nn.Module:
        made: Any = getattr(importlib.import_module(f"vit_pytorch.{file}"), class_name)
        return Positional(made(**options))

    return Model("vit-pytorch", file, build, images(size))


def sampled_alike(shape: Any, device: Any, dtype: torch.dtype, eps: float = 1e-6) -> Tensor:
    """Noise of adaptive token sampling that is the same for every sample and length, in place of a draw."""
    noise = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)).clamp(eps, 1 - eps).log().neg().log().neg()
    return noise[: shape[1], : shape[2]].expand(shape).to(dtype)


def sampling() -> nn.Module:
    file = importlib.import_module("vit_pytorch.ats_vit")
    file.sample_gumbel = sampled_alike  # type: ignore[attr-defined]
    return Positional(file.ViT(**VIT, **HEAD, max_tokens_per_depth=(16, 12, 8, 8)))


class Distilled(nn.Module):
    """The wrapper that distills a frozen teacher, whose loss it returns."""

    def __init__(self) -> None:
        super().__init__()
        from vit_pytorch.distill import DistillableViT, DistillWrapper

        student = DistillableViT(**VIT, dim_head=16)
        teacher = Positional(importlib.import_module("vit_pytorch.vit").ViT(**VIT, dim_head=16)).requires_grad_(False)
        self.distiller = DistillWrapper(student=student, teacher=teacher, temperature=3, alpha=0.5, hard=False)

    def forward(self, img: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.distiller(img, labels)
        return loss


def labelled() -> dict[str, Tensor]:
    return {"img": torch.randn(4, 3, 32, 32), "labels": torch.randint(10, (4,))}


CUTS = ["model.to_patch_embedding", "model.transformer.layers.0.0"]
BEFORE = Remedy("cut before the unit", f"partition={CUTS}", {"options": {"partition": CUTS}})  # for three stages
MODELS = [
    *(classifier(file) for file in SMALL),
    Model("vit-pytorch", "ats_vit", sampling, images(32), remedies=[BEFORE]),
    Model("vit-pytorch", "distill", Distilled, labelled, returned),
]
