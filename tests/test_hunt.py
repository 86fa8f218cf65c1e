"""Tests of models as users write them: they train exactly, or are refused by name; each once trained silently wrong."""

from __future__ import annotations

import re

import pytest

from tests.hunt import attempts, branches, cases, freezing, gradients, later, marks, patches
from tests.hunt.cases import Case
from tests.hunt.run import run
from tests.pool import Pool

pytestmark = pytest.mark.local

CASES = cases.CASES | branches.CASES | attempts.CASES | gradients.CASES | freezing.CASES | marks.CASES | later.CASES
CASES |= patches.CASES


def outcome(name: str) -> tuple[str, list[str]]:
    """What this rank says of a case: the error, or what differs."""
    try:
        return "", run(CASES[name])
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}", []


def mechanism(name: str) -> tuple[object, ...]:
    """Whether a case is refused, and what it has besides a model: cases are drawn so that each of these occurs."""
    case: Case = CASES[name]
    return bool(case.refused), *(function is None for function in (case.prepare, case.between, case.criterion))


@pytest.mark.sampled(10, kind=mechanism)
@pytest.mark.parametrize("name", CASES)
def test_hunted(pool: Pool, name: str) -> None:
    case: Case = CASES[name]
    for error, differences in pool.run(outcome, 2, name, timeout=120):
        if case.refused:
            assert error.startswith("pipeshard.errors.") and re.search(case.refused, error), (error, differences)
        else:
            assert (error, differences) == ("", []), case.story
