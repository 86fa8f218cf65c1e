"""Bugs: earlier faults, each with a test and at most two lines of explanation.

Most of these tests are next to the tests of the code that was wrong: `BUGS` lists the worst of them. Models of users
that once trained silently wrong are in tests/hunt/cases.py. The tests in this file are of faults that no other file
covers.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeshard import CutPoint
from pipeshard.batch.read import RowDims
from pipeshard.distributed import peers
from pipeshard.distributed.failures import abort_groups
from pipeshard.distributed.progress import Progress
from pipeshard.distributed.watch import Watch
from pipeshard.engine.stage import Stage
from pipeshard.errors import TraceError
from pipeshard.graph.dataflow import Value
from pipeshard.graph.places import PathStep
from pipeshard.graph.snapshot import Snapshot
from pipeshard.graph.storage import storage_of
from pipeshard.graph.unit_outputs import changed
from pipeshard.split import materialize
from pipeshard.split.differences import added
from pipeshard.trainer.objective import Objective
from pipeshard.trainer.stand_ins import PipelineAccelerator
from pipeshard.trainer.trainer import Loop
from pipeshard.verify.compare import Comparison, Different
from tests import zoo
from tests.house import ROOT

BUGS: dict[str, str] = {
    "tests/test_hunt.py::test_hunted": (
        "A layer that took gradients by torch.func.grad was refused with an error of torch's."
    ),
    "tests/graph/test_unit_outputs.py::test_what_is_left_in_any_way_is_found_and_left_again": (
        "Auxiliary losses that layers left on themselves, in lists or in globals were lost between stages."
    ),
    "tests/graph/test_question.py::test_one_trace_serves_all_sizes_with_its_answer": (
        "Every new length was traced anew, and a padded batch passed for one without padding."
    ),
    "tests/graph/test_preserve.py::test_a_trace_changes_nothing": (
        "Boost alone moved MoCo's key encoder, counters and generators."
    ),
    "tests/graph/test_preserve.py::test_in_sixteen_bits": (
        "Nothing could be put back into the buffers of a model in 16 bits."
    ),
    "tests/graph/test_taint.py::test_addresses_are_kept_and_no_memory": (
        "All activations of a model at once were alive on a GPU until a trace ended."
    ),
    "tests/test_chains.py::test_what_a_layer_keeps_for_itself_is_free": (
        "A chunk padded with the end of the one before (VibeVoice) was refused."
    ),
    "tests/test_package.py::test_a_number_on_meta_is_an_error": (
        "ColossalAI made any number on meta 0, and a trace went the way of that."
    ),
    "tests/graph/test_units.py::test_a_sequential_is_a_list_where_the_model_has_no_other": (
        "Six layers in an nn.Sequential were one unit."
    ),
    "tests/batch/test_batch.py::test_positions_with_planes_are_cut_whatever_the_number_of_samples": (
        "Positions of several planes went whole to every microbatch, with as many samples as planes."
    ),
    "tests/batch/test_batches_lists.py::test_a_table_is_not_cut_where_it_has_as_many_entries_as_samples_by_chance": (
        "A table was cut in the one batch that had as many samples as it has entries."
    ),
    "tests/engine/test_loss_proof.py::test_a_guess_is_refused": (
        "Class weights passed for a mean over samples: the model trained on another loss."
    ),
    "tests/engine/test_loss_proof.py::test_a_sum_of_means_is_split_where_all_labels_are_valid": (
        "LUKE's loss, of words and of entities, was 0.2 % off."
    ),
    "tests/engine/test_loss_proof.py::test_16_bits_do_not_hide_a_part_of_the_loss_that_is_not_a_sum": (
        "In bf16 gradients were 10 to 80 % off, as 16 bits could not tell a loss from a mean."
    ),
    "tests/engine/test_loss_proof.py::test_criteria_are_told_apart": (
        "A lambda in a loop was a new criterion in each step."
    ),
    "tests/engine/test_loss_proof.py::test_a_criterion_with_parameters_is_refused": (
        "Nothing trained the parameters of a criterion."
    ),
    "tests/test_updates.py::test_a_norm_of_one_stage_is_refused": (
        "torch's clip_grad_norm_ clipped each stage by its own norm."
    ),
    "tests/engine/test_outputs_merged.py::test_no_microbatch_s_own_passes_for_the_batch_s": (
        "The first microbatch's loss and scalars were returned for the batch's."
    ),
    "tests/engine/test_precision.py::test_what_is_lowered_is_what_transformers_makes_so": (
        "Routing biases became 16 bits, and tables of positions stayed fp32."
    ),
    "tests/engine/test_precision.py::test_bf16_is_that_of_one_process_in_every_layout": (
        "Under autocast, gradients of what a stage received were summed in 16 bits."
    ),
    "tests/engine/test_wrapped_models.py::test_own_checkpoints_draw_again_what_they_drew": (
        "With dropout, a checkpoint of the model's own drew other masks than its forward."
    ),
    "tests/engine/test_gradients_hooks.py::test_hooks": (
        "An optimizer within the backward pass stepped after each microbatch."
    ),
    "tests/engine/test_data_parallel.py::test_fp32_values_stay_with_their_owner": (
        "Each replica kept fp32 values of all weights, and another owner got those from before training."
    ),
    "tests/distributed/test_watch.py::test_what_an_aborted_wait_has_returned_is_not_handed_out": (
        "With NCCL, a step whose groups were aborted returned a loss that nobody had computed."
    ),
    "tests/distributed/test_watch.py::test_an_error_of_all_ranks_ends_nobody_who_leaves_it_late": (
        "After one lost packet, a full disk on all ranks was told as a rank that hangs."
    ),
    "tests/schedule/test_streams.py::test_what_a_pair_shares_is_found_and_both_ends_are_named": (
        "isend over NCCL dead-locked on one communicator for both directions."
    ),
    "tests/planner/test_training.py::test_what_is_recommended_is_what_the_plugin_accepts": (
        "A plan with fsdp showed other steps than the plugin ran."
    ),
    "tests/planner/test_training.py::test_what_is_planned_is_held": (
        "Plans of bf16 counted 8 bytes of the 18 that a parameter takes."
    ),
    "tests/test_cli.py::test_adapters_train_little_and_have_no_weight_gradients_of_the_rest": (
        "A plan with frozen parameters counted the time of their weight gradients."
    ),
    "tests/planner/test_profile.py::test_the_loss_belongs_to_the_last_call": (
        "The loss took no time in a profile, and the last stage was late."
    ),
    "tests/checkpoint/test_training_state.py::test_a_bit_that_a_disk_has_flipped_is_found": (
        "A state with a flipped bit was loaded, and the newest one that could not be read ended the job."
    ),
    "tests/checkpoint/test_training_state.py::test_a_folder_of_somebody_else_s_is_not_replaced": (
        "In the background, a state took the place of a folder of somebody else's."
    ),
    "tests/checkpoint/test_saving_guards.py::test_what_a_rank_does_not_hold_is_refused_before_anything_is_done": (
        "`unwrap().save_pretrained` wrote zeros for other stages."
    ),
    "tests/checkpoint/test_model.py::test_one_file_is_what_its_name_says": (
        '`save_model(model, "x.pt")` wrote safetensors, which nothing read.'
    ),
    "tests/checkpoint/test_strangers.py::test_a_pickle_takes_no_more_than_its_file_says": (
        "A pickle of 900 bytes made 6 GiB."
    ),
    "tests/test_dataloader.py::test_what_datasets_and_collators_draw_depends_on_the_place_alone": (
        "Collators that mask at random gave each rank another batch."
    ),
    "tests/split/test_materialize.py::test_ties_survive_init_empty_weights": (
        "A tied model that was built under init_empty_weights was trained untied by one stage, and refused by two."
    ),
    "tests/test_launch.py::test_an_error_that_all_ranks_have_is_told_once_and_not_tried_for_ever": (
        "A script whose import failed was started 101 times."
    ),
}


@functools.cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_bug_has_its_test() -> None:
    """A story whose test was renamed or lost is only a story."""
    for test, story in BUGS.items():
        path, _, name = test.partition("::")
        assert name.startswith("test_") and name in names_in(path), f"{story}: {test}"


@pytest.mark.parametrize("call", ["boost", "execute_pipeline"])
def test_steps_alone_set_the_adaptive_limit(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The proof of a model at boost took 10 s, so a step of 0.1 s might hang for 200 s, on the first rank alone.
    Before that it was a save."""
    clock = iter(range(0, 100, 10))
    monkeypatch.setattr("pipeshard.distributed.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    progress = Progress()
    progress.enter(call)
    progress.start("the proof")
    progress.wait_until(lambda: None, (1,))
    assert progress.longest == (10 if call == "execute_pipeline" else 0)


class Group(dist.ProcessGroup):
    """Rank 0 of three; the connection to rank 1 is broken, and a receive from rank 2 can be given up."""

    _device_types = (torch.device("cpu"),)

    def __init__(self) -> None:
        super().__init__(0, 3)
        self.asked: list[int] = []

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: "gloo", recv=self.begin)

    def begin(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        def wait(timeout: object) -> None:
            raise RuntimeError("Connection closed by peer" if source == 1 else "Timed out waiting 1ms for recv")

        self.asked.append(source)
        return SimpleNamespace(wait=wait)


def test_a_broken_connection_does_not_keep_a_group_from_being_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive over a connection that was broken already counted as given up: nothing that waited for other ranks
    ended, nor did the process."""
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map={(group := Group()): None}))
    abort_groups()
    assert group.asked == [1, 2]


def test_the_first_of_two_failures_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that had gone on to its next call was told of what came of a failure there, not of the failure."""
    monkeypatch.setattr("pipeshard.distributed.watch.NOW", SimpleNamespace(number=5, present=5))
    told: list[list[int]] = []
    watch: Any = SimpleNamespace(_alarm=SimpleNamespace(told=lambda numbers, patience: told.append(numbers)), _well=4)
    Watch._told(watch)
    assert told == [[4, 5]]


def test_the_age_of_a_process_may_be_a_second_off() -> None:
    """Two processes reckon from when the system was started, which the kernel tells by the second: a rank that lived
    was not looked after, for another one with its number."""
    own = psutil.Process()
    assert peers._process(own.pid, own.create_time() + 1.0) == own
    assert peers._process(own.pid, own.create_time() - 100.0) is None


def test_an_entry_under_none_is_no_list() -> None:
    """The key of a list's whole content is None, and so may be that of an entry of a dict: a unit that set it ended
    boost by a TypeError."""
    cache: dict[str | None, int] = {None: 1}
    before = Snapshot({"": {"cache": cache}})
    cache[None] = 2
    ((source, content),) = changed(before)
    assert source.place[-1] == PathStep("item", None) and source.how == "set" and content == 2
    before.restore()
    assert cache == {None: 1}


def test_sparse_tensors_have_no_memory_of_their_own() -> None:
    """A model with a sparse matrix was refused by torch's "Cannot access storage of SparseTensorImpl"."""
    one, other = torch.eye(2).to_sparse(), torch.eye(2).to_sparse()
    assert storage_of(one) == storage_of(one) != storage_of(other)


def test_a_tracker_is_not_looked_into() -> None:
    """The run of a model that logs to wandb was taken for state of the model, which a step must not change."""
    run = type("Run", (), {"__module__": "wandb.sdk.wandb_run"})()
    state = type("State", (), {"__module__": "mine"})()
    run.step = state.step = [0]
    assert id(run.step) not in Snapshot({"": {"run": run}}).paths
    assert id(state.step) in Snapshot({"": {"state": state}}).paths


def test_attributes_of_a_compiler_are_its_own() -> None:
    """A unit that the user had compiled for all lengths was refused: dynamo marks what it returns."""
    result = torch.ones(2)
    result._dynamo_dynamic_indices = {0}  # type: ignore[attr-defined]
    assert added(result) == []
    result.gain = 2.0  # type: ignore[attr-defined]
    assert added(result) == ["gain"]


class Wide(nn.Linear):
    """A layer of more than one operation."""


class Marked(CutPoint):
    """A place for a cut."""


def test_classes_made_of_single_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class made of CutPoint was compiled, with nothing to compile; one of nn.Linear is, as it may do more."""
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda forward, **options: compiled.append(forward.__self__))
    units = {"linear": nn.Linear(2, 2), "wide": (wide := Wide(2, 2)), "cut": Marked(), "embed": nn.Embedding(2, 2)}
    materialize.compile_units(units)
    assert compiled == [wide]


class Halved(nn.Module):
    """A layer whose inner linear layer may have hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.turns
def test_hooks_inside_compiled_units_run() -> None:
    """A hook inside a layer, with compile=True, ran only in the first layer that was compiled on a stage: torch reused
    the code of this layer, without a guard on hooks, for all others."""
    units = {f"layers.{k}": Halved() for k in range(3)}
    materialize.compile_units(units, backend="eager")
    x = torch.randn(2, 2, requires_grad=True)

    def compare() -> None:
        for name, unit in units.items():
            expected = unit.forward.original(x)  # type: ignore[attr-defined]
            assert torch.equal(unit(x), expected), name
            assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (unit(x), expected))), name

    units["layers.1"].linear.register_forward_hook(lambda module, args, output: output * 0.5)
    compare()
    units["layers.2"].linear.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    compare()


