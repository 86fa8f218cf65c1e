"""Pairs: MiniLM, a BERT, fine-tuned to tell whether a sentence describes a function, as GLUE's tasks pair sentences.

The pairs are the standard library's: the beginning of a function's docstring, and the name and the parameters of that
function or of another one. Half of them belong together. Those held out are of modules that training never sees.

`python examples/pairs.py --pp 2` starts its own processes, one a stage; under torchrun it is one of them. It writes
`training.png` and `model/` (a Hugging Face folder) into `pairs/` under --output.
"""

import argparse
import ast
import random
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

import launcher
from models import minilm_folder
from packages import MINILM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from table import Table

HELD_OUT = 256
TOKENS = 40  # of a pair; of longer ones the end of the longer text is cut
HELD_OUT_MODULES = 8  # one of so many
LEFT_OUT = ("test", "idlelib", "lib2to3", "site-packages", "dist-packages")


class Pair(NamedTuple):
    sentence: str
    function: str
    belongs: bool


def main() -> int:
    return launcher.main(parse(sys.argv[1:]), run)


def parse(arguments: list[str]) -> argparse.Namespace:
    return launcher.parse(launcher.flags(__doc__, steps=100, batch_size=16, lr=1e-4), arguments, MINILM)


def run(args: argparse.Namespace, console: Console) -> None:
    # They take seconds, so wrong flags are told before.
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from loop import Loop, Metric, make_booster
    from pipeshard import PipelinePlugin

    with console.status("reading the standard library"):
        tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
        training, held_out = (tokenized(part, tokenizer) for part in pairs())
    # Each stage loads its own layers; the head, which the folder lacks, is drawn.
    model = PipelinePlugin.from_pretrained(AutoModelForSequenceClassification, minilm_folder(), num_labels=2)
    metric = Metric("accuracy", lambda predicted, batch: predicted == batch["labels"])
    loop = Loop(args, make_booster(args), model, training, held_out.columns, metric)
    loop.run_and_save(console, f"{HELD_OUT} pairs of unseen modules", args.output / "pairs")


def tokenized(pairs: Sequence[Pair], tokenizer: "PreTrainedTokenizerBase") -> "Table":
    """Both texts of each pair as one sequence, and int64 `labels`: 1 for those that belong together."""
    import torch

    from table import Table

    sentences, functions = [pair.sentence for pair in pairs], [pair.function for pair in pairs]
    options = {"truncation": "longest_first", "padding": "max_length", "max_length": TOKENS, "return_tensors": "pt"}
    return Table(**tokenizer(sentences, functions, **options), labels=torch.tensor([int(p.belongs) for p in pairs]))


def pairs() -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on, and `HELD_OUT` pairs of other modules; always the same."""
    generator = random.Random(0)
    modules = [set(_functions(path)) for path in _sources()]
    generator.shuffle(modules)
    held_out = len(modules) // HELD_OUT_MODULES
    seen = set().union(*modules[held_out:])
    unseen = set().union(*modules[:held_out]) - seen  # some modules have functions of others
    return _paired(seen, generator), _paired(unseen, generator)[:HELD_OUT]


def _paired(described: set[tuple[str, str]], generator: random.Random) -> list[Pair]:
    """Each sentence with its own function, and with one that is drawn from all of them and is not its own."""
    strangers = [function for _, function in sorted(described)]
    generator.shuffle(strangers)
    found = []
    for (sentence, function), stranger in zip(sorted(described), strangers):
        if (sentence, stranger) not in described:
            found += [Pair(sentence, function, True), Pair(sentence, stranger, False)]
    generator.shuffle(found)
    return found


def _functions(path: Path) -> Iterator[tuple[str, str]]:
    """Of each documented function, the first paragraph of its docstring, and its name with its parameters."""
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


if __name__ == "__main__":
    sys.exit(main())
