"""diffusers: its transformers, UNets, autoencoders and ControlNets, and the steps of its training scripts."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers import DDPMScheduler
from diffusers.models.controlnets.multicontrolnet_union import MultiControlNetUnionModel
from diffusers.models.modeling_utils import ModelMixin
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPTextConfig, CLIPTextModel

from tests.packages.diffusers_data import TABLE
from tests.packages.model import Model, Remedy, cutting, returned

diffusers.utils.logging.set_verbosity_error()
SAMPLES, TEXT, SIZE, TOKENS = 4, 32, 16, 6  # features of the text, the size of the latents, tokens of the prompt
DTYPES = {"float": torch.float32, "bool": torch.bool, "int": torch.int64}
RESIDUALS = re.compile("ControlNet(Union)?Model")  # classes that return tensors to be added to those of another model
ONE_SAMPLE = (  # whose forwards take a single sample, or one sequence that all samples are packed into
    "AutoencoderKLAllegro",
    "AutoencoderKLHunyuanVideo15",
    "Cosmos3OmniTransformer",
)
CUTS = {  # where a model of one unit is cut in two, by the remedy of its refusal
    "Kandinsky6SRLatentUpscalerBank": ("_models.0.x2_branch.adapter",)
}


def made(how: Any) -> Any:
    """An input, of the data's description of it."""
    kind, *numbers = how
    if kind == "randn":
        return torch.randn(numbers[0])
    if kind in ("full", "fill"):
        return torch.full(numbers[1], numbers[0])
    if kind == "true":
        return torch.ones(numbers[0], dtype=torch.bool)
    if kind == "randint":
        return torch.randint(numbers[0], max(numbers[1], numbers[0] + 1), numbers[2])
    if kind == "arange":
        return torch.arange(numbers[0]).expand(numbers[1])
    if kind == "value":
        return torch.tensor(numbers[0], dtype=DTYPES[numbers[1]])
    if kind == "dict":
        return {key: made(item) for key, item in numbers[0].items()}
    if kind in ("list", "tuple"):
        return (tuple if kind == "tuple" else list)(made(item) for item in numbers[0])
    return numbers[0]


def sample_of(output: Any) -> Tensor:
    """What a model predicts: the first tensor that it returns."""
    if torch.is_tensor(output):
        return output
    if isinstance(output, list):
        return torch.stack([sample_of(item) for item in output])
    return sample_of(output[0])


def mse(output: Any, batch: Any) -> Tensor:
    """That of the training scripts, against the noise or the velocity: in fp32 at least."""
    predicted, target = sample_of(output), batch["criterion.target"]
    return functional.mse_loss(predicted.to(torch.promote_types(predicted.dtype, torch.float32)), target)


def of_table(name: str) -> Model:
    class_name, config, inputs, shape = TABLE[name]

    def batch() -> dict[str, Any]:
        given = {key: made(how) for key, how in inputs.items()}
        return given | {"criterion.target": torch.randn(shape)}

    def build() -> nn.Module:
        model: nn.Module = getattr(diffusers, class_name)(**config)
        for name, parameter in model.named_parameters():
            if name == "pad_token":  # which the class does not initialize
                nn.init.zeros_(parameter)
        return Residuals(model, return_dict=False) if RESIDUALS.search(class_name) else model

    return Model("diffusers", name, build, batch, mse, options=options_of(name, batch()), most=2 if name in CUTS else 3)


def predicts(name: str, build: Callable[[], nn.Module], inputs: Callable[[], dict[str, Any]], shape: Any) -> Model:
    """A model that is trained to predict something of this shape."""
    batch = lambda: inputs() | {"criterion.target": torch.randn(shape)}  # noqa: E731
    return Model("diffusers", name, build, batch, mse, options=options_of(name, batch()))


def options_of(name: str, batch: dict[str, Any]) -> dict[str, Any]:
    """What says that inputs without samples, such as positions, belong to every sample."""
    if name in ONE_SAMPLE:
        return {"num_microbatches": 1}
    if name in CUTS:
        return {"partition": list(CUTS[name])}
    names = [name for name, value in batch.items() if torch.is_tensor(value) and value.ndim and len(value) != SAMPLES]
    return {"batch_dims": dict.fromkeys(names)} if names else {}


