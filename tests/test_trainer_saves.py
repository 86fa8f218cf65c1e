"""Tests of a Trainer's saves: a run that was stopped, or killed during a save, resumes exactly on other ranks."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shutil
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers.trainer
from huggingface_hub import HfApi
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, TrainerCallback, TrainingArguments

from pipeshard.checkpoint.random_state import random_state
from pipeshard.checkpoint.state_folder import lock
from pipeshard.distributed import watching
from pipeshard.errors import CheckpointError, UsageError
from pipeshard.trainer.checkpoint import load_state, newest, refuse_broken, stamps
from tests import zoo
from tests.messages import texts_of
from tests.moments import Moments
from tests.pool import Pool, WorkerError
from tests.trainers import TASKS, differences, launched, logs, run, run_pipeline, trainer, with_adapters

STEPS = {"max_steps": 11, "save_strategy": "steps", "save_steps": 7, "per_device_train_batch_size": 2}


class Begins(TrainerCallback):
    """Records the step at which training begins."""

    at = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.at = state.global_step


def going_on(name: str, folder: str, resume: Any = True, **others: Any) -> tuple[int, list[dict[str, float]]]:
    """The step at which a run from a checkpoint begins, and its logs, which are those of a run from step 0, too."""
    with launched():
        made = trainer(name, folder, **others)
        made.add_callback(begins := Begins())
        made.train(resume_from_checkpoint=resume)
        made.evaluate()
        return begins.at, logs(made)


def resumed(
    pool: Pool, name: str, folder: Path, ranks: int, plugin: dict[str, Any], **others: Any
) -> tuple[int, list[dict[str, float]]]:
    others = {**STEPS, "save_strategy": "no", **others}
    return pool.run(going_on, ranks, name, str(folder), plugin=plugin, **others)[0]


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["causal", "lora", "prompts"])
def test_a_run_goes_on_with_other_ranks(pool: Pool, tmp_path: Path, name: str) -> None:
    options = {"gradient_accumulation_steps": 2}
    expected = run(name, tmp_path / "whole", **STEPS | options)
    pool.run(run_pipeline, 2, name, str(tmp_path / "split"), plugin={"pp_size": 2}, **STEPS | options)
    torn = tmp_path / "split" / "checkpoint-11" / "trainer_state.json"
    torn.write_text(torn.read_text()[:-100])  # as a save that is killed leaves it
    for ranks, plugin in ((1, {"pp_size": 1}), (3, {"pp_size": 3})):
        begins, found = resumed(pool, name, tmp_path / "split", ranks, plugin, **options)
        assert begins == 7
        assert differences(found[:-2], expected[:-2]) == [] and differences(found[-1:], expected[-1:]) == []
    if name == "causal":
        begins, found = resumed(pool, name, tmp_path / "split", 4, {"pp_size": 2}, gradient_accumulation_steps=1)
        assert begins == 7
        assert differences(found[:-2], expected[:-2]) == [] and differences(found[-1:], expected[-1:]) == []


class Killed(TrainerCallback):
    """Kills this rank at a moment of the save of step 4, or says how many there are."""

    def __init__(self, fatal: int | None) -> None:
        self.fatal, self.moments = fatal, None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:
            self.moments = Moments(self.fatal)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.moments is not None:
            self.moments.on = False


KEPT = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}


def saving(folder: str, rank: int = 0, moment: int | None = None) -> int:
    """The moments of the second of two saves, of which `rank` is killed at one."""
    with launched():
        made = trainer("lora", folder, {"pp_size": 2}, **KEPT)
        own = Killed(moment if made.args.process_index == rank else None)
        made.add_callback(own)
        made.train()
        assert own.moments is not None
        return own.moments.count


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rank", "moment"), [(0, 0), (0, 7), (0, -2), (0, -1), (1, -1)])
def test_a_save_that_is_killed_leaves_a_whole_checkpoint(pool: Pool, tmp_path: Path, rank: int, moment: int) -> None:
    """A rank that died between the files of a checkpoint left one in which weights and optimizer were of two steps."""
    expected = run("lora", tmp_path / "whole", **{**KEPT, "save_strategy": "no"})
    if moment < 0:
        moment += pool.run(saving, 2, str(tmp_path / "counted"))[rank]
    with pytest.raises(WorkerError, match=f"rank {rank} died exit code -9"):
        pool.run(saving, 2, str(tmp_path / "killed"), rank, moment)
    begins, found = resumed(pool, "lora", tmp_path / "killed", 1, {"pp_size": 1}, max_steps=5)
    assert begins in (2, 4)
    assert differences(found[:-2], expected[:-2]) == [] and differences(found[-1:], expected[-1:]) == []


SAVES = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 1}


def read_only(file: Path, missing_ok: bool = False) -> None:
    raise PermissionError(f"{file} is read-only")


def hurt(folder: Path) -> tuple[list[str], int, list[str]]:
    """Of four checkpoints the last two are hurt, and of one Trainer's random numbers, which nobody needs: what is said
    of each, and from which step a run then goes on."""
    with launched():
        trainer("causal", folder, {"pp_size": 2}, **SAVES).train()
        if dist.get_rank() == 0:
            weights, states, random = (folder / f"checkpoint-{step}" for step in (4, 3, 2))
            flipped(next(weights.glob("*.safetensors")))
            flipped(states / "pipeline" / "training.pt")
            torn = random / "rng_state_1.pth"
            torn.write_bytes(torn.read_bytes()[:-30])
            shutil.copytree(folder / "checkpoint-1", folder / "checkpoint-9")  # of another step than it says
        dist.barrier()
        said = []
        for step in (4, 3, 9):
            with pytest.raises(CheckpointError) as caught:
                trainer("causal", folder, {"pp_size": 2}, **SAVES).train(str(folder / f"checkpoint-{step}"))
            said.append(str(caught.value))
        with mock.patch.object(Path, "unlink", read_only), pytest.raises(Exception, match="pth is read-only") as caught:
            trainer("causal", folder, {"pp_size": 2}, **SAVES).train(str(folder / "checkpoint-2"))
        assert "cannot be restored" not in str(caught.value)
        made = trainer("causal", folder, {"pp_size": 2}, **SAVES)
        made.add_callback(begins := Begins())
        made.train(resume_from_checkpoint=True)
        trainer("causal", folder, {"pp_size": 2}, **SAVES).train(str(folder / "checkpoint-4"))  # which is whole again
        return said, begins.at, [path.name for path in folder.iterdir() if path.is_file()]


def resumed_apart(folder: str) -> None:
    asked = None if dist.get_rank() else f"{folder}/checkpoint-4"
    with launched(), pytest.raises(UsageError, match=r"between ranks: checkpoint-4 on rank 0 .* but None on rank 1 "):
        trainer("causal", folder, {"pp_size": 2}).train(asked)


@pytest.mark.turns
def test_ranks_resume_from_one_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """Each machine looked for the last checkpoint on its own disk, which only the first machine has: the ranks' first
    messages were mixed up."""
    pool.run(resumed_apart, 2, str(tmp_path))


def saved_beside_a_manifest(folder: Path) -> None:
    with launched():
        made = trainer("causal", folder, {"pp_size": 2}, max_steps=1, save_strategy="no")
        made.train()
        made.save_model()


class Preempted(TrainerCallback):
    """Requests a checkpoint after step 3, as a termination signal does with enable_jit_checkpoint=True."""

    checkpoints: Any

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            self.checkpoints.is_checkpoint_requested = True


def preempted(folder: str, pp_size: int) -> list[str]:
    others = {**STEPS, "enable_jit_checkpoint": True, "gradient_accumulation_steps": 2, "save_strategy": "no"}
    with launched():
        made = trainer("causal", folder, {"pp_size": pp_size}, **others)
        callback = Preempted()
        callback.checkpoints = next(
            one.jit_manager for one in made.callback_handler.callbacks if hasattr(one, "jit_manager")
        )
        if dist.get_rank() == pp_size - 1:
            made.add_callback(callback)
        made.train()
    return sorted(path.name for path in Path(folder).glob("checkpoint-*"))


@pytest.mark.skipif(not hasattr(TrainingArguments, "enable_jit_checkpoint"), reason="transformers 5 has it")
@pytest.mark.turns
@pytest.mark.parametrize("pp_size", [1, 2])
def test_ranks_save_together_after_a_signal_on_one(pool: Pool, tmp_path: Path, pp_size: int) -> None:
    """enable_jit_checkpoint=True was refused, even for one process. transformers' own callback saves within a step."""
    options = {"gradient_accumulation_steps": 2}
    expected = run("causal", tmp_path / "whole", **STEPS | options)
    assert pool.run(preempted, pp_size, str(tmp_path / "cut"), pp_size) == [["checkpoint-4"]] * pp_size
    begins, found = resumed(pool, "causal", tmp_path / "cut", pp_size, {"pp_size": pp_size}, **options)
    assert begins == 4
    assert differences(found[:-2], expected[:-2]) == [] and differences(found[-1:], expected[-1:]) == []


