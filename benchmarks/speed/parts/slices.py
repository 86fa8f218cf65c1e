"""Slices: long samples cut along the sequence, beside the same schedule with whole ones."""

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
A llama of a hidden size of 896 and 4 layers, m samples of 2,048 tokens a step, one in each microbatch. With
`num_slices=n` each is cut into n slices, so that the stages need not wait for whole samples. "Faster" is the time of
1F1B with whole samples over that of the contender in the same round, median and quartiles: of torch's, which takes no
fewer microbatches than stages, and for m = 1, where the stages work one after the other, of one process. "Limit" is
what it would be if slices cost no more than their share of a sample, by simulation, where F, B and W take the same
time. pipeshard's 1F1B splits its last backwards (`shorten_cooldown`). Slices cost more than their share: a matrix
product of 256 rows takes longer a row than one of 2,048, and each slice's Python takes its time.

The last table has the most memory that the first rank takes in a step, counted in what the forward of a whole
microbatch leaves behind, for a small model whose activations outweigh all else, m = 4. Slices are cut so that they take
equally long, so the first ones, which attend to least, are the longest: "simulated" counts their lengths."""

SLICES = 4, 6, 8
BARS = {(1, 8): 1.5, (2, 8): 1.3}  # by m and n: how many times as fast as 1F1B at least
RANKS, MANY = 2, 4  # microbatches, of which whole ones keep as many as there are ranks


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
        columns = ["contender", "ms/step", "quartiles", "faster", "quartiles", "limit"]
        tables.append(Table(f"{work}, {work.length} tokens", columns, rows))
        for n, contender in cut.items():
            ratios = against(contender.name, plain.name, outcomes)
            if ratios and (m, n) in BARS:
                ratio, bar = statistics.median(ratios), BARS[m, n]
                text = f"m={m}: {n} slices are {ratio:.2f} times as fast as 1F1B, at least {bar}"
                bars.append(Bar(text, effort.quick or ratio >= bar))
        failed += failures(lanes, outcomes)
        raw[f"m={m}"] = {name: vars(outcome) for name, outcome in outcomes.items()}
    of_memory, more, outcomes = _memory(effort, progress)
    raw["memory"] = {name: vars(outcome) for name, outcome in outcomes.items()}
    return Section("Long samples in slices", TEXT, [*tables, *of_memory], [*bars, *more], failed, raw)


def _memory(effort: Effort, progress: Progress) -> tuple[list[Table], list[Bar], dict[str, Outcome]]:
    """The most activations of the first rank, in those that a whole microbatch leaves behind."""
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
            text = f"{k} slices keep {kept:.2f} microbatches of activations, within 1/4 of {simulated:.2f}"
            bars.append(Bar(text, abs(kept - simulated) <= 0.25))
    title = f"memory of rank 0, {work}, {work.length} tokens"
    return [Table(title, ["contender", "peak in activations", "simulated"], rows)], bars, outcomes


def _shares(work: Work, n: int) -> list[float]:
    """Of each of n slices, which are cut by their time, as a share of the sample."""
    return [length / work.length for length in lengths(work.length, n, attention_slope(work.model()))]


def most(program: Program, shares: Sequence[float]) -> float:
    """The most that the first rank keeps at a time, of slices that take so much of a microbatch."""
    kept, largest = 0.0, 0.0
    for kind, number, _ in program.ranks[0]:
        share = shares[number % len(shares)]
        kept += share if kind is Kind.F else -share if kind is Kind.W else 0.0
        largest = max(largest, kept)
    return largest


def _work(m: int, quick: bool) -> Work:
    if quick:
        return Work(microbatch=1, microbatches=m, length=64, hidden=112)
    return Work(microbatch=1, microbatches=m, length=2048, hidden=896, heads=14, layers=4)


def limit(m: int, n: int) -> float:
    """How many times as fast as 1F1B the program of n slices is, if each takes the n-th part of a microbatch."""
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