# UNets and what is beside them.

BLOCKS: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "in_channels": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "cross_attention_dim": TEXT,
    "norm_num_groups": 2,
    "attention_head_dim": (2, 4),
}
UP = {"sample_size": SIZE, "out_channels": 4, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
SDXL = {
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "transformer_layers_per_block": (1, 2),
    "projection_class_embeddings_input_dim": 80,
}
LATENTS = (4, 4, SIZE, SIZE)
SD3: dict[str, Any] = {
    "sample_size": SIZE,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": TEXT,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 16,
    "out_channels": 4,
}
FLUX: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": TEXT,
    "pooled_projection_dim": TEXT,
    "axes_dims_rope": [4, 4, 8],
}
WAN: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": TEXT,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 3,
    "rope_max_seq_len": 32,
}


def noisy() -> dict[str, Tensor]:
    return {
        "sample": torch.randn(LATENTS),
        "timestep": torch.randint(1000, (4,)),
        "encoder_hidden_states": torch.randn(4, TOKENS, TEXT),
    }


def of_sdxl() -> dict[str, Any]:
    """What SDXL is given besides: the pooled text and the sizes, in a dict of their own."""
    added = {"text_embeds": torch.randn(4, 32), "time_ids": torch.randn(4, 6)}
    return noisy() | {"added_cond_kwargs": added}


def of_sd3() -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(LATENTS),
        "encoder_hidden_states": torch.randn(4, TOKENS, TEXT),
        "pooled_projections": torch.randn(4, 16),
        "timestep": torch.randint(1000, (4,)),
    }


def of_flux() -> dict[str, Tensor]:
    """Packed latents, with positions that are the same for every sample."""
    return {
        "hidden_states": torch.randn(4, 16, 16),
        "encoder_hidden_states": torch.randn(4, TOKENS, TEXT),
        "pooled_projections": torch.randn(4, TEXT),
        "timestep": torch.rand(4),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
        "txt_ids": torch.zeros(TOKENS, 3),
        "guidance": torch.full((4,), 3.5),
    }


