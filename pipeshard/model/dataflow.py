"""Dataflow: which unit results each unit call, the loss and the outputs depend on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from torch import nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from pipeshard.model.shapes import Axes, TensorSpec
from pipeshard.model.taint import Hidden, Input, Tag, Used, Value
from pipeshard.model.units import tell


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


class Part(NamedTuple):
    """A tree of values that leaves a unit call: its result (no `module`), or what a module inside the unit returned
    in its call number `occurrence` and its forward hooks take away (attentions, router logits)."""

    module: str
    occurrence: int
    tree: TreeSpec


@dataclass(frozen=True)
class Call:
    """One call of a unit: what it reads, and what leaves it, the result first.

    `leaves` are TensorSpecs and constants, those of all parts in their order. `flops` and `elements` (numbers made by
    its operators) are those of one forward at the traced size.
    """

    unit: str
    reads: Use
    parts: tuple[Part, ...]
    leaves: tuple[Any, ...]
    flops: int
    elements: int


def answer(unit: nn.Module, parts: Sequence[Part], leaves: Sequence[Any]) -> Any:
    """Return the result that `leaves` make, once hooks inside the unit have got what they would have seen."""
    at = parts[0].tree.num_leaves
    for part in parts[1:]:
        tell(unit, part.module, tree_unflatten(leaves[at : at + part.tree.num_leaves], part.tree))
        at += part.tree.num_leaves
    return tree_unflatten(leaves[: parts[0].tree.num_leaves], parts[0].tree)


@dataclass(frozen=True)
class Dataflow:
    """The unit calls of one forward in their order, and what the loss and the outputs need of them.

    `outputs` are the tensor leaves of the model's output: (path, use, spec). `written` are values that are changed
    in place after they were made. `decisions` are lines of glue that decide in Python on an activation, `consulted`
    the leaves of the batch it decides on, or writes to.
    """

    calls: tuple[Call, ...]
    loss: Use | None
    outputs: tuple[tuple[str, Use, TensorSpec], ...]
    written: frozenset[Value]
    decisions: tuple[str, ...]
    consulted: frozenset[str]
    axes: Axes

    def spec(self, value: Value) -> TensorSpec:
        spec: TensorSpec = self.calls[value.call].leaves[value.leaf]
        return spec

    def is_aside(self, value: Value) -> bool:
        """Whether hooks inside its unit take the value away, rather than its result."""
        return value.leaf >= self.calls[value.call].parts[0].tree.num_leaves

    def needed(self, outputs: bool = False) -> Use:
        """What the last stage needs: for the loss, and for every output where asked for or where there is no loss."""
        uses = [use for _, use, _ in self.outputs] if outputs or self.loss is None else []
        uses += [self.loss] if self.loss is not None else []
        return Use(
            frozenset().union(*(use.values for use in uses)),
            frozenset().union(*(use.parameters for use in uses)),
            frozenset().union(*(use.inputs for use in uses)),
            frozenset().union(*(use.hidden for use in uses)),
        )
