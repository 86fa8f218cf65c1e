"""Data guard: counts a loop's reads of `parameter.data`, since a write through `data` does not change the version.

One example of such a write is `parameter.data.clamp_(-c, c)`. The guard is a property of nn.Parameter, and is installed
while a boosted model is alive.
"""

from typing import Any

from torch import Tensor, nn

from pipeshard.engine.guard import Guard

READS = "pipeshard_reads"
DATA: Any = Tensor.data  # the attribute of a tensor that the property overrides


def count_reads(tensor: Tensor) -> None:
    """Count the reads of this tensor's `data` from now on."""
    vars(tensor).setdefault(READS, 0)


def reads(tensor: Tensor) -> int:
    """The number of reads since `count_reads`."""
    number: int = vars(tensor).get(READS, 0)
    return number


class DataGuard(Guard):
    def install(self) -> None:
        nn.Parameter.data = property(_read, DATA.__set__)  # type: ignore[assignment]

    def remove(self) -> None:
        del nn.Parameter.data


GUARD = DataGuard()


def _read(parameter: nn.Parameter) -> Tensor:
    attributes = vars(parameter)
    if READS in attributes:
        attributes[READS] += 1
    value: Tensor = DATA.__get__(parameter)
    return value
