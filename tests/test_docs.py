"""Docs: the snippets for users of other systems run as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted((DOCS / "coming-from").glob("*.md"))


def run(code: str) -> list[float]:
    """The losses of a snippet, on this rank."""
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(code, "snippet", "exec"), names)
    return names["losses"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_snippet_trains(pool: Pool, page: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    losses = [found for found in pool.run(run, 2, code) if found]
    assert all(found == losses[0] for found in losses) and losses[0][-1] < losses[0][0]


def test_there_is_a_page_for_each_system() -> None:
    assert [page.stem for page in PAGES] == ["accelerate", "colossalai", "deepspeed", "slapo", "varuna"]


def test_links_lead_somewhere() -> None:
    for page in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]:
        prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)\)", prose):
            assert (page.parent / target).exists(), f"{page}: {target}"
