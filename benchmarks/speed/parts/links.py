"""Links: pipelines and data-parallel replicas on two hosts, connected by links of several rates."""

import statistics
from collections.abc import Mapping
from typing import Any

from rich.progress import Progress

from benchmarks.speed.contender import Contender
from benchmarks.speed.lanes import Lane, Outcome, Rounds, failures
from benchmarks.speed.parts import Effort
from benchmarks.speed.parts.work import TORCH, batches, ours, spread
from benchmarks.speed.section import FAILED, Bar, Section, Table, milliseconds
from benchmarks.speed.work import Work
from tests.hosts import Hosts, missing

TEXT = """\
![step time and memory per rank, by link](links.svg)

Two ranks, each in a separate network namespace, train on the same batches of 16 samples with AdamW in fp32. Pipelines
split the model; DDP, FSDP2 and ZeRO-3 split the batch between data-parallel replicas. FSDP2 shards the parameters,
gradients and optimizer states across the replicas. "FSDP2, each microbatch" all-gathers the parameters of a layer for
every forward and every backward. "FSDP2, once a step" keeps the gathered parameters until the end of the step. DDP and
both variants of FSDP2 accumulate the gradients of all microbatches and reduce these gradients once per step. ZeRO-3
shards the same tensors as FSDP2, and reduces gradients after each microbatch.

`tc tbf` limits the rate of the link. The link has no other traffic and adds no latency. For each link, the table shows
the median of all rounds' step times, and their quartiles in parentheses. "Memory" is the largest resident set of a rank
during a step, including Python and torch. "Sent" is the amount of data that a rank sends per step."""

LINKS = {"no limit": "", "10 Gbit/s": "10gbit", "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
DDP = Contender("DDP", "replicas", {"by": "ddp"})
FSDP = Contender("FSDP2, each microbatch", "replicas", {"by": "fsdp"})
GATHERED = Contender("FSDP2, once a step", "replicas", {"by": "gathered"})
ZERO = Contender("DeepSpeed ZeRO-3", "zero", {}, ".venv-deepspeed")
MINE = [ours(schedule, verify=False) for schedule in ("1f1b", "zb-h1", "zbv")]
CONTENDERS = [*MINE, TORCH, DDP, GATHERED, FSDP, ZERO]
AHEAD = [  # link, contender, its least time relative to the fastest schedule of pipeshard
    ("1 Gbit/s", FSDP, 4.0),
    ("1 Gbit/s", DDP, 1.2),
    ("100 Mbit/s", FSDP, 25.0),
    ("100 Mbit/s", DDP, 5.0),
    ("100 Mbit/s", TORCH, 1.15),
]
MEMORY = 0.75  # at most, relative to FSDP2
MOST = 3  # rounds: some steps take a minute


def run(effort: Effort, progress: Progress) -> Section:
    if why := missing():
        return Section("Between two hosts", TEXT, [], failed=[why])
    work = Work(hidden=112, length=32) if effort.quick else Work()
    lanes = [Lane(contender, lambda k: batches(k, 1)) for contender in CONTENDERS]
    rates, rounds = list(LINKS.values()), min(effort.rounds, MOST)
    with Hosts() as hosts:

        def before(k: int) -> None:
            hosts.limit(rates[max(k - 1, 0) // rounds])  # the warm-up uses the first rate

        found = Rounds(work, lanes, rounds * len(LINKS), progress, hosts, before).run()
    raw = {name: vars(outcome) for name, outcome in found.items()}
    return Section(
        "Between two hosts",
        TEXT,
        [_table(work, found)],
        [] if effort.quick else bars_of(found),
        failures(lanes, found),
        raw,
    )


def of_links(outcome: Outcome) -> dict[str, list[float]]:
    """Return the times of a step for each link. Links have equally many rounds, one link after the other."""
    rounds = len(outcome.seconds) // len(LINKS)
    return {link: outcome.seconds[k * rounds : (k + 1) * rounds] for k, link in enumerate(LINKS)}


def bars_of(found: Mapping[str, Outcome]) -> list[Bar]:
    bars, whole = [], {name: outcome for name, outcome in found.items() if not outcome.error}
    for link, other, least in AHEAD:
        times = {name: statistics.median(of_links(outcome)[link]) for name, outcome in whole.items()}
        mine = [times[contender.name] for contender in MINE if contender.name in times]
        if mine and other.name in times:
            ratio = times[other.name] / min(mine)
            text = f'{link}: "{other.name}" takes {ratio:.2f} times as long as the fastest schedule of pipeshard'
            text += f" (target: at least {least:g})"
            bars.append(Bar(text, ratio >= least))
    memory = {name: _largest(outcome.resident) for name, outcome in whole.items()}
    if FSDP.name in memory:
        share = min(memory[contender.name] for contender in MINE if contender.name in memory) / memory[FSDP.name]
        text = f'the smallest memory of pipeshard is {share:.2f} times that of "{FSDP.name}" (target: at most {MEMORY})'
        bars.append(Bar(text, share <= MEMORY))
    return bars


def _table(work: Work, found: Mapping[str, Outcome]) -> Table:
    rows = []
    for name, outcome in found.items():
        if outcome.error:
            rows.append([name, *[FAILED] * (len(LINKS) + 2)])
            continue
        sizes = _largest(outcome.resident), _largest(outcome.sent)
        rows.append([name, *map(_time, of_links(outcome).values()), f"{sizes[0] / 1e6:.0f}", f"{sizes[1] / 1e6:.1f}"])
    columns = ["contender", *(f"{link} (ms)" for link in LINKS), "memory (MB)", "sent (MB)"]
    return Table(f"{work}: {work.samples}×{work.length} tokens", columns, rows)


def _time(seconds: list[float]) -> str:
    low, middle, high = map(milliseconds, spread(seconds))
    return f"{middle} ({low} to {high})"


def _largest(rounds: list[list[Any]]) -> float:
    return float(max(max(ranks) for ranks in rounds))
