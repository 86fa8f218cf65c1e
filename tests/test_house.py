"""The house: imports point down, nothing goes in circles, files stay short, and docs/design.md shows it as it is."""

import re
import subprocess
import sys
from types import FrameType
from typing import Any

import torch

import pipeshard
from pipeshard.engine.model import PipelineModel
from pipeshard.engine.stage import Stage
from tests import zoo
from tests.house import LEVEL, PACKAGE, PAGE, ROOT, circles, graph, modules, picture
from tests.pool import Pool

MOST_MODULES, MOST_LINES, MOST_ROOMS, READING_LIST = 111, 340, 25, 1500
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


def test_the_house_is_small() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert len(lengths) <= MOST_MODULES
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def rooms() -> set[str]:
    """The files with functions that are given the model, from `configure` to its first forward on a stage."""
    found: set[str] = set()
    model, data = zoo.build("llama"), zoo.batch("llama")

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code is Stage.forward.__code__:
            sys.setprofile(None)
        elif event == "call" and code.co_filename.startswith(str(PACKAGE)):
            given = [frame.f_locals.get(name) for name in ("model", "module")]
            if any(value is model or isinstance(value, PipelineModel) for value in given):
                found.add(code.co_filename.removeprefix(f"{PACKAGE}/"))

    plugin = pipeshard.PipelinePlugin(pp_size=2, num_microbatches=2)
    sys.setprofile(look)
    try:
        boosted, optimizer, *_ = plugin.configure(model, torch.optim.SGD(model.parameters(), lr=0.1))
        plugin.execute_pipeline(iter([data]), boosted, None, optimizer)
    finally:
        sys.setprofile(None)
    return found


def test_a_model_passes_through_few_rooms(pool: Pool) -> None:
    for found in pool.run(rooms, 2):
        assert 15 < len(found) <= MOST_ROOMS, sorted(found)


def test_the_picture_of_the_layers_is_true() -> None:
    assert picture() in PAGE.read_text(), "python -m tests.house writes it anew"


def test_the_worked_example_is_true() -> None:
    command = [sys.executable, "-W", "ignore", "examples/anatomy.py"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    page = PAGE.read_text()
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


def test_english_is_plain() -> None:
    pages = [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    quaint = [f"{page.name}: {found[0]}" for page in pages for found in re.finditer(QUAINT, page.read_text())]
    assert quaint == []


def test_a_module_lists_what_is_public() -> None:
    assert set(pipeshard.__all__) <= set(dir(pipeshard))
    public = {name for name in dir(pipeshard) if not name.startswith("_")}
    assert public - set(pipeshard.__all__) <= {name.split(".")[0] for name in modules()}
