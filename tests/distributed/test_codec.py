"""Tests of the codec with which ranks exchange values: plain values arrive unchanged, others are not sent."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeshard.distributed.collectives import decode, encode, gather_objects
from pipeshard.errors import MessageError
from tests.pool import Pool

VALUES: list[Any] = [
    *(None, True, 3, -(10**40), 2.5, float("inf"), "ä\0\ud800", b"\0\xff", 1j, "", [], {}, (), set()),
    *({1, (2, 3)}, (1, [None, {"a": {"b": (b"1", {4})}}]), torch.Size([2, 3]), torch.bfloat16),
    {(0, 1): "tuples are keys", 5: None},
]


class Harmful:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_plain_values_come_back() -> None:
    for value in VALUES:
        found = decode(encode(value))
        assert found == value and type(found) is type(value)


def test_tensors_come_back() -> None:
    value = {"a": torch.arange(3), "b": [torch.empty(2**40, 3, dtype=torch.float16, device="meta"), torch.tensor(True)]}
    found = decode(encode(value))
    assert torch.equal(found["a"], value["a"]) and torch.equal(found["b"][1], value["b"][1])  # type: ignore[arg-type]
    assert found["b"][0].is_meta and found["b"][0].shape == (2**40, 3) and found["b"][0].dtype == torch.float16
    assert len(encode(value)) < 4000


def test_what_would_run_code_is_neither_sent_nor_read(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for value in (Harmful(mark), lambda: 1, tmp_path, [{1: Harmful}], os.system):
        with pytest.raises(MessageError, match="must contain only tensors, numbers and strings: "):
            encode(value)
    with pytest.raises(MessageError, match="UnpicklingError: Trying to load unsupported GLOBAL"):
        encode(os.system)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        decode(pickle.dumps(Harmful(mark), protocol=2))
    assert not mark.exists()


def told() -> list[Any]:
    rank = dist.get_rank()
    group: Any = dist.group.WORLD
    for value in VALUES:
        assert gather_objects(value, group) == [value] * dist.get_world_size()
    return gather_objects({"rank": rank, "much": "x" * rank * 5000}, group)


def test_every_rank_learns_what_all_have(pool: Pool) -> None:
    expected = [{"rank": rank, "much": "x" * rank * 5000} for rank in range(3)]
    assert pool.run(told, 3) == [expected] * 3


def untold(mark: Path) -> list[Any]:
    group: Any = dist.group.WORLD
    value: Any = Harmful(mark) if dist.get_rank() == 1 else 5
    with pytest.raises(MessageError) as caught:
        gather_objects(value, group)
    return [str(caught.value), *gather_objects(dist.get_rank(), group)]  # nobody waits for anyone


def test_what_one_rank_cannot_tell_is_an_error_on_all(pool: Pool, tmp_path: Path) -> None:
    ranks = pool.run(untold, 3, tmp_path / "mark")
    message, *others = ranks[0]
    assert ranks == [ranks[0]] * 3 and others == [0, 1, 2]
    assert message.startswith("rank 1 cannot send a value to the other ranks: this Harmful must contain only tensors")
    assert not (tmp_path / "mark").exists()


def test_no_call_of_the_package_pickles_what_it_sends() -> None:
    root = Path(__file__).parents[2] / "pipeshard"
    calls = ("all_gather_object", "object_list", "gather_object(", "import pickle\n", "weights_only=False")
    # a cell's function is code, for processes of its user; compute_loss and models may return any object of the script
    pickling = {root / "notebook.py", root / "trainer" / "serialization.py"}
    for file in {*root.rglob("*.py")} - pickling:
        text = file.read_text()
        assert not [call for call in calls if call in text], file
        for call in re.findall(r"torch\.load\((?!weights_only=True\)).*", text):
            assert "weights_only=True" in call, file
