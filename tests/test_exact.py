"""Tests of exactness: a split model has the loss, gradients, norm and trained parameters of the unsplit model.

`make exact` runs each model with every schedule, transport and number of microbatches. Otherwise, these vary from model
to model for most models, so that each schedule, transport and number runs with some models and numbers of stages.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeshard.schedule.schedules import IN_A_V
from tests import zoo
from tests.covering import ALL
from tests.pool import Pool
from tests.unsplit import LEARNING_RATE, Split, Unsplit, differences, parameter_error

pytestmark = pytest.mark.local
MICROBATCHES = (1, 2, 3, 8)
THOROUGH = ("gpt2", "t5")
CHUNKS = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "v-half": 2, "v-min": 2}
TRANSPORTS = [("1f1b", "broadcast"), ("gpipe", "broadcast"), ("1f1b", "isend"), ("gpipe", "isend")]


def layers(name: str, schedule: str, p: int) -> int:
    """Enough for every stage, and no more: rounding errors grow with depth. T5 has twice as many."""
    return 4 if CHUNKS[schedule] * p < 7 or name == "t5" else 6


def three_steps(name: str, schedule: str, p2p: str, microbatches: tuple[int, ...] = MICROBATCHES) -> None:
    """For every m: one step's loss and gradients in fp32, then three clipped AdamW steps."""
    p = dist.get_world_size()
    for m in microbatches:
        model = zoo.build(name, layers=layers(name, schedule, p))
        unsplit = Unsplit(copy.deepcopy(model), max_norm=0.5)
        data = zoo.batch(name)
        options: Any = {"schedule": schedule, "num_model_chunks": CHUNKS[schedule], "p2p": p2p}
        split = Split(model, p, data, num_microbatches=m, max_norm=0.5, **options)
        for seed in range(3):
            data = zoo.batch(name, seed=seed)
            # Once parameters were updated by norms that are sums in another order, losses are not equal to the bit.
            same_sums = {"num_microbatches": m} if seed == 0 else {}
            found = differences(split, unsplit, data, tolerance=1e-6 if seed == 0 else 1e-5, **same_sums)
            assert not found, f"{name} p={p} m={m} {schedule} {p2p} step {seed}: {found}"
            unsplit.step()
            split.step()
            assert split.optimizer.get_grad_norm() == pytest.approx(float(unsplit.norm), rel=1e-6)
        error = parameter_error(split, unsplit.model)
        assert error < 1e-5, f"{name} p={p} m={m} {schedule} {p2p}: parameters differ by {error:.2e}"


def transports(name: str, p: int) -> list[tuple[str, str]]:
    """All for THOROUGH models; else both schedules and both transports, paired in turn, as how it was sent is nothing
    that an architecture could notice. With four stages, half of those."""
    if p == 1:
        return TRANSPORTS[: 2 if ALL else 1]
    if ALL or (name in THOROUGH and p == 2):
        return TRANSPORTS
    turn = (p + list(zoo.MODELS).index(name)) % 2
    return (TRANSPORTS[::3] if turn else TRANSPORTS[1:3])[: 2 if p < 4 else 1]


def stages(name: str) -> list[int]:
    """All for THOROUGH models; else two, in turn."""
    few = (1, 4) if list(zoo.MODELS).index(name) % 2 else (2, 4)
    return [p for p in (1, 2, 3, 4) if ALL or name in THOROUGH or p in few]


@pytest.mark.turns
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "p"), [(name, p) for name in zoo.MODELS for p in stages(name)])
def test_three_steps(pool: Pool, name: str, p: int) -> None:
    for k, (schedule, p2p) in enumerate(transports(name, p)):
        turn = (k + p + list(zoo.MODELS).index(name)) % 4
        microbatches = MICROBATCHES if ALL else MICROBATCHES[turn : turn + 1]
        pool.run(three_steps, p, name, schedule, p2p, microbatches, timeout=120)