def step_of(stage: Stage, *reached: Sequence[bool]) -> None:
    """A step in which the results that a stage received get a gradient or none, microbatch by microbatch."""
    stage.reached = {}
    for i, gets in enumerate(reached):
        tensors = [torch.ones(1, requires_grad=True) for _ in gets]
        for tensor, gets_one in zip(tensors, gets, strict=True):
            tensor.grad = torch.ones(1) if gets_one else None
        stage._note_reached(i, tensors)
    stage._refuse_none()


def test_what_gets_a_gradient_of_one_microbatch_alone_may_get_none_of_others() -> None:
    """Zeros for a gradient of one microbatch change nothing where another one has it; in all of a step they do, as one
    process has none there."""
    flow = mock.Mock(calls=[SimpleNamespace(unit="embed")])
    route = SimpleNamespace(flow=flow, enters=SimpleNamespace(gradients=[Value(0, 0), Value(0, 1)]))
    nothing: Any = None
    stage = Stage(nothing, 1, False, nothing)
    stage.microbatches = [SimpleNamespace(route=route)] * 2  # type: ignore[list-item]
    with pytest.raises(TraceError, match=r"result 1 of unit embed.*although the trace recorded one"):
        step_of(stage, (True, False), (True, False))
    step_of(stage, (False, True), (True, False))
    with pytest.raises(TraceError, match=r"result 0 of unit embed.*although the trace recorded one"):
        step_of(stage, (False, False), (False, True))


