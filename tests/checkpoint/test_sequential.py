"""Tests of to_sequential: the module equals the stages bit for bit, and can be used like the model before boost."""

from __future__ import annotations

import copy
import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint

from pipeshard import to_sequential
from pipeshard.batch.read import read_batch
from pipeshard.errors import ConfigurationError, UsageError
from pipeshard.graph.units import Interception, Recomputation
from pipeshard.split.materialize import is_released
from pipeshard.split.ties import names_of
from tests import zoo
from tests.batch.test_made_up import MadeUp
from tests.covering import covering
from tests.hunt import nets
from tests.parity.build import batch as make_batch
from tests.parity.build import build
from tests.parity.entries import find
from tests.parity.tiny import OLD
from tests.pool import Pool
from tests.unsplit import LEARNING_RATE, Split, Unsplit, differences

pytestmark = pytest.mark.local

NAMES = ("llama-tied", "llama", "gpt2", "t5")
STEPS = 3


def trained(model: nn.Module, batches: list[Any], m: int = 2) -> Split:
    split = Split(model, dist.get_world_size(), batches[0], num_microbatches=m)
    for data in batches:
        split.backward(data)
        split.step()
    return split


def sequential(split: Split, **options: Any) -> nn.Module:
    """The whole model, after a look at all that must hold for every one."""
    model, original = to_sequential(split.model, **options), split.model.unwrap()
    assert type(model) is type(original)
    leftover = [
        v for module in model.modules() for v in vars(module).values() if isinstance(v, Interception | Recomputation)
    ]
    assert not leftover and not any(map(is_released, model.parameters()))
    theirs = {t.untyped_storage().data_ptr() for t in (*original.parameters(), *original.buffers())}
    assert (theirs - {0}).isdisjoint(t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers()))
    assert names_of(model) == names_of(original)
    assert {n: m.training for n, m in model.named_modules()} == {n: m.training for n, m in original.named_modules()}
    holders: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(holders, {name: parameter.detach() for name, parameter in split.held.items()})
    parameters = dict(model.named_parameters())
    assert set().union(*holders) == parameters.keys()
    for held in holders:
        assert all(torch.equal(parameters[name], value) for name, value in held.items())
    return model


def batches(name: str) -> list[Any]:
    return [zoo.batch(name, seed=seed) for seed in range(STEPS)]


