"""Tests of the mesh."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pipeshard.distributed.mesh import ProcessGroupMesh, num_replicas
from pipeshard.errors import ConfigurationError
from tests.pool import Pool

DP, PP, TP = 0, 1, 2
PAIRS = [[0, 1], [0, 1], [2, 3], [2, 3]]
COLUMNS = [[0, 2], [1, 3], [0, 2], [1, 3]]
SQUARE_SIDES: list[list[list[int]]] = [[[0, 1], [0]], [[1], [0, 1]], [[0], [0, 1]], [[0, 1], [1]]]

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def ranks_summed_in(mesh: ProcessGroupMesh, group: dist.ProcessGroup | None) -> list[int] | None:
    """The members, after a collective has shown that the group works."""
    if group is None:
        return None
    members = mesh.get_ranks_in_group(group)
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total, group=group)
    assert total.item() == sum(members)
    return members


def shape_and_place() -> tuple[Any, ...]:
    mesh = ProcessGroupMesh(1, 2, 2)
    sizes = [mesh.size(axis) for axis in (DP, PP, TP)]
    indices = tuple(mesh.coordinate(axis) for axis in (DP, PP, TP))
    assert mesh.size() == mesh.shape and mesh.coordinate() == indices and mesh.rank == dist.get_rank()
    return mesh.shape, sizes, indices


def groups_of_each_axis() -> list[list[int] | None]:
    mesh = ProcessGroupMesh(1, 2, 2)
    return [ranks_summed_in(mesh, mesh.get_group_along_axis(axis)) for axis in (DP, PP, TP)]


def group_along(axis: int | list[int], indices: Any = None) -> list[int] | None:
    mesh = ProcessGroupMesh(1, 2, 2)
    group = mesh.create_group_along_axis(axis, indices)
    assert mesh.get_group_along_axis(axis, indices) is group
    return ranks_summed_in(mesh, group)


def one_group_for_each_rank() -> list[int]:
    mesh = ProcessGroupMesh(1, 2, 2)
    group = mesh.create_group_along_axis([TP, PP], SQUARE_SIDES[dist.get_rank()])
    assert group is not None
    return mesh.get_ranks_in_group(group)


def groups_asked_for_by_others() -> list[list[int] | None]:
    """A rank belongs to two sides of the square, of which it asks for one; it can use both."""
    mesh = ProcessGroupMesh(1, 2, 2)
    mesh.create_group_along_axis([TP, PP], SQUARE_SIDES[dist.get_rank()])
    sides = []
    for indices in SQUARE_SIDES:
        # A group is looked up from its own members' side only: no collective can be behind it.
        ranks = [mesh.ravel(c, mesh.shape) for c in mesh.get_coords_along_axis((0, 0, 0), [TP, PP], indices)]
        inside = dist.get_rank() in ranks
        sides.append(ranks_summed_in(mesh, mesh.get_group_along_axis([TP, PP], indices)) if inside else None)
    return sides


def old_and_new_in_one_call() -> list[int] | None:
    """Half of the ranks ask for what exists, half for what does not."""
    mesh = ProcessGroupMesh(4)
    mesh.create_group_along_axis(0, [0, 1])
    wanted = [0, 1] if dist.get_rank() < 2 else [2, 3]
    return ranks_summed_in(mesh, mesh.create_group_along_axis(0, wanted))


def stage_subset() -> tuple[list[int] | None, bool]:
    mesh = ProcessGroupMesh(4)
    first, second = (mesh.get_group_along_axis(0, [0, 2]) for _ in range(2))
    return ranks_summed_in(mesh, first), first is second


def backends_are_kept_apart() -> bool:
    mesh = ProcessGroupMesh(2)
    return mesh.get_group_along_axis(0) is not mesh.get_group_along_axis(0, backend="gloo")


def destroy() -> list[int] | None:
    mesh = ProcessGroupMesh(2, 2)
    made = [mesh.get_group_along_axis(0), mesh.get_group_along_axis([0, 1])]
    mesh.destroy_mesh_process_groups()
    for group in made:
        with pytest.raises(ValueError):
            dist.destroy_process_group(group)
    return ranks_summed_in(mesh, mesh.get_group_along_axis(1))


def destroy_after_the_world() -> None:
    mesh = ProcessGroupMesh(2, 1)
    dist.barrier()
    dist.destroy_process_group()
    mesh.destroy_mesh_process_groups()


def make_mesh(*size: int) -> None:
    ProcessGroupMesh(*size)


def ask_for_group(axis: Any, indices: Any) -> None:
    ProcessGroupMesh(1, 2).get_group_along_axis(axis, indices)


def test_shape_and_coordinates(pool: Pool) -> None:
    places = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert pool.run(shape_and_place, 4) == [((1, 2, 2), [1, 2, 2], place) for place in places]


def test_each_axis_has_its_groups(pool: Pool) -> None:
    expected = [list(groups) for groups in zip([[0], [1], [2], [3]], COLUMNS, PAIRS, strict=True)]
    assert pool.run(groups_of_each_axis, 4) == expected


@pytest.mark.parametrize(
    "axis, indices, expected",
    [
        ([DP, TP], None, PAIRS),
        ([TP, PP], None, [[0, 1, 2, 3]] * 4),
        (TP, None, PAIRS),
        (PP, [0, 1], COLUMNS),
        (TP, [1], [None, [1], None, [3]]),
        ([PP, TP], [[1], [0, 1]], [None, None, [2, 3], [2, 3]]),
        (-1, None, PAIRS),
    ],
)
def test_groups_along_axes(pool: Pool, axis: Any, indices: Any, expected: list[list[int] | None]) -> None:
    assert pool.run(group_along, 4, axis, indices) == expected


def test_each_rank_may_ask_for_a_different_group(pool: Pool) -> None:
    assert pool.run(one_group_for_each_rank, 4) == [[0, 1], [1, 3], [0, 2], [2, 3]]


def test_groups_asked_for_by_others_are_there_too(pool: Pool) -> None:
    sides = [[0, 1], [1, 3], [0, 2], [2, 3]]
    assert pool.run(groups_asked_for_by_others, 4) == [[s if rank in s else None for s in sides] for rank in range(4)]


def test_old_and_new_groups_may_be_asked_for_in_one_call(pool: Pool) -> None:
    assert pool.run(old_and_new_in_one_call, 4) == PAIRS


def test_a_subset_is_made_once_and_is_none_outside(pool: Pool) -> None:
    assert pool.run(stage_subset, 4) == [([0, 2], True), (None, True)] * 2


def test_groups_of_another_backend_are_other_groups(pool: Pool) -> None:
    assert all(pool.run(backends_are_kept_apart, 2))


def test_destroy_leaves_the_world_and_a_usable_mesh(pool: Pool) -> None:
    assert pool.run(destroy, 4) == PAIRS
    pool.run(destroy_after_the_world, 2)


@pytest.mark.parametrize("size", [(3,), (2, 2), (), (-1, -2)])
def test_sizes_must_multiply_to_the_world_size(pool: Pool, size: tuple[int, ...]) -> None:
    for message in pool.run_expecting(ConfigurationError, make_mesh, 2, *size):
        assert message.startswith(f"the mesh sizes {size} are invalid") and "the world size, 2" in message


@pytest.mark.parametrize("axis, indices", [(2, None), (-3, None), (1, [2]), (1, [-1]), ([0, 1], [0]), (0, [[0]])])
def test_what_the_mesh_does_not_have_is_refused(pool: Pool, axis: Any, indices: Any) -> None:
    pool.run_expecting(ConfigurationError, ask_for_group, 2, axis, indices)


def test_needs_torch_distributed() -> None:
    with pytest.raises(ConfigurationError, match="init_process_group"):
        ProcessGroupMesh(1)


def test_a_trainers_plugin_needs_its_arguments_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that torchrun started was told to call init_process_group, which the TrainingArguments do that stood
    below its plugin."""
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigurationError, match=r"a pipeline requires a process group: call .* script\.py$"):
        num_replicas(2, None, 1)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigurationError, match=r"create its TrainingArguments, .*, before the plugin$"):
        num_replicas(2, None, 1)


