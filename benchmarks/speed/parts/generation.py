"""Generation: tokens per second with several microbatches in flight, and the time of a token."""

import statistics

from rich.progress import Progress

from benchmarks.speed.contender import RANKS, Contender
from benchmarks.speed.lanes import Lane, Outcome, Rounds, failures
from benchmarks.speed.parts import Effort
from benchmarks.speed.parts.overhead import against
from benchmarks.speed.parts.work import batches, spread
from benchmarks.speed.section import FAILED, Bar, Section, Table, milliseconds
from benchmarks.speed.work import Work

TEXT = """\
The llama of the first section, with hidden size 896 and two stages, generates tokens for 8 prompts. "One" has one
microbatch in flight (`model.generate(..., num_microbatches=1)`), so one stage waits while the other stage computes.
"Default" splits a forward into microbatches of at least 256 tokens. Long prompts (512 tokens, 2 new tokens) are
compute-bound, and are split into 8 microbatches. For long prompts, the simulation predicts a speedup of 1.78. Short
prompts (8 tokens, 32 new tokens) are limited by the time to read the weights, and are not split. "Two" splits the 8
prompts into two microbatches. "One process" runs the whole model on its own core. In a pipeline, the time of a token is
the sum of the times of all stages and messages."""

WORKS = {"long prompts": (512, 2), "single tokens": (8, 32)}
FLIGHT, COST = 0.8 * RANKS, 1.15  # least speedup over one microbatch; most time per token, relative to one process
ONE, DEFAULT, TWO, ALONE = "one", "default", "two", "one process"


def run(effort: Effort, progress: Progress) -> Section:
    tables, bars, failed, raw = [], [], [], {}
    for name, (length, new) in WORKS.items():
        hidden, heads = (112, 7) if effort.quick else (896, 14)
        work = Work(microbatch=4, microbatches=2, length=length, hidden=hidden, heads=heads)
        contenders = [
            Contender(ONE, "generating", {"new": new, "num_microbatches": 1}),
            Contender(DEFAULT, "generating", {"new": new}),
            Contender(TWO, "generating", {"new": new, "num_microbatches": 2}),
            Contender(ALONE, "generating", {"new": new, "alone": True}),
        ]
        lanes = [Lane(contender, lambda k: batches(k, 1)) for contender in contenders]
        outcomes = Rounds(work, lanes, effort.rounds, progress).run()
        rows = [_row(contender.name, outcomes, work.samples * new) for contender in contenders]
        columns = ["microbatches", "ms", "quartiles", "tokens/s", "speedup", "quartiles"]
        tables.append(Table(f"{name}: 8 × {length}, {new} new tokens", columns, rows))
        bars += _bars(name, outcomes, effort.quick)
        failed += failures(lanes, outcomes)
        raw[name] = {lane: vars(outcome) for lane, outcome in outcomes.items()}
    return Section("Generation", TEXT, tables, bars, failed, raw)


def _bars(name: str, outcomes: dict[str, Outcome], quick: bool) -> list[Bar]:
    if name == "long prompts" and (ratios := against(DEFAULT, ONE, outcomes)):
        ratio = statistics.median(ratios)
        text = f"{name}: {DEFAULT} is {ratio:.2f} times as fast as one microbatch (target: at least {FLIGHT:.1f})"
        return [Bar(text, quick or ratio >= FLIGHT)]
    if name == "single tokens" and (ratios := against(ALONE, ONE, outcomes)):
        ratio = statistics.median(ratios)
        text = f"{name}: with one microbatch, a token takes {ratio:.2f} times as long as in one process"
        text += f" (target: at most {COST})"
        return [Bar(text, quick or ratio <= COST)]
    return []


def _row(name: str, outcomes: dict[str, Outcome], tokens: int) -> list[str]:
    seconds = outcomes[name].seconds
    if not seconds:
        return [name, FAILED, "", "", "", ""]
    low, middle, high = spread(seconds)
    under, ratio, over = spread(against(name, ONE, outcomes) or [float("nan")])
    times = [milliseconds(middle), f"{milliseconds(low)} to {milliseconds(high)}", f"{tokens / middle:.1f}"]
    return [name, *times, f"{ratio:.2f}", f"{under:.2f} to {over:.2f}"]
