"""Policy: what a stage holds and runs; the base class derives all of it from the Dataflow."""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import metadata, util
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from pipeshard.batch.tree import full_name, unknown, without_adapters
from pipeshard.errors import ConfigurationError, PartitionError, TraceError, UsageError
from pipeshard.graph.dataflow import Chain, Dataflow, Wanted
from pipeshard.graph.units import CutPoint, find_units, intercept
from pipeshard.split.partition import (
    Cuts,
    Partition,
    balance,
    boundaries,
    call_costs,
    forbidden_cuts,
    held_parameters,
    weights,
)
from pipeshard.split.replay import Replay

logger = logging.getLogger("pipeshard")
SINGLE = (nn.Linear, nn.Embedding)  # one operation; classes made of them may do more


class Policy:
    """The four questions a sharder asks, answered for one stage of one model.

    Override a method for what the trace cannot know; most architectures need no policy of their own. `partition` is
    "auto" (by cost), "uniform" (equally many units), "parameters", "profile" (by cost as measured), "type:REGEX"
    (equally many units whose class has a name that the expression matches, in any case), how many unit calls each
    stage gets, or the units to cut after. `scale` is the size of a microbatch over that of the trace; `costs` are those
    of the unit calls where they are known better than from it. `placement` says on which of the
    `num_stages` processes each part of the model is, where a process has several chunks of it; by default it is one
    part each. `expects` is what the policy takes for granted of the layers; where the trace finds something
    else, a warning says so, and the trace holds. `tp_plan` slices a base model that comes without a plan of its own
    (`tp_size`): styles by the names of modules, * for numbers.

    Attributes:
        stage: this process's place among `num_stages`, its rank in the pipeline.
        chunks: the parts of the model that it runs, by their place in the model.
        partition: the part that runs each unit call; `stages` the same as numbers, one for each call of `flow`.
        held: the names of the parameters that each process holds, `held_by_parts` those of each part of the model.
    """

    expects: ClassVar[Chain | None] = None
    tp_plan: ClassVar[Mapping[str, str] | None] = None

    def __init__(
        self,
        model: nn.Module,
        flow: Dataflow,
        stage: int,
        num_stages: int,
        partition: Cuts = "auto",
        scale: float = 1.0,
        device: torch.device | None = None,
        placement: Sequence[int] | None = None,
        costs: Sequence[float] | None = None,
    ) -> None:
        self.model, self.flow, self.stage, self.num_stages = model, flow, stage, num_stages
        self.placement = tuple(range(num_stages) if placement is None else placement)
        self.chunks = [part for part, at in enumerate(self.placement) if at == stage]
        self.partition_by, self.scale, self.known_costs = partition, scale, costs
        self.units = find_units(model, (call.unit for call in flow.calls))
        self.refuse_decisions(flow)
        self._warn_of_unexpected(flow)
        parts = len(self.placement)
        counts = self.distribute_layers(len(flow.calls), parts)
        fewest = min(counts, default=0) if not flow.ends_in_cut else min(counts[:-1], default=1)
        if len(counts) != parts or sum(counts) != len(flow.calls) or fewest < 1:
            chunks = f" ({parts // num_stages} chunks for each of {num_stages} processes)" if parts > num_stages else ""
            raise PartitionError(
                f"partition {list(counts)} does not give each of {parts} stages{chunks} at least one of the model's "
                f"{len(flow.calls)} unit calls: {[call.unit for call in flow.calls]}"
            )
        self.partition = Partition.of(flow, counts)
        self.stages = self.partition.of_calls(flow)
        self._refuse_forbidden(counts)
        self.refuse_state(flow)
        self.held_by_parts = held_parameters(model, flow, self.stages, self.units, parts)
        self.held = self._merged(self.held_by_parts)
        running = {call.unit for call, part in zip(flow.calls, self.stages, strict=True) if part in self.chunks}
        self.replay = Replay(model, self.units, frozenset(running), stage, device or torch.device("cpu"))

    def refuse_decisions(self, flow: Dataflow) -> None:
        """Refuse glue that branches on an activation: only the stage that has it could take the right way."""
        if flow.decisions and len(self.placement) > 1:
            raise TraceError(
                f"{type(self.model).__name__} decides in Python on a value of a unit, which only its stage has: "
                f"{'; '.join(flow.decisions)}. Compute it with tensor operations (torch.where), or inside a unit; so "
                "with gradients that forward asks for (autograd.grad)"
            )

    def refuse_state(self, flow: Dataflow) -> None:
        """Refuse what a forward leaves to the next if no stage could know it: parameters that glue changes, generators
        and counters that move on several stages."""
        stages = self.partition.of_calls(flow)
        for place in flow.carried if len(self.placement) > 1 else ():
            names = [flow.calls[call].unit if call >= 0 else "the model's forward" for call in sorted(place.writers)]
            where = {stages[call] if call >= 0 else -1 for call in place.writers}
            others = [*sorted(place.uses.parameters), *(flow.calls[call].unit for call in sorted(place.makers))]
            often = (place.kind == "parameter" and self.model.training) or len(self.placement) > self.num_stages
            if place.kind in ("parameter", "settled") and -1 in where and (others or often):
                raise TraceError(
                    f"the forward of {type(self.model).__name__} changes the parameter {place.name} outside of its unit"
                    f"{f', by {others[0]}' if others else ''}, and no stage can do that for all: do it after "
                    "optimizer.step(), or inside the unit, or use one stage (pp_size=1)"
                )
            if place.kind in ("generator", "number") and len(where) > 1:
                raise TraceError(
                    f"{names[0]} and {names[-1]} {'draw from' if place.kind == 'generator' else 'change'} "
                    f"{place.name}, but are on several stages, each of which has one of its own: give each layer its "
                    "own, or move this out of all layers into the model's forward, or use one stage (pp_size=1)"
                )

    def _warn_of_unexpected(self, flow: Dataflow) -> None:
        """Say where layers read something else than the policy expects: what was traced is what is sent."""
        if self.expects is None or len(self.placement) == 1 or self.stage > 0:
            return
        if self.units.keys() != find_units(self.model).keys():
            return  # cuts inside of layers leave no chain of layers
        found = self.expects.mismatch(flow)
        if found:
            logger.warning(
                "%s expects of %s that %s, but the trace found that %s. The model is split as the trace found it",
                type(self).__name__,
                type(self.model).__name__,
                self.expects,
                found,
            )

    def unit(self, name: str) -> nn.Module:
        """The unit of this name; PartitionError with those that come close where the model has none."""
        name = full_name(self.model, name)
        if name not in self.units:
            raise PartitionError(unknown(type(self).__name__, name, type(self.model).__name__, self.units))
        return self.units[name]

    def calls_of(self, name: str) -> list[int]:
        """The numbers of the calls of this unit, or of all units inside the module of this name.

        Raises PartitionError with the names that come close where the model calls no such unit.
        """
        return self._calls_of(name, type(self).__name__)

    def costs(self) -> list[float]:
        """Relative time of each unit call."""
        return call_costs(self.flow, self.units, self.scale) if self.known_costs is None else list(self.known_costs)

    def weights(self, num_stages: int) -> list[float]:
        """Of each unit call, what a partition that is given by name makes as equal as possible on the stages."""
        if str(self.partition_by).startswith("profile") and self.known_costs is None:
            raise ConfigurationError("partition='profile' goes by measured costs: pass costs=profile.costs(flow)")
        units = [self.units[call.unit] for call in self.flow.calls]
        return weights(str(self.partition_by), units, self.costs, num_stages)

    def distribute_layers(self, num_layers: int, num_stages: int) -> list[int]:
        """How many of the `num_layers` unit calls, in their order, each stage runs."""
        by = self.partition_by
        if isinstance(by, str):
            weights, forbidden = self.weights(num_stages), forbidden_cuts(self.flow)
            if not self.flow.ends_in_cut:
                return balance(weights, num_stages, forbidden)
            *counts, last = balance([*weights, self._tail()], num_stages, forbidden)
            return [*counts, last - 1]
        if all(isinstance(entry, int) for entry in by):
            return [int(entry) for entry in by]
        return self._counts_after([str(entry) for entry in by])

    @property
    def held_units(self) -> dict[str, nn.Module]:
        """The units this stage runs, by name, in the order of registration."""
        return {name: unit for name, unit in self.units.items() if name in self.replay.held}

    def holders(self, name: str) -> list[int]:
        """The stages that hold a parameter, by its first name."""
        return [stage for stage, held in enumerate(self.held) if name in held]

    def _tail(self) -> float:
        """What the model does after its last unit call, on the scale of `weights`."""
        return self.scale * 3 * self.flow.tail if self.partition_by == "auto" and self.known_costs is None else 0.0

    def get_held_layers(self) -> list[nn.Module]:
        """The units this stage runs, in the order of registration."""
        return list(self.held_units.values())

    def get_shared_params(self) -> list[dict[int, nn.Parameter]]:
        """One entry per parameter several stages hold: stage -> parameter, in the same order on every rank."""
        parameters = dict(self.model.named_parameters())
        return [dict.fromkeys(holders, parameters[name]) for name, holders in self.shared_names().items()]

    def shared_names(self) -> dict[str, list[int]]:
        """The stages of every parameter that more than one holds."""
        names = sorted(set().union(*self.held))
        return {name: stages for name in names if len(stages := self.holders(name)) > 1}

    def owner(self, name: str) -> int:
        """The stage to ask for the present value of a parameter (by its first name) or a buffer: of those that hold it
        or run its unit the first; for a buffer of no unit the last that has what it is made of, or of all, which alone
        runs all of the glue."""
        parts = [part for (unit, _), part in self.partition.stages.items() if name.startswith(f"{unit}.")]
        prefix = name.removesuffix(".") + "."  # of what a module has, too
        made = [place for place in self.flow.carried if place.makers and f"{place.name}.".startswith(prefix)]
        readers = [call for place in made for call in place.readers]
        last = -1 if -1 in readers or not readers else self.stages[max(readers)]
        return min(self.holders(name) or [self.placement[part] for part in parts], default=self.placement[last])

    def maker(self, name: str) -> int:
        """The stage that a shared parameter gets its first values of: that which runs the unit of its first name (the
        first of a rank's chunks may come later in the model), else the first that holds it."""
        calls = self.partition.stages.items()
        running = [self.placement[part] for (unit, _), part in calls if name.startswith(f"{unit}.")]
        holders = self.holders(name)
        return next((stage for stage in running if stage in holders), min(holders))

    def replace_forward(self) -> None:
        """Make held units run and the others replay."""
        for interception in intercept(self.units):
            interception.handler = self.replay

    def compile(self, **options: Any) -> None:
        """Let torch.compile compile each held unit by itself, units of one class sharing what is compiled.

        In a unit that is a single operation there is nothing to fuse, and calling what was compiled takes longer.
        """
        held = self.held_units.items()
        many = {name: unit for name, unit in held if type(unit) not in SINGLE and not isinstance(unit, CutPoint)}
        for interception in intercept(many):
            interception.compiled = torch.compile(interception.original, **options)

    def _merged(self, parts: Sequence[set[str]]) -> list[set[str]]:
        """What each process holds, of what the parts it runs hold."""
        held: list[set[str]] = [set() for _ in range(self.num_stages)]
        for at, names in zip(self.placement, parts, strict=True):
            held[at] |= names
        return held

    def _counts_after(self, names: list[str]) -> list[int]:
        ends = sorted(self._calls_of(name, "partition")[-1] + 1 for name in names)
        return [b - a for a, b in zip([0, *ends], [*ends, len(self.flow.calls)], strict=True)]

    def _calls_of(self, name: str, who: str) -> list[int]:
        name = full_name(self.model, name)
        calls = [k for k, call in enumerate(self.flow.calls) if f"{call.unit}.".startswith(f"{name}.")]
        if not calls:
            called = dict.fromkeys(call.unit for call in self.flow.calls)
            raise PartitionError(unknown(who, name, type(self.model).__name__, called))
        return calls

    def _refuse_forbidden(self, counts: Sequence[int]) -> None:
        forbidden, edge = forbidden_cuts(self.flow), 0
        for count in counts[:-1]:
            edge += count
            if edge in forbidden:
                raise PartitionError(f"no cut is possible before unit {self.flow.calls[edge].unit}: {forbidden[edge]}")


