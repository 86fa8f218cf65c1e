"""torch.distributed.pipelining: Schedule1F1B over stages made by hand."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.speed.stages import HandStage, causal_loss
from benchmarks.speed.work import LEARNING_RATE, Batch, Work


class Trainer:
    """`compile` is True, or options of torch.compile: each layer is compiled by itself."""

    def __init__(self, work: Work, rank: int, size: int, compile: bool | dict[str, Any] = False) -> None:
        share = work.layers // size
        part = HandStage(work.model(), rank * share, (rank + 1) * share)
        options = dict(compile) if isinstance(compile, dict) else {}
        for layer in part.layers if compile else ():
            layer.compile(**options)
        stage = PipelineStage(part, rank, size, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, n_microbatches=work.microbatches, loss_fn=causal_loss)
        self.optimizer = torch.optim.AdamW(part.parameters(), lr=LEARNING_RATE)
        # torch knows no ties: each end has a copy, and the user sums their gradients.
        embedding = part.tokens if rank == 0 else part.head
        self.tied = embedding.weight if work.family == "gpt2" and embedding is not None else None
        self.first = rank == 0

    def step(self, batch: Batch) -> float | None:
        losses: list[torch.Tensor] = []
        if self.first:
            self.schedule.step(batch["input_ids"])
        else:
            self.schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
        if self.tied is not None:
            dist.all_reduce(self.tied.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else None

    def report(self) -> dict[str, Any]:
        return {}
