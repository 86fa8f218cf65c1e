"""Launcher: the flags that all examples have, and the processes that one starts, one a stage."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from packages import Package
from pipeshard.schedule import SCHEDULES

Run = Callable[[argparse.Namespace, Console], None]


def main(args: argparse.Namespace, run: Run) -> int:
    """Call `run` on every rank: on processes that are started here, or, under torchrun, on this one; the exit status.

    `run` gets a console that prints on rank 0 alone.
    """
    if "RANK" not in os.environ:
        return _launch(processes(args))
    _quiet()
    return _join(args, run)


def processes(args: argparse.Namespace) -> int:
    """The size of the world: a process for each stage of each replica."""
    return int(args.pp * args.dp)


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


def count(text: str) -> int:
    """The type of a flag that takes 1, 2, ..."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return value


def _launch(world_size: int) -> int:
    """Run this program as so many ranks on this machine, until all have ended or one has failed; the exit status."""
    variables: dict[str, Any] = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Ranks inherit that Ctrl-C is ignored: it reaches this process alone, which ends them.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ranks = [_start(variables | {"RANK": r, "LOCAL_RANK": r}) for r in range(world_size)]
    try:
        signal.signal(signal.SIGINT, handler)
        return _wait(ranks)
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):  # people press Ctrl-C more than once
            signal.signal(number, signal.SIG_IGN)
        Console(stderr=True).print("\ninterrupted: every rank is stopped")
        return 130
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait()
        Console().show_cursor()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _start(variables: dict[str, Any]) -> subprocess.Popen[bytes]:
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    return subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environment)  # with -m and -W, if they are given


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    while True:
        statuses = [rank.poll() for rank in ranks]
        failures = [status for status in statuses if status]
        if failures:
            return failures[0] if failures[0] > 0 else 128 - failures[0]
        if None not in statuses:
            return 0
        time.sleep(0.05)


def _quiet() -> None:
    """Keep the libraries from asking a hub, drawing progress bars of their own, and warning of what is not needed."""
    for name in ("HF_HUB_OFFLINE", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", message="Please install (apex|the latest tensornvme)")
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # peft asks for it


def _is_first(store: Any) -> bool:
    """Whether no other rank has failed before; also where the rank that has the store does not answer any more."""
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(store.add("errors", 1)), daemon=True)
    asking.start()
    asking.join(3.0)
    return answers in ([], [1])


def _join(args: argparse.Namespace, run: Run) -> int:
    # They take seconds to import, and a launcher that only waits, or tells of a wrong flag, needs none of them.
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.rendezvous import rendezvous

    from pipeshard.errors import PipeshardError

    store, rank, world_size = next(rendezvous("env://"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    backend = None if torch.cuda.device_count() >= local_ranks else "gloo"  # NCCL has no two ranks on one GPU
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    transformers.set_seed(0)
    try:
        run(args, Console(quiet=rank > 0, highlight=False))
    except PipeshardError as error:
        if _is_first(store):  # most errors are every rank's: the first to fail tells
            Console(stderr=True, highlight=False).print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    dist.destroy_process_group()
    return 0
