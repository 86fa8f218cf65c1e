"""The cost of watching: steps with the watch and without it, in turns, in the same processes.

`python -m benchmarks.watch [--rounds N]` prints the median of the ratios of each pair of rounds, with quartiles, and
the share of a core that the watch's own threads take, which other work on the machine does not disturb.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import multiprocessing
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, LlamaConfig

from pipeshard import PipelinePlugin, plugin
from pipeshard.runtime import agreement, optimizer, watching
from pipeshard.runtime.progress import Progress

# name: hidden size, layers, sequence length, microbatches, samples of each, steps in a round
WORKS = {"20 M parameters": (256, 8, 128, 8, 2, 2), "bound by overhead": (64, 8, 32, 64, 1, 1)}
STAGES = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="pairs of rounds after the warm-up")
    rounds = parser.parse_args().rounds
    table = Table(title="a step with the watch, as a multiple of one without")
    for column in ("work", "median", "quartiles", "ms with", "ms without", "threads"):
        table.add_column(column)
    for name in WORKS:
        with tempfile.TemporaryDirectory() as folder:
            context = multiprocessing.get_context("spawn")
            results = context.SimpleQueue()
            spawn(measure, (folder, name, rounds, results), STAGES)
            pairs, share = results.get()
        ratios = [watched / bare for watched, bare in pairs]
        low, median, high = statistics.quantiles(ratios, n=4)
        with_, without = (1e3 * statistics.median(times) for times in zip(*pairs))
        spread = f"{low:.4f} to {high:.4f}"
        table.add_row(name, f"{median:.4f}", spread, f"{with_:.1f}", f"{without:.1f}", f"{share:.3%}")
    Console().print(table)
    return 0


def measure(rank: int, folder: str, name: str, rounds: int, results: Any) -> None:
    """One rank: pairs of seconds a step, with the watch and without."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=STAGES)
    hidden, layers, length, microbatches, size, steps = WORKS[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=32000 if hidden > 64 else 256,
    )
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, config.vocab_size, (microbatches * size, length))
    batch = {"input_ids": ids, "labels": ids}
    pipeline = PipelinePlugin(STAGES, microbatches, max_norm=1.0, dry_run_input=batch)
    boosted, trained, *_ = pipeline.configure(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def seconds() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            pipeline.execute_pipeline(iter([batch]), boosted, None, trained)
            trained.step()  # type: ignore[union-attr]
            trained.zero_grad()  # type: ignore[union-attr]
        dist.barrier()
        return (time.perf_counter() - start) / steps

    pairs, shares = [], []
    for k in range(rounds + 2):
        order = (False, True) if k % 2 else (True, False)  # whichever comes first may find the machine busier
        times = {}
        for bare in order:
            with unwatched() if bare else nullcontext():
                before, start = own_seconds(), time.perf_counter()
                times[bare] = seconds()
                if not bare:
                    shares.append((own_seconds() - before) / (time.perf_counter() - start))
        pairs.append((times[False], times[True]))
    if rank == 0:
        results.put((pairs[2:], statistics.median(shares[2:])))
    dist.destroy_process_group()


def own_seconds() -> float:
    """Of CPU time, that the watch's threads have taken."""
    own = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("pipeshard-")}
    return sum(t.user_time + t.system_time for t in psutil.Process().threads() if t.id in own)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Without threads, and without what ranks note and say of the call they are at."""

    @contextlib.contextmanager
    def not_calling(name: str) -> Iterator[None]:
        yield None

    def wait(self: Progress, work: Any, ranks: Any) -> None:
        work.wait()

    watch = watching._watch
    assert watch is not None
    watch.stop()
    with contextlib.ExitStack() as stack:
        for module in (agreement, optimizer, plugin):
            stack.enter_context(mock.patch.object(module, "calling", not_calling))
        stack.enter_context(mock.patch.object(Progress, "start", lambda self, action: None))
        stack.enter_context(mock.patch.object(Progress, "wait", wait))
        yield
    watch.start()


if __name__ == "__main__":
    sys.exit(main())
