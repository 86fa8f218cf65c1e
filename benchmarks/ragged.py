"""Ragged: tokens per second for samples of different lengths, with several ways of grouping them into microbatches.

`python -m benchmarks.ragged` samples lengths from a lognormal distribution with a long tail, like the lengths of FLAN's
samples (median 128 tokens, deviation of the logarithm 1.2, from 8 to 1,024). For p = 2, a small llama trains on the
same batches with each way of grouping in turns. For p = 2, 4 and 8, the schedule is simulated with the costs that
pipeshard's grouping uses. No way of grouping exceeds the limit of padded tokens per microbatch.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing import Manager
from torch.multiprocessing.spawn import spawn
from transformers import LlamaConfig, LlamaForCausalLM

import pipeshard
from pipeshard.batch.grouping import TokenCost, group
from pipeshard.schedule import Action, Kind, one_f_one_b, shorten_cooldown

SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "vocab_size": 1024}
LAYERS, MEDIAN, DEVIATION, LEAST, MOST = 6, 128, 1.2, 8, 1024
SAMPLES, LIMIT, STEPS, ROUNDS = 48, 2048, 3, 4  # each step runs once per round; the fastest round counts
SIMULATED = 30  # steps
BARS = {"samples": 1.5, "greedy": 1.15, "greedy, sorted": 1.15}  # least speedup in tokens per second
OURS = "microbatch_tokens"
Lengths = Sequence[Sequence[int]]
Groups = list[list[int]]


def lengths_of(step: int) -> list[int]:
    generator = torch.Generator().manual_seed(step)
    drawn = torch.exp(torch.randn(SAMPLES, generator=generator) * DEVIATION) * MEDIAN
    return [int(length) for length in drawn.clamp(LEAST, MOST)]


def by_samples(lengths: Lengths, limit: int, cost: TokenCost, idle: float) -> Groups:
    """Group equally many samples, as many as fit within the limit if each has the largest length."""
    size = limit // MOST
    return [list(range(k, min(k + size, len(lengths)))) for k in range(0, len(lengths), size)]


def greedy(lengths: Lengths, limit: int, cost: TokenCost, idle: float, is_sorted: bool = False) -> Groups:
    """Add samples, in order or from short to long, until the next one would exceed the limit."""
    groups: Groups = [[]]
    numbers = range(len(lengths))
    for k in sorted(numbers, key=lambda k: lengths[k][0]) if is_sorted else numbers:
        longest = max(lengths[one][0] for one in [*groups[-1], k])
        if longest * (len(groups[-1]) + 1) > limit:
            groups.append([])
        groups[-1].append(k)
    return groups


def greedy_sorted(lengths: Lengths, limit: int, cost: TokenCost, idle: float) -> Groups:
    return greedy(lengths, limit, cost, idle, is_sorted=True)


WAYS: dict[str, Callable[..., Groups]] = {
    "samples": by_samples,
    "greedy": greedy,
    "greedy, sorted": greedy_sorted,
    OURS: group,
}


def batch_of(step: int) -> dict[str, Tensor]:
    lengths = torch.tensor(lengths_of(step))
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    ids = torch.randint(SIZES["vocab_size"], mask.shape, generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def measure(rank: int, store: str, results: Any) -> None:
    """Measure, for each way of grouping: seconds, loss and number of microbatches of each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    torch.manual_seed(0)
    whole = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=LAYERS, max_position_embeddings=MOST))
    engines: dict[str, Any] = {}
    for name in WAYS:
        model = copy.deepcopy(whole)
        optimizer = torch.optim.AdamW(model.parameters())
        how: dict[str, Any] = {"pp_size": 2, "microbatch_tokens": LIMIT, "verify": False, "dry_run_input": batch_of(0)}
        engines[name] = pipeshard.initialize(model, optimizer, **how)
    found: dict[str, list[tuple[float, float, int]]] = {name: [(math.inf, 0.0, 0)] * STEPS for name in WAYS}
    for _ in range(ROUNDS):
        for step, (name, engine) in itertools.product(range(STEPS), engines.items()):
            with mock.patch("pipeshard.engine.ragged.group", WAYS[name]):
                dist.barrier()
                start = time.perf_counter()
                out = engine.execute_pipeline(iter([batch_of(step)]), engine.model, None, engine.optimizer)
                dist.barrier()
                seconds = time.perf_counter() - start
            engine.optimizer.zero_grad()
            found[name][step] = min(found[name][step], (seconds, float(out["loss"]), len(engine.model.pipeline.ran)))
    results[rank] = found, engines[OURS].model.pipeline.cuts.ragged.cost
    dist.barrier()
    dist.destroy_process_group()


