"""Memory: the activations of a step, with pipeshard, with torch, and in the simulation."""

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
The model is a llama whose activations take more memory than its parameters. "Peak" is the largest resident memory of a
rank during a step, minus its resident memory at the start of the step. This difference contains the gradients and the
activations. The table shows the largest value of all rounds. "Activations" is the peak divided by the memory that one
microbatch's forward leaves allocated on all stages of the rank. The memory of this forward is measured separately.
"Simulated" is the largest number of activations in the simulation. The activations of a microbatch count from its F to
its last B or W. In schedules with two chunks per rank, each chunk's activations count from the chunk's own F to its
last B or W, as a fraction of the activations of both chunks. In these measurements, the allocator is configured to
return freed memory to the system immediately."""

# glibc otherwise keeps freed memory, and the peak of a step would include earlier steps.
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
                text = f"{schedule}, rank {rank}: {off:+.2f} activations relative to the simulation (target: within 1)"
                bars.append(Bar(text, abs(off) <= 1))
    both = list(zip(peaks(outcomes[ours("1f1b").name]), peaks(outcomes[TORCH.name])))
    if both:
        worst = max(mine / theirs for mine, theirs in both)
        text = f"pipeshard 1f1b takes {worst:.2f} times the memory of torch 1F1B on the worse rank"
        text += " (target: at most 1.05)"
        bars.append(Bar(text, worst <= 1.05))
    columns = ["contender", "rank", "peak (MB)", "activations", "simulated"]
    return Section("Memory", TEXT, [Table(f"{work}, {work.length} tokens", columns, rows)], bars, failed, raw)


def peaks(outcome: Outcome) -> list[float]:
    """Return the largest memory of each rank over all rounds, in bytes."""
    return [float(max(rank)) for rank in zip(*outcome.memory)]
