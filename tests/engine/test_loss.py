"""Tests of loss rules, which are found by trial evaluations of the loss."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from pipeshard.batch.batch import Batch
from pipeshard.engine.loss import LossRule
from pipeshard.errors import ConfigurationError
from pipeshard.graph.trace import trace
from tests import zoo
from tests.rules import find_loss_rule

Criterion = Callable[..., Tensor]


def rule(name: str, criterion: Criterion | None = None, dtype: torch.dtype = torch.float32) -> LossRule:
    model, data = zoo.build(name, dtype), zoo.batch(name, dtype=dtype)
    if criterion is not None:
        data["labels"] = data["labels"].clamp(min=0)
    return find_loss_rule(model, trace(model, data, criterion), Batch.of(data), criterion)


@pytest.mark.turns
@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "shift"), [("gpt2", 1), ("llama", 1), ("mixtral", 1), ("bert", 0), ("t5", 0), ("vit", 0)]
)
def test_heads_count_their_valid_labels(name: str, shift: int, dtype: torch.dtype) -> None:
    assert rule(name, dtype=dtype) == LossRule("labels", shift)


def cross_entropy(**options: object) -> Criterion:
    return lambda out, data: nn.functional.cross_entropy(out.logits.transpose(1, 2), data["labels"], **options)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        (cross_entropy(ignore_index=0), LossRule("labels", 0, 0)),
        (cross_entropy(ignore_index=3), LossRule("labels", 0, 3)),
        (cross_entropy(reduction="sum"), LossRule(summed=True)),
        (lambda out, data: out.logits.square().mean(), LossRule()),
    ],
    ids=["padding", "class", "sum", "samples"],
)
def test_criteria_of_one_s_own(criterion: Criterion, expected: LossRule) -> None:
    assert rule("llama", criterion) == expected


@pytest.mark.turns
def test_a_loss_that_no_rule_fits_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"to be a mean or sum over samples .* use one microbatch"):
        rule("llama", lambda out, data: out.logits.mean((1, 2)).softmax(0).max())


@pytest.mark.turns
def test_an_auxiliary_loss_of_router_logits_goes_by_the_rule_of_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    model, data = zoo.build("mixtral"), zoo.batch("mixtral")
    model.config.output_router_logits = True
    with caplog.at_level(logging.WARNING, "pipeshard"):
        assert find_loss_rule(model, trace(model, data), Batch.of(data), None) == LossRule("labels", shift=1)
    assert "auxiliary" in caplog.text


@pytest.mark.turns
def test_an_auxiliary_loss_beside_a_sum_names_the_trainer_s_remedies() -> None:
    """SFTTrainer with experts and num_microbatches=8: the error named only loss_reduction, which a Trainer refuses, a
    pair from a criterion that the user had not written, and one microbatch, without the arguments for it."""
    sizes = {**zoo.TINY, "num_hidden_layers": 1, "num_local_experts": 2}
    model, data = MixtralForCausalLM(MixtralConfig(**sizes, output_router_logits=True)), zoo.batch("mixtral")
    data["num_items_in_batch"] = (data["labels"][:, 1:] != -100).sum()
    with pytest.raises(ConfigurationError, match=r"omit num_microbatches.*config\.output_router_logits = False"):
        find_loss_rule(model, trace(model, data), Batch.of(data), None)
    model.config.output_router_logits = False
    assert find_loss_rule(model, trace(model, data), Batch.of(data), None) == LossRule(summed=True)


def test_shares_are_those_of_the_valid_labels() -> None:
    parts = Batch.of(zoo.batch("bert")).split(num_microbatches=4)
    shares = LossRule("labels").shares(parts)
    counts = [int((part.tensors["labels"] != -100).sum()) for part in parts]
    assert shares == [count / sum(counts) for count in counts]
    assert LossRule("labels", ignore=zoo.VOCABULARY).shares(parts) == [0.25] * 4
