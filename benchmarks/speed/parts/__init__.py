"""Parts: one file per section of docs/benchmarks.md."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.progress import Progress

from benchmarks.speed.section import Section


@dataclass(frozen=True)
class Effort:
    """How much to measure: the rounds of each lane, and `quick` for small models and few steps."""

    rounds: int
    quick: bool


Part = Callable[[Effort, Progress], Section]
