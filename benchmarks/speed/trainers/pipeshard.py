"""pipeshard: the Booster with PipelinePlugin."""

from typing import Any

import torch
from colossalai.booster import Booster

from benchmarks.speed.work import LEARNING_RATE, Batch, Work
from pipeshard import PipelinePlugin
from pipeshard.schedule import Kind


class Trainer:
    """`stages` is the number of equal parts into which the layers are split; if 0, the plugin's `partition` applies."""

    def __init__(self, work: Work, rank: int, size: int, stages: int = 0, **arguments: Any) -> None:
        model = work.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        if stages:
            layers = "model.layers" if work.family == "llama" else "transformer.h"
            arguments["partition"] = [f"{layers}.{work.layers * k // stages - 1}" for k in range(1, stages)]
        self.plugin = PipelinePlugin(
            pp_size=size, num_microbatches=work.microbatches, dry_run_input=work.batch(0), **arguments
        )
        self.booster = Booster(plugin=self.plugin)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)

    def step(self, batch: Batch) -> float:
        out = self.booster.execute_pipeline(iter([batch]), self.model, None, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(out["loss"])

    def report(self) -> dict[str, Any]:
        """Return for each stage: its unit calls, the seconds of F, B and W of a microbatch together (medians), and the
        cost that the partition predicted: in seconds with a profile, otherwise relative."""
        policy, recording = self.model.pipeline.policy, self.plugin.recording()
        units, expected = ([0.0] * len(policy.placement) for _ in range(2))
        for stage, cost in zip(policy.stages, policy.costs(), strict=True):
            units[stage] += 1
            expected[stage] += cost
        measured = [sum(kinds) for kinds in zip(*(recording.cost(kind) for kind in (Kind.F, Kind.B, Kind.W)))]
        profiled = policy.known_costs is not None
        return {"units": units, "measured": measured, "expected": expected, "profiled": profiled}
