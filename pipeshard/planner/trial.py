"""Trial: a few real steps of a model with random weights, on processes of this machine; the last one is recorded."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

from pipeshard.errors import ConfigurationError
from pipeshard.model.made_up import made_up
from pipeshard.planner.source import build
from pipeshard.runtime.recording import Recording
from pipeshard.runtime.watch import NOTE


@dataclass(frozen=True)
class Trial:
    """What to run: the model (see `source.build`), the sizes of a step, and arguments of the plugin."""

    source: str
    fields: Sequence[str]
    pp_size: int
    num_microbatches: int
    microbatch_size: int
    seq_len: int
    dtype: str
    plugin: dict[str, Any]
    steps: int = 3

    def run(self) -> Recording:
        """Run the steps on `pp_size` processes; raises ConfigurationError with what a process died of."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                spawn(_rank, (self, folder), nprocs=self.pp_size)
            except ProcessRaisedException as error:
                lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith(NOTE)]
                raise ConfigurationError(f"a process of the trial run failed: {lines[-1]}") from error
            return Recording.load(Path(folder) / "recording.json")


def _rank(rank: int, trial: Trial, folder: str) -> None:
    from colossalai.booster import Booster

    from pipeshard.plugin import PipelinePlugin

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // trial.pp_size))
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=trial.pp_size)
    model = build(trial.source, trial.fields, trial.dtype)
    batch = made_up(model, trial.num_microbatches * trial.microbatch_size, trial.seq_len)
    plugin = PipelinePlugin(trial.pp_size, num_microbatches=trial.num_microbatches, dry_run_input=batch, **trial.plugin)
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(trial.steps):
        with plugin.measuring():
            booster.execute_pipeline(iter([batch]), boosted, None, optimizer)
        optimizer.zero_grad()
    recording = plugin.recording()
    if rank == 0:
        recording.save(Path(folder) / "recording.json")
    dist.barrier()
    dist.destroy_process_group()
