"""Work: the step time of every contender for the same model, relative to the limit of 1F1B."""

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.progress import Progress

from benchmarks.speed.contender import Batches, Contender
from benchmarks.speed.lanes import Lane, Outcome, Rounds, failures, loss_errors
from benchmarks.speed.limits import CHUNKS, limit
from benchmarks.speed.parts import Effort
from benchmarks.speed.section import FAILED, Bar, Section, Table, milliseconds
from benchmarks.speed.work import Work
from pipeshard.schedule import SCHEDULES

TEXT = """\
All contenders train the same model on the same batches with AdamW in fp32 and p = 2. The layers are split into equal
parts. The tables show the median and the quartiles of all rounds' step times. The limit of a schedule is its
simulated makespan plus the time of the optimizer's step. The simulation uses each stage's times for F (forward), B
(input gradients) and W (weight gradients), measured in the same round. In the simulation, messages, tied weights and
Python take no time.

The plot and the column "time / limit" show the time of a step divided by the limit of the published 1F1B schedule,
which "torch 1F1B", DeepSpeed and ColossalAI run. "Own limit" is the limit of the schedule that the contender itself
runs. For 1F1B, pipeshard's own limit is lower than that of the published schedule: after its last forward, a rank sends
each input gradient before it computes the weight gradients of that microbatch (`shorten_cooldown`). "One process" is
the unsplit model with gradient accumulation. Two copies of "one process" run at the same time, one on each core,
because the two ranks of a pipeline also share memory bandwidth and clock frequency. "Loss error" is the largest
relative difference from the median loss of all contenders.

In the list below the tables, the results that name no model are geometric means over all tables. The other results
compare pipeshard's fastest schedule with the fastest 1F1B of a peer, not with torch's ZBVZeroBubble and DualPipeV: in
these two schedules, as in zbv, the ranks are idle for 3 to 5 % of a step, so no schedule can be 8 % faster."""


def ours(schedule: str, **options: Any) -> Contender:
    """Return the contender that runs pipeshard with this schedule, and layers split into equal parts."""
    chunks = CHUNKS.get(schedule, 1)
    if schedule == "interleaved":
        options["num_model_chunks"] = chunks
    name = f"pipeshard {schedule}" + (" isend" if options.get("p2p") == "isend" else "")
    name += " " + compiled(options["compile"]) if options.get("compile") else ""
    name += f", {options['num_slices']} slices" if options.get("num_slices") else ""
    return Contender(name, "pipeshard", {"schedule": schedule, "stages": 2 * chunks, **options})


def compiled(how: Any) -> str:
    """Return the name of torch.compile's options in names of contenders."""
    if not isinstance(how, dict):
        return "compiled"
    return "compiled, C++ calls"


CPP_CALLS = {"options": {"cpp_wrapper": True}}  # C++ code launches the kernels, instead of Python
TORCH = Contender("torch 1F1B", "torch")
# InterleavedZeroBubble is slower than both. The processes of all contenders are alive at once, and need 23 GB.
TORCHS_OWN = [Contender(f"torch {name}", "torch", {"schedule": name}) for name in ("ZBVZeroBubble", "DualPipeV")]
DEEPSPEED = Contender("DeepSpeed", "deepspeed", {}, ".venv-deepspeed")
COLOSSALAI = Contender("ColossalAI", "colossalai", {}, ".venv-colossalai")
UNSPLIT = Contender("one process", "unsplit")
LIMIT = Contender("limit", "limit")
WITHOUT_LIMIT = {UNSPLIT.name, *(contender.name for contender in TORCHS_OWN)}
PEERS = [TORCH, DEEPSPEED, COLOSSALAI]  # all run 1F1B
LEADS = {8: 0.08, 4: 0.12}  # by microbatches: how much less time the fastest schedule takes than a peer's 1F1B
CONTENDERS = [*map(ours, SCHEDULES), ours("1f1b", p2p="isend"), *PEERS, *TORCHS_OWN, UNSPLIT, LIMIT]


def run(effort: Effort, progress: Progress) -> Section:
    works = [Work(family, microbatches=m) for family in ("llama", "gpt2") for m in (8, 4)]
    if effort.quick:
        works = [work.having(hidden=112, length=32) for work in works[::3]]
    tables, failed, raw, found = [], [], {}, {}
    for work in works:
        steps = 8 // work.microbatches  # per turn: equally many tokens for every m
        lanes = [Lane(contender, functools.partial(batches, steps=steps)) for contender in CONTENDERS]
        outcomes = Rounds(work, lanes, effort.rounds, progress).run()
        ratios = against_limit(work, outcomes)
        tables.append(_table(work, lanes, outcomes, ratios))
        found[work] = outcomes
        failed += [f"{work}: {failure}" for failure in failures(lanes, outcomes)]
        raw[str(work)] = {"ratios": ratios, "outcomes": {name: vars(outcome) for name, outcome in outcomes.items()}}
    return Section("The same work", TEXT, tables, bars_of(found), failed, raw)


