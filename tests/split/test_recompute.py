"""Tests of recompute: units that run again in the backward are exact bit for bit, and keep nothing in between."""

from __future__ import annotations

import copy
import random
import weakref
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipeshard.batch.batch import Batch
from pipeshard.engine import routes
from pipeshard.engine.stage import Stage
from pipeshard.errors import UsageError
from pipeshard.graph.trace import trace
from pipeshard.graph.units import find_units
from pipeshard.split.route import Recompute
from tests import zoo
from tests.covering import covering
from tests.families import AUXILIARY, build_with
from tests.graph.test_randomness import with_dropout
from tests.parity.build import batch
from tests.parity.entries import find
from tests.pool import Pool
from tests.unsplit import Split, Unsplit, differences, refusal

pytestmark = pytest.mark.local

M = 4
RATIOS = (
    "recompute must be True, False, the fraction of each stage's unit calls to recompute (from 0 to 1), or a list of "
    "such fractions, one per stage ({} in all), got {}"
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": 1.5}, RATIOS.format(1, 1.5)),
        ({"recompute": -0.1}, RATIOS.format(1, -0.1)),
        ({"recompute": float("nan")}, RATIOS.format(1, "nan")),
        ({"recompute": "all"}, RATIOS.format(1, "'all'")),
        ({"recompute": None}, RATIOS.format(1, None)),
        ({"recompute": [0.5, "a"], "schedule": "zbv"}, RATIOS.format(2, "[0.5, 'a']")),
        ({"recompute": [0.5, 1]}, "must have one fraction for each stage, in model order: 1 in all"),
        ({"recompute": [1], "schedule": "zbv"}, "must have one fraction for each stage, in model order: 2 in all"),
        ({"activation_checkpoint_interval": -1}, "(0: off; k > 0: recompute every k-th unit call), got -1"),
        ({"activation_checkpoint_interval": 1.0}, "(0: off; k > 0: recompute every k-th unit call), got 1.0"),
        ({"activation_checkpoint_interval": True}, "(0: off; k > 0: recompute every k-th unit call), got True"),
        ({"recompute": True, "activation_checkpoint_interval": 2}, "pass only one of the two"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    assert message in refusal(**options)


def test_repeated_layers_come_first() -> None:
    model = zoo.build("llama")  # embedding, four layers, norm, head
    flow, units = trace(model, Batch.of(zoo.batch("llama"))), find_units(model)

    def calls(recompute: Any, interval: int = 0, stages: tuple[int, ...] = (0, 0, 0, 1, 1, 1, 1)) -> list[list[int]]:
        chosen = Recompute.of(recompute, interval, 2)
        return [sorted(chosen.calls(flow, stages, stage, units)) for stage in (0, 1)]

    assert calls(False) == calls(0) == [[], []]
    assert calls(True) == calls(1.0) == calls(False, 1) == [[0, 1, 2], [3, 4, 5, 6]]
    assert calls(0.5) == [[1, 2], [3, 4]]
    assert calls([0.0, 0.75]) == [[], [3, 4, 5]]
    assert calls([1 / 3, 0.01]) == [[1], [3]]
    assert calls(False, 2) == [[1], [3, 5]]
    assert calls(False, 2, (0, 0, 0, 0, 0, 1, 1)) == [[1, 3], [5]]  # counted through the model, wherever it is cut
    assert calls(False, 7) == [[], [6]]


def trained(model: nn.Module, data: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor | None], Counter[str]]:
    """The loss and the gradients of the second of two steps, and how often something inside each held unit ran."""
    split = Split(model, dist.get_world_size(), data, num_microbatches=M, **options)
    torch.manual_seed(3)
    split.backward(data)
    split.step()
    runs, names = Counter[str](), dict[nn.Module, str]()
    for name in split.model.pipeline.policy.replay.held if "compile" not in options else ():  # hooks are compiled, too
        inside = [m for m in model.get_submodule(name).modules() if not isinstance(m, nn.ModuleList)]
        names |= dict.fromkeys(inside[1:2], name)
    # Not a hook of the module itself: a layer whose hook counts its calls is not run again.
    handle = register_module_forward_pre_hook(lambda module, _: runs.update([names[module]] if module in names else []))
    loss = split.backward(data)["loss"]
    handle.remove()
    return loss, {key: p.grad for key, p in split.held.items()}, runs


def compared(model: nn.Module, data: Any, recompute: Any, **options: Any) -> str:
    """What differs with and without recompute; every held unit of the former has to run twice."""
    loss, gradients, runs = trained(copy.deepcopy(model), data, **options)
    again, others, twice = trained(model, data, recompute=recompute, **options)
    assert recompute is not True or (runs and twice == Counter({name: 2 * count for name, count in runs.items()}))
    assert not torch.equal(loss, torch.zeros_like(loss)) and gradients.keys() == others.keys()
    wrong = [] if torch.equal(loss, again) else [f"loss {loss} {again}"]
    for key, gradient in gradients.items():
        other = others[key]
        equal = gradient is other if gradient is None or other is None else torch.equal(gradient, other)
        wrong += [] if equal else [f"gradient of {key}"]
    return ", ".join(wrong)


def from_zoo(name: str, recompute: Any = True, **options: Any) -> str:
    return compared(with_dropout(zoo.build(name)), zoo.batch(name), recompute, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("schedule", "name", "p"), covering(["1f1b", "gpipe", "interleaved", "zb-h1", "zbv"], ["llama", "gpt2"], [1, 2])
)
def test_no_bit_differs_with_any_schedule(pool: Pool, schedule: str, name: str, p: int) -> None:
    assert pool.run(from_zoo, p, name, schedule=schedule) == [""] * p


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["bert", "t5", "gemma2", "vit"])
def test_no_bit_differs_with_any_model(pool: Pool, name: str) -> None:
    assert pool.run(from_zoo, 2, name) == ["", ""]


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", [0.5, [0.0, 0.7]])
def test_no_bit_differs_with_a_share(pool: Pool, recompute: Any) -> None:
    assert pool.run(from_zoo, 2, "llama", recompute) == ["", ""]


