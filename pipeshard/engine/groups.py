"""Groups: edits an optimizer's parameter groups when a rank drops or replaces parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

UNCOMPARED = ("params", "param_names")  # keys of a group for lists with one value per parameter


def keep(group: dict[str, Any], places: Sequence[int]) -> None:
    """In a group, keep only the parameters at the indices `places` and, if the group has names, the names of these
    parameters."""
    named = [key for key in UNCOMPARED if group.get(key) is not None]
    for values in [group[key] for key in named if len(group[key]) == len(group["params"])]:
        values[:] = [values[k] for k in places]  # in place: the optimizer may have another reference to the list


def options_per_parameter(optim: Optimizer) -> set[str]:
    """The names of options that are lists with one value for each parameter of a group. `keep` does not shorten these
    lists. Options that have a default, such as betas in a list, are omitted, regardless of their length."""
    return {
        key
        for group in optim.param_groups
        for key, value in group.items()
        if key not in (*UNCOMPARED, *optim.defaults)
        and isinstance(value, (list, tuple))
        and len(value) == len(group["params"]) > 1
    }


def is_compared(key: str, group: Mapping[str, Any]) -> bool:
    """Whether an option of a group must be the same on all ranks. The `lr` of Adafactor(relative_step=True) is not
    compared: Adafactor ignores this `lr`, and AdafactorSchedule overwrites it with the learning rate of the group's
    first parameter."""
    return key not in UNCOMPARED and not (key == "lr" and group.get("relative_step"))


def replace_parameters(optim: Optimizer, became: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters in the optimizer's groups (`became` maps old to new), and discard the state of the old
    parameters. If a new parameter replaces several old parameters, it stays only in the first group that contains
    it."""
    seen: set[nn.Parameter] = set()
    for group in optim.param_groups if became else ():
        group["params"][:] = now = [became.get(parameter, parameter) for parameter in group["params"]]
        first = {parameter: k for k, parameter in reversed([*enumerate(now)])}
        keep(group, sorted(k for parameter, k in first.items() if parameter not in seen))
        seen |= first.keys()
    for parameter in became:
        optim.state.pop(parameter, None)


def move_overrides(optimizer: Optimizer, became: Mapping[Tensor, Tensor]) -> None:
    """For each parameter in the groups, move the parameter's options in bitsandbytes' GlobalOptimManager to the tensor
    that will replace the parameter (`became` maps old to new). GlobalOptimManager stores options by module, by index in
    the groups, or by id. Afterwards, the options of these parameters are stored only by id, since indices change."""
    manager: Any = getattr(optimizer, "mng", None)
    if not became or not hasattr(manager, "pid2config"):
        return
    of_modules = {id(getattr(module, name)): config for module, name, config in manager.module_weight_config_triple}
    for k, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            options = manager.index2config.get((k, j), {}) | manager.pid2config.get(id(parameter), {})
            if options := of_modules.pop(id(parameter), options):
                manager.pid2config[id(became.get(parameter, parameter))] = options
    manager.index2config.clear()
    manager.module_weight_config_triple = [
        entry for entry in manager.module_weight_config_triple if id(getattr(entry[0], entry[1])) in of_modules
    ]
