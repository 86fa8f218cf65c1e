"""Slices: programs for microbatches that are split along the sequence into n slices each.

A slice needs the cache entries of the slices before it. The backward of a slice needs the gradients that later slices
compute for the slice's own entries. The forwards of a microbatch therefore run from the first slice to the last, and
the backwards from the last to the first (Seq1F1B, Sun et al. 2024, arXiv:2406.03488). In a program, slice s of
microbatch i has the number i * n + s.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

from pipeshard.errors import ConfigurationError
from pipeshard.schedule.program import Action, Kind, Program
from pipeshard.schedule.schedules import make_program
from pipeshard.schedule.simulate import simulate

NEAR = 1.05  # a step this close to the shortest is accepted, since more slices are not worth their overhead
SLICED = ("1f1b", "gpipe", "zb-h1")  # schedules with one stage per rank


def refuse_unsliced(name: str) -> None:
    """Raise ConfigurationError for a schedule that does not support slices."""
    if name not in SLICED:
        raise ConfigurationError(f"schedule {name!r} does not support slices: use one of {', '.join(SLICED)}")


def sliced(name: str, p: int, m: int, n: int) -> Program:
    """The program of schedule `name` for m microbatches of n slices. 1F1B with p=2, m=2, n=2:

    rank 0  F0 F1 F2 .. B1 F3 B0 .. B3 B2
    rank 1  .. F0 F1 B1 F2 B0 F3 B3 B2 ..

    This is the program of m * n microbatches with n - 1 more forwards before the first backward, since backwards begin
    with the last slice. The bubble is (p-1)(F+B)/n, where F and B are the times of a microbatch. Rank r of 1F1B keeps
    min(m * n, p - r + n - 1) slices. Raises ConfigurationError for a schedule with several stages per rank.
    """
    if n > 1:
        refuse_unsliced(name)
    whole = make_program(name, p, m * n)
    forwards = list(range(m * n))
    backwards = [i * n + s for i in range(m) for s in reversed(range(n))]

    def rank(r: int, actions: tuple[Action, ...]) -> Iterator[Action]:
        early = [Action(Kind.F, 0, r)] * (n - 1)
        left: defaultdict[Kind, Iterator[int]] = defaultdict(lambda: iter(backwards), {Kind.F: iter(forwards)})
        for kind, _, stage in itertools.chain(early, actions):
            for number in itertools.islice(left[kind], 1):
                yield Action(kind, number, stage)

    ranks = tuple(tuple(rank(r, actions)) for r, actions in enumerate(whole.ranks))
    return dataclasses.replace(whole, name=f"{name}, {n} slices" if n > 1 else name, ranks=ranks)


@lru_cache
def number_of_slices(name: str, p: int, m: int, most: int) -> int:
    """The number of slices for "auto": the smallest of 1, 2, 4, ... up to `most` for which a step takes at most 5 %
    longer than the shortest step. A backward is assumed to take twice as long as a forward."""
    numbers = [2**k for k in range(max(1, most).bit_length())]
    times = {n: simulate(sliced(name, p, m, n), 1 / n, 2 / n).makespan for n in numbers}
    return next(n for n in numbers if times[n] <= NEAR * min(times.values()))
