"""Backward hooks of modules: each sees the gradients of a module's results and arguments, which have to be together."""

from collections.abc import Sequence

from torch import nn

from pipeshard.errors import UsageError
from pipeshard.model.dataflow import Dataflow, Wanted
from pipeshard.model.partition import boundaries
from pipeshard.model.policy import Policy


def refuse_backward_hooks(policy: Policy, around: Sequence[nn.Module], flow: Dataflow, outputs: Wanted) -> None:
    """Raise UsageError where a module has one whose gradients are not on one stage: one `around` units, or a unit of
    which a result that gets a gradient crosses a cut."""
    hooked = {module for module in (*around, *policy.units.values()) if _has_hooks(module)}
    if not hooked or len(policy.placement) == 1:
        return
    stages = policy.partition.of_calls(flow)
    crossing = {
        flow.calls[value.call].unit
        for boundary in boundaries(flow, stages, len(policy.placement), outputs)
        for value in boundary.gradients
    }
    hooked -= {unit for name, unit in policy.units.items() if name not in crossing}
    found = [(name, module) for name, module in policy.model.named_modules() if module in hooked]
    if found:
        name, module = found[0]
        where = "is cut into stages itself" if module in around else "gives a result to another stage"
        raise UsageError(
            f"{name or 'the model'} ({type(module).__name__}) has a backward hook (register_full_backward_hook, "
            f"register_full_backward_pre_hook), but {where}, so no stage has all the gradients that it is about: "
            "put the hook on a module inside of a unit, or cut elsewhere (the partition argument of PipelinePlugin)"
        )


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)