def auxiliary() -> str:
    """The loss of router logits, which hooks inside the layers take away."""
    entry = find("causal-lm/mixtral")[0]
    model = build_with(entry, **AUXILIARY["mixtral"])
    return compared(model, batch(entry, model), True)


@pytest.mark.turns
def test_values_that_hooks_take_away_keep_their_gradients(pool: Pool) -> None:
    assert pool.run(auxiliary, 2) == ["", ""]


def of_entry(text: str) -> tuple[str, list[str]]:
    """What differs, and the units of which no call is recomputed."""
    entry = find(text)[0]
    model = build_with(entry)
    data = batch(entry, model)
    flow, units = trace(model, Batch.of(data)), find_units(model)
    chosen = Recompute.of(True, 0, 1).calls(flow, [0] * len(flow.calls), 0, units)
    left_out = [call.unit for k, call in enumerate(flow.calls) if k not in chosen]
    return compared(model, data, 1), left_out


@pytest.mark.turns
@pytest.mark.parametrize(("text", "what"), [("causal-lm/gemma3n_text", "layers"), ("image-classification/resnet", "")])
def test_a_unit_that_cannot_run_twice_does_not(pool: Pool, text: str, what: str) -> None:
    """It fills a mapping for other layers, or moves running statistics."""
    for wrong, left_out in pool.run(of_entry, 2, text):
        assert not wrong and left_out and all(what in unit for unit in left_out)


def keeping(maps: dict[int, Tensor], number: int, forward: Any) -> Any:
    def kept(x: Tensor) -> Any:
        result = forward(x)
        maps[number] = result.detach()
        return result

    return kept


def warned_of() -> list[str]:
    """The warnings if code that was set on layers keeps what they return."""
    model: Any = zoo.build("llama")
    maps, said = dict[int, Tensor](), list[str]()
    for number, layer in enumerate(model.model.layers):
        layer.mlp.forward = keeping(maps, number, layer.mlp.forward)
    with mock.patch.object(routes.logger, "warning", said.append):
        split = Split(model, 2, zoo.batch("llama"), num_microbatches=M, recompute=True)
        split.backward(zoo.batch("llama"))
    return said