def whole(name: str) -> nn.Module | None:
    """All that the whole model has in common with the split one, and with a plain one of the same weights."""
    model = zoo.build(name)
    model.config.use_cache = name != "t5"
    split = trained(model, batches(name))
    kept = sequential(split)
    assert kept.config.use_cache == (name != "t5")
    assert split.model.unwrap().config.use_cache is False

    plain, data = zoo.build(name, seed=1), zoo.batch(name, seed=9)
    plain.load_state_dict(kept.state_dict())
    asked = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    if not OLD:
        split.evaluate({**data, **asked}, return_outputs=True)  # leaves hooks in the model, which go along
    model = sequential(split)
    results = [reference(**data, **asked) for reference in (model, plain)]
    assert torch.equal(results[0].logits, results[1].logits)
    for key in ("hidden_states", "attentions", "encoder_hidden_states", "decoder_attentions"):
        ours, theirs = (getattr(result, key, None) or () for result in results)
        assert all(a is b or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    outputs = split.evaluate(data, return_outputs=True)["outputs"]
    if outputs is not None:
        with torch.no_grad():
            parts = [part.call(model).logits for part in read_batch(model, data).split(num_microbatches=2)]
        assert torch.equal(outputs.logits, torch.cat(parts))

    for result in results:
        result.loss.backward()
    others = dict(plain.named_parameters())
    assert all(torch.equal(p.grad, others[key].grad) for key, p in model.named_parameters())
    model.zero_grad()
    unsplit = Unsplit(copy.deepcopy(model))
    for seed in range(2):  # the split model goes on, as if nothing had been
        found = differences(split, unsplit, zoo.batch(name, seed=seed), tolerance=1e-5, num_microbatches=2)
        assert not found, found
        unsplit.optimizer.zero_grad()
        split.optimizer.zero_grad()
    return kept if dist.get_rank() == 0 else None


def boosted_again(model: nn.Module, name: str) -> None:
    unsplit = Unsplit(copy.deepcopy(model))
    split = Split(model, dist.get_world_size(), zoo.batch(name), num_microbatches=3)
    for seed in range(2):
        same_sums = {"num_microbatches": 3} if seed == 0 else {}
        found = differences(split, unsplit, zoo.batch(name, seed=seed), tolerance=1e-5, **same_sums)
        assert not found, found
        unsplit.step()
        split.step()
    again = sequential(split)
    assert again.config.use_cache == (name != "t5")
    expected = dict(unsplit.model.named_parameters())
    assert all(torch.allclose(p, expected[key], rtol=0, atol=1e-5) for key, p in again.named_parameters())


def caches_of_attempts(folder: Path) -> list[bool]:
    """`use_cache` of what two boosts of one model return and save, after a boost that failed in its trace."""
    data, found = zoo.batch("gpt2"), []
    model: Any = zoo.build("gpt2")
    with mock.patch("pipeshard.engine.engine.divided", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        Split(model, 1, data, num_microbatches=2)
    for attempt in range(2):
        split = Split(model, 1, data, num_microbatches=2)
        found.append(to_sequential(split.model).config.use_cache)
        split.booster.save_model(split.model, str(folder / str(attempt)), shard=True)
        found.append(json.loads((folder / str(attempt) / "config.json").read_text())["use_cache"])
        assert not model.config.use_cache
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
    found.append(bool(Split(wrapped, 1, data, num_microbatches=2).model.pipeline.cached))
    return found


@pytest.mark.turns
def test_a_model_that_is_boosted_again_keeps_its_use_cache(pool: Pool, tmp_path: Path) -> None:
    """Boost turns caches off. A notebook's cell that ran again, or after an interrupt, took this for the user's
    setting, and wrote it to the config."""
    assert pool.run(caches_of_attempts, 1, tmp_path) == [[True] * 5]


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "p"), covering(NAMES, [2, 3, 1], strength=1))
def test_the_whole_model_is_the_split_one_and_can_be_split_again(pool: Pool, name: str, p: int) -> None:
    model = pool.run(whole, p, name)[0]
    pool.run(boosted_again, {1: 2, 2: 3, 3: 2}[p], model, name)


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_it_trains_in_plain_torch(pool: Pool, name: str) -> None:
    (model, *_) = pool.run(whole, 2, name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(**zoo.batch(name)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def sharded(name: str, how: str) -> None:
    """Two ranks that each hold a part of the optimizer's states, or of all, train as one on the whole batch."""
    model = sequential(trained(zoo.build(name), batches(name)))
    reference = copy.deepcopy(model)
    if how == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    else:
        kind = {"optimizer_class": torch.optim.AdamW, "lr": LEARNING_RATE}
        optimizer = ZeroRedundancyOptimizer(model.parameters(), **kind)
    plain = torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE)
    for seed in range(STEPS):
        data = zoo.batch(name, seed=seed)
        data["labels"] = data["input_ids"]  # equally many on both ranks, whose mean FSDP takes
        half = {key: value.chunk(2)[dist.get_rank()] for key, value in data.items()}
        model(**half).loss.backward()
        if how == "zero":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
        reference(**data).loss.backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        ours = ours.full_tensor() if how == "fsdp" else ours
        assert (ours - theirs).abs().max() < LEARNING_RATE / 10


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "how"), covering(["llama", "llama-tied"], ["zero", "fsdp"], strength=1))
def test_it_trains_with_sharded_states(pool: Pool, name: str, how: str) -> None:
    pool.run(sharded, 2, name, how)


def recomputing(name: str, reentrant: bool, before: bool) -> Counter[str]:
    """How often the modules inside layers run in one step of the whole model."""
    model = zoo.build(name)
    enable = functools.partial(model.gradient_checkpointing_enable, {"use_reentrant": reentrant})
    if before:
        enable()
    split = Split(model, dist.get_world_size(), zoo.batch(name), num_microbatches=2)
    if not before:
        enable()
    split.backward(zoo.batch(name))
    split.step()
    model = sequential(split)
    runs: Counter[str] = Counter()

    def count(key: str, *_: Any) -> None:
        runs[key] += 1

    for key, module in model.named_modules():
        if key.endswith((".mlp", ".DenseReluDense")):
            module.register_forward_pre_hook(functools.partial(count, key))
    optimizer = torch.optim.AdamW(model.parameters())
    model(**zoo.batch(name), use_cache=False).loss.backward()
    optimizer.step()
    func = next(module for module in model.modules() if hasattr(module, "gradient_checkpointing"))
    assert func._gradient_checkpointing_func.keywords == {"use_reentrant": reentrant}
    return runs


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "reentrant"),
    covering([("llama-tied", True), ("llama-tied", False), ("t5", True)], [True, False], strength=1),
)
def test_recomputation_is_kept(pool: Pool, case: tuple[str, bool], reentrant: bool) -> None:
    name, before = case
    layers = 6 if name == "t5" else 4
    for runs in pool.run(recomputing, 2, name, reentrant, before):
        assert len(runs) == layers and set(runs.values()) == {2}


class Recomputed(nn.Module):
    """A layer that recomputes around its own call, as those of transformers 4 do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)

    def __call__(self, x: Tensor) -> Tensor:
        return self._gradient_checkpointing_func(super().__call__, x)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Plain(nn.Module):
    """An ordinary module: layers of some kind, and a mean square."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean(), "x": x}


