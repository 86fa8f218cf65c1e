"""Slices: long samples cut along the sequence, beside the same schedule with whole ones."""

import statistics

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
RANKS = 2


def run(effort: Effort, progress: Progress) -> Section:
    tables, bars, failed, raw = [], [], [], {}
    for m in (1, 2):
        length, hidden = (64, 112) if effort.quick else (2048, 448)
        work = Work(microbatch=1, microbatches=m, length=length, hidden=hidden)
        whole, cut = ours("1f1b"), {n: ours("1f1b", num_slices=n) for n in SLICES}
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
        tables.append(Table(f"{work}, {length} tokens", columns, [[*row, "", ""][: len(columns)] for row in rows]))
        failed += failures(lanes, outcomes)
        raw[f"m={m}"] = {name: vars(outcome) for name, outcome in outcomes.items()}
    return Section("Long samples in slices", TEXT, tables, bars, failed, raw)


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
