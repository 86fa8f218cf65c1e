"""Dataflow: the unit results on which each unit call, the loss and the outputs depend."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

from pipeshard.batch.batch import Batch
from pipeshard.batch.tree import field_of
from pipeshard.graph.places import PlacePath
from pipeshard.graph.question import Question
from pipeshard.graph.shapes import Axes, TensorSpec
from pipeshard.graph.taint import Decision, Hidden, Hook, Input, Kept, Tag, Used, Value
from pipeshard.graph.unit_outputs import Part

Wanted = bool | frozenset[str]  # True: the model's whole output; False: only the loss; or fields of the output


@dataclass(frozen=True)
class Reads:
    """The dependencies of a call, the loss or an output: unit results, parameters that glue reads directly, leaves of
    the batch, calls from which tensors escaped untracked, and places with state from an earlier forward."""

    values: frozenset[Value] = frozenset()
    parameters: frozenset[str] = frozenset()
    inputs: frozenset[str] = frozenset()
    hidden: frozenset[int] = frozenset()
    kept: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tags: frozenset[Tag]) -> Self:
        return cls(
            frozenset(tag for tag in tags if isinstance(tag, Value)),
            frozenset(tag.name for tag in tags if isinstance(tag, Used)),
            frozenset(tag.path for tag in tags if isinstance(tag, Input)),
            frozenset(tag.call for tag in tags if isinstance(tag, Hidden)),
            frozenset(tag.name for tag in tags if isinstance(tag, Kept)),
        )

    def joined(self, *others: Self) -> Self:
        """The union of these Reads and `others`."""
        uses = self, *others
        names = [part.name for part in fields(self)]
        return replace(self, **{name: frozenset().union(*(getattr(use, name) for use in uses)) for name in names})

    def until(self, call: int) -> Self:
        """These Reads without the results and hidden tensors of `call` and later calls."""
        values = frozenset(value for value in self.values if value.call < call)
        return replace(self, values=values, hidden=frozenset(made for made in self.hidden if made < call))


@dataclass(frozen=True)
class Call:
    """One call of a unit: its dependencies (`reads`), and its outputs (`parts`), the result first.

    `leaves` are the TensorSpecs and constants of all parts, in order. The gradient of leaf k flows to
    `differentiated[k]`: the values that the call reads and from which the leaf is computed differentiably. `flops` and
    `elements` (the number of computed elements) are counted for one forward at the traced sizes. `flops` includes the
    flops of glue's operators on parameters since the previous call. `writes` is True if the call changes an argument in
    place. `is_cut` is True if the unit is a CutPoint.
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
        """The parts that a stage without the unit must reproduce, each with the range of its leaf indices. If a hook
        inside the unit has left a part without tensors, this part is omitted: the hook is assumed only to count runs of
        the unit."""
        start = 0
        for part in self.parts:
            numbers = range(start, start + part.tree.num_leaves)
            start = numbers.stop
            if not part.source.by_hook or any(isinstance(self.leaves[k], TensorSpec) for k in numbers):
                yield part, numbers

    @property
    def moves(self) -> bool:
        """Whether the call leaves a value at a place: in a buffer, an attribute or an object that the call receives."""
        return any(part.source.place for part in self.parts)


class Observed(NamedTuple):
    """A place, usually an attribute of a module, that `unit` reaches and that other code reads. `place` is a path that
    starts at the unit. `readers` are the calls of other units that read the place, with -1 for glue and the
    criterion."""

    unit: str
    place: PlacePath
    readers: frozenset[int]


@dataclass(frozen=True)
class Carried:
    """A place in which one forward leaves state for the next forward.

    `path` leads from the model to the place. `writers` are the unit calls that write the state, with -1 for glue. After
    unit call `until`, the state is final for every reader except the writer of the state. `until` is -1 if no stage
    except the writer's needs the state, and None if the state is final only at the end of the forward. `uses` are the
    dependencies of the state in one forward. `readers` are the unit calls that depend on the state in the next forward,
    with -1 for the loss and the outputs. `kind` is one of:

    - "tensor": a tensor that is written to in place
    - "settled": a parameter to which the next forward does not write
    - "parameter": any other parameter
    - "generator": a random generator
    - "number": a number or array that every forward changes
    - "": anything else
    """

    name: str
    path: PlacePath
    writers: frozenset[int]
    until: int | None
    uses: Reads
    readers: frozenset[int]
    kind: str = ""

    @property
    def makers(self) -> frozenset[int]:
        """The calls from whose results or side effects the state is computed."""
        return self.unseen | {value.call for value in self.uses.values}

    @property
    def unseen(self) -> frozenset[int]:
        """The `makers` whose results do not suffice to compute the state. Stages can send only results."""
        return self.uses.hidden | (self.writers if -1 not in self.writers else frozenset())


def has_one_updater(name: str, path: PlacePath, uses: Reads, kind: str) -> bool:
    """Whether each forward updates the state that the previous forward left at this place. All writers of such state
    must run on one stage, since each stage has its own copy."""
    is_moved = name in uses.kept and "_buffers" in [step.key for step in path[-2:]]
    return is_moved or kind in ("generator", "number")