@pytest.mark.turns
def test_a_model_is_saved_beside_a_manifest_of_the_users(pool: Pool, tmp_path: Path) -> None:
    """It is the name of pipeshard's manifests, but also that of a web app's: the file was gone."""
    (own := tmp_path / "manifest.json").write_text("mine")
    pool.run(saved_beside_a_manifest, 2, tmp_path)
    assert own.read_text() == "mine" and (tmp_path / "model.safetensors.index.json").exists()


def saving_apart(folder: Path, inner: str) -> str:
    with launched(), pytest.raises(UsageError) as raised:
        trainer("causal", folder / f"at-{dist.get_rank()}" / inner, {"pp_size": 2}, **SAVES).train()
    return str(raised.value)


@pytest.mark.turns
@pytest.mark.parametrize("inner", ["", "/checkpoints"])
def test_ranks_save_to_one_folder(pool: Pool, tmp_path: Path, inner: str) -> None:
    """Each rank named the folder, or its parent, by its own clock: the first save failed, after hundreds of steps."""
    for said in pool.run(saving_apart, 2, tmp_path, inner.strip("/")):
        assert "output_dir differs between ranks: " in said
        assert f"at-0{inner} on rank 0" in said and f"at-1{inner} on rank 1" in said


def saved_apart(folder: Path) -> list[str]:
    with launched(), mock.patch.object(logging.getLogger("pipeshard"), "warning") as warning:
        made = trainer("causal", folder / f"at-{dist.get_rank()}", {"pp_size": 2}, max_steps=1, save_strategy="no")
        made.train()
        made.save_model()
    return texts_of(warning)


