"""Tests of inference mode: evaluation gives the same results as under no_grad, and training continues afterwards."""

from __future__ import annotations

import pytest
import torch

from tests import zoo
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, differences

pytestmark = pytest.mark.local


def evaluated(name: str) -> list[str]:
    """Batches made outside and inside of it, first and later, in both modes of the model: what differs."""
    data, found = zoo.batch(name), []
    unsplit = Unsplit(zoo.build(name, torch.float64))
    split = Split(zoo.build(name, torch.float64), 2, data, num_microbatches=2)
    for step in range(2):
        for training in (False, True):
            split.model.train(training)
            unsplit.model.train(training)
            with torch.inference_mode():
                inside = {key: value + 0 for key, value in data.items()}
                expected = unsplit.model(**data).loss
                for batch in (inside, data):
                    out = split.booster.execute_pipeline(iter([batch]), split.model, None, None)
                    if not abs(float(out["loss"] - expected)) <= 1e-6:
                        found.append(f"step {step}: {float(out['loss'])}, unsplit {float(expected)}")
        found += differences(split, unsplit, zoo.batch(name, seed=step))
        split.step()
        unsplit.step()
    return found


@pytest.mark.turns
def test_evaluation_is_that_under_no_grad(pool: Pool) -> None:
    """It was "Inference tensors do not track version counter": after it, steps must find no inference tensors."""
    assert pool.run(evaluated, 2, "llama") == [[], []]


def boosted_inside() -> list[str]:
    data, model = zoo.batch("llama"), zoo.build("llama")
    unsplit = Unsplit(zoo.build("llama"))
    with torch.inference_mode():
        split = Split(model, 2, data, num_microbatches=2)
    return differences(split, unsplit, data)


@pytest.mark.turns
def test_a_model_may_be_boosted_inside(pool: Pool) -> None:
    assert pool.run(boosted_inside, 2) == [[], []]
