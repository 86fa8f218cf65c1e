"""Tests of initialize: an Engine equals what Booster creates with the same plugin, and does not need ColossalAI."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import pipeshard
from pipeshard.errors import ConfigurationError, UsageError
from tests import zoo
from tests.pool import Pool

ROOT = Path(__file__).parent.parent
# As if these were not installed.
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("colossalai", "galore_torch", "bitsandbytes", "einops"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def both_ways(folder: str) -> None:
    """Three steps, an evaluation and a save by Booster and by an Engine, each from the same weights."""
    model = zoo.build("llama-tied")
    losses: list[float] = []
    saved: list[list[str]] = []
    arguments: dict[str, Any] = {"pp_size": dist.get_world_size(), "num_microbatches": 2, "max_norm": 0.5}
    batches = [zoo.batch("llama-tied", seed=seed) for seed in range(3)]
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    for way in ("booster", "engine"):
        own = copy.deepcopy(model)
        raw = torch.optim.AdamW(own.parameters(), lr=1e-2)
        scheduler = LambdaLR(raw, lambda step: 1 / (1 + step))
        if way == "booster":
            booster: Any = Booster(plugin=pipeshard.PipelinePlugin(**arguments))
            boosted = booster.boost(own, raw, None, loader, scheduler)
            split, optimizer, criterion, data, _ = boosted
            assert isinstance(split, ModelWrapper) and isinstance(optimizer, OptimizerWrapper)
            step = partial(booster.execute_pipeline, model=split, criterion=criterion, optimizer=optimizer)
        else:
            booster = pipeshard.initialize(own, raw, None, loader, scheduler, **arguments)
            split, optimizer, criterion, data, scheduler = booster
            step = booster.execute_pipeline
        iterator = iter(data)
        for _ in batches:
            losses.append(float(step(iterator)["loss"]))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses.append(float(step(iter(batches))["loss"]))
        evaluated = booster.execute_pipeline(iter(batches), split, criterion)  # without an optimizer, as Booster
        losses.append(float(evaluated["loss"]))
        assert all(p.grad is None for p in split.parameters())
        booster.save_model(split, f"{folder}/{way}", shard=True)
        saved.append(sorted(path.name for path in Path(folder, way).iterdir()))
    assert losses[:5] == losses[5:] and losses[3] == losses[4] and len(set(losses[:4])) == 4
    assert saved[0] == saved[1]
    again = pipeshard.PipelinePlugin.from_pretrained(type(model), f"{folder}/engine")
    reloaded = pipeshard.initialize(again, **arguments, dry_run_input=batches[0])
    with torch.no_grad():
        assert float(reloaded.execute_pipeline(iter(batches))["loss"]) == losses[3]
    with pytest.raises(UsageError, match="this engine has no model yet"):
        pipeshard.Engine(reloaded.plugin).execute_pipeline(iter(batches))


@pytest.mark.turns
def test_an_engine_trains_as_booster_does(pool: Pool, tmp_path: Path) -> None:
    pool.run(both_ways, 2, str(tmp_path))


def test_what_initialize_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("llama")
    with pytest.raises(ConfigurationError, match="initialize requires pp_size"):
        pipeshard.initialize(model, num_microbatches=2)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigurationError, match=r"torchrun --nproc-per-node N script\.py"):
        pipeshard.initialize(model, pp_size=2, num_microbatches=2)


def without_colossalai(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(BLOCKED)
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=400, env=environment, cwd=folder
    )


@pytest.mark.turns
def test_the_demo_needs_no_colossalai_and_says_nothing_else(tmp_path: Path) -> None:
    """The first lines of every run were warnings of packages that only ColossalAI imports, once a rank."""
    run = without_colossalai(tmp_path, "-c", "from pipeshard.cli import main; main()", "demo", "--steps", "2")
    assert run.returncode == 0 and not run.stderr, run.stderr
    assert "step 2: loss " in run.stdout and run.stdout.endswith("the same losses: pipeshard works here\n")


@pytest.mark.turns
def test_every_public_name_needs_no_colossalai(tmp_path: Path) -> None:
    code = "import pipeshard, sys; [getattr(pipeshard, name) for name in pipeshard.__all__]; import pipeshard.trainer"
    run = without_colossalai(tmp_path, "-c", code)
    assert run.returncode == 0 and not run.stderr, run.stderr


@pytest.mark.turns
def test_a_plugin_made_before_colossalai_is_imported() -> None:
    """Whatever is imported first, Booster takes the plugin, and its import says nothing."""
    code = """
import pipeshard
from pipeshard import PipelinePlugin
from colossalai.booster.plugin.pp_plugin_base import PipelinePluginBase
assert issubclass(PipelinePlugin, PipelinePluginBase)
import torch
try: bool(torch.ones(2, device="meta").any())
except RuntimeError: print("meta tensors have no values")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert run.stdout == "meta tensors have no values\n" and not run.stderr, run.stderr
