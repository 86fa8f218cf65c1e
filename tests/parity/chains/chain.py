"""Chain: the known inputs of consecutive layers of an architecture."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType

from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.taint import Value


@dataclass(frozen=True)
class Chain:
    """Layers in a row: what each hands on to the next, and what layers read beside it that was made earlier.

    Both name floating-point tensors, for people; how many there are is confirmed. Fewer are fine (a configuration may
    have no position bias), and `...` as the last one stands for any number. Layers are the members of one list; what
    runs between two of them counts with the first. Free are how a list is entered, masks and other integers, what the
    loss and the outputs read, what a layer itself has left in an earlier pass (a cache), and lists whose members stand
    beside each other (a head per codebook).
    """

    handed_on: tuple[str, ...]
    beside: tuple[str | EllipsisType, ...] = ()

    def __str__(self) -> str:
        names = ", ".join("..." if name is ... else name for name in self.beside)
        beside = f"and also {names}" if names else "and nothing else"
        return f"each layer reads {', '.join(self.handed_on)} of the one before it {beside}"

    def mismatch(self, flow: Dataflow) -> str:
        """What the first layer that reads something else reads; "" if there is none."""
        for before, layer in layers(flow):
            unit, values = flow.calls[layer].unit, _activations(flow, layer)
            values -= {v for v in values if flow.calls[v.call].unit == unit and (v.call < before or flow.is_aside(v))}
            handed_on = {value for value in values if value.call >= before and not flow.is_aside(value)}
            beside = values - handed_on
            too_many = ... not in self.beside and len(beside) > len(self.beside)
            if not handed_on or len(handed_on) > len(self.handed_on) or too_many:
                return (
                    f"{unit} reads {_makers(flow, handed_on)} where it comes after "
                    f"{flow.calls[before].unit}, and also {_makers(flow, beside)}"
                )
        return ""


def layers(flow: Dataflow) -> Iterator[tuple[int, int]]:
    """The calls of each two layers that follow each other in one list, in one pass through it."""
    calls: dict[str, list[tuple[int, int]]] = {}
    for k, call in enumerate(flow.calls):
        name, _, member = call.unit.rpartition(".")
        if member.isdigit():
            calls.setdefault(name, []).append((k, int(member)))
    for of_list in calls.values():
        pairs = [(k, n) for (k, member), (n, following) in itertools.pairwise(of_list) if following >= member]
        if any(value.call >= before for before, layer in pairs for value in _activations(flow, layer)):
            yield from pairs


def _activations(flow: Dataflow, reader: int) -> set[Value]:
    return {value for value in flow.calls[reader].reads.values if flow.spec(value).dtype.is_floating_point}


def _makers(flow: Dataflow, values: set[Value]) -> str:
    """The units that made these values, each with the number of the value among all that leave it."""
    return ", ".join(f"{flow.calls[value.call].unit}[{value.leaf}]" for value in sorted(values)) or "nothing"
