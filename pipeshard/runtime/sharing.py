"""Sharing: which ranks hold the same parameter, and so add up its gradients."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from pipeshard.grid import Grid
from pipeshard.runtime.agreement import gather_objects
from pipeshard.runtime.gradients import Sharing


def sharings(
    grid: Grid,
    parameters: Mapping[str, nn.Parameter],
    holders: Mapping[str, Sequence[int]],
    users: Callable[[str], Collection[int]],
    axes: Callable[[str], Sequence[int]],
) -> list[Sharing]:
    """Those of this rank, which holds `parameters`; every rank of the world calls it.

    `holders` has the stages (places in the pipeline) of each parameter, `users` says which of this rank's virtual
    stages use one, `axes` along which axes of the mesh, beside that of the stages, its gradients are added up.
    """
    keys = {name: (tuple(axes(name)), tuple(holders[name])) for name in parameters}
    wanted = sorted(set().union(*gather_objects(set(keys.values()), grid.world)))
    groups = {key: grid.sharing(*key) for key in wanted}  # made by all ranks in one order
    bundles: dict[tuple[Any, frozenset[int]], dict[str, nn.Parameter]] = {}
    for name, key in keys.items():
        # What stages tie is summed at the end of a step, in one bundle: its holders use it on different stages.
        stages = frozenset(users(name)) if len(key[1]) < 2 else frozenset()
        bundles.setdefault((key, stages), {})[name] = parameters[name]
    found = []
    for (key, stages), bundle in sorted(bundles.items(), key=lambda item: (item[0][0], sorted(item[0][1]))):
        group = groups[key]
        if group is not None and group.size() > 1:
            found.append(Sharing(bundle, group, stages, tie=len(key[1]) > 1))
    return found
