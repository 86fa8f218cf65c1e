"""Proof: what came of comparing a split model with the unsplit one."""

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
