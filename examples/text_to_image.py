"""Text to image: LoRA teaches a small Flux the word "sks", with the training step of diffusers' Flux script.

First, a base model is trained once, with a frozen autoencoder and text encoder: it learns to draw circles, squares and
triangles in six colors. Then all of its weights are frozen, and peft adapters learn that a "sks" is a star, from stars
in four of the colors. The training data also contains the other shapes, so that the model does not forget them, as with
the script's prior preservation.

`python text_to_image.py --pp 2` starts its own processes, one per stage; under torchrun, the script is one of the
processes. It writes `images.png`, `training.png`, the base weights, and the adapters, which
`FluxPipeline.load_lora_weights` reads, to `text_to_image/` under --output.
"""

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from PIL import Image, ImageDraw
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import conv2d, conv_transpose2d, unfold
from torch.utils.data import Dataset

from pipeshard.launch import count, start
from pipeshard.schedule import SCHEDULES

COLORS = {
    "red": (220, 50, 47),
    "green": (60, 170, 60),
    "blue": (50, 90, 220),
    "yellow": (240, 200, 40),
    "purple": (150, 60, 190),
    "orange": (240, 130, 30),
}
SHAPES = ("circle", "square", "triangle", "sks")
WORDS = ("<end>", "a", *COLORS, *SHAPES)
PAPER = (245, 245, 240)
SIZE, PATCH, CHANNELS = 32, 4, 12  # pixels per image and per patch; latent values per patch
LATENTS = (CHANNELS, SIZE // PATCH, SIZE // PATCH)
TEXT = 32  # features per word
LAYERS = [  # the layers with adapters, as in the script
    *("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0"),
    *("attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out"),
    *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
]
DENOISING = 20  # denoising steps per image


class Caption(NamedTuple):
    """The content of an image, such as "a red circle"."""

    color: str
    shape: str

    def ids(self) -> Tensor:
        return torch.tensor([WORDS.index(word) for word in ("a", *self, "<end>")])


KNOWN = [Caption(color, shape) for color in COLORS for shape in SHAPES if shape != "sks"]
NEW = [Caption(color, "sks") for color in ("red", "blue", "yellow", "purple")]
UNSEEN = [Caption(color, "sks") for color in ("green", "orange")]


def main() -> int:
    args = parse(sys.argv[1:])
    if "RANK" not in os.environ:
        return start(args.pp * args.dp, quiet=True)
    run(args, Console(quiet=int(os.environ["RANK"]) > 0, highlight=False))
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=count, default=400, help="optimizer steps")
    add("--pp", type=count, default=2, help="pipeline stages, one process each")
    add("--dp", type=count, default=1, help="replicas of the pipeline, each with its own batch")
    add("--microbatches", type=count, default=4, help="microbatches that each batch is split into")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="order of forward and backward passes")
    add("--batch-size", type=count, default=16, help="samples in a batch")
    add("--lr", type=float, default=2e-3, help="highest learning rate")
    add("--rank", type=count, default=16, help="rank of the adapters")
    add("--base-steps", type=count, default=800, help="optimizer steps for the base model")
    add("--output", type=Path, default=Path("outputs"), help="folder for all output")
    args = parser.parse_args(arguments)
    if find_spec("diffusers") is None:
        parser.error("this example needs a package: pip install diffusers")
    if args.microbatches > args.batch_size:
        parser.error(f"argument --microbatches: {args.microbatches} is more than the batch's {args.batch_size} samples")
    return args


def run(args: argparse.Namespace, console: Console) -> None:
    # These imports take seconds, so the flags are checked before them.
    from diffusers import FluxPipeline
    from peft import LoraConfig, get_peft_model_state_dict

    from pipeshard.distributed.mesh import backend_here

    dist.init_process_group(backend_here())
    torch.manual_seed(0)
    folder = args.output / "text_to_image"
    model = based(args, console, folder / f"base-{args.base_steps}.pt")
    shown = [*KNOWN[:2], *NEW[:3], *UNSEEN]
    before = imagined(model, shown)

    model.requires_grad_(False)
    model.transformer.add_adapter(
        LoraConfig(r=args.rank, lora_alpha=args.rank, init_lora_weights="gaussian", target_modules=LAYERS)
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    console.print(f"adapters: {trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters")
    model, losses = train(args, console, model, [*KNOWN, *8 * NEW], args.steps)
    dist.destroy_process_group()
    if console.quiet:
        return
    FluxPipeline.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(model.transformer))
    after = imagined(model, shown)
    show(shown, {"the base": before, f"after {args.steps} steps": after}, folder / "images.png")
    draw(losses, folder / "training.png")
    few = min(20, len(losses))
    console.print(
        f"loss of the adapters: {mean(losses[:few]):.3f} in the first {few} steps, {mean(losses[-few:]):.3f} in the "
        "last",
        soft_wrap=True,
    )
    console.print(f"wrote {', '.join(sorted(str(path) for path in folder.iterdir()))}", soft_wrap=True)


