"""Slices: long samples cut along the sequence, beside the same schedule with whole ones."""

import statistics
from collections.abc import Sequence
from typing import Any

from rich.progress import Progress

from benchmarks.speed.lanes import Lane, Outcome, Rounds, failures
from benchmarks.speed.parts import Effort
from benchmarks.speed.parts.overhead import against
from benchmarks.speed.parts.work import UNSPLIT, batches, ours, spread
from benchmarks.speed.section import FAILED, Bar, Section, Table, milliseconds
from benchmarks.speed.work import Work
from pipeshard.schedule import simulate
from pipeshard.schedule.slices import sliced

TEXT = """\
The llama of the first part, m samples of 2,048 tokens a step, one in each microbatch. With `num_slices=n` each is cut
into n slices, so that the stages need not wait for whole samples. "Faster" is the time of 1F1B with whole samples over
that with slices in the same round, median and quartiles; "limit" is what it would be if slices cost no more than their
share of a sample, by simulation, where a backward takes twice as long as a forward."""

SLICES = 4, 8
BARS = {(1, 8): 1.5, (2, 8): 1.3}  # by m and n: how many times as fast at least
RANKS, MANY = 2, 4  # microbatches, of which whole ones keep as many as there are ranks


def run(effort: Effort, progress: Progress) -> Section:
    tables, bars, failed = [], [], []
    raw: dict[str, Any] = {}
    for m in (1, 2):
        work = _work(m, effort.quick)
        whole, cut = ours("1f1b", verify=False), {n: ours("1f1b", num_slices=n, verify=False) for n in SLICES}
        contenders = [whole, *cut.values(), UNSPLIT]
        lanes = [Lane(contender, lambda k: batches(k, 2)) for contender in contenders]
        outcomes = Rounds(work, lanes, effort.rounds, progress).run()
        rows = [_row(contender.name, outcomes, whole.name) for contender in contenders]
        for n, contender in cut.items():
            rows[1 + SLICES.index(n)].append(f"{limit(m, n):.2f}")
            ratios = against(contender.name, whole.name, outcomes)
            if ratios and (m, n) in BARS:
                ratio, bar = statistics.median(ratios), BARS[m, n]
                text = f"m={m}: {n} slices are {ratio:.2f} times as fast as whole samples, at least {bar}"
                bars.append(Bar(text, effort.quick or ratio >= bar))
        columns = ["contender", "ms/step", "quartiles", "faster", "quartiles", "limit"]
        tables.append(Table(f"{work}, {work.length} tokens", columns, [[*row, "", ""][: len(columns)] for row in rows]))
        failed += failures(lanes, outcomes)
        raw[f"m={m}"] = {name: vars(outcome) for name, outcome in outcomes.items()}
    bars += _memory(raw, effort, progress)
    return Section("Long samples in slices", TEXT, tables, bars, failed, raw)


def _memory(raw: dict[str, Any], effort: Effort, progress: Progress) -> list[Bar]:
    """The microbatches of activations that the first rank keeps at a time with m=4 and slices. Whole ones keep two of
    m=4 and one of m=1, which gives the size of one."""
    work, n = _work(MANY, effort.quick), max(SLICES)
    whole, cut = ours("1f1b", verify=False), ours("1f1b", num_slices=n, verify=False)
    lanes = [Lane(contender, lambda k: batches(k, 1)) for contender in (whole, cut)]
    outcomes = Rounds(work, lanes, min(effort.rounds, 3), progress).run()
    raw[f"m={MANY}"] = {name: vars(outcome) for name, outcome in outcomes.items()}
    two, some = (_of_first(outcomes[contender.name].memory) for contender in (whole, cut))
    one = _of_first(raw["m=1"][whole.name]["memory"])
    if not one or not two or not some:
        return []
    kept, simulated = 1 + (some - one) / (two - one), max(simulate(sliced("1f1b", RANKS, MANY, n)).peak_activations) / n
    text = (
        f"m={MANY}: {n} slices keep {kept:.2f} microbatches of activations, within 1/4 of {simulated:.2f} as simulated"
    )
    return [Bar(text, effort.quick or abs(kept - simulated) <= 0.25)]


def _of_first(memory: Sequence[Sequence[int]]) -> float:
    return statistics.median(of_ranks[0] for of_ranks in memory) if memory else 0.0


def _work(m: int, quick: bool) -> Work:
    return Work(microbatch=1, microbatches=m, length=64 if quick else 2048, hidden=112 if quick else 448)


def limit(m: int, n: int) -> float:
    """How many times as fast the program of n slices is, if each takes the n-th part of a microbatch."""
    whole = simulate(sliced("1f1b", RANKS, m, 1), 1.0, 2.0)
    return whole.makespan / simulate(sliced("1f1b", RANKS, m, n), 1.0 / n, 2.0 / n).makespan


def _row(name: str, outcomes: dict[str, Outcome], whole: str) -> list[str]:
    seconds = outcomes[name].seconds
    if not seconds:
        return [name, FAILED, "", "", ""]
    low, middle, high = spread(seconds)
    under, ratio, over = spread(against(name, whole, outcomes) or [float("nan")])
    times = [milliseconds(middle), f"{milliseconds(low)} to {milliseconds(high)}"]
    return [name, *times, f"{ratio:.2f}", f"{under:.2f} to {over:.2f}"]
