"""Tests of build: cuts by name, also inside layers, and the same stages trained by several runtimes."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import ScheduleDualPipeV
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

import pipeshard
from pipeshard import LayerSpec, PipelineModule, PipelinePlugin, Target, analyze_tied_weights, build, register_target
from pipeshard.errors import BatchError, ConfigurationError, PartitionError, PipeshardError, TraceError, UsageError
from pipeshard.graph.trace import trace
from pipeshard.interop.build import Split as Parts
from pipeshard.interop.build import StageModule
from pipeshard.schedule.given import Schedule
from pipeshard.schedule.program import Program
from pipeshard.schedule.schedules import make_program
from pipeshard.split.materialize import is_released
from tests import zoo
from tests.pool import Pool
from tests.targets import MODELS as CUTS
from tests.targets import batch as even
from tests.unsplit import LEARNING_RATE, Split, Unsplit, differences, largest_error

INSIDE = {"gpt2": ["transformer.h.1.attn", "transformer.h.2.mlp.act"], "llama": ["model.layers.0.mlp", "model.norm"]}
STEPS = 3


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "t5", "vit", "mixtral"])
def test_all_stages_in_one_process_are_the_model(name: str) -> None:
    model, data = zoo.build(name), zoo.batch(name)
    whole = copy.deepcopy(model)
    split = build(model, 3, batch=data)
    ours, theirs = split(**data), whole(**data)
    assert type(ours) is type(theirs) and torch.equal(ours.loss, theirs.loss)
    ours.loss.backward()
    theirs.loss.backward()
    expected = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
    for stage in split.stages:
        for path, parameter in stage.named_parameters():
            grad = expected[path]
            assert (grad is None and parameter.grad is None) or torch.equal(parameter.grad, grad), path
    assert {id(p) for p in split.parameters()} == {id(p) for p in model.parameters()}
    held = [set(dict(stage.named_parameters())) for stage in split.stages]
    assert sum(map(len, held)) < 2 * len(expected)
    split.eval()
    assert torch.equal(split(**data)[1], whole.eval()(**data)[1])


@pytest.mark.turns
@pytest.mark.local
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_cuts_inside_of_layers(pool: Pool, name: str) -> None:
    assert pool.run(cut_inside, 3, name) == [[]] * 3


def cut_inside(name: str) -> list[str]:
    model, data = zoo.build(name), zoo.batch(name)
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, 3, data, num_microbatches=3, partition=INSIDE[name])
    assert any(unit.endswith(INSIDE[name][0]) for unit in split.model.pipeline.policy.units)
    return differences(split, unsplit, data, num_microbatches=3)


class Glue(nn.Module):
    """A nested module whose forward uses a parameter of its own between its children, one of which is cut after."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.full((4,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).relu() * self.scale) + self.scale

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Glue.Inner(), nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return {"loss": nn.functional.cross_entropy(self.head(self.inner(x)), labels)}


def test_glue_between_the_modules_of_a_cut_may_have_parameters() -> None:
    torch.manual_seed(0)
    model = Glue()
    whole, data = copy.deepcopy(model), {"x": torch.randn(4, 4), "labels": torch.arange(4) % 3}
    split = build(model, ["inner.first"], batch=data)
    split(**data)["loss"].backward()
    whole(**data)["loss"].backward()
    assert torch.equal(model.inner.scale.grad, whole.inner.scale.grad)
    assert sorted(dict(split.stages[0].named_parameters())) == ["inner.first.bias", "inner.first.weight"]


def returned() -> list[list[float]]:
    """What torch's step and eval return, and their losses, each from the same weights."""
    model, data, found = zoo.build("gpt2").eval(), even("gpt2", 0), []
    built = build(model, CUTS["gpt2"][1:2], "torch", zoo.part(data, 0, [2]))
    schedule = Schedule1F1B(built.stages[0], 4, loss_fn=built.loss_fn)
    for run in (schedule.step, schedule.eval):
        losses: list[Tensor] = []
        outputs = run(**data, target=data["labels"], losses=losses)
        found += [[] if outputs is None else outputs.tolist(), [float(loss) for loss in losses]]
    return found


@pytest.mark.turns
def test_torch_s_step_and_eval_return_losses(pool: Pool) -> None:
    """A user evaluated with schedule.eval. torch failed to concatenate losses of zero dimensions on the last rank, and
    the other ranks waited."""
    none, losses = pool.run(returned, 2)
    assert none == [[]] * 4 and len(losses[0]) == 4
    assert all(each == pytest.approx(losses[0]) for each in losses)


