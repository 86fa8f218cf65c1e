"""Tests of plans: their figures, compared with calculations by hand and with real runs, for several architectures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from torch import nn

from pipeshard import plan
from pipeshard.batch.read import read_batch
from pipeshard.commands import show
from pipeshard.errors import BatchError, ConfigurationError, PartitionError, UsageError
from pipeshard.graph.units import find_units
from pipeshard.planner.auto import Cutter
from pipeshard.planner.candidate import Candidate, _heaviest
from pipeshard.planner.memory import Memory, Training, format_bytes, parse_bytes, pinned
from pipeshard.planner.plan import Estimate, Plan, in_short
from pipeshard.planner.planner import attempt, recommend, study
from pipeshard.schedule.schedules import IN_A_V, SCHEDULES
from tests import zoo
from tests.planner.saved import saved_bytes

P, M, ROWS, LENGTH = 2, 4, 8, 12
HIDDEN = ROWS // M * LENGTH * 32 * 4  # bytes of the hidden states of a microbatch


def planned(name: str, model: nn.Module | None = None, p: int = P, **options: Any) -> Plan:
    return plan(model or zoo.build(name), zoo.batch(name, ROWS, LENGTH), p, num_microbatches=M, **options)


def test_memory_by_hand() -> None:
    model = zoo.build("llama")
    found = planned("llama", model, schedule="1f1b")
    units = find_units(model)
    run = saved_bytes(model, zoo.batch("llama", ROWS // M, LENGTH))
    ends = list(itertools.accumulate(found.counts))
    for stage, (start, end) in zip(found.stages, zip([0, *ends], ends)):
        parameters = 4 * sum(p.numel() for unit in list(units.values())[start:end] for p in unit.parameters())
        memory = stage.memory
        assert (memory.parameters, memory.gradients, memory.optimizer) == (parameters, parameters, 2 * parameters)
        assert stage.parameters == parameters / 4
        assert stage.kept == pytest.approx(run(start, end), rel=0.05)
        assert stage.alive == P - stage.rank  # 1F1B
        assert memory.activations == stage.alive * stage.kept
    assert found.estimate.memory == tuple(stage.memory for stage in found.stages)
    gpipe = planned("llama", model, schedule="gpipe")
    assert [stage.alive for stage in gpipe.stages] == [M, M]


def test_offloaded_activations_are_on_the_host() -> None:
    model = zoo.build("llama", layers=6)
    plain, found = (planned("llama", model, p=4, schedule="1f1b", offload=offload) for offload in (None, "activations"))
    assert [stage.alive for stage in plain.stages] == [4, 3, 2, 1]
    assert [stage.alive for stage in found.stages] == [2, 2, 2, 1]
    assert [stage.memory.host for stage in plain.stages] == [0, 0, 0, 0]
    assert [stage.memory.host // stage.kept for stage in found.stages] == [2, 1, 0, 0]
    first = found.stages[0]
    assert plain.stages[0].memory.activations - first.memory.activations == 2 * first.kept
    with pytest.raises(ConfigurationError, match="did you mean activations"):
        planned("llama", model, offload="activation")


def test_pinned_memory_is_allocated_in_powers_of_two() -> None:
    """The host column was too low by up to half."""
    assert [*map(pinned, (0, 1, 3, 4, 5, 11008 * 4096 * 4))] == [0, 1, 4, 4, 8, 2**28]


@pytest.mark.turns
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_offloaded_optimizer_is_on_the_host(precision: str) -> None:
    model = zoo.build("llama", layers=6)
    offloads = (None, "optimizer", "activations", "both")
    plain, hosted, without, both = (
        planned("llama", model, p=4, schedule="1f1b", precision=precision, offload=each).stages for each in offloads
    )
    for one, two, activations, three in zip(plain, hosted, without, both, strict=True):
        assert two.memory.optimizer == two.memory.values == 0
        values = one.memory.values or one.memory.parameters
        rounded = two.memory.host - one.memory.optimizer
        assert values + one.memory.gradients <= rounded < 2 * (values + one.memory.gradients)
        assert two.memory.update < one.memory.update
        assert two.memory.activations == one.memory.activations
        assert three.memory.activations == activations.memory.activations
        assert three.memory.host - two.memory.host == activations.memory.host


def test_what_crosses_is_the_hidden_states_and_their_gradient() -> None:
    first, second = planned("llama", schedule="zb-h1").stages
    assert (first.received, first.returned, first.enters) == (0, 0, ())
    assert (second.received, second.returned) == (HIDDEN, HIDDEN)
    (value,) = second.enters
    assert (value.shape, value.dtype, value.gradient) == ((ROWS // M, LENGTH, 32), "float32", True)
    assert first.units == f"model.embed_tokens to layers.{first.calls - 2}"


def test_nothing_crosses_between_the_chunks_of_one_rank() -> None:
    stages = planned("llama", schedule="zbv").stages
    assert [stage.rank for stage in stages] == [0, 1, 1, 0]
    assert [stage.received for stage in stages] == [0, HIDDEN, 0, HIDDEN]
    assert len(stages[2].enters) == 1


def test_a_tied_embedding_is_held_by_both_ends_and_once_by_a_rank() -> None:
    embedding = zoo.VOCABULARY * 32 * 4
    apart = planned("llama-tied", schedule="1f1b").estimate.memory
    whole = sum(4 * p.numel() for p in zoo.build("llama-tied").parameters())
    assert sum(memory.parameters for memory in apart) == whole + embedding
    together = planned("llama-tied", schedule="zbv")
    assert sum(memory.parameters for memory in together.estimate.memory) == whole
    assert sum(stage.memory.parameters for stage in together.stages) == whole
    assert together.stages[3].parameters * 4 > together.stages[3].memory.parameters


def with_images() -> nn.Module:
    """A model with a tower for images, which is as large as some layers, and which a batch of text leaves unused."""
    torch.manual_seed(0)
    tower = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen = transformers.CLIPVisionConfig(**tower, image_size=16, patch_size=8)
    read = transformers.LlamaConfig(**zoo.TINY | {"num_hidden_layers": 8})
    both = transformers.LlavaConfig(vision_config=seen, text_config=read, image_token_index=60)
    return transformers.LlavaForConditionalGeneration(both)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved"])
@pytest.mark.parametrize("kind", ["unused", "tied"])
def test_a_search_for_cuts_counts_what_the_plan_counts(kind: str, schedule: str) -> None:
    """The search for cuts that fit left out the parameters of a tower for images, and counted a tied embedding twice
    in a V: the plan then said that nothing fits, or the search discarded what fits."""
    model = with_images() if kind == "unused" else zoo.build("llama-tied", layers=8)
    batch, training = read_batch(model, zoo.batch("llama", ROWS // M, LENGTH)), Training()
    subject = study(model, batch, None, None, "auto", training, None)
    for partition in ("auto", "uniform"):
        made = attempt(replace(subject, partition=partition), schedule, P, M, 1 + (schedule == "interleaved"))
        assert isinstance(made, Candidate)
        moments = [training.moments(actions) for actions in made.program.ranks]
        for rank, memory in enumerate(made.memory):
            limits = [0 if rank == other else memory.total * P for other in range(P)]
            assert _heaviest(moments, made.runs, subject.footprint, limits)[1] == memory.total
        edges = 0, *itertools.accumulate(made.counts)
        devices = replace(subject.devices, memory=(10**9,) * P, speeds=(1.0,) * P)
        room = Cutter(replace(subject, devices=devices), M, made.program.placement).work(edges).room
        for rank, memory in enumerate(made.memory):
            runs = [run for run, at in zip(made.runs, made.program.placement, strict=True) if at == rank]
            most = max(subject.footprint.temporary(*run) for run in runs)
            assert 10**9 - room[rank] == memory.always + most


@pytest.mark.turns
def test_a_plan_names_what_its_batch_does_not_use(capsys: pytest.CaptureFixture[str]) -> None:
    """`pipeshard plan` of a vision-language model counted its parameters, but planned a run without images, and nothing
    said so."""
    model = with_images()
    made = planned("llama", model)
    towers = {f"model.{name}" for name in ("vision_tower", "multi_modal_projector")}
    assert made.unused == {name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in towers}
    assert json.loads(made.to_json())["unused"] == made.unused
    show(made)
    shown = " ".join(capsys.readouterr().out.split())
    assert "not used by this batch: model.vision_tower, model.multi_modal_projector (" in shown
    images = torch.randn(ROWS, 3, 16, 16)
    batch = zoo.batch("llama", ROWS, LENGTH)
    batch["input_ids"][:, :4] = 60
    assert not plan(model, batch | {"pixel_values": images}, P, num_microbatches=M).unused
    show(planned("llama-tied"))
    assert "not used" not in capsys.readouterr().out


def test_cuts_move_to_make_room_for_unused_parameters() -> None:
    """Text on a vision-language model was planned with the tower on the first rank. Moving a layer would have made it
    fit, but the plan said that no partition was found."""
    found = planned("llama", with_images(), schedule="1f1b")
    limit = found.estimate.memory[0].total - 1
    assert found.estimate.fullest == 0
    moved = planned("llama", with_images(), schedule="1f1b", device_memory=limit)
    assert moved.counts[0] < found.counts[0] and moved.estimate.fits


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_times_are_those_of_the_simulation(schedule: str) -> None:
    found = planned("llama", schedule=schedule)
    assert sum(s.forward + s.backward + s.weight for s in found.stages) == pytest.approx(P)
    simulation = found.simulate()
    assert found.estimate.time == pytest.approx(simulation.makespan)
    assert found.estimate.bubble == pytest.approx(simulation.bubble)
    assert found.estimate.time >= M  # a step without idle time
    peaks = simulation.peak_memory([stage.kept for stage in found.stages])
    for memory, peak in zip(found.estimate.memory, peaks, strict=True):
        assert memory.activations == peak or 0 < peak - memory.activations < memory.gradients  # made by then


def test_every_schedule_is_estimated_with_the_chunks_asked_for() -> None:
    found = planned("gpt2", schedule="interleaved", num_model_chunks=3)
    assert [e.name for e in found.schedules] == [
        *("gpipe", "1f1b", "interleaved, v=2", "interleaved, v=3", "zb-h1", "zbv", "v-half", "v-min")
    ]
    assert len(found.stages) == 3 * P and found.counts == list(found.estimate.counts)
    fast = min(found.schedules, key=lambda e: e.time)
    assert found.recommended in {e.name for e in found.schedules if e.time <= fast.time * 1.03}


def test_slices_of_a_schedule_without_slices_are_refused() -> None:
    """The plan of a V schedule ended in "too many values to unpack"."""
    with pytest.raises(ConfigurationError, match="schedule 'zbv' does not support slices"):
        planned("llama", schedule="zbv").in_slices()


def test_a_schedule_for_which_there_are_too_few_units_is_named() -> None:
    found = planned("llama", p=4)
    problems = {e.name: e.problem for e in found.schedules if e.problem}
    assert problems.keys() == {"interleaved, v=2", *IN_A_V}
    assert "7 unit calls" in problems["zbv"]
    with pytest.raises(PartitionError, match="7 unit calls"):
        planned("llama", p=4, schedule="zbv")
    with pytest.raises(PartitionError, match="Use pp_size <= 7"):
        planned("llama", p=9)


@pytest.mark.turns
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "t5", "mixtral", "vit"])
def test_a_plan_for_a_model_on_meta_is_the_same(name: str) -> None:
    with torch.device("meta"):
        blank = zoo.build(name)
    with init_empty_weights(include_buffers=False):
        untied = zoo.build(name)
    real = planned(name)
    assert planned(name, blank) == real == planned(name, untied)
    assert sum(found.parameters for found in real.stages) >= real.parameters
    assert all(estimate.memory and not estimate.problem for estimate in real.schedules)


def test_values_that_bypass_stages_are_in_the_messages() -> None:
    stages = planned("t5", schedule="interleaved", num_model_chunks=3).stages
    assert {value.unit for value in stages[-1].enters} >= {"encoder.final_layer_norm"}
    assert stages[-1].received > stages[1].received


def test_json_has_all_of_it() -> None:
    found = planned("gpt2", device_memory="1GB")
    data = json.loads(found.to_json())
    assert data["counts"] == found.counts and data["reason"] == found.reason
    assert data["stages"][0]["memory"]["total"] == found.stages[0].memory.total
    assert [e["fits"] for e in data["schedules"]] == [True] * 7
    assert data["microbatch"]["input_ids"] == [2, LENGTH]


@pytest.mark.turns
def test_a_limit_moves_cuts_and_chooses_the_schedule() -> None:
    model = zoo.build("llama", layers=8)
    free = planned("llama", model, schedule="1f1b")
    limit = free.estimate.peak - 1
    tight = planned("llama", model, schedule="1f1b", device_memory=limit)
    assert tight.counts != free.counts and tight.estimate.peak <= limit
    assert tight.estimate.time >= free.estimate.time
    chosen = planned("llama", model, device_memory=limit)
    assert chosen.estimate.fits and chosen.recommended in {e.name for e in chosen.schedules if e.fits}
    assert any(e.fits is False for e in chosen.schedules)


def test_what_does_not_fit_is_refused_with_numbers_and_remedies() -> None:
    with pytest.raises(PartitionError) as error:
        planned("llama", schedule="gpipe", device_memory="600kB")
    message = str(error.value)
    assert "with schedule 'gpipe', rank" in message and "its device_memory is 600 kB" in message
    assert "optimizer" in message and "schedule 1f1b" in message and "recompute" in message
    with pytest.raises(PartitionError, match=r"Possible remedies: shorter or fewer .*, or more memory$"):
        planned("llama", device_memory="230kB", optimizer="adamw")
    assert planned("llama", device_memory="345kB", optimizer="none", schedule="1f1b").estimate.fits
    with pytest.raises(PartitionError, match=r"but its device_memory is 300 kB\. Possible remedies: "):
        planned("llama", partition=[3, 4], schedule="1f1b", device_memory="300kB")


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_recomputation_is_counted_once_a_rank(is_reentrant: bool) -> None:
    model = zoo.build("llama")
    plain = planned("llama", model, schedule="zbv")
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    again = planned("llama", model, schedule="zbv")
    layer = plain.stages[1].kept  # one layer, and nothing else
    made = again.estimate.memory[1].temporary - plain.estimate.memory[1].temporary
    assert made == layer - again.stages[1].kept
    assert again.estimate.peak < plain.estimate.peak


@pytest.mark.turns
def test_batches_are_cut_as_the_plugin_does_or_made_up() -> None:
    model = zoo.build("gpt2")
    batch = zoo.batch("gpt2", rows=7)
    by_size = plan(model, batch, 2, microbatch_size=2)
    assert by_size.num_microbatches == 4 and by_size.microbatch["input_ids"] == (2, 12)
    made_up = plan(model, None, 2, num_microbatches=3, microbatch_size=5)
    assert made_up.num_microbatches == 3 and made_up.microbatch["input_ids"] == (5, 64)  # all positions it has
    assert plan(model, None, 2, num_microbatches=3, seq_len=9).microbatch["labels"] == (1, 9)
    image = plan(zoo.build("vit"), None, 2, num_microbatches=3, microbatch_size=5)
    assert image.microbatch == {"pixel_values": (5, 3, 16, 16), "labels": (5,)}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pp_size": 0}, ConfigurationError, "must be a positive integer, got 0"),
        ({"num_microbatches": None}, ConfigurationError, "exactly one of the two"),
        ({"microbatch_size": 2}, ConfigurationError, "exactly one of the two"),
        ({"num_microbatches": 0}, ConfigurationError, "must be a positive integer"),
        ({"seq_len": 4096}, ConfigurationError, "but a batch was passed: omit seq_len"),  # planned the batch's length
        ({"pp_size": True}, ConfigurationError, "must be a positive integer, got True"),
        ({"batch": None, "num_microbatches": None}, ConfigurationError, "without a batch, num_microbatches"),
        ({"schedule": "1f1v"}, ConfigurationError, "unknown schedule"),
        ({"schedule": "zb-h1", "num_model_chunks": 2}, ConfigurationError, "num_model_chunks=1"),
        ({"optimizer": "lion"}, ConfigurationError, "optimizer='lion' is unknown"),
        ({"device_memory": "much"}, ConfigurationError, "device_memory='much' is not a positive size"),
        ({"batch": {"input_ids": torch.zeros(4, 6, dtype=torch.int64)}}, UsageError, "found no loss to train on"),
        ({"profile": "nowhere.json"}, ConfigurationError, "nowhere.json is not a profile"),
        ({"batch": {}}, BatchError, "no tensor"),
    ],
)
def test_arguments_that_cannot_work_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"batch": zoo.batch("llama"), "pp_size": 2, "num_microbatches": 2, **options}
    with pytest.raises(error, match=message):
        plan(zoo.build("llama"), **arguments)


def estimate(schedule: str, time: float, peak: int = 1, fits: bool | None = None, v: int = 1) -> Estimate:
    return Estimate(schedule, v, time, 0.1, (1,), (Memory(peak),), fits)


def test_recommended_is_the_fastest_that_fits_and_the_simpler_of_near_ties() -> None:
    def best(*estimates: Estimate, limits: Sequence[int] = ()) -> str:
        return recommend(estimates, limits)[0].name

    assert best(estimate("1f1b", 10), estimate("zbv", 8)) == "zbv"
    assert best(estimate("zbv", 10), estimate("1f1b", 10.2)) == "1f1b"
    assert best(estimate("gpipe", 10), estimate("1f1b", 10)) == "1f1b"
    assert best(estimate("1f1b", 10, fits=True), estimate("zbv", 8, fits=False), limits=[5]) == "1f1b"
    assert best(estimate("interleaved", 9, v=4), estimate("interleaved", 9.1, v=2)) == "interleaved, v=2"
    assert best(estimate("zbv", 8), Estimate("zb-h1", 1, problem="too few units")) == "zbv"
    reason = recommend([estimate("1f1b", 100), estimate("zbv", 98)])[1]
    assert reason.startswith("1f1b: simpler than zbv, and at most 3% slower; ")
    reason = recommend([estimate("1f1b", 10), estimate("zbv", 8)], [5])[1]
    assert reason == "zbv: the fastest that fits; rank 0 takes the most memory, 1 B of 5 B."


def test_sizes_are_read_and_written() -> None:
    assert [parse_bytes(size) for size in ("80GB", "1.5 GiB", 7, "7")] == [80 * 10**9, 3 * 2**29, 7, 7]
    assert [format_bytes(n) for n in (0, 999, 1000, 9994, 99_940, 999_499, 999_500, 80 * 10**9, 2 * 10**15)] == [
        *("0 B", "999 B", "1.00 kB", "9.99 kB", "99.9 kB", "999 kB", "1.00 MB", "80.0 GB", "2000 TB")
    ]
    for wrong in ("", "GB", "-3GB", "0", "12 parsecs"):
        with pytest.raises(ConfigurationError, match="is not a positive size"):
            parse_bytes(wrong)


def test_units_in_short() -> None:
    assert in_short(["embed", "h.0", "norm"]) == "embed to norm"
    assert in_short(["model.embed", *(f"model.layers.{k}" for k in range(12))]) == "model.embed to layers.11"
    assert in_short([f"model.layers.{k}" for k in range(4, 49)]) == "model.layers.4 to 48"
    assert in_short(["layer.0", "layer.0"]) == "layer.0" and in_short([]) == ""
    assert in_short(["layer.0", "layer.0", "layer.2"]) == "layer.0 to 2"
