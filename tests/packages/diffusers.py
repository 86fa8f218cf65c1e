"""diffusers: its transformers, UNets, autoencoders and ControlNets, and the steps of its training scripts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers import DDPMScheduler
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPTextConfig, CLIPTextModel

from tests.packages.diffusers_data import TABLE
from tests.packages.model import Model, returned

diffusers.utils.logging.set_verbosity_error()
SAMPLES, TEXT, SIZE, TOKENS = 4, 32, 16, 6  # features of the text, the size of the latents, tokens of the prompt
DTYPES = {"float": torch.float32, "bool": torch.bool, "int": torch.int64}


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
    """That of the training scripts, against the noise or the velocity."""
    return functional.mse_loss(sample_of(output).float(), batch["criterion.target"].float())


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
        return Residuals(model) if "ControlNetModel" in class_name else model

    return Model("diffusers", name, build, batch, mse, options=shared(batch()))


def predicts(name: str, build: Callable[[], nn.Module], inputs: Callable[[], dict[str, Any]], shape: Any) -> Model:
    """A model that is trained to predict something of this shape."""
    batch = lambda: inputs() | {"criterion.target": torch.randn(shape)}  # noqa: E731
    return Model("diffusers", name, build, batch, mse, options=shared(batch()))


def shared(batch: dict[str, Any]) -> dict[str, Any]:
    """What says that inputs without samples, such as positions, belong to every sample."""
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
    """A ControlNet alone: its residuals, on which the loss is taken."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **inputs: Any) -> Tensor:
        residuals: list[Tensor] = []
        for value in self.net(**inputs, return_dict=False):
            residuals += value if isinstance(value, (list, tuple)) else [value] if value is not None else []
        return torch.stack([residual.flatten(1).mean(1) for residual in residuals], 1)


def controlnet(name: str, build: Callable[[], nn.Module], inputs: Callable[[], dict[str, Any]], count: int) -> Model:
    return predicts(name, lambda: Residuals(build()), inputs, (4, count))


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


DRAWS = ("ConsistencyDecoderVAE",)  # noise of its own in the forward
MODELS = [*(of_table(name) for name in TABLE if name not in DRAWS), *others(), *trained()]