class Targeted(Glue):
    def forward(self, x: Tensor, target: Tensor) -> Any:
        return super().forward(x, target)


def by_torch(name: str, cuts: list[str], chunks: int, syncs: bool = True, kind: Any = None) -> list[float]:
    """Losses of some steps trained by torch's own schedules."""
    model, losses = zoo.build(name), []
    microbatch = zoo.part(even(name, 0), 0, [2])
    options = {"num_model_chunks": chunks} if kind is None else {"style": "v"}
    built = build(model, cuts, "torch", microbatch, **options)
    optimizer = torch.optim.AdamW(built.parameters(), lr=LEARNING_RATE)
    if chunks == 1:
        schedule: Any = Schedule1F1B(built.stages[0], 4, loss_fn=built.loss_fn)
    else:
        schedule = (kind or ScheduleInterleaved1F1B)(built.stages, 4, loss_fn=built.loss_fn)
    for seed in range(STEPS):
        data, found = even(name, seed), []
        schedule.step(**data, target=data["labels"], losses=found, return_outputs=False)
        if syncs:
            built.sync_gradients()
        optimizer.step()
        built.zero_grad()
        losses.append(float(torch.stack(found).mean()) if found else float("nan"))
    return losses


def by_the_plugin(name: str, cuts: list[str]) -> list[float]:
    """The same by `target="colossalai"`."""
    built = build(
        zoo.build(name),
        cuts,
        "colossalai",
        even(name, 0),
        num_microbatches=4,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
    )
    losses = []
    for seed in range(STEPS):
        out = built.booster.execute_pipeline(iter([even(name, seed)]), built.model, None, built.optimizer)
        built.optimizer.step()
        built.optimizer.zero_grad()
        losses.append(float(out["loss"]))
    return losses


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_torch_trains_the_stages_to_the_plugin_s_losses(pool: Pool, name: str, chunks: int) -> None:
    cuts = CUTS[name] if chunks == 2 else CUTS[name][1:2]
    theirs = pool.run(by_torch, 2, name, cuts, chunks)[-1]
    ours = pool.run(by_the_plugin, len(cuts) + 1, name, cuts)
    assert theirs == pytest.approx(ours[0], rel=1e-6)


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [ScheduleZBVZeroBubble, ScheduleDualPipeV])
def test_torch_s_schedules_in_a_v(pool: Pool, kind: Any) -> None:
    """The first and the last stage are on rank 0, and so is all of a tied weight; stages in a loop made them fail by
    KeyError."""
    theirs = pool.run(by_torch, 2, "gpt2", CUTS["gpt2"], 2, kind=kind)[0]
    ours = pool.run(by_the_plugin, 4, "gpt2", CUTS["gpt2"])
    assert theirs == pytest.approx(ours[0], rel=1e-6)


def unbuildable() -> list[str]:
    data = {key: value for key, value in even("gpt2", 0).items() if key != "labels"}
    found = []
    for model, batch, options in (
        (zoo.build("gpt2"), data, {}),
        (Targeted(), {"x": torch.randn(4, 4), "target": torch.arange(4) % 3}, {}),
        (zoo.build("gpt2"), even("gpt2", 0), {"style": "w"}),
        (zoo.build("gpt2"), even("gpt2", 0), {"style": "v", "num_model_chunks": 3}),
    ):
        with pytest.raises(PipeshardError) as caught:
            build(model, 2, "torch", batch, **options)
        found.append(str(caught.value))
    return found


@pytest.mark.turns
def test_what_torch_could_not_train_is_refused(pool: Pool) -> None:
    """Without a loss torch failed in the backward pass of the first stage, and the other ranks by a lost connection."""
    lossless, named, style, chunks = pool.run(unbuildable, 2)[0]
    assert "found no loss to train on" in lossless
    assert "the batch's target cannot be distinguished from the argument" in named
    assert "style='w'" in style and "style='v' and num_model_chunks=3" in chunks


@pytest.mark.turns
def test_without_the_sum_of_tied_gradients_losses_differ(pool: Pool) -> None:
    cuts = CUTS["gpt2"][1:2]
    theirs = pool.run(by_torch, 2, "gpt2", cuts, 1, syncs=False)[-1]
    ours = pool.run(by_the_plugin, 2, "gpt2", cuts)[0]
    assert theirs[0] == pytest.approx(ours[0], rel=1e-6) and theirs[1] != pytest.approx(ours[1], rel=1e-6)


