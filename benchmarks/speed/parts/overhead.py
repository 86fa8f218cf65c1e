"""Overhead: many tiny microbatches, so that most of a step is the library's own overhead."""

import dataclasses
import statistics
from collections.abc import Sequence

from rich.progress import Progress

from benchmarks.speed.lanes import Lane, Outcome, Rounds, failures
from benchmarks.speed.parts import Effort
from benchmarks.speed.parts.work import COLOSSALAI, CPP_CALLS, TORCH, UNSPLIT, batches, compiled, ours, spread
from benchmarks.speed.section import FAILED, Bar, Section, Table, milliseconds
from benchmarks.speed.work import Work

TEXT = """\
A llama with hidden size 64 and 8 layers trains on 64 microbatches per step, each with one sample of 32 tokens. The
forward of a stage takes a few milliseconds, most of which is spent outside matrix products. "Time / 1F1B" is the time
of the contender divided by the time of pipeshard's 1F1B in the same round (median and quartiles). A ratio above 1 means
that pipeshard's 1F1B is faster. The stages written for torch only loop over the layers, and omit the code that the
model's own forward runs around the layers (mostly masks). pipeshard runs the model's own forward on every stage.

"Compiled" is `compile=True`. torch's contender calls `compile()` on each layer instead. "C++ calls" is
`compile={"options": {"cpp_wrapper": True}}`. torch's contender uses the same option. With `cpp_wrapper`, compiled C++
code launches the kernels of a layer. Without this option, Python code launches the kernels."""

OURS = ours("1f1b")
COMPILED = [True, CPP_CALLS]
MINE = [OURS, ours("gpipe"), *(ours(schedule, compile=how) for how in COMPILED for schedule in ("1f1b", "gpipe"))]
TORCH_COMPILED = [
    dataclasses.replace(TORCH, name=f"{TORCH.name} {compiled(how)}", options={"compile": how}) for how in COMPILED
]
BARS = {COLOSSALAI.name: 1.3, TORCH.name: 1.0}  # least time of each peer, relative to pipeshard's fastest variant


def run(effort: Effort, progress: Progress) -> Section:
    work = Work(hidden=64, heads=4, vocabulary=512, length=32, microbatch=1, microbatches=8 if effort.quick else 64)
    contenders = [*MINE, TORCH, *TORCH_COMPILED, COLOSSALAI, UNSPLIT]
    lanes = [Lane(contender, lambda k: batches(k, 1 if effort.quick else 6)) for contender in contenders]
    outcomes = Rounds(work, lanes, effort.rounds, progress).run()
    times = {name: statistics.median(outcome.seconds) for name, outcome in outcomes.items() if outcome.seconds}
    best = min((contender.name for contender in MINE if contender.name in times), key=lambda name: times[name])
    bars = []
    for name, bar in BARS.items():
        if ratios := against(best, name, outcomes):
            ratio = statistics.median(ratios)
            text = f'{name} takes {ratio:.2f} times as long as "{best}" (target: at least {bar})'
            bars.append(Bar(text, ratio >= bar))
    raw = {name: vars(outcome) for name, outcome in outcomes.items()}
    return Section("Overhead", TEXT, [_table(str(work), outcomes)], bars, failures(lanes, outcomes), raw)


def against(reference: str, name: str, outcomes: dict[str, Outcome]) -> list[float]:
    """Return the time of `name` divided by that of `reference`, for each round."""
    return [a / b for a, b in zip(outcomes[name].seconds, outcomes[reference].seconds)]


def _table(title: str, outcomes: dict[str, Outcome]) -> Table:
    rows: list[Sequence[str]] = []
    for name, outcome in outcomes.items():
        if not outcome.seconds:
            rows.append([name, FAILED, "", "", ""])
        else:
            ratios = against(OURS.name, name, outcomes) or [float("nan")]
            (low, middle, high), (under, ratio, over) = spread(outcome.seconds), spread(ratios)
            row = [name, milliseconds(middle), f"{milliseconds(low)} to {milliseconds(high)}"]
            rows.append([*row, f"{ratio:.2f}", f"{under:.2f} to {over:.2f}"])
    return Table(title, ["contender", "ms/step", "quartiles", "time / 1F1B", "quartiles"], rows)
