"""Tests of remedies: a script with the remedy that the error names trains as it does unsplit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pipeshard
from pipeshard.distributed.watch import NOTE
from tests.hunt.nets import data
from tests.pool import Pool
from tests.remedies import lookahead, mistakes, nets
from tests.remedies.mistakes import BOOSTS, ERRORS, MISTAKES, TROUBLES
from tests.remedies.table import EXACT, REMEDIES, Script
from tests.remedies.training import Training, run

pytestmark = pytest.mark.local

ROOT = Path(__file__).parent.parent
ELSEWHERE = {  # rows of docs/exact.md whose remedy another test executes
    "the criterion, or the forward after its last layer": "test_hunt.py::test_hunted",
    "torch's `clip_grad_norm_` or": "test_updates.py::test_a_norm_of_one_stage_is_refused",
    "a criterion or a forward with a collective": "test_collectives.py::test_the_remedies_for_a_collective_run",
    "an optimizer whose step calls collectives": (
        "test_collectives.py::test_the_remedies_for_an_optimizer_that_exchanges_its_updates_train"
    ),
    "auxiliary losses of MoE routers": (
        "engine/test_loss.py::test_an_auxiliary_loss_beside_a_sum_names_the_trainer_s_remedies"
    ),
    "modules with `running_*` buffers": "test_slices.py::test_statistics_of_positions_in_training",
    "`nn.SyncBatchNorm`": "engine/test_state.py::test_batch_norm_once_a_batch",
    "gradient hooks, added after `boost`": "test_loop_gradients.py::test_hooks_that_would_not_run_are_refused",
    "`clip_grad_value_`, constant factors": "test_updates.py::test_a_norm_of_scaled_gradients_is_refused",
    "torch's `clip_grad_norm_` of gradients that are": "test_loop_gradients.py::test_a_norm_of_shards_is_refused",
    "your own code that multiplies all gradients": "test_updates.py::test_a_factor_of_one_stage_is_refused",
    "random noise that your loop generates": "test_updates.py::test_noise_that_is_drawn_in_turn_is_refused",
    "a plain call `model(**batch)` with `zero_stage=1`": (
        "engine/test_written_weights.py::test_what_one_replica_alone_has_written_is_refused_before_a_plain_call"
    ),
    "one number that your loop computes": "test_coupling.py::test_what_is_reduced_over_all_ranks_is_not_warned_of",
    "gradients that only some ranks clear": "test_updates.py::test_gradients_that_one_rank_drops_are_warned_of",
    "a mode or a coefficient in the batch": "test_hunt.py::test_hunted",
    "a learning rate, momentum or another option": "test_updates.py::test_groups_of_a_stage_and_schedules_are_exact",
    "your own activation checkpoints": "engine/test_wrapped_models.py::test_no_cut_falls_inside_of_a_checkpoint",
    "an update of a boosted model by an optimizer": (
        "test_loop.py::test_an_optimizer_that_was_not_boosted_is_refused_in_its_first_step"
    ),
    "several views of each sample": (
        "engine/test_loss_of_units.py::test_views_that_are_not_in_the_order_of_the_samples_are_refused_with_a_remedy"
    ),
    "packed sequences": (
        "graph/test_packed_sequences.py::test_lengths_of_a_packed_result_are_refused_and_the_remedy_works"
    ),
}
NOT_EXECUTED = {  # rows whose remedy is to leave something out or to do it earlier, and what the script is then
    "a model in DDP": "one without the wrapper",
    "DDP, accelerate or transformers' Trainer": "one without the wrapper",
    "modules, parameters and adapters added after boost": "one that puts them in before boost",
    "a gradient that is None in a whole step": "one that detaches always or never",
    "hooks on accumulated gradients": "one without hooks",
    "gradient hooks on parameters that several": "one without hooks",
}

PAGES_ELSEWHERE = {  # clauses, rows and headings of the other pages whose remedy another test executes
    ERRORS + "`ConfigurationError`: parameters on meta": "checkpoint/test_lora.py::test_adapters_on_meta_are_refused",
    ERRORS + "`CheckpointError`: a full disk": "checkpoint/test_model.py::test_a_full_disk",
    ERRORS + "`DeadlockError`": "schedule/test_given.py::test_what_cannot_run_is_refused",
    ERRORS + "`MessageError`": ("engine/test_message_sizes.py::test_other_numbers_of_a_unit_are_an_error_on_all_ranks"),
    ERRORS + "`NonFiniteError`": "engine/test_nan_check.py::test_the_stage_and_the_parameter_are_named",
    ERRORS + "`RankError`": (
        "distributed/test_supervision.py::test_ranks_that_fail_leave_reports_that_tell_what_happened"
    ),
    TROUBLES + "`resize_token_embeddings` on": "checkpoint/test_model.py::test_new_tokens_of_a_model_on_meta",
    TROUBLES + "`trainer.model.generate(...)`": (
        "test_trainer.py::test_a_trainer_s_model_that_generates_names_the_trainer_s_call"
    ),
    TROUBLES + "`model.unwrap().generate(...)` on a stage": "test_generate.py::test_tokens_are_those_of_one_process",
    TROUBLES + "build the model with a different seed": "test_loop.py::test_every_rank_takes_the_weights_of_the_first",
    TROUBLES + "`DistributedDataParallel(model)`": (
        "engine/test_wrapped_models.py::test_what_cannot_be_cut_is_refused_at_boost"
    ),
    TROUBLES + "`torch.compile(model)`": "engine/test_wrapped_models.py::test_compiled_models_run_as_they_are_written",
    TROUBLES + "`OSError: Repo id": "test_plugin.py::test_a_saved_model_is_what_plain_transformers_loads",
    TROUBLES + "`Expected the argument plugin": "test_initialize.py::test_a_plugin_made_before_colossalai_is_imported",
    TROUBLES + "`Pointer argument": "graph/test_trace.py::test_a_kernel_between_units_is_named",
    TROUBLES + "`ncclInvalidUsage": (
        "distributed/test_devices.py::test_ranks_with_the_same_gpu_are_refused_before_nccl_does"
    ),
    TROUBLES + "## It hangs": (
        "distributed/test_supervision.py::test_ranks_that_fail_leave_reports_that_tell_what_happened"
    ),
    TROUBLES + "## One error, many": (
        "test_launch.py::test_an_error_that_all_ranks_have_is_told_once_and_not_tried_for_ever"
    ),
}
HERE = {  # those of which a test of this file has its own
    TROUBLES + "train weights loaded in bf16": "test_weights_in_16_bits_are_told_of_fp32_values",
    TROUBLES + "`Gloo connectFullMesh failed`": "test_a_destroyed_process_group_is_refused_and_a_second_one_trains",
    TROUBLES + "`ValueError: ... environment variable RANK": "test_python_without_torchrun_is_told_so",
    TROUBLES + "## Out of memory": "test_what_saves_memory_is_exact",
    TROUBLES + "## The loss differs": "test_the_mean_of_another_script",
    TROUBLES + "## In a notebook": "test_one_process_in_a_notebook",
}
NOTHING_TO_DO = {  # why nothing is executed
    ERRORS + "`ConfigurationError`: a model without a plan": "tests of tensor parallelism give the plans",
    TROUBLES + "`Address already in use`": "another job has to hold the port",
    TROUBLES + "warnings about apex": "nothing is wrong",
    TROUBLES + "## An error that I do not understand": "a person answers",
}


def outcome(script: Script) -> tuple[str, list[str]]:
    """What this rank raises, or what differs from the unsplit model."""
    try:
        return "", run(script) if isinstance(script, Training) else script()
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}", []


ALL = REMEDIES | BOOSTS
TWICE = """
import os

