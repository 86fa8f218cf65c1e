"""FSDP: shards the held units of a stage across the replicas, with torch's fully_shard.

torch gathers parameters and reduces gradients in hooks that run before and after every forward and backward. After its
last unit, a pipeline stage leaves the model's forward with an exception, so later hooks do not run. The stage may also
run other microbatches between a microbatch's forward and backward. So this module removes the hooks, and gathers and
reduces once per step, as torch.distributed.pipelining does. The functions at the top wrap torch's private FSDP APIs.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from pipeshard.errors import UsageError

# Attributes that fully_shard sets on a module.
FSDP_ATTRIBUTES = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")
MODULES = "torch.distributed.fsdp"  # the package that defines fully_shard's hooks


def _fsdp_state(module: Any) -> Any:
    return fully_shard.state(module)  # type: ignore[attr-defined]


def _remove_hooks(module: Any) -> None:
    _fsdp_state(module)._pre_forward_hook_handle.remove()
    if (handle := getattr(_fsdp_state(module), "_post_forward_hook_handle", None)) is not None:
        handle.remove()


def _fsdp_parameters(module: Any) -> Iterator[Any]:
    """Yield the module's FSDPParam objects. Callers use the attributes `sharded_param`, `_unsharded_param` and
    `unsharded_accumulated_grad` of these objects."""
    yield from _fsdp_state(module)._fsdp_param_group.fsdp_params


def _post_backward(module: Any, keeps_fp32: bool) -> None:
    """Start the reduce-scatter of the module's gradients. With `keeps_fp32`, the gradients of 16-bit shards (of
    parameters that were frozen at boost) also stay in fp32."""
    group = _fsdp_state(module)._fsdp_param_group
    if keeps_fp32:
        group._orig_dtype = None
    group.post_backward()


def _forget_gradient(parameter: Any) -> None:
    parameter.unsharded_accumulated_grad = None
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None


class ShardedUnits:
    """Shards `units` across the ranks of `mesh`. Units that share a parameter form one FSDP group.

    Parameters are gathered at the beginning of a step, stay unsharded for all microbatches, and are resharded at the
    end of the step. A unit's gradients accumulate unsharded, and are reduce-scattered once per step, when all stages of
    this rank that run the unit have finished. `used` maps each unit's name to these stages. With `dtype`, units compute
    in this dtype, and gradients are accumulated and reduced in fp32. Parameters in `apart` are not sharded, for example
    because glue also reads them.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        used: Mapping[str, frozenset[int]],
        mesh: DeviceMesh,
        dtype: torch.dtype | None,
        apart: set[nn.Parameter],
    ) -> None:
        options: Any = {"mesh": mesh, "reshard_after_forward": False}
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
        self.groups: dict[Any, frozenset[int]] = {}  # by module with a group's FSDP state: the group's stages
        self.casts = dtype is not None
        for names in _sharing(units):
            modules = [units[name] for name in names]
            parameters = {parameter for module in modules for parameter in module.parameters()}
            if parameters - apart:
                fully_shard(
                    modules if len(modules) > 1 else modules[0], ignored_params=apart & parameters or None, **options
                )
                self.groups[modules[0]] = frozenset().union(*(used[name] for name in names))
        self.root: Any = fully_shard(_Root(units.values()), ignored_params=apart or None, **options)
        for module in self.groups:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        for module in (self.root, *self.groups):
            _remove_hooks(module)
        _fsdp_state(self.root)._lazy_init()
        self._waiting: list[Any] = []  # groups whose gradients have not been reduced in this step

    @property
    def parameters(self) -> frozenset[nn.Parameter]:
        """The parameters that are sharded."""
        return frozenset(parameter.sharded_param for parameter in self._all_parameters())

    def mixed(self) -> set[nn.Parameter]:
        """The trained shards that are not in fp32, in groups whose trained shards have several dtypes."""
        found: set[nn.Parameter] = set()
        for module in self.groups:
            trained = {shard for p in _fsdp_parameters(module) if (shard := p.sharded_param).requires_grad}
            if len({shard.dtype for shard in trained}) > 1:
                found |= {shard for shard in trained if shard.dtype is not torch.float32}
        return found

    def begin(self) -> None:
        """Begin a step: gather the parameters."""
        self._waiting = list(self.groups)
        gathers: deque[Any] = deque()
        for module in self.groups:  # two at a time: each all-gather needs twice the memory of the unit
            if len(gathers) == 2:
                gathers.popleft().wait()
            gathers.append(module.unshard(async_op=True))
        for gather in gathers:
            gather.wait()
        for parameter in self._all_parameters() if self.casts else ():  # 16-bit accumulation would lose precision
            parameter._unsharded_param.grad_dtype = torch.float32

    def stages_done(self, stages: Set[int]) -> None:
        """Start to reduce-scatter the gradients of each unit whose stages on this rank are all in `stages`, the stages
        that have finished."""
        self._reduce([module for module in self._waiting if self.groups[module] <= stages])

    def finish(self, sync: bool) -> None:
        """End a training step: reduce-scatter the remaining gradients if `sync`, and reshard the parameters."""
        if sync:
            self._reduce(list(self._waiting))
            self.root.set_is_last_backward(True)
            _fsdp_state(self.root)._root_post_backward_final_callback()
        for module in self.groups if not sync else ():
            self._fill(module)  # now: parameters may be frozen before these gradients are reduced
        self.reshard()

    def reshard(self) -> None:
        """Reshard the parameters at the end of a step."""
        for module in self.groups:
            module.reshard()

    def reset(self, parameters: Collection[nn.Parameter]) -> None:
        """Discard the unreduced gradients of these parameters."""
        for parameter in self._all_parameters():
            if parameter.sharded_param in parameters:
                _forget_gradient(parameter)

    def _reduce(self, modules: Collection[Any]) -> None:
        for module in modules:
            self._fill(module)
            self._waiting.remove(module)
            _post_backward(module, self.casts)

    def _fill(self, module: Any) -> None:
        """Convert sparse gradients to dense gradients, and replace missing gradients with zeros. torch reduces only
        dense gradients, and would skip a missing gradient on this replica but not on the others."""
        for parameter in _fsdp_parameters(module):
            unsharded = parameter._unsharded_param
            if unsharded.requires_grad and unsharded.grad is None:
                unsharded.grad = torch.zeros_like(unsharded, dtype=torch.float32 if self.casts else None)
            elif unsharded.grad is not None and unsharded.grad.is_sparse:
                unsharded.grad = unsharded.grad.to_dense()

    def _all_parameters(self) -> Iterator[Any]:
        for module in self.groups:
            yield from _fsdp_parameters(module)


