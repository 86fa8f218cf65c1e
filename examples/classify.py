"""Classify: a vision transformer of timm learns handwritten digits with mixup, layer decay and averaged weights.

`python examples/classify.py --pp 2` starts its own processes, one a stage; under torchrun it is one of them. It writes
`training.png` and the average's weights, `average.pt`, which a timm model of the same name loads, into `classify/`
under --output.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

import launcher
from packages import DIGITS, Package

if TYPE_CHECKING:
    from torch import Tensor, nn


TIMM = Package("timm", "timm")
IMAGES, HELD_OUT = 1797, 360
EVALUATIONS = 8  # besides the one before training
MODEL: dict[str, Any] = {
    "model_name": "vit_tiny_patch16_224",
    "img_size": 8,
    "patch_size": 2,
    "in_chans": 1,
    "num_classes": 10,
    "embed_dim": 64,
    "depth": 4,
    "num_heads": 4,
}


@dataclass(frozen=True)
class Score:
    """The share of held-out images that the model and its average are right on, after so many steps."""

    step: int
    model: float
    average: float


def main() -> int:
    return launcher.main(parse(sys.argv[1:]), run)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = launcher.flags(__doc__, steps=400, batch_size=64, lr=4e-3)
    add = parser.add_argument
    add("--mixup", type=float, default=0.2, help="alpha of mixup; 0 mixes nothing")
    add("--layer-decay", type=float, default=0.8, help="factor of the learning rate from one layer to the one before")
    add("--decay", type=float, default=0.97, help="what the average keeps of itself in a step")
    args = launcher.parse(parser, arguments, TIMM, DIGITS)
    if args.dp * args.batch_size > IMAGES - HELD_OUT:
        parser.error(f"argument --batch-size: {args.dp * args.batch_size} is more than the {IMAGES - HELD_OUT} images")
    if args.batch_size % 2:
        parser.error(f"argument --batch-size: mixup pairs the samples, and {args.batch_size} is odd")
    if args.mixup < 0:
        parser.error(f"argument --mixup: {args.mixup} is less than 0")
    for name in ("layer_decay", "decay"):
        if not 0 < getattr(args, name) <= 1:
            parser.error(f"argument --{name.replace('_', '-')}: {getattr(args, name)} is not between 0 and 1")
    return args


def run(args: argparse.Namespace, console: Console) -> None:
    # They take seconds, so wrong flags are told before.
    import copy

    import timm
    import torch
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    from digits import images
    from loop import make_booster
    from pipeshard import to_sequential

    training, held_out = images().divided(HELD_OUT)
    engine = make_booster(args)
    dataloader = engine.plugin.prepare_dataloader(
        training, batch_size=args.batch_size, shuffle=True, seed=0, drop_last=True, collate_fn=Mixed(args.mixup)
    )
    model = timm.create_model(**MODEL)
    average = copy.deepcopy(model)  # as timm's ModelEmaV3 does; two models in one pipeline, of which one is trained
    optimizer = create_optimizer_v2(model, "adamw", lr=args.lr, weight_decay=0.05, layer_decay=args.layer_decay)
    average, *_ = engine.boost(average, None, soft_cross_entropy, dataloader)
    model, optimizer, criterion, dataloader, _ = engine.boost(model.train(), optimizer, soft_cross_entropy, dataloader)
    schedule = CosineLRScheduler(optimizer, args.steps, warmup_t=args.steps // 10, warmup_lr_init=args.lr / 100)

    def score(done: int) -> Score:
        return Score(done, *(accuracy(engine, one, held_out) for one in (model, average)))

    losses: list[float] = []
    scores = [score(0)]
    evaluated = {round(args.steps * k / EVALUATIONS) for k in range(1, EVALUATIONS + 1)}
    begun = time.monotonic()
    while len(losses) < args.steps:
        batches = iter(dataloader)
        for _ in range(min(len(dataloader), args.steps - len(losses))):
            schedule.step(len(losses))
            losses.append(float(engine.execute_pipeline(batches, model, criterion, optimizer)["loss"]))
            optimizer.step()
            optimizer.zero_grad()
            follow(average, model, min(args.decay, len(losses) / (len(losses) + 9)))
            if len(losses) in evaluated:
                scores.append(score(len(losses)))
                pace = 1000 * (time.monotonic() - begun) / len(losses)
                console.print(
                    f"step {len(losses)}/{args.steps}  loss {losses[-1]:.3f}  {pace:.0f} ms/step  held-out accuracy "
                    f"{scores[-1].model:.1%}, of the average {scores[-1].average:.1%}",
                    soft_wrap=True,
                )
    whole = to_sequential(average, rank=0)
    if whole is None:  # on every rank but the first
        return
    folder = args.output / "classify"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(whole.state_dict(), folder / "average.pt")
    draw(losses, scores, folder / "training.png")
    console.print(
        f"accuracy on {HELD_OUT} unseen images: {scores[0].model:.1%} before, {scores[-1].model:.1%} after "
        f"{args.steps} steps, {scores[-1].average:.1%} by the average of the weights",
        soft_wrap=True,
    )
    console.print(f"wrote {folder}/training.png, {folder}/average.pt", soft_wrap=True)


class Mixed:
    """Makes a batch of samples: timm's mixup adds to each image a share of another one, and of its label."""

    def __init__(self, alpha: float) -> None:
        from timm.data import Mixup

        self.mixup = Mixup(mixup_alpha=alpha, label_smoothing=0.1, num_classes=10)
        self.mixup.mixup_enabled = alpha > 0

    def __call__(self, samples: Sequence[Mapping[str, "Tensor"]]) -> dict[str, "Tensor"]:
        import torch

        pixels = torch.stack([sample["pixel_values"] for sample in samples])
        labels = torch.stack([sample["labels"] for sample in samples])
        pixels, targets = self.mixup(pixels, labels)
        return {"x": pixels, "criterion.targets": targets}


