"""Tests of the device of each rank and the backend of each group, as far as a CPU can show them."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer

from pipeshard import PipelinePlugin
from pipeshard.distributed.collectives import (
    carrier,
    control,
    gather,
    gather_objects,
    share_scalar,
    share_tensor,
    sum_scalar,
)
from pipeshard.distributed.failures import _abort
from pipeshard.distributed.mesh import Grid, ProcessGroupMesh, backend_here, own_index
from pipeshard.distributed.p2p import BroadcastP2P, ISendP2P, options_of_kernels
from pipeshard.engine.clipping import grad_norm
from pipeshard.errors import ConfigurationError
from pipeshard.private import DispatchMode
from pipeshard.trainer import pipelined
from tests import zoo
from tests.messages import texts_of
from tests.pool import Pool
from tests.unsplit import Split

GPU = torch.device("cuda", 0)
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize(
    ("bound", "current", "index"),
    [
        (torch.device("cuda", 2), 1, 2),
        (torch.device("cuda"), 1, 1),
        (torch.device("cpu"), 0, 3),
        (None, 1, 1),
        (None, 0, 3),
    ],
)
def test_a_bound_gpu_comes_before_one_that_was_set_and_that_before_the_rank_s(
    bound: torch.device | None, current: int, index: int
) -> None:
    assert own_index(bound, current, local=3) == index


def made_on_a_gpu(gpus: int) -> tuple[list[Any], Any]:
    """The GPUs that a rank selects for its plugin, the GPUs that send its weight, and the weight."""
    selected: list[Any] = []

    class OfGPU0(torch.Tensor):
        @property
        def is_cuda(self) -> bool:  # type: ignore[override]
            return True

        def cuda(self, *_: Any, **__: Any) -> torch.Tensor:
            selected.append("current")
            return self.as_subclass(torch.Tensor)

    weight = torch.full((2,), float(dist.get_rank())).as_subclass(OfGPU0)
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.device_count", lambda: gpus),
        mock.patch("torch.cuda.set_device", selected.append),
        mock.patch.dict(os.environ, {"LOCAL_RANK": str(dist.get_rank())}),
    ):
        PipelinePlugin(dist.get_world_size())
    share_tensor(weight, dist.group.WORLD)
    return selected, weight.tolist()


def test_a_model_that_is_built_after_the_plugin_is_on_the_rank_s_gpu(pool: Pool) -> None:
    """A script moved its model by .to("cuda") after the plugin: every rank used GPU 0, and sharing the first rank's
    weights failed in NCCL (Duplicate GPU detected)."""
    assert pool.run(made_on_a_gpu, 2, 2) == [([torch.device("cuda", k), "current"], [0.0, 0.0]) for k in range(2)]


def told_without_a_cpu() -> list[Any]:
    """What ranks tell each other in a group that has no backend for the CPU, as with NCCL alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="cuda:gloo")
    assert (carrier(torch.device("cpu"), group), carrier(GPU, group)) == ("", "gloo")
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), float(rank))
    told = [
        gather(torch.tensor([rank]), group).tolist(),
        gather_objects({"rank": rank}, group),
        share_scalar(torch.tensor(0.5) if rank == 1 else None, 1, group, torch.device("cpu")).item(),  # type: ignore[union-attr]
        sum_scalar(torch.tensor(rank, dtype=torch.bfloat16), group).item(),
        grad_norm({parameter: 1}, group).item(),
    ]
    assert control(group) is control(group) is not group and control(group).size() == size
    assert control(dist.group.WORLD) is dist.group.WORLD  # type: ignore[arg-type]
    return told


def test_what_ranks_tell_each_other_needs_no_gpu(pool: Pool) -> None:
    """All of it went through the first GPU of each machine where the process group was NCCL's alone."""
    told = [[[0], [1], [2]], [{"rank": 0}, {"rank": 1}, {"rank": 2}], 0.5, 3.0, pytest.approx(10**0.5)]
    assert pool.run(told_without_a_cpu, 3) == [told] * 3


