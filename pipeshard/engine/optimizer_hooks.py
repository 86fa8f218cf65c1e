"""Optimizer hooks: the step hooks of an optimizer whose constructor does not call Optimizer.__init__."""

import functools
from collections import OrderedDict
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from pipeshard.garbage import weak


def give_hooks(optim: Optimizer) -> None:
    """Make an optimizer's step call its hooks, even if its constructor does not call Optimizer.__init__. Many classes
    that wrap another optimizer, such as Lookahead, do not call Optimizer.__init__."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if not isinstance(hooks := getattr(optim, name, {}), OrderedDict):
            setattr(optim, name, OrderedDict(hooks))
    step: Any = optim.step
    if getattr(step, "hooked", False):
        return

    @functools.wraps(step)  # copies the attribute by which an LR scheduler recognizes a step that it has replaced
    def replacement(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    is_of_class = getattr(step, "__self__", None) is optim
    hooked: Any = Optimizer.profile_hook_step(step.__func__ if is_of_class else replacement)
    hooked.hooked = True
    bound: Any = functools.update_wrapper(weak(MethodType(hooked, optim)), hooked)
    bound.__func__ = hooked  # an LR scheduler reads __func__ when it replaces this step
    optim.step = bound  # type: ignore[method-assign]