import torch
import torch.distributed as dist

import pipeshard
from pipeshard.errors import UsageError
from tests.hunt.nets import Net, data


def boost(seed):
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return pipeshard.initialize(model, optimizer, pp_size=2, num_microbatches=2, dry_run_input=data(0))


def step(engine, seed):
    loss = float(engine.execute_pipeline(iter([data(seed)]))["loss"])
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return loss


dist.init_process_group("gloo")
engine = boost(0)
losses = [step(engine, 0)]
engine.save_model(engine.model, "trained", shard=True)
dist.barrier()
dist.destroy_process_group()
for call in (lambda: step(engine, 1), lambda: engine.save_model(engine.model, "other"), engine.optimizer.step):
    try:
        call()
    except UsageError as error:
        assert "was destroyed" in str(error) and "boost the new model" in str(error), error
    else:
        raise AssertionError("no error")
os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
dist.init_process_group("gloo")
engine = boost(1)
engine.load_model(engine.model, "trained")
losses += [step(engine, 1), step(engine, 2)]
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for seed, loss in enumerate(losses):
    expected = model(**data(seed))["loss"]
    expected.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert abs(loss - float(expected.detach())) < 1e-5, (seed, loss, expected)
print("exact", flush=True)
dist.destroy_process_group()
"""


def refused(name: str) -> tuple[str, list[str]]:
    return outcome(ALL[name].wrong)


def remedied(name: str) -> list[tuple[str, list[str]]]:
    return [outcome(script) for script in ALL[name].right]


def exact(name: str) -> tuple[str, list[str]]:
    return outcome(EXACT[name])


@pytest.mark.turns
@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", ALL)
def test_a_remedy_works(pool: Pool, name: str) -> None:
    """Errors named remedies that nobody had followed, and some of these were refused in turn or trained something
    else."""
    for error, differences in pool.run(refused, 2, name):
        assert error.startswith("pipeshard.") and re.search(ALL[name].says, error), (error, differences)
    for outcomes in pool.run(remedied, 2, name):
        assert outcomes == [("", [])] * len(ALL[name].right)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_and_mended(pool: Pool, tmp_path: Path, name: str) -> None:
    """Rows of the pages on errors promised remedies that nobody had followed."""
    for error, differences in pool.run(mistakes.follow, 2, name, tmp_path, timeout=120):
        assert re.search(MISTAKES[name].says, error, re.DOTALL), error
        assert differences == []


@pytest.mark.turns
def test_what_saves_memory_is_exact(pool: Pool) -> None:
    assert pool.run(mistakes.of_less_memory, 2, timeout=120) == [[], []]


@pytest.mark.turns
def test_the_mean_of_another_script(pool: Pool) -> None:
    """A script that averages the means of its microbatches has another loss, and loss_reduction has it too."""
    assert pool.run(mistakes.of_another_mean, 2, timeout=120) == [(True, [])] * 2


@pytest.mark.turns
def test_one_process_in_a_notebook(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(mistakes.in_a_notebook, 1, tmp_path, timeout=120) == [[]]


@pytest.mark.turns
def test_weights_in_16_bits_are_told_of_fp32_values(pool: Pool) -> None:
    """Small updates of bf16 weights round to nothing; the warning's remedy keeps fp32 values that move."""
    assert pool.run(mistakes.in_16_bits, 2, timeout=120) == [[], []]


