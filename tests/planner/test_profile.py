"""Tests of profiles: units timed on the device, saved in a file, refused for another model, and used by a plan."""

from __future__ import annotations

import copy
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_structure

from pipeshard import plan, trace
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.graph.shapes import blank_state
from pipeshard.planner import Profile, profile_units
from pipeshard.planner.profile import Capture, Stopwatch
from pipeshard.split.partition import Cost
from pipeshard.split.policy import Policy
from tests import zoo
from tests.pool import Pool
from tests.unsplit import Split

H = 16


class Slow(nn.Module):
    """A layer that takes as many milliseconds as it is told, forward and backward."""

    def __init__(self, forward: int, backward: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.ms = forward, backward

    def forward(self, x: Tensor, options: Any = None) -> Tensor:
        time.sleep(self.ms[0] / 1000)
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda grad: time.sleep(self.ms[1] / 1000))
        return y


class Model(nn.Module):
    """An embedding, layers, and a head, which are called with something else than tensors too."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, H)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(H, 11)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x, options={"place": "middle", "scale": [1.0, x.detach()]})
        return {"loss": nn.functional.cross_entropy(self.head(x).view(-1, 11), labels.view(-1))}


def batch(rows: int = 2, length: int = 6) -> dict[str, Tensor]:
    ids = torch.arange(rows * length).view(rows, length) % 11
    return {"input_ids": ids, "labels": ids}


def profile(model: nn.Module, data: dict[str, Tensor] | None = None, **options: Any) -> Profile:
    data = batch() if data is None else data
    return profile_units(model, trace(model, data), data, "cpu", **options)


@pytest.mark.turns
def test_times_are_those_of_each_unit() -> None:
    model = Model(Slow(20), Slow(1, backward=40), Slow(20))
    found = profile(model)
    assert found.units == ("embed", "layers.0", "layers.1", "layers.2", "head")
    _, slow, back, again, _ = found.times
    assert slow.forward >= 0.02 > slow.backward and back.backward >= 0.04 > back.forward
    assert again == slow  # of one kind, and timed once
    assert found.device == "cpu" and found.microbatch == {"input_ids": (2, 6), "labels": (2, 6)}


def late(output: Any, batch: Any) -> Tensor:
    """A criterion of 30 ms forward and 50 ms backward."""
    time.sleep(0.03)
    loss: Tensor = output["loss"] * 2
    loss.register_hook(lambda grad: time.sleep(0.05))
    return loss


@pytest.mark.turns
@pytest.mark.parametrize("on_meta", [False, True])
def test_the_loss_belongs_to_the_last_call(on_meta: bool) -> None:
    """It was in no time at all: of a large vocabulary it takes a tenth of a step, and the last stage was late."""
    with torch.device("meta" if on_meta else "cpu"):
        model = Model(Slow(1), Slow(1))
    *others, last = profile(model, criterion=late).times
    assert last.forward >= 0.03 and last.backward >= 0.05
    assert all(cost.forward < 0.03 and cost.backward < 0.05 for cost in others)


def test_the_first_runs_of_a_unit_do_not_count() -> None:
    watch = Stopwatch(nn.Linear(H, H), Capture([], frozenset(), tree_structure(())), torch.device("cpu"))
    slow, settled = [Cost(9, 9, 9)] * 3, [Cost(k, k + 1, k + 2) for k in (5, 4, 3, 2, 1)]
    with mock.patch.object(watch, "_run", side_effect=slow + settled):
        assert watch.median(5) == Cost(3, 4, 5)


class Wide(nn.Module):
    """A wide layer, called as a layer or not."""

    def __init__(self, called: bool) -> None:
        super().__init__()
        self.linear, self.called = nn.Linear(1024, 1024, bias=False), called

    def forward(self, x: Tensor, options: Any) -> Tensor:
        return self.linear(x) if self.called else nn.functional.linear(x, self.linear.weight)


@pytest.mark.turns
@pytest.mark.parametrize("called", [True, False])
def test_a_weight_gradient_that_can_wait_has_a_time_of_its_own(called: bool) -> None:
    model = Model(Wide(called))
    model.embed, model.head = nn.Embedding(11, 1024), nn.Linear(1024, 11)
    cost = profile(model, batch(16, 16)).times[1]
    assert (cost.weight > 0.2 * cost.backward) is called


@pytest.mark.turns
@pytest.mark.parametrize("name", ["llama-tied", "t5", "vit", "mixtral"])
def test_the_model_is_as_it_was(name: str) -> None:
    model = zoo.build(name).eval()
    before = copy.deepcopy(model.state_dict())
    numbers = torch.random.get_rng_state()
    found = profile(model, zoo.batch(name))
    assert not found.estimated and all(cost.forward > 0 for cost in found.times)
    assert all(parameter.grad is None for parameter in model.parameters()) and not model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), numbers)


@pytest.mark.turns
def test_a_model_on_meta_is_timed_with_made_up_weights() -> None:
    with torch.device("meta"):
        model = zoo.build("llama")
    assert all(cost.forward > 0 for cost in profile(model, zoo.batch("llama")).times)
    assert all(parameter.is_meta for parameter in model.parameters())


class Picky(nn.Linear):
    """Runs by shape, and on real weights only."""

    def forward(self, x: Tensor, options: Any = None) -> Tensor:
        if x.device.type != "meta" and x.abs().max() > 0.5:
            raise ValueError("these are no activations of mine")
        return super().forward(x)


def test_what_does_not_run_gets_its_share_of_the_others_with_a_warning() -> None:
    model = Model(nn.Linear(H, H), Picky(H, H))
    model.layers[0].forward = lambda x, options: nn.functional.linear(x, model.layers[0].weight)
    with pytest.warns(UserWarning, match=r"unit layers.1 \(Picky\) failed.*no activations of mine"):
        found = profile(model)
    assert found.estimated == ("layers.1",)
    total = sum(map(sum, found.times))
    assert 0.05 * total < sum(found.times[2]) < 0.8 * total


def test_a_model_of_which_nothing_runs_cannot_be_profiled() -> None:
    failing = mock.patch("pipeshard.planner.profile.Stopwatch.median", side_effect=ValueError)
    with failing, warnings.catch_warnings(action="ignore"), pytest.raises(UsageError, match="could be timed"):
        profile(zoo.build("gpt2"), zoo.batch("gpt2"))


@pytest.mark.turns
def test_a_profile_survives_its_file_and_is_refused_for_something_else(tmp_path: Path) -> None:
    data = zoo.batch("gpt2")
    model = zoo.build("gpt2")
    found = profile(model, data)
    found.save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json")
    assert loaded == found
    flow = trace(model, data)
    assert loaded.costs(flow) == [sum(cost) for cost in found.times]
    with pytest.raises(ConfigurationError, match=r"the unit calls differ.*measured on cpu with torch"):
        loaded.costs(trace(zoo.build("llama"), zoo.batch("llama")))
    with pytest.raises(ConfigurationError, match=r"differ .LlamaForCausalLM in this run, GPT2LMHeadModel in the"):
        plan(zoo.build("llama"), zoo.batch("llama"), 2, num_microbatches=1, profile=loaded)
    with pytest.raises(
        ConfigurationError, match=r"differ .input_ids is \(4, 12\) in this run, \(8, 12\) in the profile"
    ):
        plan(model, data, 2, num_microbatches=2, profile=loaded)
    (tmp_path / "other.json").write_text('{"model": 3}')
    with pytest.raises(ConfigurationError, match="is not a profile"):
        Profile.load(tmp_path / "other.json")


def spent(stopwatch: Stopwatch, repeats: int) -> Cost:
    """Replaces `Stopwatch.median`, whose times grow on a busy machine: the times of a Slow, 0.1 ms for other units."""
    forward, backward = getattr(stopwatch.unit, "ms", (0.1, 0.1))
    return Cost(forward / 1000, backward / 1000, 0.0)


@mock.patch.object(Stopwatch, "median", spent)
def test_plans_and_policies_go_by_measured_times(tmp_path: Path) -> None:
    model = Model(*(Slow(1) for _ in range(3)), Slow(20))
    found = profile(model)
    policy = Policy(model, trace(model, batch()), 0, 2, "profile", costs=found.costs(trace(model, batch())))
    assert [policy.stages.count(stage) for stage in (0, 1)] == [4, 2]
    path = tmp_path / "profile.json"
    made = plan(model, batch(8), 2, num_microbatches=4, partition=f"profile:{path}", schedule="1f1b")
    assert made.unit == "seconds" and made.counts == [4, 2]
    assert made.stages[1].forward >= 0.02 and made.estimate.time >= 4 * 0.02
    kept = Profile.load(path)
    again = plan(model, batch(8), 2, num_microbatches=4, partition=f"profile:{path}", schedule="1f1b")
    assert again == made and kept.microbatch["input_ids"] == (2, 6)
    assert plan(model, batch(8), 2, num_microbatches=4, profile=str(path)).unit == "seconds"


def dtypes_timed(precision: str) -> set[torch.dtype]:
    """Those of the parameters with which boost has timed the units of a model, to cut it by their times."""
    seen: set[torch.dtype] = set()

    def median(stopwatch: Stopwatch, repeats: int) -> Cost:
        seen.update(p.dtype for p in blank_state(stopwatch.unit, stopwatch.device).values())
        return Cost(1.0, 1.0, 1.0)

    with mock.patch.object(Stopwatch, "median", median):
        Split(zoo.build("llama"), 2, zoo.batch("llama"), precision=precision, partition="profile", num_microbatches=2)
    return seen


@pytest.mark.turns
def test_boost_times_units_as_they_will_run(pool: Pool) -> None:
    """partition="profile" was measured before the model was lowered. Stages in bf16 were balanced by fp32's times."""
    assert pool.run(dtypes_timed, 2, "bf16") == [{torch.bfloat16}] * 2
    assert pool.run(dtypes_timed, 2, "fp32") == [{torch.float32}] * 2