class _Root(nn.Module):
    """The parent module of the units, with the FSDP state that all units share."""

    def __init__(self, units: Iterable[nn.Module]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self) -> None:
        raise UsageError("the root module of a sharded stage cannot be called: call the units of the stage one by one")


def _sharing(units: Mapping[str, nn.Module]) -> list[list[str]]:
    """Divide the units into groups, so that units that share a parameter are in one group. Returns each group's unit
    names."""
    groups: list[tuple[list[str], set[nn.Parameter]]] = []
    for name, unit in units.items():
        names, parameters = [name], set(unit.parameters())
        for group in [group for group in groups if group[1] & parameters]:
            groups.remove(group)
            names, parameters = group[0] + names, group[1] | parameters
        groups.append((names, parameters))
    return [names for names, _ in groups]


@contextmanager
def unsharded_classes(model: nn.Module) -> Iterator[None]:
    """Context manager that restores the original classes of sharded modules, so that the modules can be copied."""
    sharded = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    for module, kind in sharded:
        module.__class__ = kind.__mro__[2]
    try:
        yield
    finally:
        for module, kind in sharded:
            module.__class__ = kind


def fsdp_additions(module: nn.Module) -> list[Any]:
    """The attribute values and hooks that fully_shard has added to a module. A copy of the module must not contain
    these additions."""
    return [values[key] for values, key in _additions(module)]


def remove_fsdp(module: nn.Module) -> None:
    """Remove the additions of fully_shard from a copy of a sharded module."""
    for values, key in _additions(module):
        del values[key]


def _additions(module: nn.Module) -> list[tuple[dict[Any, Any], Any]]:
    """The attributes and hooks that fully_shard has added to the module, each as a (dict, key) pair."""
    attributes = module.__dict__
    hooks = [value for key, value in attributes.items() if key.endswith("_hooks") and isinstance(value, dict)]
    return [(attributes, key) for key in attributes if key.startswith(FSDP_ATTRIBUTES)] + [
        (values, key) for values in hooks for key, hook in values.items() if _is_torchs(hook)
    ]


def _is_torchs(hook: Callable[..., Any]) -> bool:
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith(MODULES)
