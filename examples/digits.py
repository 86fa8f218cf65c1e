"""Digits: a small vision transformer, from random weights, learns the handwritten digits of scikit-learn.

`python examples/digits.py --pp 2` starts its own processes, one a stage; under torchrun it is one of them. It writes
`training.png` and `model/` (a Hugging Face folder) into `digits/` under --output.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from rich.console import Console

import launcher
from packages import DIGITS

if TYPE_CHECKING:
    from table import Table

HELD_OUT = 360  # of 1797


def main() -> int:
    return launcher.main(parse(sys.argv[1:]), run)


def parse(arguments: list[str]) -> argparse.Namespace:
    return launcher.parse(launcher.flags(__doc__, steps=400, batch_size=64, lr=2e-3), arguments, DIGITS)


def run(args: argparse.Namespace, console: Console) -> None:
    # They take seconds, so wrong flags are told before.
    from transformers import ViTConfig, ViTForImageClassification

    from loop import Loop, Metric, make_booster

    training, held_out = images().divided(HELD_OUT)
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_labels=10,
    )
    metric = Metric("accuracy", lambda predicted, batch: predicted == batch["labels"])
    loop = Loop(args, make_booster(args), ViTForImageClassification(config), training, held_out, metric)
    loop.run_and_save(console, f"{HELD_OUT} unseen images", args.output / "digits")


def images() -> "Table":
    """1797 images of 8x8 pixels between -1 and 1: float32 `pixel_values` (n, 1, 8, 8), int64 `labels` (n,)."""
    import torch
    from sklearn.datasets import load_digits

    from table import Table

    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return Table(pixel_values=pixels, labels=torch.tensor(digits.target))


if __name__ == "__main__":
    sys.exit(main())
