"""Section: the results of one part of the benchmark: tables, targets met or missed, and raw measurements."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rich import table as rich_table
from rich.console import Console
from rich.markup import escape

FAILED = "failed"  # cell of a contender without results; the section lists the reason


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def print(self, console: Console) -> None:
        grid = rich_table.Table(title=self.title, title_justify="left")
        for k, column in enumerate(self.columns):
            grid.add_column(column, justify="right" if k else "left", no_wrap=not k)
        for row in self.rows:
            grid.add_row(*map(escape, row))
        console.print(grid)

    def markdown(self) -> list[str]:
        lines = [self.columns, ["---"] + ["---:"] * (len(self.columns) - 1), *self.rows]
        return [f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines), ""]


@dataclass(frozen=True)
class Bar:
    """A target of the project, and whether the measurements met it."""

    text: str
    met: bool

    def __str__(self) -> str:
        return f"{self.text}: {'met' if self.met else 'NOT MET'}"


@dataclass(frozen=True)
class Section:
    """`raw` is saved as JSON; `failed` lists the contenders that failed, or whose losses differ."""

    title: str
    text: str
    tables: Sequence[Table]
    bars: Sequence[Bar] = ()
    failed: Sequence[str] = ()
    raw: dict[str, Any] = field(default_factory=dict)

    def print(self, console: Console) -> None:
        console.rule(self.title)
        for table in self.tables:
            table.print(console)
        for line in (*map(str, self.bars), *(f"FAILED {line}" for line in self.failed)):
            console.print(line, markup=False)

    def markdown(self) -> list[str]:
        lines = [f"## {self.title}", "", self.text, ""]
        for table in self.tables:
            lines += table.markdown()
        lines += [f"- {bar}" for bar in self.bars]
        lines += [f"- failed: {line}" for line in self.failed]
        return lines if not (self.bars or self.failed) else [*lines, ""]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Self:
        saved = json.loads(path.read_text())
        saved["tables"] = [Table(**table) for table in saved["tables"]]
        saved["bars"] = [Bar(**bar) for bar in saved["bars"]]
        return cls(**saved)


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if seconds >= 0.1 else f"{1000 * seconds:.1f}"