PACKAGE = "pipeshard.policies"  # with the shipped ones
ENTRY_POINTS = "pipeshard.policies"  # the group; an entry point's name is a model type, its value a Policy
_REGISTRY: dict[str | type[nn.Module], type[Policy]] = {}
_SHIPPED: dict[str | type[nn.Module], type[Policy]] = {}
PolicyClass = TypeVar("PolicyClass", bound=type[Policy])


def register_policy(*keys: str | type[nn.Module], shipped: bool = False) -> Callable[[PolicyClass], PolicyClass]:
    """Class decorator: use this Policy for models of these classes or with these `config.model_type`s.

    It wins over entry points, and over the policies that are `shipped` with pipeshard.
    """

    def register(policy: PolicyClass) -> PolicyClass:
        (_SHIPPED if shipped else _REGISTRY).update(dict.fromkeys(keys, _checked(policy, "register_policy")))
        return policy

    return register


def find_policy(model: nn.Module) -> type[Policy]:
    """The policy registered for the model's class, one of its bases, or its `config.model_type`; else that of an
    installed package's entry point; else the one pipeshard ships; else Policy. For a PeftModel it is that of the model
    inside, unless one is registered for the PeftModel itself.

    Raises ConfigurationError for an entry point that does not load.
    """
    model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
    _, base = without_adapters(model)
    keys: tuple[Any, ...] = (*type(model).__mro__, *type(base).__mro__, model_type)
    registered = next((_REGISTRY[key] for key in keys if key in _REGISTRY), None)
    return registered or _advertised(model_type) or _shipped(model_type) or Policy


