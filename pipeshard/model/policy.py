"""Policy: what a stage holds and runs; the base class derives all of it from the Dataflow."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from pipeshard.errors import ConfigurationError, PartitionError, TraceError
from pipeshard.model.dataflow import Dataflow
from pipeshard.model.partition import Partition, balance, call_costs, forbidden_cuts, held_parameters
from pipeshard.model.replay import Replay
from pipeshard.model.units import find_units, intercept

PARTITIONS = ("auto", "uniform", "parameters")


class Policy:
    """The four questions a sharder asks, answered for one stage of one model.

    Override a method for what the trace cannot know; most architectures need no policy of their own. `partition` is
    "auto" (by cost), "uniform" (equally many units), "parameters", how many unit calls each stage gets, or the units
    to cut after. `scale` is the size of a microbatch over that of the trace.
    """

    def __init__(
        self,
        model: nn.Module,
        flow: Dataflow,
        stage: int,
        num_stages: int,
        partition: str | Sequence[int] | Sequence[str] = "auto",
        scale: float = 1.0,
        device: torch.device | None = None,
    ) -> None:
        self.model, self.flow, self.stage, self.num_stages = model, flow, stage, num_stages
        self.partition_by, self.scale = partition, scale
        self.units = find_units(model)
        self.refuse_decisions(flow)
        counts = self.distribute_layers(len(flow.calls), num_stages)
        if len(counts) != num_stages or sum(counts) != len(flow.calls) or min(counts) < 1:
            raise PartitionError(
                f"partition {list(counts)} does not give each of {num_stages} stages at least one of the model's "
                f"{len(flow.calls)} unit calls: {[call.unit for call in flow.calls]}"
            )
        self.partition = Partition.of(flow, counts)
        self.stages = self.partition.of_calls(flow)
        self._refuse_forbidden(counts)
        self.held = held_parameters(model, flow, self.stages, self.units, num_stages)
        running = {call.unit for call, s in zip(flow.calls, self.stages, strict=True) if s == stage}
        self.replay = Replay(self.units, frozenset(running), stage, device or torch.device("cpu"))

    def refuse_decisions(self, flow: Dataflow) -> None:
        """Refuse glue that branches on an activation: only the stage that has it could take the right way."""
        if flow.decisions and self.num_stages > 1:
            raise TraceError(
                f"{type(self.model).__name__} decides in Python on a value of a unit, which only its stage has: "
                f"{'; '.join(flow.decisions)}. Compute it with tensor operations (torch.where), or inside a unit"
            )

    def costs(self) -> list[float]:
        """Relative time of each unit call."""
        return call_costs(self.flow, self.units, self.scale)

    def distribute_layers(self, num_layers: int, num_stages: int) -> list[int]:
        """How many of the `num_layers` unit calls, in their order, each stage runs."""
        by, forbidden = self.partition_by, forbidden_cuts(self.flow)
        if isinstance(by, str):
            if by not in PARTITIONS:
                raise ConfigurationError(f"partition={by!r} is unknown: use one of {PARTITIONS}, or a list")
            weights = {
                "auto": self.costs,
                "uniform": lambda: [1.0] * num_layers,
                "parameters": lambda: [
                    float(sum(p.numel() for p in self.units[c.unit].parameters())) for c in self.flow.calls
                ],
            }[by]()
            return balance(weights, num_stages, forbidden)
        if all(isinstance(entry, int) for entry in by):
            return [int(entry) for entry in by]
        return self._counts_after([str(entry) for entry in by])

    def get_held_layers(self) -> list[nn.Module]:
        """The units this stage runs, in the order of registration."""
        return [unit for name, unit in self.units.items() if name in self.replay.held]

    def get_shared_params(self) -> list[dict[int, nn.Parameter]]:
        """One entry per parameter several stages hold: stage -> parameter, in the same order on every rank."""
        parameters = dict(self.model.named_parameters())
        return [dict.fromkeys(holders, parameters[name]) for name, holders in self.shared_names().items()]

    def shared_names(self) -> dict[str, list[int]]:
        """The stages of every parameter that more than one holds."""
        names = sorted(set().union(*self.held))
        holders = {name: [s for s in range(self.num_stages) if name in self.held[s]] for name in names}
        return {name: stages for name, stages in holders.items() if len(stages) > 1}

    def replace_forward(self) -> None:
        """Make held units run and the others replay."""
        for interception in intercept(self.units):
            interception.handler = self.replay

    def _counts_after(self, names: list[str]) -> list[int]:
        calls = [call.unit for call in self.flow.calls]
        unknown = [name for name in names if name not in calls]
        if unknown:
            raise PartitionError(f"partition names {unknown[0]}, which is no unit the model calls: {calls}")
        ends = sorted(len(calls) - calls[::-1].index(name) for name in names)
        return [b - a for a, b in zip([0, *ends], [*ends, len(calls)], strict=True)]

    def _refuse_forbidden(self, counts: Sequence[int]) -> None:
        forbidden, edge = forbidden_cuts(self.flow), 0
        for count in counts[:-1]:
            edge += count
            if edge in forbidden:
                raise PartitionError(f"no cut is possible before unit {self.flow.calls[edge].unit}: {forbidden[edge]}")


_REGISTRY: dict[str | type[nn.Module], type[Policy]] = {}
PolicyClass = TypeVar("PolicyClass", bound=type[Policy])


def register_policy(*keys: str | type[nn.Module]) -> Callable[[PolicyClass], PolicyClass]:
    """Class decorator: use this Policy for models of these classes or with these `config.model_type`s."""

    def register(policy: PolicyClass) -> PolicyClass:
        if not (isinstance(policy, type) and issubclass(policy, Policy)):
            raise ConfigurationError(f"register_policy wants a subclass of Policy, not {policy!r}")
        _REGISTRY.update(dict.fromkeys(keys, policy))
        return policy

    return register


def find_policy(model: nn.Module) -> type[Policy]:
    """The policy registered for the model's class, one of its bases, or its `config.model_type`; else Policy."""
    model_type: Any = getattr(getattr(model, "config", None), "model_type", None)
    keys: list[Any] = [*type(model).__mro__, model_type]
    return next((_REGISTRY[key] for key in keys if key in _REGISTRY), Policy)
