"""Tests of the main architectures in every layout and with every cut, with auxiliary losses, recompute and bf16."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from pipeshard.errors import UsageError
from pipeshard.hf import recomputes
from tests.covering import ALL, covering
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

pytestmark = pytest.mark.local

THOROUGH = ("llama", "gemma3_text", "t5")


def in_turn(names: Iterable[str], first: tuple[Any, Any], second: tuple[Any, Any]) -> list[tuple[str, Any, Any]]:
    """Each name with all four pairs of options in `make exact`; else with one, THOROUGH ones with two, that have each
    option once."""
    pairs = [(k, name, i, j) for k, name in enumerate(names) for i in (0, 1) for j in (0, 1)]
    turns = ((k + i + j) % 2 if name in THOROUGH else (k + i + 2 * j) % 4 for k, name, i, j in pairs)
    return [(name, first[i], second[j]) for (_, name, i, j), turn in zip(pairs, turns, strict=True) if ALL or not turn]


def step(split: Split, unsplit: Unsplit, data: dict[str, Tensor], m: int, tolerance: float = 1e-6) -> list[str]:
    """One backward of both in m microbatches, in the same order of sums; what differs, on this rank."""
    unsplit.optimizer.zero_grad()
    split.optimizer.zero_grad()
    split.cut(m)
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
    ties = split.model.pipeline.policy.ownership.shared()
    assert bool(ties) == is_tied(unsplit.model), f"parameters on several stages: {ties}"
    found = []
    every = list(layouts_of(model, data).items())
    for k, (layout, arranged) in enumerate(every[: 3 if p == 4 and name not in THOROUGH else None]):
        for m in (1, 3) if name in THOROUGH else ((1, 3)[(k + p // 2 + tied) % 2],):
            different = step(split, unsplit, arranged, m)
            found += [f"{name} tied={tied} p={p} {layout} m={m}: {what}" for what in different]
    return found, set(split.held)


@pytest.mark.turns
@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "p", "tied"), in_turn(FAMILIES, (2, 4), (True, False)))
def test_layouts(pool: Pool, name: str, p: int, tied: bool) -> None:
    results = pool.run(layouts, p, name, tied, timeout=120)
    found = [what for different, _ in results for what in different]
    assert not found
    model = build_with(entry_of(name), tie_word_embeddings=tied)
    assert set().union(*(held for _, held in results)) == {parameter for parameter, _ in model.named_parameters()}


@pytest.mark.sampled(6)
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


def auxiliary_loss(name: str, microbatches: Sequence[int]) -> list[str]:
    """A loss with a part made of the router logits of all layers, which lie on all stages: what differs."""
    p, entry = dist.get_world_size(), entry_of(name)
    model = build_with(entry, **AUXILIARY[name])
    unsplit, layers, data = Unsplit(copy.deepcopy(model)), layers_of(model), left_padded(batch(entry, model))
    after = [layers[1]] if p == 2 else [layers[0], layers[-2]]
    split = Split(model, p, data, num_microbatches=1, partition=after)
    policy = split.model.pipeline.policy
    assert {s for call, s in zip(policy.flow.calls, policy.stages) if call.unit in layers} == {*range(p)}
    found = []
    for m in microbatches:
        found += [f"{name} p={p} m={m}: {what}" for what in step(split, unsplit, data, m)]
        expected = {key: parameter.grad for key, parameter in unsplit.model.named_parameters()}
        for key, parameter in split.held.items():
            if GATES.search(key) and not _close(parameter.grad, expected[key]):
                found.append(f"{name} p={p} m={m}: the gradient of {key} differs")
    return found


def _close(gradient: Tensor | None, expected: Tensor | None) -> bool:
    if gradient is None or expected is None:
        return gradient is expected
    return float((gradient - expected).norm()) <= 1e-5 * float(expected.norm())


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "p"), covering(["mixtral", "gpt_oss"], [2, 3], strength=1))
def test_auxiliary_loss(pool: Pool, name: str, p: int) -> None:
    assert not [what for found in pool.run(auxiliary_loss, p, name, (1, 2), timeout=120) for what in found]


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "p"), [(name, 2 + k // 2 % 2) for k, name in enumerate(sorted(AUXILIARY)) if ALL or k % 2]
)
def test_every_auxiliary_loss(pool: Pool, name: str, p: int) -> None:
    assert not [what for found in pool.run(auxiliary_loss, p, name, (2,), timeout=120) for what in found]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", AUXILIARY)
def test_auxiliary_loss_matters(name: str) -> None:
    """To the loss of the unsplit model, and to the gradients of its gates."""
    model = build_with(entry_of(name), **AUXILIARY[name])
    data = left_padded(batch(entry_of(name), model))
    loss, plain = model(**data).loss, model(**data, output_router_logits=False).loss
    assert abs(float(loss - plain)) > 0.1
    gates = [parameter for key, parameter in model.named_parameters() if GATES.search(key)]
    gradients = zip(torch.autograd.grad(loss, gates), torch.autograd.grad(plain, gates))
    assert any(not _close(with_it, without) for with_it, without in gradients)


def test_all_auxiliary_losses_are_here() -> None:
    """By the source: the causal language models with a coefficient of their router's loss."""
    named = {entry.class_name for entry in map(entry_of, AUXILIARY)}
    folder = Path(transformers.__file__).parent / "models"
    for file in folder.glob("*/modeling_*.py"):
        for source in file.read_text().split("\nclass ")[1:]:
            if re.match(r"\w+ForCausalLM\b", source) and "aux_loss_coef" in source:
                assert source.partition("(")[0] in named


