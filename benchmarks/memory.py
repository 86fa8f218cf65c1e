"""Memory: the peak memory of a rank, relative to its parameters, while a model is materialized, saved and loaded, and
while adapters are added, including adapters on a 4-bit base.

`python -m benchmarks.memory [--p 2 4]` builds a llama of 1.1 billion parameters on meta. For each phase, it prints the
peak resident memory, minus that of the imports, divided by the bytes of the rank's parameters.

For the 4-bit base, it prints three sizes in MB, while loading and in three steps of AdamW: the tensors that the rank
holds (the packed base and the adapters; in training also gradients and optimizer states), the peak above the imports,
and the peak of a narrow llama with as many layers (Python objects, code and threads).
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
NARROW = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
STATES = 3  # of a trained parameter: the gradient, and the two averages of AdamW
STEPS = 3
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
BAR = 1.10


def boosted(p: int, folder: str | None, phase: str) -> tuple[Booster, Any, Any]:
    plugin = PipelinePlugin(pp_size=p, num_microbatches=2, dry_run_input=sample(), init_weights=folder is None)
    booster = Booster(plugin=plugin)
    if phase in ("adapters", PACKED):
        torch.manual_seed(0)
        packing = {"quantization_config": BitsAndBytesConfig(**NF4)} if phase == PACKED else {}
        blank = PipelinePlugin.from_pretrained(LlamaForCausalLM, str(folder), **packing)
        model = booster.enable_lora(blank, lora_config=LoraConfig(r=16, target_modules="all-linear"))
        optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
        model, optimizer, *_ = booster.boost(model, optimizer)
        return booster, model, optimizer
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model, *_ = booster.boost(model)
    if folder is not None:
        booster.load_model(model, folder)
    return booster, model, None


def sample() -> dict[str, torch.Tensor]:
    ids = torch.zeros(2, 16, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def measure(rank: int, p: int, store: str, folder: str, phases: tuple[str, ...], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=p, init_method=f"file://{store}")
    import_floor()
    reset_peak()
    floor = peak()
    rows = {}
    booster, model, optimizer = boosted(p, None if "save" in phases else folder, phases[0])
    held = sum(parameter.nbytes for parameter in model.pipeline.held_parameters())
    held += sum(layer.scales for _, layer in packed_layers(model.unwrap()) if not is_released(layer.weight))
    rows[phases[0]] = held, peak() - floor
    if "save" in phases:
        reset_peak()
        booster.save_model(model, folder, shard=True)
        rows["save"] = held, peak() - floor
    if "train" in phases:
        reset_peak()
        for _ in range(STEPS):
            booster.execute_pipeline(iter([sample()]), model, lambda output, _: output.loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        states = STATES * sum(p.nbytes for p in model.pipeline.held_parameters() if p.requires_grad)
        rows["train"] = held + states, peak() - floor
    results[rank] = rows
    dist.barrier()
    dist.destroy_process_group()


def import_floor() -> None:
    """Trigger the imports that transformers postpones until the first model of this kind is built."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 1}))
    quantize_blank(model, BitsAndBytesConfig(**NF4))


Figures = dict[str, tuple[int, int]]  # by phase, the bytes that a rank holds, and its peak


def figures(scratch: str, p: int, folder: str, phases: tuple[str, ...]) -> dict[int, Figures]:
    """The figures of each rank in these phases."""
    with Manager() as manager, tempfile.TemporaryDirectory(dir=scratch) as room:
        results: Any = manager.dict()
        spawn(measure, (p, os.path.join(room, "store"), folder, phases, results), nprocs=p)
        return dict(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--p", type=int, nargs="+", default=[2, 4], help="numbers of stages (default: 2 4)")
    table = Table("p", "rank", "holds (MB)", *PHASES, title="peak memory / parameters")
    packed = Table(
        "p", "rank", "loading (MB)", "training (MB)", title="4-bit base: holds, peak, peak of a narrow model"
    )
    ratios, packed_ratios, above = [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        narrow = os.path.join(scratch, "narrow")
        LlamaForCausalLM(LlamaConfig(**SIZES | NARROW)).save_pretrained(narrow)
        for p in parser.parse_args().p:
            folder = os.path.join(scratch, f"model{p}")
            found: dict[int, Figures] = {rank: {} for rank in range(p)}
            for phases in (("materialize", "save"), ("load",), ("adapters",), (PACKED, "train")):
                for rank, rows in figures(scratch, p, folder, phases).items():
                    found[rank] |= rows
            constant = figures(scratch, p, narrow, (PACKED, "train"))
            for rank in range(p):
                of_rank = [found[rank][phase][1] / found[rank][phase][0] for phase in PHASES]
                ratios += of_rank
                held = f"{found[rank][PHASES[0]][0] / 1e6:.0f}"
                table.add_row(str(p), str(rank), held, *(f"{ratio:.3f}" for ratio in of_rank))
                cells = []
                for phase in (PACKED, "train"):
                    holds, most, least = *found[rank][phase], constant[rank][phase][1]
                    packed_ratios.append(most / holds)
                    above.append((most - least) / holds)
                    cells.append(f"{holds / 1e6:.0f}, {most / 1e6:.0f}, {least / 1e6:.0f}")
                packed.add_row(str(p), str(rank), *cells)
    console = Console()
    console.print(table)
    console.print(f"worst {max(ratios):.3f} (target: at most {BAR:.2f}): {verdict(max(ratios))}")
    console.print(packed)
    for phase, k in (("loading", 0), ("training", 1)):
        worst, without = max(packed_ratios[k::2]), max(above[k::2])
        console.print(
            f"4-bit base, {phase}: worst {worst:.3f} (target: at most {BAR:.2f}): {verdict(worst)}; "
            f"without the peak of a narrow model: {without:.3f}"
        )
    raise SystemExit(max(ratios) > BAR)


def verdict(ratio: float) -> str:
    return "met" if ratio <= BAR else "NOT MET"


if __name__ == "__main__":
    main()
