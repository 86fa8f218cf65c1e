"""Tests of snapshots: they find and restore everything that code can change, and record reads of attributes."""

from __future__ import annotations

import functools
import random
from collections import deque
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from pipeshard.graph.kinds import Settings
from pipeshard.graph.places import format_path, resolve
from pipeshard.graph.snapshot import Snapshot, noting_reads
from pipeshard.graph.units import intercept


class Slotted:
    __slots__ = ("here", "late")

    def __init__(self) -> None:
        self.here = 1


class Both(Slotted):
    """Has slots, and attributes beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = [1, 2]


class State:
    def __init__(self) -> None:
        self.slotted, self.both = Slotted(), Both()
        self.items: dict[Any, Any] = {None: [1], "a": {2}}
        self.last = deque([1, 2], maxlen=2)
        self.generators: list[Any] = [torch.Generator(), random.Random(1), np.random.default_rng(1)]
        self.generators.append(np.random.RandomState(1))
        count = 0

        def counts() -> int:
            nonlocal count
            count += 1
            return count

        self.counts = counts


def test_all_that_has_changed_is_put_back() -> None:
    state = State()
    drawn = [lambda g: torch.rand(1, generator=g), lambda g: g.random(), lambda g: g.random(), lambda g: g.rand()]
    before = Snapshot({"state": state})
    assert not [*before.changes()]
    state.slotted.here, state.slotted.late, state.both.here, state.both.beside = 2, 3, 4, []
    state.items[None], state.items["b"] = [2], 1
    state.items["a"].add(3)
    state.last.append(3)
    first = [float(draw(generator)) for draw, generator in zip(drawn, state.generators, strict=True)]
    assert state.counts() == 1
    found = {format_path(change.path) for change in before.changes()}
    assert {"state.slotted.here", "state.slotted.late", "state.both.here", "state.both.beside"} <= found
    assert {"state.items[None]", "state.items['b']", "state.items['a']", "state.last"} <= found
    assert {"state.counts cell count", *(f"state.generators[{k}]" for k in range(4))} <= found
    before.restore()
    assert not [*before.changes()]
    assert (state.slotted.here, hasattr(state.slotted, "late")) == (1, False)
    assert (state.both.here, state.both.beside) == (1, [1, 2])
    assert state.items == {None: [1], "a": {2}} and list(state.last) == [1, 2] and state.counts() == 1
    assert first == [float(draw(generator)) for draw, generator in zip(drawn, state.generators, strict=True)]


FOUND = {"by a patch": 0}


def attends(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    FOUND["by a patch"] += 1
    return value.transpose(1, 2), None


def rotates(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    FOUND["by a patch"] += 1
    return q, k


def forwards(self: nn.Module, x: Any, **options: Any) -> Any:
    FOUND["by a patch"] += 1
    return x


def of_registry(monkeypatch: pytest.MonkeyPatch, layer: Any) -> str:
    monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS._global_mapping, "of a test", attends)
    layer.self_attn.config._attn_implementation = "of a test"
    return "layer.self_attn.config registry ALL_ATTENTION_FUNCTIONS of a test global FOUND['by a patch']"


def of_file(monkeypatch: pytest.MonkeyPatch, layer: Any) -> str:
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotates)
    return "layer.__class__ file apply_rotary_pos_emb global FOUND['by a patch']"


def of_class(monkeypatch: pytest.MonkeyPatch, layer: Any) -> str:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forwards)
    return "layer.mlp.__class__.forward global FOUND['by a patch']"


def of_object(monkeypatch: pytest.MonkeyPatch, layer: Any) -> str:
    layer.forward = MethodType(forwards, layer)
    intercept({"layer": layer})
    return "layer.forward code __func__ global FOUND['by a patch']"


def of_decorated(monkeypatch: pytest.MonkeyPatch, layer: Any) -> str:
    layer.mlp.forward = functools.wraps(layer.mlp.forward)(lambda x: forwards(layer.mlp, x))
    return "layer.mlp.forward global forwards global FOUND['by a patch']"


class Attends:
    """An attention function that is an object."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return attends(*args, **options)


def of_registered_partial(monkeypatch: pytest.MonkeyPatch, layer: Any) -> str:
    of_registry(monkeypatch, layer)
    wrapped = functools.partial(attends, window=4)
    monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS._global_mapping, "of a test", wrapped)
    return "layer.self_attn.config registry ALL_ATTENTION_FUNCTIONS of a test code func global FOUND['by a patch']"


