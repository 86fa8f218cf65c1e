"""Tests of the helpers with which errors are written."""

from __future__ import annotations

import pytest

from pipeshard.errors import counted


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "rank", "0 ranks"),
        (1, "batch", "1 batch"),
        (2, "unit call", "2 unit calls"),
        (2, "microbatch", "2 microbatches"),
        (2, "process", "2 processes"),
        (3, "entry", "3 entries"),
    ],
)
def test_a_number_agrees_with_its_noun(count: int, noun: str, text: str) -> None:
    """Errors said "1 stages"; then each of them formed a plural in its own way."""
    assert counted(count, noun) == text
