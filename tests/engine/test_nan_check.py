"""Tests of `check_finite`: a non-finite value stops all ranks, and the error names the stage that produced it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeshard.errors import NonFiniteError
from tests import zoo
from tests.hooks import register_unseen
from tests.pool import Pool
from tests.unsplit import Split

pytestmark = pytest.mark.local

NAN = float("nan")


def spoil(parameter: torch.nn.Parameter) -> None:
    parameter.grad = torch.full_like(parameter, NAN)


def spoiled(where: str, **options: Any) -> tuple[str, str]:
    """The class of the error, and its message, where rank 1 of 2 makes something that is not finite."""
    split = Split(zoo.build("gpt2"), 2, zoo.batch("gpt2"), num_microbatches=4, check_finite=True, **options)
    unit = next(unit for unit in split.model.pipeline.policy.get_held_layers() if hasattr(unit, "mlp"))
    hooks = ExitStack()
    if dist.get_rank() == 1:
        match where:
            case "forward":
                handle = register_unseen(unit.mlp, lambda module, args, output: output * NAN)
                hooks.callback(handle.remove)
            case "backward":
                unit.mlp.c_fc.weight.register_hook(lambda gradient: gradient * NAN)
            case "parameter":
                unit.mlp.c_fc.weight.data[0, 0] = float("inf")
            case "update":
                split.optimizer.optim.register_step_pre_hook(lambda *_: spoil(unit.mlp.c_fc.weight))
    with hooks, pytest.raises(Exception) as raised:
        split.backward(zoo.batch("gpt2"))
        split.optimizer.step()
        split.backward(zoo.batch("gpt2"))
    return type(raised.value).__name__, str(raised.value)


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("where", "sign"),
    [
        (
            "forward",
            "on stage 1, the loss of microbatch 0 is nan; all parameters of this stage are finite: check this batch",
        ),
        ("backward", "c_fc.weight is not finite after the backward pass of microbatch 0"),
        ("parameter", "c_fc.weight of this stage is not finite. Resume"),
        ("update", "transformer.h.2.mlp.c_fc.weight is not finite after the optimizer's step"),
    ],
)
def test_the_stage_and_the_parameter_are_named(pool: Pool, where: str, sign: str) -> None:
    (first, told), (second, own) = pool.run(spoiled, 2, where)
    assert (first, second) == ("RankError", "NonFiniteError")
    assert sign in own and sign in told and "rank 1 (stage 1) failed" in told


def finite() -> float:
    """A microbatch without labels has no loss, which is nothing to stop for."""
    split = Split(zoo.build("gpt2"), 2, zoo.batch("gpt2"), num_microbatches=8, check_finite=True)
    return float(split.backward(zoo.batch("gpt2"))["loss"])


@pytest.mark.turns
def test_a_microbatch_without_labels_is_no_reason(pool: Pool) -> None:
    first, second = pool.run(finite, 2)
    assert first == second == pytest.approx(float(zoo.build("gpt2")(**zoo.batch("gpt2")).loss), rel=1e-5)


def test_sparse_gradients_are_checked() -> None:
    """With check_finite=True, the first backward of an nn.Embedding(sparse=True) ended in NotImplementedError: a norm
    has no kernel for sparse gradients."""
    from pipeshard.engine.stage import NaNCheck

    embedding, row = torch.nn.Embedding(5, 2, sparse=True), torch.tensor([3])
    embedding(row).sum().backward()
    NaNCheck(0, {"weight": embedding.weight}).before_update()
    (embedding(row).sum() * NAN).backward()
    with pytest.raises(NonFiniteError, match="the gradient of weight is not finite before the optimizer's step"):
        NaNCheck(0, {"weight": embedding.weight}).before_update()


def test_overflow_of_a_norm_alone_is_none() -> None:
    from pipeshard.engine.stage import NaNCheck

    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 3e38)
    NaNCheck(0, {"weight": parameter}).before_update()
    parameter.grad[2] = torch.inf
    with pytest.raises(NonFiniteError, match="the gradient of weight is not finite before the optimizer's step"):
        NaNCheck(0, {"weight": parameter}).before_update()


def test_complex_tensors_are_checked() -> None:
    """A NaN in a complex parameter, gradient or activation was found in a later step, at a real tensor."""
    from pipeshard.engine.stage import NaNCheck

    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    check = NaNCheck(0, {"weight": weight})
    check.forward(0, ["unit"], [weight.detach()], None)
    check.after_update()
    with pytest.raises(NonFiniteError, match="the result of unit for microbatch 0 is not finite"):
        check.forward(0, ["unit"], [torch.full((2,), complex(0, NAN))], None)
    weight.grad = torch.full_like(weight, complex(NAN, 0))
    with pytest.raises(NonFiniteError, match="the gradient of weight is not finite"):
        check.before_update()
    weight.data[0] = complex(0, NAN)
    with pytest.raises(NonFiniteError, match="weight is not finite after the optimizer's step"):
        check.after_update()