@pytest.mark.turns
def test_layers_that_are_not_recomputed_since_they_keep_values_are_named(pool: Pool) -> None:
    """Layers whose forward kept a value in a dict were silently not recomputed, and the job ran out of memory."""
    said, others = pool.run(warned_of, 2)
    assert [text.split(", which")[0] for text in said] == [
        "model.layers.0 (LlamaDecoderLayer) is not recomputed, because its forward stores a value at "
        "mlp.forward cell maps[0]"
    ]
    assert others == []


class Drawing(nn.Module):
    """Draws from every generator there is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        drawn = (1 + random.random() + np.random.rand()) * torch.rand(())
        return (self.inner(x) * drawn).tanh()  # a result that the backward pass needs


def drawing() -> str:
    model: Any = zoo.build("llama")
    for layer in model.model.layers:
        layer.mlp = Drawing(layer.mlp)
    return compared(model, zoo.batch("llama"), True)


@pytest.mark.turns
def test_every_generator_is_brought_back(pool: Pool) -> None:
    assert pool.run(drawing, 2) == ["", ""]


class Untold(nn.Module):
    """A unit that is called inside another one, and never by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Calling(nn.Module):
    """Calls a module that it does not own."""

    def __init__(self, inner: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.inner, self.others = inner, [other]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.others[0](x))


def inside_another() -> str:
    model: Any = zoo.build("llama")
    model.model.shared = Untold()
    for layer in model.model.layers[2:]:
        layer.mlp = Calling(layer.mlp, model.model.shared)
    return compared(model, zoo.batch("llama"), True)


@pytest.mark.turns
def test_units_inside_a_unit_run_again_with_it(pool: Pool) -> None:
    assert pool.run(inside_another, 1) == [""]


class Rising(nn.Module):
    """Glue that changes what a unit took, after it."""

    def __init__(self, in_unit: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([Adding(in_unit) for _ in range(2)])
        self.in_unit = in_unit

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids) * 1
        for layer in self.layers:
            taken = x * 1
            x = layer(taken)
            if not self.in_unit:
                taken += 1
        return {"loss": x.square().mean()}


