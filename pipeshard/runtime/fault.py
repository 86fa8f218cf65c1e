"""Fault: what went wrong on a rank, as the others are told it."""

import json
from dataclasses import asdict, dataclass
from typing import Self

RAISED, GONE, STALLED, ENDED = "raised", "gone", "stalled", "ended"  # kinds


@dataclass(frozen=True)
class Fault:
    """`rank` (whose `name` is "rank 2 (stage 2)") has raised an error with `message` while it was at `where`, maybe in
    the code of `module`; or it is gone, or stalled, or has ended. `told_by` is the rank that says so."""

    kind: str
    rank: int
    name: str
    where: str = ""
    module: str = ""
    message: str = ""
    told_by: int = -1
    number: int = -1  # of the call of which it is told

    @property
    def is_asked(self) -> bool:
        """Whether the ranks are asked what they do, to find out whose fault it is."""
        return self.kind in (GONE, STALLED) and self.told_by >= 0

    def __str__(self) -> str:
        if self.kind == RAISED:
            module = f", in {self.module}" if self.module else ""
            return f"{self.name} failed in {self.where}{module}: {self.message}"
        if self.kind == ENDED:
            return f"{self.name} has ended, {self.message}, in {self.where}"
        return self.message

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        return cls(**json.loads(text))