@pytest.mark.turns
def test_ranks_save_a_model_to_the_folder_of_the_first_rank(pool: Pool, tmp_path: Path) -> None:
    """The only save of a run failed at its end, since each rank had named output_dir by its own clock."""
    (said,), others = pool.run(saved_apart, 2, tmp_path)
    assert "the folder for the model differs between ranks" in said and not others
    assert len(list((tmp_path / "at-0").glob("model-*.safetensors"))) == 2 and not list(
        (tmp_path / "at-1").glob("*.s*")
    )


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)


@pytest.mark.turns
def test_checkpoints_that_have_changed_are_passed_over(pool: Pool, tmp_path: Path) -> None:
    """A disk flipped a bit of an optimizer, and the run went on from it: the folder's names and sizes were right."""
    for said, begins, files in pool.run(hurt, 2, tmp_path):
        expected = [
            "checkpoint-4: it is not a complete, intact PipelineTrainer.*safetensors: the SHA-256 checksum has changed",
            "checkpoint-3: .*pipeline/training.pt: the SHA-256 checksum has changed",
            "checkpoint-9: .*manifest.json belongs to step 1",
        ]
        assert all(re.search(pattern, line) for pattern, line in zip(expected, said, strict=True)), said
        assert begins == 2 and files == []


class Hub:
    """A stand-in of the hub: repositories are folders."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.messages = folder, list[str]()

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        return mock.Mock(repo_id=f"somebody/{repo_id}")

    def upload_folder(
        self, repo_id: str, folder_path: str, commit_message: str, path_in_repo: str = "", **options: Any
    ) -> Future[None]:
        self.messages.append(commit_message)
        ignored = shutil.ignore_patterns(*options.get("ignore_patterns", []))
        shutil.copytree(folder_path, self.folder / repo_id / path_in_repo, dirs_exist_ok=True, ignore=ignored)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def pushed(folder: Path) -> list[str]:
    hub = Hub(folder / "hub")
    with ExitStack() as patched:
        patched.enter_context(launched())
        for name in ("create_repo", "upload_folder"):
            patched.enter_context(mock.patch.object(HfApi, name, getattr(hub, name)))
            if hasattr(transformers.trainer, name):
                patched.enter_context(mock.patch.object(transformers.trainer, name, getattr(hub, name)))
        options = {"push_to_hub": True, "hub_strategy": "all_checkpoints", "max_steps": 2}
        made = trainer("causal", folder / "mine", {"pp_size": 2}, **{**SAVES, **options})
        made.save_model()
        made.train()
        made.push_to_hub(commit_message="the end")
    return hub.messages


@pytest.mark.turns
def test_what_is_pushed_to_the_hub_is_read_from_there(pool: Pool, tmp_path: Path) -> None:
    """A push saves once more, on all ranks, also before the model is split."""
    first, second = pool.run(pushed, 2, tmp_path)
    assert (
        second == [] and first[0] == "Model save" and first[-1] == "the end" and "Training in progress, step 2" in first
    )
    repository = tmp_path / "hub" / "somebody" / "mine"
    for which in (repository, repository / "checkpoint-2"):
        state = AutoModelForCausalLM.from_pretrained(which).state_dict()
        assert (which / "training_args.bin").is_file() and all(value.isfinite().all() for value in state.values())
    assert (repository / "README.md").is_file()
    checkpoint = str(repository / "checkpoint-1")
    ((begins, again),) = pool.run(going_on, 1, "causal", str(tmp_path), checkpoint, plugin={"pp_size": 1})
    assert begins == 1 and len(again) == 10  # the step before, 7 more, a summary, an evaluation


def adapted_by_transformers(folder: Path) -> list[str]:
    """What a Trainer says to a model with transformers' own adapters: to training, and to a save after one without."""
    with launched():
        model: Any = zoo.build("llama")
        model.add_adapter(LoraConfig(target_modules=["q_proj"]))
        with pytest.raises(CheckpointError) as caught:
            trainer("lora", folder, {"pp_size": 2}, {"model": model}, save_strategy="steps").train()
        made = trainer("lora", folder, {"pp_size": 2}, {"model": model}, save_strategy="no", max_steps=1)
        made.train()
        with pytest.raises(CheckpointError) as later:
            made.save_model()
        return [str(caught.value), str(later.value)]


