"""Tests of training states: a run that was stopped, moved to other ranks, or killed during a save resumes exactly."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from colossalai.booster import Booster
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import pipeshard
from pipeshard import PipelinePlugin, load_training_state, save_training_state
from pipeshard.checkpoint import safetensors_files as shards
from pipeshard.checkpoint import state_folder
from pipeshard.checkpoint.io import io_of
from pipeshard.checkpoint.state_folder import lock, seal
from pipeshard.checkpoint.training_state import newest_step
from pipeshard.errors import CheckpointError
from tests import zoo
from tests.messages import assert_told, assert_told_alike, messages_of
from tests.moments import Moments
from tests.pool import Pool, WorkerError
from tests.unsplit import Split


class Samples(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 14

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(10) * (2 * k + 3) + k) % zoo.VOCABULARY
        return {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == k % 5, -100)}


class Training:
    """All that a training script makes, on any number of stages; `seed` is that of the weights and all generators."""

    def __init__(self, name: str, seed: int) -> None:
        model = with_dropout(zoo.build(name, seed=seed))
        plugin = PipelinePlugin(pp_size=dist.get_world_size(), num_microbatches=2)
        loader = plugin.prepare_dataloader(Samples(), batch_size=4, shuffle=True, seed=seed)  # 4, 4, 4, 2
        vectors = [p for p in model.parameters() if p.ndim == 1]
        matrices = [p for p in model.parameters() if p.ndim > 1]
        adamw = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 0.9**step)
        self.booster = Booster(plugin=plugin)
        boosted = self.booster.boost(model, adamw, None, loader, schedule)
        self.model, self.optimizer, _, self.loader, self.schedule = boosted
        self.batches = self.endless()
        for set_seed in (torch.manual_seed, random.seed, np.random.seed):
            set_seed(seed)

    def endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.schedule,
            "dataloader": self.loader,
        }

    def run(self, steps: int) -> list[dict[str, Any]]:
        """What can be seen of each step: the loss, the data, the learning rate, everyone's random numbers."""
        seen = []
        for _ in range(steps):
            batch = next(self.batches)
            out = self.booster.execute_pipeline(iter([batch]), self.model, None, self.optimizer)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            numbers = (float(torch.rand(())), random.random(), float(np.random.rand()))
            data, rate = batch["input_ids"][:, 1].tolist(), self.schedule.get_last_lr()
            seen.append({"loss": float(out["loss"]), "data": data, "lr": rate, "random": numbers})
        return seen

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """Parameters and moments held here, by name."""
        values = {}
        for parameter, name in self.model.pipeline.held_parameters().items():
            values[name] = parameter.detach().clone()
            for key, value in self.optimizer.optim.state[parameter].items():
                values[f"{name} {key}"] = value.clone()
        return values


def with_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    return model


def uninterrupted(name: str) -> tuple[list[Any], dict[int, Any]]:
    training, seen, values = Training(name, 0), [], {}
    for step in range(1, 11):
        seen += training.run(1)
        values[step] = training.values
    return seen, {step: values[step] for step in (3, 7, 10)}


def beginning(name: str, folder: Path, steps: int) -> None:
    training = Training(name, 0)
    training.run(steps)
    save_training_state(folder, steps, **training.parts)


def going_on(name: str, folder: Path, start: int, steps: int) -> tuple[list[Any], Any]:
    """With other weights, orders and random numbers, until the state is loaded."""
    training = Training(name, 17 + dist.get_rank())
    assert load_training_state(folder, step=start, **training.parts) == start
    seen = training.run(steps)
    save_training_state(folder, start + steps, **training.parts)
    return seen, training.values


def folds(folder: Path, start: int) -> list[Any]:
    """The losses of the second and third fold of a script with one plugin; a `start` of 1 skips the first fold."""
    batch, found = zoo.batch("gpt2", rows=4), []
    plugin = PipelinePlugin(2, num_microbatches=2, dry_run_input=batch)
    for fold in range(start, 3):
        model = with_dropout(zoo.build("gpt2", seed=fold))
        engine = pipeshard.initialize(model, torch.optim.SGD(model.parameters(), 0.1), plugin=plugin)
        if start and fold == 1:
            load_training_state(folder, engine.model, engine.optimizer)
        with engine.plugin.no_sync():
            pass
        for step in range(start if fold == 1 else 0, 2):
            found.append(float(engine.execute_pipeline(iter([batch]))["loss"]))
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            if fold == 1 and not step:
                save_training_state(folder, 1, engine.model, engine.optimizer)
        del engine, model
        gc.collect()
    return found


@pytest.mark.turns
def test_a_resumed_fold_draws_the_same_numbers(pool: Pool, tmp_path: Path) -> None:
    """A restarted script skipped finished folds: the resumed fold's model had another number, so its dropout masks
    differed, as did those of the folds after it. And models that were gone made `no_sync()` ambiguous."""
    straight, resumed = pool.run(folds, 2, tmp_path, 0)[0], pool.run(folds, 2, tmp_path, 1)[0]
    assert resumed == straight[3:]


def joined(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: value for rank in ranks for name, value in rank.items()}


