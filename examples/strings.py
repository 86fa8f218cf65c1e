"""Strings: a small T5, from random weights, learns to write numbers given in words as digits.

"four hundred twelve thousand nine" is "412009": where zeros go depends on words that are not there. An answer counts
as right if the whole string is. Each digit is the likeliest after the right ones before it, so a string that is right
throughout is also what greedy generation gives.

`python examples/strings.py --pp 2` starts its own processes, one a stage; under torchrun it is one of them. It writes
`training.png` and `model/` (a Hugging Face folder) into `strings/` under --output.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

import launcher

if TYPE_CHECKING:
    from torch import Tensor

    from loop import Batch
    from table import Table

NUMBERS, HELD_OUT = 60_000, 512
NAMES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
ONES, TENS = NAMES.split()[:20], NAMES.split()[20:]
PAD, END, NO_LABEL = 0, 1, -100
TOKENS = ["<pad>", "</s>", *"0123456789", *ONES, *TENS, "hundred", "thousand"]


def main() -> int:
    return launcher.main(parse(sys.argv[1:]), run)


def parse(arguments: list[str]) -> argparse.Namespace:
    return launcher.parse(launcher.flags(__doc__, steps=500, batch_size=128, lr=3e-3), arguments)


def run(args: argparse.Namespace, console: Console) -> None:
    # They take seconds, so wrong flags are told before.
    from transformers import T5Config, T5ForConditionalGeneration

    from loop import Loop, Metric, make_booster

    config = T5Config(
        vocab_size=len(TOKENS),
        d_model=64,
        d_kv=32,
        d_ff=128,
        num_heads=2,
        num_layers=2,
        num_decoder_layers=2,
        dropout_rate=0.0,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
    )
    training, held_out = written_numbers().divided(HELD_OUT)
    metric = Metric("exact match", _exact)
    loop = Loop(args, make_booster(args), T5ForConditionalGeneration(config), training, held_out, metric)
    loop.run_and_save(console, f"{HELD_OUT} unseen numbers", args.output / "strings")


def _exact(predicted: "Tensor", batch: "Batch") -> "Tensor":
    return ((predicted == batch["labels"]) | (batch["labels"] == NO_LABEL)).all(dim=1)


def written_numbers() -> "Table":
    """Different numbers below a million, always the same: the words as `input_ids`, the digits as `labels`."""
    import torch

    from table import Table

    numbers = random.Random(0).sample(range(1_000_000), NUMBERS)
    questions = torch.tensor(_padded([words(number) for number in numbers]))
    answers = torch.tensor(_padded([list(str(number)) for number in numbers]))
    labels = answers.masked_fill(answers == PAD, NO_LABEL)
    return Table(input_ids=questions, attention_mask=(questions != PAD).long(), labels=labels)


def words(number: int) -> list[str]:
    """What a number below a million is called: 21 is twenty one."""
    if number < 20:
        return [ONES[number]]
    if number < 100:
        return [TENS[number // 10 - 2], *_rest(number % 10)]
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    return [*words(number // unit), name, *_rest(number % unit)]


def _rest(number: int) -> list[str]:
    return words(number) if number else []


def _padded(texts: Sequence[list[str]]) -> list[list[int]]:
    """Token ids, each text closed by `END`, all as long as the longest."""
    ids = {token: k for k, token in enumerate(TOKENS)}
    length = max(map(len, texts))
    return [[*(ids[token] for token in text), END, *[PAD] * (length - len(text))] for text in texts]


if __name__ == "__main__":
    sys.exit(main())