class Adding(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            x += 1
        return (x + self.weight).tanh()


def rising(in_unit: bool) -> str:
    torch.manual_seed(0)
    return compared(Rising(in_unit), {"ids": torch.arange(8)[:, None]}, 1.0)


def test_a_unit_that_changes_its_argument_is_not_recomputed(pool: Pool) -> None:
    assert pool.run(rising, 1, True) == [""]


def test_an_argument_that_was_changed_since_is_refused(pool: Pool) -> None:
    (message,) = pool.run_expecting(UsageError, rising, 1, False)
    assert (
        "unit layers.1 cannot be recomputed: one of its arguments was modified in place after the unit's forward"
        in message
    )


def frozen(name: str) -> str:
    model: Any = zoo.build("llama")
    model.get_submodule(name).requires_grad_(False)
    return compared(model, zoo.batch("llama"), [0.5, 0.5])


@pytest.mark.turns
@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.0"])
def test_a_unit_whose_inputs_need_no_gradient_trains(pool: Pool, name: str) -> None:
    assert pool.run(frozen, 2, name) == ["", ""]


def checkpointed(reentrant: bool) -> tuple[list[str], Counter[str]]:
    """Both ways at once: what differs from transformers' own, and how often each layer ran."""
    model: Any = with_dropout(zoo.build("llama"))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    _, gradients, runs = trained(copy.deepcopy(model), zoo.batch("llama"))
    _, others, again = trained(model, zoo.batch("llama"), recompute=True)
    assert runs == again
    return [key for key, gradient in gradients.items() if not torch.equal(gradient, others[key])], again


@pytest.mark.turns
@pytest.mark.sampled(1)
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_transformers_recomputes_is_not_recomputed_twice(pool: Pool, reentrant: bool) -> None:
    for wrong, runs in pool.run(checkpointed, 2, reentrant):
        assert not wrong and set(runs.values()) == {2 * M}


def frozen_embeddings(name: str, embeddings: str, reentrant: bool, partition: list[int] | None = None) -> list[str]:
    """The differences under transformers' own recomputation, in which results of embeddings require a gradient."""
    model: Any = zoo.build(name)
    model.get_submodule(embeddings).requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    unsplit, data = Unsplit(copy.deepcopy(model)), zoo.batch(name)
    split = Split(model, dist.get_world_size(), data, num_microbatches=2, partition=partition or "uniform")
    return differences(split, unsplit, data)


@pytest.mark.turns
@pytest.mark.sampled(2)
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_frozen_embeddings_inside_a_unit(pool: Pool, p: int, reentrant: bool) -> None:
    """A user froze BERT's embeddings, and enabled transformers' activation checkpointing. The first step failed: the
    trace had not called the hook with which transformers lets the result of the embeddings require a gradient."""
    assert pool.run(frozen_embeddings, p, "bert", "bert.embeddings", reentrant) == [[]] * p


@pytest.mark.turns
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_frozen_embedding_alone_on_a_stage(pool: Pool, reentrant: bool) -> None:
    """A user froze an embedding that was the whole first stage. The first step failed: the hook of transformers ran on
    the second stage, too, and let the received value itself require a gradient."""
    assert pool.run(frozen_embeddings, 2, "llama", "model.embed_tokens", reentrant, [1, 6]) == [[], []]


def evaluated() -> Counter[str]:
    split = Split(zoo.build("llama"), dist.get_world_size(), zoo.batch("llama"), num_microbatches=M, recompute=True)
    split.evaluate(zoo.batch("llama"))  # traced by now
    runs: Counter[str] = Counter()
    for k, layer in enumerate(split.model.unwrap().model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, k=k: runs.update([str(k)]))
    with mock.patch("pipeshard.split.route.checkpoint", side_effect=AssertionError):
        split.evaluate(zoo.batch("llama"))
    return runs


@pytest.mark.processes
@pytest.mark.turns
def test_an_evaluation_recomputes_nothing(pool: Pool) -> None:
    runs = pool.run(evaluated, 2)
    assert sum(runs, Counter()) == {str(k): M for k in range(4)}


def compiled() -> str:
    with mock.patch("pipeshard.split.route.checkpoint", wraps=checkpoint) as recomputing:
        wrong = compared(zoo.build("llama"), zoo.batch("llama"), 1.0, compile={"backend": "aot_eager"})
    assert recomputing.call_count in (2 * 3 * M, 2 * 4 * M)  # two steps of three or four units
    return wrong


@pytest.mark.turns
@pytest.mark.processes
def test_compiled_units_are_recomputed_too(pool: Pool) -> None:
    assert pool.run(compiled, 2, timeout=200) == ["", ""]


class Resident(TorchDispatchMode):
    """Counts the bytes of what was made inside and is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.seen = 0, weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in given and storage not in self.seen:
                self.seen.add(storage)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        return result

    def free(self, size: int) -> None:
        self.bytes -= size


def kept(recompute: Any, schedule: str) -> int:
    """The bytes that the forwards of all microbatches leave behind on this rank, when the first backward begins."""
    model = zoo.build("llama")
    data = zoo.batch("llama", length=32)
    split = Split(model, dist.get_world_size(), data, num_microbatches=M, schedule=schedule, recompute=recompute)
    split.backward(data)
    found: list[int] = []
    backward = Stage.backward

    def watched(self: Stage, i: int, returning: Any) -> Any:
        found.append(resident.bytes)
        return backward(self, i, returning)

    with mock.patch.object(Stage, "backward", watched), Resident() as resident:
        split.backward(data)
    return found[0]


@pytest.mark.turns
@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_recomputed_units_keep_no_activations(pool: Pool, schedule: str) -> None:
    none, some, every = (pool.run(kept, 2, share, schedule) for share in (False, 0.25, True))
    print(f"{schedule}: bytes kept {none}, with recompute=0.25 {some}, with True {every}")
    for rank in range(2):
        assert every[rank] < 0.2 * none[rank]
        assert every[rank] < some[rank] < 0.9 * none[rank]
