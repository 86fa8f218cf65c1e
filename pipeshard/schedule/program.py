"""Program: for each rank, the list of actions that a schedule makes it run. Pure data."""

import difflib
import enum
from dataclasses import dataclass
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

    @property
    def is_compute(self) -> bool:
        return self not in _PARTNER

    @property
    def is_receive(self) -> bool:
        return self in (Kind.RECV_F, Kind.RECV_B)


_AFTER = {Kind.B: Kind.F, Kind.W: Kind.B, Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.B}  # what the stage does first
_RECEIVE = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B}  # what brings an input from another rank
_PARTNER = {  # the other end of a message, and how far from this end its stage is
    Kind.SEND_F: (Kind.RECV_F, +1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, +1),
}


class Action(NamedTuple):
    """One step of one rank. A message carries the stage of the compute action that it serves:

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
        kind, step = _PARTNER[self.kind]
        return Action(kind, self.microbatch, self.stage + step)


@dataclass(frozen=True, slots=True)
class Program:
    """What each rank of a pipeline does in one training step, in order.

    `placement[s]` is the rank that holds (virtual) stage `s`; `ranks[r]` are the actions of rank `r`. In a program
    with W, B makes the input-gradient only; in one without, B is the whole backward.
    """

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def has_communication(self) -> bool:
        return not all(action.kind.is_compute for actions in self.ranks for action in actions)

    def crosses(self, message: Action) -> bool:
        """Whether `message` has its other end on another rank, so that it must be sent."""
        other = message.stage + _PARTNER[message.kind][1]
        return 0 <= other < len(self.placement) and self.placement[message.stage] != self.placement[other]

    def needs(self, action: Action) -> list[Action]:
        """What its own rank must have done (or, for a receive, must have got) before `action`."""
        kind, i, stage = action
        needed = [Action(_AFTER[kind], i, stage)] if kind in _AFTER else []
        if kind in _RECEIVE:
            receive = Action(_RECEIVE[kind], i, stage)
            neighbour = Action(kind, i, receive.partner.stage)
            if 0 <= neighbour.stage < len(self.placement):
                needed.append(receive if self.crosses(receive) else neighbour)
        return needed


def gpipe(p: int, m: int) -> Program:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965). With p=3, m=4:

    rank 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
    rank 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
    rank 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

    Bubble (p-1)(F+B) on each rank; m microbatches of activations alive at the peak.
    """
    # Backwards run in the order 0..m-1, not reversed: gradients are then summed in the order of plain
    # gradient accumulation, and of 1F1B, so that all of them agree to the bit.
    return Program("gpipe", m, tuple(range(p)), tuple(_all(Kind.F, m, r) + _all(Kind.B, m, r) for r in range(p)))


def one_f_one_b(p: int, m: int) -> Program:
    """One forward, one backward: PipeDream-Flush (Narayanan et al. 2021, arXiv:2006.09503). With p=3, m=4:

    rank 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    rank 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    rank 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

    Bubble (p-1)(F+B) on each rank, as in GPipe; but rank r keeps only min(m, p-r) microbatches of activations.
    """

    def rank(r: int) -> tuple[Action, ...]:
        warmup = p - r - 1  # forwards ahead: F(warmup + i) comes just before B(i)
        actions = _all(Kind.F, m, r) + _all(Kind.B, m, r)
        return tuple(sorted(actions, key=lambda a: a.microbatch - warmup * (a.kind is Kind.F)))

    return Program("1f1b", m, tuple(range(p)), tuple(map(rank, range(p))))


def forward_only(p: int, m: int) -> Program:
    """Evaluation: forwards alone, nothing kept for a backward. With p=3, m=4:

    rank 0  F0 F1 F2 F3 .. ..
    rank 1  .. F0 F1 F2 F3 ..
    rank 2  .. .. F0 F1 F2 F3
    """
    return Program("forward", m, tuple(range(p)), tuple(_all(Kind.F, m, r) for r in range(p)))


def _all(kind: Kind, m: int, stage: int) -> tuple[Action, ...]:
    return tuple(Action(kind, i, stage) for i in range(m))


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


def make_program(name: str, p: int, m: int) -> Program:
    """The training program of schedule `name` for `p` ranks and `m` microbatches, without communication.

    Raises ConfigurationError for an unknown name, `p < 1` or `m < 1`.
    """
    if name not in SCHEDULES:
        close = difflib.get_close_matches(str(name).lower(), SCHEDULES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigurationError(f"unknown schedule {name!r}: {hint}known schedules: {', '.join(sorted(SCHEDULES))}")
    if p < 1 or m < 1:
        raise ConfigurationError(f"schedule {name!r} needs p >= 1 ranks and m >= 1 microbatches, got p={p}, m={m}")
    return SCHEDULES[name](p, m)
