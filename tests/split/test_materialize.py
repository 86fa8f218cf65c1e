"""Tests of materialize: the stages of a model built on meta have the same initial values for every p."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers.utils import ModelOutput

from pipeshard import PipelinePlugin
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.split.adapters import stand_ins
from pipeshard.split.initialize import initialize_tensors
from pipeshard.split.materialize import allocate
from pipeshard.split.ties import names_of
from tests import zoo
from tests.batch.test_made_up import MadeUp
from tests.messages import texts_of
from tests.parity.build import build
from tests.parity.entries import find
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, differences

pytestmark = pytest.mark.local

SEED = 7


def on_meta(name: str, empty: bool = False) -> nn.Module:
    """A model of the zoo without memory; with `empty` only its parameters are."""
    with init_empty_weights(include_buffers=False) if empty else torch.device("meta"):
        model = zoo.MODELS[name](4)
    if name == "t5":
        model.config.use_cache = False
    return model.train()


def held_by_stages(name: str, empty: bool, **arguments: Any) -> dict[str, Tensor]:
    torch.manual_seed(SEED + dist.get_rank())  # the first stage's counts
    model = on_meta(name, empty)
    before = torch.get_rng_state()
    split = Split(model, dist.get_world_size(), zoo.batch(name), num_microbatches=2, **arguments)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.isfinite(split.backward(zoo.batch(name))["loss"])
    split.optimizer.zero_grad()
    return {key: p.detach() for key, p in split.held.items()} | dict(split.model.unwrap().named_buffers())


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize("empty", [False, True], ids=["meta", "empty-weights"])
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "t5", "mixtral", "vit", "bert"])
def test_the_same_for_every_p(pool: Pool, name: str, empty: bool) -> None:
    (whole,) = pool.run(held_by_stages, 1, name, empty)
    assert {key for key, _ in zoo.build(name).named_parameters()} <= whole.keys()
    for p in (2, 4):
        stages = pool.run(held_by_stages, p, name, empty)
        assert set().union(*stages) == whole.keys()
        for stage in stages:
            assert all(torch.equal(value, whole[key]) for key, value in stage.items())


def with_values(model: nn.Module) -> nn.Module:
    """A model on meta, all of whose parameters get their initial values here."""
    names = [name for name, _ in model.named_parameters()]
    initialize_tensors(model, names, allocate(model, names, torch.device("cpu")), True, SEED)
    return model


def trained_from_meta(name: str) -> list[str]:
    """Drawn here, copied into the unsplit model, then a step of both: what differs."""
    torch.manual_seed(SEED)
    model = on_meta(name)
    unsplit = Unsplit(with_values(on_meta(name)))
    split = Split(model, dist.get_world_size(), zoo.batch(name), num_microbatches=2)
    return differences(split, unsplit, zoo.batch(name), num_microbatches=2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["llama-tied", "t5", "gpt2"])
def test_a_step_from_meta(pool: Pool, name: str) -> None:
    assert not [what for found in pool.run(trained_from_meta, 2, name) for what in found]


RULES = [
    *("causal-lm/gpt2", "causal-lm/llama", "causal-lm/mixtral", "causal-lm/mamba", "causal-lm/falcon_h1"),
    *("seq2seq-lm/t5", "seq2seq-lm/bart", "masked-lm/bert", "masked-lm/deberta-v2", "image-classification/vit"),
    *("image-classification/resnet", "image-classification/swin", "image-classification/cvt"),
    *("speech-seq2seq/whisper", "image-text-to-text/llava", "image-text-to-text/qwen2_vl"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", RULES)
def test_the_architectures_own_rule(text: str) -> None:
    """What is constant in the architecture's own initialisation is so here (norms, biases, padding rows, buffers); what
    is random has its mean and standard deviation (GPT-2's scaled projections)."""
    entry = find(text)[0]
    torch.manual_seed(SEED)
    config = build(entry).config
    model_class: Any = type(build(entry))
    plain = model_class(copy.deepcopy(config))
    with torch.device("meta"):
        model = model_class(copy.deepcopy(config))
    names = [key for key, _ in model.named_parameters()]
    initialize_tensors(model, names, allocate(model, names, torch.device("cpu")), True, SEED)
    assert {key for key, _ in model.named_parameters()} == {key for key, _ in plain.named_parameters()}
    expected = dict(plain.named_parameters()) | dict(plain.named_buffers())
    for key, value in [*model.named_parameters(), *model.named_buffers()]:
        other = expected[key]
        assert not value.is_meta and value.dtype == other.dtype
        is_drawn = key in names and other.numel() > 1 and float(other.detach().std()) > 0
        if not is_drawn:
            assert torch.equal(value, other), key
        elif other.numel() >= 512:
            assert float(value.std()) == pytest.approx(float(other.detach().std()), rel=0.25), key
            assert abs(float(value.mean() - other.mean())) < float(other.std()) * 0.2, key
        rows = (other == 0).flatten(1).all(1) if other.ndim > 1 else other == 0
        assert torch.equal((value == 0).flatten(1).all(1) if value.ndim > 1 else value == 0, rows), f"padding of {key}"


def test_each_name_has_numbers_of_its_own() -> None:
    model = on_meta("llama")
    names = [key for key, _ in model.named_parameters()]
    initialize_tensors(model, names, allocate(model, names, torch.device("cpu")), True, SEED)
    weights = [layer.self_attn.q_proj.weight for layer in model.model.layers]  # type: ignore[union-attr]
    assert not any(torch.equal(a, b) for k, a in enumerate(weights) for b in weights[:k])


def test_loaded_weights_are_not_drawn_again() -> None:
    model, blank = zoo.build("llama"), on_meta("llama")
    model.model.layers[1] = blank.model.layers[1]  # type: ignore[index, union-attr, operator]
    before = {key: p.clone() for key, p in model.named_parameters() if not p.is_meta}
    fresh = [key for key, p in model.named_parameters() if p.is_meta]
    assert fresh and all("layers.1." in key for key in fresh)
    initialize_tensors(model, fresh, allocate(model, fresh, torch.device("cpu")), True, SEED)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert not any(p.is_meta for p in after.values())


def by_function(rule: Callable[..., Any]) -> dict[str, Tensor]:
    return held_by_stages("gpt2", empty=False, init_weights=rule)


def ones(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


def by_name(module: nn.Module, name: str) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.5 if "attn" in name else 0.25)


def random(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


@pytest.mark.turns
def test_by_a_function(pool: Pool) -> None:
    for stage in pool.run(by_function, 2, ones):
        assert all((value == 1).all() for key, value in stage.items() if "weight" in key)
    for stage in pool.run(by_function, 2, by_name):
        assert all(
            (value == (0.5 if ".attn." in key else 0.25)).all() for key, value in stage.items() if "weight" in key
        )
    first, second = pool.run(by_function, 2, random)
    (whole,) = pool.run(by_function, 1, random)
    assert all(torch.equal(value, whole[key]) for key, value in [*first.items(), *second.items()])


def by_numpy(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, np.random.random())


def test_a_function_that_uses_numpy_s_generator() -> None:
    """The values depended on the state of the user's generator, which also changed."""
    found = []
    for seed in (0, 1):
        model = on_meta("gpt2")
        names = [*dict(model.named_parameters())]
        np.random.seed(seed)
        expected = np.random.RandomState(seed).random()
        initialize_tensors(model, names, allocate(model, names, torch.device("cpu")), by_numpy, SEED)
        assert np.random.random() == expected
        found.append(dict(model.named_parameters()))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def nothing(module: nn.Module) -> None:
    pass


def broken(module: nn.Module) -> None:
    raise RuntimeError("no such rule")


@pytest.mark.parametrize(("rule", "message"), [(nothing, "did not write to it"), (broken, "no such rule")])
def test_a_function_that_does_not_initialise(pool: Pool, rule: Any, message: str) -> None:
    assert all(message in text for text in pool.run_expecting(ConfigurationError, by_function, 2, rule))


def made_up_on_meta(**arguments: Any) -> None:
    with torch.device("meta"):
        model = MadeUp()
    ids = torch.randint(0, zoo.VOCABULARY, (4, 6))
    Split(model, dist.get_world_size(), {"input_ids": ids, "labels": ids}, num_microbatches=2, **arguments)


@pytest.mark.turns
def test_a_parameter_without_a_rule_is_named(pool: Pool) -> None:
    for message in pool.run_expecting(ConfigurationError, made_up_on_meta, 2):
        assert "gain of MadeUp" in message and "reset_parameters" in message and "init_weights=fn" in message


class Scaled(nn.Module):
    """As in nanoGPT: a rule for all modules, then values of single weights, and a projection that begins at zero."""

    def __init__(self, is_plain: bool) -> None:
        super().__init__()
        self.inner, self.c_proj, self.gate = (nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1, bias=False)
        self.apply(self._init_weights)
        if not is_plain:
            nn.init.normal_(self.c_proj.weight, std=0.01)
            nn.init.zeros_(self.gate.weight)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.gate(self.c_proj(self.inner(x)))).mean()
        return out


def warned(is_plain: bool) -> str:
    with torch.device("meta"):
        model = Scaled(is_plain)
    with mock.patch("pipeshard.split.initialize.logger.warning") as warning:
        Split(model, dist.get_world_size(), {"x": torch.ones(4, 4)}, num_microbatches=2)
    return " ".join(texts_of(warning))


@pytest.mark.parametrize("is_plain", [False, True])
def test_values_of_the_constructor_are_not_lost_in_silence(pool: Pool, is_plain: bool) -> None:
    """A nanoGPT on meta trained from other values than on the CPU: the constructor's own values of c_proj, and the
    zeros of a projection, were replaced by those of the rule."""
    said = "".join(pool.run(warned, 2, is_plain))
    for name in ("c_proj.weight", "gate.weight"):
        assert (name in said) != is_plain
    assert is_plain == (said == "")


def test_children_get_the_values_that_their_parents_set() -> None:
    """The biases of attentions' output projections, which are zero, were drawn on meta."""
    with torch.device("meta"):
        model = nn.Sequential(nn.TransformerEncoderLayer(8, 2), nn.Transformer(64, 2, 1, 1))
    for key, parameter in with_values(model).named_parameters():
        if key.endswith(("out_proj.bias", "in_proj_bias")):
            assert not parameter.any(), key
        elif key.startswith("1.") and parameter.dim() > 1:  # nn.Transformer draws all matrices by Xavier's rule
            assert float(parameter.detach().std()) == pytest.approx((2 / sum(parameter.shape)) ** 0.5, rel=0.1), key


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.VOCABULARY, 8)
        self.layers = nn.ModuleList([nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)])
        self.head = nn.Linear(8, zoo.VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> ModelOutput:
        x = self.embed(ids)
        for layer in self.layers:
            x, _ = layer(x)
        logits = self.head(x)
        return ModelOutput(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


def recurrent_from_meta() -> list[str]:
    ids = torch.arange(24).view(4, 6) % zoo.VOCABULARY
    data = {"ids": ids, "labels": ids}
    torch.manual_seed(SEED)
    with torch.device("meta"):
        model, whole = Recurrent(), Recurrent()
    split = Split(model, 2, data, num_microbatches=2)
    return differences(split, Unsplit(with_values(whole)), data, num_microbatches=2)


@pytest.mark.turns
def test_recurrent_layers_on_meta(pool: Pool) -> None:
    """An LSTM has weak references to its weights: "Cannot swap t1 because it has weakref associated with it"."""
    assert pool.run(recurrent_from_meta, 2) == [[], []]


def test_adapters_beside_recurrent_layers_on_meta() -> None:
    with torch.device("meta"):
        model = Recurrent()
    with stand_ins(model):
        assert not model.layers[0].weight_ih_l0.is_meta
    assert (
        model.layers[0].weight_ih_l0.is_meta and model.layers[0]._flat_weight_refs[0]() is model.layers[0].weight_ih_l0
    )


def not_loaded() -> None:
    split = Split(on_meta("llama"), dist.get_world_size(), zoo.batch("llama"), num_microbatches=2, init_weights=False)
    split.backward(zoo.batch("llama"))


@pytest.mark.turns
def test_a_step_before_the_weights_are_loaded(pool: Pool) -> None:
    for message in pool.run_expecting(UsageError, not_loaded, 2):
        assert "have no values yet" in message and "booster.load_model" in message


@pytest.mark.parametrize("rule", [None, "normal", 0.02])
def test_a_rule_that_is_none(rule: Any) -> None:
    with pytest.raises(ConfigurationError, match="init_weights"):
        PipelinePlugin(pp_size=1, num_microbatches=1, init_weights=rule)


def tied_names() -> list[tuple[str, ...]]:
    split = Split(on_meta("llama-tied", empty=True), dist.get_world_size(), zoo.batch("llama-tied"), num_microbatches=2)
    return [names for names in names_of(split.model.unwrap()).values() if len(names) > 1]


@pytest.mark.turns
def test_ties_survive_init_empty_weights(pool: Pool) -> None:
    """accelerate's context makes a Parameter for every name, of one memory: a tied model that was built under it was
    refused by two stages, and trained untied by one. The cases of that were not in the sample of every run."""
    for p in (1, 2):
        assert pool.run(tied_names, p) == [[("model.embed_tokens.weight", "lm_head.weight")]] * p