def assert_close(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert {**one, "loss": 0} == {**other, "loss": 0}


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gpt2", "llama-tied"])
def test_four_then_two_then_three_stages_train_like_an_uninterrupted_run(pool: Pool, tmp_path: Path, name: str) -> None:
    ranks = pool.run(uninterrupted, 4, name)
    seen, values = ranks[0][0], {step: joined([rank[1][step] for rank in ranks]) for step in (3, 7, 10)}
    assert len({str(step["data"]) for step in seen}) == 10 and len({step["loss"] for step in seen}) == 10

    pool.run(beginning, 4, name, tmp_path, 3)
    shutil.copytree(tmp_path, tmp_path / "copy")
    for start, p in ((3, 2), (7, 3)):  # the data's epochs end after steps 4 and 8
        steps = 4 if start == 3 else 3
        again = pool.run(going_on, p, name, tmp_path, start, steps)
        for rank in again:
            assert_close(rank[0], seen[start : start + steps])
        found, expected = joined([rank[1] for rank in again]), values[start + steps]
        assert found.keys() == expected.keys()
        for key in expected:
            assert torch.allclose(found[key], expected[key], rtol=0, atol=1e-5), key

    again = pool.run(going_on, 4, name, tmp_path / "copy", 3, 4)
    assert all(rank[0] == seen[3:7] for rank in again)
    found = joined([rank[1] for rank in again])
    assert all(torch.equal(found[key], values[7][key]) for key in values[7])

    assert sorted(path.name for path in tmp_path.glob("*step*")) == [f"step-{step:08d}" for step in (3, 7, 10)]
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "step-00000010" / "model")
    for key, value in plain.named_parameters():
        assert torch.allclose(value, values[10][key], rtol=0, atol=1e-5), key
    manifest = json.loads((tmp_path / "step-00000010" / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["stages"]) == (1, 10, 3)
    assert manifest["versions"]["torch"] == torch.__version__ and "training.pt" in manifest["files"]


def drawing(folder: Path, use_async: bool | None = None) -> tuple[float, ...]:
    """The next numbers of this rank's generators: after a save, or (without `use_async`) after a load."""
    split = Split(zoo.build("gpt2"), 1, zoo.batch("gpt2"), num_microbatches=2)
    for set_seed in (torch.manual_seed, random.seed, np.random.seed):
        set_seed(5 + dist.get_rank() if use_async is not None else 0)
    if use_async is not None:
        save_training_state(folder, 1, split.model, split.optimizer, use_async=use_async)
    else:
        load_training_state(folder, split.model, split.optimizer)
    return float(torch.rand(())), random.random(), float(np.random.rand())


@pytest.mark.turns
@pytest.mark.parametrize("use_async", [False, True])
def test_each_rank_goes_on_with_its_own_random_numbers(pool: Pool, tmp_path: Path, use_async: bool) -> None:
    """Replicas that are seeded apart, to mix their samples up in other ways, drew the first rank's numbers after a
    resume. In another layout they still do."""
    first, second = pool.run(drawing, 2, tmp_path, use_async)
    assert first != second
    assert pool.run(drawing, 2, tmp_path) == [first, second]
    assert pool.run(drawing, 1, tmp_path) == [first]


class File:
    """A dataloader of one's own, which reads the file of its replica."""

    def __init__(self, file: str, at: int) -> None:
        self.file, self.at = file, at

    def state_dict(self) -> dict[str, Any]:
        return {"file": self.file, "at": self.at, "order": torch.arange(4)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.file, self.at = state["file"], state["at"]


def own_files(folder: Path, files: list[str], use_async: bool | None) -> dict[str, Any]:
    """This rank's position in its replica's file, after a save, or (with None) a load."""
    split = Split(zoo.build("gpt2"), 1, zoo.batch("gpt2"), num_microbatches=2)
    rank = dist.get_rank()
    loader = File(files[rank], 3 * len(files[rank]) if use_async is not None else 0)
    if use_async is not None:
        save_training_state(folder, 1, split.model, split.optimizer, None, loader, use_async=use_async)
    else:
        load_training_state(folder, split.model, split.optimizer, None, loader)
    return {"file": loader.file, "at": loader.at}


@pytest.mark.turns
@pytest.mark.parametrize("use_async", [False, True])
def test_each_replica_goes_on_in_its_own_file(pool: Pool, tmp_path: Path, use_async: bool) -> None:
    """Only rank 0's position was saved: after a resume, all replicas silently read rank 0's file from rank 0's place.
    In another number of replicas, one position of several is now refused."""
    saved = pool.run(own_files, 2, tmp_path, ["a", "bb"], use_async)
    assert saved == [{"file": "a", "at": 3}, {"file": "bb", "at": 6}]
    assert pool.run(own_files, 2, tmp_path, ["a", "bb"], None) == saved
    with pytest.raises(
        WorkerError, match=r"dataloaders of 2 replicas .* this run has dp_size=1: resume with dp_size=2"
    ):
        pool.run(own_files, 1, tmp_path, ["a"], None)
    same = pool.run(own_files, 2, tmp_path / "same", ["a", "a"], use_async)
    assert pool.run(own_files, 1, tmp_path / "same", ["a"], None) == same[:1]


def at_an_epoch_s_end(folder: Path) -> None:
    training = Training("llama", 0)
    training.run(4)
    save_training_state(folder, 4, **training.parts)
    expected = training.run(2)
    other = Training("llama", 1)
    load_training_state(folder, **other.parts)
    assert (other.loader.epoch, other.loader.batches, other.loader.remaining) == (1, 0, 4)
    assert other.run(2) == expected


@pytest.mark.turns
def test_an_epoch_s_end_is_the_next_one_s_beginning(pool: Pool, tmp_path: Path) -> None:
    pool.run(at_an_epoch_s_end, 2, tmp_path)


def keeping(folder: Path) -> None:
    training = Training("llama", 0)
    for step in range(1, 7):
        save_training_state(folder, step, **training.parts, keep=2)
        assert len(list(folder.glob("*step*"))) == min(step, 2)
    save_training_state(folder, 6, training.model)  # in the place of the one that has all
    assert load_training_state(folder, training.model) == 6
    assert load_training_state(folder, **training.parts, step=5) == 5
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "step-00000006" / "training.pt").write_bytes(b"")
        (folder / "step-00000007").mkdir()  # has no manifest
    dist.barrier()
    assert load_training_state(folder, **training.parts) == 5


@pytest.mark.turns
def test_the_newest_complete_steps_are_kept_and_found(pool: Pool, tmp_path: Path) -> None:
    pool.run(keeping, 2, tmp_path)


def wrong(folder: Path) -> list[str]:
    training, rank = Training("llama", 0), dist.get_rank()
    parts, model = training.parts, training.model
    save_training_state(folder / "all", 5, **parts)
    save_training_state(folder / "weights", 5, model)
    plain = DataLoader(Samples(), 4)
    other = training.booster.plugin.prepare_dataloader(Samples(), batch_size=3)
    attempts = [
        lambda: load_training_state(folder / "none", **parts),
        lambda: load_training_state(folder / "all", **parts, step=4),
        lambda: load_training_state(folder / "weights", **parts),
        lambda: load_training_state(folder / "all", model, dataloader=other),
        lambda: load_training_state(folder / "all", model, dataloader=plain),
        lambda: load_training_state(folder / "all", model.unwrap()),
        lambda: load_training_state(folder / ("all" if rank else "none"), model),
        lambda: save_training_state(folder / "new", 1, model, dataloader=plain),
        lambda: save_training_state(folder / "new", 1, model.unwrap()),
        lambda: save_training_state(folder / "new", rank, model),
        lambda: save_training_state(folder / "new", -1, model),
        lambda: save_training_state(folder / "new", 1, model, keep=0),
        lambda: save_training_state(folder / "new", 1, model, training.optimizer.unwrap()),
        lambda: save_training_state(folder / "all", 4, **parts),
    ]
    return messages_of(attempts, CheckpointError)


@pytest.mark.turns
def test_what_cannot_be_saved_or_loaded_is_refused_alike_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    expected = [
        "none contains no complete step: pass a directory that save_training_state wrote",
        r"all contains no complete step 4, only \[5\]",
        "was saved without optimizer, lr_scheduler, dataloader: pass only objects whose state",
        "saved with {'batch_size': 4, 'samples': 14}, but this dataloader has {'batch_size': 3, 'samples': 14}",
        "this DataLoader cannot save its position in the data.*plugin.prepare_dataloader.*dataloader=None",
        "this LlamaForCausalLM was not boosted",
        "none contains no complete step",
        "this DataLoader cannot save its position in the data",
        "this LlamaForCausalLM was not boosted",
        r"the step differs between ranks: \[0, 1\]",
        "step, the number of completed steps, must be a non-negative integer, got -1",
        "keep, the number of newest steps to keep, must be a positive integer, got 0",
        "this AdamW was not boosted",
        "all already contains step 5, which would remain the newest",
    ]
    assert_told_alike(pool.run(wrong, 2, tmp_path), expected)
    assert not list((tmp_path / "new").glob("*step*"))


def save(training: Training, folder: Path, step: int, use_async: bool) -> None:
    """Until it is on disk."""
    save_training_state(folder, step, **training.parts, keep=1, use_async=use_async)
    io_of(training.model).wait()


def two_saves(folder: Path, use_async: bool) -> tuple[int, dict[int, Any]]:
    """The states of steps 1 and 2, and of step 1 saved again with other weights ("3"), all on disk in `folder`."""
    training = Training("gpt2", 0)
    training.run(1)
    save_training_state(folder / "1", 1, **training.parts)
    values = {1: training.values}
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(folder / "1", folder / "2")
    dist.barrier()
    training.run(1)
    moments = Moments()
    save(training, folder / "2", 2, use_async)
    moments.on = False
    return moments.count, values | {2: training.values}


def killed(folder: Path, step: int, rank: int, moment: int, use_async: bool) -> None:
    training = Training("gpt2", 5)
    load_training_state(folder, **training.parts)
    training.run(1)
    if dist.get_rank() == rank:
        Moments(moment)
    save(training, folder, step, use_async)
    dist.barrier()
    raise AssertionError("nobody was killed")


def survivors(folders: list[Path]) -> list[Any]:
    """What is loaded from each of these, and whether the next save leaves nothing else."""
    found = []
    training = Training("gpt2", 9)
    for folder in folders:
        step = load_training_state(folder, **training.parts)
        found.append((step, training.loader.batches, training.values))
        save_training_state(folder, 8, **training.parts, keep=1)
        assert {path.name for path in folder.iterdir()} == {"step-00000008"}, folder
    return found


def killings(pool: Pool, folder: Path, moments: list[tuple[int, int, float]], use_async: bool = False) -> list[int]:
    """Kill saves at these (step, rank, moment), and say which step is found, once it is certain that it is whole. A
    negative moment is counted from the save's end, and a fraction is one of all that the rank has."""
    ranks = pool.run(two_saves, 2, folder, use_async)
    values = {step: joined([rank[1][step] for rank in ranks]) for step in (1, 2)}
    folders = []
    for step, rank, at in moments:
        folders.append(folder / f"killed-{step}-{rank}-{at}")
        shutil.copytree(folder / "1", folders[-1])
        count = ranks[rank][0]
        moment = int(at * count) if 0 < at < 1 else int(at) % count
        with pytest.raises(WorkerError, match=f"rank {rank} died exit code -9"):
            pool.run(killed, 2, folders[-1], step, rank, moment, use_async)
    again = pool.run(survivors, 2, folders)
    steps = []
    for found in zip(*again, strict=True):
        loaded = joined([values for *_, values in found])
        batches = {batches for _, batches, _ in found}
        # Saved again, step 1 has the weights of step 2.
        (whole,) = (k for k in (1, 2) if all(torch.equal(loaded[key], values[k][key]) for key in values[k]))
        assert batches == {whole}
        steps.append(whole)
    return steps


@pytest.mark.turns
def test_a_rank_killed_while_it_saves_leaves_the_previous_or_the_new_state(pool: Pool, tmp_path: Path) -> None:
    moments = [(2, 0, 0), (2, 0, 12), (2, 1, 1), (2, 0, -9), (2, 0, -1), (1, 0, -12)]
    steps = killings(pool, tmp_path, moments)
    assert steps[:3] == [1, 1, 1] and steps[4] == 2


@pytest.mark.turns
@pytest.mark.parametrize("moments", [[(2, 0, 0), (2, 1, 2), (2, 0, -1)], pytest.param(None, marks=pytest.mark.slow)])
def test_a_rank_killed_while_it_saves_in_the_background_leaves_the_previous_or_the_new_state(
    pool: Pool, tmp_path: Path, moments: list[tuple[int, int, float]] | None
) -> None:
    all_along = [(2, k % 2, k / 30) for k in range(29)] + [(2, 0, -1)]
    steps = killings(pool, tmp_path, moments or all_along, use_async=True)
    assert moments is None or (steps[0], steps[-1]) == (1, 2)


def saving_while_training(folder: Path, layout: dict[str, Any]) -> None:
    """Save a state before training goes on, and in the background while it does."""
    model = zoo.build("gpt2")
    plugin = PipelinePlugin(2, num_microbatches=2, **layout)
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def step() -> None:
        booster.execute_pipeline(iter([zoo.batch("gpt2")]), boosted, None, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    step()
    for name, use_async in (("now", False), ("later", True)):
        save_training_state(folder / name, 1, boosted, optimizer, use_async=use_async)
    for _ in range(3):
        step()
    save_training_state(folder / "later", 4, boosted, optimizer, use_async=True)
    io_of(boosted).wait()
    assert newest_step(folder / "later") == 4
    load_training_state(folder / "later", boosted, optimizer, step=1)
    step()


@pytest.mark.turns
@pytest.mark.parametrize("layout", [{}, {"dp_size": 2, "zero_stage": 1, "precision": "bf16"}], ids=["pp2", "zero"])
def test_a_state_saved_while_training_goes_on_is_that_of_its_step(
    pool: Pool, tmp_path: Path, layout: dict[str, Any]
) -> None:
    pool.run(saving_while_training, 2 * layout.get("dp_size", 1), tmp_path, layout, timeout=90)
    now, later = (tmp_path / name / "step-00000001" for name in ("now", "later"))
    files = sorted(path.relative_to(now) for path in now.rglob("*"))
    assert files == sorted(path.relative_to(later) for path in later.rglob("*"))
    for name in files:
        if name.suffix == ".safetensors":
            torch.testing.assert_close(load_file(later / name), load_file(now / name), rtol=0, atol=0)
    assert len([name for name in files if name.suffix == ".safetensors"]) >= 4


def loading_while_saving(folder: Path) -> int | None:
    """The step that is loaded while the next is written, by threads that write only when somebody waits for them."""
    training, awaited = Training("gpt2", 0), threading.Event()
    save_training_state(folder, 1, **training.parts)
    io = io_of(training.model)
    start = io.start

    def start_late(save: Any) -> None:
        write, join = save.write, save.join
        save.write = lambda: awaited.wait(60) and write()
        save.join = lambda: (awaited.set(), join())
        start(save)

    with mock.patch.object(io, "start", start_late):
        save_training_state(folder, 2, **training.parts, use_async=True, keep=1)
    return load_training_state(folder, **training.parts)


@pytest.mark.turns
@pytest.mark.local
def test_a_state_that_is_being_saved_is_the_newest(pool: Pool, tmp_path: Path) -> None:
    """A script rolled back while a save ran: it loaded the step before, which the end of the save removed."""
    assert pool.run(loading_while_saving, 2, tmp_path) == [2, 2]


def failing_in_the_background(folder: Path) -> tuple[str, list[str]]:
    training = Training("gpt2", 0)
    training.run(1)
    full = mock.patch.object(shards, "save_file", _full) if dist.get_rank() == 1 else contextlib.nullcontext()
    with full, pytest.raises(CheckpointError) as raised:
        save_training_state(folder, 1, **training.parts, use_async=True)
        save_training_state(folder, 2, **training.parts)
    return str(raised.value), sorted(path.name for path in folder.iterdir())


def sealing(folder: Path, failing: int) -> str:
    """The error of a save whose files the rank `failing` cannot list, or the files in its manifest."""
    listed, group = Path.rglob, dist.group.WORLD
    assert group is not None

    def rglob(path: Path, pattern: str) -> Iterator[Path]:
        if dist.get_rank() == failing:
            raise OSError(5, "Input/output error")
        return listed(path, pattern)

    with mock.patch.object(Path, "rglob", rglob):
        try:
            seal(folder, 1, 1, group)
        except CheckpointError as error:
            return str(error)
    return " ".join(json.loads((folder / "manifest.json").read_text())["files"])


@pytest.mark.turns
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_listing_a_saves_files_is_told_as_it_is(pool: Pool, tmp_path: Path, failing: int) -> None:
    """The error of a disk on one rank was taken for a list of files by the others, or their list for an error: one
    could not read a file named "O"."""
    (tmp_path / "training.pt").touch()
    for found in pool.run(sealing, 2, tmp_path, failing):
        if failing == 0:
            assert found.startswith("rank 0") and found.endswith("OSError: [Errno 5] Input/output error")
        else:  # only the first rank lists the files
            assert found == "training.pt"


def copying_late(folder: Path) -> list[str]:
    """The files of a save in the background that a rank finds a second after it has begun to copy its optimizer."""
    training, found = Training("gpt2", 0), list[list[str]]()
    training.run(1)
    copied = shards._on_cpu

    def late(part: torch.Tensor) -> torch.Tensor:
        if not found:
            time.sleep(1)
            found.append([str(path) for path in folder.rglob("*") if path.is_file()])
        return copied(part)

    with mock.patch.object(shards, "_on_cpu", late) if dist.get_rank() == 1 else contextlib.nullcontext():
        save_training_state(folder, 1, **training.parts, use_async=True)
    io_of(training.model).wait()
    return found[0] if found else []


@pytest.mark.turns
def test_no_rank_writes_before_all_have_copied(pool: Pool, tmp_path: Path) -> None:
    """A rank that copied a large optimizer for 8 seconds longer than another wrote counted as dead: the save of a
    healthy run failed."""
    assert pool.run(copying_late, 2, tmp_path) == [[], []]
    assert newest_step(tmp_path) == 1


def failing_to_copy(folder: Path) -> str:
    """The error of a rank without memory for the copies; the next save has room again."""
    training = Training("gpt2", 0)
    training.run(1)
    full = mock.patch.object(shards, "_on_cpu", side_effect=RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    with full if dist.get_rank() == 1 else contextlib.nullcontext(), pytest.raises(CheckpointError) as raised:
        save_training_state(folder, 1, **training.parts, use_async=True)
    save_training_state(folder, 2, **training.parts, use_async=True)
    io_of(training.model).wait()
    return str(raised.value)


@pytest.mark.turns
def test_a_rank_without_memory_for_copies_ends_the_save_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    """One rank raised torch's RuntimeError, and the others trained on with a save that could not end."""
    for message in pool.run(failing_to_copy, 2, tmp_path):
        assert message.startswith("rank 1") and "RuntimeError: DefaultCPUAllocator: can't allocate memory" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def saving_over_another_s(folder: Path, use_async: bool) -> str:
    training = Training("gpt2", 0)
    with pytest.raises(CheckpointError) as raised:
        save_training_state(folder, 1, **training.parts, use_async=use_async)
    return str(raised.value)


@pytest.mark.turns
@pytest.mark.local
@pytest.mark.parametrize("use_async", [False, True])
def test_a_folder_of_somebody_else_s_is_not_replaced(pool: Pool, tmp_path: Path, use_async: bool) -> None:
    # In the background, a state would have taken the place of whatever was called as its step.
    (other := tmp_path / "step-00000001/notes.txt").parent.mkdir()
    other.write_text("results")
    for said in pool.run(saving_over_another_s, 2, tmp_path, use_async):
        assert "contains files, but no manifest.json" in said
    assert other.read_text() == "results"


def _full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.turns
def test_a_save_in_the_background_that_fails_is_told_by_the_next_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(failing_in_the_background, 2, tmp_path)
    assert "rank 1 could not write to the checkpoint" in first[0] or "No space left" in first[0]
    assert first[0] == second[0] and first[1] == []


def flipped(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def spoiling(folder: Path, flips: int) -> tuple[list[str], int]:
    """What is said of the newest of two states after each bit that a disk flips in it, and the files that were hit."""
    training, rank = Training("llama", 0), dist.get_rank()
    save_training_state(folder, 1, **training.parts)
    training.run(1)
    save_training_state(folder, 2, **training.parts)
    newest, chance, messages, hit = folder / "step-00000002", random.Random(0), [], set()
    files = [path for path in sorted(newest.rglob("*")) if path.is_file() and path.stat().st_size]
    files.remove(newest / "manifest.json")
    sizes = {file: file.stat().st_size for file in files}
    dist.barrier()
    for k in range(flips):
        file = files[k % len(files)]
        bit = chance.randrange(8 * sizes[file])
        if rank == 0:
            flipped(file, bit)
        dist.barrier()
        with pytest.raises(CheckpointError) as caught:
            load_training_state(folder, **training.parts, step=2)
        messages.append(str(caught.value))
        assert str(file.relative_to(newest)) in messages[-1], (file, messages[-1])
        assert load_training_state(folder, **training.parts) == 1  # the newest that is whole
        hit.add(file)
        dist.barrier()
        if k == 0:  # the next save may have the number of the state that was set aside, or one before it
            save_training_state(folder, 1, **training.parts)
        if rank == 0:
            newest.with_name(f"{newest.name}.damaged").rename(newest)
            flipped(file, bit)
        dist.barrier()
    assert load_training_state(folder, **training.parts) == 2
    dist.barrier()
    if rank == 0:  # states from before 0.2 have no checksums
        manifest = json.loads((newest / "manifest.json").read_text())
        del manifest["sha256"]
        (newest / "manifest.json").write_text(json.dumps(manifest))
    dist.barrier()
    assert load_training_state(folder, **training.parts) == 2
    return messages, len(hit) - len(files)


@pytest.mark.turns
def test_a_bit_that_a_disk_has_flipped_is_found(pool: Pool, tmp_path: Path) -> None:
    """The manifest knew sizes alone: 10 of 20 flipped bits were loaded as weights, moments or random numbers, and a
    newest state that could not be read ended the job, with good ones beside it."""
    for messages, missed in pool.run(spoiling, 2, tmp_path, 20):
        assert len(messages) == 20 and not missed
        assert all("contains no intact step 2: step-00000002 has changed" in message for message in messages)


def unreadable(folder: Path) -> list[str]:
    """What is said of a disk that cannot be read for a moment on the last rank: at a load, and at a save."""
    training = Training("llama", 0)
    for step in (1, 2):
        save_training_state(folder, step, **training.parts)
    failing = (
        mock.patch.object(state_folder.hashlib, "file_digest", side_effect=OSError(5, "Input/output error"))
        if dist.get_rank() == 1
        else contextlib.nullcontext()
    )
    said = []
    for attempt in (load_training_state, lambda *args, **parts: save_training_state(args[0], 3, **parts)):
        with failing, pytest.raises(CheckpointError) as caught:
            attempt(folder, **training.parts)
        said.append(str(caught.value))
        dist.barrier()
    assert load_training_state(folder, **training.parts) == 2
    return said


@pytest.mark.turns
@pytest.mark.processes
def test_a_file_that_cannot_be_read_is_not_damaged(pool: Pool, tmp_path: Path) -> None:
    """A read error that passed set the intact newest step aside, and an older one was loaded. At a save, its text was
    written to the manifest as a checksum."""
    first, second = pool.run(unreadable, 2, tmp_path)
    assert first == second
    error = "cannot be read .*Input/output error"
    assert_told(first, [f"step-00000002/.* {error}", error])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


class Table:
    """A rate by step, which LambdaLR saves with its state."""

    def __init__(self, rates: Any) -> None:
        self.rates = rates

    def __call__(self, step: int) -> float:
        return float(self.rates[step])


class Halves(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))

    def __len__(self) -> int:
        return 7

    def state_dict(self) -> dict[str, Any]:
        return {"seen": np.zeros(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nobody loads it")


def unreadable_values(folder: Path) -> list[str]:
    training, said = Training("llama", 0), []
    schedule, model, optimizer = training.schedule, training.model, training.optimizer

    def save(**parts: Any) -> None:
        for use_async in (False, True):
            with pytest.raises(CheckpointError) as caught:
                save_training_state(folder / "new", 1, model, use_async=use_async, **parts)
            said.append(str(caught.value))

    for strange in (np.ones(9), {1}, folder):
        schedule.lr_lambdas = [Table(strange)] * 2
        save(lr_scheduler=schedule)
    with pytest.raises(CheckpointError) as caught:
        training.booster.save_lr_scheduler(schedule, str(folder / "schedule.pt"))
    said.append(str(caught.value))
    save(dataloader=training.booster.plugin.prepare_dataloader(Samples(), batch_size=2, sampler=Halves()))
    assert not list(folder.rglob("*step-*"))
    schedule.lr_lambdas = [lambda step: np.cos(step / 10)] * 2
    training.run(2)
    save_training_state(folder, 1, model, optimizer, schedule)
    expected = [group["lr"] for group in optimizer.param_groups]
    training.run(1)
    assert load_training_state(folder, model, optimizer, schedule) == 1
    assert [group["lr"] for group in optimizer.param_groups] == expected == schedule.get_last_lr()
    return said


@pytest.mark.turns
def test_what_could_not_be_loaded_is_refused_at_the_first_save(pool: Pool, tmp_path: Path) -> None:
    """Schedules and samplers with arrays, sets or paths were saved for days, and no state could be loaded. A learning
    rate that NumPy computed ended the first update."""
    first, second = pool.run(unreadable_values, 2, tmp_path)
    assert first == second
    schedule, sampler = "the state of this LambdaLR cannot be saved", "the state of this ResumableDataLoader cannot"
    assert_told(first, [*[schedule] * 7, *[sampler] * 2])


def mixing(folder: Path) -> list[str]:
    training, rank = Training("llama", 0), dist.get_rank()
    for step in (1, 2):
        save_training_state(folder, step, **training.parts)
        training.run(1)
    one, two = (folder / f"step-{step:08d}" for step in (1, 2))
    dist.barrier()
    if rank == 0:
        shutil.copy(next((one / "model").glob("*.safetensors")), two / "model")
        shutil.copytree(one, folder / "step-00000005")
        (folder / "step-00000006").mkdir()
        (folder / "step-00000006" / "manifest.json").write_text('{"format": 1, "step": 6, "files": {}}')
        (folder / ".step-00000002.swp").touch()  # of an editor
    dist.barrier()
    (messages := []).append(load_training_state(folder, **training.parts, verify=False))
    for step in (2, 5, 6):
        with pytest.raises(CheckpointError) as caught:
            load_training_state(folder, **training.parts, step=step)
        messages.append(str(caught.value))
    dist.barrier()
    assert load_training_state(folder, **training.parts) == 1
    save_training_state(folder, 7, **training.parts)
    return messages


@pytest.mark.turns
def test_states_that_are_mixed_or_renamed_are_refused(pool: Pool, tmp_path: Path) -> None:
    """A shard of step 1 in the folder of step 2 was loaded as a mixture of both, step 2 renamed was step 5, and a
    manifest that lists nothing was complete."""
    for unchecked, *messages in pool.run(mixing, 2, tmp_path):
        assert unchecked == 2
        assert_told(
            messages, ["step-00000002 has changed .model.model", "manifest.json belongs to step 1", "lists no files"]
        )


class Owner:
    pass


def saving_once(folder: Path, step: int) -> None:
    training = Training("llama", 0)
    if step > 1:
        assert load_training_state(folder, **training.parts) == 1  # reading is free
    save_training_state(folder, step, **training.parts)
    del training
    gc.collect()


HOLDS = """
import pathlib, sys, time
from pipeshard.checkpoint.state_folder import lock
lock(pathlib.Path(sys.argv[1]), lock)
print("holds", flush=True)
time.sleep(600)
"""


@pytest.mark.turns
def test_a_second_job_is_kept_out_of_a_folder(pool: Pool, tmp_path: Path) -> None:
    """Each of two jobs that saved into one folder removed what the other was writing, and left states without weights
    that counted as complete."""
    owner = Owner()
    pool.run(saving_once, 2, tmp_path, 1)
    pool.run(saving_once, 2, tmp_path, 1)
    lock(tmp_path, owner)
    lock(tmp_path, owner)
    for message in pool.run_expecting(CheckpointError, saving_once, 2, tmp_path, 2):
        assert f"process {os.getpid()} of" in message and "also saves to" in message
        assert "save to another folder" in message
    assert newest_step(tmp_path) == 1
    del owner
    with subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "holds\n"
        with pytest.raises(CheckpointError, match=f"process {other.pid} of .* also saves to"):
            lock(tmp_path, pool)
        other.kill()
    pool.run(saving_once, 2, tmp_path, 2)
    assert newest_step(tmp_path) == 2


def test_a_folder_is_locked_without_a_file_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's tool that lists output_dir met `.writer`. It is kept where a file system does not lock folders (NFS)."""
    owner = Owner()
    lock(tmp_path / "here", owner)
    assert list((tmp_path / "here").iterdir()) == []

    def unlockable(*_: Any) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr("fcntl.flock", unlockable)
    lock(tmp_path / "nfs", owner)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "nfs").iterdir()] == [".writer"]


def unlocked(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def test_a_folder_is_locked_until_its_last_owner_is_freed(tmp_path: Path) -> None:
    """A script made a second Trainer for the same folder: when the first one was freed, the second trained on without
    the lock."""
    first, second = Owner(), Owner()
    for owner in (first, second, first):
        lock(tmp_path, owner)
    del owner, first
    assert not unlocked(tmp_path)
    del second
    assert unlocked(tmp_path)


HELD_BY_NFS = """
import fcntl, pathlib, sys, time
file = (pathlib.Path(sys.argv[1]) / ".writer").open("w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("process 1 of a lost machine", file=file, flush=True)
print("holds", flush=True)
time.sleep(600)
"""


def test_a_lock_of_a_lost_machine_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine was lost, and the job was restarted on the others: the server of NFS kept the lock for 90 seconds, and
    each restart was used up by the advice to stop a process of the machine that was gone."""
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(9, "Bad file descriptor")))
    with subprocess.Popen([sys.executable, "-c", HELD_BY_NFS, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "holds\n"
            with pytest.raises(CheckpointError, match="process 1 of a lost machine also saves to"):
                lock(tmp_path, other)
            monkeypatch.setattr("time.sleep", lambda _: (other.kill(), other.wait()))  # the server's lease ends
            lock(tmp_path, other, patience=120)
        finally:
            other.kill()
    assert (tmp_path / ".writer").read_text() == f"process {os.getpid()} of {socket.gethostname()}\n"


def met(folder: Path, moment: str, job: int) -> None:
    """Wait, by files beside the folder, until both ranks of both jobs are there."""
    folder.with_name(f"{folder.name} {moment} {job} {dist.get_rank()}").touch()
    while len([*folder.parent.glob(f"{folder.name} {moment} *")]) < 4:
        time.sleep(0.001)


def saving_beside(folder: Path, seed: int, late: float) -> tuple[str, list[dict[str, torch.Tensor]]]:
    """Save three states, of which two are kept, while another job does; what kept this job out, and what it has
    saved."""
    training, saved = Training("llama", seed), []
    training.run(1)
    met(folder, "boosted", seed)
    time.sleep(late)
    refused = ""
    try:
        for step in (1, 2, 3):
            save_training_state(folder, step, **training.parts, keep=2)
            saved.append(training.values)
            training.run(1)
    except CheckpointError as error:
        refused = str(error)
    met(folder, "through", seed)  # the other one is not to find the folder free
    return refused, saved


def loading(folder: Path, step: int) -> dict[str, torch.Tensor]:
    training = Training("llama", 99)
    load_training_state(folder, step=step, **training.parts)
    return training.values


@pytest.mark.turns
@pytest.mark.parametrize("rounds", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_of_two_jobs_that_begin_together_one_saves_and_loses_nothing(pool: Pool, tmp_path: Path, rounds: int) -> None:
    """In two of four runs a state was without weights and counted as complete; most saves of both jobs failed."""
    draw, other = random.Random(0), Pool()
    try:
        for k in range(rounds):
            (folder := tmp_path / str(k)).mkdir()
            late = draw.choice([0.0, 0.001, 0.01, 0.03, 0.1])
            with ThreadPoolExecutor(2) as both:
                jobs = [
                    both.submit(each.run, saving_beside, 2, folder, s, late * s) for s, each in enumerate((pool, other))
                ]
                ranks = [job.result() for job in jobs]
            (winner,) = (each for each in ranks if not each[0][0])
            (loser,) = (each for each in ranks if each is not winner)
            for refused, saved in loser:
                assert "also saves to" in refused and saved == []
            assert {path.name for path in folder.iterdir()} == {"step-00000002", "step-00000003"}
            for step in (2, 3):
                expected = joined([saved[step - 1] for _, saved in winner])
                found = joined(pool.run(loading, 2, folder, step))
                assert found.keys() == expected.keys() and all(
                    torch.equal(found[name], expected[name]) for name in found
                )
    finally:
        other.shutdown()


def two_models(folder: Path) -> str:
    """Two models of one class save the same step: into one directory, what is said, and into two."""
    data = zoo.batch("llama")
    splits = [Split(zoo.build("llama", seed=seed), 2, data, num_microbatches=2) for seed in (0, 1)]
    expected = [{name: p.detach().clone() for name, p in split.held.items()} for split in splits]
    save_training_state(folder, 1, splits[0].model)
    save_training_state(folder, 1, splits[0].model)  # the same model again
    with pytest.raises(CheckpointError) as caught:
        save_training_state(folder, 1, splits[1].model)
    save_training_state(folder / "average", 1, splits[1].model)
    for split, place, values in zip(splits[::-1], (folder / "average", folder), expected[::-1], strict=True):
        load_training_state(place, split.model)
        assert all(torch.equal(p, values[name]) for name, p in split.held.items())
    del splits[0], split  # a model that is gone
    save_training_state(folder, 1, splits[0].model)
    return str(caught.value)


@pytest.mark.turns
def test_two_models_do_not_replace_each_others_states(pool: Pool, tmp_path: Path) -> None:
    """A model and its average were saved into one directory: both then came back with the average's weights."""
    for message in pool.run(two_models, 2, tmp_path):
        assert "another model of this process has saved step 1" in message and "a separate directory" in message


class Twice:
    """A script with one optimizer for matrices and one for the rest, and a schedule of each."""

    def __init__(self, seed: int) -> None:
        model, self.data = zoo.build("llama", seed=seed), zoo.batch("llama")
        plugin = PipelinePlugin(pp_size=dist.get_world_size(), num_microbatches=2, dry_run_input=self.data)
        self.booster = Booster(plugin=plugin)
        matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=0.1, momentum=0.9)
        vectors = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=0.1)
        raw = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5 + seed / 10) for optimizer in (matrices, vectors)]
        boosted = [self.booster.boost(model, matrices, lr_scheduler=raw[0])]
        boosted += [self.booster.boost(boosted[0][0], vectors, lr_scheduler=raw[1])]
        self.model, self.optimizers, self.schedules = boosted[0][0], [b[1] for b in boosted], [b[4] for b in boosted]

    def step(self) -> tuple[float, list[Any]]:
        loss = self.booster.execute_pipeline(iter([self.data]), self.model, None, self.optimizers[0])["loss"]
        for each in (*self.optimizers, *self.schedules):
            each.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return float(loss), [schedule.get_last_lr() for schedule in self.schedules]