def accumulated(done: Sequence[str]) -> float:
    """The largest difference between the gradients of steps of torch's schedule and those of one process. After each
    step, `done` names what follows."""
    model, batches = zoo.build("gpt2"), [even("gpt2", seed) for seed in range(len(done))]
    whole = copy.deepcopy(model)
    built = build(model, CUTS["gpt2"][1:2], "torch", zoo.part(batches[0], 0, [2]))
    schedule = Schedule1F1B(built.stages[0], 4, loss_fn=built.loss_fn, scale_grads=False)
    for data, then in zip(batches, done, strict=True):
        schedule.step(**data, target=data["labels"], losses=[], return_outputs=False)
        (4 * whole(**data).loss).backward()
        if "sync" in then:
            for _ in then.split():
                built.sync_gradients()
        elif then == "zero":
            whole.zero_grad()
            torch.optim.SGD(built.parameters()).zero_grad()
    expected = dict(whole.named_parameters(remove_duplicate=False))
    (stage,) = built.stages
    return largest_error((p.grad - expected[name].grad).abs().max() for name, p in stage.submod.named_parameters())


@pytest.mark.turns
def test_gradients_of_ties_accumulate_over_steps(pool: Pool) -> None:
    """A user accumulated two batches per update with torch's schedule, and called sync_gradients after each. The second
    call summed the first batch's gradients of the tied weight again."""
    assert largest_error(pool.run(accumulated, 2, ["sync", "sync"])) < 1e-5


@pytest.mark.turns
def test_gradients_of_ties_are_summed_once_per_update(pool: Pool) -> None:
    """A user called sync_gradients once per update of several steps. Only the last step's gradients of the tied
    weight were summed, and the copies of the weight drifted apart."""
    assert largest_error(pool.run(accumulated, 2, ["", "sync", "", "sync"])) < 1e-5
    assert largest_error(pool.run(accumulated, 2, ["sync", "zero", "", "sync"])) < 1e-5


@pytest.mark.turns
def test_gradients_of_ties_are_summed_once_per_step(pool: Pool) -> None:
    """A user called sync_gradients after the step, and again before the update. The gradient of the tied weight
    doubled."""
    assert largest_error(pool.run(accumulated, 2, ["sync sync", "sync sync"])) < 1e-5


