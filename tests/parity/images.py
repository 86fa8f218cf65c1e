"""Images: batches of text with one image per sample, for vision-language models.

A fix is a function (model, batch, generator) -> batch; `equal`, `grids` and `sized` create the usual ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Fix = Callable[[nn.Module, dict[str, Tensor], torch.Generator], dict[str, Tensor]]

# Patches (height, width) of the four images where they may differ: two sizes, and halves of the batch that differ.
TWO_SIZES = ((4, 4), (4, 8), (4, 4), (4, 4))
# Rotary positions along time, height and width, for heads of 8 values.
MROPE: dict[str, Any] = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}


def insert(batch: dict[str, Tensor], pieces: Sequence[Sequence[int]], at: int = 2, **marks: int) -> dict[str, Tensor]:
    """The batch with the tokens `pieces[row]` inserted into each row, without labels; shorter rows are padded.

    Each of `marks`, name=token, is one more input: 1 where that token was inserted, 0 elsewhere.
    """
    longest = max(map(len, pieces))
    ids, mask, labels = [], [], []
    for row, piece in enumerate(pieces):
        tokens, padding = torch.tensor(piece, dtype=torch.int64), torch.zeros(longest - len(piece), dtype=torch.int64)
        text = batch["input_ids"][row]
        ids.append(torch.cat([text[:at], tokens, text[at:], padding]))
        mask.append(torch.cat([torch.ones(len(text) + len(piece), dtype=torch.int64), padding]))
        if batch["labels"].ndim > 1:  # else they are classes
            label = batch["labels"][row]
            labels.append(torch.cat([label[:at], torch.full_like(tokens, -100), label[at:], padding - 100]))
    stacked = torch.stack(ids)
    return {
        **batch,
        "input_ids": stacked,
        "attention_mask": torch.stack(mask),
        **({"labels": torch.stack(labels)} if labels else {}),
        **{name: (stacked == token).long() for name, token in marks.items()},
    }


def token(model: nn.Module) -> int:
    """The id of the image token."""
    config: Any = model.config
    names = ("image_token_id", "image_token_index", "media_placeholder_token_id")
    return next(value for value in (getattr(config, name, None) for name in names) if value is not None)


def pixels(model: nn.Module, generator: torch.Generator, *shape: int) -> Tensor:
    """Random images of this shape; without one, four of the size and the channels that the vision config says."""
    config: Any = model.config
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 32)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(vision, "num_channels", getattr(vision, "in_channels", 3))
    return torch.randn(shape or (4, channels, height, width), generator=generator)


def equal(
    tokens: int, mark: str | None = None, nested: bool = False, mask: str | None = None, image: int | None = None
) -> Fix:
    """Images of one size, each as `tokens` image tokens; `nested` has a dimension for the images of a sample.

    `image` is the image token where the configuration has none. `mask` is 1 for an image's own pixels: the left half
    of the second one's, all of the others'.
    """

    def fix(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        special, values = image or (token(model) if tokens else 0), pixels(model, generator)
        own = torch.ones_like(values[:, 0])
        if mask:
            own[1, :, own.shape[-1] // 2 :] = 0
            values = values * own[:, None]
        inputs = {"pixel_values": values} | ({mask: own.bool()} if mask else {})
        marks = {mark: special} if mark else {}
        batch = insert(batch, [[special] * tokens] * len(values), **marks)
        return {**batch, **{name: value[:, None] if nested else value for name, value in inputs.items()}}

    return fix


def grids(
    mark: str | None = "mm_token_type_ids",
    name: str = "image_grid_thw",
    around: Callable[[Any], tuple[list[int], list[int]]] | None = None,
) -> Fix:
    """Images of two sizes as one list of flat patches, (time, height, width) of each in `name`.

    `around(config)` are the tokens before and after those of the image.
    """

    def fix(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        config: Any = model.config
        vision, image = config.vision_config, token(model)
        merge = getattr(vision, "spatial_merge_size", getattr(vision, "merge_size", 1))
        before, after = around(config) if around else ([], [])
        pieces = [[*before, *[image] * (height * width // merge**2), *after] for height, width in TWO_SIZES]
        channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
        frames = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1))
        values = channels * frames * vision.patch_size**2
        count = sum(math.prod(size) for size in TWO_SIZES)
        return {
            **insert(batch, pieces, **({mark: image} if mark else {})),
            "pixel_values": pixels(model, generator, count, values),
            name: torch.tensor([(1, *size) for size in TWO_SIZES]),
        }

    return fix


def sized(
    merge: Callable[[Any], int], sizes: str | None = "image_sizes", mask: str | None = None, nested: bool = False
) -> Fix:
    """Images of two sizes padded to one, (height, width) of each in `sizes` or 1 for its own pixels in `mask`."""

    def fix(model: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        config: Any = model.config
        patch, image, side = config.vision_config.patch_size, token(model), merge(config)
        pieces = [[image] * (height * width // side**2) for height, width in TWO_SIZES]
        pixel_sizes = [(patch * height, patch * width) for height, width in TWO_SIZES]
        own = torch.zeros(len(pieces), max(h for h, _ in pixel_sizes), max(w for _, w in pixel_sizes))
        for row, (height, width) in enumerate(pixel_sizes):
            own[row, :height, :width] = 1
        values = pixels(model, generator, len(pieces), 3, *own.shape[1:]) * own[:, None]
        more = {sizes: torch.tensor(pixel_sizes)} if sizes else {}
        if mask:
            more[mask] = own[:, None].bool() if nested else own.bool()
        return {**insert(batch, pieces), "pixel_values": values[:, None] if nested else values, **more}

    return fix
