"""Trainers: one file per library. Each has a class Trainer that runs one optimizer step on a batch."""

from typing import Any, Protocol

from benchmarks.speed.work import Batch


class Trainer(Protocol):
    """One rank of one contender, created with `Trainer(work, rank, size, **options)`."""

    def step(self, batch: Batch) -> float | None:
        """Run forward and backward of all microbatches, and the optimizer step. Returns the loss, if known here."""

    def report(self) -> dict[str, Any]:
        """Return the trainer's own measurements since the last report. Called on every rank."""
