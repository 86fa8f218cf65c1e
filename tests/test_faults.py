"""Tests of a sample of `make faults`: injected faults, and their results without each mechanism."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.mechanisms import RELIES
from tests.faults.plant import all_cases
from tests.faults.report import Result, write_table


def faults(*arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.turns
@pytest.mark.parametrize("kinds", [2, pytest.param(14, marks=pytest.mark.slow)])
def test_one_fault_of_a_kind_ends_all_ranks_by_name_and_the_next_run_goes_on(kinds: int) -> None:
    assert f"{kinds} of {kinds} cases are as they should be" in faults("--sample", str(kinds))


def test_every_case_relies_on_one_mechanism() -> None:
    assert {sum(relies(case) for relies in RELIES.values()) for case in all_cases()} == {1}


@pytest.mark.slow
def test_without_its_mechanism_a_fault_is_missed() -> None:
    assert "9 of 9 cases are as they should be" in faults("--disable", "1")


def test_the_table_has_the_slowest_stage_and_what_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results -->\nold\n<!-- end of results -->\nafter\n")
    hung = Result("hang", "middle", "steady", 9.0, ["rank 1 is still there"])
    write_table([Result("NaN", "first", "save", 1.0, []), Result("NaN", "last", "save", 1.26, []), hung], page)
    lines = page.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines
    assert "| NaN |  |  |  |  |  |  | 1.3 s |  |" in lines
    assert "| hang |  |  | **fails** (middle) |  |  |  |  |  |" in lines