class Residuals(nn.Module):
    """A ControlNet or an adapter alone: its residuals, on which the loss is taken."""

    def __init__(self, net: nn.Module, **options: Any) -> None:
        super().__init__()
        self.net, self.options = net, options

    def forward(self, **inputs: Any) -> Tensor:
        residuals = tensors_of(self.net(**inputs, **self.options))
        return torch.stack([residual.flatten(1).mean(1) for residual in residuals], 1)


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors of an output, in its order."""
    if torch.is_tensor(output):
        return [output]
    items = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


def controlnet(
    name: str, build: Callable[[], nn.Module], inputs: Callable[[], dict[str, Any]], count: int, *remedies: Remedy
) -> Model:
    found = predicts(name, lambda: Residuals(build(), return_dict=False), inputs, (4, count))
    return replace(found, most=2 if remedies else 3, remedies=remedies)


def conditioned(inputs: Callable[[], dict[str, Any]], *shape: int) -> Callable[[], dict[str, Any]]:
    return lambda: inputs() | {"controlnet_cond": torch.randn(4, *shape)}


def others() -> list[Model]:
    unet = diffusers.UNet2DConditionModel
    image = (3, 2 * SIZE, 2 * SIZE)
    net = {"conditioning_embedding_out_channels": (8, 8)}
    return [
        predicts("UNet2DConditionModel", lambda: unet(**BLOCKS, **UP), noisy, LATENTS),
        predicts("UNet2DConditionModel of SDXL", lambda: unet(**BLOCKS, **UP, **SDXL), of_sdxl, LATENTS),
        controlnet(
            "ControlNetModel", lambda: diffusers.ControlNetModel(**BLOCKS, **net), conditioned(noisy, *image), 5
        ),
        controlnet(
            "ControlNetModel of SDXL",
            lambda: diffusers.ControlNetModel(**BLOCKS, **net, **SDXL),
            conditioned(of_sdxl, *image),
            5,
        ),
        controlnet(
            "SD3ControlNetModel", lambda: diffusers.SD3ControlNetModel(**SD3), conditioned(of_sd3, 4, SIZE, SIZE), 4
        ),
        controlnet(
            "FluxControlNetModel",
            lambda: diffusers.FluxControlNetModel(**FLUX, guidance_embeds=True),
            conditioned(of_flux, 16, 16),
            4,
        ),
        predicts(
            "StableAudioDiTModel",
            lambda: diffusers.StableAudioDiTModel(
                sample_size=4,
                in_channels=3,
                num_layers=3,
                attention_head_dim=4,
                num_attention_heads=2,
                num_key_value_attention_heads=2,
                out_channels=3,
                cross_attention_dim=4,
                time_proj_dim=8,
                global_states_input_dim=8,
                cross_attention_input_dim=4,
            ),
            lambda: {
                "hidden_states": torch.randn(4, 3, 4),
                "timestep": torch.randint(1000, (4,)),
                "encoder_hidden_states": torch.randn(4, TOKENS, 4),
                "global_hidden_states": torch.randn(4, 1, 8),
            },
            (4, 3, 4),
        ),
        predicts(
            "GlmImageTransformer2DModel",
            lambda: diffusers.GlmImageTransformer2DModel(
                patch_size=2,
                in_channels=4,
                out_channels=4,
                num_layers=3,
                attention_head_dim=8,
                num_attention_heads=2,
                text_embed_dim=TEXT,
                time_embed_dim=16,
                condition_dim=8,
                prior_vq_quantizer_codebook_size=64,
            ),
            lambda: {
                "hidden_states": torch.randn(4, 4, 8, 8),
                "encoder_hidden_states": torch.randn(4, TOKENS, TEXT),
                "prior_token_id": torch.randint(64, (4, 16)),
                "prior_token_drop": torch.zeros(4, dtype=torch.bool),
                "timestep": torch.randint(1000, (4,)),
                "target_size": torch.full((4, 2), 8.0),
                "crop_coords": torch.zeros(4, 2),
            },
            (4, 4, 8, 8),
        ),
        predicts(
            "HiDreamImageTransformer2DModel",
            lambda: diffusers.HiDreamImageTransformer2DModel(
                patch_size=2,
                in_channels=4,
                out_channels=4,
                num_layers=2,
                num_single_layers=2,
                attention_head_dim=8,
                num_attention_heads=4,
                caption_channels=[8, 4],
                text_emb_dim=8,
                num_routed_experts=2,
                num_activated_experts=2,
                axes_dims_rope=(4, 2, 2),
                max_resolution=(32, 32),
                llama_layers=(0, 1, 0, 1),
                force_inference_output=True,
            ),
            lambda: {
                "hidden_states": torch.randn(4, 4, 32, 32),
                "encoder_hidden_states_t5": torch.randn(4, 8, 8),
                "encoder_hidden_states_llama3": torch.randn(2, 4, 8, 4),
                "pooled_embeds": torch.randn(4, 8),
                "timesteps": torch.randint(1000, (4,)),
            },
            (4, 4, 32, 32),
        ),
    ]


# Models that hold others, or share the modules of others.


class OfFrames(nn.Module):
    """A ControlNet of videos: the text is repeated for each frame, and the residuals are averaged over the frames."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = Residuals(net, return_dict=False)

    def forward(self, sample: Tensor, encoder_hidden_states: Tensor, **inputs: Any) -> Tensor:
        frames = sample.shape[2]
        text = encoder_hidden_states.repeat_interleave(frames, 0)
        residuals: Tensor = self.net(sample=sample, encoder_hidden_states=text, **inputs)
        return residuals.unflatten(0, (-1, frames)).mean(1)


def adapter() -> nn.Module:
    return diffusers.T2IAdapter(channels=[8, 16, 16], num_res_blocks=1, downscale_factor=4)


def small(name: str) -> Any:
    """The class of a table's entry, made as there."""
    class_name, config, _, _ = TABLE[name]
    return getattr(diffusers, class_name)(**config)


