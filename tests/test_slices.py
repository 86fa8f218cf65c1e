"""Tests of slices: microbatches that are cut along the sequence train as whole ones do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import zoo
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, compared, parameter_error

pytestmark = pytest.mark.local


def trained(name: str, m: int, n: int, steps: int = 3, length: int = 13, **options: Any) -> list[str]:
    """What differs from the unsplit model in some steps with other lengths, padding and labels; in fp64, as sums of
    slices are made in another order."""
    model = zoo.build(name, torch.float64)
    unsplit = Unsplit(copy.deepcopy(model).eval())
    split = Split(
        model,
        dist.get_world_size(),
        zoo.batch(name, rows=4, length=length),
        num_microbatches=m,
        num_slices=n,
        **options,
    )
    split.model.eval()
    found = []
    for step in range(steps):
        data = zoo.batch(name, rows=4, length=length + 5 * step, seed=step)
        if step == 1:
            data = zoo.left_padded(data)
        reference = unsplit.backward_in_parts(data, num_microbatches=m)
        found += compared(split, unsplit, split.backward(data)["loss"], reference, 1e-10)
        unsplit.step()
        split.step()
        if not (error := parameter_error(split, unsplit.model)) < 1e-10:
            found.append(f"parameters differ by {error:.2e} after step {step}")
    return found


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("m, n", [(1, 2), (1, 8), (2, 3)])
def test_a_sliced_model_trains_as_the_unsplit_one(pool: Pool, p: int, m: int, n: int) -> None:
    assert pool.run(trained, p, "llama", m, n) == [[]] * p
