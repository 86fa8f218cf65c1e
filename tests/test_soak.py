"""Tests of a short soak, and of deliberate leaks in it. `make soak` runs the long soak."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.course import Course
from tests.soak.flatness import growths
from tests.soak.lives import Life


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.soak", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=300)


@pytest.mark.slow
def test_nothing_is_left_behind_or_lost(tmp_path: Path) -> None:
    plot = tmp_path / "soak.svg"
    result = soak("--steps", "400", "--output", str(plot))  # the heap has its full size after some 150
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 restarts" in result.stdout and "passed" in result.stdout
    assert "</svg>" in plot.read_text()


@pytest.mark.slow
def test_what_is_planted_is_found() -> None:
    plants = ("batches:2", "memory:1", "files:1", "threads:2", "groups:0", "restart")
    result = soak("--steps", "60", "--plant", *plants)
    assert result.returncode == 1, result.stdout + result.stderr
    growth = r"^rank (\d), undisturbed: [\d.]+ (?:more (.+)|(.+) more in 1000 .*)$"
    names = {(int(rank), count or slope) for rank, count, slope in re.findall(growth, result.stdout, re.MULTILINE)}
    planted = {(2, "tensors"), (1, "MiB"), (1, "file descriptors"), (2, "threads"), (0, "process groups")}
    assert names >= planted, result.stdout
    assert not names & {(0, "tensors"), (0, "MiB"), (2, "file descriptors"), (1, "threads"), (1, "process groups")}
    assert "rank 0: the restarts led to other parameters" in result.stdout


def test_a_course_is_that_of_its_seed() -> None:
    one, same, other = Course(1, 400), Course(1, 400), Course(2, 400)
    assert all(one.batch(3)[name].equal(value) for name, value in same.batch(3).items())
    assert [one.batch(k)["input_ids"].shape for k in range(9)] != [other.batch(k)["input_ids"].shape for k in range(9)]
    stops = list(one.stops())
    assert stops == list(same.stops()) != list(other.stops())
    assert [stop.victim is None for stop in stops] == [False, True, True] and stops[-1].step == 400
    assert [sum(one.falls("save", 25, step) for step in range(k, k + 25)) for k in range(0, 400, 25)] == [1] * 16
    labels = [one.batch(step)["labels"] for step in range(60)]
    assert any((rows[:4] == -100).all() or (rows[4:8] == -100).all() for rows in labels if len(rows) > 8)
    assert all(len(rows) % 4 for rows in labels)


@pytest.mark.parametrize(
    "quantity,held,growth",
    [
        ("rss", lambda step: 400 + min(step, 40) + step % 3, ""),
        ("rss", lambda step: 400 + step * 0.1, "100.0 MiB more in 1000 steps, 10 are allowed"),
        ("rss", lambda step: 400 + step * 0.02, ""),  # less than the noise, in so few steps
        ("fds", lambda step: 44 + (step % 20 == 0), ""),  # while a save goes on
        ("fds", lambda step: 44 + step // 50, "1 more file descriptors"),
        ("threads", lambda step: 24 + (step > 60), ""),  # once, in the first half
    ],
)
def test_flatness(quantity: str, held: object, growth: str) -> None:
    flat = dict.fromkeys(("rss", "tensors", "objects", "fds", "threads", "groups"), 1)
    lines = [{**flat, "step": step, quantity: held(step)} for step in range(0, 200, 5)]  # type: ignore[operator]
    still = [{**flat, "step": step} for step in range(0, 200, 5)]
    lives = [Life(name, None, [still, lines, still], [], []) for name in ("undisturbed", "life1")]
    names = ("undisturbed", "between restarts")
    assert growths(lives) == [f"rank 1, {name}: {growth}" for name in names if growth]
