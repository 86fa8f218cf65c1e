"""Program: for each rank, the list of actions that a schedule makes it run. One pure function a schedule."""

import csv
import difflib
import enum
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipeshard.errors import ConfigurationError


class Kind(enum.StrEnum):
    """What an action does: compute (F, B, W), or one end of a message between ranks."""

    F = "F"
    B = "B"
    W = "W"
    RECV_F = "RecvF"
    SEND_F = "SendF"
    RECV_B = "RecvB"
    SEND_B = "SendB"

    __hash__ = str.__hash__  # enum's own is written in Python; programs of a million actions are looked up by kind

    @property
    def is_compute(self) -> bool:
        return self not in PARTNER

    @property
    def is_receive(self) -> bool:
        return self in (Kind.RECV_F, Kind.RECV_B)


AFTER = {Kind.B: Kind.F, Kind.W: Kind.B, Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.B}  # what the stage does first
RECEIVE = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B}  # what brings an input from another rank
SEND = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}  # what takes a result to another rank
PARTNER = {  # the other end of a message, and how far from this end its stage is
    Kind.SEND_F: (Kind.RECV_F, +1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, +1),
}
StageStep = tuple[Kind, int]  # what is done for each microbatch alike: (kind, stage)


class Action(NamedTuple):
    """One step of one rank for one microbatch. A message carries the stage of the compute action that it serves:

    `RecvF(i, s)` receives the input of `F(i, s)`, `SendF(i, s)` sends its output; `RecvB(i, s)` receives the
    output-gradient for `B(i, s)`, `SendB(i, s)` sends the input-gradient that it made.
    """

    kind: Kind
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"

    @property
    def partner(self) -> "Action":
        """The other end of a message: `SendF(i, s)` and `RecvF(i, s+1)`, `SendB(i, s)` and `RecvB(i, s-1)`."""
        kind, step = PARTNER[self.kind]
        return Action(kind, self.microbatch, self.stage + step)


@dataclass(frozen=True, slots=True)
class Program:
    """What each rank of a pipeline does in one training step, in order.

    `placement[s]` is the rank that holds (virtual) stage `s`; `ranks[r]` are the actions of rank `r`. A B that a W
    follows makes the input-gradient only; one without is the whole backward.
    """

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    @staticmethod
    def from_csv(path: str | Path) -> "Program":
        """The order of actions in a file as torch.distributed.pipelining writes and reads it ("compute_only").

        A line for each rank has cells such as 1F0 (stage, kind, microbatch). Kinds are F, B (the whole backward), I
        (input gradients) and W; empty cells are idle time; of `(0F1;3B0)OVERLAP_F_B` one comes after the other.

        Raises ConfigurationError for other cells, and for a stage on several ranks; `program_of` checks the rest.
        """
        path = Path(path)
        with path.open(newline="") as file:
            rows = [[action for cell in row for action in _read(cell, path)] for row in csv.reader(file)]
        placement: dict[int, int] = {}
        for rank, actions in enumerate(rows):
            for _, (_, _, stage) in actions:
                if (first := placement.setdefault(stage, rank)) != rank:
                    raise ConfigurationError(f"{path}: stage {stage} is on ranks {first}, {rank}")
        if sorted(placement) != [*range(len(placement))] or not placement:
            raise ConfigurationError(f"{path}: the stages are {sorted(placement)}, not 0 to p*v-1")
        found = [each for actions in rows for each in actions]
        split = {(i, stage) for letter, (_, i, stage) in found if letter == "W"}
        for letter, (kind, i, stage) in found:
            if kind is Kind.B and (letter == "I") != ((i, stage) in split):
                weights = f"{stage}W{i}"
                problem = f"{stage}I{i} without {weights}" if letter == "I" else f"{weights} together with {stage}B{i}"
                raise ConfigurationError(f"{path}: {problem}. B is the whole backward, I and W are its two parts")
        m = 1 + max(action.microbatch for _, action in found)
        ranks = tuple(tuple(action for _, action in actions) for actions in rows)
        return Program(path.stem, m, tuple(placement[stage] for stage in sorted(placement)), ranks)

    @property
    def kinds(self) -> set[Kind]:
        return {action.kind for actions in self.ranks for action in actions}

    @property
    def has_weight(self) -> bool:
        """Whether there is a B that makes input-gradients only, with a W for the gradients of the weights."""
        return Kind.W in self.kinds

    def splits(self, stage: int) -> frozenset[int]:
        """The microbatches whose backward is split in B and W on this stage."""
        actions = self.ranks[self.placement[stage]]
        return frozenset(i for kind, i, at in actions if kind is Kind.W and at == stage)

    @property
    def has_communication(self) -> bool:
        return not self.kinds.isdisjoint(PARTNER)

    def crosses(self, kind: Kind, stage: int) -> bool:
        """Whether messages of `kind` for `stage` have their other end on another rank, so that they must be sent."""
        other = stage + PARTNER[kind][1]
        return 0 <= other < len(self.placement) and self.placement[stage] != self.placement[other]

    def needs(self, kind: Kind, stage: int) -> list[StageStep]:
        """The steps that the rank must have done (or, of a receive, have got), for a microbatch, before this one."""
        needed = [(AFTER[kind], stage)] if kind in AFTER else []
        if kind in RECEIVE:
            receive = RECEIVE[kind]
            neighbour = stage + PARTNER[receive][1]
            if 0 <= neighbour < len(self.placement):
                needed.append((receive, stage) if self.crosses(receive, stage) else (kind, neighbour))
        return needed


