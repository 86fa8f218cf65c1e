"""Data guard: counts a loop's uses of `tensor.data`, since a write through `data` does not change the tensor's version.

One such write is `parameter.data.clamp_(-c, c)`. While a boosted model is alive, the guard replaces the attribute
`Tensor.data` with a descriptor (graph/writes.py).
"""

from torch import Tensor

from pipeshard.engine.guard import Guard
from pipeshard.graph.writes import CountedData


class DataGuard(Guard):
    def install(self) -> None:
        Tensor.data = CountedData()  # type: ignore[assignment]

    def remove(self) -> None:
        del Tensor.data


DATA_GUARD = DataGuard()
