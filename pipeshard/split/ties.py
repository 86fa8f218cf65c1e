"""Ties: parameters with several names, and the stages that hold and own each parameter.

Architectures list their tied weights in different ways, or not at all. For a model on meta or with adapters, these
lists are out of date. Two names of one object are trained as one parameter, so pipeshard identifies ties by object
identity instead.

A stage holds a parameter if it runs one of the parameter's units, or if its glue reads the parameter. So several stages
may hold a tied weight. In addition, one process may run several parts of the model. To save, compare or broadcast
values, all ranks must select the same stage.
"""

import itertools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipeshard.errors import ConfigurationError, unknown
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.storage import storage_of
from pipeshard.split.partition import Partition

logger = logging.getLogger("pipeshard")


def glue_parameters(flow: Dataflow) -> frozenset[str]:
    """The parameters that glue reads directly, on any stage."""
    return frozenset().union(*(use.parameters for use in flow.uses()))


def used_parameters(model: nn.Module, flow: Dataflow) -> set[nn.Parameter]:
    """The parameters of the units that the traced batch calls, and the parameters that glue reads."""
    named = dict(model.named_parameters())
    used = {parameter for call in flow.calls for parameter in model.get_submodule(call.unit).parameters()}
    return used.union(named[name] for name in glue_parameters(flow))


def names_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each parameter, keyed by its first name, in the order of registration."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {group[0]: tuple(group) for group in names.values()}


def first_names(model: nn.Module) -> dict[str, str]:
    """Map each parameter name to the first name of the same parameter."""
    return {name: names[0] for names in names_of(model).values() for name in names}


@contextmanager
def kept_tied(model: nn.Module) -> Iterator[None]:
    """Context manager that keeps ties: if a parameter is replaced under one of its names, all of its names refer to the
    new parameter on exit."""
    before = dict(model.named_parameters(remove_duplicate=False))
    groups = names_of(model).values()
    yield
    after = dict(model.named_parameters(remove_duplicate=False))
    for names in groups:
        new = next((after[name] for name in names if after[name] is not before[name]), None)
        if new is not None:
            for name in names:
                put_parameter(model, name, new)


def put_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Assign the parameter to this name, but not to the other names of a tied parameter."""
    path, _, key = name.rpartition(".")
    model.get_submodule(path)._parameters[key] = parameter


def tie_on_meta(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Tie meta parameters that are the same view of one storage. Return a dict from each replaced parameter to its
    replacement.

    accelerate's `init_empty_weights` creates a new Parameter on the same storage for every name to which a parameter is
    assigned, so ties would be lost.
    """
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, p in model.named_parameters():
        if p.is_meta and p.numel():
            key = storage_of(p), p.storage_offset(), tuple(p.shape), p.stride(), p.dtype
            groups.setdefault(key, []).append(name)
    return share_weights(model, [names for names in groups.values() if len(names) > 1])


def share_weights(
    model: nn.Module, groups: Iterable[Sequence[str]], warns: bool = True, argument: str = "shared_weights"
) -> dict[nn.Parameter, nn.Parameter]:
    """Tie the parameters of each group of names to the group's first parameter. Return a dict from each replaced
    parameter to its replacement.

    Groups that have a parameter in common are merged. If the values in a group differ, the values of the first
    parameter are kept, with a warning if `warns`. Raises ConfigurationError if a group is invalid, if a name is unknown
    (the error suggests similar names), or if the shapes or dtypes in a group differ. `argument` is the name of the
    argument in errors and warnings.
    """
    became: dict[nn.Parameter, nn.Parameter] = {}
    for names in groups:
        if isinstance(names, str) or len(names) < 2 or not all(isinstance(name, str) for name in names):
            raise ConfigurationError(
                f"{argument} must list groups of two or more parameter names, such as "
                f"[('embed.weight', 'head.weight')], got the group {names!r}"
            )
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name in names:
            if name not in parameters:
                raise ConfigurationError(unknown(argument, name, type(model).__name__, parameters, "parameters"))
        first = parameters[names[0]]
        for name in names[1:]:
            if (other := parameters[name]) is first:
                continue
            if (first.shape, first.dtype) != (other.shape, other.dtype):
                raise ConfigurationError(
                    f"{argument}: {names[0]} is {tuple(first.shape)} {first.dtype}, but {name} is {tuple(other.shape)} "
                    f"{other.dtype}: only parameters of the same shape and dtype can be tied"
                )
            if warns and not (first.is_meta or other.is_meta) and not torch.equal(first.detach(), other.detach()):
                logger.warning(
                    "%s: %s and %s have different values; the values of %s are kept", argument, names[0], name, names[0]
                )
            with kept_tied(model):
                put_parameter(model, name, first)
            became[other] = first
    return {old: _end(new, became) for old, new in became.items()}