def gpipe(p: int, m: int, v: int = 1) -> Program:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965). With p=3, m=4:

    rank 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
    rank 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
    rank 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

    Bubble (p-1)(F+B) on each rank; m microbatches of activations alive at the peak.
    """
    # Backwards run in the order 0..m-1, not reversed: gradients are then summed in the order of plain
    # gradient accumulation, and of the other schedules, so that all of them agree to the bit.
    return _program("gpipe", m, range(p), ([(Kind.F, r)] * m + [(Kind.B, r)] * m for r in range(p)))


def one_f_one_b(p: int, m: int, v: int = 1) -> Program:
    """One forward, one backward: PipeDream-Flush (Narayanan et al. 2021, arXiv:2006.09503). With p=3, m=4:

    rank 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    rank 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    rank 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

    Bubble (p-1)(F+B) on each rank, as in GPipe; but rank r keeps only min(m, p-r) microbatches of activations.
    """
    ranks = ([(Kind.F, r)] * (p - r - 1) + [(Kind.F, r), (Kind.B, r)] * m for r in range(p))
    return _program("1f1b", m, range(p), ranks)


def interleaved(p: int, m: int, v: int = 2) -> Program:
    """1F1B with v chunks a rank, stage s on rank s % p (Narayanan et al. 2021, arXiv:2104.04473). With p=3, m=3, v=2:

    rank 0  F0@0 F1@0 F2@0 F0@3 F1@3 F2@3 .... .... B0@3 .... B1@3 .... B2@3 B0@0 B1@0 B2@0
    rank 1  .... F0@1 F1@1 F2@1 F0@4 F1@4 F2@4 B0@4 .... B1@4 .... B2@4 B0@1 B1@1 B2@1 ....
    rank 2  .... .... F0@2 F1@2 F2@2 F0@5 B0@5 F1@5 B1@5 F2@5 B2@5 B0@2 B1@2 B2@2 .... ....

    A rank takes p microbatches through a chunk, then through its next one. F, B: those of all chunks of a rank. Where p
    divides m the bubble is (p-1)(F+B)/v; rank r keeps 2(p-r-1) + (v-1)p + 1 activations of a stage, or vm if fewer.
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
    """Zero bubble H1: 1F1B with rank r's W deferred by r (Qi et al. 2023, arXiv:2401.10241). With p=3, m=4:

    rank 0  F0 F1 F2 .. .. B0 W0 F3 B1 W1 B2 W2 B3 W3
    rank 1  .. F0 F1 .. B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
    rank 2  .. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    Bubble (p-1)(F+B-W) for m >= p and W <= min(F, B); (p-1)max(F, B) for a larger W. Every rank keeps min(m, p)
    microbatches of activations, which is what the first one keeps in 1F1B.
    """

    def rank(r: int) -> list[StageStep]:
        f, b, w = (Kind.F, r), (Kind.B, r), (Kind.W, r)
        return [f] * (p - r - 1) + [f, b] * r + [f, b, w] * m

    return _program("zb-h1", m, range(p), map(rank, range(p)))


def zbv(p: int, m: int, v: int = 2) -> Program:
    """Zero bubble in a V: stage s on rank s, stage 2p-1-s too (Qi et al. 2024, arXiv:2405.15362). With p=2, m=3:

    rank 0  F0@0 F1@0 F2@0 F0@3 B0@3 W0@3 F1@3 B1@3 W1@3 B0@0 W0@0 F2@3 B2@3 W2@3 B1@0 W1@0 B2@0 W2@0 ....
    rank 1  .... F0@1 F0@2 F1@1 F1@2 B0@2 W0@2 F2@1 B0@1 W0@1 F2@2 B1@2 W1@2 B1@1 B2@2 B2@1 W1@1 W2@2 W2@1

    F, B, W: those of both chunks of a rank. Bubble (p-1)max(B/2, B-W) for m >= 2p-2 and max(F, W) <= B: that is
    (p-1)(F+B-W)/2 where F = B = W, and no more where W <= F <= B <= F+W. Every rank keeps 2p activations of a stage
    (fewer if m < 2p-1), as much as 1F1B's first one with stages twice as large.
    """

    def rank(r: int) -> list[StageStep]:
        f, b, w = ((kind, r) for kind in (Kind.F, Kind.B, Kind.W))
        f2, b2, w2 = ((kind, 2 * p - 1 - r) for kind in (Kind.F, Kind.B, Kind.W))
        fill = [f] * (2 * (p - r) - 1) + [f2, f] * r + [f2, b2, w2] * (p - r)
        steady = [f, b, w, f2, b2, w2] * (m - p)
        drain = [b, b2] * r + [b, w] * (p - r) + [w2] * r + [w] * r
        return fill + steady + drain

    return _program("zbv", m, [*range(p), *reversed(range(p))], map(rank, range(p)))


