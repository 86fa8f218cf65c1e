"""Limits: what a schedule takes at best, simulated with what the stages were measured to cost."""

from collections.abc import Sequence
from typing import Any

from benchmarks.speed.contender import RANKS
from pipeshard.schedule import Simulation, make_program, shorten_cooldown, simulate_parts
from pipeshard.schedule.schedules import IN_A_V

CHUNKS = {"interleaved": 2, **dict.fromkeys(IN_A_V, 2)}  # of each rank; one for the others

Report = Sequence[dict[str, Any]]  # from each rank, the costs of the two halves of its stage (trainers/limit.py)


def limit(schedule: str, microbatches: int, report: Report, plain: bool = False) -> float:
    """Seconds a step takes at least: the schedule's makespan, messages free, and then the slower rank's optimizer."""
    return simulation(schedule, microbatches, report, plain).makespan + max(rank["optimizer"] for rank in report)


def simulation(schedule: str, microbatches: int, report: Report, plain: bool = False) -> Simulation:
    """As pipeshard runs it; or `plain`, as it is in the literature, and as its peers do."""
    program = make_program(schedule, RANKS, microbatches, CHUNKS.get(schedule, 1))
    program = program if plain else shorten_cooldown(program)
    return simulate_parts(program, *(per_stage(schedule, kind, report) for kind in ("F", "B", "W")))


def per_stage(schedule: str, kind: str, report: Report) -> list[float]:
    """A figure of each of the schedule's stages; where a rank has one chunk, it is both halves together."""
    halves: list[float] = [figure for rank in report for figure in rank[kind]]
    if CHUNKS.get(schedule, 1) == 2:
        return halves
    return [sum(halves[k : k + 2]) for k in range(0, len(halves), 2)]