def twice(folder: Path, use_async: bool) -> list[str]:
    """Steps of a resumed script beside an uninterrupted one, and the error if only one optimizer is passed."""
    first = Twice(0)
    parts = first.model, first.optimizers, first.schedules
    first.step()
    save_training_state(folder, 1, *parts, use_async=use_async)
    expected = [first.step() for _ in range(3)]
    save_training_state(folder, 2, *parts)  # waits for the save in the background
    second = Twice(1)
    assert load_training_state(folder, second.model, second.optimizers, second.schedules, step=1) == 1
    assert [second.step() for _ in range(3)] == expected
    told = []
    for refused in (
        lambda: save_training_state(folder, 3, second.model, second.optimizers[1]),
        lambda: load_training_state(folder, second.model, [second.optimizers[0]]),
    ):
        with pytest.raises(CheckpointError) as caught:
            refused()
        told.append(str(caught.value))
    return told


@pytest.mark.turns
@pytest.mark.parametrize("use_async", [False, True])
def test_all_optimizers_of_a_model_are_saved_and_resumed(pool: Pool, tmp_path: Path, use_async: bool) -> None:
    """Muon was saved and AdamW was not: after a resume, AdamW's moments began at 0, without an error."""
    for told in pool.run(twice, 2, tmp_path / "state", use_async):
        for message, name in zip(told, ("SGD", "AdamW"), strict=True):
            assert f"also boosted with {name}," in message and "optimizer=[muon, adamw]" in message, message