@cache
def _advertised(model_type: str) -> type[Policy] | None:
    points = {point.value: point for point in metadata.entry_points(group=ENTRY_POINTS, name=model_type)}
    if len(points) > 1:
        raise ConfigurationError(
            f"several packages offer a policy for {model_type!r}: {', '.join(points)}. Choose with register_policy"
        )
    for value, point in points.items():
        where = f"entry point {model_type} = {value} of group {ENTRY_POINTS}"
        try:
            policy = point.load()
        except Exception as error:
            raise ConfigurationError(
                f"{where} does not load ({type(error).__name__}: {error}): mend or remove the package that has it, or "
                "choose another policy with register_policy"
            ) from error
        return _checked(policy, where)
    return None


def _shipped(model_type: str) -> type[Policy] | None:
    if util.find_spec(PACKAGE):  # there is none in a source tree that is not installed
        importlib.import_module(PACKAGE)
    return _SHIPPED.get(model_type)


def _checked(policy: Any, who: str) -> type[Policy]:
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ConfigurationError(f"{who} wants a subclass of Policy, not {policy!r}")
    return policy


def refuse_backward_hooks(policy: Policy, around: Sequence[nn.Module], flow: Dataflow, outputs: Wanted) -> None:
    """Raise UsageError where a module has one whose gradients are not on one stage: one `around` units, or a unit of
    which a result that gets a gradient crosses a cut."""
    hooked = {module for module in (*around, *policy.units.values()) if _has_hooks(module)}
    if not hooked or len(policy.placement) == 1:
        return
    stages = policy.partition.of_calls(flow)
    crossing = {
        flow.calls[value.call].unit
        for boundary in boundaries(flow, stages, len(policy.placement), outputs)
        for value in boundary.gradients
    }
    hooked -= {unit for name, unit in policy.units.items() if name not in crossing}
    found = [(name, module) for name, module in policy.model.named_modules() if module in hooked]
    if found:
        name, module = found[0]
        where = "is cut into stages itself" if module in around else "gives a result to another stage"
        raise UsageError(
            f"{name or 'the model'} ({type(module).__name__}) has a backward hook (register_full_backward_hook, "
            f"register_full_backward_pre_hook), but {where}, so no stage has all the gradients that it is about: "
            "put the hook on a module inside of a unit, or cut elsewhere (the partition argument of PipelinePlugin)"
        )


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)
