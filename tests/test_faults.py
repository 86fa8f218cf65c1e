"""Faults in small: a sample of what `make faults` plants, and of what becomes of it without each mechanism."""

from __future__ import annotations

import subprocess
import sys


def faults(*arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    return done.stdout


def test_one_fault_of_each_kind_ends_all_ranks_by_name_and_the_next_run_goes_on() -> None:
    assert "9 of 9 cases are as they should be" in faults("--sample")


def test_without_its_mechanism_a_fault_is_missed() -> None:
    assert "6 of 6 cases are as they should be" in faults("--disable", "1")
