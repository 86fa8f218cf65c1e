"""Tests of the taint: it tracks every read of a tensor by glue: by operators, in Python, or into another tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import pack_padded_sequence

from pipeshard.graph import taint
from pipeshard.graph.call_stack import where
from pipeshard.graph.indices import Checking, check_indices
from pipeshard.graph.storage import storage_of
from pipeshard.graph.taint import Input, Kept, Taint, Used, Value
from pipeshard.graph.tracer import Reading

A, B = Value(0, 0), Value(1, 0)
READINGS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "item": lambda x, i: x[0].item(),
    "bool": lambda x, i: bool((x > 1).any()),
    "if": lambda x, i: 1 if x.sum() > 0 else 2,
    "tolist": lambda x, i: x.tolist(),
    "numpy": lambda x, i: x.detach().numpy(),
    "asarray": lambda x, i: np.asarray(x),
    "in": lambda x, i: 2 in i,
    "format": lambda x, i: f"{x[0]}",
    "slice": lambda x, i: torch.zeros(3)[: i[1]],
    "size": lambda x, i: torch.zeros(i[2]),
    "arange": lambda x, i: torch.arange(i[2]),
    "tensor of a list": lambda x, i: torch.tensor([x[0], x[1]]),
    "tensor of a nested list": lambda x, i: torch.tensor([list(x)]),
    "new_tensor": lambda x, i: torch.zeros(1).new_tensor([x[0]]),
    "index of lists": lambda x, i: torch.zeros(3, 3)[[i[0], i[1]], [i[1], i[2]]],
    "assignment at lists": lambda x, i: torch.zeros(3, 3).__setitem__(([i[0]], [i[1]]), 1.0),
    "boolean index": lambda x, i: torch.zeros(3)[x > 1],
    "boolean assignment": lambda x, i: torch.zeros(3).__setitem__(i.nonzero(), 1.0),
    "masked_select": lambda x, i: torch.zeros(3).masked_select(x > 1),
    "nonzero": lambda x, i: i.nonzero(),
    "unique": lambda x, i: i.unique(),
    "bincount": lambda x, i: i.bincount(),
    "repeat_interleave": lambda x, i: torch.zeros(3).repeat_interleave(i),
    "pack_padded_sequence": lambda x, i: pack_padded_sequence(torch.zeros(3, 3), i + 1, enforce_sorted=False),
    "tensor_split": lambda x, i: torch.zeros(3).tensor_split(i),
    "tensor_split by name": lambda x, i: torch.tensor_split(torch.zeros(3), tensor_indices_or_sections=i),
    "tensor_split in so many": lambda x, i: torch.zeros(3).tensor_split(i[1]),
    "one_hot": lambda x, i: torch.nn.functional.one_hot(i),
}


def watched(run: Callable[[Tensor, Tensor], Any], **tags: Any) -> tuple[Taint, Any]:
    x, i = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 2])
    taint = Taint(torch.device("cpu"))
    taint.mark(x, frozenset({tags.get("x", A)}))
    taint.mark(i, frozenset({tags.get("i", B)}))
    with taint, Reading(taint):
        result = run(x, i)
    return taint, result


@pytest.mark.parametrize("name", READINGS)
def test_python_reading_a_value_is_a_decision(name: str) -> None:
    taint, _ = watched(READINGS[name])
    assert len(taint.decisions) == 1 and __file__ in next(iter(taint.decisions)).line
    assert not taint.consulted


@pytest.mark.parametrize("name", READINGS)
def test_python_reading_an_input_is_none(name: str) -> None:
    taint, _ = watched(READINGS[name], x=Input("pixels"), i=Input("ids"))
    assert not taint.decisions and taint.consulted in ({"pixels"}, {"ids"})


def test_inputs_that_make_shapes_are_told_from_those_that_python_sees() -> None:
    inputs = {"x": Input("pixels"), "i": Input("ids")}
    assert watched(lambda x, i: bool(x.all()), **inputs)[0].shaping == set()
    assert watched(lambda x, i: torch.zeros(3)[i > 1], **inputs)[0].shaping == {"ids"}
    assert watched(lambda x, i: torch.zeros(4, 4)[[i[0]], [i[1]]], **inputs)[0].shaping == {"ids"}
    for name in ("pack_padded_sequence", "tensor_split", "tensor_split by name"):
        assert watched(READINGS[name], **inputs)[0].shaping == {"ids"}, name


def test_a_mask_of_an_input_may_select_from_a_value() -> None:
    taint, _ = watched(lambda x, i: x[i > 1], i=Input("ids"))
    assert not taint.decisions and taint.shaping == {"ids"}


def test_tags_go_with_values_and_not_with_shapes() -> None:
    expected = {
        A: [lambda x, i: x.data + 1, lambda x, i: torch.stack([x[0], x[1]]), lambda x, i: torch.zeros(3) * x[0]],
        B: [lambda x, i: i.argsort(), lambda x, i: torch.zeros(3).scatter_(0, i, 1.0), lambda x, i: i.clone()],
    }
    for tag, runs in expected.items():
        for run in runs:
            taint, result = watched(run)
            assert taint.of([result]) == {tag} and not taint.decisions
    for run in (torch.zeros_like, torch.rand_like, lambda x: x.new_zeros(2), lambda x: torch.zeros(x.shape)):
        taint, result = watched(lambda x, i, run=run: run(x))
        assert not taint.of([result])


def test_tags_of_different_kinds_differ() -> None:
    of_names = [Used("x"), Input("x"), Kept("x")]
    assert len({*of_names}) == len(of_names)


def test_addresses_are_kept_and_no_memory() -> None:
    """Every stand-in of a trace was alive until its end: on a GPU, all activations of a model at once."""
    taint, seen = Taint(torch.device("cpu")), set()
    for _ in range(50):
        tensor = torch.zeros(8)
        memory = StorageWeakRef(tensor.untyped_storage())
        taint.mark(tensor, frozenset({A}))
        seen.add(storage_of(tensor))
        del tensor
        assert memory.expired()
    assert len(seen) == 50


@pytest.mark.parametrize(
    ("module", "file", "is_model"),
    [
        ("torchvision.ops._utils", "/site-packages/torchvision/ops/_utils.py", True),
        ("contextlib", contextlib.__file__, False),
        ("torch.nn.functional", torch.nn.functional.__file__, False),
        ("pipeshard.graph.taint", taint.__file__, False),
        ("model", "<string>", False),
    ],
)
def test_a_line_of_the_model_is_neither_python_s_nor_torch_s(module: str, file: str, is_model: bool) -> None:
    """A decision of torchvision's FCOS was said to be contextlib's: torchvision's folder begins as torch's does."""
    names: dict[str, Any] = {"__name__": module, "where": where}
    exec(compile("line = where()", file, "exec"), names)
    file, number, _ = names["line"].split(":", 2)
    assert (file == "torchvision/ops/_utils.py" and number == "1") if is_model else file == __file__


def test_what_is_only_tried_is_checked_operator_by_operator() -> None:
    """A trial of the loss of gemma4 draws random token ids, of which some stand for images that are not there."""
    seen: list[Any] = []
    note = mock.patch("pipeshard.graph.indices.check_indices", lambda func, *rest: seen.append(func._overloadpacket))
    with note, Checking():
        torch.nn.functional.embedding(torch.tensor([1]), torch.eye(2))[0].sum()
    assert torch.ops.aten.embedding in seen and torch.ops.aten.sum in seen


def test_a_wrong_index_is_found_before_a_gpu_s_kernel_meets_it() -> None:
    """Traces with other lengths than the batch's failed inside fuyu, an error on a CPU; on a GPU an
    assertion of the kernel, after which the process could not compute there any more."""
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    mask, source = torch.tensor([True, True]), torch.ones(1)
    with pytest.raises(RuntimeError, match="elements of source"):
        check_indices(torch.ops.aten.masked_scatter.default, (torch.zeros(2), mask, source), {}, [on_gpu])
    check_indices(torch.ops.aten.masked_scatter.default, (torch.zeros(2), mask.to("meta"), source), {}, [on_gpu])
    check_indices(torch.ops.aten.add.Tensor, (on_gpu, on_gpu), {}, [on_gpu])


def test_a_value_that_is_no_probability_is_found_before_a_gpu_s_kernel_meets_it() -> None:
    """The trial of a BCELoss first drew normally distributed values: on a CPU an error, after which it drew
    probabilities; on a GPU an assertion of the kernel, and the first step ended every rank."""
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    entropy, margin = torch.ops.aten.binary_cross_entropy.default, torch.ops.aten.multi_margin_loss.default
    drawn, target = torch.tensor([0.5, 4.0]), torch.tensor([0.0, 1.0])
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        check_indices(entropy, (drawn, target), {}, [on_gpu])
    check_indices(entropy, (drawn.sigmoid(), target), {}, [on_gpu])
    check_indices(entropy, (drawn.to("meta"), target.to("meta")), {}, [on_gpu])
    with pytest.raises(RuntimeError, match="out of range"):
        check_indices(margin, (drawn[None], torch.tensor([2])), {}, [on_gpu])
