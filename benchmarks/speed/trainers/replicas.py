"""Replicas: each rank trains the whole model on its share of the samples, with torch's DDP or FSDP2."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.speed.work import LEARNING_RATE, Batch, Work


class Trainer:
    """`by` is "ddp", "fsdp" (all-gathers the parameters of a layer for each microbatch), or "gathered" (all-gathers
    them once per step). Gradients are reduced once per step."""

    def __init__(self, work: Work, rank: int, size: int, by: str) -> None:
        self.work, self.rank, self.size, self.by = work, rank, size, by
        model: Any = work.model()
        if by == "ddp":
            model = DistributedDataParallel(model)
        else:
            for part in (*model.model.layers, model):
                fully_shard(part, reshard_after_forward=by == "fsdp")
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(self, batch: Batch) -> float:
        mine = self.work.share(batch, self.rank, self.size)
        total = torch.zeros(())
        for part in mine:
            with self._syncing(part is mine[-1]):
                loss = self.model(**part).loss / len(mine)
                loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total) / self.size

    def _syncing(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        if self.by == "ddp":
            return contextlib.nullcontext() if is_last else self.model.no_sync()
        self.model.set_requires_gradient_sync(is_last)
        if self.by == "gathered":
            self.model.set_reshard_after_backward(is_last)
        return contextlib.nullcontext()

    def report(self) -> dict[str, Any]:
        return {}