RECOMPUTED = ("causal-lm/llama", "masked-lm/bert", "seq2seq-lm/t5", "causal-lm/mixtral", "image-classification/swin")


def recomputation(text: str, attention: str, reentrant: bool) -> list[str]:
    """Layers that run again in the backward pass; Mixtral with its auxiliary loss. What differs."""
    entry = find(text)[0]
    model: Any = build_with(entry, **AUXILIARY.get(entry.model_type, {}))
    model.set_attn_implementation(attention)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    data, unsplit = batch(entry, model), Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), data, num_microbatches=2)
    policy = split.model.pipeline.policy
    again = [name for name in policy.replay.held if recomputes(policy.units[name])]
    assert again, "no layer of this stage is recomputed"
    found = step(split, unsplit, data, 2)
    runs, expected = _runs(split.model.unwrap(), again), _runs(unsplit.model, again)
    found += step(split, unsplit, data, 2)  # traced by now
    assert all(expected[name] >= 4 for name in again), "forward and again, for two microbatches"
    return found + [f"{name} ran {runs[name]} times, unsplit {expected[name]}" for name in again if runs != expected]


def _runs(model: nn.Module, layers: list[str]) -> Counter[str]:
    """How often the first linear map of each layer is going to be called."""
    runs = Counter[str]()
    for name in layers:
        inner = next(module for module in model.get_submodule(name).modules() if isinstance(module, nn.Linear))
        inner.register_forward_pre_hook(lambda *_, name=name: runs.update([name]))
    return runs


@pytest.mark.turns
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("text", "attention", "reentrant"), in_turn(RECOMPUTED, ("sdpa", "eager"), (True, False)))
def test_recomputation(pool: Pool, text: str, attention: str, reentrant: bool) -> None:
    assert not [what for found in pool.run(recomputation, 2, text, attention, reentrant) for what in found]


def recomputed_too_late() -> None:
    entry = find("image-classification/swin")[0]
    model: Any = build(entry)
    split = Split(model, dist.get_world_size(), batch(entry, model), num_microbatches=2)
    model.gradient_checkpointing_enable()
    split.backward(batch(entry, model))


@pytest.mark.turns
def test_a_hierarchy_is_not_recomputed_after_boost(pool: Pool) -> None:
    """By then its stages are cut into layers."""
    messages = pool.run_expecting(UsageError, recomputed_too_late, 2)
    assert all("gradient_checkpointing_enable() before booster.boost" in message for message in messages)


def in_bf16(text: str) -> list[str]:
    entry = find(text)[0]
    model = build(entry).to(torch.bfloat16)
    data, unsplit = batch(entry, model), Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), data, num_microbatches=1)
    return [f"m={m}: {what}" for m in (1, 3) for what in step(split, unsplit, data, m, tolerance=1e-2)]


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("text", "p"), covering(RECOMPUTED[:3], [2, 3], strength=1))
def test_bf16(pool: Pool, text: str, p: int) -> None:
    """Whole models in bf16: the loss is that of the unsplit one to the bit."""
    assert not [what for found in pool.run(in_bf16, p, text) for what in found]