def forward_only(program: Program) -> Program:
    """Evaluation: the forwards of `program` alone, nothing kept for a backward. Of 1F1B with p=3, m=4:

    rank 0  F0 F1 F2 F3 .. ..
    rank 1  .. F0 F1 F2 F3 ..
    rank 2  .. .. F0 F1 F2 F3
    """
    ranks = (tuple(action for action in actions if action.kind is Kind.F) for actions in program.ranks)
    return Program("forward", program.num_microbatches, program.placement, tuple(ranks))


def _program(name: str, m: int, placement: Iterable[int], ranks: Iterable[Iterable[StageStep]]) -> Program:
    """The program in which each rank's steps take, each time, their next microbatch; there are none beyond the m-th.

    So microbatches come in ascending order, and a step too many does no harm: a program stays legal, and free of
    deadlock, when all that is done for some microbatches is left out.
    """
    microbatches = tuple(range(m))  # the same objects everywhere: cheaper to look up

    def rank(steps: Iterable[StageStep]) -> Iterator[Action]:
        left: defaultdict[StageStep, Iterator[int]] = defaultdict(lambda: iter(microbatches))
        for kind, stage in steps:
            for i in itertools.islice(left[kind, stage], 1):
                yield Action(kind, i, stage)

    return Program(name, m, tuple(placement), tuple(tuple(rank(steps)) for steps in ranks))


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-h1": zb_h1, "zbv": zbv}


def make_program(name: str, p: int, m: int, v: int = 1) -> Program:
    """The training program of schedule `name` for `p` ranks and `m` microbatches, without communication.

    `v` is the number of model chunks asked for, as in `num_chunks`. Raises ConfigurationError for an unknown name, a
    `v` that the schedule cannot have, `p < 1` or `m < 1`.
    """
    v = num_chunks(name, v)
    if p < 1 or m < 1:
        raise ConfigurationError(f"schedule {name!r} needs p >= 1 ranks and m >= 1 microbatches, got p={p}, m={m}")
    return SCHEDULES[name](p, m, v)


def num_chunks(name: str, v: int = 1) -> int:
    """The chunks of the model that a rank holds under schedule `name`, if `v` are asked for.

    "interleaved" takes any number above 1; "zbv" has two, asked for or not; the others have one. Raises
    ConfigurationError for another `v`, or an unknown name.
    """
    if name not in SCHEDULES:
        close = difflib.get_close_matches(str(name).lower(), SCHEDULES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigurationError(f"unknown schedule {name!r}: {hint}known schedules: {', '.join(sorted(SCHEDULES))}")
    if name == "interleaved" and v < 2:
        raise ConfigurationError(f"schedule 'interleaved' needs num_model_chunks >= 2, got {v}; with one it is '1f1b'")
    if name != "interleaved" and v != 1 and (name, v) != ("zbv", 2):
        has = 2 if name == "zbv" else 1
        raise ConfigurationError(f"schedule {name!r} has num_model_chunks={has}, got {v}; 'interleaved' takes others")
    return 2 if name == "zbv" else v


def _read(cell: str, path: Path) -> list[tuple[str, Action]]:
    """The actions of a cell, with torch's letters of their kinds."""
    overlapped = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell.strip())
    found = []
    for text in filter(None, map(str.strip, overlapped[1].split(";") if overlapped else [cell])):
        if re.fullmatch(r"\d+REDUCE_GRAD", text):  # gradients of a stage are reduced when its last backward is through
            continue
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text)
        if match is None:
            raise ConfigurationError(
                f"{path}: {text!r} is not a compute action, such as 0F0, 1B2, 1I2 or 1W2: write the file "
                'by format="compute_only"'
            )
        kind = Kind.B if match[2] == "I" else Kind(match[2])  # I is a B with a W
        found.append((match[2], Action(kind, int(match[3]), int(match[1]))))
    return found
