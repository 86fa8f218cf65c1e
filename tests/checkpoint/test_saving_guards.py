"""Tests of saving guards: tensors that a rank does not hold cannot be saved, copied or loaded unnoticed."""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from pipeshard import PipelinePlugin, load_training_state, save_training_state, to_sequential
from pipeshard.checkpoint import lora, optimizer
from pipeshard.checkpoint.files import new_folder
from pipeshard.checkpoint.save import FolderSave
from pipeshard.checkpoint.state_folder import MARKS, StateSave
from pipeshard.errors import CheckpointError, UsageError
from tests import zoo
from tests.pool import Pool
from tests.unsplit import Split, largest_error


def refused(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(UsageError) as caught:
        fn(*args, **kwargs)
    return str(caught.value)


def misused(folder: str) -> list[str]:
    """The idioms of Hugging Face and of torch on a rank's model, each with its own folder; what was said."""
    torch.manual_seed(0)
    split = Split(zoo.build("llama"), 2, zoo.batch("llama"), num_microbatches=2)
    whole, path = zoo.build("llama").state_dict(), Path(folder)
    boosted, model = split.model, split.model.unwrap()
    before = {name: p.detach().clone() for name, p in split.held.items()}
    said = [
        refused(model.save_pretrained, path / "a"),
        refused(model.model.save_pretrained, path / "b"),
        refused(model.push_to_hub, "nobody/nothing"),
        refused(model.state_dict),
        refused(boosted.state_dict),
        refused(torch.save, model, path / "c"),
        refused(torch.optim.swa_utils.AveragedModel, model),
        refused(model.load_state_dict, whole),
        refused(model.model.load_state_dict, {key.removeprefix("model."): value for key, value in whole.items()}),
        refused(boosted.load_state_dict, whole),
        refused(model.half),
        refused(boosted.to, torch.float64),
        refused(model.share_memory),
        refused(model.resize_token_embeddings, 70),
        refused(model.resize_token_embeddings, new_num_tokens=70),
        refused(model.resize_token_embeddings, pad_to_multiple_of=7),
        refused(nn.utils.parameters_to_vector, model.parameters()),
    ]
    (path / "c").unlink(missing_ok=True)
    unchanged = all(torch.equal(p, before[name]) and p.dtype == before[name].dtype for name, p in split.held.items())
    return [*said, "unchanged" if unchanged else "changed"]


def test_what_a_rank_does_not_hold_is_refused_before_anything_is_done(pool: Pool, tmp_path: Path) -> None:
    """`unwrap().save_pretrained` wrote zeros for the other stages, and `from_pretrained` took them without a word. The
    errors of `state_dict` and `resize_token_embeddings` advised on training loops, and one rank had been resized."""
    for rank, (*said, unchanged) in enumerate(pool.run(misused, 2, str(tmp_path))):
        assert all(
            f"{rank} of 2 in its pipeline), since rank {1 - rank} of the pipeline holds this" in text for text in said
        ), said
        assert all("booster.save_model" in text or "before booster.boost" in text for text in said)
        assert said[3].startswith("state_dict: ") and said[4].startswith("state_dict: ")
        assert sum("In a training loop" in text for text in said) == 1
        assert unchanged == "unchanged"
    assert not list(tmp_path.iterdir())


def norms(model: nn.Module, *_: Any, **__: Any) -> dict[str, Any]:
    return {name: value for name, value in nn.Module.state_dict(model, keep_vars=True).items() if "norm" in name}


def used(folder: str) -> list[Any]:
    """What needs no values, or has them: all of it works."""
    model, whole, path = zoo.build("llama"), zoo.build("llama"), Path(folder)
    setattr(model, "state_dict", MethodType(norms, model))  # noqa: B010
    split = Split(model, 2, zoo.batch("llama"), num_microbatches=2)
    model = split.model.unwrap()
    split.model.to("cpu").float()
    part = {name: torch.zeros_like(p) for name, p in split.held.items()}
    model.load_state_dict(part, strict=False)
    model.save_pretrained(path / str(split.model.pipeline.rank), state_dict=whole.state_dict())
    torch.optim.AdamW(model.parameters()).zero_grad()
    model.requires_grad_(True)
    copied = to_sequential(split.model)
    split.booster.save_model(split.model, path / "saved", shard=True)
    saved = AutoModelForCausalLM.from_pretrained(path / "saved").state_dict()
    rows = model.get_input_embeddings().num_embeddings
    return [
        model.state_dict().keys() == copied.state_dict().keys() == norms(whole).keys(),
        model.resize_token_embeddings(rows) is model.resize_token_embeddings() is model.get_input_embeddings(),
        not any(bool(p.any()) for p in split.held.values()),
        model.num_parameters() == whole.num_parameters(),
        model.get_memory_footprint() == whole.get_memory_footprint(),
        [p.shape for p in model.parameters()] == [p.shape for p in whole.parameters()],
        "save_pretrained" not in vars(copied),
        saved.keys() == whole.state_dict().keys() and not any(value.any() for value in saved.values()),
    ]


def test_bookkeeping_works(pool: Pool, tmp_path: Path) -> None:
    """A `state_dict` that the user had set on the model was replaced, and sizes that do not change were refused. A save
    must not follow this `state_dict`."""
    assert pool.run(used, 2, str(tmp_path)) == [[True] * 8] * 2


def alone(folder: str) -> list[float]:
    """The errors of an average that has followed a step, and of copies of `unwrap()` and of the boosted model, which
    compute the loss from before this step."""
    data = zoo.batch("llama")
    split = Split(zoo.build("llama"), 1, data, num_microbatches=2)
    model = split.model.unwrap()
    model.save_pretrained(folder)
    model.load_state_dict(zoo.build("llama").state_dict())
    averages = [torch.optim.swa_utils.AveragedModel(kind) for kind in (model, split.model)]
    torch.save(split.model, f"{folder}/model.pt")
    copies = [*averages, *(average.module for average in averages), copy.deepcopy(split.model)]
    expected = float(split.backward(data)["loss"])
    split.step()
    copies.append(torch.load(f"{folder}/model.pt", weights_only=False))
    moved = float(split.evaluate(data)["loss"])
    with torch.no_grad():
        losses = [float(copied(**data).loss) for copied in copies]
        averages[1].update_parameters(split.model)  # the first one is a copy
        followed = float(averages[1](**data).loss)
    assert all(len(average.state_dict()) > len(split.held) for average in averages) and moved != expected
    return [followed - moved, *(loss - expected for loss in losses)]


def test_one_stage_holds_all_of_it(pool: Pool, tmp_path: Path) -> None:
    """`AveragedModel(engine.model)` in a notebook, with pp_size=1, failed as the process groups of the boosted model
    cannot be copied, and the error did not say that its `unwrap()` can."""
    (errors,) = pool.run(alone, 1, str(tmp_path))
    assert len(errors) == 7 and largest_error(errors) < 1e-5


def replaced() -> list[str]:
    """What has taken a place after boost, one thing at a time; what the next step says on this rank."""
    split, data = Split(zoo.build("llama"), 1, zoo.batch("llama"), num_microbatches=2), zoo.batch("llama")
    model = split.model.unwrap()
    head, norm, weight = model.lm_head, model.model.norm, model.model.norm.weight
    model.lm_head = nn.Linear(*head.weight.shape[::-1], bias=False)
    said = [refused(split.backward, data)]
    model.lm_head, norm.weight = head, nn.Parameter(torch.ones_like(weight))
    said.append(refused(split.backward, data))
    norm.weight = weight
    norm.adapter = nn.Linear(2, 2)
    said.append(refused(split.backward, data))
    norm.adapter = nn.ReLU()  # nothing to train
    split.backward(data)
    return said


@pytest.mark.turns
@pytest.mark.local
def test_what_is_put_in_after_boost_is_refused(pool: Pool) -> None:
    """A new head ran, on every rank its own, without a place in the sums over replicas, in the norm and in ties."""
    (said,) = pool.run(replaced, 1)
    for name, text in zip(("lm_head", "model.norm.weight", "model.norm.adapter"), said, strict=True):
        assert f"{name} (in " in text and "before booster.boost" in text


def adapted(folder: str) -> str:
    from colossalai.booster import Booster

    data = zoo.batch("llama")
    booster = Booster(plugin=PipelinePlugin(2, num_microbatches=2, dry_run_input=data))
    model = booster.enable_lora(zoo.build("llama"), lora_config=LoraConfig(target_modules=["q_proj"]))
    boosted, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    boosted.unwrap().print_trainable_parameters()
    return refused(boosted.unwrap().save_pretrained, folder)


@pytest.mark.turns
def test_adapters_of_other_stages(pool: Pool, tmp_path: Path) -> None:
    """28 of 56 tensors were zeros, in the folder that every PEFT tutorial writes."""
    assert all("booster.save_lora_as_pretrained" in said for said in pool.run(adapted, 2, str(tmp_path)))
    assert not list(tmp_path.iterdir())


def saved(folder: str, failing: bool) -> list[Any]:
    """A training state beside a save in the background, which takes its time and looks at the live config."""
    split = Split(zoo.build("llama"), 2, zoo.batch("llama"), num_microbatches=2)
    config, seen, path = split.model.unwrap().config, [], Path(folder)
    write, has_begun = FolderSave.write, threading.Event()

    def slowly(save: FolderSave) -> None:
        has_begun.set()
        time.sleep(0.2)
        seen.append(config.use_cache)
        if failing:
            raise OSError("no space")
        write(save)
        seen.append(config.use_cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderSave, "write", slowly)
        split.booster.save_model(split.model, str(path / "model"), shard=True, use_async=True)
        assert has_begun.wait(30)
        patch.undo()
        try:
            save_training_state(path / "state", 1, split.model)
        except CheckpointError as error:
            return [str(error)]
    done = (path / "model" / "model.safetensors.index.json").exists() or (path / "model" / "model.safetensors").exists()
    load_training_state(path / "state", split.model)
    return [done, *seen, config.use_cache, json.loads((path / "model" / "config.json").read_text())["use_cache"]]


@pytest.mark.turns
def test_a_training_state_waits_for_a_save_in_the_background(pool: Pool, tmp_path: Path) -> None:
    """The background flipped `use_cache` on the live config to write it; its error was never raised."""
    assert pool.run(saved, 2, str(tmp_path / "a"), False) == [[True, False, False, False, True]] * 2
    assert all("no space" in said for (said,) in pool.run(saved, 2, str(tmp_path / "b"), True))


def saved_beside(folder: Path, what: str) -> list[bool]:
    """Whether a model that is saved in the background is complete when another save begins to write."""
    model: Any = zoo.build("llama")
    if what == "save_lora_as_pretrained":
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    split = Split(model, 2, zoo.batch("llama"), num_microbatches=2)
    io, write, ends, seen = split.booster.checkpoint_io, FolderSave.write, threading.Event(), []

    def slowly(save: FolderSave) -> None:
        ends.wait(0.5)
        write(save)

    def begins(*args: Any, **kwargs: Any) -> Any:
        seen.append((folder / "model.safetensors.index.json").exists())
        ends.set()
        return new_folder(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderSave, "write", slowly)
        for module in (lora, optimizer):
            patch.setattr(module, "new_folder", begins)
        io.save_folder(split.model, folder, use_async=True)
        if what == "save_optimizer":
            split.booster.save_optimizer(split.optimizer, str(folder), shard=True)
        else:
            split.booster.save_lora_as_pretrained(split.model, str(folder))
        io.wait()
    return seen


@pytest.mark.turns
@pytest.mark.parametrize("what", ["save_optimizer", "save_lora_as_pretrained"])
def test_other_saves_wait_for_a_save_in_the_background(pool: Pool, tmp_path: Path, what: str) -> None:
    """They replace their folder, in which the model may still be written: its shards were no longer found."""
    assert pool.run(saved_beside, 2, tmp_path, what) == [[True], [True]]


def missed(folder: Path) -> list[Path]:
    """The new folders of two saves for which this rank looked in vain."""
    split = Split(zoo.build("llama"), 2, zoo.batch("llama"), num_microbatches=2)
    names = set[Path]()

    def looking(original: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            try:
                return original(path, *args, **kwargs)
            except FileNotFoundError:
                names.add(Path(path))
                raise

        return look

    with pytest.MonkeyPatch.context() as patch:
        for name in ("stat", "lstat", "scandir", "listdir"):
            patch.setattr(os, name, looking(getattr(os, name)))
        split.booster.save_model(split.model, str(folder / "model"), shard=True)
        save_training_state(folder / "states", 1, split.model, split.optimizer)
    return [path for path in (folder / "model", folder / "states") if path in names]


@pytest.mark.turns
@pytest.mark.processes
def test_only_the_first_rank_looks_for_a_new_folder(pool: Pool, tmp_path: Path) -> None:
    """NFS remembers for 30 seconds that a name did not exist: a rank on another machine that had looked for the folder
    of a save could not write into it after the first rank had created it."""
    first, other = pool.run(missed, 2, tmp_path)
    assert first == [tmp_path / "model", tmp_path / "states"] and not other


def to_a_full_disk(folder: str) -> list[str]:
    """What is said where no file may be larger than 1,000 bytes, on rank 1 alone or on both; and of a good save."""
    split, told = Split(zoo.build("llama"), 2, zoo.batch("llama"), num_microbatches=2), []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for full in ([1], [0, 1]):
        if dist.get_rank() in full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            save_training_state(Path(folder) / "state", 1, split.model, split.optimizer)
        except CheckpointError as error:
            told.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    save_training_state(Path(folder) / "state", 1, split.model, split.optimizer)
    return told


def test_a_full_disk_is_told_with_path_and_rank(pool: Pool, tmp_path: Path) -> None:
    """A save that found no space said "No space left on device", of no file and no rank."""
    for told in pool.run(to_a_full_disk, 2, str(tmp_path)):
        assert len(told) == 2, told
        assert re.search(r"rank 1 \(stage 1\): .*state.*cannot be written \(.*free on this disk: .*MB\)", told[0]), told
        assert re.search(r"rank 0 \(stage 0\): .*state.*cannot be written .*: free some space", told[1]), told


def test_the_reason_of_a_failed_save_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk was full while the first rank saved in the background: the thread ended with FileNotFoundError about a
    hidden file, and the log did not say why the save failed. With replicas, it took a rank for a stage."""
    writing = tmp_path / ".step-1.writing"
    (writing / MARKS).mkdir(parents=True)
    rest = {"unsaved": lambda: None}  # not written by torch.save
    save = StateSave(tmp_path / "step-1", 0, 1, "", writing, [], {}, rest, 1, 1, lambda: None)
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", seen.append)
        save.start()
        save.join()
    assert save.failed is not None and not writing.exists() and not seen
    assert f"saving {tmp_path / 'step-1'} failed on rank 0: " in caplog.text and "lambda" in caplog.text