def inputs_of(name: str, *without: str) -> dict[str, Any]:
    return {key: made(how) for key, how in TABLE[name][2].items() if key not in without}


def twice(inputs: Callable[[], dict[str, Any]], *shape: int) -> Callable[[], dict[str, Any]]:
    """The inputs of two ControlNets, each of which has a condition of its own."""
    return lambda: (
        inputs() | {"controlnet_cond": [torch.randn(4, *shape) for _ in range(2)]} | {"conditioning_scale": [1.0, 0.5]}
    )


def allegro() -> nn.Module:
    """The autoencoder encodes in tiles only; here there is one tile, as large as the video."""
    model: Any = diffusers.AutoencoderKLAllegro(
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2, sample_size=16
    )
    model.enable_tiling()
    model.kernel = model.stride = (8, 16, 16)
    model.tile_overlap_t = model.tile_overlap_h = model.tile_overlap_w = 0
    return model


def of_z_image() -> nn.Module:
    """A ControlNet that begins with the modules of the transformer which it is for."""
    transformer = small("ZImageTransformer2DModel")
    nn.init.zeros_(transformer.x_pad_token)  # which the class does not initialize
    nn.init.zeros_(transformer.cap_pad_token)
    net: Any = diffusers.ZImageControlNetModel(
        control_layers_places=[0, 1, 2], control_in_dim=16, dim=16, n_refiner_layers=1, n_heads=1, n_kv_heads=2
    )
    net.gradient_checkpointing = False  # which its forward reads, and the class does not set
    shared_with: nn.Module = diffusers.ZImageControlNetModel.from_transformer(net, transformer)
    return shared_with


def composed() -> list[Model]:
    image = (3, 2 * SIZE, 2 * SIZE)
    net = {"conditioning_embedding_out_channels": (8, 8)}
    union = lambda: small("ControlNetUnionModel")  # noqa: E731
    modes = lambda: {"controlnet_mode": [torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.long)]}  # noqa: E731
    kinds = lambda: {"control_type": torch.ones(4, 6), "control_type_idx": [0, 1]}  # noqa: E731
    return [
        predicts("AutoencoderKLAllegro", allegro, lambda: {"sample": torch.randn(1, 3, 8, 16, 16)}, (1, 8, 3, 16, 16)),
        predicts("T2IAdapter", lambda: Residuals(adapter()), lambda: {"x": torch.randn(4, *image)}, (4, 3)),
        predicts(
            "MultiAdapter",
            lambda: Residuals(diffusers.MultiAdapter([adapter(), adapter()])),
            lambda: {"xs": [torch.randn(4, *image) for _ in range(2)]},
            (4, 3),
        ),
        predicts(
            "SparseControlNetModel",
            lambda: OfFrames(
                diffusers.SparseControlNetModel(
                    block_out_channels=(8, 8),
                    layers_per_block=1,
                    conditioning_channels=3,
                    down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
                    cross_attention_dim=8,
                    conditioning_embedding_out_channels=(8, 8),
                    norm_num_groups=1,
                    attention_head_dim=2,
                    motion_num_attention_heads=2,
                    use_simplified_condition_embedding=False,
                )
            ),
            lambda: {
                "sample": torch.randn(4, 4, 2, SIZE, SIZE),
                "timestep": torch.randint(1000, (4,)),
                "encoder_hidden_states": torch.randn(4, TOKENS, 8),
                "controlnet_cond": torch.randn(4, 3, 2, 2 * SIZE, 2 * SIZE),
                "conditioning_mask": torch.ones(4, 1, 2, 2 * SIZE, 2 * SIZE),
            },
            (4, 5),
        ),
        predicts(
            "ZImageControlNetModel",
            lambda: Residuals(of_z_image()),
            lambda: (
                inputs_of("ZImageTransformer2DModel")
                | {"control_context": [torch.randn(16, 1, 16, 16) for _ in range(4)]}
            ),
            (4, 3),
        ),
        controlnet(
            "MultiControlNetModel",
            lambda: diffusers.MultiControlNetModel([diffusers.ControlNetModel(**BLOCKS, **net) for _ in range(2)]),
            twice(noisy, *image),
            5,
        ),
        controlnet(
            "ControlNetUnionModel of two conditions",
            union,
            lambda: noisy() | kinds() | {"controlnet_cond": [torch.randn(4, *image) for _ in range(2)]},
            5,
        ),
        controlnet(
            "MultiControlNetUnionModel",
            lambda: MultiControlNetUnionModel([union(), union()]),
            lambda: (
                noisy()
                | {"controlnet_cond": [[torch.randn(4, *image)] for _ in range(2)]}
                | {"control_type": [torch.ones(4, 6) for _ in range(2)], "control_type_idx": [[0], [1]]}
                | {"conditioning_scale": [1.0, 0.5]}
            ),
            5,
        ),
        controlnet(
            "SD3MultiControlNetModel",
            lambda: diffusers.SD3MultiControlNetModel([diffusers.SD3ControlNetModel(**SD3) for _ in range(2)]),
            twice(of_sd3, 4, SIZE, SIZE),
            4,
        ),
        controlnet(
            "FluxMultiControlNetModel",
            lambda: diffusers.FluxMultiControlNetModel(
                [diffusers.FluxControlNetModel(**FLUX, guidance_embeds=True, num_mode=2) for _ in range(2)]
            ),
            twice(lambda: of_flux() | modes(), 16, 16),
            4,
        ),
        controlnet(
            "QwenImageMultiControlNetModel",
            lambda: diffusers.QwenImageMultiControlNetModel([small("QwenImageControlNetModel")]),
            twice(lambda: inputs_of("QwenImageControlNetModel", "controlnet_cond", "conditioning_scale"), 16, 16),
            3,
            cutting("net.nets.0.transformer_blocks.0"),
        ),
        controlnet(
            "HunyuanDiT2DMultiControlNetModel",
            lambda: diffusers.HunyuanDiT2DMultiControlNetModel(
                [small("HunyuanDiT2DControlNetModel") for _ in range(2)]
            ),
            twice(lambda: inputs_of("HunyuanDiT2DControlNetModel", "controlnet_cond"), 4, SIZE, SIZE),
            3,
        ),
    ]


