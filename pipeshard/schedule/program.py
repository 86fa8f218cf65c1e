"""Program: for each rank, the list of actions that a schedule makes it run. Pure data."""

import difflib
import enum
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pipeshard.errors import ConfigurationError

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Program",
    "check",
    "forward_only",
    "gpipe",
    "make_program",
    "one_f_one_b",
    "partner",
]


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
        return self in _COMPUTE

    @property
    def is_receive(self) -> bool:
        return self in _RECEIVES


_COMPUTE = frozenset((Kind.F, Kind.B, Kind.W))
_FORWARD = frozenset((Kind.F, Kind.SEND_F, Kind.RECV_F))
_RECEIVES = frozenset((Kind.RECV_F, Kind.RECV_B))

# The action of the same microbatch and stage that must be done first.
_AFTER = {Kind.B: Kind.F, Kind.W: Kind.B, Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.B}

# The stage an input comes from (F from below, B from above), and the receive that brings it from another rank.
_INPUT = {Kind.F: (-1, Kind.RECV_F), Kind.B: (+1, Kind.RECV_B)}

# The other end of a message, and how far from this end its stage is.
_PARTNER = {
    Kind.SEND_F: (Kind.RECV_F, +1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, +1),
}


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank. A message carries the stage of the compute action that it serves:

    `RecvF(i, s)` receives the input of `F(i, s)`, `SendF(i, s)` sends its output; `RecvB(i, s)` receives the
    output-gradient for `B(i, s)`, `SendB(i, s)` sends the input-gradient that it made.
    """

    kind: Kind
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"


def partner(message: Action) -> Action:
    """The other end of `message`: `SendF(i, s)` and `RecvF(i, s+1)`, `SendB(i, s)` and `RecvB(i, s-1)`."""
    kind, step = _PARTNER[message.kind]
    return Action(kind, message.microbatch, message.stage + step)


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
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def has_communication(self) -> bool:
        return any(action.kind not in _COMPUTE for actions in self.ranks for action in actions)

    def crosses(self, kind: Kind, stage: int) -> bool:
        """Whether messages of `kind` at `stage` have their other end on another rank, so that they must be sent."""
        other = stage + _PARTNER[kind][1]
        return 0 <= other < len(self.placement) and self.placement[stage] != self.placement[other]

    def needs(self, kind: Kind, stage: int) -> tuple[tuple[Kind, int], ...]:
        """What its own rank must have done (or, for a receive, must have got) before an action of `kind` at `stage`.

        The result is (kind, stage) pairs; the microbatch is that of the action itself.
        """
        needed = [(_AFTER[kind], stage)] if kind in _AFTER else []
        if kind in _INPUT:
            step, receive = _INPUT[kind]
            if 0 <= stage + step < len(self.placement):
                needed.append((receive, stage) if self.crosses(receive, stage) else (kind, stage + step))
        return tuple(needed)


def gpipe(p: int, m: int) -> Program:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965). With p=3, m=4:

    rank 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
    rank 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
    rank 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

    Bubble (p-1)(F+B) on each rank; m microbatches of activations alive at the peak.
    """
    # Backwards run in the order 0..m-1, not reversed: gradients are then summed in the order of plain
    # gradient accumulation, and of 1F1B, so that all of them agree to the bit.
    return _one_stage_a_rank("gpipe", p, m, lambda r: _steps(Kind.F, 0, m, r) + _steps(Kind.B, 0, m, r))


def one_f_one_b(p: int, m: int) -> Program:
    """One forward, one backward: PipeDream-Flush (Narayanan et al. 2021, arXiv:2006.09503). With p=3, m=4:

    rank 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    rank 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    rank 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

    Bubble (p-1)(F+B) on each rank, as in GPipe; but rank r keeps only min(m, p-r) microbatches of activations.
    """

    def rank(r: int) -> list[Action]:
        warmup = min(m, p - r - 1)
        actions = _steps(Kind.F, 0, warmup, r)
        for i in range(m - warmup):
            actions += (Action(Kind.F, warmup + i, r), Action(Kind.B, i, r))
        return actions + _steps(Kind.B, m - warmup, m, r)

    return _one_stage_a_rank("1f1b", p, m, rank)


def forward_only(p: int, m: int) -> Program:
    """Evaluation: forwards alone, nothing kept for a backward. With p=3, m=4:

    rank 0  F0 F1 F2 F3 .. ..
    rank 1  .. F0 F1 F2 F3 ..
    rank 2  .. .. F0 F1 F2 F3
    """
    return _one_stage_a_rank("forward", p, m, lambda r: _steps(Kind.F, 0, m, r))


def _one_stage_a_rank(name: str, p: int, m: int, rank: Callable[[int], list[Action]]) -> Program:
    return Program(name, m, tuple(range(p)), tuple(tuple(rank(r)) for r in range(p)))


def _steps(kind: Kind, start: int, stop: int, stage: int) -> list[Action]:
    return [Action(kind, i, stage) for i in range(start, stop)]


SCHEDULES: dict[str, Callable[[int, int], Program]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


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


def check(program: Program) -> None:
    """Refuse a program that is incomplete or whose order within a rank is illegal; deadlock is `simulate`'s to find.

    Each kind of compute in use must occur exactly once for each microbatch and stage, on the stage's rank, after
    what it needs there. If there is any message, there must be exactly those that the placement asks for.
    Raises ConfigurationError.
    """
    outside = sorted({r for r in program.placement if not 0 <= r < program.num_ranks})
    if outside:
        raise ConfigurationError(f"{program.name}: stages are placed on ranks {outside} of {program.num_ranks}")
    kinds = _kinds(program)
    for rank, actions in enumerate(program.ranks):
        expected = _expected(program, rank, kinds)
        counts = Counter(actions)
        for action in [*(expected - counts.keys()), *counts]:
            count, wanted = counts[action], int(action in expected)
            if count != wanted:
                raise ConfigurationError(f"{program.name}: rank {rank} has {action} {count} times, not {wanted}")
        position = {action: k for k, action in enumerate(actions)}
        for action in actions:
            for kind, stage in program.needs(action.kind, action.stage):
                needed = Action(kind, action.microbatch, stage)
                if position.get(needed, -1) > position[action]:
                    raise ConfigurationError(f"{program.name}: rank {rank} has {action} before {needed}")


def _kinds(program: Program) -> list[Kind]:
    """The kinds of action that a complete program has, given those that this one has."""
    used = {action.kind for actions in program.ranks for action in actions}
    backward = not used <= _FORWARD
    kinds = [Kind.F, *[Kind.B] * backward, *[Kind.W] * (Kind.W in used)]
    return kinds + [kind for kind in _PARTNER if program.has_communication and (backward or kind in _FORWARD)]


def _expected(program: Program, rank: int, kinds: list[Kind]) -> set[Action]:
    return {
        Action(kind, i, stage)
        for stage in range(program.num_stages)
        for kind in kinds
        if program.placement[stage] == rank and (kind.is_compute or program.crosses(kind, stage))
        for i in range(program.num_microbatches)
    }
