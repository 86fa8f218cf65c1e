"""Course: the events in each step of a soak, which depend only on its seed and the number of the step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from tests import zoo

SIZE = 3  # ranks
MICROBATCH = 4  # rows, but for the last one of a batch
EVALUATION, SAVE, EXPORT = 7, 25, 60  # each happens once in so many steps, at a random one of them
VALIDATION = 8  # batches to evaluate on
LIFE = 175  # steps from one restart to the next, about


@dataclass(frozen=True)
class Stop:
    """All ranks end at this step: they save and leave or, if there is a victim, that rank is killed within the step."""

    step: int
    victim: int | None
    delay: float = 0.0  # seconds into the step


@dataclass(frozen=True)
class Course:
    """All steps of a soak. Those since the last save are repeated after a kill, so they are the same each time."""

    seed: int
    steps: int

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Rows that the size of a microbatch does not divide, of any length; in one batch of five, a microbatch has no
        labels. Those before step 0 are for evaluation."""
        draw = self._draw("batch", step)
        rows = MICROBATCH * draw.randint(0, 2) + draw.randint(1, MICROBATCH - 1)
        data: dict[str, torch.Tensor] = zoo.batch("gpt2", rows, draw.randint(4, 64), seed=draw.getrandbits(40))
        if rows > MICROBATCH and draw.random() < 0.2:
            first = MICROBATCH * draw.randrange(rows // MICROBATCH)
            data["labels"][first : first + MICROBATCH] = -100
        return data

    def falls(self, what: str, period: int, step: int) -> bool:
        """Whether `step` is the one of its `period` steps in which this happens."""
        block, place = divmod(step, period)
        return self._draw(what, block).randrange(period) == place

    def stops(self) -> Iterator[Stop]:
        """Restarts, killed and clean by turns, in the first two thirds; the last life is long, to show slow leaks."""
        first = self.steps * 2 / 3
        restarts = max(2, round(first / LIFE))
        for k in range(1, restarts + 1):
            draw = self._draw("stop", k)
            step = round((k + draw.uniform(-0.1, 0.1)) * first / restarts)
            yield Stop(step, draw.randrange(SIZE) if k % 2 else None, draw.uniform(0, 0.03))
        yield Stop(self.steps, None)

    def _draw(self, *of: object) -> random.Random:
        return random.Random(repr((self.seed, *of)))


class Batches(Dataset[Any]):
    """The batches of a course."""

    def __init__(self, course: Course) -> None:
        self.course = course

    def __len__(self) -> int:
        return self.course.steps

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        return self.course.batch(step)
