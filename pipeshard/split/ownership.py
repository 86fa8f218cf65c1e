"""Ownership: which stages hold a parameter, which of them owns its current value, and which provides its initial one.

A parameter is on every stage that runs one of its units or whose glue reads it, so a tied weight is on several, and one
process may run several parts of the model. Whoever saves, compares or broadcasts values has to pick one of these
stages, and every rank has to pick the same.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from pipeshard.graph.dataflow import Dataflow
from pipeshard.split.partition import Partition


class Ownership:
    """The stages of each parameter, under its first name. `placement` is the stage (process) of each part of the model.

    Attributes:
        held: the names of the parameters that each stage holds.
        held_by_parts: those that each part of the model needs.
    """

    def __init__(
        self,
        model: nn.Module,
        flow: Dataflow,
        partition: Partition,
        placement: Sequence[int],
        units: Mapping[str, nn.Module],
    ) -> None:
        self.flow, self.partition, self.placement = flow, partition, placement
        self.held_by_parts = held_parameters(model, flow, partition.of_calls(flow), units, len(placement))
        self.held: list[set[str]] = [set() for _ in range(max(placement) + 1)]
        for stage, names in zip(placement, self.held_by_parts, strict=True):
            self.held[stage] |= names

    def holders(self, name: str) -> list[int]:
        """The stages that hold a parameter."""
        return [stage for stage, held in enumerate(self.held) if name in held]

    def shared(self) -> dict[str, list[int]]:
        """The stages of every parameter that several hold, in the same order on every rank."""
        return {name: stages for name in sorted(set().union(*self.held)) if len(stages := self.holders(name)) > 1}

    def owner(self, name: str) -> int:
        """The stage that has the current value of a parameter or buffer.

        It is the first of those that hold it or run its unit. For a buffer outside of all units it is the last stage
        that has what the buffer is computed from, or the last of all, which alone runs the whole glue.
        """
        prefix = name.removesuffix(".") + "."  # of what a module has, too
        updates = [place for place in self.flow.carried if place.makers and f"{place.name}.".startswith(prefix)]
        readers = {call for place in updates for call in place.readers}
        last = -1 if -1 in readers or not readers else self.partition.of_calls(self.flow)[max(readers)]
        return min(self.holders(name) or self._running(name), default=self.placement[last])

    def initializer(self, name: str) -> int:
        """The stage that all holders of a parameter get its initial value from: the one that runs the unit of its
        first name (a rank's first chunk may come later in the model than another's), else the first that holds it."""
        holders = self.holders(name)
        return next((stage for stage in self._running(name) if stage in holders), min(holders))

    def _running(self, name: str) -> list[int]:
        """The stages that run the unit with this parameter or buffer, in the order of the model."""
        calls = self.partition.stages.items()
        return [self.placement[part] for (unit, _), part in calls if name.startswith(f"{unit}.")]


def held_parameters(
    model: nn.Module, flow: Dataflow, stages: Sequence[int], units: Mapping[str, nn.Module], num_stages: int
) -> list[set[str]]:
    """The parameters each stage holds, by their first name.

    A stage holds those of the units it runs and those its glue reads; one that nothing uses stays with the one
    registered before it. A name on several stages is a tie between them.
    """
    first = {parameter: name for name, parameter in model.named_parameters()}
    held: list[set[str]] = [set() for _ in range(num_stages)]
    for call, stage in zip(flow.calls, stages, strict=True):
        held[stage].update(first[parameter] for parameter in units[call.unit].parameters())
        held[stage].update(call.reads.parameters)
    held[-1].update(flow.needed(outputs=True).parameters)
    previous = 0
    for name in first.values():
        holders = [stage for stage in range(num_stages) if name in held[stage]]
        if not holders:
            held[previous].add(name)
        previous = max(holders, default=previous)
    return held
