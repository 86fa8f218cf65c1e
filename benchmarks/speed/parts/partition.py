"""Where to cut a model whose head outweighs its layers: step times, and stage times as expected and measured; and the
time of a searched schedule beside zbv."""

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
A llama of 24 layers with a vocabulary of 128k entries, whose head and loss cost about as much as all of its layers, cut
in two by the plugin's rules. Stage times are those of one microbatch, forward and backward, as medians. "profile"
expects seconds; what the other rules expect is relative, so it is scaled to the measured sum of both stages.
The second table has the same model with zbv and with a searched schedule."""

RULES = ("uniform", "auto", "profile")
JUDGED = ("auto", "profile")
SCHEDULES: dict[str, dict[str, str]] = {
    "zbv": {"schedule": "zbv"},
    "auto": {"schedule": "auto", "memory_limit": "20GB"},  # more than either takes
}
FASTER = 1.05  # than zbv
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
            text = f"{name}: stages differ by {off:.0%} from what was expected, at most {TOLERANCE:.0%}"
            bars.append(Bar(text, off <= TOLERANCE))
    columns = ["partition", "units", "ms/step", "quartiles", "stages, expected (ms)", "stages, measured (ms)"]
    raced = [Lane(Contender(name, "pipeshard", how), lambda k: batches(k, 1)) for name, how in SCHEDULES.items()]
    races = Rounds(work, raced, effort.rounds, progress).run()
    if all(race.seconds for race in races.values()):
        ratio = statistics.median(a / b for a, b in zip(races["zbv"].seconds, races["auto"].seconds))
        bars.append(Bar(f"auto is {ratio - 1:.0%} faster than zbv, at least {FASTER - 1:.0%}", ratio >= FASTER))
    spreads = {name: spread(race.seconds) for name, race in races.items() if race.seconds}
    times = [[name, milliseconds(m), f"{milliseconds(a)} to {milliseconds(b)}"] for name, (a, m, b) in spreads.items()]
    tables = [Table(str(work), columns, rows), Table("schedules", ["schedule", "ms/step", "quartiles"], times)]
    raw = {name: vars(outcome) for name, outcome in outcomes.items()}
    raw |= {f"schedule {name}": vars(race) for name, race in races.items()}
    return Section("Partition", TEXT, tables, bars, failures(lanes, outcomes) + failures(raced, races), raw)


def _stages(outcome: Outcome) -> tuple[Sequence[float], Sequence[float]]:
    """Seconds of one microbatch on each stage: expected (relative ones scaled to the measured sum), and measured."""
    measured = [statistics.median(stage) for stage in zip(*(report[0]["measured"] for report in outcome.reports))]
    last = outcome.reports[-1][0]
    expected = last["expected"]
    scale = 1.0 if last["profiled"] else sum(measured) / sum(expected)
    return [cost * scale for cost in expected], measured
