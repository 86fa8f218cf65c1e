"""Unsplit: one process with the whole model and gradient accumulation. Two of them run at once, like two ranks."""

from typing import Any

import torch

from benchmarks.speed.work import LEARNING_RATE, Batch, Work


class Trainer:
    def __init__(self, work: Work, rank: int, size: int) -> None:
        self.work, self.model = work, work.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self, batch: Batch) -> float:
        total = 0.0
        for part in self.work.split(batch):
            loss = self.model(**part).loss / self.work.microbatches
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def report(self) -> dict[str, Any]:
        return {}
