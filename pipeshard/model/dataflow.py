"""Dataflow: which unit results each unit call, the loss and the outputs depend on."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from pipeshard.model.exits import Part
from pipeshard.model.names import field_of
from pipeshard.model.shapes import Axes, TensorSpec
from pipeshard.model.taint import Hidden, Input, Tag, Used, Value

Wanted = bool | frozenset[str]  # of the model's output: all of it, nothing but the loss, or these fields


@dataclass(frozen=True)
class Use:
    """What something depends on: unit results, parameters glue reads itself, leaves of the batch, and calls whose
    hidden state it sees."""

    values: frozenset[Value] = frozenset()
    parameters: frozenset[str] = frozenset()
    inputs: frozenset[str] = frozenset()
    hidden: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tags: frozenset[Tag]) -> Self:
        return cls(
            frozenset(tag for tag in tags if isinstance(tag, Value)),
            frozenset(tag.name for tag in tags if isinstance(tag, Used)),
            frozenset(tag.path for tag in tags if isinstance(tag, Input)),
            frozenset(tag.call for tag in tags if isinstance(tag, Hidden)),
        )


@dataclass(frozen=True)
class Call:
    """One call of a unit: what it reads, and what leaves it, the result first.

    `leaves` are TensorSpecs and constants, those of all parts in their order. A gradient of the call flows on to
    `differentiated`, those of the values read that come by an argument which requires one. `flops` and `elements`
    (numbers made by its operators) are those of one forward at the traced size; to `flops` belong those of glue with
    parameters of its own before the call. `writes` is whether it changes an argument in place, `is_cut` whether it is a
    CutPoint. `continues` is whether it is given what the call before has returned, and else the same as that one was;
    both return one tensor, draw no random numbers and write to nothing.
    """

    unit: str
    reads: Use
    differentiated: frozenset[Value]
    parts: tuple[Part, ...]
    leaves: tuple[Any, ...]
    flops: int
    elements: int
    writes: bool = False
    is_cut: bool = False
    continues: bool = False


@dataclass(frozen=True)
class Dataflow:
    """The unit calls of one forward in their order, and what the loss and the outputs need of them.

    `outputs` are the tensor leaves of the model's output: (path, use, spec). `written` are values that are changed
    in place after they were made. `decisions` are lines of glue that decide in Python on an activation, `consulted`
    the leaves of the batch it decides on, or writes to, `watched` those among them whose values are part of what the
    Dataflow is for: sizes of images, and masks that select. `glue_random` is whether glue draws random numbers,
    `python_random` whether anything draws from `random` or numpy's generator. `tail` are the flops of glue with
    parameters of its own after the last call. `touched` are values that operators of glue were given.
    """

    calls: tuple[Call, ...]
    loss: Use | None
    outputs: tuple[tuple[str, Use, TensorSpec], ...]
    written: frozenset[Value]
    decisions: tuple[str, ...]
    consulted: frozenset[str]
    watched: frozenset[str]
    axes: Axes
    glue_random: bool = True
    python_random: bool = False
    tail: int = 0
    touched: frozenset[Value] = frozenset()

    @cached_property
    def occurrences(self) -> tuple[tuple[str, int], ...]:
        """The unit of each call, and how many calls of it came before."""
        seen: Counter[str] = Counter()
        keys = []
        for call in self.calls:
            keys.append((call.unit, seen[call.unit]))
            seen[call.unit] += 1
        return tuple(keys)

    @cached_property
    def cut_points(self) -> tuple[int, ...]:
        """The calls of CutPoints, if there are any: a cut is after one of them, and nowhere else."""
        return tuple(k for k, call in enumerate(self.calls) if call.is_cut)

    @property
    def ends_in_cut(self) -> bool:
        """Whether a cut may come after the last call, so that the last stage runs none."""
        return bool(self.calls) and self.calls[-1].is_cut

    @cached_property
    def receiving(self) -> frozenset[Value]:
        """The values that get a gradient of the loss; one that only integers or frozen units are made of gets none."""
        found = set(self.loss.values if self.loss is not None else ())
        hidden = set(self.loss.hidden if self.loss is not None else ())
        sealed = min(hidden, default=len(self.calls))
        for index in range(len(self.calls) - 1, -1, -1):
            made = {value for value in found if value.call == index and self.spec(value).requires_grad}
            if made or index in hidden or index >= sealed:
                found |= self.calls[index].differentiated
                hidden |= self.calls[index].reads.hidden
        return frozenset(value for value in found if self.spec(value).requires_grad)

    def spec(self, value: Value) -> TensorSpec:
        spec: TensorSpec = self.calls[value.call].leaves[value.leaf]
        return spec

    def is_aside(self, value: Value) -> bool:
        """Whether the value leaves its unit other than by the unit's result."""
        return value.leaf >= self.calls[value.call].parts[0].tree.num_leaves

    def uses(self) -> list[Use]:
        """All that units, the loss and the outputs depend on."""
        return [*(call.reads for call in self.calls), self.needed(True)]

    def needed(self, outputs: Wanted = False) -> Use:
        """What the last stage needs: for the loss, and for the outputs asked for, or all where there is no loss."""
        if isinstance(outputs, frozenset):
            uses = [use for path, use, _ in self.outputs if field_of(path) in outputs]
        else:
            uses = [use for _, use, _ in self.outputs] if outputs or self.loss is None else []
        uses += [self.loss] if self.loss is not None else []
        return Use(
            frozenset().union(*(use.values for use in uses)),
            frozenset().union(*(use.parameters for use in uses)),
            frozenset().union(*(use.inputs for use in uses)),
            frozenset().union(*(use.hidden for use in uses)),
        )