def batches(k: int, steps: int) -> Batches:
    """Return the batches of round k, with seeds that no other round has."""
    return [(k * steps + step + 1, None) for step in range(steps)]


def against_limit(work: Work, outcomes: dict[str, Outcome]) -> dict[str, list[float]]:
    """Return each contender's time divided by the limit of 1F1B as published, for each round."""
    limits = _limits("1f1b", work, outcomes, plain=True)
    others = {name: outcome for name, outcome in outcomes.items() if name != LIMIT.name}
    return {name: [a / b for a, b in zip(outcome.seconds, limits)] for name, outcome in others.items()}


def bars_of(outcomes: Mapping[Work, dict[str, Outcome]]) -> list[Bar]:
    """Compare 1F1B with its own limit, each peer and isend, and the fastest schedule with torch's fastest schedule, as
    geometric means over the works, because a busy machine disturbs single works. For each work, also compare the
    fastest schedule with the fastest 1F1B of a peer. All times are medians."""
    plain, isend = _name("1f1b"), ours("1f1b", p2p="isend").name
    mine, own = list(map(_name, SCHEDULES)), [contender.name for contender in TORCHS_OWN]
    times = {work: _medians(work, found) for work, found in outcomes.items()}
    bars = []
    comparisons = [
        (plain, [plain], "its own limit", [""], 0.05),
        *((plain, [plain], peer.name, [peer.name], 0.0) for peer in PEERS),
        (plain, [plain], isend, [isend], 0.03),
        ("pipeshard's fastest schedule", mine, "torch's fastest schedule", own, 0.03),
    ]
    for who, names, what, others, most in comparisons:
        pairs = [(_fastest(names, of), _fastest(others, of)) for of in times.values()]
        ratios = [a[0] / b[0] for a, b in pairs if a and b]
        if ratios:
            off = statistics.geometric_mean(ratios) - 1
            text = f"{who}: step time {off:+.1%} relative to {what} (target: at most {most:+.0%})"
            bars.append(Bar(text, off <= most))
    for work, of in times.items():
        best, peer = _fastest(mine, of), _fastest([peer.name for peer in PEERS], of)
        if best and peer:
            ahead, lead = 1 - best[0] / peer[0], LEADS[work.microbatches]
            text = f"{work}: {best[1]} takes {ahead:.1%} less time than the fastest 1F1B of a peer, {peer[1]}"
            bars.append(Bar(f"{text} (target: at least {lead:.0%})", ahead >= lead))
    return bars


def _fastest(names: Sequence[str], times: Mapping[str, float]) -> tuple[float, str] | None:
    """Return the shortest time and the name of its contender, or None if all of these contenders have failed."""
    return min(((times[name], name) for name in names if name in times), default=None)


def _medians(work: Work, outcomes: dict[str, Outcome]) -> dict[str, float]:
    """Return the median step time of each contender, and the limit of 1F1B under the empty name."""
    limits = _limits("1f1b", work, outcomes)
    found = {name: outcome.seconds for name, outcome in outcomes.items() if name != LIMIT.name} | {"": limits}
    return {name: statistics.median(values) for name, values in found.items() if values}


def _limits(schedule: str, work: Work, outcomes: dict[str, Outcome], plain: bool = False) -> list[float]:
    """Return the limit of the schedule in each round."""
    return [limit(schedule, work.microbatches, report, plain) for report in outcomes[LIMIT.name].reports]


def _name(schedule: str) -> str:
    return ours(schedule).name


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _table(work: Work, lanes: list[Lane], outcomes: dict[str, Outcome], ratios: dict[str, list[float]]) -> Table:
    wrong = loss_errors(lanes, outcomes)
    rows = []
    for name, outcome in outcomes.items():
        if name == LIMIT.name:
            continue
        if not outcome.seconds:
            rows.append([name, FAILED, *[""] * 5])
            continue
        low, middle, high = spread(outcome.seconds)
        row = [name, milliseconds(middle), f"{milliseconds(low)} to {milliseconds(high)}"]
        if ratios[name]:
            mine = name.startswith("pipeshard")
            own = statistics.median(_limits(name.split()[1] if mine else "1f1b", work, outcomes, plain=not mine))
            over = "" if name in WITHOUT_LIMIT else milliseconds(own)
            low, middle, high = spread(ratios[name])
            row += [over, f"{middle:.3f}", f"{low:.3f} to {high:.3f}"]
        rows.append([*row, *[""] * (6 - len(row)), f"{wrong[name]:.0e}"])
    columns = ["contender", "ms/step", "quartiles", "own limit (ms)", "time / limit", "quartiles", "loss error"]
    title = f"{work}: {work.samples}×{work.length} tokens, {parameters(work):.0f} M parameters"
    return Table(title, columns, rows)


def parameters(work: Work) -> float:
    """Return the number of parameters in millions."""
    return sum(parameter.numel() for parameter in work.model().parameters()) / 1e6