def _end(parameter: nn.Parameter, became: Mapping[nn.Parameter, nn.Parameter]) -> nn.Parameter:
    while parameter in became:
        parameter = became[parameter]
    return parameter


def analyze_tied_weights(
    model: nn.Module, stages: Mapping[str, int] | None = None
) -> list[tuple[tuple[str, int], ...]]:
    """A sorted list of all groups of tied names. Each group is a sorted tuple of (name, stage) pairs.

    `stages` maps names of modules (or parameters) to stages. A parameter that is not in `stages` has the stage of its
    nearest ancestor in `stages`, or stage 0 if no ancestor is in `stages`. The model may be on meta. Call this function
    before `to_empty`, which loses the ties. The result is the same on every rank.
    """

    def stage(name: str) -> int:
        while name and name not in (stages or {}):
            name = name.rpartition(".")[0]
        return (stages or {}).get(name, 0)

    groups = [group for group in names_of(model).values() if len(group) > 1]
    return sorted(tuple(sorted((name, stage(name)) for name in group)) for group in groups)


class Ownership:
    """The stages that hold and own each parameter, given the parameter's first name. `placement` lists the stage
    (process) of each part of the model.

    Attributes:
        held: the names of the parameters that each stage holds.
        held_by_parts: the names of the parameters that each part of the model needs.
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
        """The parameters that several stages hold, each mapped to its stages. The order of the parameters is the same
        on every rank."""
        return {name: stages for name in sorted(set().union(*self.held)) if len(stages := self.holders(name)) > 1}

    def owner(self, name: str) -> int:
        """The stage that has the current value of a parameter or buffer.

        The owner is the first stage that holds the tensor or, if there is none, the stage that runs the tensor's unit
        last. For a buffer that glue computes from results of units, and on which neither the loss nor the outputs
        depend, the owner is the stage of the last unit that reads the buffer. For any other buffer outside all units,
        the owner is the last stage, since only the last stage runs all glue.
        """
        prefix = name.removesuffix(".") + "."  # also matches state inside a module
        updates = [place for place in self.flow.carried if place.makers and f"{place.name}.".startswith(prefix)]
        readers = {call for place in updates for call in place.readers}
        last = -1 if -1 in readers or not readers else self.partition.of_calls(self.flow)[max(readers)]
        return min(self.holders(name) or self._running(name)[-1:], default=self.placement[last])

    def initializer(self, name: str) -> int:
        """The stage from which all holders of a parameter copy its initial value.

        The initializer is the holder that runs the unit of the parameter's first name or, if there is none, the first
        holder. The first holder does not always run the first of the parameter's units, since a rank may hold several
        chunks.
        """
        holders = self.holders(name)
        return next((stage for stage in self._running(name) if stage in holders), min(holders))

    def _running(self, name: str) -> list[int]:
        """The stages that run the unit with this parameter or buffer, in the order of the model."""
        calls = self.partition.stages.items()
        return [self.placement[part] for (unit, _), part in calls if name.startswith(f"{unit}.")]


def refuse_overlaps(model: nn.Module, held: Sequence[Collection[str]]) -> None:
    """Raise ConfigurationError if two parameters overlap in memory, but are not held by the same stages: a write to one
    parameter would not change the other."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters():
        sizes = zip(parameter.shape, parameter.stride(), strict=True)
        first = int(parameter.storage_offset())
        last = first + sum(int((size - 1) * stride) for size, stride in sizes)
        if parameter.numel():
            spans.setdefault(storage_of(parameter), []).append((first, last, name))
    for one, other in (pair for of_one in spans.values() for pair in itertools.combinations(sorted(of_one), 2)):
        stages = [{stage for stage, names in enumerate(held) if name in names} for *_, name in (one, other)]
        if other[0] <= one[1] and stages[0] != stages[1]:
            raise ConfigurationError(
                f"the parameters {one[2]} and {other[2]} share memory, but are not on the same stages: make them "
                "one parameter (model.head.weight = model.embed.weight, or shared_weights=[...]), or copy one of them. "
                "If they are adapters of peft, omit ensure_weight_tying=True"
            )


def held_parameters(
    model: nn.Module, flow: Dataflow, stages: Sequence[int], units: Mapping[str, nn.Module], num_stages: int
) -> list[set[str]]:
    """The first names of the parameters that each stage holds: all parameters of its units, and the parameters that its
    glue reads. An unused parameter is stored with the nearest used parameter registered before it, on the last stage
    that holds that parameter. If several stages hold the same name, these stages share the parameter.
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
