"""Tests of values that leave a unit: in its result, through hooks inside it, or in mappings that it fills."""

from __future__ import annotations

from collections import UserDict, UserList, deque
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from pipeshard.errors import TraceError
from pipeshard.graph.places import PathStep, format_path
from pipeshard.graph.snapshot import Snapshot
from pipeshard.graph.trace import trace
from pipeshard.graph.unit_outputs import (
    ARGUMENTS,
    RESULT,
    UNIT,
    Part,
    Source,
    answer,
    changed,
    listened,
    opened,
    run_collecting,
)
from tests.parity.build import batch, build
from tests.parity.entries import find


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor, shelf: Any) -> tuple[Tensor, None]:
        shelf["keys"] = (x + 1, x + 2)
        return self.inner(self.inner(x)), None


def visited(unit: nn.Module, *arguments: Any) -> list[tuple[Source, Any]]:
    """What leaves a call, as a visit finds it."""
    before = Snapshot({UNIT: unit, ARGUMENTS: (arguments, {})})
    results = run_collecting(unit, unit, (arguments, {}), listened(unit), silent=True)
    return [*results, *changed(before)]


def parts_of(results: list[tuple[Source, Any]]) -> tuple[list[Part], list[Any]]:
    flat = [(source, *tree_flatten(opened(content))) for source, content in results]
    return [Part(source, tree) for source, _, tree in flat], [leaf for _, leaves, _ in flat for leaf in leaves]


def test_a_run_collects_all_that_leaves_a_unit() -> None:
    unit, heard = Unit(), []
    unit.inner.register_forward_hook(lambda module, args, result: heard.append(result))
    x, shelf = torch.ones(1, 2), UserDict(old=torch.zeros(1))
    assert listened(unit) == ["inner"]
    found = [source for source, _ in visited(unit, x, shelf)]
    assert found[:3] == [RESULT, Source("inner", 0), Source("inner", 1)] and not heard
    (place,) = found[3:]
    assert format_path(place.place) == "arguments[0][1]['keys']" and place.how == "set"
    results = run_collecting(unit, unit, ((x, shelf), {}), ["inner"], [place])
    assert [source for source, _ in results] == found
    assert results[1][1] is heard[0] and results[2][1] is heard[1] and results[3][1] == shelf["keys"]
    assert len(unit.inner._forward_hooks) == 1


def test_an_answer_tells_hooks_and_fills_mappings() -> None:
    unit, heard = Unit(), []
    unit.inner.register_forward_hook(lambda module, args, result: heard.append(result))
    unit.inner.register_forward_hook(lambda m, args, kwargs, result: heard.append(kwargs), with_kwargs=True)
    at = tuple(PathStep(*step) for step in [("root", ARGUMENTS), ("item", 0), ("item", 1), ("item", "keys")])
    parts, leaves = parts_of([(RESULT, ("result", None)), (Source("inner"), 7), (Source(place=at, how="set"), (1, 2))])
    shelf: Any = UserDict()
    assert answer(unit, parts, leaves, ((0, shelf), {})) == ("result", None)
    assert heard == [7, {}] and shelf == {"keys": (1, 2)}


LOG: list[Any] = []
COUNT = 0


class Told:
    """A context that goes through layers."""

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.depth = 0


class Leaves(nn.Module):
    """Leaves something in every way that Python has."""

    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.register_buffer("running", torch.zeros(2))
        closed_over = []
        self.note = lambda x: closed_over.append(x)
        self.noted = lambda: closed_over

    def forward(self, x: Tensor, given: list[Any], context: Any) -> Any:
        global COUNT
        COUNT += 1
        LOG.append(x)
        type(self).total += 1
        self.last = x * 2
        self.running.add_(x)
        self.note(x)
        given.append(x * 3)
        context.losses.append(x * 4)
        context.depth += 1
        return x, context, Told()


def test_what_is_left_in_any_way_is_found_and_left_again() -> None:
    """An auxiliary loss on the layer itself, in a list, in a context object, a counter, a running statistic, a global:
    each was lost where the layer was on another stage."""
    unit, given, context = Leaves(), [7], Told()
    before = Snapshot({UNIT: unit, ARGUMENTS: ((0, given, context), {})})
    with torch.no_grad():
        (_, result), *_ = run_collecting(unit, unit, ((torch.ones(2), given, context), {}))
    left = [(source, content.clone() if source.how == "written" else content) for source, content in changed(before)]
    results = [(RESULT, opened(result, before.paths)), *left]
    before.restore()
    assert (COUNT, LOG, unit.last, unit.noted(), given, context.losses, context.depth) == (0, [], None, [], [7], [], 0)
    unit.running.zero_()
    parts, leaves = parts_of(results)
    x, same, fresh = answer(unit, parts, leaves, ((0, given, context), {}))
    assert same is context and isinstance(fresh, Told) and fresh is not context
    assert (COUNT, len(LOG), unit.total, context.depth, given[0]) == (1, 1, 1, 1, 7)
    assert [float(t.sum()) for t in (x, unit.last, given[1], context.losses[0], unit.running)] == [2, 4, 6, 8, 2]
    assert unit.noted()[0] is x
    before.restore()


