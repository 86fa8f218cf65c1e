"""Remedies: a refusal names what a user can change, and the model that is changed so trains as it does unsplit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pool import Pool
from tests.remedies.table import EXACT, REMEDIES, Script
from tests.remedies.training import Training, run

pytestmark = pytest.mark.local

ROOT = Path(__file__).parent.parent
ELSEWHERE = {  # rows of docs/exact.md whose remedy another test executes
    "the criterion, or the forward after its last layer": "test_hunt.py::test_hunted",
    "torch's `clip_grad_norm_`": "test_updates.py::test_a_norm_of_one_stage_is_refused",
    "your own code that multiplies gradients": "test_updates.py::test_a_norm_of_ones_own_is_refused",
    "a learning rate, momentum or another option": "test_updates.py::test_groups_of_a_stage_and_schedules_are_exact",
    "activation checkpoints of your own": "engine/test_wrapped_models.py::test_no_cut_falls_inside_of_a_checkpoint",
    "an optimizer that was not boosted": (
        "test_loop.py::test_an_optimizer_that_was_not_boosted_is_refused_in_its_first_step"
    ),
    "several views of each sample": (
        "engine/test_loss_of_units.py::test_views_that_are_not_in_the_order_of_the_samples_are_refused_with_a_remedy"
    ),
    "packed sequences": (
        "graph/test_packed_sequences.py::test_lengths_of_a_packed_result_are_refused_and_the_remedy_works"
    ),
}
NOT_EXECUTED = {  # rows whose remedy is to leave something out or to do it earlier, and what the script is then
    "a model in DDP": "one without the wrapper",
    "DDP, accelerate or transformers' Trainer": "one without the wrapper",
    "modules, parameters and adapters put in after boost": "one that puts them in before boost",
    "a gradient that is None for a whole step": "one that detaches always or never",
    "hooks on accumulated gradients": "one without hooks",
}


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


@pytest.mark.turns
@pytest.mark.sampled(10)
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
    """The rows of all tables of a page."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return [line.removeprefix("| ") for line in lines if line.startswith("| ")]


def test_every_refused_row_has_a_remedy_or_is_listed() -> None:
    """A row of docs/exact.md that refuses something brings the remedy that is executed."""
    of_remedies = {row for remedy in REMEDIES.values() for row in remedy.rows if not row.startswith("`")}
    listed = of_remedies | ELSEWHERE.keys() | NOT_EXECUTED.keys()
    refusing = [row for row in rows("exact.md") if "refused" in row or "no cut" in row]
    assert [row for row in refusing if not any(map(row.startswith, listed))] == []
    assert [start for start in listed if not any(row.startswith(start) for row in rows("exact.md"))] == []


def test_remedies_name_errors_that_are_there() -> None:
    named = {row for remedy in REMEDIES.values() for row in remedy.rows if row.startswith("`")}
    for kind, example in (row.split(": ") for row in named):
        assert any(row.startswith(kind) and example in row for row in rows("errors.md")), example


@pytest.mark.parametrize("test", ELSEWHERE.values())
def test_what_is_executed_elsewhere_is_there(test: str) -> None:
    path, name = test.split("::")
    assert f"def {name}(" in (ROOT / "tests" / path).read_text()
