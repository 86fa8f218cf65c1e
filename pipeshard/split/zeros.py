"""Zeros: placeholders for integers and booleans that were not sent to a stage.

A dispatch mode tracks these placeholders through the stage's glue. A floating-point blank is NaN, so results that
depend on it are also NaN. Integers have no value like NaN. If glue computes with an unsent integer and discards the
result, the blank must be a valid index, so it is 0. If the trace were wrong and a result depended on this 0, the result
would be silently wrong. So in the first microbatch on a route, these zeros are tracked from operator to operator, as
the original values are tracked in the trace. If code after the last unit branches on activations, all blanks of all
microbatches are tracked, since the trace does not know activation values, and follows only one branch.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from pipeshard.errors import TraceError
from pipeshard.graph.operators import SHAPED, mutated, tensors_among
from pipeshard.graph.storage import storage_of
from pipeshard.private import DispatchMode, tree_tensors


class Zeros(DispatchMode):
    """Tracks the tensors that were computed from the blanks passed to `add`."""

    def __init__(self, stage: int, has_branches: bool = False) -> None:
        super().__init__()
        self.stage, self.has_branches = stage, has_branches
        self._units: dict[int, str] = {}  # by storage of the blank: the unit whose result the blank replaces
        self._alive: list[Tensor] = []  # so that no storage address is reused

    def add(self, blank: Tensor, unit: str) -> None:
        self._units[storage_of(blank)] = unit
        self._alive.append(blank)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        unit = None if func._overloadpacket in SHAPED else self._unit(tensors_among((*args, *kwargs.values())))
        result = func(*args, **kwargs)
        if unit is not None:
            for tensor in (*tensors_among((result,)), *mutated(func, args, kwargs)):
                self.add(tensor, unit)
        return result

    def refuse(self, values: Any, reader: str) -> None:
        """Raise TraceError if a tensor in `values` was computed from a tracked blank. `reader` names the code that
        reads `values`."""
        unit = self._unit(tree_tensors(values))
        if unit is not None and self.has_branches:
            raise TraceError(
                f"{reader} (stage {self.stage}) reads a result of unit {unit} that another stage did not send: the "
                "code after the last unit branches on activation values, and took a different path than in the trace. "
                "Compute both branches and select with torch.where, or cut elsewhere (partition=[...])"
            )
        if unit is not None:
            raise TraceError(
                f"{reader} (stage {self.stage}) reads a value computed from integer or boolean results of unit {unit}. "
                "Another stage did not send these results, because in the trace nothing on this stage depends on them. "
                "Return floating-point tensors from the unit instead, cut elsewhere (partition=[...]), or pass "
                "dry_run_input=<a batch like this one>"
            )

    def _unit(self, tensors: Iterable[Tensor]) -> str | None:
        return next((self._units[storage_of(t)] for t in tensors if storage_of(t) in self._units), None)