class Losses(list):  # type: ignore[type-arg]
    pass


class Several(tuple):  # type: ignore[type-arg]
    pass


class Kept(UserList):  # type: ignore[type-arg]
    pass


class Latest(deque):  # type: ignore[type-arg]
    pass


class Returns(nn.Module):
    """Returns, or leaves in an attribute, a loss in a collection."""

    def __init__(self, kind: Any, is_left: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind, self.is_left = kind, is_left

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        losses = self.kind([x.square().mean()])
        losses.names = "square"
        if self.is_left:
            self.losses = losses
        return x if self.is_left else (x, losses)


class Sums(nn.Module):
    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Returns(*arguments) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        total = torch.zeros(())
        for layer in self.layers:
            x, losses = (layer(x), layer.losses) if layer.is_left else layer(x)
            assert type(losses) is layer.kind and losses.names == "square"
            total = total + sum(losses)
        return {"loss": x.mean() + total}


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("kind", [Losses, Several, Kept])
def test_the_items_of_a_user_s_collection_are_values(kind: Any, is_left: bool) -> None:
    """An instance of a list's or tuple's subclass was empty on other stages: a sum of auxiliary losses was 0."""
    flow = trace(Sums(kind, is_left), torch.zeros(2, 4))
    assert flow.loss is not None and not flow.loss.hidden
    assert {value.call for value in flow.loss.values} == {0, 1, 2}


class Config(MutableMapping):  # type: ignore[type-arg]
    """A mapping of which some entries cannot be read, like those of omegaconf."""

    def __init__(self) -> None:
        self.content = {"width": 2, "folder": "???"}

    def __getitem__(self, key: str) -> Any:
        if self.content[key] == "???":
            raise RuntimeError(f"missing value: {key}")
        return self.content[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.content[key] = value

    def __delitem__(self, key: str) -> None:
        del self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


class Appends(nn.Module):
    def __init__(self, losses: Any) -> None:
        super().__init__()
        self.losses, self.config = losses, Config()

    def forward(self, x: Tensor) -> Tensor:
        self.losses.append(x * self.config["width"])
        self.config["width"] += 1
        return x


@pytest.mark.parametrize("kind", [list, Losses, UserList, Kept, Latest])
def test_entries_of_a_collection_that_is_written_in_python_are_left_once(kind: Any) -> None:
    """The entries and the attribute with these entries were places, so that an entry was appended twice; a mapping
    with an entry that cannot be read ended `boost`."""
    unit, x = Appends(kind([7])), torch.ones(2)
    before = Snapshot({UNIT: unit, ARGUMENTS: ((x,), {})})
    parts, leaves = parts_of(visited(unit, x))
    before.restore()
    assert list(unit.losses) == [7] and unit.config["width"] == 2
    answer(unit, parts, leaves, ((x,), {}))
    assert [float(torch.as_tensor(loss).sum()) for loss in unit.losses] == [7.0, 4.0] and unit.config["width"] == 3


def test_a_collection_that_is_no_node_is_hidden() -> None:
    """A deque's maximum length is no attribute."""
    flow = trace(Sums(Latest, False), torch.zeros(2, 4))
    assert flow.loss is not None and flow.loss.hidden == {0, 1, 2}


def test_a_hook_that_changes_a_result_is_refused() -> None:
    unit = Unit()
    unit.inner.register_forward_hook(lambda module, args, result: result + 1)
    parts = [Part(RESULT, tree_flatten(1)[1]), Part(Source("inner"), tree_flatten(2)[1])]
    with pytest.raises(TraceError, match="the forward hook on inner"):
        answer(unit, parts, [1, 2], ((), {}))


@pytest.mark.turns
def test_shared_keys_and_values_are_values_of_the_layer_that_made_them() -> None:
    entry = find("causal-lm/gemma3n_text")[0]
    model = build(entry)
    flow = trace(model, batch(entry, model))
    assert flow.loss is not None and not any(call.reads.hidden for call in flow.calls)
    aside = {value for call in flow.calls for value in call.reads.values if flow.is_aside(value)}
    readers = {call.unit for call in flow.calls if call.reads.values & aside}
    assert aside and aside <= flow.receiving
    assert readers and all("layers" in unit for unit in readers)
