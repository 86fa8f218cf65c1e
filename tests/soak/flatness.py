"""Flatness: whether the memory and objects of ranks grow in the second half of their lives, after most kinds of batches
have occurred."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tests.soak.course import SIZE
from tests.soak.lives import Life
from tests.soak.meter import QUANTITIES


@dataclass(frozen=True)
class Bound:
    """What a rank may come to hold more of: `slope` in 1000 steps, or `noise` in all."""

    slope: float
    noise: float


BOUNDS = {  # those of which there are now more, now fewer
    "rss": Bound(10.0, 6.0),
    "tensors": Bound(200.0, 30.0),
    "objects": Bound(2000.0, 500.0),
}
COUNTS = ("fds", "threads", "groups")  # constant, but for what a save has while it goes on
Points = list[tuple[np.ndarray, np.ndarray]]  # steps and what was held, of each life


def growths(lives: Sequence[Life]) -> list[str]:
    """What grows, on which rank."""
    return [
        f"rank {rank}, {name}: {growth}"
        for rank in range(SIZE)
        for name, group in _groups(lives)
        for quantity in QUANTITIES
        if (growth := _growth(quantity, _points(group, rank, quantity)))
    ]


def holdings(lives: Sequence[Life]) -> Iterator[str]:
    """A line for each rank, and what it held."""
    for rank in range(SIZE):
        for name, group in _groups(lives):
            lines = [line for life in group for line in life.lines[rank]]
            counts = [f"{_range([line[count] for line in lines])} {QUANTITIES[count]}" for count in COUNTS]
            held = [[life.lines[rank][k]["rss"] for life in group if life.lines[rank]] for k in (0, -1)]
            slopes = [f"{_slope(_points(group, rank, quantity)):+.1f} {QUANTITIES[quantity]}" for quantity in BOUNDS]
            yield f"rank {rank}, {name}: {np.median(held[0]):.0f} to {np.median(held[1]):.0f} MiB, {', '.join(counts)}"
            yield f"  in 1000 steps {', '.join(slopes)}"


def _groups(lives: Sequence[Life]) -> list[tuple[str, Sequence[Life]]]:
    groups = [("undisturbed", lives[:1]), ("between restarts", lives[1:])]
    return [(name, group) for name, group in groups if any(life.lines[0] for life in group)]


def _points(lives: Sequence[Life], rank: int, quantity: str) -> Points:
    """Those of the second halves; of the shortest lives there are too few to tell."""
    halves = [life.lines[rank][len(life.lines[rank]) // 2 :] for life in lives]
    return [
        (np.array([line["step"] for line in half]), np.array([float(line[quantity]) for line in half]))
        for half in halves
        if len(half) >= 4
    ]


def _growth(quantity: str, points: Points) -> str:
    unit = QUANTITIES[quantity]
    if quantity in COUNTS:
        more = max((_more(held) for _, held in points), default=0.0)
        return f"{more:.0f} more {unit}" if more > 0 else ""
    bound, slope = BOUNDS[quantity], _slope(points)
    span = max((steps[-1] - steps[0] for steps, _ in points), default=0)
    is_flat = slope < bound.slope or slope * span / 1000 < bound.noise
    return "" if is_flat else f"{slope:.1f} {unit} more in 1000 steps, {bound.slope:.0f} are allowed"


def _more(held: np.ndarray) -> float:
    """By how many the fewest of the last points are more than the fewest of those before."""
    before, after = np.array_split(held, 2)
    return float(after.min() - before.min())


def _slope(points: Points) -> float:
    """In 1000 steps: of the one slope with which, each from a height of its own, lines come closest to all lives."""
    steps = np.concatenate([steps - steps.mean() for steps, _ in points] or [np.ones(1)])
    held = np.concatenate([held - held.mean() for _, held in points] or [np.zeros(1)])
    return 1000 * float(steps @ held) / float(steps @ steps)


def _range(values: Sequence[int]) -> str:
    fewest, most = min(values), max(values)
    return f"{fewest}" if fewest == most else f"{fewest} to {most}"
