"""Route: one stage's way through a Dataflow, a step for each unit call."""

import bisect
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from pipeshard.model.batch import Batch
from pipeshard.model.dataflow import Dataflow, Wanted
from pipeshard.model.exits import RESULT, Part
from pipeshard.model.partition import Boundary
from pipeshard.model.shapes import TensorSpec
from pipeshard.model.taint import Value

LENGTHS = 64  # batch shapes whose sizes a route keeps


@dataclass(frozen=True, slots=True)
class Step:
    """What one unit call does on this stage.

    `leaves` holds for each leaf of what leaves the unit a constant, a TensorSpec of nothing that matters, or the
    Value that was received. `keeps` are those later stages or the boundary need, `modules` the ones inside the unit
    that make some of them, `aside` says whether any leave it other than as its result; `plain` is a unit that nothing
    leaves but its result, one tensor. `again` is one that runs again in its backward. Of a region, the first call
    `opens` it, and the last one, which alone is held, runs it: `region` are the names of its units.
    """

    unit: str
    held: bool
    parts: tuple[Part, ...]
    leaves: tuple[Any, ...]
    keeps: tuple[Value, ...] = ()
    modules: frozenset[str] = frozenset()
    aside: bool = False
    plain: bool = False
    again: bool = False
    opens: bool = False
    region: tuple[str, ...] = ()


@dataclass(frozen=True)
class Route:
    """One stage's way through one Dataflow: a step per unit call, after which one the stage is done, and the leaves of
    the batch whose values it needs."""

    stage: int
    steps: tuple[Step, ...]
    stop: int | None
    enters: Boundary
    leaves: Boundary
    inputs: frozenset[str]
    flow: Dataflow
    _sizes: dict[Sequence[int], list[list[tuple[int, ...] | None]]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls,
        flow: Dataflow,
        stages: Sequence[int],
        stage: int,
        crossing: Sequence[Boundary],
        outputs: Wanted = False,
        recomputed: Collection[int] = (),
        regions: Collection[range] = (),
    ) -> Self:
        nothing = Boundary((), ())
        enters, leaves = crossing[stage], crossing[stage + 1] if stage + 1 < len(crossing) else nothing
        received, leaving = set(enters.values), set(leaves.values)
        steps = []
        opening = {region.start for region in regions}
        ending = {region.stop - 1: tuple(flow.calls[k].unit for k in region) for region in regions}
        inside = {k for region in regions for k in region[:-1]}
        for index, call in enumerate(flow.calls):
            values = [Value(index, k) for k in range(len(call.leaves))]
            held = stages[index] == stage and index not in inside
            result = tuple(v if v in received else leaf for v, leaf in zip(values, call.leaves, strict=True))
            keeps = tuple(v for v in values if held and v in leaving)
            ends = list(itertools.accumulate(part.tree.num_leaves for part in call.parts))
            sources = {call.parts[bisect.bisect_right(ends, value.leaf)].source for value in keeps}
            makers = frozenset(source.module for source in sources) - {""}
            plain = len(call.parts) == 1 and call.parts[0].tree.is_leaf()
            aside, again = bool(sources - {RESULT}), index in recomputed
            region = index in opening, ending.get(index, ())
            steps.append(Step(call.unit, held, call.parts, result, keeps, makers, aside, plain, again, *region))
        is_last = stage == len(crossing) - 1
        stop = None if is_last else max((k + 1 for k, step in enumerate(steps) if step.held), default=0)
        uses = [call.reads for call, s in zip(flow.calls, stages, strict=True) if s == stage]
        uses += [flow.needed(outputs)] if is_last else []
        inputs = flow.consulted.union(*(use.inputs for use in uses))
        return cls(stage, tuple(steps), stop, enters, leaves, inputs, flow)

    def sizes(self, deltas: Sequence[int]) -> list[list[tuple[int, ...] | None]]:
        """For each unit call, the shapes of the tensors that leave it; None for a leaf that is a constant."""
        if deltas not in self._sizes:
            if len(self._sizes) >= LENGTHS:
                del self._sizes[next(iter(self._sizes))]
            self._sizes[deltas] = [
                [leaf.at(deltas) if isinstance(leaf, TensorSpec) else None for leaf in call.leaves]
                for call in self.flow.calls
            ]
        return self._sizes[deltas]

    def feed(self, batch: Batch, device: torch.device) -> Batch:
        """The batch on the stage's device; of images and the like that it does not need, only the shape is there."""

        def place(path: str, leaf: Tensor, dim: int | None) -> Tensor:
            if path in self.inputs or not leaf.is_floating_point():
                return leaf.to(device, non_blocking=True)
            return torch.full((), float("nan"), dtype=leaf.dtype, device=device).expand(leaf.shape)

        return batch.map(place)