def test_python_without_torchrun_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    if dist.is_initialized():  # by an earlier test: a Trainer without a launcher makes a world of one process
        dist.destroy_process_group()
    with pytest.raises(ValueError, match="environment variable RANK expected, but not set"):
        dist.init_process_group("gloo")


@pytest.mark.turns
@pytest.mark.parametrize("kind", [lookahead.Lookahead, lookahead.LookaheadOfLists])
def test_a_lookahead_is_exact_by_state_and_refused_by_lists(pool: Pool, kind: type[lookahead.Lookahead]) -> None:
    """Slow weights in a list beside the groups went to other parameters once each stage had its own; in
    `self.state[parameter]`, as the error says, they are exact."""
    for error, differences in pool.run(lookahead.trained, 2, kind, timeout=120):
        if kind is lookahead.Lookahead:
            assert (error, differences) == ("", [])
        else:
            assert re.search(r"ConfigurationError: .*self.state\[parameter\]", error, re.DOTALL), error


@pytest.mark.turns
def test_a_destroyed_process_group_is_refused_and_a_second_one_trains(tmp_path: Path) -> None:
    """A step after destroy_process_group ended in an error of torch's; the remedy (save, boost in a new group, load)
    goes on as if nothing had been."""
    (tmp_path / "train.py").write_text(TWICE)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    ended = subprocess.run(
        [sys.executable, *command, "--rdzv-endpoint", "localhost:0", "train.py"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("exact") == 2, ended.stdout


@pytest.mark.turns
@pytest.mark.parametrize("name", EXACT)
def test_what_was_refused_for_nothing_is_exact(pool: Pool, name: str) -> None:
    """`logits[mask.bool()]` with a float mask was refused, since its mean was tried over the mask's sum alone."""
    assert pool.run(exact, 2, name) == [("", [])] * 2


DO_NOT_RUN = "a table that is cut", "bags that are cut", "edges of three microbatches"
OF_THE_CRITERION = "a criterion that reads a whole batch", "a criterion whose tensor is set later"


@pytest.mark.parametrize("name", DO_NOT_RUN)
def test_a_microbatch_that_does_not_run_is_a_batch_error_on_every_rank(pool: Pool, name: str) -> None:
    """One rank raised the model's own IndexError, and the others RankError, where the whole batch runs."""
    assert all("BatchError" in error for error, _ in pool.run(refused, 2, name))


def error_of_a_step() -> tuple[str, list[str]]:
    """The error of a step in which microbatches do not run, and its notes."""
    with pytest.raises(Exception) as caught:
        run(Training(nets.Graph, {"verify": False, "num_microbatches": 3}, batches=nets.nodes))
    return caught.typename, getattr(caught.value, "__notes__", [])


def test_an_error_of_a_step_in_microbatches_has_a_note_with_the_remedies(pool: Pool) -> None:
    """A microbatch that does not run by itself raised an error of the model that named no remedy."""
    outcomes = pool.run(error_of_a_step, 2)
    notes = [note for name, notes in outcomes for note in notes if name == "IndexError"]
    assert any("pass num_microbatches=1 to PipelinePlugin" in note for note in notes), outcomes
    assert all(note.startswith(NOTE) for note in notes)


@pytest.mark.parametrize("name", OF_THE_CRITERION)
def test_a_criterion_that_reads_a_tensor_of_the_whole_batch_is_told_where_to_put_it(pool: Pool, name: str) -> None:
    """A criterion read the teacher's logits from a closure, and the error said that the forward fails for a
    microbatch, with remedies for row indices and other batch dimensions."""
    assert all(re.search(ALL[name].says, error) for error, _ in pool.run(refused, 2, name))


def nans_of_one_stage() -> list[bool]:
    """Whether the losses of a model on one stage are NaN, which a branch at random reads."""
    torch.manual_seed(0)
    model = nets.Drops()
    torch.nn.init.constant_(model.null, torch.nan)
    options = {"pp_size": 1, "num_microbatches": 2, "dry_run_input": data(), "verify": False}
    engine = pipeshard.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), **options)
    return [bool(engine.execute_pipeline(iter([data(seed)]))["loss"].isnan()) for seed in range(6)]


