"""Launcher: the flags that all examples have, and how they become the ranks of a pipeline."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from packages import Package
from pipeshard.launch import count, start
from pipeshard.schedule import SCHEDULES
from pipeshard.script import note, notes

Run = Callable[[argparse.Namespace, Console], None]


def main(args: argparse.Namespace, run: Run) -> int:
    """Call `run` on every rank: on processes that are started here, or, under torchrun, on this one; the exit status.

    `run` gets a console that prints on rank 0 alone.
    """
    if "RANK" not in os.environ:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        return start(args.pp * args.dp, quiet=True)
    return _join(args, run)


def flags(description: str, steps: int, batch_size: int, lr: float) -> argparse.ArgumentParser:
    """The flags of every example, with these defaults."""
    style = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=description.splitlines()[0], formatter_class=style)
    add = parser.add_argument
    add("--steps", type=count, default=steps, help="optimizer steps")
    add("--pp", type=count, default=2, help="pipeline stages, one process each")
    add("--dp", type=count, default=1, help="replicas of the pipeline, each with a batch of its own")
    add("--microbatches", type=count, default=4, help="microbatches that each batch is cut into")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="order of forward and backward passes")
    add("--batch-size", type=count, default=batch_size, help="samples in a batch")
    add("--lr", type=float, default=lr, help="highest learning rate")
    add("--output", type=Path, default=Path("outputs"), help="folder that everything is written to")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str], *packages: Package) -> argparse.Namespace:
    """The flags; exits with argparse's message when one of them cannot work, or one of `packages` is missing."""
    args = parser.parse_args(arguments)
    for package in packages:
        if package.missing():
            parser.error(f"this example needs a package: pip install {package.install}")
    if args.microbatches > args.batch_size:
        parser.error(f"argument --microbatches: {args.microbatches} is more than the batch's {args.batch_size} samples")
    return args


def _join(args: argparse.Namespace, run: Run) -> int:
    import torch.distributed as dist
    import transformers  # takes seconds, so wrong flags are refused before

    from pipeshard.entry import join
    from pipeshard.errors import PipeshardError

    join()
    transformers.set_seed(0)
    try:
        run(args, Console(quiet=dist.get_rank() > 0, highlight=False))
    except PipeshardError as error:
        folder = notes()
        if folder is None or note(folder, type(error).__name__, str(error)):  # most errors are every rank's
            Console(stderr=True, highlight=False).print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    dist.destroy_process_group()
    return 0