def numbers(seed: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))}


def recomputing_around_the_call() -> None:
    split = trained(Plain(*(Recomputed() for _ in range(4))), [numbers(seed) for seed in range(STEPS)])
    assert any(isinstance(v, Recomputation) for module in split.model.modules() for v in vars(module).values())
    model, runs = sequential(split), []
    for layer in model.layers:
        layer.linear.register_forward_pre_hook(lambda *_: runs.append(1))
    model(**numbers())["loss"].backward()
    assert len(runs) == 8
    assert not differences_of_made_up(split, model, numbers(5))


@pytest.mark.turns
@pytest.mark.parametrize("p", [1, 2])
def test_recomputation_around_the_call_is_kept(pool: Pool, p: int) -> None:
    pool.run(recomputing_around_the_call, p)


def differences_of_made_up(split: Split, model: nn.Module, data: Any) -> list[str]:
    """Where the outputs of a split and a whole model without a config differ, microbatch by microbatch."""
    outputs = split.evaluate(data, return_outputs=True)["outputs"]
    if outputs is None:
        return []
    with torch.no_grad():
        parts = [part.call(model) for part in read_batch(model, data).split(num_microbatches=2)]
    return [
        key for key in outputs if key != "loss" and not torch.equal(outputs[key], torch.cat([p[key] for p in parts]))
    ]


def made_up() -> None:
    def data(seed: int) -> dict[str, Tensor]:
        bert = zoo.batch("bert", rows=6, seed=seed)
        return {"input_ids": bert["input_ids"], "labels": bert["labels"]}

    torch.manual_seed(0)
    split = trained(MadeUp(), [data(seed) for seed in range(STEPS)])
    model = sequential(split)
    assert not differences_of_made_up(split, model, data(7))
    again = trained(model, [data(8)])
    assert not differences_of_made_up(again, sequential(again), data(7))


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_made_up_module(pool: Pool, p: int) -> None:
    pool.run(made_up, p)


def compiled_layers() -> None:
    model = nets.Net()
    model.layers = nn.ModuleList(torch.compile(layer, backend="eager") for layer in model.layers)  # type: ignore[misc]
    split = trained(model, [nets.data()])
    whole = sequential(split)
    for name, parameter in split.model.unwrap().named_parameters():
        assert is_released(parameter) or torch.equal(whole.get_parameter(name), parameter)
    x = torch.randn(2, 3, nets.H)
    for layer in whole.layers:
        assert torch.equal(layer(x), layer._orig_mod(x))
        layer.a.weight.data.zero_()
        assert torch.equal(layer(x), layer._orig_mod(x))


def test_compiled_layers(pool: Pool) -> None:
    """A model with compiled layers was refused: KeyError('_apply') of an attribute that boost had set. Then the layers
    of the result ran those of the model in training."""
    pool.run(compiled_layers, 2)


def batch_norm() -> dict[str, Tensor]:
    """The state of a trained resnet, whose running statistics are those of their stages."""
    (entry,) = find("image-classification/resnet")
    model = build(entry)
    data = [make_batch(entry, model, seed) for seed in range(STEPS)]
    split = trained(model, data)
    model = sequential(split)
    policy, buffers = split.model.pipeline.policy, dict(split.model.unwrap().named_buffers())
    for call, stage in zip(policy.flow.calls, policy.stages, strict=True):
        for name, buffer in model.named_buffers():
            if stage == policy.stage and name.startswith(f"{call.unit}."):
                assert torch.equal(buffer, buffers[name])
    counts = [b for name, b in model.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts and all(int(count) == 2 * STEPS for count in counts)
    return model.state_dict()


@pytest.mark.turns
def test_running_statistics_are_those_of_the_stage_that_trains_them(pool: Pool) -> None:
    (expected,) = pool.run(batch_norm, 1)
    for p in (2, 3):
        for state in pool.run(batch_norm, p):
            assert state.keys() == expected.keys()
            for key, tensor in state.items():
                assert torch.allclose(tensor, expected[key], rtol=1e-4, atol=1e-5), key


class Recorder:
    """A user's object that listens to a model, and cannot be copied."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def hear(self, module: nn.Module, *_: Any) -> None:
        self.heard.append(module)

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a recorder cannot be copied")


class Peculiar(nn.Module):
    """A layer with everything that a copy may lose."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen = nn.Linear(8, 8), nn.Parameter(torch.ones(8), requires_grad=False)
        self.also = self.linear.weight
        self.listed = [self.linear.bias]
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool), persistent=False)
        self.register_buffer("sizes", None)
        self.register_buffer("nothing", torch.zeros(0))
        self.last: Any = None
        self.calls = 0
        self.linear.register_forward_pre_hook(self.called)

    def called(self, *_: Any) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.flags[int(self.steps) % 3] = True
        self.sizes = torch.full((int(self.steps),), 2, dtype=torch.int32)
        self.last = {"y": self.linear(x) * self.frozen}
        return x + self.last["y"]