def clipped() -> list[float]:
    """The differences of the norms and of the clipped gradients from those of one process, in two steps."""
    model, found = zoo.build("gpt2"), []
    whole = copy.deepcopy(model)
    built = build(model, CUTS["gpt2"][1:2], "torch", zoo.part(even("gpt2", 0), 0, [2]))
    (stage,) = built.stages
    schedule = Schedule1F1B(stage, 4, loss_fn=built.loss_fn)
    optimizers = torch.optim.SGD(built.parameters(), lr=0.1), torch.optim.SGD(whole.parameters(), lr=0.1)
    for seed in range(2):
        data = even("gpt2", seed)
        schedule.step(**data, target=data["labels"], losses=[], return_outputs=False)
        whole(**data).loss.backward()
        with pytest.raises(UsageError, match="call sync_gradients"):
            built.clip_grad_norm_(0.1)
        built.sync_gradients()
        with pytest.raises(
            UsageError, match=r"of rank \d of 2 in its pipeline.*: call built.clip_grad_norm_\(max_norm\)"
        ):
            nn.utils.clip_grad_norm_(built.parameters(), 0.1)
        norm, expected = built.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        of_whole = dict(whole.named_parameters(remove_duplicate=False))
        pairs = [(p.grad, of_whole[name].grad) for name, p in stage.submod.named_parameters()]
        found += [float(norm - expected), *(float((mine - theirs).abs().max()) for mine, theirs in pairs)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    several = build(zoo.build("gpt2", layers=4), 4, "torch", zoo.part(even("gpt2", 0), 0, [2]), num_model_chunks=2)
    for parameter in several.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(UsageError, match=r"call built.clip_grad_norm_\(max_norm\)"):
        nn.utils.clip_grad_norm_(several.stages[0].submod.parameters(), 0.1)
    return found


@pytest.mark.turns
def test_torch_s_stages_are_clipped_by_the_norm_of_the_model(pool: Pool) -> None:
    """A user clipped built.parameters() with torch's clip_grad_norm_. Each stage was scaled by another factor, and the
    copies of a tied weight drifted apart."""
    assert largest_error(error for errors in pool.run(clipped, 2) for error in errors) < 1e-6


def of_other_sizes() -> list[str]:
    """The errors of microbatches whose messages differ from those of the microbatch that build received."""
    data, found = zoo.part(even("gpt2", 0), 0, [2]), []
    (stage,) = build(zoo.build("gpt2"), ["transformer.h.1.mlp"], "torch", data).stages
    longer = {name: torch.cat([value, value], 1) for name, value in data.items()}
    for microbatch, dtype in ((data, torch.bfloat16), (longer, None), (zoo.part(data, 0, [1]), None)):
        with torch.autocast("cpu", dtype, enabled=dtype is not None), pytest.raises(BatchError) as caught:
            stage.forward_one_chunk(0, (), microbatch)
        found.append(str(caught.value))
    return found


@pytest.mark.turns
def test_messages_of_other_sizes_than_build_s_are_refused(pool: Pool) -> None:
    """A user ran steps of torch's schedule inside autocast. The second stage read pairs of bfloat16 numbers as float32
    numbers, and trained on these, without a word."""
    for index, (lowered, longer, shorter) in enumerate(pool.run(of_other_sizes, 2)):
        stage = rf"the tensors that stage {index} {'receives' if index else 'sends'} for this microbatch are"
        assert re.search(rf"{stage} .*bfloat16.*, but .*If steps run inside torch.autocast", lowered)
        assert re.search(rf"{stage} .*\(2, 24, 32\).*, but build expected .*\(2, 12, 32\)", longer)
        assert re.search(rf"{stage} .*\(1, 12, 32\).*, but build expected .*\(2, 12, 32\)", shorter)


def of_pairs() -> list[list[float]]:
    """Losses of microbatches by torch's schedule for batches (inputs, labels), and those of one process."""
    found = []
    torch.manual_seed(0)
    batch = torch.randn(8, 8), torch.arange(8) % 3
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    layers = [LayerSpec(nn.Linear, 8, 8), torch.tanh, nn.Linear(8, 3)]
    for model, criterion in (
        (plain, lambda output, batch: nn.functional.cross_entropy(output, batch[1])),
        (PipelineModule(layers, loss_fn=nn.CrossEntropyLoss()).build(), None),
    ):
        whole = copy.deepcopy(model)
        expected = [float(nn.functional.cross_entropy(whole(x), y)) for x, y in zip(*(t.split(2) for t in batch))]
        built = build(model, 2, "torch", tuple(leaf[:2] for leaf in batch), criterion=criterion)
        losses: list[Tensor] = []
        schedule = Schedule1F1B(built.stages[0], 4, loss_fn=built.loss_fn)
        schedule.step(**built.keywords(batch), target=batch[1], losses=losses, return_outputs=False)
        found.append([float(loss) for loss in losses] or expected)
        assert found[-1] == pytest.approx(expected, rel=1e-6)
    return found


@pytest.mark.turns
def test_batches_of_inputs_and_labels(pool: Pool) -> None:
    """A user built stages of a vision model with a batch (images, labels) and a criterion, and of a PipelineModule with
    a loss_fn. Each error named a remedy that led to the next error."""
    assert len(pool.run(of_pairs, 2)[1]) == 2


def found_for_two(p: int, m: int, v: int = 1) -> Program:
    """A function that knows two ranks and four microbatches only, as the result of a search."""
    assert m == 4
    return make_program("zbv", 2, m, 2)


def by_chunks(schedule: Schedule) -> int:
    """The ranks of a pipeline of four stages, of which the schedule holds two per rank; one step has the loss of one
    process."""
    model, data = zoo.build("gpt2"), even("gpt2", 0)
    expected = copy.deepcopy(model)(**data).loss
    built = build(
        model, CUTS["gpt2"], "colossalai", data, num_microbatches=4, optimizer=torch.optim.AdamW, schedule=schedule
    )
    out = built.booster.execute_pipeline(iter([data]), built.model, None, built.optimizer)
    assert float(out["loss"]) == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(
        ConfigurationError, match="'zbv' has 2 stages per rank, so cuts must define a multiple of 2 stages, got 3"
    ):
        build(zoo.build("gpt2"), 3, "colossalai", data, num_microbatches=4, schedule=schedule)
    return built.booster.plugin.pp_size


@pytest.mark.turns
@pytest.mark.local
def test_the_schedule_s_chunks_count_as_stages(pool: Pool) -> None:
    """A user passed three cuts and schedule="zbv" on two ranks. The error asked for four ranks, and four ranks led to
    an error about the number of cuts."""
    assert pool.run(by_chunks, 2, "zbv") == [2, 2]


@pytest.mark.turns
@pytest.mark.local
def test_a_schedule_is_called_for_its_own_sizes(pool: Pool) -> None:
    """A user passed plan.searched with two chunks per rank. It was called for one microbatch, and its program was said
    to be for fewer ranks than there were stages."""
    assert pool.run(by_chunks, 2, found_for_two) == [2, 2]


def built_on_meta() -> list[str]:
    """The tied names of a model on meta that was built with an optimizer, after a step."""
    with init_empty_weights():
        model = zoo.build("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    data = even("gpt2", 0)
    built = build(model, 2, "colossalai", data, num_microbatches=4, optimizer=optimizer)
    built.booster.execute_pipeline(iter([data]), built.model, None, built.optimizer)
    built.optimizer.step()
    held = {name for name, p in built.model.unwrap().named_parameters(remove_duplicate=False) if not is_released(p)}
    return sorted(held & {"lm_head.weight", "transformer.wte.weight"})


@pytest.mark.local
@pytest.mark.turns
def test_an_optimizer_follows_ties_on_meta(pool: Pool) -> None:
    """A user built a tied model of accelerate's init_empty_weights with its optimizer. The error asked whether the
    optimizer belonged to another model."""
    assert pool.run(built_on_meta, 2) == [["lm_head.weight", "transformer.wte.weight"]] * 2


class Longest(Target):
    """A runtime of a user: on each microbatch, how much enters every stage, in numbers."""

    whole_output = True

    def __init__(self, times: int = 1) -> None:
        self.times = times

    def take(self, split: Parts) -> Callable[..., list[int]]:
        def run(**batch: Any) -> list[int]:
            values: Any = ()
            sizes = []
            for stage in list(split.stages.values())[:-1]:
                values = stage(*values, **batch)
                sizes.append(self.times * sum(value.numel() for value in values))
            return sizes

        return run


class Counting(nn.Module):
    """Its forward divides by the number of forwards, adds a running mean, and counts its depth up and down."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.register_buffer("mean", torch.zeros(4))
        self.steps = self.depth = 0

    def count(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x / self.steps + self.mean

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        self.depth += 1
        x = self.count(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / self.steps / self.depth
        self.depth -= 1
        return {"loss": nn.functional.cross_entropy(x, labels)}


class Dropping(nn.Module):
    """Layers with dropout, each in a checkpoint of the model's own forward if `checkpoints`."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(), nn.Linear(4, 4)) for _ in range(6)
        )
        self.checkpoints = checkpoints

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x))
        return {"loss": nn.functional.cross_entropy(x, labels)}