def test_labels_of_several_codebooks_are_cut_with_their_samples() -> None:
    """MusicGen has a row of labels for each codebook of a sample: it was asked whether they count the samples."""
    labels = torch.arange(8 * 3).view(8, 3)
    batch = RowDims(zoo.build("gpt2")).read({"input_ids": torch.arange(12).view(4, 3), "labels": labels})
    halves = batch.split(2, None)
    assert [half.tensors["labels"].tolist() for half in halves] == [labels[:4].tolist(), labels[4:].tolist()]


def test_whole_numbers_of_any_size_are_compared() -> None:
    """Layers that keep a seed, as Reformer's do, ended the proof by an overflow of torch's."""
    Comparison().values([10**30], [10**30], "attributes", "seed")
    with pytest.raises(Different, match="seed"):
        Comparison().values([10**30 + 1], [10**30], "attributes", "seed")


class Counting:
    """A trainer whose compute_loss counts what it has seen, from its first call on."""

    def __init__(self) -> None:
        self.accelerator: Any = SimpleNamespace(is_muted=False, gathers=0)
        self.callback_handler: Any = SimpleNamespace(callbacks=[])
        self.model: Any = nn.Identity()
        self.pipeline: Any = None
        self.autocasts = False
        self.steps = {"seen": 1}
        self.gathers = 0  # in each call

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **beside: Any) -> Tensor:
        self.total = getattr(self, "total", 0) + 1
        self.steps["seen"] += 1
        self.accelerator.gathers += self.gathers
        result: Tensor = model(**inputs)["loss"]
        return result

    def keeping_logs(self, logs: list[Any]) -> AbstractContextManager[None]:
        return nullcontext()

    def report_logs(self, logs: list[Any]) -> None:
        pass