class Growing(Plain):
    """Its own forward has a table that grows with the batch, after the last layer: on the last stage alone."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_buffer("table", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(x)
        if len(x) > len(self.table):
            self.table = torch.ones(len(x))
        return {"loss": outputs["loss"] * self.table[: len(x)].mean(), "x": outputs["x"]}


def peculiar() -> None:
    torch.manual_seed(0)
    layers = [Peculiar() for _ in range(3)]
    recorder, heard = Recorder(), []
    for layer in layers:
        layer.linear.register_forward_hook(recorder.hear)
        layer.linear.register_forward_hook(functools.partial(lambda acts, _, x, y: acts.append(y), heard))
        layer.forward = functools.partial(Peculiar.forward, layer)  # as accelerate does
    split = trained(Growing(*layers), [numbers(seed) for seed in range(STEPS)])
    split.model.unwrap().layers[1].eval()
    model = sequential(split)
    assert torch.equal(model.table, torch.ones(3)) and "table" not in model.state_dict()
    assert not any("handler" in vars(layer.forward) for layer in model.layers)
    held = {name for name in split.held if name.endswith("linear.weight")}
    for index, layer in enumerate(model.layers):
        assert layer.forward.args == (layer,) and layer.also is layer.linear.weight
        assert layer.linear.bias.requires_grad and not layer.frozen.requires_grad and layer.training == (index != 1)
        assert int(layer.steps) == 2 * STEPS and layer.flags.all() and "flags" in layer._non_persistent_buffers_set
        assert layer.sizes.tolist() == [2] * (2 * STEPS) and layer.nothing.shape == (0,)
        if f"layers.{index}.linear.weight" in held:
            assert layer.listed[0] is layer.linear.bias and not layer.last["y"].requires_grad
        layer.calls = 0
        del recorder.heard[:], heard[:]
        layer(numbers()["x"])
        assert layer.calls == 1 and recorder.heard == [layer.linear] and len(heard) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_nothing_that_a_module_may_have_is_lost(pool: Pool, p: int) -> None:
    pool.run(peculiar, p)


def for_one_rank() -> tuple[bool, ...]:
    split = trained(zoo.build("llama-tied"), batches("llama-tied"))
    models = [to_sequential(split.model, rank=rank) for rank in range(dist.get_world_size())]
    return tuple(model is not None for model in models)


@pytest.mark.turns
def test_one_rank_alone_gets_it(pool: Pool) -> None:
    assert pool.run(for_one_rank, 3) == [(True, False, False), (False, True, False), (False, False, True)]


def frozen_since() -> None:
    """What was frozen before boost, and what was (un)frozen after it on the stages that hold it."""
    model = zoo.build("llama")
    model.model.embed_tokens.requires_grad_(False)
    split = Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=2)
    for name, parameter in split.held.items():
        if "norm" in name:
            parameter.requires_grad_(False)
    for name, parameter in to_sequential(split.model).named_parameters():
        assert parameter.requires_grad == (not ("norm" in name or "embed_tokens" in name)), name


@pytest.mark.turns
def test_frozen_parameters_stay_frozen(pool: Pool) -> None:
    pool.run(frozen_since, 2)


def wrong(what: str) -> None:
    with torch.device("meta" if what == "blank" else "cpu"):
        model = zoo.build("llama")
    split = Split(model, dist.get_world_size(), zoo.batch("llama"), num_microbatches=2, init_weights=what != "blank")
    if what == "plain":
        to_sequential(split.model.unwrap())
    if what == "uncopyable" and dist.get_rank() == 1:
        split.model.unwrap().recorder = Recorder()
    to_sequential(split.model, rank=2 if what == "rank" else 1)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        (
            "plain",
            UsageError,
            "to_sequential requires a boosted model, got an instance of LlamaForCausalLM: pass the model that "
            "booster.boost(...) returned",
        ),
        ("blank", UsageError, "39 parameters that have no values yet (first: lm_head.weight): call booster.load_model"),
        ("rank", ConfigurationError, "rank must be None or a rank of this pipeline (0 to 1), got 2"),
        (
            "uncopyable",
            UsageError,
            "copy.deepcopy of LlamaForCausalLM failed on rank 1 of the pipeline: "
            "TypeError('a recorder cannot be copied')",
        ),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(pool: Pool, what: str, error: type[Exception], message: str) -> None:
    for text in pool.run_expecting(error, wrong, 2, what):
        assert message in text
