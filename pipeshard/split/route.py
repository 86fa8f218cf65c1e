"""Route: one stage's way through a Dataflow, a step for each unit call."""

import bisect
import itertools
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from pipeshard.batch.batch import Batch
from pipeshard.graph.dataflow import Carried, Dataflow, Wanted
from pipeshard.graph.shapes import Count, TensorSpec
from pipeshard.graph.taint import Value
from pipeshard.graph.unit_outputs import Known, Part, Source
from pipeshard.split.partition import Boundary

LENGTHS = 64  # batch shapes whose sizes a route keeps


class Blank(NamedTuple):
    """In the place of a tensor that nothing that matters depends on: `fill` shows where something does after all."""

    dtype: torch.dtype
    fill: float

    @classmethod
    def of(cls, dtype: torch.dtype, is_touched: bool) -> Self:
        """Not-a-number, or a number that no index and no size has; 0 where glue computes with it, though in vain."""
        if dtype.is_floating_point or dtype.is_complex:
            return cls(dtype, float("nan"))
        return cls(dtype, 0 if is_touched or dtype is torch.bool else torch.iinfo(dtype).max - 1)


@dataclass(frozen=True, slots=True)
class Step:
    """What one unit call does on this stage.

    `leaves` holds for each leaf of what leaves the unit, of which `numbers` are the places among all, a constant, the
    Value that was received, or where it is not held a Blank. `keeps` are those later stages or the boundary need,
    `modules` the ones inside the unit that make some of them, `places` where it leaves others; `plain` is a unit that
    nothing leaves but its result, one tensor. `again` is one that runs again in its backward.
    """

    unit: str
    held: bool
    parts: tuple[Part, ...]
    leaves: tuple[Any, ...]
    numbers: tuple[int, ...]
    keeps: tuple[Value, ...] = ()
    modules: frozenset[str] = frozenset()
    places: tuple[Source, ...] = ()
    plain: bool = False
    again: bool = False

    @property
    def aside(self) -> bool:
        """Whether something that is kept leaves it other than as its result."""
        return bool(self.modules or self.places)


@dataclass(frozen=True)
class Route:
    """One stage's way through one Dataflow: a step per unit call, after which one the stage is done, the leaves of the
    batch whose values it needs, and what its glue keeps for the next forward without having what that is made of.
    `proven` are the numbers of held steps that were seen to leave what they should."""

    stage: int
    steps: tuple[Step, ...]
    stop: int | None
    enters: Boundary
    leaves: Boundary
    inputs: frozenset[str]
    flow: Dataflow
    spoiled: frozenset[str] = frozenset()
    proven: set[int] = field(default_factory=set, compare=False)
    _sizes: dict[Sequence[int], list[list[Any]]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls,
        flow: Dataflow,
        stages: Sequence[int],
        stage: int,
        crossing: Sequence[Boundary],
        outputs: Wanted = False,
        recomputed: Collection[int] = (),
    ) -> Self:
        nothing = Boundary((), ())
        enters, leaves = crossing[stage], crossing[stage + 1] if stage + 1 < len(crossing) else nothing
        received, leaving = set(enters.values), set(leaves.values)
        steps = []
        for index, call in enumerate(flow.calls):
            held, again = stages[index] == stage, index in recomputed
            values = [Value(index, k) for k in range(len(call.leaves))]
            keeps = tuple(v for v in values if held and v in leaving)
            ends = list(itertools.accumulate(part.tree.num_leaves for part in call.parts))
            sources = dict.fromkeys(call.parts[bisect.bisect_right(ends, value.leaf)].source for value in keeps)
            makers = frozenset(source.module for source in sources) - {""}
            places = tuple(source for source in sources if source.place)
            told = (call.parts, call.leaves, tuple(range(len(call.leaves))))
            parts, result, numbers = told if held else _answered(flow, index, received)
            plain = len(parts) == 1 and parts[0].tree.is_leaf() and not isinstance(result[0], Known)
            steps.append(Step(call.unit, held, parts, result, numbers, keeps, makers, places, plain, again))
        is_last = stage == len(crossing) - 1
        last_held = max((k + 1 for k, step in enumerate(steps) if step.held), default=0)
        # The glue before a call is through when it comes.
        carried = [None if place.until is None else place.until + 1 for place in flow.carried]
        ends = [last_held, *(end for end in carried if end is not None)]
        stop = None if is_last or None in carried else max(ends)
        uses = [call.reads for call, s in zip(flow.calls, stages, strict=True) if s == stage]
        uses += [flow.needed(outputs)] if is_last else []
        inputs = flow.consulted.union(*(use.inputs for use in uses))
        spoiled = frozenset(place.name for place in flow.carried if _is_spoiled(place, stages, stage, is_last))
        return cls(stage, tuple(steps), stop, enters, leaves, inputs, flow, spoiled)

    def sizes(self, deltas: Sequence[int]) -> list[list[Any]]:
        """For each unit call, the shapes of the tensors that leave it, and numbers that follow from the batch's sizes;
        None for a leaf that is a constant."""
        if deltas not in self._sizes:
            if len(self._sizes) >= LENGTHS:
                del self._sizes[next(iter(self._sizes))]
            self._sizes[deltas] = [
                [leaf.at(deltas) if isinstance(leaf, TensorSpec | Count) else None for leaf in call.leaves]
                for call in self.flow.calls
            ]
        return self._sizes[deltas]

    def feed(self, batch: Batch, device: torch.device) -> Batch:
        """The batch on the stage's device; of images and the like that it does not need, only the shape is there."""

        def place(path: str, leaf: Tensor, dim: int | None) -> Tensor:
            if path in self.inputs or not leaf.is_floating_point():
                return leaf.to(device, non_blocking=True)
            return torch.full((), float("nan"), dtype=leaf.dtype, device=device).expand(leaf.shape)

        return batch.map(place).to(device).copied(self.flow.rewritten)


def _answered(
    flow: Dataflow, index: int, received: Container[Value]
) -> tuple[tuple[Part, ...], tuple[Any, ...], tuple[int, ...]]:
    """What a call that is on another stage leaves here: what nobody needs is not written into tensors."""
    parts: list[Part] = []
    leaves: list[Any] = []
    numbers: list[int] = []
    at, call = 0, flow.calls[index]
    for part in call.parts:
        values = [Value(index, at + k) for k in range(part.tree.num_leaves)]
        at += part.tree.num_leaves
        if part.source.how == "written" and values[0] not in received:
            continue
        if part.source.by_hook and not any(isinstance(call.leaves[value.leaf], TensorSpec) for value in values):
            continue  # what hooks inside a unit count is of the runs that there are here
        parts.append(part)
        for value in values:
            leaf = call.leaves[value.leaf]
            blank = Blank.of(leaf.dtype, value in flow.touched) if isinstance(leaf, TensorSpec) else leaf
            leaves.append(value if value in received else blank)
            numbers.append(value.leaf)
    return tuple(parts), tuple(leaves), tuple(numbers)


def _is_spoiled(place: Carried, stages: Sequence[int], stage: int, is_last: bool) -> bool:
    """Whether a stage has not got what this is made of, which then nothing on it reads."""
    is_read = any(stages[call] == stage if call >= 0 else is_last for call in place.readers)
    return not is_read and any(stages[call] != stage for call in place.makers)
