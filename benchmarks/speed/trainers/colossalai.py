"""ColossalAI: the Booster with HybridParallelPlugin, tensor parallelism 1, pipeline parallelism `size`, no ZeRO."""

from typing import Any

import torch
import torch.distributed as dist

# Its communication looks for a backend that only torch's builds for Ascend have; its GPT-2 always sets a CUDA device.
dist.is_hccl_available = lambda: False  # type: ignore[attr-defined]
torch.cuda.set_device = lambda device: None

from colossalai.booster import Booster  # noqa: E402
from colossalai.booster.plugin import HybridParallelPlugin  # noqa: E402

from benchmarks.speed.work import LEARNING_RATE, Batch, Work  # noqa: E402


class Trainer:
    def __init__(self, work: Work, rank: int, size: int, **arguments: Any) -> None:
        model = work.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        plugin = HybridParallelPlugin(
            tp_size=1, pp_size=size, zero_stage=0, precision="fp32", num_microbatches=work.microbatches, **arguments
        )
        self.work, self.booster = work, Booster(plugin=plugin)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)

    def step(self, batch: Batch) -> float | None:
        if self.work.family == "gpt2":  # required by its GPT-2
            batch = batch | {"attention_mask": torch.ones_like(batch["input_ids"])}
        out = self.booster.execute_pipeline(
            iter([batch]), self.model, lambda outputs, inputs: outputs.loss, self.optimizer, return_loss=True
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return None if out["loss"] is None else float(out["loss"])

    def report(self) -> dict[str, Any]:
        return {}
