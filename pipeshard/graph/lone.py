"""Lone: the dispatch mode for code that only some ranks run."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from pipeshard.errors import TraceError
from pipeshard.graph.call_stack import where
from pipeshard.graph.operators import COLLECTIVES
from pipeshard.private import DispatchMode, OpOverload


class Lone(DispatchMode):
    """Dispatch mode for code that only some ranks run in a step: a layer on its stage, and the loss on the last stage.
    An operator that waits for all ranks raises TraceError, since the operator would hang in a step.

    Attributes:
        waiting: the first such operator and its line, even if the code has caught the TraceError.
    """

    supports_higher_order_operators = True
    waiting: str | None = None

    @classmethod
    def of(cls, pp_size: int) -> AbstractContextManager[Any]:
        return cls() if pp_size > 1 else nullcontext()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and func.namespace in COLLECTIVES and _is_of_world(func, args, kwargs):
            self.waiting = self.waiting or f"({func.name()}), in {where()}"
            raise TraceError(
                f"{where()} waits for all ranks ({func.name()}), but in a pipeline some ranks may not run this line: "
                "each layer runs on its own stage, and the loss on the last stage. Remove the collective: pipeshard "
                "combines the losses of microbatches and replicas itself, and a criterion may return (sum, count) to "
                "divide by the total count. Otherwise, use one stage (pp_size=1)"
            )
        return func(*args, **kwargs)


def _is_of_world(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a collective involves all ranks. False if there is only one rank."""
    if dist.get_world_size() == 1:
        return False
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"]).size() == dist.get_world_size()
    world: Any = dist.group.WORLD
    return "group_name" in given and given["group_name"] == world.group_name
