"""Limits: the shortest possible step of a schedule, simulated with the measured costs of the stages."""

from collections.abc import Sequence
from typing import Any

from benchmarks.speed.contender import RANKS
from pipeshard.schedule import Simulation, make_program, shorten_cooldown, simulate_parts
from pipeshard.schedule.schedules import IN_A_V

CHUNKS = {"interleaved": 2, **dict.fromkeys(IN_A_V, 2)}  # chunks per rank; other schedules have one

Report = Sequence[dict[str, Any]]  # per rank: the costs of the two halves of its stage (trainers/limit.py)


def limit(schedule: str, microbatches: int, report: Report, plain: bool = False) -> float:
    """Return the least seconds of a step: the makespan without messages, plus the slowest rank's optimizer step."""
    return simulation(schedule, microbatches, report, plain).makespan + max(rank["optimizer"] for rank in report)


def simulation(schedule: str, microbatches: int, report: Report, plain: bool = False) -> Simulation:
    """Simulate the schedule as pipeshard runs it, or, with `plain`, as it is published and as the peers run it."""
    program = make_program(schedule, RANKS, microbatches, CHUNKS.get(schedule, 1))
    program = program if plain else shorten_cooldown(program)
    return simulate_parts(program, *(per_stage(schedule, kind, report) for kind in ("F", "B", "W")))


def per_stage(schedule: str, kind: str, report: Report) -> list[float]:
    """Return a cost for each stage of the schedule. If a rank has one chunk, the cost is the sum of both halves."""
    halves: list[float] = [figure for rank in report for figure in rank[kind]]
    if CHUNKS.get(schedule, 1) == 2:
        return halves
    return [sum(halves[k : k + 2]) for k in range(0, len(halves), 2)]