def dropped(checkpoints: bool, by_stage: bool) -> list[Tensor]:
    """The gradients of two forwards, whose backwards follow in turn: of the whole model, or stage by stage, with
    a forward of the first stage before each."""
    torch.manual_seed(0)
    model, data = Dropping(checkpoints), {"x": torch.randn(6, 4), "labels": torch.arange(6) % 4}
    split = build(model, 3, batch=data)
    if not by_stage:
        for loss in [split(**data)["loss"] for _ in range(2)]:
            loss.backward()
    else:
        runs: list[Any] = []
        for _ in range(2):
            values: Any = ()
            for stage in split.stages:
                entered = [value.detach().requires_grad_() for value in values]
                values = stage(*entered, **data)
                runs.append((entered, [values["loss"]] if stage.is_last else values))
        for k in (5, 2, 4, 1, 3, 0):
            split.stages[0](**data)
            grads = None if k % 3 == 2 else [value.grad for value in runs[k + 1][0]]
            torch.autograd.backward(runs[k][1], grads)
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


@pytest.mark.turns
def test_a_forward_s_own_checkpoints_are_recomputed_on_their_stage() -> None:
    """A model called its layers in checkpoints. Outside of boost, the backward recomputed them with what the last
    stage that had run a forward knew of them: CheckpointError, or other dropout masks."""
    for by_stage in (False, True):
        assert all(map(torch.equal, dropped(True, by_stage), dropped(False, by_stage)))


