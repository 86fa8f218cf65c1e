"""Families: the main architectures in every layout and with every cut, auxiliary losses, recomputation and bf16."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from pipeshard.errors import UsageError
from pipeshard.model.units import find_units
from tests.families import (
    ALWAYS_TIED,
    AUXILIARY,
    CALLS,
    ENCODER_DECODERS,
    FAMILIES,
    build_with,
    entry_of,
    is_tied,
    layers_of,
    layouts_of,
    left_padded,
)
from tests.parity.build import batch, build
from tests.parity.entries import find
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, differences

THOROUGH = ("llama", "gemma3_text", "t5")


def step(split: Split, unsplit: Unsplit, data: dict[str, Tensor], m: int, tolerance: float = 1e-6) -> list[str]:
    """One backward of both in m microbatches, in the same order of sums; what differs, on this rank."""
    unsplit.optimizer.zero_grad()
    split.optimizer.zero_grad()
    split.plugin.num_microbatches = m
    return differences(split, unsplit, data, tolerance, num_microbatches=m)


def layouts(name: str, tied: bool) -> tuple[list[str], set[str]]:
    """The layouts, after one boost with cuts chosen by hand: what differs, and what is held.

    They alternate between 1 and 3 microbatches, the other way round with another p or tie; on four stages they are
    padded ones and one packed. THOROUGH families take all.
    """
    p, entry = dist.get_world_size(), entry_of(name)
    model = build_with(entry, tie_word_embeddings=tied)
    assert is_tied(model) == (tied or name in ALWAYS_TIED), f"{name}: tie_word_embeddings={tied} is not honoured"
    data, unsplit = batch(entry, model), Unsplit(copy.deepcopy(model))
    n, layers = CALLS.get(name, 7), layers_of(model)
    counts = [1, n - 1] if p == 2 else [1, 3, 1, n - 5]
    after = [layers[2]] if p == 2 else [layers[0], layers[1], layers[-1]]
    split = Split(model, p, data, num_microbatches=1, partition=counts if tied else after)
    assert is_tied(model) == is_tied(unsplit.model), "a tie of one stage came apart"
    ties = split.model.pipeline.policy.shared_names()
    assert bool(ties) == is_tied(unsplit.model), f"parameters on several stages: {ties}"
    found = []
    every = list(layouts_of(model, data).items())
    for k, (layout, arranged) in enumerate(every[: 3 if p == 4 and name not in THOROUGH else None]):
        for m in (1, 3) if name in THOROUGH else ((1, 3)[(k + p // 2 + tied) % 2],):
            different = step(split, unsplit, arranged, m)
            found += [f"{name} tied={tied} p={p} {layout} m={m}: {what}" for what in different]
    return found, set(split.held)


@pytest.mark.parametrize(("p", "tied"), [(2, True), (2, False), (4, True), (4, False)])
@pytest.mark.parametrize("name", FAMILIES)
def test_layouts(pool: Pool, name: str, p: int, tied: bool) -> None:
    results = pool.run(layouts, p, name, tied, timeout=120)
    found = [what for different, _ in results for what in different]
    assert not found
    model = build_with(entry_of(name), tie_word_embeddings=tied)
    assert set().union(*(held for _, held in results)) == {parameter for parameter, _ in model.named_parameters()}


@pytest.mark.parametrize("name", FAMILIES)
def test_layouts_matter(name: str) -> None:
    """With the same tokens alone, the unsplit model's loss is another one; padding at the right no decoder notices."""
    model = build(entry_of(name))
    for layout, data in layouts_of(model, batch(entry_of(name), model)).items():
        with torch.no_grad():
            loss, plain = model(**data).loss, model(input_ids=data["input_ids"], labels=data["labels"]).loss
        noticed = layout != "right padding" or name in ENCODER_DECODERS
        assert (abs(float(loss / plain) - 1) > 1e-5) == noticed, layout


GATES = re.compile(r"(\.gate|router\w*(\.\w+)*)\.weight$")


def auxiliary_loss(name: str) -> list[str]:
    """A loss with a part made of the router logits of all layers, which lie on all stages: what differs."""
    p, entry = dist.get_world_size(), entry_of(name)
    model = build_with(entry, **AUXILIARY[name])
    unsplit, layers, data = Unsplit(copy.deepcopy(model)), layers_of(model), left_padded(batch(entry, model))
    after = [layers[1]] if p == 2 else [layers[0], layers[-2]]
    split = Split(model, p, data, num_microbatches=1, partition=after)
    policy = split.model.pipeline.policy
    assert {s for call, s in zip(policy.flow.calls, policy.stages) if call.unit in layers} == {*range(p)}
    found = []
    for m in (1, 2):
        found += [f"{name} p={p} m={m}: {what}" for what in step(split, unsplit, data, m)]
        expected = {key: parameter.grad for key, parameter in unsplit.model.named_parameters()}
        for key, parameter in split.held.items():
            if GATES.search(key) and not _close(parameter.grad, expected[key]):
                found.append(f"{name} p={p} m={m}: the gradient of {key} differs")
    return found


def _close(gradient: Tensor, expected: Tensor) -> bool:
    return float((gradient - expected).norm()) <= 1e-5 * float(expected.norm())


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("name", AUXILIARY)
def test_auxiliary_loss(pool: Pool, name: str, p: int) -> None:
    assert not [what for found in pool.run(auxiliary_loss, p, name, timeout=120) for what in found]


@pytest.mark.parametrize("name", AUXILIARY)
def test_auxiliary_loss_matters(name: str) -> None:
    """To the loss of the unsplit model, and to the gradients of its gates."""
    model = build_with(entry_of(name), **AUXILIARY[name])
    data = left_padded(batch(entry_of(name), model))
    loss, plain = model(**data).loss, model(**data, output_router_logits=False).loss
    assert abs(float(loss - plain)) > 0.1
    gates = [parameter for key, parameter in model.named_parameters() if GATES.search(key)]
    assert gates
    for with_it, without in zip(torch.autograd.grad(loss, gates), torch.autograd.grad(plain, gates)):
        assert not torch.allclose(with_it, without, rtol=1e-3)


def test_all_auxiliary_losses_are_here() -> None:
    """By the source: the causal language models with a coefficient of their router's loss."""
    named = {entry.class_name for entry in map(entry_of, AUXILIARY)}
    folder = Path(transformers.__file__).parent / "models"
    for file in folder.glob("*/modeling_*.py"):
        for source in file.read_text().split("\nclass ")[1:]:
            if re.match(r"\w+ForCausalLM\b", source) and "aux_loss_coef" in source:
                assert source.partition("(")[0] in named