def of_registered_object(monkeypatch: pytest.MonkeyPatch, layer: Any) -> str:
    of_registry(monkeypatch, layer)
    monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS._global_mapping, "of a test", Attends())
    found = "layer.self_attn.config registry ALL_ATTENTION_FUNCTIONS of a test"
    return f"{found}.__class__.__call__ global attends global FOUND['by a patch']"


def of_file_partial(monkeypatch: pytest.MonkeyPatch, layer: Any) -> str:
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", functools.partial(rotates))
    return "layer.__class__ file apply_rotary_pos_emb code func global FOUND['by a patch']"


def of_property(monkeypatch: pytest.MonkeyPatch, layer: Any) -> str:
    def get(self: nn.Module) -> Any:
        FOUND["by a patch"] += 1
        return self._modules["gate_proj"]

    monkeypatch.setattr(modeling_llama.LlamaMLP, "up_proj", property(get), raising=False)
    return "layer.mlp.__class__.up_proj code fget global FOUND['by a patch']"


def of_second_base(monkeypatch: pytest.MonkeyPatch, layer: Any) -> str:
    """As the forwards of transformers' classifiers are in the first base, which is no module."""

    class Mixin:
        forward = forwards

    class Layer(Mixin, modeling_llama.LlamaMLP):
        pass

    Mixin.__module__ = Layer.__module__ = modeling_llama.__name__
    layer.mlp = Layer(layer.self_attn.config)
    return "layer.mlp.__class__.forward global FOUND['by a patch']"


def of_base_of_ones_own(monkeypatch: pytest.MonkeyPatch, layer: Any) -> str:
    class First(nn.Module):
        pass

    class Second(nn.Module):
        forward = forwards

    class Both(First, Second):
        pass

    layer.mlp = Both()
    return "layer.mlp.__class__ code __bases__[1].forward global FOUND['by a patch']"


PATCHES = [of_registry, of_file, of_class, of_object, of_decorated, of_registered_partial, of_registered_object]
PATCHES += [of_file_partial, of_property, of_second_base, of_base_of_ones_own]


@pytest.mark.parametrize("patch", PATCHES)
def test_what_code_of_the_user_in_a_package_leaves_is_found_and_put_back(
    monkeypatch: pytest.MonkeyPatch, patch: Any
) -> None:
    """Code with which a user patches a package was skipped as code of the package, so a number that it leaves was not
    on stages without the layer. So were partials, properties and objects, and all bases of a class but the first."""
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_attention_heads=2)
    layer = modeling_llama.LlamaDecoderLayer(config, 0)
    place = patch(monkeypatch, layer)
    before, angle = Snapshot({"layer": layer}), torch.ones(1, 3, 8)
    layer(torch.ones(1, 3, 16), position_embeddings=(angle, angle))
    (change,) = before.changes()
    assert (format_path(change.path), change.now) == (place, 1)
    holder = resolve(layer, change.path[1:-1])
    assert holder is FOUND
    before.restore()
    assert FOUND == {"by a patch": 0}


def test_a_variable_that_was_not_assigned_is_put_back() -> None:
    def assigned() -> Any:
        nonlocal late
        late = 1

    before = Snapshot({"assigned": assigned})
    assigned()
    before.restore()
    with pytest.raises(NameError):
        _ = late  # noqa: F821
    late = 2


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.place = self.place = 1

    def forward(self) -> Any:
        return self.inner.place if hasattr(self, "flag") else self.inner


def test_reads_of_attributes_are_noted_and_the_class_is_as_it_was() -> None:
    modules = Reader(), Reader()
    settings, read = [Settings(module) for module in modules], set()
    assert not settings[0].differences(settings[1])
    with noting_reads([modules[0], modules[0].inner], lambda value, name: read.add((value, name))) as watched:
        assert watched == {id(modules[0]), id(modules[0].inner)}
        modules[0](), modules[1]()
        assert (modules[0], "flag") in read and (modules[0], "inner") in read
        assert not any(name == "place" or value is modules[1] for value, name in read)
        modules[0].flag = True
        modules[0]()
        assert (modules[0].inner, "place") in read
    assert "__getattribute__" not in vars(Reader) and "__getattribute__" not in vars(nn.Linear)
    with noting_reads([1], lambda value, name: None) as watched:
        assert not watched
    modules[1].place = 2
    assert [key for _, key in settings[0].differences(Settings(modules[1]))] == ["place"]