def test_own_checkpoints_are_refused_where_another_runtime_runs_several_stages() -> None:
    """In torch's interleaved schedule, layers in checkpoints were recomputed with other dropout masks, without a word:
    gradients differed by a third."""
    data = {"x": torch.randn(6, 4), "labels": torch.arange(6) % 4}
    split = build(Dropping(True), 3, batch=data)
    values: Any = ()
    for stage in split.stages:
        stage.is_carried = False  # as in a target other than None
        values = stage(*values, **data)
    with pytest.raises(TraceError, match=r"in its own torch\.utils\.checkpoint, but another runtime runs several"):
        values["loss"].backward()


def test_a_stage_is_not_recomputed_as_a_whole() -> None:
    """A runtime put a reentrant checkpoint around each stage. Its second run drew other dropout masks, and gradients
    were wrong without a word."""
    data = {"x": torch.randn(6, 4), "labels": torch.arange(6) % 4}
    first, second, _ = build(Dropping(False), 3, batch=data).stages
    received = [value.detach().requires_grad_() for value in first(**data)]
    values = checkpoint(lambda *values: second(*values, **data), *received, use_reentrant=True)
    with pytest.raises(UsageError, match=r"stage 1 .* in the backward.* call model.gradient_checkpointing_enable\(\)"):
        sum(value.sum() for value in values).backward()


class Storing(Counting):
    """Stores a mask in its first forward, and the last input in each."""

    mask: Tensor | None = None

    def count(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.arange(4) % 2
        self.latest, self.steps = x.detach(), 1
        return x * self.mask


class Counter(nn.Linear):
    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x) / self.steps


class InALayer(Counting):
    """Counts in a layer, as the error says."""

    def __init__(self) -> None:
        super().__init__()
        self.counter, self.steps = Counter(4, 4), 1
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(6))

    def count(self, x: Tensor) -> Tensor:
        return self.counter(x)  # type: ignore[no-any-return]


class Losses(Target):
    """A runtime of a user: the loss, after all stages in this process have run in turn."""

    def take(self, split: Parts) -> Callable[..., Tensor]:
        def run(**batch: Any) -> Tensor:
            values: Any = ()
            for stage in split.stages.values():
                values = stage(*values, **batch)
            return values

        return run


register_target("losses", Losses)


def counted(kind: type[Counting], target: str | None) -> list[float]:
    """The differences of losses, of gradients and of the state from those of the unsplit model in three steps, and the
    number of traces in the last step (without a target)."""
    torch.manual_seed(0)
    model, found = kind(), []
    whole = copy.deepcopy(model)
    split = build(model, 3, target, {"x": torch.randn(6, 4), "labels": torch.arange(6) % 4})
    for step in range(3):
        data = {"x": torch.randn(6, 4), "labels": torch.arange(6) % 4}
        with mock.patch("pipeshard.engine.traces.trace", side_effect=trace) as traced:
            loss, expected = split(**data), whole(**data)["loss"]
        found += [traced.call_count] * (step == 2 and target is None)
        loss = loss if isinstance(loss, Tensor) else loss["loss"]
        loss.backward()
        expected.backward()
        found += [float(loss - expected), model.steps - whole.steps, model.depth]
        found += [float((value - other).abs().max()) for value, other in zip(model.buffers(), whole.buffers())]
        found += [float((p.grad - q.grad).abs().max()) for p, q in zip(model.parameters(), whole.parameters())]
    return found


@pytest.mark.parametrize("kind", [Counting, Storing, InALayer])
@pytest.mark.turns
def test_state_of_the_forward_is_changed_once_in_one_process(kind: type[Counting]) -> None:
    """A model counted its forwards. In one process with three stages, the count grew by three in each forward, and
    each stage computed with another count."""
    assert largest_error(counted(kind, None)) < 1e-6


@pytest.mark.turns
def test_state_that_several_stages_of_a_process_would_change_is_refused() -> None:
    """The same under a runtime of a user, which does not say where a forward begins and ends."""
    with pytest.raises(TraceError, match=r"the forward of Counting changes steps .* Move the code that changes it"):
        counted(Counting, "losses")
    for kind in (Storing, InALayer):
        assert largest_error(counted(kind, "losses")) < 1e-6


