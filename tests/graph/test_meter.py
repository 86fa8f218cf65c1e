"""Tests of the meter: the bytes that autograd keeps and the FLOPs, compared with real runs and calculations by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from benchmarks.resident import peak, reset_peak, resident
from pipeshard.batch.batch import Batch
from pipeshard.batch.read import read_batch
from pipeshard.errors import TraceError
from pipeshard.graph.meter import Meter
from pipeshard.planner.candidate import metered, unit_cost
from pipeshard.split.partition import Cost
from tests import zoo
from tests.planner.saved import saved_bytes


def kept(meter: Meter) -> int:
    together: dict[Any, int] = {}
    for work in (*meter.works, meter.tail):
        together |= work.kept
    return sum(together.values())


def measured(model: nn.Module, batch: dict[str, Tensor]) -> Meter:
    return metered(model, read_batch(model, batch))[1]


@pytest.mark.turns
@pytest.mark.sampled(3)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mixtral", "vit", "gemma2", "bert"])
def test_the_estimate_is_what_a_run_keeps(name: str, recompute: bool) -> None:
    model, batch = zoo.build(name), zoo.batch(name, rows=2)
    if recompute:
        model.gradient_checkpointing_enable()
    meter = measured(model, batch)
    really = saved_bytes(model, batch)(0, len(meter.works))
    assert kept(meter) == pytest.approx(really, rel=0.05)
    on_meta = zoo.build(name).to("meta")
    if recompute:
        on_meta.gradient_checkpointing_enable()
    assert kept(measured(on_meta, batch)) == kept(meter)


def test_recomputation_leaves_little_to_keep() -> None:
    plain, recomputed = zoo.build("llama"), zoo.build("llama")
    recomputed.gradient_checkpointing_enable()
    batch = zoo.batch("llama")
    assert kept(measured(recomputed, batch)) < 0.2 * kept(measured(plain, batch))


def test_attention_keeps_no_scores_unless_it_is_eager() -> None:
    layers = {}
    for attention in ("sdpa", "eager"):
        fields = {**zoo.TINY, "num_key_value_heads": 4, "attn_implementation": attention}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
        short, long = (sum(measured(model, zoo.batch("llama", 1, s)).works[1].kept.values()) for s in (16, 32))
        layers[attention] = long / short
    assert layers["sdpa"] == pytest.approx(2, rel=0.01)
    assert layers["eager"] > 2.2


def test_a_batch_of_any_size_takes_no_memory() -> None:
    fields = {**zoo.TINY, "vocab_size": 128_000, "max_position_embeddings": 100_000}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).train()
    ids = torch.zeros(1, 50_000, dtype=torch.int64)
    reset_peak()
    before = resident()
    meter = measured(model, {"input_ids": ids, "labels": ids})
    logits = 4 * ids.numel() * 128_000  # 25 GB
    assert sum(meter.tail.kept.values()) >= logits
    assert peak() - before < 500e6


class Small(nn.Module):
    """Units whose work is known: an embedding, layers that a test chooses, a head."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([layer])
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).view(-1, 11), labels.view(-1))}


class Pair(nn.Module):
    """A layer whose weight gradient can wait, and one whose cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def ids(rows: int = 2, length: int = 6) -> dict[str, Tensor]:
    numbers = torch.arange(rows * length).view(rows, length) % 11
    return {"input_ids": numbers, "labels": numbers}


def test_work_is_counted_by_hand() -> None:
    embed, layer, head = measured(Small(nn.Linear(8, 8)), ids()).works
    tokens = 12
    assert (embed.flops, embed.elements, embed.by_parameter) == (0, 8 * tokens, {})
    assert (layer.flops, layer.elements) == (2 * tokens * 8 * 8, 8 * tokens)  # the transposed weight is no work
    assert layer.by_parameter == {"weight": layer.flops}
    assert (head.flops, head.by_parameter) == (2 * tokens * 8 * 11, {"weight": 2 * tokens * 8 * 11})
    hidden = 4 * 8 * tokens
    assert sum(embed.kept.values()) == 0  # the indices are the batch's
    assert [sum(work.kept.values()) for work in (layer, head)] == [hidden, hidden]


def estimated(model: nn.Module, batch: Batch) -> list[Cost]:
    """The relative time of each unit call of one microbatch."""
    flow, meter = metered(model, batch)
    return [unit_cost(model.get_submodule(call.unit), work) for call, work in zip(flow.calls, meter.works, strict=True)]


def test_weight_gradients_wait_where_the_layer_can_leave_them_out() -> None:
    model, frozen = Small(Pair()), Small(Pair())
    frozen.layers.requires_grad_(False)
    embed, layer, head = estimated(model, read_batch(model, ids()))
    once = 2 * 12 * 8 * 8
    assert layer.weight == once + 2 * 20 * (8 * 8 + 8)
    assert layer.backward == 2 * layer.forward + 2 * 20 * (8 * 8 + 8 + 16) - layer.weight
    assert embed.weight == 2 * 20 * 11 * 8 and head.weight > 0
    assert estimated(frozen, read_batch(frozen, ids()))[1].weight == 0


def test_a_recomputed_unit_runs_forward_twice() -> None:
    model = zoo.build("llama")
    batch = read_batch(model, zoo.batch("llama"))
    plain = estimated(model, batch)[1]
    model.gradient_checkpointing_enable()
    again = estimated(model, batch)[1]
    assert again == plain._replace(backward=plain.backward + plain.forward)


def test_a_model_in_evaluation_mode_is_planned_as_it_trains_and_left_as_it_was() -> None:
    model = zoo.build("llama").eval()
    model.gradient_checkpointing_enable()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    training = zoo.build("llama")
    training.gradient_checkpointing_enable()
    assert kept(measured(model, zoo.batch("llama"))) == kept(measured(training, zoo.batch("llama")))
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


def test_a_backward_inside_a_forward_is_refused() -> None:
    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            (gradient,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
            return y + gradient

    with pytest.raises(TraceError, match="backward pass inside its forward"):
        measured(Small(Inner(8, 8)), ids())