def test_a_branch_at_random_is_exact_on_one_stage(pool: Pool) -> None:
    """A NaN of another cause ended such a run, since its second trace had taken the other branch."""
    (found,) = pool.run(nans_of_one_stage, 1)
    assert any(found)


def rows(page: str) -> list[str]:
    """The rows of all tables of a page."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return [line.removeprefix("| ") for line in lines if line.startswith("| ")]


def test_every_refused_row_has_a_remedy_or_is_listed() -> None:
    """A row of docs/exact.md that refuses something brings the remedy that is executed."""
    of_remedies = {row for remedy in REMEDIES.values() for row in remedy.rows if not row.startswith("`")}
    listed = of_remedies | ELSEWHERE.keys() | NOT_EXECUTED.keys()
    refusing = [row for row in rows("exact.md") if "refused" in row or "no cut" in row]
    assert [row for row in refusing if not any(map(row.startswith, listed))] == []
    assert [start for start in listed if not any(row.startswith(start) for row in rows("exact.md"))] == []


def test_remedies_name_errors_that_are_there() -> None:
    named = {row for remedy in REMEDIES.values() for row in remedy.rows if row.startswith("`")}
    for kind, example in (row.split(": ") for row in named):
        assert any(row.startswith(kind) and example in row for row in rows("errors.md")), example


def promises() -> list[str]:
    """The examples of docs/errors.md, and the rows and headings of docs/troubleshooting.md."""
    found = []
    for row in rows("errors.md"):
        kind, cell = row.removesuffix(" |").split(" | ")
        examples = cell.replace("`, `", "`; `").split("; ")
        found += [f"{ERRORS}{kind}: {example}" for example in examples if kind.startswith("`")]
    lines = (ROOT / "docs" / "troubleshooting.md").read_text().splitlines()
    tables = ("## Do not", "## Errors from other libraries")
    headings = [line for line in lines if line.startswith("## ") and line not in tables]
    return found + [TROUBLES + each for each in rows("troubleshooting.md") + headings]


HEADS = (TROUBLES + "do not |", TROUBLES + "message |")


def test_every_promise_of_the_pages_on_errors_is_executed_or_has_a_reason() -> None:
    """A clause of docs/errors.md, or a row or heading of docs/troubleshooting.md, brings the test that follows it."""
    of_tables = {row for each in (*MISTAKES.values(), *BOOSTS.values()) for row in each.rows}
    of_remedies = {ERRORS + row for each in REMEDIES.values() for row in each.rows if row.startswith("`")}
    listed = of_tables | of_remedies | PAGES_ELSEWHERE.keys() | HERE.keys() | NOTHING_TO_DO.keys()
    assert [each for each in promises() if not each.startswith((*listed, *HEADS))] == []
    assert [start for start in listed if not any(start in each for each in promises())] == []
    assert all(test in globals() for test in HERE.values())


@pytest.mark.parametrize("test", [*ELSEWHERE.values(), *PAGES_ELSEWHERE.values()])
def test_what_is_executed_elsewhere_is_there(test: str) -> None:
    path, name = test.split("::")
    assert f"def {name}(" in (ROOT / "tests" / path).read_text()