@pytest.mark.turns
@pytest.mark.sampled(5)
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_three_steps_of_chunks_and_split_backwards(pool: Pool, name: str, p: int) -> None:
    for k, schedule in enumerate(("interleaved", "zb-h1", *IN_A_V)):
        if not ALL and (p // 2 + k + list(zoo.MODELS).index(name)) % 5:
            continue  # one of the five, another with another p
        m = (3, 8, 1)[(p + k + list(zoo.MODELS).index(name)) % 3]
        microbatches = MICROBATCHES if ALL else (m,)
        pool.run(three_steps, p, name, schedule, "broadcast" if k else "isend", microbatches, timeout=120)


def ragged(name: str, schedule: str) -> None:
    """All that is uneven, in one run of one split model, against the whole batch at once.

    In fp64, so that another order of sums is no excuse; the heads themselves compute the loss in fp32.
    """
    p = dist.get_world_size()
    # Grouped matrix products know no fp64, and Gemma 2's soft-capped masks overflow in it, unsplit too.
    dtype = torch.float32 if name in ("mixtral", "gemma2") else torch.float64
    depth = layers(name, schedule, p)
    # Six of GPT-2's differ by 4e-6 in one process, too, whose sums over microbatches are not those of a whole batch.
    tolerance = 1e-6 if dtype is torch.float64 and (name, depth) != ("gpt2", 6) else 1e-5
    model = zoo.build(name, dtype, layers=depth)
    unsplit = Unsplit(copy.deepcopy(model), max_norm=0.5)
    options: Any = {"schedule": schedule, "num_model_chunks": CHUNKS[schedule]}
    split = Split(model, p, zoo.batch(name, dtype=dtype), microbatch_size=2, max_norm=0.5, **options)

    def check(data: Any, what: str) -> None:
        found = differences(split, unsplit, data, tolerance)
        assert not found, f"{name} p={p} {schedule}, {what}: {found}"

    def evaluate(data: Any, what: str) -> None:
        unsplit.model.eval()
        split.model.eval()
        with torch.no_grad():
            reference = unsplit.model(**data)
        out = split.evaluate(data, return_outputs=True)
        assert float(out["loss"]) == pytest.approx(float(reference.loss), rel=tolerance), what
        if dist.get_rank() == split.model.pipeline.policy.placement[-1]:
            assert type(out["outputs"]) is type(reference), what
            assert torch.allclose(out["outputs"].logits, reference.logits, rtol=tolerance, atol=tolerance), what
        else:
            assert out["outputs"] is None
        unsplit.model.train()
        split.model.train()

    check(zoo.batch(name, rows=7, dtype=dtype), "a batch of 7 in microbatches of 2")
    unsplit.step()
    split.step()
    for step, length in enumerate((9, 14, 11)):
        check(zoo.batch(name, rows=4, length=length, seed=step, dtype=dtype), f"length {length}")
        unsplit.step()
        split.step()
    if name != "vit":
        check(zoo.left_padded(zoo.batch(name, dtype=dtype)), "left padding")
        unsplit.step()
        split.step()
    check(zoo.batch(name, rows=1, dtype=dtype), "one sample")
    evaluate(zoo.batch(name, rows=5, seed=5, dtype=dtype), "evaluation amid accumulation")
    check(zoo.batch(name, rows=3, seed=6, dtype=dtype), "accumulated gradients after an evaluation")
    unsplit.step()
    split.step()
    evaluate(zoo.batch(name, rows=6, length=10, seed=7, dtype=dtype), "evaluation between steps")
    check(zoo.batch(name, rows=8, seed=8, dtype=dtype), "training after an evaluation")
    with split.booster.no_sync(split.model):
        unsplit.backward(zoo.batch(name, rows=2, seed=9, dtype=dtype))
        split.backward(zoo.batch(name, rows=2, seed=9, dtype=dtype))
    check(zoo.batch(name, rows=4, seed=10, dtype=dtype), "accumulation with and without no_sync")
    unsplit.step()
    split.step()
    assert parameter_error(split, unsplit.model) < (1e-6 if dtype is torch.float64 else LEARNING_RATE / 10)


@pytest.mark.turns
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "p"), [(name, p) for name in zoo.MODELS for p in stages(name) if p != 3])
def test_ragged(pool: Pool, name: str, p: int) -> None:
    """Every schedule for a tied model, else in turn."""
    names = list(CHUNKS)
    turn = names[(2 * p + list(zoo.MODELS).index(name)) % len(names)]
    for schedule in names if ALL or (p == 2 and name == "gpt2") else [turn]:
        pool.run(ragged, p, name, schedule, timeout=120)
