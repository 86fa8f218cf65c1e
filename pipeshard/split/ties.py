"""Ties: parameters that are one tensor under several names, found by identity.

Architectures list their tied weights under names of their own, or not at all, and on meta or under adapters the lists
are out of date. That two names stand for one object is what trains them as one, so that is what counts here.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from pipeshard.errors import ConfigurationError, unknown

logger = logging.getLogger("pipeshard")


def names_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every name of each parameter, by its first name, in the order of registration."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {group[0]: tuple(group) for group in names.values()}


def first_names(model: nn.Module) -> dict[str, str]:
    """The first name of the parameter that each name stands for."""
    return {name: names[0] for names in names_of(model).values() for name in names}


@contextmanager
def kept_tied(model: nn.Module) -> Iterator[None]:
    """Where a parameter is replaced inside, under one of its names, all of its names have the new one afterwards."""
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
    """Make this the parameter of this one name."""
    path, _, key = name.rpartition(".")
    model.get_submodule(path)._parameters[key] = parameter


def share_weights(
    model: nn.Module, groups: Iterable[Sequence[str]], warns: bool = True, argument: str = "shared_weights"
) -> dict[nn.Parameter, nn.Parameter]:
    """Make the parameters of each group of names one: the first; returns what each of the others became.

    Groups that have a parameter in common are one. Where values differ the first ones stay; with `warns` it says so.
    Raises ConfigurationError that names the `argument`, for a name that no parameter has (with names that come close),
    and for shapes or dtypes that differ.
    """
    became: dict[nn.Parameter, nn.Parameter] = {}
    for names in groups:
        if isinstance(names, str) or len(names) < 2 or not all(isinstance(name, str) for name in names):
            raise ConfigurationError(
                f"shared_weights has {names!r}: give groups of two or more names, such as "
                "[('embed.weight', 'head.weight')]"
            )
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name in names:
            if name not in parameters:
                raise ConfigurationError(unknown(argument, name, type(model).__name__, parameters, "parameters"))
        first = parameters[names[0]]
        for name in names[1:]:
            if (other := parameters[name]) is not first:
                _refuse_unlike(names[0], first, name, other, argument)
                if warns and not (first.is_meta or other.is_meta) and not torch.equal(first.detach(), other.detach()):
                    logger.warning(
                        "%s: %s and %s have different values, those of %s stay", argument, names[0], name, names[0]
                    )
                with kept_tied(model):
                    put_parameter(model, name, first)
                became[other] = first
    return {old: _end(new, became) for old, new in became.items()}


def _end(parameter: nn.Parameter, became: Mapping[nn.Parameter, nn.Parameter]) -> nn.Parameter:
    while parameter in became:
        parameter = became[parameter]
    return parameter


def _refuse_unlike(first: str, kept: nn.Parameter, name: str, other: nn.Parameter, argument: str) -> None:
    if (kept.shape, kept.dtype) != (other.shape, other.dtype):
        raise ConfigurationError(
            f"{argument}: {first} is {tuple(kept.shape)} {kept.dtype}, {name} {tuple(other.shape)} {other.dtype}: "
            "only parameters of one shape and dtype can be one"
        )


def analyze_tied_weights(
    model: nn.Module, stages: Mapping[str, int] | None = None
) -> list[tuple[tuple[str, int], ...]]:
    """The groups of tied names, each a sorted tuple of (name, stage), sorted.

    `stages` gives the stage of a module (or parameter) by name; a name takes that of its nearest ancestor in it, and
    stage 0 without one. Works on meta, where `to_empty` has not yet lost the ties, and gives the same on every rank.
    """

    def stage(name: str) -> int:
        while name and name not in (stages or {}):
            name = name.rpartition(".")[0]
        return (stages or {}).get(name, 0)

    groups = [group for group in names_of(model).values() if len(group) > 1]
    return sorted(tuple(sorted((name, stage(name)) for name in group)) for group in groups)