@pytest.mark.turns
def test_adapters_that_no_checkpoint_would_hold_are_refused_before_training(pool: Pool, tmp_path: Path) -> None:
    """A Trainer's checkpoints of a model with `model.add_adapter` had layers that `from_pretrained` drew at random."""
    for said in pool.run(adapted_by_transformers, 2, tmp_path):
        assert len(said) == 2 and all("booster.enable_lora(model, lora_config=...)" in one for one in said)
    assert list(tmp_path.iterdir()) == []


def saved_before_it_is_split(folder: Path) -> None:
    """Save a vision model without data; then a language model before its training and, to the same folder, after."""
    with launched():
        nothing = {"train_dataset": None, "eval_dataset": None}
        trainer("causal", folder / "vit", {"pp_size": 2}, {"model": zoo.build("vit"), **nothing}).save_model()
        made = trainer("causal", folder / "llama", {"pp_size": 2}, max_steps=2)
        made.save_model()
        made.train()
        made.save_model()
        made.save_model(str(folder / "trained"))


def test_a_model_is_saved_before_it_is_split(pool: Pool, tmp_path: Path) -> None:
    """save_model of a Trainer without data traced a vision model with token ids, and raised a TraceError. The file of
    the whole model must not outlast the files of the stages, since `from_pretrained` would read it instead."""
    pool.run(saved_before_it_is_split, 2, tmp_path)
    vision = AutoModelForImageClassification.from_pretrained(tmp_path / "vit").state_dict()
    expected = zoo.build("vit").state_dict()
    assert list(vision) == list(expected) and all(torch.equal(vision[name], expected[name]) for name in expected)
    found, trained = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("llama", "trained")
    )
    assert all(torch.equal(found[name], trained[name]) for name in trained)


