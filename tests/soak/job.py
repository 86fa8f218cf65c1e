"""The job: one rank of a training run, from its newest state to the step at which it stops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch import nn

from pipeshard import PipelinePlugin, load_training_state, save_training_state
from pipeshard.checkpoint.training_state import newest_step
from tests import zoo
from tests.faults.job import digest
from tests.faults.ranks import Ranks
from tests.soak.course import EVALUATION, EXPORT, MICROBATCH, SAVE, SIZE, VALIDATION, Batches, Course, Stop
from tests.soak.meter import Meter
from tests.soak.plant import Plant

STATES, DIGEST = "states", "digest"


def run(ranks: Ranks, folder: Path, name: str, course: Course, stop: Stop | None, plants: Sequence[Plant]) -> int:
    """Train until `stop`, or undisturbed to the end; the end leaves a digest of the parameters."""
    ranks.join()
    job = Job(folder, name, course, plants)
    if stop is None:
        job.train(course.steps)
    else:
        job.train(course.steps if stop.victim is not None else stop.step, disturbed=True)
    (folder / f"{DIGEST}-{name}-{job.rank}").write_text(digest(job.model))
    dist.destroy_process_group()
    return 0


class Job:
    """What `run` trains."""

    def __init__(self, folder: Path, name: str, course: Course, plants: Sequence[Plant]) -> None:
        self.folder, self.course, self.plants, self.rank = folder, course, plants, dist.get_rank()
        self.progress = folder / f"progress-{name}"
        self.plugin = PipelinePlugin(SIZE, microbatch_size=MICROBATCH, max_norm=1.0, check_finite=True, timeout=30.0)
        model = zoo.build("gpt2")
        for dropout in (module for module in model.modules() if isinstance(module, nn.Dropout)):
            dropout.p = 0.1  # so that a restart has to go on with the random numbers, too
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.loader = self.plugin.prepare_dataloader(Batches(course), batch_size=None)
        self.booster = Booster(plugin=self.plugin)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer, dataloader=self.loader)
        self.meter = Meter(folder / f"{name}-{self.rank}.jsonl", self.model.pipeline)

    def train(self, until: int, disturbed: bool = False) -> None:
        first = self._resume() if disturbed else 0
        batches = iter(self.loader)
        for step in range(first, until):
            if self.rank == 0:
                self.progress.write_text(str(step))
            self.booster.execute_pipeline(batches, self.model, None, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if disturbed:
                self._beside(step, last=step + 1 == until)
            for plant in self.plants:
                plant(self.rank, self.course.batch(step))
            self.meter(step)

    def _resume(self) -> int:
        states = self.folder / STATES
        if newest_step(states) is None:
            return 0
        first = load_training_state(states, self.model, self.optimizer, dataloader=self.loader)
        self.loader.place.batches -= any(plant.kind == "restart" for plant in self.plants)
        return first

    def _beside(self, step: int, last: bool) -> None:
        """All that must not change the training."""
        if self.course.falls("evaluation", EVALUATION, step):
            self._evaluate(step)
        if self.course.falls("export", EXPORT, step):
            self.booster.save_model(self.model, str(self.folder / "export"), shard=True, use_async=True)
        if self.course.falls("save", SAVE, step) or last:
            states = self.folder / STATES
            save_training_state(states, step + 1, self.model, self.optimizer, dataloader=self.loader, keep=2)

    def _evaluate(self, step: int) -> None:
        self.model.eval()
        data = self.course.batch(-1 - step % VALIDATION)
        with torch.no_grad():
            self.booster.execute_pipeline(iter([data]), self.model, None, return_outputs=True)
        self.model.train()
