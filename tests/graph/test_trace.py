"""Tests of the trace: made-up models that use their values in unusual ways, and the dependencies that it records."""

from __future__ import annotations

import copy
import queue
import time
import weakref
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from benchmarks.resident import peak, reset_peak, resident
from pipeshard import build, trace
from pipeshard.batch.batch import Batch
from pipeshard.batch.read import read_batch
from pipeshard.errors import ConfigurationError, PartitionError, TraceError
from pipeshard.graph.dataflow import Dataflow
from pipeshard.graph.kinds import Kinds
from pipeshard.graph.taint import Value
from pipeshard.graph.units import find_units
from pipeshard.split.balance import balance
from pipeshard.split.boundary import forbidden_cuts
from pipeshard.split.policy import Policy
from tests import zoo

H = 8


class Glued(nn.Module):
    """Three layers and a head, with glue between them that a test overrides."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, H)
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(layers))
        self.head = nn.Linear(H, 11)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(self.embed(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.view(-1, 11), labels.view(-1)), "logits": logits}

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def batch(rows: int = 2, length: int = 6) -> dict[str, Tensor]:
    ids = torch.arange(rows * length).view(rows, length) % 11
    return {"input_ids": ids, "labels": ids.clone()}


def reads(model: nn.Module) -> dict[str, list[Value]]:
    return {call.unit: sorted(call.reads.values) for call in trace(model, batch()).calls}


def test_a_residual_stream_depends_on_every_unit_before() -> None:
    assert reads(Glued()) == {
        "embed": [],
        "layers.0": [Value(0, 0)],
        "layers.1": [Value(0, 0), Value(1, 0)],
        "layers.2": [Value(0, 0), Value(1, 0), Value(2, 0)],
        "head": [Value(0, 0), Value(1, 0), Value(2, 0), Value(3, 0)],
    }


def test_a_skip_bypasses_the_units_between() -> None:
    class Skip(Glued):
        def body(self, x: Tensor) -> Tensor:
            first = self.layers[0](x)
            return self.layers[2](self.layers[1](first)) + first

    assert reads(Skip())["layers.2"] == [Value(2, 0)]
    assert reads(Skip())["head"] == [Value(1, 0), Value(3, 0)]


def test_an_input_and_a_parameter_of_the_same_name_are_both_read() -> None:
    """Tags of two kinds with the same name were equal, and a union of tags kept only one of them."""

    class Scaled(Glued):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(H))

        def forward(self, input_ids: Tensor, labels: Tensor, scale: Tensor) -> dict[str, Tensor]:
            logits = self.head(self.embed(input_ids) * scale[..., None] * self.scale)
            return {"loss": nn.functional.cross_entropy(logits.view(-1, 11), labels.view(-1))}

    head = trace(Scaled(), batch() | {"scale": torch.ones(2, 6)}).calls[-1]
    assert (head.reads.inputs, head.reads.parameters) == ({"scale"}, {"scale"})


def test_integers_views_and_writes_in_place_carry_their_origin() -> None:
    class Routed(Glued):
        def body(self, x: Tensor) -> Tensor:
            scores = self.layers[0](x)
            order = scores.argmax(-1)  # an integer, which no autograd graph knows
            routed = self.layers[1](nn.functional.one_hot(order, H).to(x.dtype))
            board = torch.zeros_like(x)
            board[:, 1:].add_(routed[:, :-1])  # written through a view
            return self.layers[2](board)

    found = reads(Routed())
    assert found["layers.1"] == [Value(1, 0)]
    assert Value(2, 0) in found["layers.2"]


class Counting(nn.Linear):
    """Returns the number of its tokens, too."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.shape[0] * x.shape[1]


def test_a_product_of_sizes_that_a_unit_returns_is_right_for_all_sizes() -> None:
    """Each length was traced again: the growth of the product by a token depends on the number of samples."""

    class Counted(Glued):
        def body(self, x: Tensor) -> Tensor:
            x, tokens = self.layers[0](x)
            return x / tokens

    model = Counted()
    model.layers[0] = Counting(H, H)
    flow = trace(model, batch())
    deltas = flow.axes.deltas(read_batch(model, batch(rows=5, length=31)))
    assert deltas is not None and flow.calls[1].leaves[1].at(deltas) == 5 * 31


