"""Trainers: one file a library, each with a class Trainer that does one optimizer step on a batch."""

from typing import Any, Protocol

from benchmarks.speed.work import Batch


class Trainer(Protocol):
    """One rank of one contender, made as `Trainer(work, rank, size, **options)`."""

    def step(self, batch: Batch) -> float | None:
        """Forward and backward of all microbatches, and the optimizer's step; the loss, where this rank has it."""

    def report(self) -> dict[str, Any]:
        """Figures of its own about the steps since the last report; every rank is asked for it."""