# The steps of the training scripts: frozen parts, and what is trained.

BETAS = DDPMScheduler().alphas_cumprod


class Latents(nn.Module):
    """A frozen autoencoder and text encoder, and what denoises the latents of the one by the text of the other."""

    def __init__(self, denoiser: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vae = diffusers.AutoencoderKL(
            block_out_channels=(8, 16),
            norm_num_groups=2,
            latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        )
        config = CLIPTextConfig(
            vocab_size=100, hidden_size=TEXT, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
        self.text_encoder = CLIPTextModel(config)
        self.vae.requires_grad_(False).eval()
        self.text_encoder.requires_grad_(False).eval()
        self.denoiser = denoiser

    def train(self, mode: bool = True) -> nn.Module:
        """Only the denoiser trains."""
        self.training = mode
        self.denoiser.train(mode)
        return self

    def encoded(self, pixels: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        latents = self.vae.encode(pixels).latent_dist.mode() * 0.18215
        text = self.text_encoder(input_ids)
        return latents, text.last_hidden_state, text.pooler_output


class TextToImage(Latents):
    """train_text_to_image.py: noise of DDPM, predicted by a UNet."""

    def forward(self, pixels: Tensor, input_ids: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        latents, text, _ = self.encoded(pixels, input_ids)
        share = BETAS[timesteps].to(latents.dtype).view(-1, 1, 1, 1)
        noisy = share.sqrt() * latents + (1 - share).sqrt() * noise
        predicted = self.denoiser(noisy, timesteps, text).sample
        return functional.mse_loss(predicted.float(), noise.float())


class TextToImageSDXL(Latents):
    """train_text_to_image_sdxl.py, and train_text_to_image_lora_sdxl.py: with the pooled text and the sizes."""

    def forward(self, pixels: Tensor, input_ids: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        latents, text, pooled = self.encoded(pixels, input_ids)
        share = BETAS[timesteps].to(latents.dtype).view(-1, 1, 1, 1)
        noisy = share.sqrt() * latents + (1 - share).sqrt() * noise
        sizes = torch.tensor([32.0, 32.0, 0.0, 0.0, 32.0, 32.0]).repeat(len(pixels), 1).to(latents.dtype)
        added = {"text_embeds": pooled, "time_ids": sizes}
        predicted = self.denoiser(noisy, timesteps, text, added_cond_kwargs=added).sample
        return functional.mse_loss(predicted.float(), noise.float())


class FlowMatching(Latents):
    """train_dreambooth_lora_sd3.py: the velocity between noise and latents, weighed."""

    def forward(self, pixels: Tensor, input_ids: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        latents, text, pooled = self.encoded(pixels, input_ids)
        sigma = (timesteps / 1000).to(latents.dtype).view(-1, 1, 1, 1)
        noisy = (1 - sigma) * latents + sigma * noise
        predicted = self.denoiser(
            hidden_states=noisy,
            timestep=timesteps,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        predicted = predicted * -sigma + noisy
        weighed = sigma**-2 * (predicted - latents) ** 2
        return weighed.reshape(len(pixels), -1).mean(1).mean()


class FluxStep(Latents):
    """train_dreambooth_lora_flux.py: packed latents, positions, guidance."""

    def forward(self, pixels: Tensor, input_ids: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        latents, text, pooled = self.encoded(pixels, input_ids)
        sigma = (timesteps / 1000).to(latents.dtype).view(-1, 1, 1, 1)
        noisy = (1 - sigma) * latents + sigma * noise
        b, c, h, w = noisy.shape
        packed = noisy.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h // 2 * (w // 2), c * 4)
        rows, columns = torch.meshgrid(torch.arange(h // 2), torch.arange(w // 2), indexing="ij")
        positions = torch.stack([torch.zeros_like(rows), rows, columns], -1).view(-1, 3).to(latents.dtype)
        predicted = self.denoiser(
            hidden_states=packed,
            timestep=timesteps / 1000,
            guidance=torch.full((b,), 3.5, dtype=latents.dtype),
            pooled_projections=pooled,
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3),
            img_ids=positions,
            return_dict=False,
        )[0]
        predicted = predicted.view(b, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, c, h, w)
        target = noise - latents
        return ((predicted.float() - target.float()) ** 2).reshape(b, -1).mean(1).mean()


class ControlNetStep(Latents):
    """train_controlnet.py: a frozen UNet, and the copy of its encoder that learns the condition."""

    def __init__(self) -> None:
        unet = diffusers.UNet2DConditionModel(**BLOCKS, **UP).requires_grad_(False)
        super().__init__(unet)
        self.controlnet = diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 8))
        self.controlnet.requires_grad_(True)

    def forward(self, pixels: Tensor, input_ids: Tensor, condition: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        latents, text, _ = self.encoded(pixels, input_ids)
        share = BETAS[timesteps].to(latents.dtype).view(-1, 1, 1, 1)
        noisy = share.sqrt() * latents + (1 - share).sqrt() * noise
        down, mid = self.controlnet(noisy, timesteps, text, controlnet_cond=condition, return_dict=False)
        predicted = self.denoiser(
            noisy, timesteps, text, down_block_additional_residuals=down, mid_block_additional_residual=mid
        ).sample
        return functional.mse_loss(predicted.float(), noise.float())


class WanStep(nn.Module):
    """Text to video with Wan: the velocity of latents that were computed before."""

    def __init__(self, denoiser: nn.Module) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(self, latents: Tensor, text: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        sigma = (timesteps / 1000).to(latents.dtype).view(-1, 1, 1, 1, 1)
        noisy = (1 - sigma) * latents + sigma * noise
        predicted = self.denoiser(noisy, timesteps, text, return_dict=False)[0]
        return functional.mse_loss(predicted.float(), (noise - latents).float())


def lora(model: Any, *layers: str) -> nn.Module:
    """Adapters of peft on a frozen model, as in the scripts whose names have lora."""
    model.requires_grad_(False)
    targets = list(layers) or ["to_k", "to_q", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=2, lora_alpha=2, init_lora_weights="gaussian", target_modules=targets))
    return model


def pixels() -> dict[str, Tensor]:
    return {
        "pixels": torch.randn(4, 3, 2 * SIZE, 2 * SIZE),
        "input_ids": torch.randint(100, (4, TOKENS)),
        "noise": torch.randn(LATENTS),
        "timesteps": torch.randint(1, 1000, (4,)),
    }


def videos() -> dict[str, Tensor]:
    return {
        "latents": torch.randn(4, 4, 2, 8, 8),
        "text": torch.randn(4, TOKENS, TEXT),
        "noise": torch.randn(4, 4, 2, 8, 8),
        "timesteps": torch.randint(1, 1000, (4,)),
    }


def step(name: str, build: Callable[[], nn.Module], batch: Callable[[], dict[str, Tensor]] = pixels) -> Model:
    """One of the scripts' steps, whose loss the model returns."""
    return Model("diffusers", name, build, batch, returned)


def trained() -> list[Model]:
    unet = partial(diffusers.UNet2DConditionModel, **BLOCKS, **UP)
    sdxl = partial(
        diffusers.UNet2DConditionModel, **BLOCKS, **UP, **(SDXL | {"projection_class_embeddings_input_dim": 80})
    )
    sd3 = partial(diffusers.SD3Transformer2DModel, **(SD3 | {"pooled_projection_dim": TEXT}))
    flux = partial(diffusers.FluxTransformer2DModel, **FLUX, guidance_embeds=True)
    wan = partial(diffusers.WanTransformer3DModel, **WAN)
    return [
        step("step: text_to_image", lambda: TextToImage(unet())),
        step("step: text_to_image, LoRA", lambda: TextToImage(lora(unet()))),
        step("step: text_to_image SDXL", lambda: TextToImageSDXL(sdxl())),
        step("step: text_to_image SDXL, LoRA", lambda: TextToImageSDXL(lora(sdxl()))),
        step("step: dreambooth SD3", lambda: FlowMatching(sd3())),
        step("step: dreambooth SD3, LoRA", lambda: FlowMatching(lora(sd3()))),
        step("step: dreambooth Flux", lambda: FluxStep(flux())),
        step("step: dreambooth Flux, LoRA", lambda: FluxStep(lora(flux()))),
        step("step: Wan", lambda: WanStep(wan()), videos),
        step("step: Wan, LoRA", lambda: WanStep(lora(wan())), videos),
        step("step: ControlNet", ControlNetStep, lambda: pixels() | {"condition": torch.rand(4, 3, 32, 32)}),
    ]


# Why a class has no entry.
FLEX = "attends by FlexAttention, which has no backward on a CPU"
APART = {
    "AnyFlowFARTransformer3DModel": FLEX,
    "ConsistencyDecoderVAE": "draws noise of its own in the forward",
    "ControlNetXSAdapter": "cannot be called: UNetControlNetXSModel is made of it, which has an entry",
    "Kandinsky6SRTransformer3DModel": FLEX,
    "LTX2VideoDiffusionDecoderModel": FLEX,
    "LegacyModelMixin": "the base of other classes, without a forward",
    "MiniMaxMusic3ConditionEncoder": "has one layer, which cannot be split",
    "MotionAdapter": "its forward does nothing: UNetMotionModel is made of it, which has an entry",
    "WanAnimate2Transformer3DModel": FLEX,
}
MODELS = [*(of_table(name) for name in TABLE if name not in APART), *others(), *composed(), *trained()]


def every() -> set[str]:
    """The names of all models of diffusers.models."""
    for module in pkgutil.walk_packages(diffusers.models.__path__, "diffusers.models."):
        importlib.import_module(module.name)
    return {kind.__name__ for kind in below(ModelMixin) if kind.__module__.startswith("diffusers.models.")}


def below(kind: type) -> Iterator[type]:
    for other in kind.__subclasses__():
        yield other
        yield from below(other)
