"""Watch: the cost of the watchdog. Steps with and without it run in turns, in the same processes.

`python -m benchmarks.watch [--rounds N]` prints the ratios of each pair of rounds (median and quartiles), in seconds
and in CPU seconds of a rank, which other processes disturb less. The cost is too small to be visible in these ratios.
The table therefore also has the CPU time of the watchdog's threads, as a share of a core (the kernel counts it in
nanoseconds), and the time of all progress notes and call comparisons of a step, as a share of the step (each kind of
note is timed a thousand times).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from timeit import timeit
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import multiprocessing
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, LlamaConfig

from pipeshard import PipelinePlugin, plugin
from pipeshard.distributed import collectives as consistency
from pipeshard.distributed import watching
from pipeshard.distributed.progress import NOW, Progress
from pipeshard.distributed.watch import Watch
from pipeshard.engine import optimizer

# name: hidden size, layers, sequence length, microbatches, samples per microbatch, steps per round
WORKS = {"20 M parameters": (256, 8, 128, 8, 2, 1), "bound by overhead": (64, 8, 32, 64, 1, 2)}
STAGES = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=31, help="pairs of rounds after the warm-up")
    rounds = parser.parse_args().rounds
    table = Table(title="time of a step with the watchdog / without it")
    for column in ("work", "seconds", "CPU seconds", "ms with", "ms without", "threads", "notes"):
        table.add_column(column)
    for name in WORKS:
        with tempfile.TemporaryDirectory() as folder:
            context = multiprocessing.get_context("spawn")
            results = context.SimpleQueue()
            spawn(measure, (folder, name, rounds, results), STAGES)
            watched, bare, share, noted = results.get()
        (with_, own_with), (without, own_without) = (list(zip(*rounds)) for rounds in (watched, bare))
        ms = (f"{1e3 * statistics.median(seconds):.1f}" for seconds in (with_, without))
        table.add_row(
            name,
            ratio(with_, without),
            ratio(own_with, own_without),
            *ms,
            f"{share:.3%}",
            f"{noted / statistics.median(without):.3%}",
        )
    Console().print(table)
    return 0


def ratio(watched: Sequence[float], bare: Sequence[float]) -> str:
    low, median, high = statistics.quantiles([a / b for a, b in zip(watched, bare, strict=True)], n=4)
    return f"{median:.4f} ({low:.4f} to {high:.4f})"


def measure(rank: int, folder: str, name: str, rounds: int, results: Any) -> None:
    """Run one rank. Measures seconds and CPU seconds of steps with and without the watchdog, the CPU share of its
    threads, and the seconds that a step spends on notes."""
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
    pipeline = PipelinePlugin(STAGES, num_microbatches=microbatches, max_norm=1.0, dry_run_input=batch)
    boosted, trained, *_ = pipeline.configure(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def step() -> None:
        pipeline.execute_pipeline(iter([batch]), boosted, None, trained)
        trained.step()  # type: ignore[union-attr]
        trained.zero_grad()  # type: ignore[union-attr]

    def seconds() -> tuple[float, float]:
        dist.barrier()
        start, own = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        dist.barrier()
        return (time.perf_counter() - start) / steps, (time.process_time() - own) / steps

    watched, bare, shares = [], [], []
    for k in range(rounds + 2):
        for watches in (False, True) if k % 2 else (True, False):  # alternate which is first
            if not watches:
                with unwatched():
                    bare.append(seconds())
                continue
            before, start = thread_seconds(), time.perf_counter()
            watched.append(seconds())
            shares.append((thread_seconds() - before) / (time.perf_counter() - start))
    noted = note_seconds(step)
    if rank == 0:
        results.put((watched[2:], bare[2:], statistics.mean(shares[2:]), noted))
    dist.destroy_process_group()


def thread_seconds() -> float:
    """Return the CPU seconds that the watchdog's threads have used."""
    own = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("pipeshard-")]
    return sum(int(Path(f"/proc/{os.getpid()}/task/{task}/schedstat").read_text().split()[0]) for task in own) / 1e9


def note_seconds(step: Callable[[], None]) -> float:
    """Return the seconds of all notes of a step, and of comparing the current call between ranks."""
    watch = watching._here.watch
    assert watch is not None
    done = SimpleNamespace(wait=lambda: None)

    def call() -> None:
        with watch.call("optimizer.step"):
            pass

    each: dict[tuple[Any, str], Callable[[], Any]] = {
        (Progress, "start"): lambda: NOW.start("a note"),
        (Progress, "wait"): lambda: NOW.wait(done, (0,)),
        (Watch, "call"): call,
        (consistency, "compare_calls"): lambda: consistency.meet(watch.world, watch.named),
    }
    with contextlib.ExitStack() as stack:
        patches = {
            key: stack.enter_context(mock.patch.object(*key, autospec=True, side_effect=getattr(*key))) for key in each
        }
        step()
        counts = {key: counted.call_count for key, counted in patches.items()}
    counts[consistency, "compare_calls"] -= 1  # batches are also compared without the watchdog
    dist.barrier()
    return sum(counts[key] * timeit(note, number=1000) / 1000 for key, note in each.items())


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Disable the watchdog's threads, its notes, and the comparison of the current call between ranks."""

    @contextlib.contextmanager
    def not_calling(name: str) -> Iterator[None]:
        yield None

    def wait(self: Progress, work: Any, ranks: Any) -> None:
        work.wait()

    watch = watching._here.watch
    assert watch is not None
    watch.stop()
    with contextlib.ExitStack() as stack:
        for module in (consistency, optimizer, plugin):
            stack.enter_context(mock.patch.object(module, "calling", not_calling))
        stack.enter_context(mock.patch.object(Progress, "start", lambda self, action: None))
        stack.enter_context(mock.patch.object(Progress, "wait", wait))
        yield
    watch.start()


if __name__ == "__main__":
    sys.exit(main())
