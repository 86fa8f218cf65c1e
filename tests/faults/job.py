"""The job: one rank of a small training run that saves after every step, and resumes from its newest state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch.utils.data import Dataset

from pipeshard import PipelinePlugin, load_training_state, save_training_state
from pipeshard.checkpoint.training_state import newest_step
from tests import zoo
from tests.faults.ranks import Ranks

SIZE = 4  # ranks
MICROBATCHES = 6
STEPS = 4
FAULTY = 2  # the step, from 0, in which the fault is
TIMEOUT = 3.0  # seconds of the watchdog


class Samples(Dataset[Any]):
    """Rows of one fixed batch, with uneven labels."""

    def __init__(self) -> None:
        self.data = zoo.batch("gpt2", rows=MICROBATCHES * STEPS)

    def __len__(self) -> int:
        return MICROBATCHES * STEPS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: value[index] for name, value in self.data.items()}


def run(ranks: Ranks, folder: Path, plant: Callable[[Any], None] = lambda job: None, timeout: Any = TIMEOUT) -> int:
    """Train to the end; `plant(job)` is called before the faulty step. Writes a digest of the parameters at the end."""
    ranks.join()
    job = Job(folder, timeout)
    job.train(plant)
    (folder / f"digest{job.rank}").write_text(digest(job.model))
    dist.destroy_process_group()
    return 0


class Job:
    """What `run` trains; faults are planted in it."""

    def __init__(self, folder: Path, timeout: Any) -> None:
        self.folder = folder
        self.plugin = PipelinePlugin(
            dist.get_world_size(), num_microbatches=MICROBATCHES, max_norm=1.0, timeout=timeout, check_finite=True
        )
        model = zoo.build("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.loader = self.plugin.prepare_dataloader(Samples(), batch_size=MICROBATCHES)
        self.booster = Booster(plugin=self.plugin)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer, dataloader=self.loader)
        self.rank = dist.get_rank()

    def train(self, plant: Callable[[Any], None]) -> None:
        states = self.folder / "states"
        begun = newest_step(states)
        done = 0 if begun is None else load_training_state(states, self.model, self.optimizer, dataloader=self.loader)
        self.batches = iter(self.loader)
        for step in range(done, STEPS):
            if step == FAULTY:
                plant(self)
            self.booster.execute_pipeline(self.batches, self.model, None, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            save_training_state(states, step + 1, self.model, self.optimizer, dataloader=self.loader)


def digest(model: Any) -> str:
    """Of the parameters that this rank holds."""
    state = hashlib.blake2b(digest_size=8)
    for name, parameter in sorted(model.unwrap().named_parameters()):
        if parameter.device.type != "meta" and parameter.untyped_storage().nbytes() >= parameter.nbytes:
            state.update(name.encode() + parameter.detach().numpy().tobytes())
    return state.hexdigest()
