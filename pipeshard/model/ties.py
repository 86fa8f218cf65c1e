"""Ties: parameters that are one tensor under several names, found by identity."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn


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
