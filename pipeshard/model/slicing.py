"""Slicing: the held units of a stage divided over ranks, by a plan of tensor parallelism."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipeshard.model.slices import style_of
from pipeshard.model.ties import kept_tied, names_of
from pipeshard.model.units import Interception

# Of a module between sliced ones, whose own gradients are parts of a sum: transformers adds them up after every
# backward pass, which is once too often for what piled up before; here it is done once a step.
PARTIAL = "replicated_with_grad_allreduce"


class Slicing:
    """Slices what `held` (names of parameters) and the plan have in common over the ranks of `mesh`.

    The parameters become DTensors, each rank's slice cut out of the values that it has, and the forwards of the
    modules those of transformers' parallel layers, which exchange activations. What several names stand for is sliced
    once, or, where the plan slices it in two ways, stays whole.

    Attributes:
        partial: the names of whole parameters whose gradients the ranks have to add up.
    """

    def __init__(
        self,
        model: nn.Module,
        held: Collection[str],
        units: Mapping[str, nn.Module],
        mesh: DeviceMesh,
        plan: Mapping[str, str],
    ) -> None:
        first = {name: names for names in names_of(model).values() for name in names}
        whole = {path for names in names_of(model).values() for path in _disagreeing(names, plan)}
        parameters, modules = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_modules())
        own = {name for name in plan if name in parameters and first[name][0] in held and _unit_of(name, units)}
        self.partial = {first[name][0] for name in own if plan[name] == PARTIAL}
        with kept_tied(model):
            for name, style in plan.items():
                path = name.rpartition(".")[0] if name in parameters else name
                if style == PARTIAL or path in whole or not _unit_of(path, units):
                    continue
                layer = style_of(style)
                if name in own:
                    key = name.rpartition(".")[2]
                    layer.validate_param(modules[path], key, mesh, parameter_name=name)
                    layer.shard_param(modules[path], key, mesh)
                elif name in modules:
                    _install(layer, modules[name], mesh)


class Sliced:
    """The forward of a module whose parameters are sliced; traced as it was before."""

    tracing = False

    def __init__(self, plain: Any, sliced: Any) -> None:
        self.plain, self.sliced = plain, sliced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.plain if Sliced.tracing else self.sliced)(*args, **kwargs)


@contextmanager
def unsliced() -> Iterator[None]:
    """Inside, modules run with whole parameters, which the caller puts there."""
    before, Sliced.tracing = Sliced.tracing, True
    try:
        yield
    finally:
        Sliced.tracing = before


def _install(layer: Any, module: Any, mesh: DeviceMesh) -> None:
    """Inside the interception of a unit, which has to see what its callers see."""
    interception = module.__dict__.get("forward")
    if isinstance(interception, Interception):
        module.forward = interception.original
    plain = module.forward
    layer.install_forward(module, mesh)
    if module.forward is not plain:
        module.forward = Sliced(plain, module.forward)
    if isinstance(interception, Interception):
        interception.original, module.forward = module.forward, interception


def _unit_of(name: str, units: Mapping[str, nn.Module]) -> bool:
    return any(f"{name}.".startswith(f"{unit}.") for unit in units)


def _disagreeing(names: tuple[str, ...], plan: Mapping[str, str]) -> set[str]:
    """The modules that have a parameter which the plan slices along different dimensions, or under some names only."""
    ways = {_dimension(plan.get(name)) for name in names}
    return {name.rpartition(".")[0] for name in names} if len(ways) > 1 else set()


def _dimension(style: str | None) -> str:
    kinds = ("colwise", "rowwise")
    if style is None or style.startswith("packed"):
        return str(style)
    if style.startswith("embedding"):  # whose rows are the features that a linear layer of the same weight makes
        return "rows" if style == "embedding_rowwise" else "columns"
    return next(("rows" if kind == "colwise" else "columns" for kind in kinds if style.startswith(kind)), style)
