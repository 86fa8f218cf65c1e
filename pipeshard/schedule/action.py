"""Action: one step of one rank, a computation or one end of a message. Pure data."""

import enum
from typing import NamedTuple


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


Step = tuple[Kind, int]  # what is done for each microbatch alike: (kind, stage)


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
