"""Trial: runs a few steps on processes of this machine, for `pipeshard trace-run` and `demo`.

The command imports little before it starts the processes, which then import the other modules in parallel.
"""

import copy
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn
from torch.utils.data import DataLoader

from pipeshard.errors import ConfigurationError, VerificationError

if TYPE_CHECKING:
    from pipeshard.engine.recording import Recording


@dataclass(frozen=True)
class Trial:
    """A run of a model (see `planner.models.build_on_meta`) with random data. Each rank calls `make_booster(batch)`."""

    source: str
    fields: Sequence[str]
    pp_size: int
    num_samples: int
    seq_len: int
    dtype: str
    make_booster: Callable[[Any], Any]
    steps: int = 3

    def run(self) -> "Recording":
        """Run the steps on `pp_size` processes. Returns the recording of the last step.

        If a process fails, raises ConfigurationError with the error of that process.
        """
        from pipeshard.engine.recording import Recording

        with tempfile.TemporaryDirectory() as folder:
            _spawn(_rank, (self, folder), self.pp_size)
            return Recording.load(Path(folder) / "recording.json")


def _spawn(function: Callable[..., None], arguments: tuple[Any, ...], size: int) -> None:
    try:
        spawn(function, arguments, nprocs=size, daemon=True)
    except ProcessException as error:
        from pipeshard.distributed.watch import NOTE

        lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith(NOTE)]
        raise ConfigurationError(f"a process of the trial run failed: {lines[-1]}") from error


def _meet(rank: int, size: int, folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the command, which terminates its processes
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=size)


def _rank(rank: int, trial: Trial, folder: str) -> None:
    from pipeshard.batch.read import dummy_inputs
    from pipeshard.planner.models import build_on_meta

    _meet(rank, trial.pp_size, folder)
    model = build_on_meta(trial.source, trial.fields, trial.dtype)
    batch = dummy_inputs(model, trial.num_samples, trial.seq_len)
    booster = trial.make_booster(batch)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(trial.steps):
        booster.execute_pipeline(iter([batch]), boosted, None, optimizer)
        optimizer.zero_grad()
    recording = booster.plugin.recording()
    if rank == 0:
        recording.save(Path(folder) / "recording.json")
    dist.barrier()
    dist.destroy_process_group()


def train_demo(pp_size: int, steps: int) -> list[str]:
    """Train a randomly initialized llama with 8 layers and 0.6 million parameters, split across `pp_size` processes and
    unsplit in one process. Returns one line per step with both losses.

    Raises VerificationError if the losses differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        _spawn(_demo, (pp_size, steps, folder), pp_size)
        rows = json.loads((Path(folder) / "steps.json").read_text())
    lines = []
    for number, (split, unsplit, seconds) in enumerate(rows, 1):
        lines.append(f"step {number}: loss {split:.6f}, in one process {unsplit:.6f}, {1000 * seconds:.0f} ms")
    if any(abs(split - unsplit) > 1e-4 * abs(unsplit) for split, unsplit, _ in rows):
        raise VerificationError(
            f"the split and unsplit losses differ ({lines}), so this installation does not train correctly. Reinstall "
            "pipeshard, torch and transformers in a new environment"
        )
    return lines


def _demo(rank: int, pp_size: int, steps: int, folder: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from pipeshard.entry import initialize

    _meet(rank, pp_size, folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
            use_cache=False,
        )
    ).train()  # fmt: skip
    whole = copy.deepcopy(model)
    ids = torch.randint(256, (steps, 8, 64))
    batches: Any = [{"input_ids": step, "labels": step} for step in ids]
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = initialize(model, adam, None, DataLoader(batches, batch_size=None), pp_size=pp_size, num_microbatches=4)
    assert engine.optimizer is not None
    data, split = iter(batches), []
    for _ in batches:
        start = time.perf_counter()
        split.append((float(engine.execute_pipeline(data)["loss"]), time.perf_counter() - start))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    if rank == 0:
        plain, adam = [], torch.optim.AdamW(whole.parameters(), lr=1e-3)
        for batch in batches:
            loss = whole(**batch).loss
            plain.append(float(loss.detach()))
            loss.backward()
            adam.step()
            adam.zero_grad()
        rows = [(loss, one, seconds) for (loss, seconds), one in zip(split, plain)]
        (Path(folder) / "steps.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