@pytest.mark.turns
def test_a_user_s_own_target() -> None:
    assert register_target("longest", Longest) is Longest
    data = zoo.batch("llama")
    run = build(zoo.build("llama"), CUTS["llama"], target="longest", batch=data, times=2)
    assert run(**data) == [2 * 8 * 12 * 32] * 3
    with pytest.raises(ConfigurationError, match="the target 'torch' is already registered"):
        register_target("torch", Longest)
    with pytest.raises(ConfigurationError, match="requires a subclass of Target"):
        register_target("other", dict)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("cuts", "options", "error", "message"),
    [
        (2, {"target": "troch"}, ConfigurationError, "target='troch' is unknown: did you mean torch"),
        (2, {"target": "torch", "chunks": 2}, ConfigurationError, r"options of Torch\(num_model_chunks: int \| None"),
        (2, {"target": "torch"}, ConfigurationError, "requires a process group"),
        (
            2,
            {"target": "colossalai", "num_microbatches": 2, "partition": "auto"},
            ConfigurationError,
            "build derives partition from its argument cuts: omit partition",
        ),
        (
            2,
            {"target": "deepspeed"},
            ConfigurationError,
            "no process group exists: .*call deepspeed.init_distributed before build",
        ),
        (
            2,
            {"target": "deepspeed", "activation_checkpoint_interval": 1},
            ConfigurationError,
            r"activation_checkpoint_interval=1 .* call model.gradient_checkpointing_enable\(\) before build",
        ),
        (
            "model",
            {},
            ConfigurationError,
            "cuts must be a list of module names to cut after, .* or a positive number of stages, got 'model'",
        ),
        (["modle.norm"], {}, PartitionError, "modle.norm, which is not one of the modules.*did you mean model.norm"),
        ([""], {}, PartitionError, "names the whole LlamaForCausalLM"),
    ],
)
def test_what_cannot_be_built_is_refused(cuts: Any, options: Any, error: type[PipeshardError], message: str) -> None:
    with pytest.raises(error) as caught:
        build(zoo.build("llama"), cuts, batch=zoo.batch("llama"), **options)
    assert re.search(message, str(caught.value))


class Apart(Target):
    """A runtime of a user with one stage per process, of which this process has the first."""

    def placed(self, num_stages: int) -> tuple[Sequence[int], int]:
        return range(num_stages), 0

    def take(self, split: Parts) -> StageModule:
        return split.stages[0]


register_target("apart", Apart)


@pytest.mark.parametrize("target", [None, "apart"])
def test_weights_that_only_boost_would_load_are_refused(tmp_path: Path, target: str | None) -> None:
    """A user built a model of PipelinePlugin.from_pretrained, whose stages then trained random weights without a
    word."""
    zoo.build("llama").save_pretrained(tmp_path)
    model = PipelinePlugin.from_pretrained(LlamaForCausalLM, str(tmp_path))
    around = nn.Sequential(model)
    for blank in (model, around):
        with pytest.raises(ConfigurationError, match=r"embed_tokens.* only boost loads .* use target='colo"):
            build(blank, 2, target, batch=zoo.batch("llama"))


@pytest.mark.turns
def test_blanks_of_earlier_lengths_are_freed() -> None:
    """Each length of a batch kept one tensor of the size of the activations forever."""
    data = zoo.batch("llama")
    split = build(zoo.build("llama"), 2, batch=data)
    for length in range(4, 12):
        split(**{name: value[:, :length] for name, value in data.items()})
    replay = split.stages[0]._source[1].replay
    assert {shape[1] for shape, _ in {**replay._blanks, **replay._used} if len(shape) == 3} <= {10, 11}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_stage_without_parameters_is_not_cast_after_build() -> None:
    """The buffers of a first stage without parameters were cast, and the second stage raised the error: half a cast."""
    split = build(nn.Sequential(Scaled(), nn.Linear(4, 4)), ["0"], None, {"input": torch.ones(2, 4)})
    assert not [*split.stages[0].parameters()]
    with pytest.raises(UsageError, match=r"stage 0 .* cannot be converted"):
        split.bfloat16()
    assert {buffer.dtype for buffer in split.buffers()} == {torch.float32}


@pytest.mark.parametrize("target", [None, "apart"])
def test_a_stage_is_not_moved_or_cast_after_build(target: str | None) -> None:
    """A user passed a config with bf16 to DeepSpeed, which cast the stage. The error of a step advised an argument that
    build has not."""
    built = build(zoo.build("llama"), 2, target, zoo.batch("llama"))
    for convert in (built.bfloat16, lambda: nn.Sequential(built).to("meta")):
        with pytest.raises(UsageError, match=r"stage 0 .* call model.to\(dtype\) before build, .*device="):
            convert()
    assert built.to("cpu").float() is built and {p.dtype for p in built.parameters()} == {torch.float32}