def test_values_written_in_place_are_noted() -> None:
    class InPlace(Glued):
        def body(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            kept = self.layers[1](x)
            x *= 2
            return self.layers[2](x + kept)

    assert trace(InPlace(), batch()).written == {Value(1, 0)}


class Greedy(nn.Linear):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return super().forward(x)


def test_a_unit_that_writes_to_its_input_is_noted_for_each_of_its_kind() -> None:
    model = Glued()
    model.layers = nn.ModuleList(Greedy(H, H) for _ in range(3))
    model.body = lambda x: model.layers[2](model.layers[1](model.layers[0](x)))
    assert trace(model, batch()).written == {Value(0, 0), Value(1, 0), Value(2, 0)}


def test_who_reads_what_a_unit_wrote_in_place_stays_with_that_unit() -> None:
    model = Glued()
    model.layers = nn.ModuleList([nn.Linear(H, H), Greedy(H, H), nn.Linear(H, H)])
    flow = trace(model, batch())  # x + layer(x), where the layer has changed x
    assert flow.calls[3].reads.hidden == {2}
    assert 3 in forbidden_cuts(flow)


def test_a_unit_s_buffers_stay_as_they_are() -> None:
    class Counting(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            assert bool(x.isfinite().all())  # so that it runs on values, not by shape
            return super().forward(x.transpose(1, 2)).transpose(1, 2)

    model = Glued()
    model.layers = nn.ModuleList([Counting(H), nn.Linear(H, H)])
    trace(model, batch())
    assert model.layers[0].num_batches_tracked == 0 and not model.layers[0].running_mean.any()


def test_glue_that_reads_a_unit_s_parameter_is_seen() -> None:
    class Tied(Glued):
        def body(self, x: Tensor) -> Tensor:
            return self.layers[0](x) @ self.layers[1].weight.T

    flow = trace(Tied(), batch())
    assert flow.calls[-1].reads.parameters == {"layers.1.weight"}
    held = Policy(Tied(), flow, 0, 2, partition=[2, 1]).ownership.held
    assert "layers.1.weight" in held[1]


def test_a_unit_called_twice_is_two_calls() -> None:
    class Shared(Glued):
        def body(self, x: Tensor) -> Tensor:
            return self.layers[0](self.layers[1](self.layers[0](x)))

    flow = trace(Shared(), batch())
    assert [call.unit for call in flow.calls] == ["embed", "layers.0", "layers.1", "layers.0", "head"]
    shared = Policy(Shared(), flow, 0, 2, partition=[2, 3]).ownership.shared()
    assert shared == {"layers.0.bias": [0, 1], "layers.0.weight": [0, 1]}


class Leaky(nn.Linear):
    """Leaves something behind where nobody can look."""

    store: Any
    place = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.store[self.place] = y.square().mean()
        return y


def leaking() -> nn.Module:
    class Leaking(Glued):
        def body(self, x: Tensor) -> Tensor:
            Leaky.store = np.zeros(3, dtype=object)
            for Leaky.place, layer in enumerate(self.layers):
                x = layer(x)
            return x + sum(Leaky.store)

    model = Leaking()
    model.layers = nn.ModuleList(Leaky(H, H) for _ in range(3))
    return model


def test_a_value_that_leaves_a_unit_sideways_forbids_cuts() -> None:
    model = leaking()
    flow = trace(model, batch())
    assert flow.calls[-1].reads.hidden == {1, 2, 3}
    assert sorted(forbidden_cuts(flow)) == [2, 3, 4]
    assert Policy(model, flow, 0, 2).stages == (0, 1, 1, 1, 1)
    with pytest.raises(PartitionError, match=r"escapes unit layers\.0 untracked"):
        Policy(model, flow, 0, 3)


@pytest.mark.turns
def test_router_logits_that_a_hook_takes_away_are_values_of_their_units() -> None:
    model = zoo.build("mixtral")
    model.config.output_router_logits = True
    flow = trace(model, zoo.batch("mixtral"))
    assert flow.loss is not None and not flow.loss.hidden
    routers = filter(flow.is_aside, flow.loss.values)
    assert {flow.calls[value.call].unit for value in routers} == {f"model.layers.{k}" for k in range(4)}
    assert {part.source.module for call in flow.calls for part in call.parts} >= {"", "mlp.gate"}
    assert not any(module._forward_hooks for module in model.modules())


def test_a_decision_on_an_activation_is_refused_with_its_line() -> None:
    class Deciding(Glued):
        def body(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            if x.sum() > 0:
                x = self.layers[1](x)
            return x

    flow = trace(Deciding(), batch())
    with pytest.raises(TraceError, match=r"test_trace.py:\d+: if x.sum\(\) > 0:"):
        Policy(Deciding(), flow, 0, 2)
    assert Policy(Deciding(), flow, 0, 1).stages == (0, 0, 0)


class Gated(Glued):
    """Glue branches on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate: Any = nn.Parameter(torch.ones(()))

    def body(self, x: Tensor) -> Tensor:
        return super().body(self.gated(x))

    def gated(self, x: Tensor) -> Tensor:
        return x * 2 if self.gate > 0 else x


class GatedByWhere(Gated):
    def gated(self, x: Tensor) -> Tensor:
        return torch.where(self.gate > 0, x * 2, x)


class GatedByBuffer(Gated):
    def __init__(self) -> None:
        super().__init__()
        del self.gate
        self.register_buffer("gate", torch.ones(()))


class GatedByFloat(Gated):
    def __init__(self) -> None:
        super().__init__()
        del self.gate
        self.gate = 1.0


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.gate > 0 else x


class GatedInside(Gated):
    def __init__(self) -> None:
        super().__init__()
        del self.gate
        self.gate = Gate()

    def gated(self, x: Tensor) -> Tensor:
        return self.gate(x)


def test_a_decision_on_a_parameter_names_the_parameter() -> None:
    """The error was that of a decision on a unit's result, for which the user searched in vain."""
    refusal = r"Gated branches in Python on the parameter gate, which .*test_trace\.py:\d+: return .* if self\.gate > 0"
    with pytest.raises(TraceError, match=refusal) as refused:
        Policy(Gated(), trace(Gated(), batch()), 0, 2)
    assert "unit's result" not in str(refused.value)


@pytest.mark.parametrize("make", [GatedByWhere, GatedByBuffer, GatedByFloat, GatedInside])
def test_a_remedy_for_a_decision_on_a_parameter_works(make: type[Gated]) -> None:
    model = make()
    expected = copy.deepcopy(model)(**batch())["loss"]
    assert torch.equal(build(model, 2, batch=batch())(**batch())["loss"], expected)


@pytest.mark.turns
def test_shapes_are_affine_in_the_batch() -> None:
    flow = trace(zoo.build("t5"), zoo.batch("t5"))
    data = zoo.batch("t5", rows=5, length=21)
    deltas = flow.axes.deltas(_batch(data))
    assert deltas is not None
    decoder = next(k for k, call in enumerate(flow.calls) if call.unit == "decoder.block.1")
    shapes = [flow.spec(Value(decoder, leaf)).at(deltas) for leaf in range(3)]
    assert shapes == [(5, 18, 32), (1, 4, 18, 18), (1, 4, 18, 21)]
    assert flow.axes.deltas(_batch({**data, "extra": data["labels"]})) is None
    assert flow.axes.deltas(_batch({**data, "attention_mask": data["attention_mask"][:, 1:]})) is None


def test_a_shape_that_is_not_affine_is_pinned() -> None:
    class Rounding(Glued):
        def body(self, x: Tensor) -> Tensor:
            padded = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 4))
            return self.layers[1](self.layers[0](padded))[:, : x.shape[1]]

    flow = trace(Rounding(), batch(length=6))
    assert flow.axes.deltas(_batch(batch(length=7))) is None
    exact = trace(Rounding(), batch(length=7), exact=True)
    assert exact.calls[1].leaves[0].shape == (2, 8, H)


def test_nothing_changes_in_the_model_and_no_random_number_is_drawn() -> None:
    model = zoo.build("gpt2")
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    trace(model, zoo.batch("gpt2"))
    assert torch.equal(torch.get_rng_state(), state)
    after = {name: dict(module.__dict__) for name, module in model.named_modules()}
    assert {n: d.keys() for n, d in after.items()} == {n: d.keys() for n, d in before.items()}


@pytest.mark.turns
def test_random_numbers_that_glue_draws_are_noted() -> None:
    for name, drawn in (("gpt2", True), ("llama", False)):  # GPT-2 has a dropout after its embeddings
        model = zoo.build(name)
        assert not trace(model, zoo.batch(name)).glue_random
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1
        assert trace(model, zoo.batch(name)).glue_random is drawn
        assert not trace(model.eval(), zoo.batch(name)).glue_random


def test_a_unit_that_does_not_run_by_shape_runs_on_throw_away_values() -> None:
    class Deciding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if bool((x == 0).all()) else super().forward(-x)

    model = Glued()
    model.layers = nn.ModuleList(Deciding(H, H) for _ in range(3))
    assert len(trace(model, batch()).calls) == 5


def test_a_failing_forward_names_the_batch() -> None:
    with pytest.raises(TraceError, match=r"dry_run_input"):
        trace(Glued(), {"input_ids": torch.zeros(2, 3, dtype=torch.int64)})


class Failing(nn.Linear):
    """Fails for any input, or only for one without values."""

    on_meta = "the mask is missing"

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(self.on_meta if x.is_meta else "the mask is missing")


def test_a_unit_s_error_that_needs_no_values_is_quoted_once() -> None:
    """The error of the first attempt, on meta, was quoted after the same error of the second."""
    model, failing = Glued(), Failing(H, H)
    model.layers[1] = failing
    quoted = r"unit layers\.1 \(Failing\) failed in the trace: ValueError: the mask is missing\. The unit's inputs"
    with pytest.raises(TraceError, match=quoted):
        trace(model, batch())
    failing.on_meta = "no values"
    with pytest.raises(TraceError, match=r"missing \(the first attempt, .* failed with: ValueError: no values\)\."):
        trace(model, batch())


class Yielding(nn.Linear):
    """Returns a generator, also as a part of a tuple, or keeps one in an attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__(H, H)
        self.kind, self.items = kind, None

    def forward(self, x: Tensor) -> Any:
        items = (item for item in [super().forward(x)])
        if self.kind == "attribute":
            self.items = items
            return x
        return (x, items) if self.kind == "tuple" else items


@pytest.mark.parametrize(
    ("kind", "does"),
    [("result", "returns a generator"), ("tuple", "returns a generator"), ("attribute", "keeps a generator in items")],
)
def test_a_unit_that_leaves_a_generator_is_named(kind: str, does: str) -> None:
    """The error named neither the layer nor its class."""
    model = Glued()
    model.layers[2] = Yielding(kind)
    with pytest.raises(TraceError, match=rf"unit layers\.2 \(Yielding\) {does}, but a generator's code runs only"):
        trace(model, batch())


class TakesWhole(Glued):
    """Takes the whole batch as one argument."""

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return super().forward(batch["input_ids"], batch["labels"])


@pytest.mark.parametrize(
    ("make", "unknown", "right"),
    [
        (Glued, "weights", {**batch(), "criterion.weights": torch.ones(2)}),
        (TakesWhole, "input_ids", ({**batch(), "weights": torch.ones(2)},)),
    ],
)
def test_keys_that_the_forward_does_not_take_are_named(make: type[nn.Module], unknown: str, right: Any) -> None:
    """The remedy was another input or dimension: labels for the criterion alone, or one dict for a forward, are what
    users of their own modules try first."""
    remedy = (
        rf"unexpected keyword argument '{unknown}'.*To pass {unknown} only to the criterion, "
        rf"rename it to 'criterion\.{unknown}' in the batch\. .*let the dataloader return \(batch,\)"
    )
    with pytest.raises(TraceError, match=remedy):
        trace(make(), {**batch(), "weights": torch.ones(2)})
    assert trace(make(), right).calls


@pytest.mark.parametrize(
    "criterion",
    [lambda out, data: out["logits"], lambda out, data: 3.0, lambda out, data: None],
    ids=["not a scalar", "not a tensor", "None"],
)
def test_a_criterion_without_a_scalar_is_refused(criterion: Any) -> None:
    with pytest.raises(ConfigurationError, match="not a scalar tensor"):
        trace(Glued(), batch(), criterion)


MASK = "criterion.mask"
SIZELESS = {
    "mean": lambda x, mask: x[mask].mean(),
    "masked_select": lambda x, mask: torch.masked_select(x, mask[..., None]).sum() / mask.sum(),
    "nonzero": lambda x, mask: x.flatten(0, 1)[mask.flatten().nonzero().flatten()].sum(),
    "cat": lambda x, mask: torch.cat([x[mask], x[~mask]]).mean(),
    "ones_like": lambda x, mask: (x[mask] * torch.ones_like(x[mask])).mean(),
    "cross_entropy": lambda x, mask: nn.functional.cross_entropy(x[mask], x[mask].argmax(-1)),
}
SIZED = {
    "shape": lambda x, mask: x[mask].sum() / x[mask].shape[0],
    "size": lambda x, mask: x[mask].sum() / x[mask].size(0),
    "len": lambda x, mask: x[mask].sum() / len(x[mask]),
    "branch": lambda x, mask: x[mask].sum() if x[mask].numel() else x.sum(),
    "torch.numel": lambda x, mask: x[mask].sum() / torch.numel(x[mask]),
    "iteration": lambda x, mask: sum(row.sum() for row in x[mask]),
    "unbind": lambda x, mask: sum(row.sum() for row in x[mask].unbind()),
    "split": lambda x, mask: sum(rows.sum() for rows in x[mask].split(2)),
    "ones_like": lambda x, mask: x[mask].sum() / len(torch.ones_like(x[mask])),
    "sum of a dimension": lambda x, mask: x[mask].sum(1).sum() / x[mask].sum(1).shape[0],
}


@pytest.mark.parametrize(("losses", "watched"), [(SIZELESS, set()), (SIZED, {MASK})], ids=["sizeless", "sized"])
@pytest.mark.turns
def test_a_mask_of_a_criterion_counts_if_its_sizes_are_read(losses: dict[str, Any], watched: set[str]) -> None:
    """DPO's metrics index with the mask of the completions, so that each batch had a trace of its own, in every step.
    Where Python code reads how many there are, it must have one: the code may then read other results."""
    data = batch()
    data[MASK] = torch.rand(data["input_ids"].shape, generator=torch.Generator().manual_seed(0)) > 0.5
    for name, loss in losses.items():
        flow = trace(Glued(), data, lambda output, given, loss=loss: loss(output["logits"], given[MASK]))
        assert (flow.watched, flow.decisions) == (watched, ()), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", zoo.MODELS)
def test_every_unit_of_the_zoo_is_called_or_tied(name: str) -> None:
    model = zoo.build(name)
    flow = trace(model, zoo.batch(name))
    called = {call.unit for call in flow.calls}
    assert not flow.decisions
    assert set(find_units(model)) - called <= {"shared"}


def fastest_trace(layers: int) -> tuple[float, nn.Module, Dataflow]:
    """The CPU seconds of the fastest of three traces of a llama of 405 billion parameters with this many layers."""
    sizes = {"vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 128, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    data = {name: torch.ones(2, 64, dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")}
    seconds = []
    for _ in range(3):  # the machine may be busy, or just be importing what torch imports late
        start = time.process_time()
        flow = trace(model, data)
        seconds.append(time.process_time() - start)
    return min(seconds), model, flow


@pytest.mark.turns
def test_llama_405b_on_meta_in_the_time_of_ten_small_ones_and_a_gigabyte() -> None:
    """A layer is visited once; the other 125 are answered: this took 2 s, where a llama of two layers took 0.2 s."""
    few, *_ = fastest_trace(2)
    reset_peak()
    before = resident()
    seconds, model, flow = fastest_trace(126)
    assert seconds < 10 * few
    assert peak() - before < 1e9
    assert len(flow.calls) == 129
    layers = Policy(model, flow, 0, 16).stages
    assert sorted(set(layers)) == list(range(16))


def test_balance_is_as_good_as_trying_every_cut() -> None:
    assert balance([1.0, 1.0, 1.0, 1.0], 2) == [2, 2]
    assert balance([5.0, 1.0, 1.0, 1.0, 2.0], 2) == [1, 4]
    assert balance([1.0, 1.0, 1.0, 1.0, 6.0], 3) == [2, 2, 1]
    assert balance([1.0, 1.0, 1.0, 1.0], 2, {2: "kept together"}) in ([1, 3], [3, 1])


def _batch(data: Any) -> Any:
    return Batch.of(data)


class Addressed(nn.Linear):
    """As a kernel of Triton's is launched, which takes 0 for an address like any other."""

    log: Path

    def forward(self, x: Tensor) -> Tensor:
        with self.log.open("a") as file:
            print(x.data_ptr(), getattr(self.weight, "data_ptr")(), file=file)  # noqa: B009
        return super().forward(x)


class Fused(Glued):
    """Glue that launches a kernel of Triton's on the head's weight, as the fused losses of Liger do."""

    is_fused = True

    def body(self, x: Tensor) -> Tensor:
        if self.is_fused:
            raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
        return super().body(x)


def test_a_kernel_between_units_is_named() -> None:
    """A user trained with Liger's kernels. The trace failed, and the error advised another batch."""
    model = Fused()
    with pytest.raises(TraceError, match="a Triton kernel between units, such as a fused loss") as caught:
        trace(model, batch())
    assert "fused_linear_cross_entropy=False" in str(caught.value) and "dry_run_input" not in str(caught.value)
    model.is_fused = False
    assert len(trace(model, batch()).calls) == 5


def test_no_unit_gets_the_address_of_a_tensor_on_meta(tmp_path: Path) -> None:
    """It would have read and written around address 0, and on a GPU all of the process would have been lost."""
    Addressed.log, model = tmp_path / "addresses", Glued()
    model.layers = nn.ModuleList(Addressed(H, H) for _ in range(3))
    assert [call.unit for call in trace(model, batch()).calls] == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    taken = Addressed.log.read_text().split()
    assert taken and "0" not in taken


def test_such_a_unit_runs_on_the_plugin_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran where the model was: on the CPU as a rule, where kernels for GPUs (flash attention) do not run."""
    devices, visit_on = [], Kinds._visit_on

    def noted(kinds: Kinds, device: torch.device, *args: Any) -> Any:
        devices.append(device)
        return visit_on(kinds, device, *args)

    class Known(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert float(self.weight.sum()) == H * H  # its own values are there
            return super().forward(x)

    model, elsewhere = Glued(), torch.device("cpu", 0)
    model.layers = nn.ModuleList(Known(H, H) for _ in range(3))
    for layer in model.layers:
        nn.init.ones_(layer.weight)
    monkeypatch.setattr(Kinds, "_visit_on", noted)
    trace(model, batch(), device=elsewhere)
    assert set(devices) == {torch.device("meta"), elsewhere}


def test_kernels_get_no_boundaries_of_documents_beyond_a_traced_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that runs on a device, as under autocast, got 8 positions of a packed row with the boundaries of all its
    documents: flash attention would have read and written beyond its tensors."""
    sizes, functions = [], transformers.AttentionInterface._global_mapping
    usual = functions["sdpa"]

    def noted(module: nn.Module, query: Tensor, *args: Any, cu_seq_lens_q: Tensor | None = None, **kwargs: Any) -> Any:
        if not query.is_meta and cu_seq_lens_q is not None:
            sizes.append((int(cu_seq_lens_q[-1]), query.shape[0] * query.shape[2]))
        return usual(module, query, *args, **kwargs)

    model = zoo.build("llama")
    monkeypatch.setitem(functions, "sdpa", noted)
    with torch.autocast("cpu", torch.bfloat16):
        flow = trace(model, zoo.packed(9, 11, 12))
    assert all(last <= rows for last, rows in sizes)
    assert flow.axes.deltas(read_batch(model, zoo.packed(8, 10, 11, 4))) is not None


class Noted(nn.Linear):
    """A layer with a dict in which its name stands, as peft's layers have one; `read` says how its forward reads it."""

    def __init__(self, name: str, read: str) -> None:
        super().__init__(H, H)
        self.notes: Any = {"name": name, "more": {"name": name}}
        self.read = read
        if read == "alias":
            self.other = self.notes["more"]
        if read == "tuple":
            self.pair = (self.notes["more"], 1)

    def forward(self, x: Tensor) -> Tensor:
        names = {
            "attribute": lambda: self.notes["name"],
            "inner": lambda: self.notes["more"]["name"],
            "alias": lambda: self.other["name"],
            "tuple": lambda: self.pair[0]["name"],
        }
        name = names[self.read]() if self.read else ""
        return super().forward(x) * (2 if name == "1" else 1)


@pytest.mark.parametrize("read", ["", "attribute", "inner", "alias", "tuple"])
def test_layers_are_of_one_kind_where_they_differ_in_what_they_do_not_read(
    monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """peft notes a layer's name in a dict of each LoRA layer: each of 80 layers was traced by itself."""
    visited, visit = [], Kinds._visit

    def noted(kinds: Kinds, call: Any, *args: Any) -> Any:
        visited.append(call.unit)
        return visit(kinds, call, *args)

    model = Glued()
    model.layers = nn.ModuleList(Noted(str(k), read) for k in range(3))
    monkeypatch.setattr(Kinds, "_visit", noted)
    found = trace(model, batch())
    assert [call.unit for call in found.calls if "layers" in call.unit] == ["layers.0", "layers.1", "layers.2"]
    assert len({unit for unit in visited if "layers" in unit}) == (3 if read else 1)


def times(layer: Any, x: Tensor, factor: float = 1.0) -> Tensor:
    result: Tensor = nn.Linear.forward(layer, x) * factor
    return result


def by_closure(layer: Any, k: int) -> Any:
    return lambda x: times(layer, x, k)


def by_default(layer: Any, k: int) -> Any:
    return lambda x, factor=k: times(layer, x, factor)


def by_keyword(layer: Any, k: int) -> Any:
    def forward(x: Tensor, *, factor: int = k) -> Tensor:
        return times(layer, x, factor)

    return forward


PATCHES: dict[str, tuple[Any, int]] = {
    "bound": (lambda layer, k: MethodType(times, layer), 1),
    "partial": (lambda layer, k: partial(times, layer), 1),
    "one": (lambda layer, k: MethodType(times, layer) if k == 1 else None, 2),
    "closure": (by_closure, 3),
    "default": (by_default, 3),
    "keyword": (by_keyword, 3),
    "partial of a keyword": (lambda layer, k: partial(times, layer, factor=k), 3),
    "partial of a default": (lambda layer, k: partial(by_default(layer, k)), 3),
}


@pytest.mark.parametrize("way", PATCHES)
def test_layers_are_of_one_kind_if_their_own_forwards_are_alike(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """All calls of units are intercepted, so a layer with a forward of its own was of the kind of a layer without, and
    functions that differ in the defaults of a loop were alike."""
    visited, visit = [], Kinds._visit

    def noted(kinds: Kinds, call: Any, *args: Any) -> Any:
        visited.append(call.unit)
        return visit(kinds, call, *args)

    model, (patch, expected) = Glued(), PATCHES[way]
    model.layers = nn.ModuleList(nn.Linear(H, H) for k in range(3))
    for k, layer in enumerate(model.layers):
        if forward := patch(layer, k):
            layer.forward = forward
    monkeypatch.setattr(Kinds, "_visit", noted)
    trace(model, batch())
    assert len({unit for unit in visited if "layers" in unit}) == expected


class Scaled(nn.Linear):
    """A layer that also reads tensors of an object that it receives, of itself, and of a module that layers share."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__(H, H, bias=False)
        self.shared, self.scale = shared, torch.ones(())

    def forward(self, x: Tensor, told: Any) -> Tensor:
        return super().forward(x) * told.scale * self.scale * self.shared.scale


class Scales(Glued):
    """Glue computes one of these tensors from the first layer's result."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.shared = kind, nn.Module()
        self.shared.register_buffer("scale", torch.ones(()))
        self.layers = nn.ModuleList(Scaled(self.shared) for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        told = SimpleNamespace(scale=torch.ones(()))
        first = self.layers[0](x, told)
        scale = first.detach().mean().sigmoid()
        match self.kind:
            case "argument":
                told.scale = scale
            case "attribute":
                for layer in self.layers:
                    layer.scale = scale
            case "shared buffer":
                self.shared.scale.copy_(scale)
        return first + sum(layer(x, told) for layer in self.layers[1:])


@pytest.mark.parametrize("kind", ["argument", "attribute", "shared buffer", "none"])
def test_a_call_that_reads_a_computed_tensor_beside_its_inputs_is_of_no_kind_without_it(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Layers 1 and 2 were taken for layers of layer 0's kind, which had read a constant: the first layer's result was
    not sent to them, and a mask computed from it was False everywhere on later stages, silently."""
    visited, visit = [], Kinds._visit

    def noted(kinds: Kinds, call: Any, *args: Any) -> Any:
        visited.append(call.unit)
        return visit(kinds, call, *args)

    monkeypatch.setattr(Kinds, "_visit", noted)
    found, own = reads(Scales(kind)), [] if kind == "none" else [Value(1, 0)]
    assert found["layers.1"] == found["layers.2"] == [Value(0, 0), *own]
    assert (len({unit for unit in visited if "layers" in unit}) == 1) == (kind == "none")


class Centers(Glued):
    """Layers read a statistic that the forward computes last."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Module()
        self.shared.register_buffer("scale", torch.ones(()))
        self.layers = nn.ModuleList(Scaled(self.shared) for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        told = SimpleNamespace(scale=torch.ones(()))
        for layer in self.layers:
            x = layer(x, told)
        self.shared.scale.lerp_(x.detach().mean(), 0.1)
        return x


def test_layers_that_read_the_state_of_the_last_forward_are_not_cut_from_its_maker() -> None:
    """In the next forward, the layers were taken for layers of the first forward's kind, which had read a constant: the
    first stage kept the initial value of the statistic, silently."""
    forbidden = forbidden_cuts(trace(Centers(), batch()))
    assert "reads shared.scale" in forbidden[2] and "layers.2" in forbidden[3]


def test_what_glue_drops_is_freed() -> None:
    """A chunked loss of 64k tokens made 128 masks of 134 MB: the trace kept all, for questions that nobody asked."""

    class Masking(Glued):
        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            mask = labels[:, None] < labels[:, :, None]
            alive = weakref.ref(mask)
            assert bool((~mask).any())  # a question, which is recorded with the operators that computed the mask
            del mask
            assert alive() is None
            return super().forward(input_ids, labels)

    assert trace(Masking(), batch()).questions


class Frames(nn.Module):
    """Audio in frames of 400 numbers, one every 160."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layer, self.head = nn.Linear(400, H), nn.Linear(H, H), nn.Linear(H, 11)

    def forward(self, audio: Tensor) -> Tensor:
        logits = self.head(torch.relu(self.layer(self.enter(audio.unfold(1, 400, 160)))))
        return logits.mean()


class Windows(Glued):
    """Pads sequences to windows of 64 positions."""

    def body(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return super().body(nn.functional.pad(x, (0, 0, 0, -length % 64)))[:, :length]


@pytest.mark.parametrize(
    ("model", "data", "longer"),
    [
        (Frames(), {"audio": torch.randn(4, 16000)}, {"audio": torch.randn(4, 24000)}),
        (Windows(), batch(length=20), batch(length=100)),
        (Glued(), batch(length=20), batch(length=100)),
    ],
    ids=["frames", "windows", "affine"],
)
def test_lengths_that_are_rounded_to_many_positions_are_traced_again(model: nn.Module, data: Any, longer: Any) -> None:
    """The shapes were tried with lengths up to 29 larger. Lengths that are rounded to more looked constant, and a
    longer batch ended in an error in the middle of a step, whose advice did not help."""
    flow = trace(model, data)
    is_affine = type(model) is Glued
    assert (flow.axes.deltas(read_batch(model, longer)) is not None) == is_affine


class Strided(nn.Linear):
    """Returns every n-th feature, and a number that depends on the batch's sizes."""

    def __init__(self, stride: Any) -> None:
        super().__init__(H, H)
        self.stride = stride

    def forward(self, x: Tensor, stride: Any = 1) -> Any:
        x = super().forward(x)
        return x[..., :: int(self.stride)], x[..., :: int(stride)], stride * self.stride * np.prod(x.shape)


class Strides(nn.Module):
    def __init__(self, strides: Any, of_calls: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Strided, strides))
        self.of_calls = of_calls

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        results = [layer(x, stride) for layer, stride in zip(self.layers, self.of_calls, strict=True)]
        return {"loss": sum(a.mean() + b.mean() for a, b, _ in results)}


@pytest.mark.parametrize("strides", [([1, 2], [1, 1]), ([1, 1], [1, 2])])
def test_layers_differ_by_a_number_of_numpy(strides: tuple[list[int], list[int]]) -> None:
    """A second layer with another np.int64 got the shapes of the first, and its number was that of the traced sizes."""
    flow = trace(Strides(*map(np.array, strides)), torch.zeros(2, H))
    first, second = ([spec.shape for spec in call.leaves[:2]] for call in flow.calls)
    assert first == [(2, H), (2, H)] and sorted(second) == [(2, H // 2), (2, H)]
    assert [call.leaves[2] for call in flow.calls] == [2 * H, 4 * H]
    assert flow.axes.deltas(_batch(torch.zeros(3, H))) is None


class Queued(nn.Linear):
    """Passes an auxiliary loss on in an object that the trace cannot look into."""

    def __init__(self, losses: Any) -> None:
        super().__init__(H, H)
        self.losses = losses

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.losses.put(x.square().mean())
        return x


class Queues(Glued):
    def __init__(self, layers: int = 3) -> None:
        super().__init__(layers)
        self.losses: Any = queue.SimpleQueue()
        self.layers = nn.ModuleList(Queued(self.losses) for _ in range(layers))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = super().forward(input_ids, labels)
        while not self.losses.empty():
            output["loss"] = output["loss"] + self.losses.get()
        return output


def test_a_loss_through_a_queue_does_not_train_parameters_of_the_criterion() -> None:
    """The stand-ins of the layers' parameters were taken for parameters of the criterion."""
    flows = [trace(Queues(), batch(), criterion) for criterion in (None, lambda output, batch: output["loss"])]
    assert [flow.loss and flow.loss.hidden for flow in flows] == [{1, 2, 3}, {1, 2, 3}]
