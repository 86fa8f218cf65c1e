"""The memory of a step: activations beyond what a rank holds, by pipeshard and by torch, and as simulated."""

import dataclasses

from rich.progress import Progress

from benchmarks.speed.lanes import Lane, Outcome, Rounds, failures
from benchmarks.speed.limits import per_stage, simulation
from benchmarks.speed.parts import Effort
from benchmarks.speed.parts.work import LIMIT, TORCH, batches, ours
from benchmarks.speed.section import Bar, Section, Table
from benchmarks.speed.work import Work
from pipeshard.schedule import SCHEDULES

TEXT = """\
A llama whose activations outweigh its parameters. A row has the most resident memory of a rank during a step beyond
what was resident at its start (gradients and activations; the largest of the rounds), and the same in activations:
one is what the forward pass of one microbatch leaves behind on a rank's whole stage, measured by itself. The
simulator's number counts, from a microbatch's F to its last B or W; schedules with two chunks a rank count halves.
For this part freed memory goes back to the system at once."""

# glibc otherwise keeps what was freed, and a step's peak would be that of all steps before it.
PROMPT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def run(effort: Effort, progress: Progress) -> Section:
    work = Work(hidden=128, heads=4, vocabulary=256, length=128 if effort.quick else 512, microbatches=8)
    contenders = [*map(ours, SCHEDULES), TORCH, LIMIT]
    prompt = [dataclasses.replace(contender, variables=PROMPT) for contender in contenders]
    lanes = [Lane(contender, lambda k: batches(k, 1)) for contender in prompt]
    outcomes = Rounds(work, lanes, min(effort.rounds, 3), progress).run()
    failed = failures(lanes, outcomes)
    raw = {name: vars(outcome) for name, outcome in outcomes.items()}
    reports = outcomes[LIMIT.name].reports
    if not reports:
        return Section("Memory", TEXT, [], (), failed, raw)
    rows, bars = [], []
    for name, schedule in {**{ours(schedule).name: schedule for schedule in SCHEDULES}, TORCH.name: "1f1b"}.items():
        sizes = per_stage(schedule, "activation", reports[-1])
        expected = simulation(schedule, work.microbatches, reports[-1])
        for rank, (peak, least) in enumerate(zip(peaks(outcomes[name]), expected.peak_memory(sizes))):
            activation = sum(size for size, place in zip(sizes, expected.program.placement) if place == rank)
            counts = f"{peak / activation:.2f}", f"{least / activation:.2f}"
            rows.append([name, str(rank), f"{peak / 1e6:.0f}", *counts])
            if schedule in ("zb-h1", "zbv"):
                off = (peak - least) / activation
                text = f"{schedule}, rank {rank}: {off:+.2f} activations from the simulator's number, within 1"
                bars.append(Bar(text, abs(off) <= 1))
    both = list(zip(peaks(outcomes[ours("1f1b").name]), peaks(outcomes[TORCH.name])))
    if both:
        worst = max(mine / theirs for mine, theirs in both)
        bars.append(Bar(f"1F1B takes {worst:.2f} times torch's memory on the worse rank, at most 1.05", worst <= 1.05))
    columns = ["contender", "rank", "peak (MB)", "in activations", "simulated"]
    return Section("Memory", TEXT, [Table(f"{work}, {work.length} tokens", columns, rows)], bars, failed, raw)


def peaks(outcome: Outcome) -> list[float]:
    """The most that each rank took in any round."""
    return [float(max(rank)) for rank in zip(*outcome.memory)]
