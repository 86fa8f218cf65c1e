"""Classify: a timm vision transformer learns handwritten digits, with mixup, layer decay and averaged weights.

`python classify.py --pp 2` starts its own processes, one per stage; under torchrun, the script is one of the processes.
It writes `training.png` and the averaged weights, `average.pt`, to `classify/` under --output. The model that
`timm.create_model(**MODEL)` returns can load these weights.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pipeshard.launch import count, start
from pipeshard.schedule import SCHEDULES

if TYPE_CHECKING:
    from torch import Tensor, nn

PACKAGES = {"timm": "timm", "sklearn": "scikit-learn"}
IMAGES, HELD_OUT = 1797, 360
EVALUATIONS = 8  # in addition to the evaluation before training
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
    """The held-out accuracy of the model and of the average of its weights after `step` steps."""

    step: int
    model: float
    average: float


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
    add("--batch-size", type=count, default=64, help="samples in a batch")
    add("--lr", type=float, default=4e-3, help="highest learning rate")
    add("--mixup", type=float, default=0.2, help="alpha of mixup; 0 disables mixup")
    add("--layer-decay", type=float, default=0.8, help="learning-rate factor per layer, towards the input")
    add("--decay", type=float, default=0.97, help="decay of the average of the weights per step")
    add("--output", type=Path, default=Path("outputs"), help="folder for all output")
    args = parser.parse_args(arguments)
    if missing := [name for module, name in PACKAGES.items() if find_spec(module) is None]:
        parser.error(f"this example needs packages: pip install {' '.join(missing)}")
    if args.microbatches > args.batch_size:
        parser.error(f"argument --microbatches: {args.microbatches} is more than the batch's {args.batch_size} samples")
    if args.dp * args.batch_size > IMAGES - HELD_OUT:
        samples = f"{args.dp} replicas x {args.batch_size}" if args.dp > 1 else args.batch_size
        parser.error(f"argument --batch-size: {samples} is more than the {IMAGES - HELD_OUT} training images")
    if args.batch_size % 2:
        parser.error(f"argument --batch-size: mixup pairs the samples, but {args.batch_size} is odd")
    if args.mixup < 0:
        parser.error(f"argument --mixup: {args.mixup} is less than 0")
    for name in ("layer_decay", "decay"):
        if not 0 < getattr(args, name) <= 1:
            parser.error(
                f"argument --{name.replace('_', '-')}: must be above 0 and at most 1, got {getattr(args, name)}"
            )
    return args


def run(args: argparse.Namespace, console: Console) -> None:
    # These imports take seconds, so the flags are checked before them.
    import copy

    import timm
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from torch.utils.data import StackDataset

    from pipeshard import Engine, PipelinePlugin, to_sequential
    from pipeshard.distributed.mesh import backend_here

    dist.init_process_group(backend_here())
    torch.manual_seed(0)
    digits, order = load_digits(), torch.randperm(IMAGES)
    pixels: Any = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 8 - 1  # (n, 1, 8, 8)
    labels: Any = torch.tensor(digits.target)[order]
    training = StackDataset(pixel_values=pixels[HELD_OUT:], labels=labels[HELD_OUT:])
    held_out = {"pixel_values": pixels[:HELD_OUT], "labels": labels[:HELD_OUT]}
    engine = Engine(
        PipelinePlugin(
            pp_size=args.pp, dp_size=args.dp, num_microbatches=args.microbatches, schedule=args.schedule,
            max_norm=1.0,
        )
    )  # fmt: skip
    dataloader = engine.plugin.prepare_dataloader(
        training, batch_size=args.batch_size, shuffle=True, seed=0, drop_last=True, collate_fn=Mixed(args.mixup)
    )
    model = timm.create_model(**MODEL)
    average = copy.deepcopy(model)  # as in timm's ModelEmaV3; only one of the two models is trained
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
    dist.destroy_process_group()
    if whole is None:  # on every rank except the first
        return
    folder = args.output / "classify"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(whole.state_dict(), folder / "average.pt")
    draw(losses, scores, folder / "training.png")
    console.print(
        f"accuracy on {HELD_OUT} unseen images: {scores[0].model:.1%} before, {scores[-1].model:.1%} after "
        f"{args.steps} steps, {scores[-1].average:.1%} with the average of the weights",
        soft_wrap=True,
    )
    console.print(f"wrote {folder}/training.png, {folder}/average.pt", soft_wrap=True)


class Mixed:
    """A collator that blends the samples of a batch with timm's mixup: each image and its label with another image and
    that image's label."""

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
    """Return the fraction of correct answers, which is the same on every rank. Runs only forward passes."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import one_hot

    batch = {"x": images["pixel_values"], "criterion.targets": one_hot(images["labels"], 10).float()}
    model.eval()
    with torch.no_grad():
        found = engine.execute_pipeline(iter([batch]), model, soft_cross_entropy, return_outputs=True)["outputs"]
    model.train()
    counts = torch.zeros(2)  # correct answers, all answers
    if found is not None:  # on the rank of the last stage
        right = found.argmax(-1).cpu() == images["labels"]
        counts += torch.tensor([right.sum(), len(right)])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def follow(average: Any, model: Any, decay: float) -> None:
    """Move the average towards the model's weights; each rank updates the parameters of its own stage."""
    import torch

    from pipeshard.split.materialize import is_released

    with torch.no_grad():
        for kept, new in zip(average.unwrap().parameters(), model.unwrap().parameters()):
            if not is_released(new):
                kept.lerp_(new, 1 - decay)


def draw(losses: Sequence[float], scores: Sequence[Score], path: Path) -> None:
    """Draw the loss of every step, and the held-out accuracy of the model and of the average of its weights."""
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
