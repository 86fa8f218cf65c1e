"""Tests of schedule="auto": never slower than a known schedule that fits, within memory, and exact on ranks."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import pipeshard
from pipeshard.config import PipelineConfig
from pipeshard.engine.stage import Stage
from pipeshard.errors import ConfigurationError, PartitionError, PipeshardError
from pipeshard.planner import auto
from pipeshard.planner.candidate import Candidate, Subject
from pipeshard.planner.devices import Devices
from pipeshard.planner.inside import places_inside
from pipeshard.planner.memory import Training
from pipeshard.planner.planner import attempt, automatic, first_microbatch, schedules, study
from pipeshard.planner.profile import Profile, shapes_of
from pipeshard.schedule.search import Searched
from pipeshard.split.partition import named_modules_of
from pipeshard.split.policy import Policy
from tests import zoo
from tests.legal import check
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, differences

M = 4


@cache
def subject(name: str = "llama") -> Subject:
    """A model of nine unit calls, of which the head costs most."""
    model = zoo.build(name, layers=6)
    microbatch, _ = first_microbatch(model, zoo.batch(name), M, None, None)
    return study(model, microbatch, None, None, "auto", Training(), None)


def short(tries: int = 30) -> Any:
    return mock.patch.multiple(auto, TRIES=tries, ESTIMATES=tries)


@pytest.mark.turns
@given(st.integers(2, 4), st.integers(1, 6), st.floats(0.9, 1.5), st.sampled_from(("1f1b", "zbv", "v-min")))
@settings(max_examples=15)
def test_no_known_schedule_that_fits_is_faster(p: int, m: int, slack: float, name: str) -> None:
    limit = min(int(memory.total * slack) for memory in known(Devices.parse(p), p, m)[name].memory)
    devices = Devices.parse(p, limit)
    fitting = [each for each in known(devices, p, m).values() if each.fits]
    with short():
        try:
            found, schedule, fastest = automatic(subject().on(devices), p, m)
        except PartitionError:
            assert not fitting
            return
    assert found.fits and max(memory.total for memory in found.memory) <= limit
    assert (fastest is None) == (not fitting)
    assert found.estimate(1.0).time <= min((each.estimate(1.0).time for each in fitting), default=float("inf"))
    check(found.program)
    if isinstance(schedule, Searched):
        assert schedule(p, m) == found.program


def known(devices: Devices, p: int, m: int) -> dict[str, Candidate]:
    tried = [attempt(subject().on(devices), name, p, m, v) for name, v in schedules()]
    return {each.program.name: each for each in tried if isinstance(each, Candidate)}


@pytest.mark.turns
def test_a_search_finds_the_same_twice_and_is_faster_where_costs_are_uneven() -> None:
    open_ended = subject().on(Devices.parse(3))
    with short(100):
        (found, schedule, _), (again, the_same, _) = (automatic(open_ended, 3, 6) for _ in range(2))
    assert isinstance(schedule, Searched) and schedule == the_same and found.counts == again.counts
    limit = max(memory.total for memory in known(open_ended.devices, 3, 6)["1f1b"].memory)
    fitting = [each for each in known(Devices.parse(3, limit), 3, 6).values() if each.fits]
    assert found.estimate(1.0).bubble < 0.9 * min(each.estimate(1.0).bubble for each in fitting)


@pytest.mark.turns
def test_a_plan_shows_draws_and_writes_it(tmp_path: Path) -> None:
    with short():
        model, batch = zoo.build("llama", layers=6), zoo.batch("llama", rows=12)
        plan = pipeshard.plan(model, batch, 3, num_microbatches=6, schedule="auto")
    assert plan.schedule == "auto" and plan.searched is not None
    assert plan.simulate().makespan == pytest.approx(plan.estimate.time)
    assert [stage.alive for stage in plan.stages] and sum(plan.counts) >= 9
    assert plan.cuts == plan.counts or len(plan.cuts) == len(plan.stages) - 1
    plan.draw(tmp_path / "step.svg")
    assert '"auto"' in plan.to_json()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": [2, 2]}, "partition=[2, 2] is not supported with schedule='auto'"),
        ({"num_model_chunks": 2}, "num_model_chunks=2 is not supported with schedule='auto'"),
        ({"num_slices": 2}, "num_slices=2 is not supported with schedule='auto'"),
        ({"compile": True}, "compile=True is not supported with schedule='auto'"),
        ({"schedule": "1f1b", "memory_limit": "1GB"}, "memory_limit='1GB' is not supported with schedule='1f1b'"),
    ],
)
def test_what_a_search_does_not_support_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        PipelineConfig(**{"pp_size": 2, "num_microbatches": M, "schedule": "auto"} | options)
    assert words in str(error.value)


def test_fractions_per_stage_are_refused_before_a_search() -> None:
    """recompute=[1.0, 0.5] was accepted for 2 ranks with schedule="auto".

    The search then found two chunks per rank, and four fractions were required, which the plugin does not accept."""
    with pytest.raises(ConfigurationError, match="one fraction for all stages"):
        PipelineConfig(pp_size=2, num_microbatches=M, schedule="auto", recompute=[1.0, 0.5])
    config = PipelineConfig(pp_size=2, num_microbatches=M, schedule="auto", recompute=0.5)
    assert replace(config, num_model_chunks=2, schedule="interleaved").recomputed.ratios == (0.5,) * 4


def rows_of(size: int, device: torch.device) -> dict[str, torch.Tensor]:
    return zoo.batch("llama", rows=size)


def limited(limit: str) -> str:
    """What boost says to this memory_limit."""
    model, data = zoo.build("llama"), zoo.batch("llama")
    with pytest.raises(ConfigurationError) as caught:
        Split(model, dist.get_world_size(), data, num_microbatches=M, schedule="auto", memory_limit=limit)
    return str(caught.value)


@pytest.mark.local
@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("80 gigs", "memory_limit='80 gigs' is not a positive size"),
        ("1GB,2GB,3GB", "memory_limit='1GB,2GB,3GB' has 3 values"),
    ],
)
def test_a_wrong_limit_is_named_as_it_was_passed(pool: Pool, limit: str, words: str) -> None:
    """memory_limit="80 gigs" of a plugin: the error spoke of device_memory, which is an argument of `plan`.

    It was raised after the model was traced and measured."""
    with mock.patch("pipeshard.boost.study", side_effect=AssertionError):
        for message in pool.run(limited, 2, limit):
            assert message.startswith(words)


def without_sizes(sample: Any, given: dict[str, int]) -> str:
    """What boost says to a search for this sample."""
    with pytest.raises(ConfigurationError) as caught:
        Split(zoo.build("llama"), dist.get_world_size(), sample, schedule="auto", **given)
    return str(caught.value)


@pytest.mark.local
@pytest.mark.parametrize("given", [{"num_microbatches": M}, {"microbatch_size": 2}])
@pytest.mark.parametrize("sample", [None, rows_of])
def test_a_search_without_the_sizes_of_batches_is_refused(pool: Pool, sample: Any, given: dict[str, int]) -> None:
    """A plugin with schedule="auto" and no dataloader, or with a function as dry_run_input.

    The search was for two samples of 8 tokens, or for one microbatch, and ignored memory_limit for the real ones."""
    with mock.patch("pipeshard.boost.study", side_effect=AssertionError):
        for message in pool.run(without_sizes, 2, sample, given):
            assert "schedule='auto' requires the sizes of a whole batch" in message, message


@pytest.mark.parametrize(("p", "schedule"), [(1, "auto"), (2, "interleaved")])
def test_a_plan_has_the_arguments_of_the_plugin(p: int, schedule: str) -> None:
    """plan(schedule="auto") found a known schedule, and PipelinePlugin(schedule=plan.searched) followed the docs.

    `searched` is None then, which is no schedule, and an interleaved schedule also needs its number of chunks."""
    plan = pipeshard.plan(zoo.build("llama"), zoo.batch("llama"), p, num_microbatches=M, schedule=schedule)
    assert plan.searched is None
    config = PipelineConfig(pp_size=p, num_microbatches=M, **plan.arguments)
    assert (config.num_stages, config.partition) == (len(plan.counts), plan.counts)


@pytest.mark.turns
def test_a_limit_that_nothing_fits_in_is_named() -> None:
    with pytest.raises(PartitionError, match=r"fits in the memory of 2 ranks \(limit per rank: 1\.00 kB\)"):
        automatic(subject().on(Devices.parse(2, 1000)), 2, M)


def trained(name: str, wrong: bool = False) -> tuple[list[str], list[str]]:
    """What differs from the unsplit model, and what this rank did."""
    model, data = zoo.build(name, layers=6), zoo.batch(name)
    unsplit = Unsplit(copy.deepcopy(model))
    with short():
        split = Split(model, dist.get_world_size(), data, num_microbatches=M, schedule="auto")
    with mock.patch.object(Stage, "weight", lambda *_: None) if wrong else short():
        try:
            found = differences(split, unsplit, data, num_microbatches=M)
        except PipeshardError as error:
            found = [str(error)]
    program = split.model.pipeline.config.program(M)
    did = [str(span.action) for span in split.plugin.recording().spans[dist.get_rank()]]
    assert did == [str(action) for action in program.ranks[dist.get_rank()]]
    split.evaluate(data)
    manager, config = split.plugin.stage_manager, split.model.pipeline.config
    assert (manager.num_model_chunks, manager.use_zbv) == (config.num_model_chunks, config.is_v)
    return found, did


@pytest.mark.turns
@pytest.mark.local
@pytest.mark.parametrize(("name", "p"), [("llama", 2), ("llama", 3), ("t5", 3)])
def test_a_searched_program_trains_exactly(pool: Pool, name: str, p: int) -> None:
    for found, did in pool.run(trained, p, name):
        assert found == [] and any(action.startswith("W") for action in did)


@pytest.mark.local
def test_weight_gradients_that_are_left_out_are_seen(pool: Pool) -> None:
    assert any(found for found, _ in pool.run(trained, 2, "llama", True))


INSIDE = [("llama", 3, 2), ("llama", 2, 3), ("t5", 2, 3), ("gpt2", 2, 2), ("gpt2", 2, 3)]


def few_layers(name: str, layers: int) -> Subject:
    """A model of few layers, so that stages with whole layers are uneven."""
    model = zoo.build(name, layers=layers)
    microbatch, _ = first_microbatch(model, zoo.batch(name), M, None, None)
    return study(model, microbatch, None, None, "auto", Training(), None)


def cut_inside(name: str, layers: int, folder: str) -> tuple[list[str], Any]:
    """What differs from the unsplit model, and the partition; the model is also saved, and loaded again."""
    model, data = zoo.build(name, layers=layers), zoo.batch(name)
    unsplit = Unsplit(copy.deepcopy(model))
    with short(100):
        split = Split(model, dist.get_world_size(), data, num_microbatches=M, schedule="auto")
        found = differences(split, unsplit, data, num_microbatches=M)
    split.booster.save_model(split.model, f"{folder}.safetensors")
    split.booster.load_model(split.model, f"{folder}.safetensors")
    split.optimizer.zero_grad()
    unsplit.model.zero_grad()
    with short(100):
        found += differences(split, unsplit, data, num_microbatches=M)
    split.evaluate(data)
    return found, split.model.pipeline.config.partition


@pytest.mark.turns
@pytest.mark.local
@pytest.mark.parametrize(("name", "layers", "p"), INSIDE)
def test_cuts_inside_layers_train_exactly(pool: Pool, tmp_path: Path, name: str, layers: int, p: int) -> None:
    plain = zoo.build(name, layers=layers).state_dict()
    for found, partition in pool.run(cut_inside, p, name, layers, str(tmp_path / "saved")):
        assert found == [] and any(re.search(r"\.\d+\.", cut) for cut in partition)
    saved = load_file(tmp_path / "saved.safetensors")
    assert saved.keys() <= plain.keys() and all(torch.equal(plain[key], saved[key]) for key in saved)


@pytest.mark.turns
@pytest.mark.parametrize(("name", "layers", "p"), INSIDE)
def test_cuts_inside_layers_are_faster_than_between_layers(name: str, layers: int, p: int) -> None:
    inner = few_layers(name, layers).on(Devices.parse(p))
    with short(100):
        found, whole = automatic(inner, p, M), automatic(replace(inner, again=None), p, M)
    assert named_modules_of(found.candidate.cuts) and not named_modules_of(whole.candidate.cuts)
    assert found.candidate.estimate(1.0).time < whole.candidate.estimate(1.0).time
    assert max(memory.total for memory in found.candidate.memory) <= max(
        memory.total for memory in attempted_1f1b(inner, p).memory
    )


def attempted_1f1b(inner: Subject, p: int) -> Candidate:
    found = attempt(inner, "1f1b", p, M, 1)
    assert isinstance(found, Candidate)
    return found


def test_places_inside_have_the_costs_of_their_layers() -> None:
    whole = subject()
    places = places_inside(whole)
    assert places is not None
    for sums, of_places in zip(whole.sums, places.subject.sums, strict=True):
        assert [of_places[edge] for edge in places.edges] == list(sums)
    assert {places.names[edge].rpartition(".")[2] for edge in places.inner} == {"self_attn"}


def test_a_known_schedule_that_wins_is_shown_with_its_own_cuts() -> None:
    """`plan(schedule="auto")` found zbv with cuts that fit in 1F1B's memory, and showed the balanced cuts, which need
    more. The plugin ran other cuts than the plan."""
    model, batch = zoo.build("llama", layers=6), zoo.batch("llama")
    with mock.patch("pipeshard.planner.planner.search", return_value=None):
        found = automatic(subject().on(Devices.parse(2)), 2, M).candidate
        made = pipeshard.plan(model, batch, 2, num_microbatches=M, schedule="auto")
    balanced = pipeshard.plan(model, batch, 2, num_microbatches=M, schedule=found.program.name)
    assert made.schedule == found.program.name == "zbv" and found.counts != balanced.counts
    assert made.cuts == found.counts and made.estimate.memory == tuple(found.memory)
    assert [e.name for e in made.schedules] == [e.name for e in balanced.schedules]


class SlowLayer(Policy):
    """One layer takes as long as all other calls together."""

    def costs(self) -> list[float]:
        costs, (slow,) = super().costs(), self.calls_of("model.layers.5")
        return [*costs[:slow], sum(costs) - costs[slow], *costs[slow + 1 :]]


@pytest.mark.turns
def test_times_and_searches_follow_the_costs_of_a_policy() -> None:
    """A policy said that one layer takes as long as all others. `schedule="auto"` and the times of a plan ignored it,
    so the cut that balances these costs was shown as unbalanced. Measured times stay as they are."""
    model = zoo.build("llama", layers=8)
    microbatch, _ = first_microbatch(model, zoo.batch("llama"), M, None, None)
    plain, own = (study(model, microbatch, None, each, "auto", Training(), None) for each in (None, SlowLayer))
    whole = [sum(map(sum, each.costs)) for each in (plain, own)]
    assert whole[0] == pytest.approx(whole[1])
    units = tuple(call.unit for call in own.flow.calls)
    measured = Profile("LlamaForCausalLM", units, shapes_of(microbatch), "", "cpu", tuple(plain.costs))
    assert study(model, microbatch, None, SlowLayer, "auto", Training(), measured).costs == measured.times
    slow = units.index("model.layers.5")
    assert sum(own.costs[slow]) == pytest.approx(whole[1] / 2)
    devices = Devices.parse(2)
    candidate = attempt(own.on(devices), "1f1b", 2, M, 1)
    assert isinstance(candidate, Candidate) and candidate.counts[0] == slow
    before, after = (sum(candidate.costs(whole[1])[stage]) for stage in range(2))
    assert before < 0.5 < after and before + after == pytest.approx(1.0)
    with short():
        found = automatic(own.on(devices), 2, M)
    assert found.candidate.estimate(1.0).time <= candidate.estimate(1.0).time


class OwnPolicy(Policy):
    def costs(self) -> list[float]:
        return super().costs()


@pytest.mark.parametrize(
    ("policy", "training"),
    [(OwnPolicy, Training()), (None, Training(tp_size=2)), (None, Training(fsdp=True, dp_size=2))],
)
def test_only_whole_layers_are_units_where_others_decide_about_units(
    policy: type[Policy] | None, training: Training
) -> None:
    model = zoo.build("llama", layers=2)
    microbatch, _ = first_microbatch(model, zoo.batch("llama"), M, None, None)
    assert places_inside(study(model, microbatch, None, policy, "auto", training, None)) is None
