"""Parameters: those of this rank, the form that they have here, who shares them, and where they have to stay."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.distributed.collectives import gather_objects, is_packed, share_tensor
from pipeshard.distributed.mesh import DP, TP, Grid
from pipeshard.engine.fsdp import ShardedUnits
from pipeshard.engine.grad_sync import GradientSync, Sharing, has_hooks, sharings
from pipeshard.engine.mixed_precision import Precision, Weight
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.split.initialize import InitWeights, initialize
from pipeshard.split.materialize import is_released
from pipeshard.split.policy import Policy
from pipeshard.split.tensor_parallel import slice_parameters
from pipeshard.split.ties import kept_tied, put_parameter


class Holdings:
    """Brings the parameters that a sharded `model` holds into their form here; made by every rank at the same time.

    All holders get the values of one. Then parameters are lowered to 16 bits where `precision` says so, sliced
    over the ranks along TP by a `plan`, and with `fsdp` divided over the replicas.

    Attributes:
        held: the parameters now, by their first names.
        weights: what an optimizer trains for each parameter, by the parameter as it was and as it is.
        sync: what adds up their gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        grid: Grid,
        precision: Precision,
        fsdp: bool,
        plan: Mapping[str, str] | None = None,
    ) -> None:
        self.model, self.policy, self.grid = model, policy, grid
        self.units = policy.held_units
        before = self.held = {name: p for name, p in model.named_parameters() if not is_released(p)}
        self._share_values()
        lowered = precision.lowered(model)
        self.kept = {name for name, p in model.named_parameters() if p not in lowered} if precision.lowers else set()
        full = precision.lower(lowered - self._in_units() if fsdp else lowered)
        self.partial = slice_parameters(model, before, self.units, grid.mesh.along(TP), plan) if plan else set()
        dtype = precision.dtype if precision.lowers else None
        self._refuse_packed(fsdp)
        self.sharded = self._sharded(dtype) if fsdp and grid.dp_size > 1 else None
        now = dict(model.named_parameters())
        self.held = {name: now[name] for name in before}
        is_divided = self.sharded is not None and dtype is not None
        for parameter in [p for name, p in self.held.items() if name not in self.kept] if is_divided else ():
            parameter.pipeshard_dtype = dtype  # type: ignore[attr-defined]  # that in which it is computed with, for later traces
        lost = [name for name, parameter in before.items() if now[name] is not parameter and has_hooks(parameter)]
        if lost := [name for names in gather_objects(lost, grid.world) for name in names]:
            raise ConfigurationError(
                f"{lost[0]} has a gradient hook, but fsdp and tp_size > 1 make another parameter of it: remove the "
                "hook, and change gradients between execute_pipeline and optimizer.step"
            )
        self.weights = self._weights(before, full)
        sliced = [parameter for parameter in self.held.values() if grid.divides(parameter, TP)]
        self.sync = GradientSync(self._sharings(self._added_along), sliced, self.sharded)

    def draw(self, names: Sequence[str], rule: InitWeights, seed: int) -> None:
        """Give those of these parameters that are held what `rule` draws."""
        shaped = [self.weights[self.held[name]] for name in names if name in self.held]
        with kept_tied(self.model):  # whole and in full precision, as they would be drawn without all this
            for weight in shaped:
                if not weight.plain:
                    whole = torch.empty(weight.parameter.shape, device=weight.parameter.device)
                    put_parameter(self.model, weight.name, nn.Parameter(whole, weight.parameter.requires_grad))
        initialize(self.model, [weight.name for weight in shaped], {}, rule, seed)
        drawn = {weight.name: self.model.get_parameter(weight.name) for weight in shaped if not weight.plain}
        with kept_tied(self.model):
            for weight in shaped:
                if weight.name in drawn:
                    weight.set(drawn[weight.name].detach())
                    put_parameter(self.model, weight.name, weight.parameter)

    def _refuse_packed(self, fsdp: bool) -> None:
        """torch divides a slice over replicas as if it were in one place."""
        packed = [name for name, parameter in self.model.named_parameters() if is_packed(parameter)]
        if fsdp and self.grid.dp_size > 1 and packed:
            raise ConfigurationError(
                f"{packed[0]} holds several weights at once, each of which tp_size={self.grid.tp_size} slices: "
                "fsdp=True cannot divide that over replicas. Use zero_stage=1, or tp_size=1"
            )

    def _share_values(self) -> None:
        for sharing in self._sharings(lambda name: (DP, TP)):
            for name, parameter in sharing.parameters.items():
                source = self.policy.ownership.initializer(name)
                share_tensor(parameter.data, sharing.group, self.grid.at(source, sharing.group))
        copies = self.grid.sharing((DP, TP), ())
        for buffer in self.model.buffers():
            share_tensor(buffer, copies)

    def _sharings(self, axes: Callable[[str], Sequence[int]]) -> list[Sharing]:
        """Which ranks share each parameter along these axes and over the stages that hold it."""
        policy = self.policy
        stages = {name: policy.ownership.holders(name) for name in self.held}
        parts = {name: [s for s in policy.chunks if name in policy.ownership.held_by_parts[s]] for name in self.held}
        return sharings(self.grid, self.held, stages, parts.__getitem__, axes)

    def _in_units(self) -> set[nn.Parameter]:
        """The parameters of held units that glue does not read, and that are not kept in a precision of their own."""
        now = dict(self.model.named_parameters())
        apart = {now[name] for use in self.policy.flow.uses() for name in use.parameters}
        apart |= {now[name] for name in self.kept}
        return {p for unit in self.units.values() for p in unit.parameters()} - apart

    def _sharded(self, dtype: torch.dtype | None) -> ShardedUnits:
        calls = self.policy.partition.stages.items()
        used = {
            name: frozenset(part for (unit, _), part in calls if unit == name and part in self.policy.chunks)
            for name in self.units
        }
        apart = {p for unit in self.units.values() for p in unit.parameters()} - self._in_units()
        with kept_tied(self.model):
            return ShardedUnits(self.units, used, self.grid.mesh.along(DP), dtype, apart)

    def _added_along(self, name: str) -> tuple[int, ...]:
        """Along which axes of the grid the ranks' own gradients of a parameter are still to be added up."""
        return (DP,) * (not self.grid.divides(self.held[name], DP)) + (TP,) * (name in self.partial)

    def _weights(
        self, before: Mapping[str, nn.Parameter], full: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Weight]:
        weights = {}
        for name, old in before.items():
            new, holders = self.held[name], len(self.policy.ownership.holders(name))
            for axis, size in ((DP, self.grid.dp_size), (TP, self.grid.tp_size)):
                holders *= 1 if self.grid.divides(new, axis) else size
            weights[old] = weights[new] = Weight(name, new, holders, full.get(old))
        return weights


class Places:
    """All places of `model`. What takes one after boosting (a new head, an adapter) has never been cut: nobody sums
    its gradients, or knows that it is there. With `parameters` theirs count too, which FSDP changes by itself."""

    def __init__(self, model: nn.Module, parameters: bool) -> None:
        self._kept = [
            (name, module, dict(module._modules), dict(module._parameters) if parameters else {})
            for name, module in model.named_modules()
        ]

    def check(self) -> None:
        """Raise UsageError where something else is in a place now, or parameters are where there was none."""
        for name, module, children, own in self._kept:
            key = _changed(module._modules, children) or (own and _changed(module._parameters, own))
            if key:
                raise UsageError(
                    f"{name}.{key}".lstrip(".") + f" of this {type(module).__name__} is not what it was when the model "
                    "was boosted: put in modules, parameters and adapters before booster.boost"
                )


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The first name that stands for something else, or is new and has parameters; "" if there is none."""
    for key, value in before.items():
        if now.get(key) is not value:
            return key
    new = [now[key] for key in now.keys() - before.keys()] if len(now) > len(before) else []
    held = (value for value in new if not isinstance(value, nn.Module) or next(value.parameters(), None) is not None)
    return next((key for value in held for key in now if now[key] is value), "")
