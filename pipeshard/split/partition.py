"""Partition: the assignment of unit calls to stages, by a rule or a list.

Splitting a list of layers into equal parts ignores the cost of embeddings and heads. Here, the default partition of a
Dataflow's calls minimizes the cost of the most expensive stage.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeGuard

from torch import nn

from pipeshard.errors import ConfigurationError, PartitionError, TraceError, counted
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.units import CutPoint
from pipeshard.hf import recomputes

Cuts = str | Sequence[int] | Sequence[str]  # a rule, the numbers of unit calls per stage, or the modules to cut after
# The cost of moving one element, in floating-point operations: about 5 per byte on a CPU core.
ELEMENT = 20.0


@dataclass(frozen=True)
class Partition:
    """The stage of every unit call. Calls are keyed by unit and occurrence, so that a partition also applies to batches
    with a different structure. `calls` maps each unit to its number of calls."""

    num_stages: int
    stages: Mapping[tuple[str, int], int]
    calls: Mapping[str, int]

    @classmethod
    def of(cls, flow: Dataflow, counts: Sequence[int]) -> Self:
        """Assign the first counts[0] calls of `flow` to stage 0, the next counts[1] calls to stage 1, and so on."""
        stages = itertools.chain.from_iterable([stage] * count for stage, count in enumerate(counts))
        calls = Counter(call.unit for call in flow.calls)
        return cls(len(counts), dict(zip(flow.occurrences, stages, strict=True)), calls)

    def of_calls(self, flow: Dataflow) -> tuple[int, ...]:
        """The stage of each call of `flow`. If `flow` contains more calls of a unit than this partition, the additional
        calls are on the stage of the unit's last known call.

        Raises TraceError if `flow` calls a unit that the partition does not contain, or if the calls are not in the
        order of their stages.
        """
        known = [(unit, min(k, self.calls.get(unit, 0) - 1)) for unit, k in flow.occurrences]
        new = [unit for unit, k in known if k < 0]
        stages = tuple(self.stages.get(key, 0) for key in known)
        falls = [k for k in range(1, len(stages)) if stages[k] < stages[k - 1]]
        if new or falls:
            places = [f"{unit} (on stage {stage})" for (unit, _), stage in zip(known, stages)]
            other = new[0] if new else f"{places[falls[0]]} after {places[falls[0] - 1]}"
            raise TraceError(
                f"the model calls {other}, unlike in the trace at boost. If this depends on the batch, pass "
                "dry_run_input=<a batch of this kind> to PipelinePlugin, or use only one kind of batch per boost. If "
                "it depends on the mode (train or eval) or on an attribute, call the same layers in the same order, or "
                "use one stage (pp_size=1)"
            )
        return stages


def named_modules_of(partition: Cuts) -> list[str]:
    """The module names in `partition` if it is a list, otherwise []."""
    return [] if isinstance(partition, str) else [entry for entry in partition if isinstance(entry, str)]


def is_profile(partition: Cuts) -> TypeGuard[str]:
    """Whether a partition uses measured times: "profile", or "profile:PATH"."""
    return isinstance(partition, str) and partition.partition(":")[0] == "profile"


def by_cost(partition: Cuts) -> bool:
    """Whether a partition balances the estimated or measured costs of unit calls."""
    return partition == "auto" or is_profile(partition)


def speeds_of(partition: Cuts, ranks: int | None = None) -> list[float] | None:
    """The relative speed of each rank in "speed:1.0,0.6", or None for other partitions.

    Raises ConfigurationError if the speeds are not positive, finite numbers, or if their number is not `ranks`.
    """
    name, _, listed = partition.partition(":") if isinstance(partition, str) else ("", "", "")
    if name != "speed":
        return None
    try:
        speeds = [float(speed) for speed in listed.split(",")]
    except ValueError:
        speeds = []
    if not speeds or not all(0 < speed < math.inf for speed in speeds):
        raise ConfigurationError(
            f"partition={partition!r}: speeds must be positive, finite numbers, one per rank, such as 'speed:1.0,0.6'"
        )
    if ranks not in (None, len(speeds)):
        raise ConfigurationError(
            f"partition={partition!r} has {counted(len(speeds), 'speed')} for "
            f"{counted(ranks, 'rank')}: pass one speed per rank"
        )
    return speeds


class Cost(NamedTuple):
    """The times of one unit call. `weight` is the time of the weight gradients that can be deferred, and `backward` is
    the time of the rest of the backward pass."""

    forward: float
    backward: float
    weight: float


def cost_of(
    flops: float,
    elements: float,
    parameters: int,
    waiting_flops: float = 0.0,
    waiting_parameters: int = 0,
    frozen_flops: float = 0.0,
    recomputed: bool = False,
) -> Cost:
    """The relative times of a unit call, in floating-point operations, estimated from the `flops` and the number of
    computed `elements` of one forward.

    Flops and elements count three times (forward, input gradient, weight gradient), or four times if the forward is
    recomputed. An element counts as `ELEMENT` operations. A trainable parameter counts as 2 * `ELEMENT` operations,
    since its gradient is written and accumulated. The gradient is the main cost of an embedding. The `waiting_`
    arguments are the flops and parameters of layers whose weight gradients can be deferred. `frozen_flops` are the
    operations that are saved because some parameters have no gradient.
    """
    once = flops + ELEMENT * elements
    weight = waiting_flops + 2 * ELEMENT * waiting_parameters
    backward = (3 if recomputed else 2) * once + 2 * ELEMENT * parameters - frozen_flops
    return Cost(once, backward - weight, weight)


def call_costs(flow: Dataflow, units: Mapping[str, nn.Module], scale: float = 1.0) -> list[float]:
    """The relative time of each call, forward plus backward. `scale` is the size of a microbatch relative to the traced
    batch."""
    costs = []
    for call in flow.calls:
        unit = units[call.unit]
        trainable = sum(p.numel() for p in unit.parameters() if p.requires_grad)
        costs.append(sum(cost_of(scale * call.flops, scale * call.elements, trainable, recomputed=recomputes(unit))))
    return costs


PARTITIONS = ("auto", "uniform", "parameters", "profile", "profile:PATH", "type:REGEX", "speed:1.0,0.6")


def weights(by: str, units: Sequence[nn.Module], costs: Callable[[], list[float]], num_stages: int) -> list[float]:
    """The weight of each unit call, for `balance`. `by` is a rule, `units` contains the unit of each call, and
    `costs` returns the times of the calls.

    Raises ConfigurationError for an unknown rule, invalid speeds or an invalid regular expression. Raises
    PartitionError if the regular expression matches fewer unit calls than there are stages.
    """
    check_partition(by)
    if by_cost(by) or speeds_of(by):
        return costs()
    if by == "uniform":
        return [float(not isinstance(unit, CutPoint)) for unit in units]
    if by == "parameters":
        return [float(sum(p.numel() for p in unit.parameters())) for unit in units]
    return _of_type(by.partition(":")[2], units, num_stages)


def check_partition(by: Cuts) -> None:
    """Raise ConfigurationError if `by` is an unknown rule."""
    if isinstance(by, str) and by not in PARTITIONS[:4] and not re.fullmatch("(profile|type|speed):.+", by):
        raise ConfigurationError(f"partition={by!r} is unknown: use one of {PARTITIONS} or a list")


def type_name(unit: nn.Module) -> str:
    """The name of a unit's class, or of the function or module that the unit wraps (`pipeshard_type`)."""
    return str(getattr(unit, "pipeshard_type", type(unit).__name__))


def _of_type(pattern: str, units: Sequence[nn.Module], num_stages: int) -> list[float]:
    """1 for each unit whose type name matches the pattern, and 0 for all other units."""
    try:
        matches = [bool(re.search(pattern, type_name(unit), re.IGNORECASE)) for unit in units]
    except re.error as error:
        raise ConfigurationError(f"partition='type:{pattern}' is not a regular expression: {error}") from error
    if sum(matches) < num_stages:
        classes = ", ".join(sorted(set(map(type_name, units))))
        raise PartitionError(
            f"partition='type:{pattern}' matches {counted(sum(matches), 'unit call')}, too few for "
            f"{counted(num_stages, 'stage')}. Choose a pattern that matches more of the units' classes: {classes}"
        )
    return [float(match) for match in matches]