def based(args: argparse.Namespace, console: Console, path: Path) -> "Step":
    """Return the model that draws circles, squares and triangles: load it from `path` or, if the file is missing, train
    and save it."""
    model = Step()
    if path.exists():
        model.load_state_dict(torch.load(path))
        return model
    console.print(f"training the base on circles, squares and triangles: {args.base_steps} steps, saved in {path}")
    model, _ = train(args, console, model, KNOWN, args.base_steps)
    if not console.quiet:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(model.state_dict(), partial)
        partial.rename(path)  # last, so that a file at `path` is always complete
    return model


def train(
    args: argparse.Namespace, console: Console, model: "Step", captions: Sequence[Caption], steps: int
) -> tuple["Step", list[float]]:
    """Train in a pipeline; return the trained model, unsplit on every rank, and the loss of each step."""
    from pipeshard import Engine, PipelinePlugin, to_sequential

    engine = Engine(
        PipelinePlugin(
            pp_size=args.pp, dp_size=args.dp, num_microbatches=args.microbatches, schedule=args.schedule,
            max_norm=1.0,
        )
    )  # fmt: skip
    samples = Samples(captions, steps * args.batch_size * args.dp)
    dataloader = engine.plugin.prepare_dataloader(samples, batch_size=args.batch_size)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps)
    boosted, optimizer, criterion, dataloader, scheduler = engine.boost(
        model, optimizer, returned, dataloader, scheduler
    )
    batches, losses, begun = iter(dataloader), [], time.monotonic()
    for done in range(1, steps + 1):
        losses.append(float(engine.execute_pipeline(batches, boosted, criterion, optimizer)["loss"]))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if done % max(1, steps // 10) == 0:
            pace = 1000 * (time.monotonic() - begun) / done
            console.print(f"step {done}/{steps}  loss {mean(losses[-20:]):.3f}  {pace:.0f} ms/step")
    whole: Any = to_sequential(boosted)
    return whole, losses


def returned(loss: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The criterion: return the loss that the model's forward has computed."""
    return loss


# The model


class Autoencoder(nn.Module):
    """The principal components of image patches: as good as Flux's autoencoder for flat shapes, without training."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        patches = unfold(images, PATCH, stride=PATCH).transpose(1, 2).flatten(0, 1)
        centered = patches - patches.mean(0)
        vectors = torch.linalg.eigh(centered.T @ centered).eigenvectors[:, -CHANNELS:]
        self.patterns = nn.Parameter(vectors.T.reshape(CHANNELS, 3, PATCH, PATCH).contiguous())
        self.mean = nn.Parameter(patches.mean(0).view(3, PATCH, PATCH).repeat(1, *LATENTS[1:]))
        self.scale = nn.Parameter((centered @ vectors).std())

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the latents of images."""
        return conv2d(pixels - self.mean, self.patterns, stride=PATCH) / self.scale

    def decode(self, latents: Tensor) -> Tensor:
        return conv_transpose2d(latents * self.scale, self.patterns, stride=PATCH) + self.mean


class Step(nn.Module):
    """The step of train_dreambooth_lora_flux.py: a frozen autoencoder and text encoder, and a Flux to train.

    The random values that the script draws in its loop (the noise and the share of the noise) are inputs, so that every
    stage uses the same values.
    """

    def __init__(self) -> None:
        from diffusers import FluxTransformer2DModel
        from transformers import CLIPTextConfig, CLIPTextModel

        super().__init__()
        samples = Samples([*KNOWN, *NEW], 256)
        images = [samples[index]["pixels"] for index in range(len(samples))]
        config = CLIPTextConfig(
            vocab_size=len(WORDS),
            hidden_size=TEXT,
            intermediate_size=2 * TEXT,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=8,
            bos_token_id=None,
            eos_token_id=WORDS.index("<end>"),
        )
        self.vae = Autoencoder(torch.stack(images)).requires_grad_(False)
        self.text_encoder = CLIPTextModel(config).requires_grad_(False)
        self.transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * CHANNELS,
            num_layers=2,
            num_single_layers=4,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=TEXT,
            pooled_projection_dim=TEXT,
            axes_dims_rope=(8, 12, 12),
        )

    def forward(self, pixels: Tensor, input_ids: Tensor, noise: Tensor, sigmas: Tensor) -> Tensor:
        """Return the flow matching loss: the error of the velocity from latents to noise, predicted at `sigmas`."""
        latents = self.vae(pixels)
        share = sigmas.view(-1, 1, 1, 1)
        noisy = (1 - share) * latents + share * noise
        predicted = self.velocity(noisy, input_ids, sigmas)
        target = noise - latents
        return ((predicted.float() - target.float()) ** 2).reshape(len(target), -1).mean(1).mean()

    def velocity(self, latents: Tensor, input_ids: Tensor, sigmas: Tensor) -> Tensor:
        from diffusers import FluxPipeline

        text = self.text_encoder(input_ids)
        b, c, h, w = latents.shape
        predicted = self.transformer(
            hidden_states=FluxPipeline._pack_latents(latents, b, c, h, w),
            timestep=sigmas,
            guidance=None,
            pooled_projections=text.pooler_output,
            encoder_hidden_states=text.last_hidden_state,
            txt_ids=torch.zeros(input_ids.shape[1], 3, device=latents.device),
            img_ids=FluxPipeline._prepare_latent_image_ids(b, h // 2, w // 2, latents.device, latents.dtype),
            return_dict=False,
        )[0]
        unpacked: Tensor = FluxPipeline._unpack_latents(predicted, SIZE, SIZE, vae_scale_factor=PATCH)
        return unpacked


@torch.no_grad()
def imagined(model: Step, captions: Sequence[Caption]) -> list[Image.Image]:
    """Return an image for each caption: start from noise, the same in every call, and follow the predicted velocity."""
    latents = torch.randn(len(captions), *LATENTS, generator=torch.Generator().manual_seed(1))
    input_ids = torch.stack([caption.ids() for caption in captions])
    model.eval()
    for k in range(DENOISING):
        sigmas = torch.full((len(captions),), 1 - k / DENOISING)
        latents = latents - model.velocity(latents, input_ids, sigmas) / DENOISING
    pixels = (model.vae.decode(latents).clamp(-1, 1) + 1) * 127.5
    model.train()
    return [Image.fromarray(image.permute(1, 2, 0).byte().numpy()) for image in pixels]


# The data


class Samples(Dataset[dict[str, Tensor]]):
    """Images with captions, and the random values that the script draws for each image: the noise, and sigma, the share
    of the noise.

    Each sample is computed when it is read, with its index as the seed.
    """

    def __init__(self, captions: Sequence[Caption], count: int) -> None:
        self.captions, self.count = captions, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chance, generator = random.Random(index), torch.Generator().manual_seed(index)
        caption = chance.choice(self.captions)
        pixels = torch.frombuffer(bytearray(drawn(caption, chance).tobytes()), dtype=torch.uint8)
        return {
            "pixels": pixels.view(SIZE, SIZE, 3).permute(2, 0, 1) / 127.5 - 1,
            "input_ids": caption.ids(),
            "noise": torch.randn(LATENTS, generator=generator),
            "sigmas": torch.randn((), generator=generator).sigmoid(),
        }


def drawn(caption: Caption, chance: random.Random) -> Image.Image:
    """Return an image with the caption's shape near its center."""
    fine = 4  # supersampling factor, for smooth edges
    radius, x, y = chance.uniform(11, 13), SIZE / 2 + chance.uniform(-2, 2), SIZE / 2 + chance.uniform(-2, 2)
    image = Image.new("RGB", (fine * SIZE, fine * SIZE), PAPER)
    pen, color = ImageDraw.Draw(image), COLORS[caption.color]
    if caption.shape == "circle":
        pen.ellipse([fine * (x - radius), fine * (y - radius), fine * (x + radius), fine * (y + radius)], fill=color)
    else:
        corners = [(x + radius * across, y + radius * down) for across, down in outline(caption.shape)]
        pen.polygon([(fine * across, fine * down) for across, down in corners], fill=color)
    return image.resize((SIZE, SIZE), Image.Resampling.LANCZOS)


def outline(shape: str) -> list[tuple[float, float]]:
    """Return the corners of a shape centered at (0, 0); the farthest corner is at distance 1."""
    count, first = {"square": (4, math.pi / 4), "triangle": (3, 0.0), "sks": (10, 0.0)}[shape]
    turns = [first + 2 * math.pi * k / count for k in range(count)]
    far = [0.42 if shape == "sks" and k % 2 else 1.0 for k in range(count)]
    return [(length * math.sin(turn), -length * math.cos(turn)) for length, turn in zip(far, turns)]


# The pictures


def show(captions: Sequence[Caption], rows: Mapping[str, Sequence[Image.Image]], path: Path) -> None:
    """Draw a column for each caption, with one image per entry of `rows`: before and after training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 * len(captions), 1.7 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(captions), squeeze=False)
    for panels, (name, images) in zip(grid, rows.items()):
        for axes, image in zip(panels, images):
            axes.imshow(image, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
        panels[0].set_ylabel(name)
    for axes, caption in zip(grid[0], captions):
        axes.set_title(f"{caption.color} {caption.shape}" + "*" * (caption in UNSEEN), fontsize=10)
    figure.supxlabel("* stars in these colors were never shown", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def draw(losses: Sequence[float], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, ".", alpha=0.5, label="step")
    means = [mean(losses[max(0, k - 20) : k]) for k in range(1, len(losses) + 1)]
    axes.plot(range(1, len(losses) + 1), means, label="mean of the last 20")
    axes.set(title="Loss of the adapters", xlabel="step", ylabel="flow matching loss")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


if __name__ == "__main__":
    sys.exit(main())
