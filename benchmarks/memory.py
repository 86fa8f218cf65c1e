"""Memory: the peak memory of a rank, relative to its parameters, while a model is materialized, saved and loaded, and
while adapters are added, including adapters on a 4-bit base.

`python -m benchmarks.memory [--p 2 4]` builds a llama of 1.1 billion parameters on meta. For each phase, it prints the
peak resident memory above that of the imports, divided by the bytes of the rank's parameters. For the 4-bit base, it
prints both values in MB, because its parameters are small compared with Python's memory and one matrix.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from torch.multiprocessing import Manager
from torch.multiprocessing.spawn import spawn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.resident import peak, reset_peak
from pipeshard import PipelinePlugin
from pipeshard.split.materialize import is_released
from pipeshard.split.packed import packed_layers
from pipeshard.split.quantized import quantize_blank

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
PHASES = ("materialize", "save", "load", "adapters")
PACKED = "packed"
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
BAR = 1.10


def boosted(p: int, folder: str | None, phase: str) -> tuple[Booster, Any]:
    ids = torch.zeros(2, 16, dtype=torch.int64)
    sample = {"input_ids": ids, "labels": ids}
    plugin = PipelinePlugin(pp_size=p, num_microbatches=2, dry_run_input=sample, init_weights=folder is None)
    booster = Booster(plugin=plugin)
    if phase in ("adapters", PACKED):
        torch.manual_seed(0)
        packing = {"quantization_config": BitsAndBytesConfig(**NF4)} if phase == PACKED else {}
        blank = PipelinePlugin.from_pretrained(LlamaForCausalLM, str(folder), **packing)
        model, *_ = booster.boost(booster.enable_lora(blank, lora_config=LoraConfig(r=16, target_modules="all-linear")))
        return booster, model
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model, *_ = booster.boost(model)
    if folder is not None:
        booster.load_model(model, folder)
    return booster, model


def measure(rank: int, p: int, store: str, folder: str, phases: tuple[str, ...], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=p, init_method=f"file://{store}")
    import_floor()
    reset_peak()
    floor = peak()
    rows = {}
    booster, model = boosted(p, None if "save" in phases else folder, phases[0])
    held = sum(parameter.nbytes for parameter in model.pipeline.held_parameters())
    held += sum(layer.scales for _, layer in packed_layers(model.unwrap()) if not is_released(layer.weight))
    rows[phases[0]] = peak() - floor
    if "save" in phases:
        reset_peak()
        booster.save_model(model, folder, shard=True)
        rows["save"] = peak() - floor
    results[rank] = held, rows
    dist.barrier()
    dist.destroy_process_group()


def import_floor() -> None:
    """Trigger the imports that transformers postpones until the first model of this kind is built."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 1}))
    quantize_blank(model, BitsAndBytesConfig(**NF4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--p", type=int, nargs="+", default=[2, 4], help="numbers of stages (default: 2 4)")
    table = Table("p", "rank", "holds (MB)", *PHASES, "packed (MB): holds, peak", title="peak memory / parameters")
    worst = 0.0
    with Manager() as manager, tempfile.TemporaryDirectory() as scratch:
        for p in parser.parse_args().p:
            found: dict[int, dict[str, int]] = {rank: {} for rank in range(p)}
            sizes: dict[tuple[int, str], int] = {}
            for phases in (("materialize", "save"), ("load",), ("adapters",), (PACKED,)):
                results: Any = manager.dict()
                store = os.path.join(scratch, f"store-{p}-{phases[0]}")
                spawn(measure, (p, store, os.path.join(scratch, f"model{p}"), phases, results), nprocs=p)
                for rank, (held, rows) in results.items():
                    sizes |= {(rank, phase): held for phase in phases}
                    found[rank] |= rows
            for rank in range(p):
                ratios = [found[rank][phase] / sizes[rank, phase] for phase in PHASES]
                worst = max(worst, *ratios)
                packed = f"{sizes[rank, PACKED] / 1e6:.0f}, {found[rank][PACKED] / 1e6:.0f}"
                held = f"{sizes[rank, PHASES[0]] / 1e6:.0f}"
                table.add_row(str(p), str(rank), held, *(f"{ratio:.3f}" for ratio in ratios), packed)
    Console().print(table)
    Console().print(f"worst {worst:.3f} (target: at most {BAR:.2f})")
    raise SystemExit(worst > BAR)


if __name__ == "__main__":
    main()
