"""Weights: what a partition that is given by name makes as equal as possible on all stages."""

import re
from collections.abc import Callable, Sequence

from torch import nn

from pipeshard.errors import ConfigurationError, PartitionError
from pipeshard.model.cutpoint import CutPoint
from pipeshard.model.partition import Cuts

PARTITIONS = ("auto", "uniform", "parameters", "profile", "profile:PATH", "type:REGEX")


def weights(by: str, units: Sequence[nn.Module], costs: Callable[[], list[float]], num_stages: int) -> list[float]:
    """The weight of each unit call, where `units` has the unit of each and `costs` tells their times.

    Raises ConfigurationError for an unknown name, PartitionError for a type that too few units have.
    """
    check_partition(by)
    kind, _, detail = by.partition(":")
    if by == "auto" or kind == "profile":
        return costs()
    if by == "uniform":
        return [float(not isinstance(unit, CutPoint)) for unit in units]
    if by == "parameters":
        return [float(sum(p.numel() for p in unit.parameters())) for unit in units]
    return _of_type(detail, units, num_stages)


def check_partition(by: Cuts) -> None:
    """Raises ConfigurationError for an unknown name."""
    if isinstance(by, str) and by not in PARTITIONS[:4] and not re.fullmatch("(profile|type):.+", by):
        raise ConfigurationError(f"partition={by!r} is unknown: use one of {PARTITIONS}, or a list")


def type_name(unit: nn.Module) -> str:
    """The name of a unit's class, or of the function or the module that it stands for (`pipeshard_type`)."""
    return str(getattr(unit, "pipeshard_type", type(unit).__name__))


def _of_type(pattern: str, units: Sequence[nn.Module], num_stages: int) -> list[float]:
    """1 for each unit whose class the pattern matches, 0 for the others."""
    try:
        matches = [bool(re.search(pattern, type_name(unit), re.IGNORECASE)) for unit in units]
    except re.error as error:
        raise ConfigurationError(f"partition='type:{pattern}' is no regular expression: {error}") from error
    if sum(matches) < num_stages:
        classes = ", ".join(sorted(set(map(type_name, units))))
        raise PartitionError(
            f"partition='type:{pattern}' matches {sum(matches)} unit calls, which is too few for {num_stages} stages: "
            f"the units' classes are {classes}"
        )
    return [float(match) for match in matches]
