"""FSDP: the held units of a stage, each divided among the replicas by torch's fully_shard."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from pipeshard.errors import ConfigurationError, UsageError


class ShardedUnits:
    """`units` divided among the ranks of `mesh`; those that share a parameter, as one.

    Parameters are gathered at the beginning of a step, stay whole for all microbatches, and are let go of at its end.
    Gradients pile up whole, and are reduced and scattered once, when the unit's stage is done with the step: `used` has
    the stages of this rank that run each unit. Torch's own hooks, which would do that around every call of a unit, are
    taken off; what they would call is called here, as in torch.distributed.pipelining. Parameters in `apart`, which
    glue reads too, stay whole.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        used: Mapping[str, frozenset[int]],
        mesh: DeviceMesh,
        dtype: torch.dtype | None,
        apart: set[nn.Parameter],
    ) -> None:
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ConfigurationError(f"fsdp=True needs torch 2.13 or newer, this is torch {torch.__version__}")
        options: Any = {"mesh": mesh, "reshard_after_forward": False}
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
        self.groups: list[tuple[Any, frozenset[int]]] = []
        self.lowers = dtype is not None
        for names in _sharing(units):
            modules = [units[name] for name in names]
            if any(p not in apart for module in modules for p in module.parameters()):
                ignored = apart & {p for module in modules for p in module.parameters()}
                fully_shard(modules if len(modules) > 1 else modules[0], ignored_params=ignored or None, **options)
                self.groups.append((modules[0], frozenset().union(*(used[name] for name in names))))
        self.root: Any = fully_shard(_Root(units.values()), ignored_params=apart or None, **options)
        for module, _ in self.groups:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            module.set_reduce_scatter_unused_params(True)
        for module in (self.root, *(module for module, _ in self.groups)):
            _state(module)._pre_forward_hook_handle.remove()
            getattr(_state(module), "_post_forward_hook_handle", module).remove()
        _state(self.root)._lazy_init()
        self._waiting: list[tuple[Any, frozenset[int]]] = []

    def begin(self) -> None:
        """Gather the parameters."""
        self._waiting = list(self.groups)
        handles = [module.unshard(async_op=True) for module, _ in self.groups]
        for handle in handles:
            handle.wait()
        for parameter in self._parameters(self.groups) if self.lowers else ():  # 16 bits would lose what is added up
            parameter._unsharded_param.grad_dtype = torch.float32

    def stages_done(self, stages: Set[int]) -> None:
        """Reduce and scatter the gradients of the units that none but these stages of this rank run."""
        self._reduce([group for group in self._waiting if group[1] <= stages])

    def finish(self, sync: bool) -> None:
        """After a step: reduce what is left, if it is to be, and let go of whole parameters."""
        if sync:
            self._reduce(list(self._waiting))
            self.root.set_is_last_backward(True)
            _state(self.root)._root_post_backward_final_callback()
        for module, _ in self.groups:
            module.reshard()

    def reset(self, parameters: Collection[nn.Parameter]) -> None:
        """Forget the gradients of these that were not reduced."""
        for parameter in [p for p in self._parameters(self.groups) if p.sharded_param in parameters]:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None

    def _reduce(self, groups: list[tuple[Any, frozenset[int]]]) -> None:
        for parameter in self._parameters(groups) if self.lowers else ():  # torch would fill in zeros of 16 bits
            own = parameter._unsharded_param
            if own.requires_grad and own.grad is None:
                own.grad = torch.zeros_like(own, dtype=torch.float32)
        for module, stages in groups:
            self._waiting.remove((module, stages))
            for group in _state(module)._fsdp_param_groups:
                group.post_backward()

    @staticmethod
    def _parameters(groups: Iterable[tuple[Any, frozenset[int]]]) -> Iterator[Any]:
        """Torch's own objects of the divided parameters."""
        for module, _ in groups:
            for group in _state(module)._fsdp_param_groups:
                yield from group.fsdp_params


class _Root(nn.Module):
    """The units around which torch keeps what they have in common."""

    def __init__(self, units: Iterable[nn.Module]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self) -> None:
        raise UsageError("the units of a stage are called one by one")


def _state(module: Any) -> Any:
    return fully_shard.state(module)  # type: ignore[attr-defined]


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


@contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Inside, sharded modules are of the class that they were of, which can be copied."""
    sharded = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    for module, kind in sharded:
        module.__class__ = kind.__mro__[2]
    try:
        yield
    finally:
        for module, kind in sharded:
            module.__class__ = kind


def additions(module: nn.Module) -> Iterator[Any]:
    """What fully_shard has put on a module, which is not to be copied with it."""
    for key, value in module.__dict__.items():
        if key.startswith("__composable_api_state_key"):
            yield value
        elif key.endswith("_hooks") and isinstance(value, dict):
            yield from filter(_is_torchs, value.values())


def remove_additions(module: nn.Module) -> None:
    """Make a copy of a sharded module an ordinary one."""
    for key, value in list(module.__dict__.items()):
        if key.startswith("__composable_api_state_key") or key in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            del module.__dict__[key]
        elif key.endswith("_hooks") and isinstance(value, dict):
            for handle in [handle for handle, hook in value.items() if _is_torchs(hook)]:
                del value[handle]


def _is_torchs(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.fsdp")
