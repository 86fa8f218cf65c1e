"""Lengths: a new sequence length in every step, compared with a fixed length and equally many tokens."""

import dataclasses
import statistics

from rich.progress import Progress

from benchmarks.speed.contender import Batches
from benchmarks.speed.lanes import Lane, Outcome, Rounds, failures
from benchmarks.speed.parts import Effort
from benchmarks.speed.parts.work import COLOSSALAI, DEEPSPEED, TORCH, UNSPLIT, ours, spread
from benchmarks.speed.section import FAILED, Bar, Section, Table, milliseconds
from benchmarks.speed.work import Work

TEXT = """\
The model is the llama of the first section, with m = 4. Each contender runs as two pairs of processes. The first pair
trains on samples of 128 tokens in every step. The second pair trains on samples of a new length in every step (128
tokens on average in each round). "Slowdown" is the additional time of the second pair, relative to the time of the
first pair in the same round. "Minus one process" subtracts the slowdown of the unsplit model, which sends no messages.
For changing lengths, ColossalAI requires `enable_metadata_cache=False`, and DeepSpeed requires `dynamic_shape=True`.
For the fixed length, ColossalAI and DeepSpeed use their default settings, which are faster. torch's schedule has no
setting for changing lengths."""

OURS = ours("1f1b")
BAR = 0.03
FIXED, CHANGING = "fixed", "changing"
STEPS = 4
MEAN, REACH = 128, 60  # lengths are MEAN ± 1, 2, ..., REACH

CHANGED = {
    COLOSSALAI.name: dataclasses.replace(COLOSSALAI, options={"enable_metadata_cache": False}),
    DEEPSPEED.name: dataclasses.replace(DEEPSPEED, options={"dynamic_shape": True}),
}


def run(effort: Effort, progress: Progress) -> Section:
    work = Work(microbatches=4, hidden=112 if effort.quick else 448)
    contenders = [OURS, TORCH, DEEPSPEED, COLOSSALAI, UNSPLIT]
    rounds = min(effort.rounds, 2 * REACH // STEPS - 1)  # limited by the number of lengths
    lanes = []
    for contender in contenders:  # lanes that are compared run one after the other
        lanes.append(Lane(contender, fixed, FIXED))
        lanes.append(Lane(CHANGED.get(contender.name, contender), lambda k: changing(k, rounds), CHANGING))
    outcomes = Rounds(work, lanes, rounds, progress).run()
    costs = {contender.name: _costs(contender.name, outcomes) for contender in contenders}
    unsplit = statistics.median(costs[UNSPLIT.name] or [0.0])
    rows = []
    for name, values in costs.items():
        times = [_time(outcomes[f"{name}, {stream}"]) for stream in (FIXED, CHANGING)]
        low, middle, high = spread(values or [float("nan")])
        shares = [f"{middle:+.1%}", f"{low:+.1%} to {high:+.1%}", f"{middle - unsplit:+.1%}"] if values else [""] * 3
        rows.append([name, *times, *shares])
    columns = ["contender", "ms/step, fixed", "ms/step, changing", "slowdown", "quartiles", "minus one process"]
    bars = []
    if costs[OURS.name]:
        cost = statistics.median(costs[OURS.name]) - unsplit
        text = f"the slowdown of pipeshard minus that of one process is {cost:+.1%} (target: below {BAR:.0%})"
        bars = [Bar(text, cost < BAR)]
    refusing = f"{TORCH.name}, {CHANGING}"  # its error is a result
    failed = [failure for failure in failures(lanes, outcomes) if not failure.startswith(refusing)]
    if not outcomes[refusing].error:
        failed.append(f"{refusing}: it ran, but this page says that torch does not support changing lengths")
    text = f"{TEXT} In this run, the schedule {(outcomes[refusing].error or 'ran').rstrip('.')}."
    raw = {name: vars(outcome) for name, outcome in outcomes.items()}
    return Section("Changing lengths", text, [Table(str(work), columns, rows)], bars, failed, raw)


def fixed(k: int) -> Batches:
    return [(k * STEPS + step + 1, MEAN) for step in range(STEPS)]


def changing(k: int, rounds: int) -> Batches:
    """Return batches with lengths that no other round has: half above and half below the mean, near and far."""
    offsets = [1 + k + step * (rounds + 1) for step in range(STEPS // 2)]
    lengths = [MEAN + sign * offset for offset in offsets for sign in (1, -1)]
    return [(k * STEPS + step + 1, length) for step, length in enumerate(lengths)]


def _costs(name: str, outcomes: dict[str, Outcome]) -> list[float]:
    """Return the relative slowdown of a step with changing lengths, for each round."""
    one, other = (outcomes[f"{name}, {stream}"].seconds for stream in (CHANGING, FIXED))
    return [a / b - 1 for a, b in zip(one, other)]


def _time(outcome: Outcome) -> str:
    return milliseconds(statistics.median(outcome.seconds)) if outcome.seconds else FAILED