@dataclass(frozen=True, eq=False)  # a key of caches, compared by identity
class Dataflow:
    """The unit calls of one forward, in order, and the dependencies of the loss and the outputs.

    `outputs` are the tensor leaves of the model's output, as (path, Reads, TensorSpec). `written` are the values that
    glue or a later call changes in place. `decisions` are the lines of glue that, before the last call, branch on an
    activation or a parameter, and the lines that differentiate unit results. `late_decisions` are the lines of the
    forward that contain such a branch after the last call. `has_branches` is True if the forward or the criterion has
    such a branch after the last call. `consulted` are the leaves of the batch on which glue branches, or to which glue
    writes (`rewritten`). The Dataflow is valid only for the traced values of the leaves `watched`, such as image sizes
    and masks used as indices. A leaf that determines the size of a result in the criterion is watched only if code
    reads this size. `glue_random` is True if glue may use random numbers or the model has its own checkpoints.
    `python_random` is True if any code uses `random` or numpy's generator. `tail` counts the flops of glue's operators
    on parameters after the last call. `touched` are the values that operators of glue received. `questions` are glue's
    decisions that depend on the batch's values: the Dataflow is valid only for batches with the same answers. `hooks`
    are the gradient hooks that glue registers. `carried` are the places with state for the next forward. `passing` are
    the places that the forward changes, and that the forward or the criterion then restores. For each of the model's
    own checkpoints, `together` contains the first and the last call that the checkpoint recomputes. `valued` are the
    units that were visited with values because they do not run on meta. `deciders` contains, for each branch of glue
    on an activation or a parameter, the outermost running module that could be a unit, if there is one.
    `differentiated` are the values that receive a gradient of the loss through glue alone. `counts_results` is True if
    the criterion returns a count that depends on unit results. `opaque` contains the name and the class of each object
    in the model's output that contains tensors, but that torch's pytree treats as a leaf. The name of the output itself
    is "". `observed` are the places that a unit reaches and that other code reads. `numbers` are the constants in
    attributes of the `valued` units, if code outside the unit reads the attribute, each with its value as text.
    """

    calls: tuple[Call, ...]
    loss: Reads | None
    outputs: tuple[tuple[str, Reads, TensorSpec], ...]
    written: frozenset[Value]
    decisions: tuple[Decision, ...]
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
    passing: tuple[PlacePath, ...] = ()
    together: tuple[tuple[int, int], ...] = ()
    valued: frozenset[str] = frozenset()
    late_decisions: tuple[Decision, ...] = ()
    has_branches: bool = False
    deciders: frozenset[str] = frozenset()
    differentiated: frozenset[Value] = frozenset()
    counts_results: bool = False
    opaque: tuple[tuple[str, str], ...] = ()
    observed: tuple[Observed, ...] = ()
    numbers: tuple[tuple[Observed, str], ...] = ()

    @property
    def count(self) -> Question | None:
        """The Question that computes the criterion's count, or None if the trace recorded none."""
        return next((question for question in self.questions if question.is_count), None)

    def without_count(self) -> Self:
        """This Dataflow without the Question that computes the criterion's count."""
        return replace(self, questions=tuple(question for question in self.questions if not question.is_count))

    def deltas(self, batch: Batch) -> tuple[int, ...] | None:
        """The differences between the batch's sizes and the traced sizes. None if this Dataflow is not valid for the
        batch, because `axes` does not fit the batch or the answer to one of glue's questions differs."""
        deltas = self.axes.deltas(batch)
        if deltas is None or not all(question.holds(batch.tensors, deltas) for question in self.questions):
            return None
        return deltas

    @cached_property
    def occurrences(self) -> tuple[tuple[str, int], ...]:
        """The unit of each call, and the number of earlier calls of the same unit."""
        before: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        return tuple((call.unit, next(before[call.unit])) for call in self.calls)

    @cached_property
    def cut_points(self) -> tuple[int, ...]:
        """The indices of CutPoint calls. If the model has CutPoints, cuts are allowed only after these calls."""
        return tuple(k for k, call in enumerate(self.calls) if call.is_cut)

    @property
    def ends_in_cut(self) -> bool:
        """Whether the last call is a call of a CutPoint. If the model is cut after this call, the last stage runs no
        unit."""
        return bool(self.calls) and self.calls[-1].is_cut

    @cached_property
    def gradients_from(self) -> tuple[frozenset[Value], ...]:
        """For each call and, as the last entry, for the loss: the values to which the call or the loss directly passes
        gradients of the loss. A value that is computed only from integers or frozen units receives no gradient."""
        from_loss = self._trained(self.differentiated)
        from_calls: list[frozenset[Value]] = []
        found = set(from_loss)
        # Calls from which a tensor escaped untracked. If a call reads it, gradients may reach all results of the call
        # from which it escaped. If the loss reads it, they may reach all results of call `sealed` and later.
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
        """The values that receive a gradient of the loss."""
        return frozenset().union(*self.gradients_from)

    def spec(self, value: Value) -> TensorSpec:
        spec: TensorSpec = self.calls[value.call].leaves[value.leaf]
        return spec

    def is_aside(self, value: Value) -> bool:
        """Whether the value leaves its unit through a hook or a place instead of the unit's result."""
        return value.leaf >= self.calls[value.call].parts[0].tree.num_leaves

    @property
    def has_side_loss(self) -> bool:
        """Whether a part of the loss is computed from side outputs of units, such as router logits."""
        return self.loss is not None and bool(self.loss.hidden or any(map(self.is_aside, self.loss.values)))

    def uses(self) -> list[Reads]:
        """The Reads of each call, followed by the joined Reads of the loss and all outputs."""
        return [*(call.reads for call in self.calls), self.needed(True)]

    def needed(self, outputs: Wanted = False) -> Reads:
        """The dependencies of the loss and the requested outputs. Without a loss, False requests all outputs."""
        if isinstance(outputs, frozenset):
            uses = [use for path, use, _ in self.outputs if field_of(path) in outputs]
        else:
            uses = [use for _, use, _ in self.outputs] if outputs or self.loss is None else []
        uses += [self.loss] if self.loss is not None else []
        return replace(Reads().joined(*uses), kept=frozenset())  # `carried` lists the readers of kept state
