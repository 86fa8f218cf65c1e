"""Proof: what came of comparing a split model with the unsplit one, and the process that stands for all ranks."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

EXACT, DIFFERENT, UNPROVEN = "exact", "different", "unproven"


@dataclass(frozen=True)
class Proof:
    """ "exact", "different" or "unproven", the last two with the reason; what was compared how often, `but` what was
    not, and how long it took. `refused` is whether the reason is an error that training raises, too."""

    kind: str
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    but: tuple[str, ...] = ()
    seconds: float = 0.0
    refused: bool = False


class Proven(BaseException):
    """Leaves the program at booster.boost, with the proof; `what` was proven, or not."""

    def __init__(self, proof: Proof, what: str) -> None:
        super().__init__(f"{what}: {proof.kind}")
        self.proof, self.what = proof, what


@dataclass
class Alone:
    """`pp_size` is the number of stages, in place of that which the plugin is given."""

    pp_size: int | None = None


_now: Alone | None = None


def standing_alone() -> Alone | None:
    """Whether this process stands for all ranks, and how many."""
    return _now


@contextlib.contextmanager
def alone(pp_size: int | None = None) -> Iterator[None]:
    """Inside, a plugin in a world of one process has all stages, and booster.boost raises Proven."""
    global _now
    before, _now = _now, Alone(pp_size)
    try:
        yield
    finally:
        _now = before
