"""ZeRO-3 of DeepSpeed: each rank trains on its share of the samples, with parameters and states divided."""

from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
import torch.distributed as dist

from benchmarks.speed.work import LEARNING_RATE, Batch, Work


class Trainer:
    def __init__(self, work: Work, rank: int, size: int) -> None:
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        self.work, self.count, self.rank, self.size = work, work.microbatches // size, rank, size
        adamw = {"lr": LEARNING_RATE, "weight_decay": 0.01, "torch_adam": True, "adam_w_mode": True}
        config = {
            "train_micro_batch_size_per_gpu": work.microbatch,
            "gradient_accumulation_steps": self.count,
            "optimizer": {"type": "AdamW", "params": adamw},
            "zero_optimization": {"stage": 3},
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        }
        self.engine, *_ = deepspeed.initialize(model=work.model(), config=config)

    def step(self, batch: Batch) -> float:
        total = torch.zeros(())
        for part in self.work.split(batch)[self.rank * self.count : (self.rank + 1) * self.count]:
            loss = self.engine(**part).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach() / self.count
        dist.all_reduce(total)
        return float(total) / self.size

    def report(self) -> dict[str, Any]:
        return {}
