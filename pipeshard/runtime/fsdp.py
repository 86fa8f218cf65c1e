"""FSDP: the held units of a stage, each divided among the replicas by torch's fully_shard."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from pipeshard.errors import ConfigurationError


class ShardedUnits:
    """`units` divided among the ranks of `mesh`; those that share a parameter, as one.

    A unit's parameters are gathered in its first forward of a step, stay whole for all microbatches, and are let go of
    at the step's end. Gradients pile up whole, and are reduced and scattered once, when the unit's stage is done with
    the step (as torch.distributed.pipelining does it): `used[name]` are the stages of this rank that run a unit.
    Parameters in `apart`, which glue reads too, stay whole.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        used: Mapping[str, frozenset[int]],
        mesh: DeviceMesh,
        dtype: torch.dtype | None,
        apart: set[nn.Parameter],
    ) -> None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
        self.groups: list[tuple[FSDPModule, frozenset[int]]] = []
        for names in _sharing(units):
            modules = [units[name] for name in names if any(p not in apart for p in units[name].parameters())]
            if not modules:
                continue
            whole: Any = modules if len(modules) > 1 else modules[0]
            ignored = apart & {p for module in modules for p in module.parameters()}
            fully_shard(whole, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=ignored or None)
            first: Any = modules[0]
            first.set_force_sum_reduction_for_comms(True)
            first.set_gradient_divide_factor(1.0)
            if not hasattr(first, "set_reduce_scatter_unused_params"):
                raise ConfigurationError(f"fsdp=True needs torch 2.13 or newer, this is {torch.__version__}")
            first.set_reduce_scatter_unused_params(True)
            self.groups.append((first, frozenset().union(*(used[name] for name in names))))
        self._done: set[int] = set()
        self._waiting: list[tuple[FSDPModule, frozenset[int]]] = []
        self._hold()

    def begin(self) -> None:
        self._done, self._waiting = set(), list(self.groups)

    def stage_done(self, stage: int) -> None:
        """Reduce and scatter the gradients of the units that no stage of this rank runs any more."""
        self._done.add(stage)
        for group in [group for group in self._waiting if group[1] <= self._done]:
            self._waiting.remove(group)
            self._reduce(group[0])

    def finish(self, sync: bool) -> None:
        """After a step: reduce what is left, if it is to be, and let go of whole parameters."""
        for module, _ in self._waiting if sync else ():
            self._reduce(module)
        self._waiting = []
        for module, _ in self.groups:
            module.reshard()

    def _reduce(self, module: FSDPModule) -> None:
        module.set_is_last_backward(True)
        module.set_requires_gradient_sync(True)
        state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
        for group in state._fsdp_param_groups:
            group.post_backward()
        state._root_post_backward_final_callback()
        self._hold(module)

    def _hold(self, *modules: FSDPModule) -> None:
        """Until further notice, backward passes keep what they add up to themselves."""
        for module in modules or [module for module, _ in self.groups]:
            module.set_is_last_backward(False)
            module.set_reshard_after_backward(False)
            module.set_requires_gradient_sync(False)


def _sharing(units: Mapping[str, nn.Module]) -> list[list[str]]:
    """The names of the units, those that have a parameter in common together."""
    groups: list[tuple[list[str], set[nn.Parameter]]] = []
    for name, unit in units.items():
        names, parameters = [name], set(unit.parameters())
        for group in [group for group in groups if group[1] & parameters]:
            groups.remove(group)
            names, parameters = group[0] + names, group[1] | parameters
        groups.append((names, parameters))
    return [names for names, _ in groups]