def saved_twice(folder: Path) -> None:
    """Two saves of two adapters into one folder, with steps between them, after a save that was killed."""
    with launched():
        model: Any = with_adapters()
        model.add_adapter("ref", LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        made = trainer("lora", folder, {"pp_size": 2}, {"model": model}, max_steps=2)
        made.save_model()
        made.train()
        if dist.get_rank() == 0:
            (folder / ".adapter").mkdir()
            (folder / ".adapter" / "adapter_model.safetensors").touch()
        dist.barrier()
        made.save_model()
        made.save_model(str(folder / "new"))


@pytest.mark.turns
def test_a_second_save_of_several_adapters_replaces_the_first(pool: Pool, tmp_path: Path) -> None:
    """TRL adds the adapter "ref" to that of a user, and calls save_model twice: the second ended the run at its end,
    since the folder of "ref" was not empty."""
    pool.run(saved_twice, 2, tmp_path)
    new = tmp_path / "new"
    files = [path.relative_to(new) for path in new.rglob("*.safetensors")]
    assert sorted(map(str, files)) == ["adapter_model.safetensors", "ref/adapter_model.safetensors"]
    assert all((tmp_path / file).read_bytes() == (new / file).read_bytes() for file in files)
    assert not (tmp_path / ".adapter").exists()


class Noting(TrainerCallback):
    """Adds a file of its own to each checkpoint."""

    def __init__(self, note: str) -> None:
        self.note = note

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            Path(args.output_dir, f"checkpoint-{state.global_step}", "note.txt").write_text(self.note)


def run_again(folder: Path) -> list[str]:
    """The same run twice in one folder, with a callback that adds a file to its checkpoint; it goes on from there."""
    with launched():
        for note in ("one", "two"):
            made = trainer("causal", folder, {"pp_size": 2}, **{**SAVES, "max_steps": 1})
            made.add_callback(Noting(note))
            made.train()
        trainer("causal", folder, {"pp_size": 2}, **{**SAVES, "max_steps": 2}).train(str(folder / "checkpoint-1"))
    return sorted(json.loads((folder / "checkpoint-1" / "manifest.json").read_text())["files"])


@pytest.mark.turns
def test_a_file_of_a_callback_is_not_part_of_the_next_runs_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """A script ran again, and its callback wrote its file into the checkpoint again, which counted as damaged then."""
    for files in pool.run(run_again, 2, tmp_path):
        assert {"config.json", "training_args.bin", "pipeline/training.pt"} <= set(files)
        assert any(name.endswith(".safetensors") for name in files) and "note.txt" not in files


class Projector:
    """An object among the states of a parameter, as GaLore keeps them."""


class Projecting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            self.state[parameter].setdefault("projector", Projector())
        return super().step(closure)


def unsavable(folder: str) -> list[str]:
    with launched():
        model = TASKS["causal"].model()
        more = {"model": model, "optimizers": (Projecting(model.parameters(), lr=0.1), None)}
        made = trainer("causal", folder, {"pp_size": 2}, more, **STEPS)
        problem = r"state 'projector' of \S+ of Projecting cannot be saved .*save_only_model=True"
        with pytest.raises(CheckpointError, match=problem):
            made.train()
        assert made.state.global_step == 1
        model = TASKS["causal"].model()
        more = {"model": model, "optimizers": (Projecting(model.parameters(), lr=0.1), None)}
        trainer("causal", folder, {"pp_size": 2}, more, **STEPS, save_only_model=True).train()
        return sorted(path.name for path in Path(folder).glob("checkpoint-*"))


@pytest.mark.turns
def test_an_optimizer_that_cannot_be_saved_is_refused_after_its_first_step(pool: Pool, tmp_path: Path) -> None:
    """The states of an optimizer held objects, which was refused at the first checkpoint, hours later, without a
    remedy. With the remedy, checkpoints have only the model."""
    for folders in pool.run(unsavable, 2, str(tmp_path), timeout=300):
        assert folders == ["checkpoint-11", "checkpoint-7"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-11")


class Saves(TrainerCallback):
    """Requests a checkpoint after each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = True


def saved_by_a_job(folder: Path, refused: bool = False, **options: Any) -> tuple[int, str]:
    """The steps of a job that saves a checkpoint after its only step, and the error with which it was `refused`."""
    with launched():
        made = trainer(
            "causal", folder, {"pp_size": 2}, {"callbacks": [Saves()]}, **{**STEPS, "max_steps": 1, **options}
        )
        with pytest.raises(CheckpointError) if refused else nullcontext() as caught:
            made.train()
        steps, message = made.state.global_step, str(caught.value) if caught else ""
        del made, caught
    gc.collect()  # its Trainer's lock
    return steps, message


@pytest.mark.turns
@pytest.mark.parametrize("options", [{}, {"save_only_model": True}, {"save_strategy": "no"}])
def test_a_second_job_leaves_the_checkpoints_of_the_first(pool: Pool, tmp_path: Path, options: dict[str, Any]) -> None:
    """A job was requeued before its earlier run had ended: at its first checkpoint, it wrote its weights into the
    complete one of that run, removed the manifest, and was refused only then."""
    pool.run(saved_by_a_job, 2, tmp_path)
    expected = stamps(tmp_path)
    lock(tmp_path, owner := Begins())
    for steps, message in pool.run(saved_by_a_job, 2, tmp_path, refused=True, **options):
        assert f"process {os.getpid()} of" in message and "also saves to" in message
        assert steps == (1 if options.get("save_strategy") == "no" else 0)  # a callback may request a save at any step
    assert stamps(tmp_path) == expected
    del owner


def looking(folder: Path, failing: int, broken: bool) -> str:
    """What a rank says to checkpoints that the rank `failing` cannot look at."""

    def unreadable(_: Path) -> str:
        if dist.get_rank() == failing:
            raise PermissionError(13, "Permission denied")
        return "it is torn"

    group = dist.group.WORLD
    assert group is not None
    look = refuse_broken if broken else newest
    with mock.patch("pipeshard.trainer.checkpoint.flaw_of", unreadable), pytest.raises(CheckpointError) as caught:
        look(folder / "checkpoint-1" if broken else folder, group)
    return str(caught.value)


@pytest.mark.turns
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_look_at_checkpoints_is_named(
    pool: Pool, tmp_path: Path, failing: int, broken: bool
) -> None:
    """Each rank looked at the checkpoints, though only the first rank's view counts: one that failed did so alone, and
    the other ranks waited for it, or took its error for an answer."""
    (tmp_path / "checkpoint-1").mkdir()
    for message in pool.run(looking, 2, tmp_path, failing, broken):
        assert message.startswith("rank 0") == ("PermissionError: [Errno 13]" in message) == (failing == 0), message


def load_invalid(folder: str) -> bool:
    """Whether torch's generator is as before after the last rank's random state could not be set."""
    grid = SimpleNamespace(world=dist.group.WORLD, first=dist.get_rank() == 0)
    model: Any = SimpleNamespace(pipeline=SimpleNamespace(grid=grid))
    before = torch.get_rng_state()
    saved = random_state() | {"torch": torch.Generator().manual_seed(7).get_state()}
    if not grid.first:
        saved["python"] = (3, (), None)
    others = dict.fromkeys(("load_checkpoint_weights", "load_optimizer", "read_rest", "restore_rest"), mock.DEFAULT)
    own = mock.Mock(return_value=saved)
    with (
        mock.patch.multiple("pipeshard.trainer.checkpoint", own_random_state=own, **others),
        mock.patch.object(watching, "_names", []),  # of another test's mesh
        pytest.raises(CheckpointError, match=r"^rank 1.*: .*training.pt cannot be restored"),
    ):
        load_state(Path(folder), model, mock.Mock(), None)
    return torch.equal(torch.get_rng_state(), before)


def test_an_invalid_random_state_leaves_the_generators_as_they_were(pool: Pool, tmp_path: Path) -> None:
    """A script that caught the error of a checkpoint, and trained from scratch, drew other random numbers than without
    the attempt, and on some ranks only."""
    assert pool.run(load_invalid, 2, str(tmp_path)) == [True, True]


class Halved(torch.nn.Linear):
    """Saves its weight in fp16."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].half()


def converting(folder: str) -> str:
    """The error of a Trainer whose model saves a converted weight."""
    with launched():
        made = trainer("causal", folder, {"pp_size": 2}, **KEPT)
        made.model.model.layers[0].mlp.down_proj.__class__ = Halved
        with pytest.raises(CheckpointError) as refused:
            made.train()
        assert made.state.global_step == 0
        return str(refused.value)


@pytest.mark.turns
def test_a_model_that_converts_its_tensors_is_refused_before_the_first_step(pool: Pool, tmp_path: Path) -> None:
    """A stage has released some of the tensors that a state_dict hook converts: a checkpoint of the Trainer contained
    converted tensors, which it took for the model's own when it resumed."""
    for message in pool.run(converting, 2, str(tmp_path), timeout=120):
        assert "converts model.layers.0.mlp.down_proj.weight" in message