@given(shapes, st.data())
def test_ravel_undoes_unravel(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    rank = data.draw(st.integers(0, size - 1))
    coord = ProcessGroupMesh.unravel(rank, shape)
    assert coord == list(itertools.product(*map(range, shape)))[rank]
    assert ProcessGroupMesh.ravel(coord, shape) == rank
    turned = tuple(index + size for index, size in zip(coord, shape, strict=True))
    assert ProcessGroupMesh.ravel(turned, shape, mode="wrap") == rank
    assert ProcessGroupMesh.ravel(turned, shape, mode="clip") == size - 1
    with pytest.raises(ConfigurationError, match="is invalid for a mesh"):
        ProcessGroupMesh.ravel(turned, shape)


def test_ravel_and_unravel_refuse_what_has_no_meaning() -> None:
    for coord, mode in [((0, 0), "mirror"), ((0,), "raise"), ((0, 0, 0), "wrap"), ((0, -1), "raise")]:
        with pytest.raises(ConfigurationError):
            ProcessGroupMesh.ravel(coord, (2, 2), mode)
    for rank in (-1, 4):
        with pytest.raises(ConfigurationError):
            ProcessGroupMesh.unravel(rank, (2, 2))


def test_coords_along_axes_have_the_last_axis_fastest() -> None:
    along = ProcessGroupMesh.get_coords_along_axis
    assert along((0, 5, 0), 1, [0, 2]) == [(0, 0, 0), (0, 2, 0)]
    assert along((0, 0, 9), [2, 1], [[0, 1], [3, 4]]) == [(0, 3, 0), (0, 4, 0), (0, 3, 1), (0, 4, 1)]
