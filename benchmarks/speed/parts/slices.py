"""Slices: long samples cut along the sequence, compared with the same schedule on whole samples."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.progress import Progress

from benchmarks.speed.lanes import Lane, Outcome, Rounds, failures
from benchmarks.speed.parts import Effort
from benchmarks.speed.parts.memory import PROMPT, peaks
from benchmarks.speed.parts.overhead import against
from benchmarks.speed.parts.work import LIMIT, TORCH, UNSPLIT, batches, ours, spread
from benchmarks.speed.section import FAILED, Bar, Section, Table, milliseconds
from benchmarks.speed.work import Work
from pipeshard.schedule import Kind, Program, one_f_one_b, shorten_cooldown, simulate_parts
from pipeshard.schedule.passes import split_backwards
from pipeshard.schedule.slices import sliced
from pipeshard.slices.cut import lengths
from pipeshard.slices.refusals import attention_slope

TEXT = """\
A llama with hidden size 896, 4 layers and a vocabulary of 256 trains on m samples of 2,048 tokens per step, one per
microbatch. With such a small vocabulary, the head takes little time, so both stages take equally long, as the limit
assumes. `num_slices=n` splits each sample into n slices, so that stages do not wait for whole samples. "Speedup" is the
time of the table's first row divided by the time of the contender in the same round (median and quartiles). In the
first row, samples are not sliced. This row is torch's 1F1B for m = 2, and one process for m = 1. The reason is that
torch requires at least as many microbatches as stages, and that stages would run one after the other with m = 1.
"Limit" is the simulated speedup. The simulation assumes that the n slices of a sample together take as long as the
whole sample, and that F, B and W take the same time. pipeshard's 1F1B splits its last backward passes into B and W
(`shorten_cooldown`). In practice, the slices together take longer than the whole sample. A matrix product with 256 rows
takes longer per row than one with 2,048 rows, and Python takes additional time for each slice.