def soft_cross_entropy(output: "Tensor", batch: Mapping[str, "Tensor"]) -> "Tensor":
    from timm.loss import SoftTargetCrossEntropy

    loss: Tensor = SoftTargetCrossEntropy()(output, batch["criterion.targets"])
    return loss


def accuracy(engine: Any, model: "nn.Module", images: Mapping[str, "Tensor"]) -> float:
    """The share of right answers, by forward passes alone; the same on every rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import one_hot

    batch = {"x": images["pixel_values"], "criterion.targets": one_hot(images["labels"], 10).float()}
    model.eval()
    with torch.no_grad():
        found = engine.execute_pipeline(iter([batch]), model, soft_cross_entropy, return_outputs=True)["outputs"]
    model.train()
    counts = torch.zeros(2)  # how many are right, and how many there are
    if found is not None:  # on the rank that the last stage is on
        right = found.argmax(-1).cpu() == images["labels"]
        counts += torch.tensor([right.sum(), len(right)])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def follow(average: Any, model: Any, decay: float) -> None:
    """Move the average towards the model, on this rank by the parameters of its own stage."""
    import torch

    from pipeshard.split.materialize import is_released

    with torch.no_grad():
        for kept, new in zip(average.unwrap().parameters(), model.unwrap().parameters()):
            if not is_released(new):
                kept.lerp_(new, 1 - decay)


def draw(losses: Sequence[float], scores: Sequence[Score], path: Path) -> None:
    """The loss of every step, and the accuracy of the model and of its average on held-out images."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(losses) + 1), losses, ".", alpha=0.5)
    left.set(title="Loss", xlabel="step", ylabel="loss of mixed labels (nats)")
    steps = [score.step for score in scores]
    right.plot(steps, [score.model for score in scores], "s-", label="model")
    right.plot(steps, [score.average for score in scores], "o-", label="average of its weights")
    right.set(title="Accuracy on held-out images", xlabel="step", ylim=(0, 1.02))
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
