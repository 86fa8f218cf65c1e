"""Tests of bitsandbytes' 8-bit optimizers: they update stages like the unsplit model, and are saved by name."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch import nn
from torch.optim import Optimizer

from pipeshard import PipelinePlugin
from pipeshard.checkpoint.optimizer import DESCRIPTION
from pipeshard.config import PipelineConfig
from pipeshard.engine.optimizer_trial import check_separable
from pipeshard.errors import ConfigurationError
from pipeshard.private import tree_leaves
from tests import zoo
from tests.pool import Pool
from tests.unsplit import Unsplit, largest_error

bitsandbytes = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.local
SMALL = {"lr": 1e-3, "min_8bit_size": 16}  # of bitsandbytes, parameters of fewer numbers have states in 32 bits
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda ps: bitsandbytes.optim.AdamW8bit(ps, **SMALL, weight_decay=0.1),
    "paged adamw": lambda ps: bitsandbytes.optim.PagedAdamW8bit(ps, **SMALL),
    "adam in 32 bits": lambda ps: bitsandbytes.optim.Adam32bit(ps, lr=1e-3),
    "paged adamw in 32 bits": lambda ps: bitsandbytes.optim.PagedAdamW32bit(ps, lr=1e-3),
    "lion": lambda ps: bitsandbytes.optim.Lion8bit(ps, **SMALL),
    "ademamix": lambda ps: bitsandbytes.optim.AdEMAMix8bit(ps, **SMALL),
    "ademamix in 32 bits": lambda ps: bitsandbytes.optim.AdEMAMix(ps, lr=1e-3),
    "lamb": lambda ps: bitsandbytes.optim.LAMB(ps, lr=1e-3),
}


class Run:
    """A llama behind the Booster, and one of the optimizers."""

    def __init__(self, kind: str, **arguments: Any) -> None:
        model = zoo.build("llama")
        p = dist.get_world_size() // arguments.get("dp_size", 1)
        plugin = PipelinePlugin(p, num_microbatches=2, dry_run_input=zoo.batch("llama"), **arguments)
        self.booster = Booster(plugin=plugin)
        self.model, self.optimizer, *_ = self.booster.boost(model, OPTIMIZERS[kind](model.parameters()))

    def step(self, seed: int) -> float:
        batch = zoo.batch("llama", seed=seed)
        loss = self.booster.execute_pipeline(iter([batch]), self.model, None, self.optimizer)["loss"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def error(self, whole: nn.Module) -> float:
        expected = dict(whole.named_parameters())
        held = self.model.pipeline.held_parameters()
        return largest_error(float((p - expected[name]).norm() / expected[name].norm()) for p, name in held.items())


def updated(kind: str, **arguments: Any) -> list[float]:
    """How far parameters are from those of the unsplit model, after each of three steps."""
    run, unsplit = Run(kind, **arguments), Unsplit(zoo.build("llama"))
    unsplit.optimizer = OPTIMIZERS[kind](unsplit.model.parameters())
    errors = []
    for seed in range(3):
        run.step(seed)
        unsplit.backward_in_parts(zoo.batch("llama", seed=seed), num_microbatches=2)
        unsplit.step()
        errors.append(run.error(unsplit.model))
    return errors


@pytest.mark.turns
@pytest.mark.sampled(3)
@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_updates_are_those_of_the_unsplit_model(pool: Pool, kind: str, p: int) -> None:
    for errors in pool.run(updated, p, kind):
        assert largest_error(errors) < 1e-6


def saving(folder: Path, kind: str) -> float:
    run = Run(kind)
    run.step(0)
    run.booster.save_model(run.model, str(folder / "model"), shard=True)
    run.booster.save_optimizer(run.optimizer, str(folder / "optimizer"), shard=True)
    run.step(1)
    return run.step(2)


def loading(folder: Path, kind: str) -> float:
    run = Run(kind)
    run.booster.load_model(run.model, str(folder / "model"))
    run.booster.load_optimizer(run.optimizer, str(folder / "optimizer"))
    run.step(1)
    return run.step(2)


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["adamw", "lion", "adam in 32 bits", "ademamix in 32 bits"])
def test_another_number_of_stages_loads_the_states(pool: Pool, tmp_path: Path, kind: str) -> None:
    """bitsandbytes has its states in a dict inside of a parameter's: all of them were in the description, which every
    rank has, and none was in a file of tensors."""
    (expected, *_) = pool.run(saving, 2, tmp_path, kind)
    described = torch.load(tmp_path / "optimizer" / DESCRIPTION, weights_only=True)["state"]
    tensors = [value for value in tree_leaves(described) if isinstance(value, torch.Tensor)]
    assert tensors and all(tensor.is_meta for tensor in tensors)
    for p in (1, 3):
        assert pool.run(loading, p, tmp_path, kind) == [pytest.approx(expected, rel=1e-6)] * p


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["adamw", "ademamix in 32 bits"])
def test_replicas_divide_states_of_bitsandbytes(pool: Pool, kind: str) -> None:
    for errors in pool.run(updated, 4, kind, dp_size=2, zero_stage=1):
        assert largest_error(errors) < 1e-6


@pytest.mark.parametrize("kind", ["adamw", "lamb", "ademamix in 32 bits"])
def test_what_looks_at_whole_parameters_is_not_sliced(kind: str) -> None:
    """In 8 bits 256 values share a scale, so slices of a parameter have other scales than the whole. AdEMAMix stacks
    two states in a tensor: a user who resumed got those of the first rank's shards on every rank.

    The trial at boost did not notice: its parameters are so small that bitsandbytes has their states in 32 bits.
    """
    model, config = nn.Linear(4, 4), PipelineConfig(pp_size=2, num_microbatches=2, tp_size=2)
    grid: Any = SimpleNamespace(pp_size=2, tp_size=2, dp_size=1, first=True)
    with pytest.raises(ConfigurationError, match=r"needs whole parameters.*use zero_stage=1 instead"):
        check_separable(OPTIMIZERS[kind](model.parameters()), model, config, grid)
    check_separable(OPTIMIZERS["adam in 32 bits"](model.parameters()), model, config, grid)


def in_32_bits(of: Any, is_module: bool) -> list[str]:
    """The names of the parameters whose states are in 32 bits, after a step. The config of the embedding overrides the
    optimizer's, as transformers' Trainer registers it, or as users of bitsandbytes do."""
    manager, model = bitsandbytes.optim.GlobalOptimManager.get_instance(), zoo.build("llama")
    manager.initialize()  # the rank may have run the test before
    if is_module:
        manager.register_module_override(model.model.embed_tokens, "weight", {"optim_bits": 32})
    else:
        manager.override_config(model.model.embed_tokens.weight, "optim_bits", 32)
        manager.register_parameters(model.parameters())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    names = {parameter: name for name, parameter in model.named_parameters()}
    if of is None:
        model(**zoo.batch("llama")).loss.backward()
        optimizer.step()
    else:
        plugin = PipelinePlugin(dist.get_world_size(), num_microbatches=2, dry_run_input=zoo.batch("llama"), **of)
        booster = Booster(plugin=plugin)
        boosted, wrapped, *_ = booster.boost(model, optimizer)
        booster.execute_pipeline(iter([zoo.batch("llama")]), boosted, None, wrapped)
        wrapped.step()
        names = wrapped.names
    states = {names[parameter]: state["state1"] for parameter, state in optimizer.state.items()}
    return sorted(name for name, state in states.items() if state.dtype != torch.uint8 and state.numel() > 16)


@pytest.mark.turns
@pytest.mark.processes  # the manager is one per process
@pytest.mark.parametrize(("precision", "is_module"), [("bf16", True), ("fp32", False)])
def test_overridden_configs_follow_their_parameters(pool: Pool, precision: str, is_module: bool) -> None:
    """transformers keeps the states of embeddings in 32 bits. With master weights, the override named another tensor
    and was lost; an override by index named another parameter on every stage but the first."""
    try:
        expected = in_32_bits(None, is_module)
        bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()
        of_ranks = pool.run(in_32_bits, 2, {"precision": precision}, is_module)
    finally:
        bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()
    assert "model.embed_tokens.weight" in expected and sorted(chain(*of_ranks)) == expected
