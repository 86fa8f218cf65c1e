"""Command: a sweep that runs one check on the entries of some tasks, and writes its page."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.parity.entries import all_entries, find
from tests.parity.report import EXACT, FAILED, Row, short, worst
from tests.parity.sweep import Rows, sweep, versions


@dataclass(frozen=True)
class Page:
    """What a page says: `text` is formatted with the numbers of entries, of those that are able to do it unsplit and
    of those that are exact; `meaning` has a line for each outcome. With `has_notes` reasons of exact ones are shown."""

    command: str
    target: str
    title: str
    tasks: Sequence[str]
    text: str
    meaning: Mapping[str, str]
    has_notes: bool = False

    def of(self, rows: Sequence[Row], with_versions: Mapping[str, str]) -> str:
        """The page of these rows, with a table of what is not exact."""
        by_entry: dict[str, list[Row]] = {}
        for row in rows:
            by_entry.setdefault(row.entry, []).append(row)
        kinds = {entry: worst([row.kind for row in of_entry]) for entry, of_entry in by_entry.items()}
        counts = Counter(kinds.values())
        exact, able = sum(counts[kind] for kind in EXACT), len(kinds) - counts["untrainable"]
        numbers: dict[str, Any] = {"entries": len(kinds), "able": able, "exact": exact, "share": exact / max(able, 1)}
        numbers["ps"] = " and ".join(map(str, sorted({row.p for row in rows})))
        made_by = ", ".join(f"{name} {version}" for name, version in with_versions.items())
        lines = [
            f"# {self.title}",
            "",
            self.text.format(**numbers),
            "",
            f"Written by `{self.target}` with {made_by}.",
            "",
            "| outcome | number | meaning |",
            "|---|---|---|",
            *(f"| {kind} | {counts[kind]} | {meaning} |" for kind, meaning in self.meaning.items()),
            "",
            "| architecture | p | outcome | why |",
            "|---|---|---|---|",
        ]
        for row in sorted(rows, key=lambda row: (row.entry, row.p)):
            is_shown = row.kind not in EXACT or (self.has_notes and row.reason)
            if is_shown and row.kind != "untrainable":
                lines.append(f"| {row.entry} | {row.p} | {row.kind} | {short(row.reason)} |")
        alike = sorted(entry for entry, kind in kinds.items() if kind in EXACT)
        lines += ["", f"{SAME}{', '.join(alike)}."]
        return "\n".join(lines) + "\n"


SAME = "As unsplit: "  # begins the line of all entries that are exact
OTHER = re.compile(r"^\| (\S+/\S+) \| \d+ \| (\w+) \|", re.MULTILINE)


def outcomes(page: Path) -> dict[str, str]:
    """What a page says of each entry: "yes", or how it is not."""
    text = page.read_text() if page.exists() else ""
    found = dict(OTHER.findall(text))
    for line in text.splitlines():
        if line.startswith(SAME):
            found |= dict.fromkeys(line.removeprefix(SAME).rstrip(".").split(", "), "yes")
    return found


def run(page: Page, row_of: Callable[..., Row], ranks: Callable[[int], int] = lambda p: p) -> int:
    """The command of a page: sweep, and write it; 1 where an entry failed."""
    parser = argparse.ArgumentParser(prog=f"python -m {page.command}", description=page.title)
    parser.add_argument("entries", nargs="*", help="model types, or task/model_type; all of them by default")
    parser.add_argument("--p", default="2,3", help="numbers of stages (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="the page")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there, and run the others")
    arguments = parser.parse_args()
    named = {entry for text in arguments.entries for entry in find(text)} or set(all_entries())
    entries = [entry for entry in all_entries() if entry.task in page.tasks and entry in named]
    ps = sorted(map(int, arguments.p.split(",")))
    file = Path("outputs") / f"{arguments.output.stem}.jsonl" if arguments.output else None
    rows = Rows(file, arguments.resume)
    missing = rows.missing(entries, ps)

    def save(row: Row) -> None:
        rows.add(row)
        sys.stderr.write(f"{row.kind} {row.entry} p={row.p} {'' if row.kind in EXACT else short(row.reason)}\n")

    if any(missing.values()):
        sweep(missing, save, row_of, ranks)
    if arguments.output:
        arguments.output.write_text(page.of(rows.rows, versions()))
    return int(any(row.kind in FAILED for row in rows.rows))
