"""Values leave a unit by its result, by hooks inside it, and by mappings it fills."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from pipeshard.errors import TraceError
from pipeshard.model.exits import RESULT, Exits, Part, Source, answer, listened
from pipeshard.model.trace import trace
from tests.parity.build import batch, build
from tests.parity.entries import find


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor, shelf: Any) -> tuple[Tensor, None]:
        shelf["keys"] = (x + 1, x + 2)
        return self.inner(self.inner(x)), None


def test_a_run_collects_all_that_leaves_a_unit() -> None:
    unit, heard = Unit(), []
    unit.inner.register_forward_hook(lambda module, args, result: heard.append(result))
    x, shelf = torch.ones(1, 2), UserDict(old=torch.zeros(1))
    assert listened(unit) == ["inner"]
    with Exits(unit, ["inner"]) as exits:
        results = exits.run(unit, (x, shelf), {})
    assert [source for source, _ in results] == [RESULT, Source("inner", 0), Source("inner", 1), Source(argument=1)]
    assert results[1][1] is heard[0] and results[2][1] is heard[1]
    assert results[3][1].keys() == {"keys"}
    assert len(unit.inner._forward_hooks) == 1


def test_a_silent_run_leaves_hooks_unheard_and_in_place() -> None:
    unit, heard = Unit(), []
    unit.inner.register_forward_hook(lambda module, args, result: heard.append(result))
    with Exits(unit, ["inner"], silent=True) as exits:
        assert len(exits.run(unit, (torch.ones(1, 2), {}), {})) == 3  # a plain dict is no leaf: it came apart
    assert not heard and len(unit.inner._forward_hooks) == 1


def test_an_answer_tells_hooks_and_fills_mappings() -> None:
    unit, heard = Unit(), []
    unit.inner.register_forward_hook(lambda module, args, result: heard.append(result))
    unit.inner.register_forward_hook(lambda m, args, kwargs, result: heard.append(kwargs), with_kwargs=True)
    contents = [("result", None), 7, {"keys": (1, 2)}]
    sources = [RESULT, Source("inner"), Source(argument=1)]
    parts = [Part(source, tree_flatten(content)[1]) for source, content in zip(sources, contents)]
    leaves = [leaf for content in contents for leaf in tree_flatten(content)[0]]
    shelf: Any = UserDict()
    assert answer(unit, parts, leaves, ((0, shelf), {})) == ("result", None)
    assert heard == [7, {}] and shelf == {"keys": (1, 2)}


def test_a_hook_that_changes_a_result_is_refused() -> None:
    unit = Unit()
    unit.inner.register_forward_hook(lambda module, args, result: result + 1)
    parts = [Part(RESULT, tree_flatten(1)[1]), Part(Source("inner"), tree_flatten(2)[1])]
    with pytest.raises(TraceError, match="a forward hook on inner"):
        answer(unit, parts, [1, 2], ((), {}))


def test_shared_keys_and_values_are_values_of_the_layer_that_made_them() -> None:
    entry = find("causal-lm/gemma3n_text")[0]
    model = build(entry)
    flow = trace(model, batch(entry, model))
    assert flow.loss is not None and not any(call.reads.hidden for call in flow.calls)
    aside = {value for call in flow.calls for value in call.reads.values if flow.is_aside(value)}
    readers = {call.unit for call in flow.calls if call.reads.values & aside}
    assert aside and aside <= flow.receiving
    assert readers and all("layers" in unit for unit in readers)
