"""GPU speed: time and memory of a step on one GPU, compared with a plain loop with gradient accumulation.

`python -m benchmarks.gpu_speed [--rounds N] [--json FILE]` trains llamas in bf16 with a single stage: a wide one,
whose steps are bound by the GPU; a narrow one, whose steps are bound by Python; and a narrow one on a single long
sample (plain, recomputed and in slices). The contenders take turns in one process, so ratios compare steps that ran
at about the same time. The benchmark has no transfers between GPUs.
"""

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

VOCABULARY = 32_000
Step = Callable[[], float]


@dataclass
class Measured:
    """Results of one contender: the seconds of each step, and the peak bytes of a step above those before it."""

    part: str
    name: str
    seconds: list[float] = field(default_factory=list)
    bytes: int = 0
    error: float = 0.0  # difference of all gradients from those of the plain loop, relative to their norm
    problem: str = ""


def llama(layers: int, hidden: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "num_attention_heads": hidden // 64}
    config = LlamaConfig(
        **sizes,
        num_hidden_layers=layers,
        num_key_value_heads=hidden // 128,
        vocab_size=VOCABULARY,
        max_position_embeddings=1 << 17,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def lowered(model: Any, device: torch.device) -> Any:
    """Return a copy in bf16. Buffers keep their dtype: 16 bits are too few for the rotary angles of far positions."""
    copied = copy.deepcopy(model).to(device)
    for parameter in copied.parameters():
        parameter.data = parameter.data.bfloat16()
    return copied


def plain(model: Any, ids: torch.Tensor, microbatches: int, recompute: bool = False) -> tuple[Step, Any]:
    """Return a step as a user would write it (forward and backward, microbatch by microbatch), and its model."""
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def step() -> float:
        model.zero_grad()
        total = 0.0
        for rows in ids.chunk(microbatches):
            loss = model(input_ids=rows, labels=rows).loss / microbatches
            loss.backward()
            total = loss.detach() + total
        return float(total)

    return step, model


def pipeline(model: Any, ids: torch.Tensor, microbatches: int, **options: Any) -> tuple[Step, Any]:
    from colossalai.booster import Booster

    from pipeshard import PipelinePlugin

    plugin = PipelinePlugin(1, num_microbatches=microbatches, precision="bf16", verify=False, **options)
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def step() -> float:
        optimizer.zero_grad()
        batches = iter([{"input_ids": ids, "labels": ids}])
        return float(booster.execute_pipeline(batches, boosted, None, optimizer)["loss"])

    return step, boosted.unwrap()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    apart = sum(float((ours[name] - theirs[name]).norm()) ** 2 for name in ours)
    return float((apart / sum(float(g.norm()) ** 2 for g in theirs.values())) ** 0.5)


def compare(part: str, makers: dict[str, Callable[[], tuple[Step, Any]]], rounds: int) -> list[Measured]:
    """Compare each contender's first gradients with those of the first contender, then time steps in turns. If a
    contender runs out of memory, this is its result."""
    found, steps = [], {}
    exact: dict[str, torch.Tensor] = {}
    for name, make in makers.items():
        measured = Measured(part, name)
        found.append(measured)
        try:
            step, model = make()
            step()
            step()
            exact = exact or gradients(model)
            measured.error = distance(gradients(model), exact)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            measured.bytes = torch.cuda.max_memory_allocated() - before
            steps[name] = step
        except torch.cuda.OutOfMemoryError as error:
            measured.problem = str(error).splitlines()[0][:100]
        gc.collect()
        torch.cuda.empty_cache()
    for _ in range(rounds):
        for measured in found:
            if measured.name in steps:
                torch.cuda.synchronize()
                began = time.perf_counter()
                steps[measured.name]()
                torch.cuda.synchronize()
                measured.seconds.append(time.perf_counter() - began)
    return found


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def whole(layers: int, hidden: int, length: int, rounds: int, device: torch.device) -> list[Measured]:
    """Compare contenders on 8 microbatches of 2 samples."""
    model, ids = llama(layers, hidden), tokens(16, length)
    makers: dict[str, Callable[[], tuple[Step, Any]]] = {
        "plain loop": lambda: plain(lowered(model, device), ids.to(device), 8),
        "1f1b": lambda: pipeline(copy.deepcopy(model), ids, 8),
        "zb-h1": lambda: pipeline(copy.deepcopy(model), ids, 8, schedule="zb-h1"),
        "gpipe": lambda: pipeline(copy.deepcopy(model), ids, 8, schedule="gpipe"),
        "gpipe, offloaded": lambda: pipeline(copy.deepcopy(model), ids, 8, schedule="gpipe", offload="activations"),
    }
    return compare(f"{layers} layers of {hidden:,}, 8 microbatches of 2 x {length:,} tokens", makers, rounds)


def slices(layers: int, hidden: int, length: int, rounds: int, device: torch.device) -> list[Measured]:
    """Compare contenders on one long sample."""
    model, ids = llama(layers, hidden), tokens(1, length)
    makers: dict[str, Callable[[], tuple[Step, Any]]] = {
        "plain loop": lambda: plain(lowered(model, device), ids.to(device), 1),
        "plain loop, recomputed": lambda: plain(lowered(model, device), ids.to(device), 1, recompute=True),
        "1f1b": lambda: pipeline(copy.deepcopy(model), ids, 1),
    }
    for n in (4, 8, 16):
        makers[f"1f1b, {n} slices"] = lambda n=n: pipeline(copy.deepcopy(model), ids, 1, num_slices=n)  # type: ignore[misc]
    return compare(f"{layers} layers of {hidden:,}, one sample of {length:,} tokens", makers, rounds)


def report(found: Sequence[Measured], console: Console) -> None:
    for part in dict.fromkeys(each.part for each in found):
        table = Table("", "ms/step", "quartiles", "relative to the plain loop", "GB/step", "gradients", title=part)
        group = [each for each in found if each.part == part]
        first = group[0]
        for each in group:
            if each.problem:
                table.add_row(each.name, each.problem)
                continue
            ratios = [own / other for own, other in zip(each.seconds, first.seconds)]
            low, middle, high = statistics.quantiles(each.seconds, n=4)
            times = f"{1e3 * middle:.1f}", f"{1e3 * low:.1f}-{1e3 * high:.1f}"
            ratio = f"{statistics.median(ratios):.3f}" if ratios else ""
            table.add_row(each.name, *times, ratio, f"{each.bytes / 1e9:.2f}", f"{each.error:.1e}")
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args(arguments)
    console = Console()
    if not torch.cuda.is_available():
        console.print("gpu-speed: there is no GPU here")
        return 0
    device = torch.device("cuda", 0)
    found: list[Measured] = []
    for part in (
        lambda: whole(8, 4096, 2048, args.rounds, device),
        lambda: whole(16, 1024, 1024, args.rounds, device),
        lambda: slices(16, 1024, 32_768, args.rounds, device),
    ):
        measured = part()
        report(measured, console)
        found += measured
        gc.collect()
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
