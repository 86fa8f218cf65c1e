"""Tests of the stage manager."""

from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pipeshard.compat import PipelineStageManager
from pipeshard.distributed.mesh import ProcessGroupMesh
from pipeshard.errors import ConfigurationError, UsageError
from tests.pool import Pool


def manager(*size: int, axis: int = 0, **options: Any) -> PipelineStageManager:
    return PipelineStageManager(ProcessGroupMesh(*size), axis, **options)


def make_manager(*size: int, axis: int = 0, **options: Any) -> None:
    manager(*size, axis=axis, **options)


def place() -> dict[str, Any]:
    """This process in two pipelines of two stages: ranks 0, 1 and ranks 2, 3."""
    it = manager(2, 2, axis=1)
    group = it.get_p2p_process_group()
    assert group is not None and it.num_stages == 2 and it.get_rank() == dist.get_rank()
    dist.barrier(group=group)
    return {
        "stage": it.stage,
        "ends": (it.is_first_stage(), it.is_last_stage()),
        "neighbours": (it.get_prev_rank(), it.get_next_rank()),
        "pipeline": it.pg_mesh.get_ranks_in_group(group),
    }


def neighbours_in_a_ring() -> tuple[int, int]:
    it = manager(4)
    return it.get_prev_rank(), it.get_next_rank()


def stages_in_a_group(stages: list[int]) -> list[int] | None:
    it = manager(4)
    group = it.init_process_group_by_stages(stages)
    if group is None:
        return None
    dist.barrier(group=group)
    return it.pg_mesh.get_ranks_in_group(group)


def ends_by_chunk(use_zbv: bool) -> list[tuple[bool, bool]]:
    it = manager(2, enable_interleave=True, use_zbv=use_zbv, num_model_chunks=2)
    ends = []
    for chunk in range(2):
        with it.switch_model_chunk_id(chunk):
            ends.append((it.is_first_stage(), it.is_last_stage()))
    assert it.is_first_stage(ignore_chunk=True) == (it.stage == 0)
    assert it.is_last_stage(ignore_chunk=True) == (it.stage == 1)
    return ends


def chunk_after_an_error() -> list[int | None]:
    it = manager(2, enable_interleave=True, num_model_chunks=2)
    seen = [it.model_chunk_id]
    with it.switch_model_chunk_id(0):
        with pytest.raises(KeyError), it.switch_model_chunk_id(1):
            seen.append(it.model_chunk_id)
            raise KeyError
        seen.append(it.model_chunk_id)
    return [*seen, it.model_chunk_id]


def ask_without_chunk(question: str) -> None:
    getattr(manager(2, enable_interleave=True, num_model_chunks=2), question)()


def layers_of_this_stage(num_layers: int, **options: Any) -> tuple[list[int], Any]:
    it = manager(2, **options)
    layers = it.distribute_layers(num_layers)
    return layers, it.get_stage_index(layers)


def distribute_wrongly() -> None:
    manager(2, num_layers_per_stage=[1, 3]).distribute_layers(5)


