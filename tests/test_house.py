"""Tests of the architecture: imports point down, there are no cycles, and docs/design.md shows the actual layers."""

import re
import sys
from pathlib import Path

import pytest
import torch

import anatomy
import pipeshard
from tests.house import LEVEL, PACKAGE, PAGE, ROOT, circles, graph, modules, picture
from tests.unsplit import largest_error

READING_LIST = 2400
BLIND = r"(?<![\w.])max\((.*\) <=? (\d+e-|0\.)\d|\(*float\(.* - ).*"  # maxima of errors, which pass over NaN
QUAINT = r"\bis no\b|is none of|the dearest|piles? up|puts? off"


def test_imports_point_down() -> None:
    upward = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if name.split(".")[0] != other.split(".")[0] and LEVEL[name.split(".")[0]] <= LEVEL[other.split(".")[0]]
    ]
    assert upward == []


def test_nothing_goes_in_circles() -> None:
    assert circles(graph()) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]


def test_the_picture_of_the_layers_is_true() -> None:
    assert picture() in PAGE.read_text(), "python -m tests.house writes it anew"


def test_the_worked_example_is_true(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["anatomy.py"])
    anatomy.main()
    printed, page = capsys.readouterr().out, PAGE.read_text()
    blocks = [block.strip() for block in re.split(r"^\w+ForC\w+$", printed, flags=re.MULTILINE) if block.strip()]
    assert len(blocks) == 2 and all(block in page for block in blocks)


def test_the_reading_list_takes_an_evening() -> None:
    section = PAGE.read_text().partition("## Where to start reading")[2].partition("\n## ")[0]
    paths = [PACKAGE / path for path in re.findall(r"`([\w/]+\.py)`", section)]
    assert len(paths) > 4 and sum(len(path.read_text().splitlines()) for path in paths) <= READING_LIST


def test_files_that_the_pages_name_are_there() -> None:
    for page in (PAGE, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        paths = set(re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text()))
        assert [path for path in paths if not (PACKAGE / path).exists() and not (ROOT / path).exists()] == [], page


def test_errors_that_are_not_a_number_are_seen() -> None:
    """max([1e-8, nan]) < 1e-6 is true, and so tests passed whose parameters had become NaN."""
    assert largest_error([1e-8, float("nan")]) == largest_error([-float("inf"), 2.0]) == float("inf")
    assert largest_error([0.5, torch.tensor(-2.0)]) == 2
    with pytest.raises(AssertionError, match="nothing was compared"):
        largest_error([])
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    blind = [f"{path.name}: {found[0]}" for path in files for found in re.finditer(BLIND, path.read_text())]
    assert blind == [], "take tests.unsplit.largest_error"


def test_english_is_plain() -> None:
    pages = [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    quaint = [f"{page.name}: {found[0]}" for page in pages for found in re.finditer(QUAINT, page.read_text())]
    assert quaint == []


def test_a_module_lists_what_is_public() -> None:
    assert set(pipeshard.__all__) <= set(dir(pipeshard))
    public = {name for name in dir(pipeshard) if not name.startswith("_")}
    assert public - set(pipeshard.__all__) <= {name.split(".")[0] for name in modules()}
