"""Schedules: pure functions from p ranks, m microbatches and v chunks per rank to a `Program`."""

import difflib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator

from pipeshard.errors import ConfigurationError
from pipeshard.schedule.program import Action, Kind, Program, StageStep


def gpipe(p: int, m: int, v: int = 1) -> Program:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965). With p=3, m=4:

    rank 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
    rank 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
    rank 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

    The bubble is (p-1)(F+B) on each rank. At the peak, m microbatches of activations are alive.
    """
    # Backwards run in the order 0..m-1, not reversed: gradients are then summed in the order of plain
    # gradient accumulation, and of the other schedules, so that all results agree bit for bit.
    return _program("gpipe", m, range(p), ([(Kind.F, r)] * m + [(Kind.B, r)] * m for r in range(p)))


def one_f_one_b(p: int, m: int, v: int = 1) -> Program:
    """One forward, one backward: PipeDream-Flush (Narayanan et al. 2021, arXiv:2006.09503). With p=3, m=4:

    rank 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    rank 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    rank 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

    The bubble is (p-1)(F+B) on each rank, as in GPipe, but rank r keeps only min(m, p-r) microbatches of activations.
    """
    ranks = ([(Kind.F, r)] * (p - r - 1) + [(Kind.F, r), (Kind.B, r)] * m for r in range(p))
    return _program("1f1b", m, range(p), ranks)


def interleaved(p: int, m: int, v: int = 2) -> Program:
    """1F1B with v chunks per rank, stage s on rank s % p (Narayanan et al. 2021, arXiv:2104.04473). With p=3, m=3, v=2:

    rank 0  F0@0 F1@0 F2@0 F0@3 F1@3 F2@3 .... .... B0@3 .... B1@3 .... B2@3 B0@0 B1@0 B2@0
    rank 1  .... F0@1 F1@1 F2@1 F0@4 F1@4 F2@4 B0@4 .... B1@4 .... B2@4 B0@1 B1@1 B2@1 ....
    rank 2  .... .... F0@2 F1@2 F2@2 F0@5 B0@5 F1@5 B1@5 F2@5 B2@5 B0@2 B1@2 B2@2 .... ....

    A rank runs p microbatches through one chunk, then through its next chunk. F and B are the total times of all chunks
    of a rank. If p divides m, the bubble is (p-1)(F+B)/v, and rank r keeps 2(p-r-1) + (v-1)p + 1 activations of a
    stage, but at most vm.
    """

    def rank(r: int) -> list[StageStep]:
        rounds = -(-m // p)
        forwards = [(Kind.F, s) for s in range(r, p * v, p) for _ in range(p)] * rounds
        backwards = [(Kind.B, s) for s in reversed(range(r, p * v, p)) for _ in range(p)] * rounds
        warmup = 2 * (p - r - 1) + (v - 1) * p
        pairs = itertools.zip_longest(forwards[warmup:], backwards)
        return forwards[:warmup] + [step for pair in pairs for step in pair if step]

    return _program("interleaved", m, [*range(p)] * v, map(rank, range(p)))


def zb_h1(p: int, m: int, v: int = 1) -> Program:
    """Zero bubble H1: 1F1B in which rank r defers each W by r microbatches (Qi et al. 2023, arXiv:2401.10241). With
    p=3, m=4:

    rank 0  F0 F1 F2 .. .. B0 W0 F3 B1 W1 B2 W2 B3 W3
    rank 1  .. F0 F1 .. B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
    rank 2  .. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    The bubble is (p-1)(F+B-W) if m >= p and W <= min(F, B), and (p-1)max(F, B) if W is larger. Every rank keeps
    min(m, p) microbatches of activations, as many as the first rank of 1F1B.
    """

    def rank(r: int) -> list[StageStep]:
        f, b, w = (Kind.F, r), (Kind.B, r), (Kind.W, r)
        return [f] * (p - r - 1) + [f, b] * r + [f, b, w] * m

    return _program("zb-h1", m, range(p), map(rank, range(p)))


def zbv(p: int, m: int, v: int = 2) -> Program:
    """Zero bubble in a V: rank s holds stages s and 2p-1-s (Qi et al. 2024, arXiv:2405.15362). With p=2, m=3:

    rank 0  F0@0 F1@0 F2@0 F0@3 B0@3 W0@3 F1@3 B1@3 W1@3 B0@0 W0@0 F2@3 B2@3 W2@3 B1@0 W1@0 B2@0 W2@0 ....
    rank 1  .... F0@1 F0@2 F1@1 F1@2 B0@2 W0@2 F2@1 B0@1 W0@1 F2@2 B1@2 W1@2 B1@1 B2@2 B2@1 W1@1 W2@2 W2@1

    F, B and W are the total times of both chunks of a rank. The bubble is (p-1)max(B/2, B-W) if m >= 2p-2 and max(F, W)
    <= B. This is (p-1)(F+B-W)/2 if F = B = W, and at most this value if W <= F <= B <= F+W. Every rank keeps 2p
    activations of a stage (fewer if m < 2p-1). These activations take as much memory as the p activations on the first
    rank of 1F1B, whose stages are twice as large.
    """

    def rank(r: int) -> list[StageStep]:
        f, b, w = ((kind, r) for kind in (Kind.F, Kind.B, Kind.W))
        f2, b2, w2 = ((kind, 2 * p - 1 - r) for kind in (Kind.F, Kind.B, Kind.W))
        fill = [f] * (2 * (p - r) - 1) + [f2, f] * r + [f2, b2, w2] * (p - r)
        steady = [f, b, w, f2, b2, w2] * (m - p)
        drain = [b, b2] * r + [b, w] * (p - r) + [w2] * r + [w] * r
        return fill + steady + drain

    return _program("zbv", m, [*range(p), *reversed(range(p))], map(rank, range(p)))


def v_half(p: int, m: int, v: int = 2) -> Program:
    """A V with about half of zbv's activations for large p (Qi et al. 2024, arXiv:2405.15362). With p=2, m=3:

    rank 0  F0@0 F1@0 .... F0@3 B0@3 W0@3 F2@0 F1@3 B1@3 W1@3 B0@0 W0@0 .... F2@3 B2@3 W2@3 B1@0 W1@0 .... B2@0 W2@0
    rank 1  .... F0@1 F0@2 F1@1 .... B0@2 F1@2 W0@2 F2@1 B0@1 B1@2 W0@1 F2@2 W1@2 B1@1 B2@2 W1@1 W2@2 B2@1 W2@1 ....

    A rank keeps at most 2((p+2)//2) activations of a stage, while zbv keeps 2p. The bubble is at most 7/12 (p-1)(F+B+W)
    if F = B = W and m >= p, compared with (p-1)(F+B+W) for 1F1B. If B takes much longer than F and W, the bubble
    grows with m.
    """
    return _v("v-half", p, m, 2, (2, 1, 1) if p % 2 else (4, 1, 5))


def v_min(p: int, m: int, v: int = 2) -> Program:
    """A V with about a third of zbv's activations for large p (Qi et al. 2024, arXiv:2405.15362). With p=2, m=3:

    rank 0  F0@0 .... .... F0@3 B0@3 W0@3 F1@0 B0@0 W0@0 F1@3 B1@3 W1@3 F2@0 B1@0 W1@0 F2@3 B2@3 W2@3 .... B2@0 W2@0
    rank 1  .... F0@1 F0@2 .... .... B0@2 B0@1 F1@1 F1@2 W0@2 W0@1 B1@2 B1@1 F2@1 F2@2 W1@2 W1@1 B2@2 B2@1 W2@2 W2@1

    A rank keeps at most 2((p+4)//3) activations of a stage, while zbv keeps 2p. The bubble is at most 2/3 (p-1)(F+B+W)
    if F = B = W. If F, B and W differ, each microbatch adds to the bubble.
    """
    return _v("v-min", p, m, 1, (1, 1, 1) if p % 3 else (3, 1, 3))


def _v(name: str, p: int, m: int, up: int, turns: tuple[int, int, int]) -> Program:
    """A program whose stages form a V. Each microbatch repeats the steps of the previous microbatch 6 units of time
    later, since a rank has 6 actions per microbatch.

    Each stage starts 1 unit after the previous stage on the way down the ranks, and `up` units after it on the way
    back. `turns` contains the times from F to F on the last rank, from F to B on the first rank, and from B to B on the
    last rank. Each W runs at the earliest free time.
    """
    bottom = p - 1 + turns[0]
    top = bottom + up * (p - 1) + turns[1]
    bottom_again = top + p - 1 + turns[2]

    def rank(r: int) -> list[StageStep]:
        down, back = r, up * (p - 1 - r)
        b, b2 = bottom_again + back, top + down
        times = {(Kind.F, r): down, (Kind.F, 2 * p - 1 - r): bottom + back, (Kind.B, 2 * p - 1 - r): b2, (Kind.B, r): b}
        left = {*range(6)} - {time % 6 for time in times.values()}
        pairs = [(_next(b2, x), _next(b, y)) for x, y in itertools.permutations(sorted(left))]
        times[Kind.W, 2 * p - 1 - r], times[Kind.W, r] = min(pairs, key=sum)
        return [step for _, step in sorted((time + 6 * i, step) for step, time in times.items() for i in range(m))]

    return _program(name, m, [*range(p), *reversed(range(p))], map(rank, range(p)))


def _next(time: int, x: int) -> int:
    """The first time after `time` that equals x modulo 6."""
    return time + 1 + (x - time - 1) % 6


def _program(name: str, m: int, placement: Iterable[int], ranks: Iterable[Iterable[StageStep]]) -> Program:
    """The program in which each occurrence of a step in a rank's list runs the next microbatch of this step, up to the
    m-th microbatch.

    The microbatches of a step are therefore in ascending order, and a list may contain more steps than necessary: a
    program stays legal, and free of deadlocks, if all actions of some microbatches are omitted.
    """
    microbatches = tuple(range(m))  # shared objects are cheaper to look up

    def rank(steps: Iterable[StageStep]) -> Iterator[Action]:
        left: defaultdict[StageStep, Iterator[int]] = defaultdict(lambda: iter(microbatches))
        for kind, stage in steps:
            for i in itertools.islice(left[kind, stage], 1):
                yield Action(kind, i, stage)

    return Program(name, m, tuple(placement), tuple(tuple(rank(steps)) for steps in ranks))


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-h1": zb_h1}
SCHEDULES |= (IN_A_V := {"zbv": zbv, "v-half": v_half, "v-min": v_min})


def make_program(name: str, p: int, m: int, v: int = 1) -> Program:
    """The training program of schedule `name` for `p` ranks and `m` microbatches, without communication.

    `v` is the requested number of model chunks, as in `num_chunks`. Raises ConfigurationError for an unknown name, a
    `v` that the schedule does not support, `p < 1` or `m < 1`.
    """
    v = num_chunks(name, v)
    if p < 1 or m < 1:
        raise ConfigurationError(f"schedule {name!r} needs p >= 1 ranks and m >= 1 microbatches, got p={p}, m={m}")
    return SCHEDULES[name](p, m, v)


def num_chunks(name: str, v: int = 1) -> int:
    """The number of model chunks per rank under schedule `name`. v = 1 requests the schedule's default.

    The default is 2 for "interleaved" (which accepts any number above 1) and for the V schedules, and 1 for all other
    schedules. Raises ConfigurationError for a `v` that the schedule does not support, or an unknown name.
    """
    if name not in SCHEDULES:
        close = difflib.get_close_matches(str(name).lower(), SCHEDULES, n=1)
        hint = f": did you mean {close[0]!r}?" if close else "."
        raise ConfigurationError(f"unknown schedule {name!r}{hint} Known schedules: {', '.join(sorted(SCHEDULES))}")
    own = 2 if name in ("interleaved", *IN_A_V) else 1
    if v in (1, own) or (name == "interleaved" and v > 1):
        return max(v, own)
    any_number = " or more" if name == "interleaved" else ""
    other = "" if any_number else "; 'interleaved' supports any number above 1"
    raise ConfigurationError(f"schedule {name!r} requires num_model_chunks={own}{any_number}, got {v}{other}")
