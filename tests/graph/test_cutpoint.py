"""Tests of CutPoints: a plain module is cut at them, trains as it does unsplit, and wrong uses raise an error."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

import pipeshard
from pipeshard import CutPoint, PipelinePlugin, build, trace
from pipeshard.errors import ConfigurationError, PartitionError, PipeshardError, TraceError, UsageError
from pipeshard.split.policy import Policy
from pipeshard.split.ties import share_weights
from tests import zoo
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, differences, parameter_error

pytestmark = pytest.mark.local

WORDS, WIDTH = 17, 12
CUTS = 5


class Net(nn.Module):
    """Five places to cut: one before, three in a loop with a skip over two of them, and one before a head of its own
    parameter; how often the last activation is scaled is a number that is found on the way."""

    def __init__(self, cut: Callable[[], nn.Module] = CutPoint) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.first = cut()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), cut()) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.last = cut()
        self.head_weight = nn.Parameter(torch.randn(WORDS, WIDTH) * 0.2)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.first(self.embed(ids))
        times, skipped = 1 + ids.shape[1] % 3, x
        for layer in self.layers:
            x = x + layer(x)
        x = self.norm(x) + functional.relu(skipped)
        x = self.last(x) * times
        logits = functional.linear(x, self.head_weight)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def net(cut: Callable[[], nn.Module] = CutPoint) -> Net:
    torch.manual_seed(0)
    return Net(cut)


def data(rows: int = 8, length: int = 5, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (rows, length), generator=generator)
    return {"ids": ids, "labels": ids.roll(1, 1).masked_fill(torch.arange(length) >= 1 + rows % length, -100)}


class Plain(Unsplit):
    def backward(self, data: Any) -> Tensor:
        loss = self.model(**data)["loss"]
        loss.backward()
        return loss.detach()


def compared_with_unsplit(p: int, **options: Any) -> list[str]:
    model = net()
    unsplit = Plain(copy.deepcopy(model))
    split = Split(model, p, data(), num_microbatches=4, **options)
    for seed in range(3):
        found = differences(split, unsplit, data(length=5 + seed, seed=seed), 1e-6 if seed == 0 else 1e-5)
        if found:
            return found
        unsplit.step()
        split.step()
    assert parameter_error(split, unsplit.model) < 1e-6
    return []


@pytest.mark.turns
@pytest.mark.sampled(3)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_any_number_of_stages_is_exact(pool: Pool, p: int) -> None:
    assert pool.run(compared_with_unsplit, p, p) == [[]] * p


@pytest.mark.turns
def test_interleaved_and_zero_bubble(pool: Pool) -> None:
    assert pool.run(compared_with_unsplit, 2, 2, partition="profile") == [[], []]
    assert pool.run(compared_with_unsplit, 2, 2, schedule="interleaved", num_model_chunks=3) == [[], []]
    assert pool.run(compared_with_unsplit, 2, 2, schedule="zbv", recompute=True) == [[], []]


def test_unwrapped_it_is_the_model_without_them() -> None:
    ours, theirs = net(), net(nn.Identity)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    a, b = ours(**data()), theirs(**data())
    assert torch.equal(a["loss"], b["loss"]) and torch.equal(a["logits"], b["logits"])
    a["loss"].backward()
    b["loss"].backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
    x = torch.ones(2)
    assert CutPoint()(x) is x and CutPoint()((x, 1)) == (x, 1)


def counts(model: nn.Module, batch: Any, p: int, partition: Any = "auto") -> list[list[str]]:
    """The unit calls of each stage."""
    flow = trace(model, batch, cuts=[] if isinstance(partition, str) else partition)
    policy = Policy(model, flow, 0, p, partition)
    return [[call.unit for call, s in zip(flow.calls, policy.stages, strict=True) if s == stage] for stage in range(p)]


@pytest.mark.turns
def test_cuts_are_after_some_of_them_and_nowhere_else() -> None:
    assert all(stage[-1].rpartition(".")[2] in ("first", "2", "last") for stage in counts(net(), data(), 5)[:-1])
    assert counts(net(), data(), 6)[-1] == []  # the head is no module
    assert counts(net(), data(), 3, ["first", "layers.1.2"]) == [
        ["embed", "first"],
        ["layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2"],
        ["layers.2.0", "layers.2.2", "norm", "last"],
    ]
    with pytest.raises(PartitionError, match="only at its CutPoints, and its forward calls 5 of them"):
        counts(net(), data(), 2, ["embed"])
    with pytest.raises(PartitionError, match=r"at most 6 stages, fewer than pp_size=7.*Use pp_size <= 6"):
        counts(net(), data(), 7)


def test_it_is_planned_like_any_model() -> None:
    plan = pipeshard.plan(net(), data(), pp_size=6, num_microbatches=4, schedule="1f1b")
    assert [stage.units for stage in plan.stages][::5] == ["embed to first", ""]
    assert plan.stages[5].calls == 0 and plan.stages[5].parameters == WORDS * WIDTH


class Wide(nn.Module):
    """Two blocks and a head of its own parameters, which costs what the parameters say."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.cuts = nn.ModuleList(CutPoint() for _ in widths[1:])
        self.weights = nn.ParameterList(torch.randn(WIDTH, width) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        for k, weight in enumerate(self.weights):
            x = x @ weight @ weight.T
            x = self.cuts[k](x) if k < len(self.cuts) else x
        return x


@pytest.mark.parametrize(("widths", "first"), [((9, 1, 1, 1), 1), ((1, 1, 1, 9), 3), ((3, 3, 3, 3), 2)])
def test_glue_with_parameters_counts(widths: tuple[int, ...], first: int) -> None:
    found = counts(Wide(*widths), torch.ones(4, WIDTH), 2)
    assert len(found[0]) == first


class Bundles(nn.Module):
    """A tuple, a dict, and a loop that calls one CutPoint in one of its turns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.cuts = nn.ModuleList([CutPoint(), CutPoint(), CutPoint()])

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y, n, mask = self.cuts[0]((self.a(x), 3, x > 0))
        held = self.cuts[1]({"y": torch.where(mask, y, -y) * n, "x": x})
        z = held["y"]
        for turn in range(3):
            z = self.b(z).relu()
            if turn == 1:
                z = self.cuts[2](z)
        z = z.clone()
        z += self.c(held["x"])
        return {"loss": functional.mse_loss(z, labels)}


def bundles(p: int) -> list[str]:
    torch.manual_seed(0)
    model = Bundles()
    unsplit = Plain(copy.deepcopy(model))
    batch = {"x": torch.randn(6, WIDTH), "labels": torch.randn(6, WIDTH)}
    return differences(Split(model, p, batch, num_microbatches=3), unsplit, batch)


@pytest.mark.turns
def test_tuples_dicts_and_units_called_again(pool: Pool) -> None:
    assert pool.run(bundles, 4, 4) == [[]] * 4


class Wrong(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b, self.cut = kind, nn.Linear(4, 4), nn.Linear(4, 4), CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.kind == "twice":
            return self.b(self.cut(self.cut(y)))
        if self.kind == "nothing":
            return self.b(self.cut(y.shape) and y)
        if self.kind == "turned":
            return self.b(self.cut(y.T).T)
        if self.kind == "changed":
            z = self.cut(y)
            z += 1
            return self.b(z) + y
        (z,) = self.cut((y.T,))
        return self.b(z.T)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("twice", TraceError, "CutPoint cut is called twice: use a separate CutPoint for each place"),
        ("nothing", TraceError, "a CutPoint got tuple .*which contains no tensor"),
        ("turned", TraceError, r"CutPoint cut got a tensor of shape \(4, \d\), whose dimension 0 is not the batch"),
    ],
)
def test_what_is_wrong_is_named(kind: str, error: type[PipeshardError], message: str) -> None:
    with pytest.raises(error, match=message):
        trace(Wrong(kind), torch.ones(6, 4))


class Changed(nn.Module):
    """The input or the output of the first CutPoint is modified in place, and the other is read later."""

    def __init__(self, changed: str) -> None:
        super().__init__()
        self.changed, self.cuts = changed, nn.ModuleList([CutPoint(), CutPoint()])
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.a(x)
        z = self.cuts[0](y)
        changed, other = (y, z) if self.changed == "input" else (z, y)
        changed += 1
        return {"loss": functional.mse_loss(self.c(self.cuts[1](self.b(other))), labels)}


@pytest.mark.parametrize("changed", ["input", "output"])
def test_no_cut_between_a_change_and_the_other_name_of_what_is_changed(changed: str) -> None:
    """A user applied relu_ to the input of a CutPoint after the call, and used the output. The next stage received the
    value of before, and the loss differed without an error."""
    model, batch = Changed(changed), {"x": torch.randn(4, WIDTH), "labels": torch.randn(4, WIDTH)}
    with pytest.raises(PartitionError, match=r"unit b uses .* of CutPoint cuts\.0 after the other was modified"):
        build(copy.deepcopy(model), ["cuts.0"], batch=batch)
    expected = copy.deepcopy(model)(**batch)["loss"]
    assert torch.equal(build(model, 2, batch=batch)(**batch)["loss"], expected)


def test_a_change_that_a_requested_output_would_miss_is_refused() -> None:
    model, batch = Wrong("changed"), {"x": torch.ones(6, 4)}
    with pytest.raises(TraceError, match=r"output .* uses .* of CutPoint cut after the other was modified"):
        build(model, ["cut"], batch=batch)


def test_a_tuple_may_be_turned() -> None:
    assert [call.unit for call in trace(Wrong("tuple"), torch.ones(6, 4)).calls] == ["a", "cut", "b"]


def test_no_tensor_outside_of_a_pipeline() -> None:
    with pytest.raises(UsageError, match="a CutPoint got int 3, which contains no tensor"):
        CutPoint()(3)


def test_values_that_differ_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = Tied()
    kept, other = model.embed.weight, model.head
    assert share_weights(model, [("embed.weight", "head")]) == {other: kept} and model.head is kept
    assert [record.message for record in caplog.records] == [
        "shared_weights: embed.weight and head have different values; the values of embed.weight are kept"
    ]
    caplog.clear()
    assert share_weights(model, [("embed.weight", "head")]) == {} and not caplog.records


class Tied(nn.Module):
    """Two pairs on different stages, and three that are to be one; all have other values at first."""

    PAIRS = (("embed.weight", "head"), ("a.bias", "c.bias"), ("a.weight", "b.weight", "c.weight"))

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(3))
        self.head = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.cuts[0](self.a(self.embed(ids)).tanh())
        x = self.cuts[1](self.b(x).tanh())
        x = self.cuts[2](self.c(x).tanh())
        logits = functional.linear(x, self.head)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def tied(p: int) -> dict[str, Tensor]:
    """The parameters that a rank holds after ten steps; those of one process are the same."""
    torch.manual_seed(0)
    model = Tied()
    reference = copy.deepcopy(model)
    reference.head = reference.embed.weight
    reference.c.bias = reference.a.bias
    reference.b.weight = reference.c.weight = reference.a.weight
    unsplit = Plain(reference)
    split = Split(model, p, data(), num_microbatches=4, shared_weights=Tied.PAIRS, max_norm=0.5)
    unsplit.max_norm = 0.5
    for seed in range(10):
        found = differences(split, unsplit, data(seed=seed), 1e-6 if seed == 0 else 1e-4)
        assert not found, (seed, found)
        unsplit.step()
        split.step()
    assert parameter_error(split, reference) < 1e-5
    return {name: parameter.detach() for name, parameter in split.held.items()}


@pytest.mark.turns
@pytest.mark.parametrize("p", [1, 2, 4])
def test_weights_tied_by_name_stay_equal(pool: Pool, p: int) -> None:
    ranks = pool.run(tied, p, p)
    for name in ("head", "a.bias", "a.weight"):
        copies = [held[name] for held in ranks if name in held]
        assert len(copies) >= min(p, 2) and all(torch.equal(copies[0], other) for other in copies)


def boosted_later() -> None:
    """The optimizer is made before boost and boosted after the model; another one is boosted with it."""
    values = []
    for is_later in (False, True):
        torch.manual_seed(0)
        model = Tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plugin = PipelinePlugin(2, num_microbatches=4, dry_run_input=data(), shared_weights=Tied.PAIRS)
        booster = Booster(plugin=plugin)
        boosted, made, *_ = booster.boost(model, None if is_later else optimizer)
        if is_later:
            _, made, *_ = booster.boost(boosted, optimizer)
        for seed in range(2):
            booster.execute_pipeline(iter([data(seed=seed)]), boosted, None, made)
            made.step()
            made.zero_grad()
        values.append([parameter for group in made.param_groups for parameter in group["params"]])
    torch.testing.assert_close(*values)


@pytest.mark.turns
def test_an_optimizer_that_is_boosted_later_follows_the_ties(pool: Pool) -> None:
    """PipelineTrainer makes the optimizer before it splits the model: the parameter that shared_weights had replaced
    was refused as one of another model."""
    pool.run(boosted_later, 2)


def saved(folder: str) -> tuple[bool, bool]:
    """Whether plain transformers finds both weights of a pair that it would not tie, and loads them equal."""
    model = zoo.build("llama")
    pair = ["model.embed_tokens.weight", "lm_head.weight"]
    split = Split(model, 2, zoo.batch("llama"), num_microbatches=2, shared_weights=[pair])
    split.booster.save_model(split.model, folder, shard=True)
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    own = split.held.get(pair[0], loaded.lm_head.weight)
    return not info["missing_keys"], torch.equal(own, loaded.lm_head.weight)


@pytest.mark.turns
def test_a_pair_is_saved_under_both_names(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(saved, 2, str(tmp_path)) == [(True, True)] * 2


def refused(shared: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        Split(Tied(), 1, data(), num_microbatches=1, shared_weights=shared)
    return str(caught.value)


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ([("embed.wieght", "head")], "shared_weights names embed.wieght.*did you mean embed.weight"),
        ([("embed.weight", "a.weight")], "only parameters of the same shape and dtype can be tied"),
        (["embed.weight"], "must list groups of two or more parameter names.*got the group 'embed.weight'"),
        ([("embed.weight",)], "must list groups of two or more parameter names"),
    ],
)
def test_what_cannot_be_tied_is_refused(pool: Pool, shared: Any, message: str) -> None:
    assert re.search(message, pool.run(refused, 1, shared)[0])


def made(size: int, device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in data(rows=size).items()}


def from_a_function() -> list[str]:
    model = net()
    unsplit = Plain(copy.deepcopy(model))
    return differences(Split(model, 2, made, microbatch_size=2), unsplit, data())


@pytest.mark.turns
def test_the_dry_run_input_may_be_a_function(pool: Pool) -> None:
    assert pool.run(from_a_function, 2) == [[], []]
