"""State: what a step has left on both sides, by name: gradients, buffers, attributes, parameters, and what is saved."""

from collections.abc import Collection

from torch import Tensor, nn

from pipeshard.model.ties import first_names
from pipeshard.verify.compare import Comparison, Different, attributes
from pipeshard.verify.reference import Reference
from pipeshard.verify.virtual import Virtual


def gradients(split: Virtual, reference: Reference) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """By name, in the order of the backward pass; ties have their sums."""
    calls = {unit: k for k, (unit, _) in enumerate(split.policy.flow.occurrences)}

    def place(name: str) -> int:
        return max((k for unit, k in calls.items() if name.startswith(f"{unit}.")), default=-1)

    parameters = dict(reference.model.named_parameters())
    names = sorted(parameters, key=place, reverse=True)
    unsplit = {name: parameters[name].grad for name in names if parameters[name].requires_grad}
    holders = {name: [rank for rank in split.ranks if name in rank.held] for name in unsplit}
    if lost := [name for name, ranks in holders.items() if not ranks and unsplit[name] is not None]:
        raise Different(f"no stage holds {lost[0]}, which gets a gradient")
    mine = {name: ranks[0].held[name].grad if ranks else None for name, ranks in holders.items()}
    for k, parameter in enumerate(reference.own.foreign()):
        name = f"parameter {k} of the optimizer that is not the model's"
        unsplit[name], mine[name] = parameter.grad, split.last.foreign[k].grad
    return mine, unsplit


def compare_state(
    comparison: Comparison, split: Virtual, reference: Reference, during: str, fickle: Collection[str] = ()
) -> None:
    """Buffers, and what forwards have left on modules, by the stage that has them, but for `fickle` attributes."""
    buffers = dict(reference.model.named_buffers())
    mine = {name: split.of(name).model.get_buffer(name) for name in buffers}
    comparison.tensors(mine, buffers, "buffers", during)
    for path, module in reference.model.named_modules():
        other = split.of(f"{path}.").model.get_submodule(path)
        here, there = attributes(other), attributes(module)
        for name, value in there.items():
            if name in here and here[name] is not value and f"{path}.{name}" not in fickle:
                where = f"{path}.{name}" if path else f"the model's {name}"
                comparison.values(here[name], value, "attributes", f"{where} {during}")


def differing(one: nn.Module, other: nn.Module) -> frozenset[str]:
    """The attributes that two runs of one model leave with other values."""
    found, comparison = set(), Comparison()
    for path, module in one.named_modules():
        there = attributes(other.get_submodule(path))
        for name, value in attributes(module).items():
            try:
                comparison.values(value, there.get(name), "attributes", name)
            except Different:
                found.add(f"{path}.{name}")
    return frozenset(found)


def compare_trained(comparison: Comparison, split: Virtual, reference: Reference, when: str) -> None:
    """Parameters of all stages that hold them, and what is saved."""
    for name, parameter in reference.model.named_parameters():
        for rank in split.ranks:
            if name in rank.held:
                comparison.tensors({name: rank.held[name]}, {name: parameter}, "parameters", when)
    for k, parameter in enumerate(reference.own.foreign()):
        name = f"parameter {k} of the optimizer that is not the model's"
        comparison.tensors({name: split.last.foreign[k]}, {name: parameter}, "parameters", when)
    first = first_names(reference.model)
    states = [rank.model.state_dict() for rank in split.ranks]
    expected = reference.model.state_dict()
    missing = expected.keys() ^ states[0].keys()
    if missing:
        raise Different(f"{min(missing)} is in one state dict only, of the split model and the unsplit one, {when}")
    saved = {name: states[split.policy.owner(first.get(name, name))][name] for name in expected}
    comparison.tensors(saved, expected, "saved", f"in what is saved {when}")
