"""Limit: the time of the stages' computation without messages and waiting, while both ranks compute.

Rank r holds the layers of its stage as two halves (chunks 2r and 2r+1), and runs them on random inputs.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.resident import resident
from benchmarks.speed.stages import HandStage, causal_loss
from benchmarks.speed.work import LEARNING_RATE, Batch, Work

CHUNKS = 2  # per rank


class Trainer:
    """Measures F, B and W of each chunk. B is the backward with all parameters frozen. W is the additional time of the
    backward without frozen parameters. The optimizer's step updates all parameters of the rank."""

    def __init__(self, work: Work, rank: int, size: int) -> None:
        self.work, model = work, work.model()
        share = work.layers // (size * CHUNKS)
        numbers = range(rank * CHUNKS, (rank + 1) * CHUNKS)
        self.chunks = [HandStage(model, k * share, (k + 1) * share) for k in numbers]
        self.parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE)
        self._clear()

    def step(self, batch: Batch) -> None:
        for part in self.work.split(batch):
            for k, chunk in enumerate(self.chunks):
                self._pass(k, chunk, part)
                for parameter in chunk.parameters():
                    parameter.requires_grad_(False)
                self._pass(k, chunk, part, frozen=True)
                for parameter in chunk.parameters():
                    parameter.requires_grad_(True)
            self.passes += 1
        self._timed("optimizer", 0, self.optimizer.step)
        self.optimizer.zero_grad()
        self.steps += 1

    def report(self) -> dict[str, Any]:
        """Return mean seconds of F, B, W per chunk and of the optimizer's step, and the bytes of F's activations."""
        forward, frozen, whole = ([t / self.passes for t in self.seconds[key]] for key in ("F", "B", "B+W"))
        weight = [max(0.0, both - one) for both, one in zip(whole, frozen)]
        optimizer = self.seconds["optimizer"][0] / self.steps
        figures = {"F": forward, "B": frozen, "W": weight, "optimizer": optimizer, "activation": self.activation}
        self._clear()
        return figures

    def _clear(self) -> None:
        self.seconds = {key: [0.0] * CHUNKS for key in ("F", "B", "B+W", "optimizer")}
        self.activation = [0] * CHUNKS
        self.passes = self.steps = 0

    def _pass(self, k: int, chunk: HandStage, part: Batch, frozen: bool = False) -> None:
        if chunk.tokens is None:
            entering = torch.randn(*part["input_ids"].shape, self.work.hidden, requires_grad=True)
        else:
            entering = part["input_ids"]
            if frozen:  # all parameters are frozen, but the backward must reach the embedding's result
                entering = chunk.embed(entering).requires_grad_(True)
        before = resident()
        if frozen:
            leaving = _forward(chunk, chunk.run, entering, part)
            gradient = torch.ones_like(leaving)
            self._timed("B", k, lambda: leaving.backward(gradient))
        else:
            leaving = self._timed("F", k, lambda: _forward(chunk, chunk, entering, part))
            self.activation[k] = resident() - before
            gradient = torch.ones_like(leaving)
            self._timed("B+W", k, lambda: leaving.backward(gradient))

    def _timed(self, key: str, k: int, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        self.seconds[key][k] += time.perf_counter() - start
        return result


def _forward(chunk: HandStage, run: Callable[[Tensor], Tensor], entering: Tensor, part: Batch) -> Tensor:
    leaving = run(entering)
    return leaving if chunk.head is None else causal_loss(leaving, part["labels"])
