"""Planned: the most memory that ranks take in a step, beside what `pipeshard.plan` says.

`python -m benchmarks.planned` trains a llama of 50 million parameters, built on meta, under layouts that differ in
precision, replicas, recompute and stages, and prints for the fullest rank the peak of its resident memory above what
it has after a step of a tiny model, and its ratio to the plan. Freed memory is given back to the system at once.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from typing import Any

os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # as fixed, or freed blocks stay in the heap
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "65536")

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from rich.console import Console
from rich.table import Table
from torch.multiprocessing import Manager
from torch.multiprocessing.spawn import spawn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.resident import peak, reset_peak, resident
from pipeshard import PipelinePlugin, plan

SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 16000}
LAYERS, TINY = 8, 2
ROWS, MICROBATCHES, LENGTH = 8, 4, 256
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"precision": "bf16"}),
    (2, {"precision": "bf16", "recompute": True}),
    (4, {"recompute": True}),
    (2, {"dp_size": 2, "zero_stage": 1}),
    (2, {"dp_size": 2, "zero_stage": 1, "precision": "bf16"}),
]
BAR = 0.10


def step(layers: int, p: int, options: dict[str, Any], counts: Any) -> None:
    """Boost a model, and make two steps."""
    torch.manual_seed(0)
    ids = torch.randint(0, SIZES["vocab_size"], (ROWS, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers, dtype=torch.float32))
    plugin = PipelinePlugin(
        p,
        num_microbatches=MICROBATCHES,
        dry_run_input=batch,
        init_weights=True,
        partition=counts,
        verify=False,
        **options,
    )
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), foreach=False))
    for _ in range(2):
        booster.execute_pipeline(iter([batch]), boosted, None, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def measure(rank: int, world: int, p: int, options: dict[str, Any], counts: Any, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{store}")
    step(TINY, p, options, "uniform")
    gc.collect()
    floor = resident()
    reset_peak()
    step(LAYERS, p, options, counts)
    results[rank] = peak() - floor
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    table = Table("layout", "rank", "planned (MB)", "measured", "ratio", title="the fullest rank of a step")
    worst = 0.0
    for p, options in LAYOUTS:
        counted = {name: value for name, value in options.items() if name != "recompute"}
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=LAYERS, dtype=torch.float32))
        if options.get("recompute"):
            model.gradient_checkpointing_enable()
        rows = ROWS // MICROBATCHES // options.get("dp_size", 1)
        sizes = {"num_microbatches": MICROBATCHES, "microbatch_size": rows, "seq_len": LENGTH}
        planned = plan(model, None, p, schedule="1f1b", **sizes, **counted)
        world = p * options.get("dp_size", 1)
        with Manager() as manager, tempfile.TemporaryDirectory() as folder:
            results: Any = manager.dict()
            spawn(measure, (world, p, options, list(planned.counts), f"{folder}/store", results), nprocs=world)
            peaks = dict(results)
        rank = planned.estimate.fullest
        most = max(taken for other, taken in peaks.items() if other // (world // p) == rank)
        ratio = most / planned.estimate.peak
        worst = max(worst, abs(ratio - 1))
        name = ", ".join([f"p={p}", *(f"{key}={value}" for key, value in options.items())])
        table.add_row(name, str(rank), f"{planned.estimate.peak / 1e6:.0f}", f"{most / 1e6:.0f}", f"{ratio:.3f}")
    Console().print(table)
    Console().print(f"worst {worst:.1%} off, the bar is {BAR:.0%}")
    raise SystemExit(worst > BAR)


if __name__ == "__main__":
    main()