class Stopped(nn.Module):
    """A later layer reads the result of a gate without its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        x = self.first(x)
        x = self.last(x * self.gate(x).sigmoid().detach())
        return {"loss": nn.functional.cross_entropy(x, labels)}


class Separate(Target):
    """A runtime of a user that runs the backward of each stage itself."""

    def take(self, split: Parts) -> list[StageModule]:
        return list(split.stages.values())


register_target("separate", Separate)


@pytest.mark.parametrize("samples", [1, 4])
def test_values_without_a_gradient_leave_a_stage_without_a_graph(samples: int) -> None:
    """torch began the backward of a stage also at values whose gradients no stage sends back. It failed, or began with
    1 if the value had one element."""
    model, data = Stopped(), {"x": torch.randn(samples, 4), "labels": torch.arange(samples) % 4}
    whole = copy.deepcopy(model)
    first, last = build(model, ["gate"], "separate", data)
    sent = first(**data)
    received = [value.detach().requires_grad_() for value in sent]
    last(*received, **data).backward()
    pairs = [(value, entered.grad) for value, entered in zip(sent, received) if value.requires_grad]
    torch.autograd.backward(*zip(*pairs))  # as in torch's pipelining
    whole(**data)["loss"].backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert theirs.grad is ours.grad is None or torch.allclose(ours.grad, theirs.grad)


def test_a_stage_receives_the_labels_of_a_pair() -> None:
    """A user called the stages with the names of a batch (inputs, labels), for which forward has no argument."""
    model = PipelineModule([nn.Linear(4, 4), torch.tanh, nn.Linear(4, 3)], loss_fn=nn.CrossEntropyLoss())
    x, labels = torch.randn(4, 4), torch.arange(4) % 3
    split = build(model, 2, batch=(x, labels))
    output, (last,) = split(x, labels), split.stages[1:]
    assert torch.equal(output, split(inputs=x, entry_1=labels)) and torch.equal(output, split(x))
    received, last.whole = split.stages[0](inputs=x, entry_1=labels), False
    loss = last(*received, inputs=x, entry_1=labels)
    assert torch.equal(loss, nn.functional.cross_entropy(output, labels))


def test_a_stage_says_what_it_takes() -> None:
    data = zoo.batch("llama")
    split = build(zoo.build("llama"), 2, batch=data)
    with pytest.raises(UsageError, match=r"stage 1 got 0 tensors, but takes 1: pass the tensors that stage 0 returned"):
        split.stages[1](**data)
    assert not dist.is_initialized()


TIES = """
import torch
from torch import nn
from pipeshard import analyze_tied_weights
with torch.device("meta"):
    model = nn.Module()
    for name in "cab":
        setattr(model, name, nn.Linear(2, 2))
    model.c.weight = model.a.weight = model.b.weight
    model.c.bias = model.a.bias
print(analyze_tied_weights(model, {"a": 0, "b": 1, "c": 1, "c.bias": 2}))
"""


@pytest.mark.turns
def test_ties_are_the_same_whatever_the_order_of_sets() -> None:
    found = set()
    for seed in ("0", "1"):
        run = [sys.executable, "-W", "ignore", "-c", TIES]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        found.add(subprocess.run(run, capture_output=True, text=True, env=environment).stdout)
    assert found == {"[(('a.bias', 0), ('c.bias', 2)), (('a.weight', 0), ('b.weight', 1), ('c.weight', 1))]\n"}


def test_ties_inside_a_stage_count() -> None:
    model = zoo.build("gpt2")
    assert analyze_tied_weights(model) == [(("lm_head.weight", 0), ("transformer.wte.weight", 0))]
    assert "build" in pipeshard.__all__


@pytest.mark.parametrize(("device", "index"), [("cuda", 1), ("cuda:2", 2), (torch.device("cuda"), 1)])
def test_a_device_gets_its_index(device: Any, index: int) -> None:
    """The name "cuda" ended in an IndexError or TypeError where the random generators of the GPUs are read."""
    gpus, generators = [torch.Generator() for _ in range(3)], []
    with (
        mock.patch("torch.cuda.default_generators", generators),
        mock.patch("torch.cuda.init", lambda: generators.extend(gpus)),
        mock.patch("torch.cuda.current_device", lambda: 1),
        mock.patch("pipeshard.interop.build.shard", side_effect=InterruptedError) as shard,
    ):
        with pytest.raises(InterruptedError):
            build(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, batch=torch.ones(1, 2), device=device)
        _, policy, where = shard.call_args.args
        assert where == torch.device("cuda", index) and policy.replay.randomness.generators[1] is gpus[index]