class Operators(DispatchMode):
    """Counts the operators that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def operators_of_a_norm(kind: torch.dtype, norm_type: float) -> tuple[int, int]:
    """The numbers of operators for the norm of one gradient and for that of 20 gradients."""
    counts = []
    for number in (1, 20):
        holders = {torch.nn.Parameter(torch.zeros(3, dtype=kind)): 1 + k % 2 for k in range(number)}
        for k, parameter in enumerate(holders):
            parameter.grad = torch.full((3,), k + 1.0, dtype=kind)
        with Operators() as operators:
            norm = grad_norm(holders, dist.group.WORLD, norm_type)  # type: ignore[arg-type]
        terms = [3 * (k + 1.0) ** 2 / (1 + k % 2) for k in range(number)]
        assert norm.item() == pytest.approx(number if norm_type == math.inf else sum(terms) ** 0.5, rel=1e-6)
        counts.append(operators.count)
    return counts[0], counts[1]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_norm_takes_no_operators_per_gradient(pool: Pool, kind: torch.dtype, norm_type: float) -> None:
    """Each gradient took four operators, and a copy of its own if it had 16 bits."""
    ((one, twenty),) = pool.run(operators_of_a_norm, 1, kind, norm_type)
    assert one == twenty


def used_at_boost() -> list[tuple[int, ...]]:
    """The groups of which boost has used all connections by a sum, in order."""
    used: list[tuple[int, ...]] = []
    all_reduce = dist.all_reduce

    def recording(tensor: Any, *arguments: Any, group: Any = None, **options: Any) -> Any:
        used.append(tuple(dist.get_process_group_ranks(group)))
        return all_reduce(tensor, *arguments, group=group, **options)

    with mock.patch.object(dist, "all_reduce", recording):
        split = Split(zoo.build("gpt2"), 2, zoo.batch("gpt2", rows=4), num_microbatches=2)
    groups = split.plugin.grid.mesh._groups.values()
    assert set(used) == {tuple(dist.get_process_group_ranks(g)) for g in groups if g is not None and g.size() > 1}
    return used


@pytest.mark.turns
def test_every_group_is_used_at_boost_in_one_order(pool: Pool) -> None:
    used = pool.run(used_at_boost, 4)
    assert used[0] == [(0, 1), (0, 1, 2, 3), (0, 2)]
    for groups in used:
        assert groups == sorted(groups)


def warnings_of_a_gpu(backend: str) -> list[str]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("pipeshard").addHandler(handler)
    with (
        mock.patch("pipeshard.distributed.mesh.own_device", lambda: GPU),
        mock.patch("pipeshard.distributed.mesh.carrier", lambda device, group=None: backend),
        mock.patch("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=dist.get_rank())),
    ):
        Grid(dist.get_world_size())
    logging.getLogger("pipeshard").removeHandler(handler)
    return [record.getMessage() for record in records]


def test_gpus_that_talk_through_the_host_are_warned_of_once(pool: Pool) -> None:
    (warning,), other = pool.run(warnings_of_a_gpu, 2, "gloo")
    assert "through host memory" in warning and "cpu:gloo,cuda:nccl" in warning and other == []
    assert pool.run(warnings_of_a_gpu, 2, "nccl") == [[], []]


def warnings_of_another_accelerator() -> list[str]:
    with (
        mock.patch("torch.accelerator.current_accelerator", lambda check_available=False: torch.device("mps")),
        mock.patch("pipeshard.distributed.mesh.logger.warning") as warning,
    ):
        Grid(dist.get_world_size())
    return texts_of(warning)


def test_an_accelerator_that_is_not_used_is_named_once(pool: Pool) -> None:
    """A model on "mps" or "xpu" was silently moved to the CPU and trained there."""
    (warning,), other = pool.run(warnings_of_another_accelerator, 2)
    assert "computes on the CPU" in warning and "'mps'" in warning and other == []


def on_one_gpu(by_trainer: bool, **variables: str) -> None:
    """A grid of ranks that have the same GPU of this host, made by a Trainer if `by_trainer`."""

    class Unborn(Trainer):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise AssertionError("TRL's trainers prepare their data here, with barriers of NCCL")

    variables = {name: value.format(rank=dist.get_rank()) for name, value in variables.items()}
    with (
        mock.patch("pipeshard.distributed.mesh.own_device", lambda: GPU),
        mock.patch("pipeshard.distributed.mesh.carrier", lambda device, group=None: "nccl"),
        mock.patch("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="GPU-0")),
        mock.patch.dict(os.environ, variables),
    ):
        plugin = PipelinePlugin(dist.get_world_size())
        if by_trainer:
            pipelined(Unborn)(None, pipeline=plugin)
        assert plugin.grid.device == GPU


@pytest.mark.parametrize("by_trainer", [False, True])
def test_ranks_with_the_same_gpu_are_refused_before_nccl_does(pool: Pool, by_trainer: bool) -> None:
    """On a machine with one GPU, two ranks ended in NCCL (Duplicate GPU detected) and took it for a lost connection."""
    for message in pool.run_expecting(ConfigurationError, on_one_gpu, 3, by_trainer):
        assert "give each its own CUDA_VISIBLE_DEVICES" in message
        assert "ranks 0 and 1 compute on the same GPU" in message and "TrainingArguments(ddp_backend='gloo')" in message


@pytest.mark.parametrize("variable", [{"NCCL_HOSTID": "rank{rank}"}, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}])
def test_ranks_with_the_same_gpu_that_nccl_accepts(pool: Pool, variable: dict[str, str]) -> None:
    pool.run(on_one_gpu, 2, False, **variable)


@pytest.mark.parametrize(("gpus", "backend"), [(0, "gloo"), (1, "gloo"), (2, None)])
def test_a_group_of_more_ranks_than_gpus_is_of_gloo(gpus: int, backend: str | None) -> None:
    with (
        mock.patch("torch.cuda.device_count", lambda: gpus),
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}),
    ):
        assert backend_here() == backend


def isend_on_a_gpu_by_gloo() -> None:
    ISendP2P([0], [], GPU)


def test_isend_on_a_gpu_needs_nccl(pool: Pool) -> None:
    (message,) = pool.run_expecting(ConfigurationError, isend_on_a_gpu_by_gloo, 1)
    assert "p2p='isend' cannot send CUDA tensors with gloo" in message


def groups_of_messages(backend: str) -> list[tuple[list[int], dict[str, Any]]]:
    """The groups of two that are made for messages, with their options."""
    made: list[tuple[list[int], dict[str, Any]]] = []
    new_group = dist.new_group

    def recording(ranks: list[int], **options: Any) -> Any:
        made.append((ranks, options))
        return new_group(ranks)

    with (
        mock.patch.object(dist, "new_group", recording),
        mock.patch("pipeshard.distributed.p2p.carrier", lambda device: backend),
        mock.patch("pipeshard.distributed.p2p.options_of_kernels", lambda: {"backend": "nccl"}),
    ):
        first = dist.get_rank() // 2 * 2  # two pipelines side by side
        p2p = BroadcastP2P([first, first + 1], [(0, 1), (1, 0)], torch.device("cpu"))
    assert p2p.kernels is (backend == "nccl") and len({*map(id, p2p.groups.values())}) == 2
    return made


@pytest.mark.parametrize(("backend", "options"), [("gloo", {}), ("nccl", {"backend": "nccl"})])
def test_each_direction_has_a_group_of_its_own(pool: Pool, backend: str, options: dict[str, Any]) -> None:
    expected = [([0, 1], options), ([2, 3], options)] * 2
    assert pool.run(groups_of_messages, 4, backend) == [expected] * 4


def test_nccl_s_own_clock_does_not_end_a_process() -> None:
    with mock.patch.object(dist, "ProcessGroupNCCL", mock.Mock(), create=True) as nccl:
        options = options_of_kernels()
    nccl.Options.assert_called_once_with(is_high_priority_stream=True)
    assert options["timeout"] == options["pg_options"]._timeout == timedelta(days=1) and options["backend"] == "nccl"


def handled(by_user: str) -> list[str]:
    """What torch reads as it makes the groups of a mesh and of messages, and what is left of it behind them."""
    seen: list[str] = []

    def recording(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            seen.append(os.environ.get(HANDLING, ""))
            return make(*args, **options)

        return made

    with (
        mock.patch.dict(os.environ, {HANDLING: by_user} if by_user else {}),
        mock.patch.object(dist, "new_group", recording(dist.new_group)),
        mock.patch("pipeshard.distributed.mesh.init_device_mesh", recording(init_device_mesh)),
    ):
        grid = ProcessGroupMesh(1, 2)
        grid.create_group_along_axis([0, 1])
        BroadcastP2P([0, 1], [(0, 1), (1, 0)], torch.device("cpu"))
        return [*sorted({*seen}), os.environ.get(HANDLING, "")]


@pytest.mark.parametrize(("by_user", "expected"), [("", ["0", ""]), ("1", ["1", "1"])])
def test_a_fault_does_not_end_the_processes_of_other_ranks(pool: Pool, by_user: str, expected: list[str]) -> None:
    """As torch sets it, its own watchdog ends a process whose communicators were aborted, which the watch does after
    a fault, before anybody is told which rank has failed."""
    assert pool.run(handled, 2, by_user) == [expected] * 2


def test_communicators_are_aborted_at_the_same_time() -> None:
    """On a GPU the abort of the first one waited for a message of the second one, for as long as the process lived."""
    all_are = threading.Barrier(3)
    first, second, stuck = mock.Mock(), mock.Mock(), mock.Mock()
    first.abort.side_effect = all_are.wait
    second.abort.side_effect = lambda: (all_are.wait(), exec("raise RuntimeError('it is gone')"))
    stuck.abort.side_effect = lambda: (all_are.wait(), time.sleep(60))
    began = time.monotonic()
    with mock.patch("pipeshard.distributed.failures.ABORTING", 0.5):
        _abort([first, second, stuck])
    assert not all_are.broken and time.monotonic() - began < 20
    _abort([])


def backward_where_sending_writes(name: str) -> float:
    """A step's loss where a broadcast writes to its source, as gloo's does with a GPU's tensor."""
    plain = dist.broadcast

    def broadcast(tensor: torch.Tensor, *source: int, **options: Any) -> Any:
        work = plain(tensor, *source, **options)
        if source == (dist.get_rank(),):
            tensor.copy_(tensor.clone())
        return work

    split = Split(zoo.build(name), 2, zoo.batch(name), num_microbatches=2, verify=False)
    with mock.patch.object(dist, "broadcast", broadcast):
        return float(split.backward(zoo.batch(name))["loss"])


@pytest.mark.turns
def test_a_sent_tensor_that_autograd_has_saved_may_be_written_by_gloo(pool: Pool) -> None:
    """bart, t5 and 40 others raised in the backward on a GPU with gloo: "modified by an inplace operation". gloo copies
    a message from the host back into the GPU's tensor that it was taken from."""
    losses = pool.run(backward_where_sending_writes, 2, "t5")
    assert losses[0] == losses[1] > 0
