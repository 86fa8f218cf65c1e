"""A sequence length that is new at every step, beside a fixed one with the same number of tokens."""

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
The llama of the first part, m = 4. One pair of processes trains on 128 tokens at every step; another on lengths
that none of its steps had before, 128 on average in every round. "Costs" is the time of the second over that of the
first in the same round; "beyond one process" takes off what the same lengths cost the unsplit model, where no
messages exist. ColossalAI needs `enable_metadata_cache=False` for it, DeepSpeed `dynamic_shape=True`: each is
compared with its fast setting on a fixed length. torch's schedule has no setting for it."""

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
    rounds = min(effort.rounds, 2 * REACH // STEPS - 1)  # there are no more lengths
    lanes = []
    for contender in contenders:  # what is compared runs one after the other
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
    columns = ["contender", "ms/step, fixed", "ms/step, changing", "costs", "quartiles", "beyond one process"]
    bars = []
    if costs[OURS.name]:
        cost = statistics.median(costs[OURS.name]) - unsplit
        bars = [Bar(f"new lengths cost pipeshard {cost:+.1%} beyond one process, below {BAR:.0%}", cost < BAR)]
    refusing = f"{TORCH.name}, {CHANGING}"  # what it says then is a finding
    failed = [failure for failure in failures(lanes, outcomes) if not failure.startswith(refusing)]
    if not outcomes[refusing].error:
        failed.append(f"{refusing}: it ran, which this page denies")
    text = f"{TEXT} Here it {outcomes[refusing].error or 'ran'}."
    raw = {name: vars(outcome) for name, outcome in outcomes.items()}
    return Section("Changing lengths", text, [Table(str(work), columns, rows)], bars, failed, raw)


def fixed(k: int) -> Batches:
    return [(k * STEPS + step + 1, MEAN) for step in range(STEPS)]


def changing(k: int, rounds: int) -> Batches:
    """Lengths of round k that no other round has: as many above the mean as below, near ones and far ones."""
    offsets = [1 + k + step * (rounds + 1) for step in range(STEPS // 2)]
    lengths = [MEAN + sign * offset for offset in offsets for sign in (1, -1)]
    return [(k * STEPS + step + 1, length) for step, length in enumerate(lengths)]


def _costs(name: str, outcomes: dict[str, Outcome]) -> list[float]:
    """How much longer a step takes with changing lengths, as a share, round by round."""
    one, other = (outcomes[f"{name}, {stream}"].seconds for stream in (CHANGING, FIXED))
    return [a / b - 1 for a, b in zip(one, other)]


def _time(outcome: Outcome) -> str:
    return milliseconds(statistics.median(outcome.seconds)) if outcome.seconds else FAILED
