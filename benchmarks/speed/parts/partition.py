"""Partition: step times and stage times (predicted and measured) of a model whose head costs as much as its layers, and
the step time of a searched schedule compared with zbv."""

import statistics
from collections.abc import Sequence

from rich.progress import Progress

from benchmarks.speed.contender import Contender
from benchmarks.speed.lanes import Lane, Outcome, Rounds, failures
from benchmarks.speed.parts import Effort
from benchmarks.speed.parts.work import batches, spread
from benchmarks.speed.section import FAILED, Bar, Section, Table, milliseconds
from benchmarks.speed.work import Work

TEXT = """\
The model is a llama with 24 layers and a vocabulary of 128k entries. The head and the loss take about as much time as
all layers together. The plugin splits the model into two stages with the partition rules "uniform", "auto" and
"profile". A unit is a module that is never split, such as a layer. "Units" is the number of unit calls on each stage.
Stage times are median times of one microbatch's forward and backward. "profile" predicts seconds. "uniform" and "auto"
predict relative costs. The table shows these costs scaled so that their sum equals the measured time of both stages.
The second table compares zbv with a searched schedule (`schedule="auto"`), for the same model."""

RULES = ("uniform", "auto", "profile")
JUDGED = ("auto", "profile")
SCHEDULES: dict[str, dict[str, str]] = {
    "zbv": {"schedule": "zbv"},
    "auto": {"schedule": "auto", "memory_limit": "20GB"},  # more than either schedule takes
}
FASTER = 1.05  # least speedup over zbv
TOLERANCE = 0.10


def run(effort: Effort, progress: Progress) -> Section:
    work = Work(hidden=384, heads=6, layers=24, vocabulary=128_000, length=64, microbatches=4)
    if effort.quick:
        work = work.having(hidden=128, heads=2, vocabulary=16_000)
    contenders = [Contender(rule, "pipeshard", {"schedule": "1f1b", "partition": rule}) for rule in RULES]
    lanes = [Lane(contender, lambda k: batches(k, 1)) for contender in contenders]
    outcomes = Rounds(work, lanes, effort.rounds, progress).run()
    rows, bars = [], []
    for name, outcome in outcomes.items():
        if not outcome.seconds:
            rows.append([name, FAILED, *[""] * 4])
            continue
        expected, measured = _stages(outcome)
        low, middle, high = spread(outcome.seconds)
        units = " + ".join(f"{count:.0f}" for count in outcome.reports[-1][0]["units"])
        both = [" + ".join(map(milliseconds, stages)) for stages in (expected, measured)]
        rows.append([name, units, milliseconds(middle), f"{milliseconds(low)} to {milliseconds(high)}", *both])
        if name in JUDGED:
            off = max(abs(a - b) / b for a, b in zip(expected, measured))
            text = f"{name}: predicted and measured stage times differ by up to {off:.0%}"
            text += f" (target: at most {TOLERANCE:.0%})"
            bars.append(Bar(text, off <= TOLERANCE))
    columns = ["partition", "units", "ms/step", "quartiles", "stages, predicted (ms)", "stages, measured (ms)"]
    raced = [Lane(Contender(name, "pipeshard", how), lambda k: batches(k, 1)) for name, how in SCHEDULES.items()]
    races = Rounds(work, raced, effort.rounds, progress).run()
    if all(race.seconds for race in races.values()):
        ratio = statistics.median(a / b for a, b in zip(races["zbv"].seconds, races["auto"].seconds))
        text = f"auto is {ratio - 1:.0%} faster than zbv (target: at least {FASTER - 1:.0%})"
        bars.append(Bar(text, ratio >= FASTER))
    spreads = {name: spread(race.seconds) for name, race in races.items() if race.seconds}
    times = [[name, milliseconds(m), f"{milliseconds(a)} to {milliseconds(b)}"] for name, (a, m, b) in spreads.items()]
    tables = [Table(str(work), columns, rows), Table("schedules", ["schedule", "ms/step", "quartiles"], times)]
    raw = {name: vars(outcome) for name, outcome in outcomes.items()}
    raw |= {f"schedule {name}": vars(race) for name, race in races.items()}
    return Section("Partition", TEXT, tables, bars, failures(lanes, outcomes) + failures(raced, races), raw)


def _stages(outcome: Outcome) -> tuple[Sequence[float], Sequence[float]]:
    """Return the predicted and measured seconds of one microbatch on each stage. Relative predictions are scaled to the
    measured sum."""
    measured = [statistics.median(stage) for stage in zip(*(report[0]["measured"] for report in outcome.reports))]
    last = outcome.reports[-1][0]
    expected = last["expected"]
    scale = 1.0 if last["profiled"] else sum(measured) / sum(expected)
    return [cost * scale for cost in expected], measured