The last table shows the peak memory of the first rank during a step, divided by the memory that the forward of a whole
microbatch leaves allocated. The memory is measured with m = 4, and with a small model whose activations take more
memory than everything else. The slices have different lengths, so that all slices take equally long. The first slices
attend to the fewest tokens, so they are the longest. "Simulated" takes the lengths of the slices into account."""

SLICES = 4, 6, 8
BARS = {(1, 8): 1.5, (2, 8): 1.3}  # by m and n: the least speedup over whole samples
RANKS, MANY = 2, 4  # MANY microbatches: without slices, the first rank keeps RANKS of them


def run(effort: Effort, progress: Progress) -> Section:
    tables, bars, failed = [], [], []
    raw: dict[str, Any] = {}
    for m in (1, 2):
        work = _work(m, effort.quick)
        cut = {n: ours("1f1b", num_slices=n, verify=False) for n in SLICES}
        plain, whole = (UNSPLIT if m < RANKS else TORCH), ours("1f1b", verify=False)
        contenders = [plain, whole, *cut.values()]
        limits = {contender.name: limit(m, n) for n, contender in {1: whole, **cut}.items()}
        lanes = [Lane(contender, lambda k: batches(k, 2)) for contender in contenders]
        outcomes = Rounds(work, lanes, effort.rounds, progress).run()
        rows = [[*_row(each.name, plain.name, outcomes), _number(limits.get(each.name))] for each in contenders]
        columns = ["contender", "ms/step", "quartiles", "speedup", "quartiles", "limit"]
        tables.append(Table(f"{work}, {work.length} tokens", columns, rows))
        for n, contender in cut.items():
            ratios = against(contender.name, plain.name, outcomes)
            if ratios and (m, n) in BARS:
                ratio, bar = statistics.median(ratios), BARS[m, n]
                text = f"m={m}: {n} slices are {ratio:.2f} times as fast as {plain.name} (target: at least {bar})"
                bars.append(Bar(text, effort.quick or ratio >= bar))
        failed += failures(lanes, outcomes)
        raw[f"m={m}"] = {name: vars(outcome) for name, outcome in outcomes.items()}
    of_memory, more, outcomes = _memory(effort, progress)
    raw["memory"] = {name: vars(outcome) for name, outcome in outcomes.items()}
    return Section("Long samples in slices", TEXT, [*tables, *of_memory], [*bars, *more], failed, raw)


def _memory(effort: Effort, progress: Progress) -> tuple[list[Table], list[Bar], dict[str, Outcome]]:
    """Measure the peak activations of the first rank, relative to those of the forward of a whole microbatch."""
    work, n = Work(hidden=128, heads=4, vocabulary=256, length=2048, microbatch=1, microbatches=MANY), max(SLICES)
    contenders = {k: ours("1f1b", num_slices=k, verify=False) for k in (1, n)}
    lanes = [
        Lane(replace(contender, variables=PROMPT), lambda k: batches(k, 1))
        for contender in (*contenders.values(), LIMIT)
    ]
    outcomes = Rounds(work, lanes, min(effort.rounds, 3), progress).run()
    if not all(outcomes[lane.name].memory for lane in lanes):
        return [], [], outcomes
    one = sum(outcomes[LIMIT.name].reports[-1][0]["activation"])
    rows, bars = [], []
    for k, contender in contenders.items():
        kept = peaks(outcomes[contender.name])[0] / one
        simulated = most(split_backwards(sliced("1f1b", RANKS, MANY, k)), _shares(work, k))
        rows.append([contender.name, f"{kept:.2f}", f"{simulated:.2f}"])
        if k > 1:
            text = f"{k} slices keep the activations of {kept:.2f} microbatches (target: within 1/4 of {simulated:.2f})"
            bars.append(Bar(text, abs(kept - simulated) <= 0.25))
    title = f"memory of rank 0, {work}, {work.length} tokens"
    return [Table(title, ["contender", "peak (activations)", "simulated"], rows)], bars, outcomes


def _shares(work: Work, n: int) -> list[float]:
    """Return the length of each of n slices, relative to the sample. The slices take equally long."""
    return [length / work.length for length in lengths(work.length, n, attention_slope(work.model()))]


def most(program: Program, shares: Sequence[float]) -> float:
    """Return the largest number of microbatches that the first rank keeps, if each slice is this fraction of a
    microbatch."""
    kept, largest = 0.0, 0.0
    for kind, number, _ in program.ranks[0]:
        share = shares[number % len(shares)]
        kept += share if kind is Kind.F else -share if kind is Kind.W else 0.0
        largest = max(largest, kept)
    return largest


def _work(m: int, quick: bool) -> Work:
    if quick:
        return Work(microbatch=1, microbatches=m, length=64, hidden=112)
    return Work(microbatch=1, microbatches=m, length=2048, hidden=896, heads=14, layers=4, vocabulary=256)


def limit(m: int, n: int) -> float:
    """Return the simulated speedup of n slices over 1F1B, if each slice takes 1/n of a microbatch's time."""
    cut = split_backwards(sliced("1f1b", RANKS, m, n)) if n > 1 else shorten_cooldown(one_f_one_b(RANKS, m))
    whole, part = [1.0] * RANKS, [1.0 / n] * RANKS
    return (
        simulate_parts(one_f_one_b(RANKS, m), whole, whole, whole).makespan
        / simulate_parts(cut, part, part, part).makespan
    )


def _row(name: str, plain: str, outcomes: dict[str, Outcome]) -> list[str]:
    seconds = outcomes[name].seconds
    if not seconds:
        return [name, FAILED, "", "", ""]
    low, middle, high = spread(seconds)
    under, ratio, over = spread(against(name, plain, outcomes) or [float("nan")])
    times = [milliseconds(middle), f"{milliseconds(low)} to {milliseconds(high)}"]
    return [name, *times, f"{ratio:.2f}", f"{under:.2f} to {over:.2f}"]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
