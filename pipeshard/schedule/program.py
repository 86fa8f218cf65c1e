"""Program: the list of actions that each rank runs. A schedule is a pure function that returns a Program."""

import csv
import enum
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipeshard.errors import ConfigurationError


class Kind(enum.StrEnum):
    """The kind of an action: compute (F, B, W), or one end of a message between ranks."""

    F = "F"
    B = "B"
    W = "W"
    RECV_F = "RecvF"
    SEND_F = "SendF"
    RECV_B = "RecvB"
    SEND_B = "SendB"

    __hash__ = str.__hash__  # Enum.__hash__ is Python code: too slow for programs with a million actions

    @property
    def is_compute(self) -> bool:
        return self not in PARTNER

    @property
    def is_receive(self) -> bool:
        return self in (Kind.RECV_F, Kind.RECV_B)


AFTER = {Kind.B: Kind.F, Kind.W: Kind.B, Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.B}  # must run first, on the same stage
RECEIVE = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B}  # the message that brings an input from another rank
SEND = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}  # the message that takes a result to another rank
PARTNER = {  # the other end of a message, and the offset of its stage
    Kind.SEND_F: (Kind.RECV_F, +1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, +1),
}
StageStep = tuple[Kind, int]  # (kind, stage): an action without its microbatch


class Action(NamedTuple):
    """One step of one rank for one microbatch. The stage of a message is the stage of the compute action that uses or
    computes the message's value:

    `RecvF(i, s)` receives the input of `F(i, s)`, and `SendF(i, s)` sends its output. `RecvB(i, s)` receives the
    output gradient for `B(i, s)`, and `SendB(i, s)` sends the input gradient of `B(i, s)`.
    """

    kind: Kind
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"

    @property
    def partner(self) -> "Action":
        """The other end of a message, such as `RecvF(i, s+1)` for `SendF(i, s)`, or `RecvB(i, s-1)` for `SendB(i,
        s)`."""
        kind, step = PARTNER[self.kind]
        return Action(kind, self.microbatch, self.stage + step)


@dataclass(frozen=True, slots=True)
class Program:
    """The actions of each rank of a pipeline in one training step, in order.

    `placement[s]` is the rank that holds (virtual) stage `s`. `ranks[r]` contains the actions of rank `r`. A B with a W
    computes only the input gradient. A B without a W is the whole backward.
    """

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    @staticmethod
    def from_csv(path: str | Path) -> "Program":
        """Read a program from a file in torch.distributed.pipelining's format "compute_only".

        Each line contains the cells of one rank, such as 1F0 (stage, kind, microbatch). Kinds are F, B (the whole
        backward), I (input gradients) and W. Empty cells are idle time. `REDUCE_GRAD` cells are ignored. The two
        actions of `(0F1;3B0)OVERLAP_F_B` run one after the other.

        Raises ConfigurationError for any other cell, and for a stage that is missing or on several ranks. All other
        rules of a schedule are checked later, by `program_of`.
        """
        path = Path(path)
        with path.open(newline="") as file:
            ranks = tuple(tuple(a for cell in row for a in _read(cell, path)) for row in csv.reader(file) if row)
        holders = sorted({(action.stage, rank) for rank, actions in enumerate(ranks) for action in actions})
        if not holders or [stage for stage, _ in holders] != [*range(len(holders))]:
            raise ConfigurationError(
                f"{path}: each stage from 0 to p*v-1 must be on exactly one rank, but the pairs (stage, rank) of "
                f"the file are {holders}"
            )
        m = 1 + max(action.microbatch for actions in ranks for action in actions)
        return Program(path.stem, m, tuple(rank for _, rank in holders), ranks)

    @property
    def kinds(self) -> set[Kind]:
        return {action.kind for actions in self.ranks for action in actions}

    @property
    def has_weight(self) -> bool:
        """Whether any backward is split into a B for the input gradients and a W for the weight gradients."""
        return Kind.W in self.kinds

    def splits(self, stage: int) -> frozenset[int]:
        """The microbatches whose backward is split into B and W on this stage."""
        actions = self.ranks[self.placement[stage]]
        return frozenset(i for kind, i, at in actions if kind is Kind.W and at == stage)

    @property
    def has_communication(self) -> bool:
        return not self.kinds.isdisjoint(PARTNER)

    def crosses(self, kind: Kind, stage: int) -> bool:
        """Whether the other end of a message of `kind` for `stage` is on another rank, so that the message must be
        sent."""
        other = stage + PARTNER[kind][1]
        return 0 <= other < len(self.placement) and self.placement[stage] != self.placement[other]

    def needs(self, kind: Kind, stage: int) -> list[StageStep]:
        """The steps that a microbatch must complete on the same rank before the step (`kind`, `stage`). A receive is
        complete when the message has arrived."""
        needed = [(AFTER[kind], stage)] if kind in AFTER else []
        if kind in RECEIVE:
            receive = RECEIVE[kind]
            neighbour = stage + PARTNER[receive][1]
            if 0 <= neighbour < len(self.placement):
                needed.append((receive, stage) if self.crosses(receive, stage) else (kind, neighbour))
        return needed


def forward_only(program: Program) -> Program:
    """The forwards of `program`, for an evaluation. 1F1B with p=3, m=4:

    rank 0  F0 F1 F2 F3 .. ..
    rank 1  .. F0 F1 F2 F3 ..
    rank 2  .. .. F0 F1 F2 F3
    """
    ranks = (tuple(action for action in actions if action.kind is Kind.F) for actions in program.ranks)
    return Program("forward", program.num_microbatches, program.placement, tuple(ranks))


def _read(cell: str, path: Path) -> list[Action]:
    overlapped = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell.strip())
    found = []
    for text in filter(None, map(str.strip, overlapped[1].split(";") if overlapped else [cell])):
        if re.fullmatch(r"\d+REDUCE_GRAD", text):  # pipeshard reduces a stage's gradients after its last backward
            continue
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text)
        if match is None:
            raise ConfigurationError(
                f"{path}: expected a compute action (such as 0F0, 1B2, 1I2 or 1W2), got {text!r}. Write the file "
                'with format="compute_only"'
            )
        kind = Kind.B if match[2] == "I" else Kind(match[2])  # I is a B with a W
        found.append(Action(kind, int(match[3]), int(match[1])))
    return found