def test_a_loss_that_is_only_tried_counts_nothing() -> None:
    """What compute_loss had first counted in a trial stayed: every microbatch and trace counted, as one batch more."""
    trainer = Counting()
    objective = Objective(trainer)
    objective({"loss": torch.tensor(1.0)}, {})
    assert trainer.steps == {"seen": 1} and not hasattr(trainer, "total")


def losses_of(steps: int, is_gathering: bool) -> int:
    """The number of losses that compute_loss returns in steps of two microbatches with two replicas."""
    trainer, pipeline = Counting(), mock.Mock(ran=[0, 1])
    trainer.accelerator = SimpleNamespace(is_muted=False, gathers=0, num_processes=2)
    trainer.gathers = int(is_gathering)
    objective = Objective(trainer)
    computed = Objective._loss
    with mock.patch.object(Objective, "_share"), mock.patch.object(Objective, "_loss", autospec=True) as loss:
        loss.side_effect = computed
        for _ in range(steps):
            with objective.stepping(pipeline):
                for _ in range(2):
                    objective.in_step({"loss": torch.tensor(1.0)}, {})
    return int(loss.call_count)


def test_only_a_loss_that_gathers_is_computed_without_gathering() -> None:
    """With replicas, compute_loss was called twice for each microbatch, to find a loss of gathered values."""
    assert losses_of(20, is_gathering=False) == 40
    compared = 1 + 2 * 5  # the second microbatch of the first step, and steps 1, 2, 4, 8 and 16
    assert losses_of(20, is_gathering=True) == 40 + compared


def test_what_is_muted_sends_nothing() -> None:
    """A compute_loss that pads its metrics for all replicas sent messages of its own in every trial and trace, which
    each replica makes when it needs one: the others met another message, or none."""
    accelerator = PipelineAccelerator.__new__(PipelineAccelerator)
    nobody: Any = SimpleNamespace(dp_size=2, replicas=None)
    accelerator.grid, accelerator.is_alone, accelerator.is_muted = nobody, False, True
    row = torch.arange(3)
    assert torch.equal(accelerator.pad_across_processes(row), row)
    assert torch.equal(accelerator.gather(row), torch.ones_like(row))


def test_a_compute_loss_of_the_object_counts() -> None:
    """`trainer.compute_loss = mine`, as notebooks have it, was passed over: only that of a class was looked at."""
    own, plain = Loop.__new__(Loop), Loop.__new__(Loop)
    own.compute_loss = lambda *args, **kwargs: None  # type: ignore[method-assign]
    assert own._overrides_loss and not plain._overrides_loss
