"""DeepSpeed ZeRO-3: each rank trains on its share of the samples; parameters and optimizer states are sharded."""

from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
import torch.distributed as dist

from benchmarks.speed.trainers.deepspeed import settings
from benchmarks.speed.work import Batch, Work


class Trainer:
    def __init__(self, work: Work, rank: int, size: int) -> None:
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        self.work, self.rank, self.size = work, rank, size
        config = settings(work, work.microbatches // size) | {"zero_optimization": {"stage": 3}}
        self.engine, *_ = deepspeed.initialize(model=work.model(), config=config)

    def step(self, batch: Batch) -> float:
        mine, total = self.work.share(batch, self.rank, self.size), torch.zeros(())
        for part in mine:
            loss = self.engine(**part).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach() / len(mine)
        dist.all_reduce(total)
        return float(total) / self.size

    def report(self) -> dict[str, Any]:
        return {}
