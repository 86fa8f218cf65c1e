"""Strings: Seq2SeqTrainer trains a small, randomly initialized T5 to write numbers given in words as digits.

"four hundred twelve thousand nine" is "412009": the positions of the zeros depend on words that are missing. An answer
is correct if the whole string that the stages generate is correct.

`python strings.py --pp 2` starts its own processes, one per stage; under torchrun, the script is one of the processes.
It writes `training.png` and `model/` (a Hugging Face folder) to `strings/` under --output.
"""

import argparse
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeshard.launch import count, start
from pipeshard.schedule import SCHEDULES

NUMBERS, HELD_OUT = 60_000, 512
NAMES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
ONES, TENS = NAMES.split()[:20], NAMES.split()[20:]
PAD, END, NO_LABEL = 0, 1, -100
TOKENS = ["<pad>", "</s>", *"0123456789", *ONES, *TENS, "hundred", "thousand"]
DIGITS = 7  # tokens in an answer, including the end token


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
    add("--steps", type=count, default=500, help="optimizer steps")
    add("--pp", type=count, default=2, help="pipeline stages, one process each")
    add("--dp", type=count, default=1, help="replicas of the pipeline, each with its own batch")
    add("--microbatches", type=count, default=4, help="microbatches that each batch is split into")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="order of forward and backward passes")
    add("--batch-size", type=count, default=128, help="samples in a batch")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--output", type=Path, default=Path("outputs"), help="folder for all output")
    args = parser.parse_args(arguments)
    if args.microbatches > args.batch_size:
        parser.error(f"argument --microbatches: {args.microbatches} is more than the batch's {args.batch_size} samples")
    return args


def run(args: argparse.Namespace, console: Console) -> None:
    # These imports take seconds, so the flags are checked before them.
    import torch
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, set_seed

    from pipeshard import PipelinePlugin
    from pipeshard.distributed.mesh import backend_here
    from pipeshard.trainer import pipelined

    set_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(TOKENS), d_model=64, d_kv=32, d_ff=128, num_heads=2, num_layers=2, num_decoder_layers=2,
            dropout_rate=0.0, pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=PAD,
        )
    )  # fmt: skip
    output, data = args.output / "strings", written_numbers()
    config = Seq2SeqTrainingArguments(
        output_dir=str(output), max_steps=args.steps, learning_rate=args.lr, warmup_steps=args.steps // 10, seed=0,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=HELD_OUT // 4, eval_strategy="steps", eval_steps=max(1, args.steps // 5),
        predict_with_generate=True, generation_max_length=1 + DIGITS, logging_steps=max(1, args.steps // 50),
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        ddp_backend=backend_here(),
    )  # fmt: skip
    trainer = pipelined(Seq2SeqTrainer)(
        model, config, train_dataset=data[HELD_OUT:], eval_dataset=data[:HELD_OUT], compute_metrics=exact_match,
        pipeline=PipelinePlugin(
            pp_size=args.pp, dp_size=args.dp, num_microbatches=args.microbatches, schedule=args.schedule
        ),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(output / "model"))
    if trainer.is_world_process_zero():
        draw(trainer.state.log_history, output / "training.png")
    right = trainer.evaluate()["eval_exact_match"]
    console.print(f"exact match on {HELD_OUT} unseen numbers: {right:.1%} after {args.steps} steps")
    console.print(f"wrote {output}/training.png, {output}/model")


def exact_match(prediction: Any) -> dict[str, float]:
    """Return the fraction of fully correct answers. Generated answers begin with the decoder's start token."""
    written, labels = prediction.predictions[:, 1 : 1 + DIGITS], prediction.label_ids[:, :DIGITS]
    right = (written == labels) | (labels == NO_LABEL)
    return {"exact_match": float(right.all(1).mean())}


def written_numbers() -> list[dict[str, list[int]]]:
    """Return distinct numbers below a million, the same in every call: words as `input_ids`, digits as `labels`."""
    ids = {token: k for k, token in enumerate(TOKENS)}
    numbers = random.Random(0).sample(range(1_000_000), NUMBERS)
    questions = [[*(ids[word] for word in words(number)), END] for number in numbers]
    longest, found = max(map(len, questions)), []
    for number, question in zip(numbers, questions):
        answer, padding = [*(ids[digit] for digit in str(number)), END], longest - len(question)
        found.append(
            {
                "input_ids": [*question, *[PAD] * padding],
                "attention_mask": [*[1] * len(question), *[0] * padding],
                "labels": [*answer, *[NO_LABEL] * (DIGITS - len(answer))],
            }
        )
    return found


def words(number: int) -> list[str]:
    """Return the words for a number below a million: 21 is twenty one."""
    if number < 20:
        return [ONES[number]]
    if number < 100:
        return [TENS[number // 10 - 2], *_rest(number % 10)]
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    return [*words(number // unit), name, *_rest(number % unit)]


def _rest(number: int) -> list[str]:
    return words(number) if number else []


def draw(history: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw the loss, and the fraction of correct answers on held-out numbers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("loss", "eval_exact_match")):
        axes.plot(*zip(*((entry["step"], entry[name]) for entry in history if name in entry)), ".-")
        axes.set(xlabel="step", ylabel=name)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
