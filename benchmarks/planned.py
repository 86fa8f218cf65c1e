"""Planned: the peak memory and the time of a step, compared with the predictions of `pipeshard.plan`.

`python -m benchmarks.planned` trains a llama of 50 million parameters, built on meta, with layouts that differ in
precision, replicas, recompute and stages; two layouts train adapters on packed (quantized) weights. For the rank with
the largest planned memory, it prints the peak resident memory, minus that after steps of a tiny model. If each rank
has its own core, it also prints the time of a step. Both are compared with the plan. The allocator returns freed memory
to the system immediately. Units are timed on all ranks at the same time, as they run in a step.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # a dynamic threshold keeps freed blocks in the heap
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "65536")

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from torch.multiprocessing import Manager
from torch.multiprocessing.spawn import spawn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.resident import peak, reset_peak, resident
from pipeshard import PipelinePlugin, plan
from pipeshard.checkpoint.lora import enable_lora
from pipeshard.planner import Plan
from pipeshard.planner.models import QUANTIZATIONS

SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 16000}
LAYERS, TINY = 8, 2
ROWS, MICROBATCHES, LENGTH = 8, 4, 256  # per replica
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"precision": "bf16"}),
    (2, {"precision": "bf16", "recompute": True}),
    (4, {"recompute": True}),
    (2, {"dp_size": 2, "zero_stage": 1}),
    (2, {"dp_size": 2, "zero_stage": 1, "precision": "bf16"}),
    (2, {"quantize": "nf4"}),
    (2, {"quantize": "int8"}),
]
LORA = LoraConfig(r=16, target_modules="all-linear")
STEPS = 2  # the second one is like all later steps
BAR = 0.10


def make(layers: int, folder: str, quantize: str | None) -> Any:
    """Build the model on meta. With `quantize`, add adapters, and load packed weights from a folder in boost."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers, dtype=torch.float32))
    if quantize is None:
        return model
    packing = {"quantization_config": BitsAndBytesConfig(**QUANTIZATIONS[quantize])}
    model = PipelinePlugin.from_pretrained(LlamaForCausalLM, f"{folder}/{layers}", **packing).train()
    return enable_lora(model, None, LORA, None)


def make_batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(0, SIZES["vocab_size"], (ROWS, LENGTH))
    return {"input_ids": ids, "labels": ids}


def joined(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{store}")


def study(rank: int, world: int, p: int, options: dict[str, Any], timed: bool, folder: str, plans: Any) -> None:
    """Make a plan. If `timed`, units are timed on all ranks at the same time."""
    joined(rank, world, f"{folder}/plans")
    counted = dict(options)
    model = make(LAYERS, folder, counted.pop("quantize", None))
    if counted.pop("recompute", False):
        model.gradient_checkpointing_enable()
    dist.barrier()
    partition = "profile" if timed else "auto"
    plans[rank] = plan(
        model, make_batch(), p, num_microbatches=MICROBATCHES, schedule="1f1b", partition=partition, **counted
    )
    dist.barrier()
    dist.destroy_process_group()


def step(layers: int, p: int, options: dict[str, Any], counts: Any, steps: int, folder: str) -> list[float]:
    """Boost a model and run `steps` steps. Returns the seconds of each, without the optimizer step, as in a plan."""
    options = dict(options)
    batch, model = make_batch(), make(layers, folder, options.pop("quantize", None))
    shared: dict[str, Any] = {"dry_run_input": batch, "init_weights": True, "verify": False}
    booster = Booster(plugin=PipelinePlugin(p, num_microbatches=MICROBATCHES, partition=counts, **shared, **options))
    # foreach is torch's default on a GPU, and the plan assumes it.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(trained, foreach=True))
    seconds = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        booster.execute_pipeline(iter([batch]), boosted, None, optimizer)
        seconds.append(time.perf_counter() - start)
        optimizer.step()
        optimizer.zero_grad()
    return seconds


def measure(
    rank: int, world: int, p: int, options: dict[str, Any], counts: Any, timed: int, folder: str, results: Any
) -> None:
    joined(rank, world, f"{folder}/steps")
    step(TINY, p, options, "uniform", STEPS, folder)
    gc.collect()
    floor = resident()
    reset_peak()
    seconds = step(LAYERS, p, options, counts, STEPS + timed, folder)
    results[rank] = peak() - floor, seconds[STEPS:]
    dist.barrier()
    dist.destroy_process_group()


def row(p: int, options: dict[str, Any], timed: int) -> tuple[list[str], list[float]]:
    """Return a row of the table, and its ratios of measured to planned values."""
    world = p * options.get("dp_size", 1)
    timed = timed if world <= len(os.sched_getaffinity(0)) else 0
    with Manager() as manager, tempfile.TemporaryDirectory() as folder:
        plans: Any = manager.dict()
        results: Any = manager.dict()
        for layers in (TINY, LAYERS) if "quantize" in options else ():
            config = LlamaConfig(**SIZES, num_hidden_layers=layers, dtype=torch.float32)
            LlamaForCausalLM(config).save_pretrained(f"{folder}/{layers}")
        planners = world if timed else 1
        spawn(study, (planners, p, options, bool(timed), folder, plans), nprocs=planners)
        planned: Plan = plans[0]
        spawn(measure, (world, p, options, planned.counts, timed, folder, results), nprocs=world)
        found = dict(results)
        predicted = statistics.median(each.estimate.time for each in dict(plans).values())
    fullest = planned.estimate.fullest
    most = max(taken for rank, (taken, _) in found.items() if rank // (world // p) == fullest)
    ratios = [most / planned.estimate.peak]
    name = ", ".join([f"p={p}", *(f"{key}={value}" for key, value in options.items())])
    line = [name, str(fullest), f"{planned.estimate.peak / 1e6:.0f}", f"{most / 1e6:.0f}", f"{ratios[0]:.3f}"]
    if not timed:
        return [*line, "-", "-", "-"], ratios
    taken = statistics.median(map(max, zip(*(seconds for _, seconds in found.values()), strict=True)))
    ratios.append(taken / predicted)
    return [*line, f"{predicted:.2f}", f"{taken:.2f}", f"{ratios[1]:.3f}"], ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, nargs="+", default=range(len(LAYOUTS)), help="numbers (default: all)")
    parser.add_argument("--timed", type=int, default=9, help="timed steps; 0 measures only memory")
    arguments = parser.parse_args()
    console = Console(width=150)
    table = Table("layout", "rank", "MB planned", "measured", "ratio", "s planned", "measured", "ratio")
    worst = 0.0
    for p, options in (LAYOUTS[k] for k in arguments.layouts):
        line, ratios = row(p, options, arguments.timed)
        console.print(*line)
        table.add_row(*line)
        worst = max(worst, *(abs(ratio - 1) for ratio in ratios))
    console.print(table)
    console.print(f"largest deviation {worst:.1%} (target: at most {BAR:.0%})")
    raise SystemExit(worst > BAR)


if __name__ == "__main__":
    main()
