"""Remedies: a refusal names what a user can change, and the model that is changed so trains as it does unsplit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pool import Pool
from tests.remedies.table import EXACT, REMEDIES, Script
from tests.remedies.training import Training, run

ROOT = Path(__file__).parent.parent


def outcome(script: Script) -> tuple[str, list[str]]:
    """What this rank raises, or what differs from the unsplit model."""
    try:
        return "", run(script) if isinstance(script, Training) else script()
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}", []


def refused(name: str) -> tuple[str, list[str]]:
    return outcome(REMEDIES[name].wrong)


def remedied(name: str) -> list[tuple[str, list[str]]]:
    return [outcome(script) for script in REMEDIES[name].right]


def exact(name: str) -> tuple[str, list[str]]:
    return outcome(EXACT[name])


@pytest.mark.parametrize("name", REMEDIES)
def test_a_remedy_works(pool: Pool, name: str) -> None:
    """Errors named remedies that nobody had followed, and some of these were refused in turn or trained something
    else."""
    for error, differences in pool.run(refused, 2, name):
        assert error.startswith("pipeshard.") and re.search(REMEDIES[name].says, error), (error, differences)
    for outcomes in pool.run(remedied, 2, name):
        assert outcomes == [("", [])] * len(REMEDIES[name].right)


@pytest.mark.parametrize("name", EXACT)
def test_what_was_refused_for_nothing_is_exact(pool: Pool, name: str) -> None:
    """`logits[mask.bool()]` with a float mask was refused, since its mean was tried over the mask's sum alone."""
    assert pool.run(exact, 2, name) == [("", [])] * 2


@pytest.mark.parametrize("name", ["a table that is cut", "bags that are cut", "edges of three microbatches"])
def test_a_microbatch_that_does_not_run_is_a_batch_error_on_every_rank(pool: Pool, name: str) -> None:
    """One rank raised the model's own IndexError, and the others RankError, where the whole batch runs."""
    assert all("BatchError" in error for error, _ in pool.run(refused, 2, name))


def rows(page: str) -> list[str]:
    """The first cells of the first table of a page, and in docs/errors.md the error with its examples."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return [line.strip("| ").split(" | ")[0] if page == "exact.md" else line for line in lines if line.startswith("| ")]


def test_remedies_name_rows_that_are_there() -> None:
    known = [*rows("exact.md"), *(line.strip("| ").replace(" | ", ": ") for line in rows("errors.md"))]
    for remedy in REMEDIES.values():
        for row in remedy.rows:
            assert any(row.split(": ")[-1] in cell for cell in known), row
