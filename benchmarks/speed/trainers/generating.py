"""Generating: new tokens for a batch of prompts, with pipeshard's stages or in one process."""

from typing import Any

import torch
from colossalai.booster import Booster

from benchmarks.speed.work import Batch, Work
from pipeshard import PipelinePlugin


class Trainer:
    """Generates `new` tokens per prompt. With `alone`, each process runs the whole model."""

    def __init__(
        self, work: Work, rank: int, size: int, new: int, num_microbatches: int | None = None, alone: bool = False
    ) -> None:
        model = work.model().eval()
        model.config.use_cache = True
        self.new, self.options = new, {} if alone else {"num_microbatches": num_microbatches}
        if not alone:
            layers = [f"model.layers.{work.layers * k // size - 1}" for k in range(1, size)]
            plugin = PipelinePlugin(
                pp_size=size, num_microbatches=1, dry_run_input=work.batch(0), partition=layers, verify=False
            )
            model, *_ = Booster(plugin=plugin).boost(model)
        self.model: Any = model

    def step(self, batch: Batch) -> float:
        """Generate, and return the sum of all tokens, to compare contenders."""
        ids = batch["input_ids"]
        with torch.no_grad():
            tokens = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.new,
                min_new_tokens=self.new,
                do_sample=False,
                pad_token_id=0,
                **self.options,
            )
        return float(tokens.sum())

    def report(self) -> dict[str, Any]:
        return {}