class OneRankMesh:
    """Rank 0 of a mesh of one axis of any size, without processes."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def get_group_along_axis(self, axis: int) -> None:
        return None

    def get_ranks_in_group(self, group: None) -> list[int]:
        return list(range(self.size))


def alone(p: int, **options: Any) -> PipelineStageManager:
    return PipelineStageManager(OneRankMesh(p), 0, **options)  # type: ignore[arg-type]


def test_place_in_the_pipeline(pool: Pool) -> None:
    first = {"stage": 0, "ends": (True, False)}
    last = {"stage": 1, "ends": (False, True)}
    assert pool.run(place, 4) == [
        first | {"neighbours": (1, 1), "pipeline": [0, 1]},
        last | {"neighbours": (0, 0), "pipeline": [0, 1]},
        first | {"neighbours": (3, 3), "pipeline": [2, 3]},
        last | {"neighbours": (2, 2), "pipeline": [2, 3]},
    ]


def test_neighbours_wrap_around(pool: Pool) -> None:
    assert pool.run(neighbours_in_a_ring, 4) == [(3, 1), (0, 2), (1, 3), (2, 0)]


def test_group_of_some_stages(pool: Pool) -> None:
    assert pool.run(stages_in_a_group, 4, [0, 2]) == [[0, 2], None, [0, 2], None]
    assert pool.run(stages_in_a_group, 4, [3, 0]) == [[0, 3], None, None, [0, 3]]


def test_ends_of_chunks(pool: Pool) -> None:
    inner, first, last = (False, False), (True, False), (False, True)
    assert pool.run(ends_by_chunk, 2, use_zbv=False) == [[first, inner], [inner, last]]
    assert pool.run(ends_by_chunk, 2, use_zbv=True) == [[first, last], [inner, inner]]


def test_the_chunk_is_restored_on_errors(pool: Pool) -> None:
    assert pool.run(chunk_after_an_error, 2) == [[None, 1, 0, None]] * 2


@pytest.mark.parametrize("question", ["is_first_stage", "is_last_stage"])
def test_every_rank_must_choose_a_chunk(pool: Pool, question: str) -> None:
    assert all("ignore_chunk" in message for message in pool.run_expecting(UsageError, ask_without_chunk, 2, question))


@pytest.mark.parametrize(
    "num_layers, options, expected",
    [
        (5, {}, ([2, 3], [[0, 2], [2, 5]])),
        (4, {"num_layers_per_stage": [1, 3]}, ([1, 3], [[0, 1], [1, 4]])),
        (8, {"num_model_chunks": 2}, ([2] * 4, [[[0, 2], [4, 6]], [[2, 4], [6, 8]]])),
        (8, {"num_model_chunks": 2, "use_zbv": True}, ([2] * 4, [[[0, 2], [6, 8]], [[2, 4], [4, 6]]])),
        (
            9,
            {"num_model_chunks": 2, "num_layers_per_stage": [1, 2, 3, 3]},
            ([1, 2, 3, 3], [[[0, 1], [3, 6]], [[1, 3], [6, 9]]]),
        ),
    ],
)
def test_layers_of_each_stage(pool: Pool, num_layers: int, options: dict[str, Any], expected: Any) -> None:
    layers, indices = expected
    options = options | {"enable_interleave": "num_model_chunks" in options}
    assert pool.run(layers_of_this_stage, 2, num_layers, **options) == [(layers, index) for index in indices]


@pytest.mark.parametrize(
    "size, options, message",
    [
        ((2,), {"axis": 1}, "axis 1 is outside"),
        ((2, 1), {"axis": 2}, "use -2 to 1"),
        ((2,), {"num_model_chunks": 2}, "enable_interleave=True"),
        ((2,), {"num_model_chunks": 0}, "num_model_chunks=0"),
        ((2,), {"use_zbv": True}, "with use_zbv=True, use 2 chunks and enable_interleave=True"),
        ((2,), {"use_zbv": True, "num_model_chunks": 2}, "enable_interleave=True"),
        ((2,), {"use_zbv": True, "num_model_chunks": 3, "enable_interleave": True}, "num_model_chunks=3"),
        ((2,), {"num_layers_per_stage": [1, 2, 3]}, "2 in all, got 3"),
        ((2,), {"num_layers_per_stage": [1, 2], "num_model_chunks": 2, "enable_interleave": True}, "4 in all, got 2"),
    ],
)
def test_wrong_arguments_are_refused(pool: Pool, size: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    assert all(message in text for text in pool.run_expecting(ConfigurationError, make_manager, 2, *size, **options))


def test_layers_must_sum_to_the_models(pool: Pool) -> None:
    assert all("sums to 4" in message for message in pool.run_expecting(ConfigurationError, distribute_wrongly, 2))


def test_what_does_not_divide_goes_to_the_middle() -> None:
    assert alone(4).distribute_layers(10) == [2, 3, 3, 2]
    assert alone(4).distribute_layers(11) == [2, 3, 3, 3]
    assert alone(2).distribute_layers(10, num_stages=3) == [3, 4, 3]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 100))
def test_the_stages_cover_all_layers_once(p: int, v: int, num_layers: int) -> None:
    it = alone(p, enable_interleave=True, num_model_chunks=v)
    layers = it.distribute_layers(num_layers)
    pairs: list[Any] = []
    for stage in range(p):
        index: Any = it.get_stage_index(layers, stage)
        pairs += [index] if v == 1 else index
    assert [layer for first, end in sorted(pairs) for layer in range(first, end)] == list(range(num_layers))
    assert max(layers) - min(layers) <= 1


def test_layers_that_do_not_reach_are_refused() -> None:
    for stage in (-1, 2):
        with pytest.raises(ConfigurationError, match="stage must be from 0 to 1"):
            alone(2).get_stage_index([1, 1], stage)
    with pytest.raises(ConfigurationError, match="stage must be from 0 to 1"):  # gave the layers of stage 1
        alone(2, enable_interleave=True, use_zbv=True, num_model_chunks=2).get_stage_index([1, 1, 1, 1], 2)
