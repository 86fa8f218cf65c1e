"""Parts: one file for each question that the benchmark answers."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.progress import Progress

from benchmarks.speed.section import Section


@dataclass(frozen=True)
class Effort:
    """How much is measured: rounds of each lane, and `quick` for small models and few steps."""

    rounds: int
    quick: bool


Part = Callable[[Effort, Progress], Section]