def simulated(p: int, name: str, cost: TokenCost) -> list[float]:
    """Return the tokens per time unit of 1F1B with these costs, for each step."""
    found = []
    for step in range(SIMULATED):
        lengths = lengths_of(step)
        groups = WAYS[name]([(length,) for length in lengths], LIMIT, cost, p - 1.0)
        times = [cost.of(len(samples), [max(lengths[k] for k in samples)]) for samples in groups]
        found.append(sum(lengths) / makespan(p, times))
    return found


def makespan(p: int, times: Sequence[float]) -> float:
    """The time of a step of 1F1B with a shortened cooldown and equal stages, in which microbatch k takes times[k] for a
    forward, for its input gradients and for its weight gradients."""
    program = shorten_cooldown(one_f_one_b(p, len(times)))
    split = {action[1:] for actions in program.ranks for action in actions if action.kind is Kind.W}
    earlier = {action: before for actions in program.ranks for before, action in itertools.pairwise(actions)}

    @cache
    def end(action: Action) -> float:
        kind, k, stage = action
        source = stage - 1 if kind is Kind.F else stage + 1
        needed = [Action(kind, k, source)] if 0 <= source < p and kind is not Kind.W else []
        if action in earlier:
            needed.append(earlier[action])
        is_whole = kind is Kind.B and (k, stage) not in split
        return max(map(end, needed), default=0.0) + times[k] * (2 if is_whole else 1)

    return max(end(actions[-1]) for actions in program.ranks)


def main() -> None:
    with Manager() as manager, tempfile.TemporaryDirectory() as folder:
        results: Any = manager.dict()
        spawn(measure, (f"{folder}/store", results), nprocs=2)
        (found, cost), (others, _) = results[0], results[1]
    tokens = [sum(lengths_of(step)) for step in range(STEPS)]
    rates = {
        name: [n / max(one[0], other[0]) for n, one, other in zip(tokens, found[name], others[name], strict=True)]
        for name in WAYS
    }
    by_p = {p: {name: simulated(p, name, cost) for name in WAYS} for p in (2, 4, 8)}
    table = Table("grouped by", "microbatches", "tokens/s, p=2", *(f"{OURS} is, p={p}" for p in ("2, measured", *by_p)))
    failed = False
    for name in WAYS:
        ratios = [_ratio(rates, name), *(_ratio(of_p, name) for of_p in by_p.values())]
        failed |= name in BARS and min(ratios) < BARS[name]
        count = statistics.mean(m for *_, m in found[name])
        cells = [f"{count:.0f}", f"{statistics.median(rates[name]):.0f}", *(f"{ratio:.2f}x" for ratio in ratios)]
        table.add_row(name, *cells)
    console = Console(width=130)
    console.print(table)
    losses = {name: [loss for _, loss, _ in steps] for name, steps in found.items()}
    off = max(abs(a - b) / abs(b) for each in losses.values() for a, b in zip(each, losses[OURS], strict=True))
    console.print(f"{cost}; losses differ by at most {off:.1e}; targets {BARS}")
    raise SystemExit(failed)


def _ratio(rates: dict[str, list[float]], name: str) -> float:
    """Return the speedup of pipeshard's grouping in tokens per second: the median over the steps."""
    return statistics.median(a / b for a, b in zip(rates[OURS], rates[name], strict=True))


if __name__ == "__main__":
    main()
