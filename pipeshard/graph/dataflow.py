"""Dataflow: the unit results on which each unit call, the loss and the outputs depend."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

from pipeshard.batch.tree import field_of
from pipeshard.graph.places import Path
from pipeshard.graph.question import Question
from pipeshard.graph.shapes import Axes, TensorSpec
from pipeshard.graph.taint import Hidden, Hook, Hooked, Input, Kept, Tag, Used, Value
from pipeshard.graph.unit_outputs import Part

Wanted = bool | frozenset[str]  # of the model's output: all of it, nothing but the loss, or these fields


@dataclass(frozen=True)
class Reads:
    """The dependencies of a call, the loss or an output: unit results, parameters that glue reads itself, leaves of the
    batch, calls whose hidden state it sees, tensors whose gradient glue observes, and places with state left by an
    earlier forward."""

    values: frozenset[Value] = frozenset()
    parameters: frozenset[str] = frozenset()
    inputs: frozenset[str] = frozenset()
    hidden: frozenset[int] = frozenset()
    hooks: frozenset[int] = frozenset()
    kept: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tags: frozenset[Tag]) -> Self:
        return cls(
            frozenset(tag for tag in tags if isinstance(tag, Value)),
            frozenset(tag.name for tag in tags if isinstance(tag, Used)),
            frozenset(tag.path for tag in tags if isinstance(tag, Input)),
            frozenset(tag.call for tag in tags if isinstance(tag, Hidden)),
            frozenset(tag.hook for tag in tags if isinstance(tag, Hooked)),
            frozenset(tag.name for tag in tags if isinstance(tag, Kept)),
        )

    def joined(self, *others: Self) -> Self:
        """The union of these Reads and the others."""
        uses = self, *others
        names = [part.name for part in fields(self)]
        return replace(self, **{name: frozenset().union(*(getattr(use, name) for use in uses)) for name in names})

    def until(self, call: int) -> Self:
        """The part of these Reads that exists before a call."""
        values = frozenset(value for value in self.values if value.call < call)
        return replace(self, values=values, hidden=frozenset(made for made in self.hidden if made < call))


@dataclass(frozen=True)
class Call:
    """One call of a unit: what it reads, and the values that leave it, the result first.

    `leaves` are the TensorSpecs and constants of all parts, in order. The gradient of leaf k flows to
    `differentiated[k]`: the read values from which it was computed differentiably. `flops` and `elements`
    (computed by its operators) are counted for one forward at the traced size; `flops` include glue with its own
    parameters before the call. `writes` says whether it changes an argument in place, `is_cut` whether it is a
    CutPoint.
    """

    unit: str
    reads: Reads
    differentiated: tuple[frozenset[Value], ...]
    parts: tuple[Part, ...]
    leaves: tuple[Any, ...]
    flops: int
    elements: int
    writes: bool = False
    is_cut: bool = False

    @property
    def answered(self) -> Iterator[tuple[Part, range]]:
        """The parts that are repeated in a run without the unit, each with the numbers of its leaves. Hooks inside a
        unit that only count are omitted: they count runs of that unit."""
        start = 0
        for part in self.parts:
            numbers = range(start, start + part.tree.num_leaves)
            start = numbers.stop
            if not part.source.by_hook or any(isinstance(self.leaves[k], TensorSpec) for k in numbers):
                yield part, numbers

    @property
    def moves(self) -> bool:
        """Whether it leaves a value at a place: in a buffer, an attribute, an object that it receives."""
        return any(part.source.place for part in self.parts)


@dataclass(frozen=True)
class Carried:
    """A place in which one forward leaves state to the next.

    `path` leads to it from the model. `writers` are the unit calls that leave the state, -1 for glue. After `until`
    calls it is final for every reader except its writer; None stands for the end of the forward. `uses` are the inputs
    from which one forward computes it, and `readers` the unit calls that depend on it in the next forward, -1 for the
    loss and the outputs. `kind` is "tensor" if it is written to in place, "parameter" if it is one, "settled" for a
    parameter that the next forward does not write to, "generator", "number" for one that differs in each forward, or
    "".
    """

    name: str
    path: Path
    writers: frozenset[int]
    until: int | None
    uses: Reads
    readers: frozenset[int]
    kind: str = ""

    @property
    def makers(self) -> frozenset[int]:
        """The calls whose results the place needs to be correct."""
        return self.unseen | {value.call for value in self.uses.values}

    @property
    def unseen(self) -> frozenset[int]:
        """The `makers` of which the place needs more than a result that stages send."""
        return self.uses.hidden | (self.writers if -1 not in self.writers else frozenset())


@dataclass(frozen=True)
class Dataflow:
    """The unit calls of one forward in their order, and the values that the loss and the outputs need.

    `outputs` are the tensor leaves of the model's output: (path, use, spec). `written` are values that are changed
    in place after they were computed. `decisions` are lines of glue that decide in Python on an activation before the
    last call, `late_decisions` those of the forward after it, and `has_branches` says whether glue or the criterion
    decides there. `consulted` are the leaves of the batch on which glue decides, or to which it writes (`rewritten`).
    `watched` are those among them whose values the Dataflow is specific to: sizes of images, and masks that select.
    `glue_random` says whether glue draws random numbers, `python_random` whether anything draws from `random` or
    numpy's generator. `tail` are the flops of glue with its own parameters after the last call. `touched` are values
    that operators of glue received, `questions` the Questions that glue asked about the batch's values: the Dataflow is
    for batches with the same answers. `hooks` are those that glue puts on gradients, `carried` is the state left to the
    next forward. `together` are the calls that the model's own checkpoints run again in the backward pass, the first
    and the last of each. `valued` are the units that were visited with values, since they do not run on shapes alone.
    `deciders` are modules without parameters that were running when glue decided, and could be units. `differentiated`
    are the values that get a gradient of the loss from glue. `counts_results`: the count of the criterion's pair
    depends on units.
    """

    calls: tuple[Call, ...]
    loss: Reads | None
    outputs: tuple[tuple[str, Reads, TensorSpec], ...]
    written: frozenset[Value]
    decisions: tuple[str, ...]
    consulted: frozenset[str]
    watched: frozenset[str]
    axes: Axes
    glue_random: bool = True
    python_random: bool = False
    tail: int = 0
    touched: frozenset[Value] = frozenset()
    questions: tuple[Question, ...] = ()
    hooks: tuple[Hook, ...] = ()
    rewritten: frozenset[str] = frozenset()
    carried: tuple[Carried, ...] = ()
    together: tuple[tuple[int, int], ...] = ()
    valued: frozenset[str] = frozenset()
    late_decisions: tuple[str, ...] = ()
    has_branches: bool = False
    deciders: frozenset[str] = frozenset()
    differentiated: frozenset[Value] = frozenset()
    counts_results: bool = False

    @cached_property
    def occurrences(self) -> tuple[tuple[str, int], ...]:
        """The unit of each call, and how many earlier calls of it there were."""
        before: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        return tuple((call.unit, next(before[call.unit])) for call in self.calls)

    @cached_property
    def cut_points(self) -> tuple[int, ...]:
        """The calls of CutPoints, if there are any: cuts are then allowed only after one of them."""
        return tuple(k for k, call in enumerate(self.calls) if call.is_cut)

    @property
    def ends_in_cut(self) -> bool:
        """Whether a cut may come after the last call, so that the last stage runs none."""
        return bool(self.calls) and self.calls[-1].is_cut

    @cached_property
    def gradients_from(self) -> tuple[frozenset[Value], ...]:
        """For each call, and last for the loss, the values that get a gradient of the loss from it; a value that is
        computed only from integers or frozen units gets none."""
        from_loss = self._trained(self.differentiated)
        from_calls: list[frozenset[Value]] = []
        found = set(from_loss)
        # Through hidden state the loss may send gradients to every result from the call on that leaves it.
        hidden = set(self.loss.hidden if self.loss is not None else ())
        sealed = min(hidden, default=len(self.calls))
        for index in range(len(self.calls) - 1, -1, -1):
            made = {value for value in found if value.call == index}
            of_leaves, seen = self.calls[index].differentiated, index in hidden or index >= sealed
            of_call: frozenset[Value] = frozenset()
            if made or seen:
                of_call = of_call.union(*(of_leaves if seen else (of_leaves[value.leaf] for value in made)))
                hidden |= self.calls[index].reads.hidden
            from_calls.append(self._trained(of_call))
            found |= from_calls[-1]
        return (*reversed(from_calls), from_loss)

    def _trained(self, values: frozenset[Value]) -> frozenset[Value]:
        return frozenset(value for value in values if self.spec(value).requires_grad)

    @cached_property
    def receiving(self) -> frozenset[Value]:
        """The values that get a gradient of the loss."""
        return frozenset().union(*self.gradients_from)

    def spec(self, value: Value) -> TensorSpec:
        spec: TensorSpec = self.calls[value.call].leaves[value.leaf]
        return spec

    def is_aside(self, value: Value) -> bool:
        """Whether the value leaves its unit other than by the unit's result."""
        return value.leaf >= self.calls[value.call].parts[0].tree.num_leaves

    def uses(self) -> list[Reads]:
        """Everything that units, the loss and the outputs depend on."""
        return [*(call.reads for call in self.calls), self.needed(True)]

    def needed(self, outputs: Wanted = False) -> Reads:
        """The values that the last stage needs for the loss and the requested outputs, or for all outputs if there is
        no loss."""
        if isinstance(outputs, frozenset):
            uses = [use for path, use, _ in self.outputs if field_of(path) in outputs]
        else:
            uses = [use for _, use, _ in self.outputs] if outputs or self.loss is None else []
        uses += [self.loss] if self.loss is not None else []
        return replace(Reads().joined(*uses), kept=frozenset())  # what is left to the next forward has its own readers
