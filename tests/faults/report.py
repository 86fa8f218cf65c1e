"""Report: the table of results in docs/reliability.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.plant import KINDS, PHASES

BEGIN, END = "<!-- results -->", "<!-- end of results -->"


@dataclass
class Result:
    """What came of a case: what is wrong (nothing, if it passed), and the seconds until all ranks were down."""

    kind: str
    stage: str
    phase: str
    seconds: float
    wrong: list[str]


def write_table(results: Sequence[Result], page: Path) -> None:
    """Put it where the page has the two marks."""
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{table(results)}{END}{after}")


def table(results: Sequence[Result]) -> str:
    """A row for each kind of fault, a column for each moment: the worst time over the stages."""
    lines = [f"| fault | {' | '.join(PHASES)} |", "|---|" + "---|" * len(PHASES)]
    for kind in KINDS:
        cells = [_cell([r for r in results if (r.kind, r.phase) == (kind, phase)]) for phase in PHASES]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(results: Sequence[Result]) -> str:
    if not results:
        return ""
    failed = [r.stage for r in results if r.wrong]
    return f"**fails** ({', '.join(failed)})" if failed else f"{max(r.seconds for r in results):.1f} s"
