"""Stage module: one stage as an ordinary `nn.Module`, for runtimes that are not pipeshard's own."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeshard.batch.batch import Batch
from pipeshard.batch.criterion import Criterion, loss_of
from pipeshard.batch.read import read_batch
from pipeshard.engine.microbatches import RouteCache
from pipeshard.engine.stage import Microbatch
from pipeshard.errors import BatchError, UsageError
from pipeshard.ghost import inside_pipeshard
from pipeshard.split.policy import Policy
from pipeshard.split.route import Recompute


class StageModule(nn.Module):
    """Stage `index` of a model: `stage(*received, **batch)` on the stage's values, in one process or in many.

    `received` are the tensors that the stage before returned (none on the first one), `batch` is the whole microbatch
    by the names of the model's arguments, on every stage. It returns a tuple of tensors, with their graph; the last
    stage the loss where the batch or the criterion gives one, and otherwise, or with `whole`, the model's output.

    Its modules are the units that it runs, under their names in the model, and the parameters that glue reads. Random
    numbers depend on torch's seed, which has to be the same on every rank, and on the number of forwards so far.
    """

    def __init__(
        self, model: nn.Module, policy: Policy, index: int, criterion: Criterion | None = None, whole: bool = False
    ) -> None:
        super().__init__()
        self.index, self.num_stages, self.whole = index, len(policy.placement), whole
        # A tuple keeps the model, with what this stage does not hold, from being registered as a part of this one.
        self._source = (model, policy, criterion)
        self._planner = RouteCache(model, policy, Recompute.of(False, 0, self.num_stages))
        self._forwards = 0
        policy.replay.proves = False  # another runtime may leave caches on, which the trace had off
        calls = zip(policy.flow.calls, policy.stages, strict=True)
        running = dict.fromkeys(call.unit for call, stage in calls if stage == index)
        for unit in running:
            path, _, key = unit.rpartition(".")
            _node(self, path).add_module(key, policy.units[unit])
        own = set(self.parameters())
        for name in sorted(policy.ownership.held_by_parts[index]):
            if (parameter := model.get_parameter(name)) not in own:  # one that glue reads
                path, _, key = name.rpartition(".")
                _node(self, path).register_parameter(key, parameter)

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def train(self, mode: bool = True) -> "StageModule":
        """Of all units, since glue asks the modules around them."""
        super().train(mode)
        self._source[0].train(mode)
        return self

    def microbatch(self, batch: Mapping[str, Any]) -> Microbatch:
        """What this stage makes of a microbatch: its route, and the shapes of what enters and leaves."""
        model, policy, criterion = self._source
        place = policy.chunks.index(self.index)
        return self._planner.plan([read_batch(model, dict(batch))], criterion, self.whole, False)[place][0]

    @inside_pipeshard()
    def forward(self, *received: Tensor, **batch: Any) -> Any:
        _, policy, criterion = self._source
        policy.replace_forward()  # again: another target of the same model may have been the last to run
        microbatch = self.microbatch(batch)
        route = microbatch.route
        if len(received) != len(route.enters.values):
            raise UsageError(
                f"stage {self.index} got {len(received)} tensors where it takes {len(route.enters.values)}: pass what "
                f"stage {self.index - 1} returned for this microbatch, and the microbatch itself by keywords"
                if self.index
                else f"stage 0 got {len(received)} tensors: pass the microbatch by keywords, stage(**batch)"
            )
        randomness = policy.replay.randomness
        with randomness.step(torch.initial_seed() % 2**63, self._forwards):
            randomness.microbatch(0)
            entering = dict(zip(route.enters.values, received, strict=True))
            output, made = policy.replay.run(route, microbatch.deltas, entering, microbatch.batch)
        self._forwards += 1
        self._planner.stepped()
        if not self.is_last:
            return tuple(made[value].contiguous() for value in route.leaves.values)
        loss = None if self.whole else loss_of(output, criterion, microbatch.batch)
        return output if loss is None else loss


def _node(root: nn.Module, path: str) -> nn.Module:
    """The module of this path, of empty ones where there are none yet."""
    node = root
    for name in path.split(".") if path else ():
        if name not in node._modules:
            node.add_module(name, nn.Module())
        node = getattr(node, name)
    return node


def as_keywords(model: nn.Module, data: Any) -> dict[str, Any]:
    """A batch by the names of the model's arguments; BatchError for one that does not fit them."""
    if isinstance(data, Mapping):
        return dict(data)
    batch = Batch.of(data)
    try:
        return dict(inspect.signature(model.forward).bind(*batch.data).arguments)
    except TypeError as error:
        raise BatchError(f"the batch does not fit {type(model).__name__}.forward ({error}): pass a dict") from error
