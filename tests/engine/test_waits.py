"""Tests of waits: how often a host waits for its device in a step, and what it keeps there, counted on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeshard.engine import grad_sync
from pipeshard.engine.fsdp import ShardedUnits
from pipeshard.engine.grad_sync import Bucket, GradientSync
from pipeshard.engine.weight_grad import Lookup
from tests import zoo
from tests.pool import Pool
from tests.unsplit import Split


class Asked(TorchDispatchMode):
    """What needs values on the host, and is waited for on a GPU."""

    KINDS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.index)

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [str(func)] if func._overloadpacket in self.KINDS else []
        return func(*args, **(kwargs or {}))


def test_an_embedding_with_a_padding_row_is_not_waited_for() -> None:
    """A boolean index was: in every backward of the first stage."""
    gradients, ids = torch.ones(2, 3, 4), torch.tensor([[0, 1, 1], [2, 1, 0]])
    gradients[0, 1] = float("nan")  # what padding gets is left out, whatever it is
    total = torch.zeros(3, 4)
    with Asked() as asked:
        Lookup(gradients, ids, 3, padding=1).add_to(total)
    assert asked.seen == [] and total.tolist() == [[2.0] * 4, [0.0] * 4, [1.0] * 4]


def step_of_replicas() -> tuple[int, int, int]:
    """The buckets of a step, how often its sums asked for values, and the microbatches that are kept after it."""
    with mock.patch.object(grad_sync, "BUCKET", 3000):
        data = zoo.batch("gpt2", rows=4)
        split = Split(zoo.build("gpt2"), dist.get_world_size() // 2, data, num_microbatches=2, dp_size=2)
    finish, counted, asked = GradientSync.finish, [0], Asked()
    tolist = Tensor.tolist

    def counting(tensor: Tensor) -> Any:
        counted[0] += 1
        return tolist(tensor)

    @contextmanager
    def watching() -> Iterator[None]:
        with mock.patch.object(Tensor, "tolist", counting), asked:
            yield

    def watched(sync: GradientSync, *args: Any) -> None:
        with watching():
            finish(sync, *args)

    with mock.patch.object(GradientSync, "finish", watched):
        split.backward(data)
    (stage,) = split.model.pipeline.stages.whole
    return len(split.model.pipeline.sync.buckets), counted[0] + len(asked.seen), len(stage.microbatches)


@pytest.mark.turns
def test_shared_gradients_are_waited_for_once(pool: Pool) -> None:
    """Each bucket was, amid the step, and the inputs of all microbatches stayed on the GPU until the next step."""
    for buckets, asked, kept in pool.run(step_of_replicas, 2):
        assert buckets > 5 and asked == 1 and kept == 0


class Gathered:
    """A unit that is being gathered until it is waited for."""

    under_way: ClassVar[set[int]] = set()
    most = 0

    def unshard(self, async_op: bool) -> Gathered:
        Gathered.under_way.add(id(self))
        Gathered.most = max(Gathered.most, len(Gathered.under_way))
        return self

    def wait(self) -> None:
        Gathered.under_way.remove(id(self))


def test_units_are_gathered_a_few_at_a_time() -> None:
    """All were at once, each with room for its slices beside the whole: twice the stage."""
    units: Any = object.__new__(ShardedUnits)
    units.groups, units.casts = {Gathered(): frozenset({0}) for _ in range(8)}, False
    units.begin()
    assert Gathered.under_way == set() and Gathered.most == 2


def test_gradients_of_shards_are_summed_after_the_wait_for_their_reduction() -> None:
    """The last backward of a stage only starts the reduce-scatter, in a stream of its own. The sum over tensor-parallel
    ranks read its result at once, which on a GPU may not be there yet."""
    parameters, calls = [nn.Parameter(torch.ones(2)) for _ in range(2)], mock.Mock()
    whole, sharded = (Bucket({"": each}, mock.Mock(), frozenset({0}), tie=False) for each in parameters)
    whole.start, sharded.start = calls.sum_of_whole, calls.sum_of_sharded  # type: ignore[method-assign]
    units = calls.units
    units.parameters = {parameters[1]}
    sync = GradientSync([whole, sharded], sharded=units)
    sync.begin()
    sync.stage_done(0)
    whole.work = mock.Mock()
    with mock.patch.object(Bucket, "wait", lambda bucket: torch.empty(0)):
        sync.finish(True)
    names = [name for name, *_ in calls.mock_calls]
    assert names == ["units.begin", "units.stages_done", "sum_of_whole", "units.finish", "sum_of_sharded"]
